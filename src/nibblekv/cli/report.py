"""`nibblekv report`: a page with plots of what each format costs a model."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from nibblekv.cli.common import (
    FORMATS_HELP,
    DeviceOption,
    console,
    errors,
    parse_dtype,
    progress_bar,
    split_list,
    write_json,
)
from nibblekv.models import DEMO_MODELS, load_model
from nibblekv.peers import check_format
from nibblekv.report import DEFAULT_FORMATS, Progress, Sizes, measure
from nibblekv.report_page import RECORD, render, require_matplotlib

DEFAULTS = Sizes()


def report(
    model: Annotated[
        str | None,
        typer.Argument(
            help=f"One of {', '.join(DEMO_MODELS)}, a model folder, a .gguf file or a hub name.", show_default=False
        ),
    ] = None,
    from_file: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help=f"Draw the page of a {RECORD} anew; nothing is measured.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="For the page. Default: report-MODEL, or the folder of --from.", show_default=False
        ),
    ] = None,
    formats: Annotated[str, typer.Option("--formats", "-f", help=FORMATS_HELP)] = ",".join(DEFAULT_FORMATS),
    windows: Annotated[int, typer.Option(help="Windows of text, shared among the texts.")] = DEFAULTS.windows,
    window: Annotated[int, typer.Option(help="Tokens of a window.")] = DEFAULTS.window,
    copies: Annotated[int, typer.Option(help="Windows of the copy task.")] = DEFAULTS.copies,
    contexts: Annotated[
        str, typer.Option(help="Tokens of the needle tasks; those beyond the model's limit are left out.")
    ] = (",".join(map(str, DEFAULTS.contexts))),
    needles: Annotated[int, typer.Option(help="Needles in one context.")] = DEFAULTS.needles,
    sheets: Annotated[int, typer.Option(help="Texts of each context, at most; long ones have fewer.")] = DEFAULTS.sheets,
    question_orders: Annotated[int, typer.Option(help="Orders of the question set.")] = DEFAULTS.question_orders,
    prompts: Annotated[int, typer.Option(help="Texts to continue.")] = DEFAULTS.prompts,
    prompt: Annotated[int, typer.Option(help="Tokens of a text to continue.")] = DEFAULTS.prompt,
    new_tokens: Annotated[int, typer.Option(help="Tokens of a continuation.")] = DEFAULTS.new_tokens,
    dtype: Annotated[str, typer.Option(help="Of the model: float32, bfloat16, float16 or auto.")] = "float32",
    device: DeviceOption = "cpu",
) -> None:
    """Measure every format on texts, copying, needles, questions and continuations; write a page with plots.

    The figures are kept as JSON beside the page.
    """
    if (model is None) == (from_file is None):
        raise ValueError("report: expected a MODEL or --from FILE, and not both")
    require_matplotlib()
    if from_file is not None:
        folder, record_file = out or from_file.parent, from_file
    else:
        assert model is not None
        sizes = Sizes(
            windows=windows, window=window, copies=copies, contexts=_contexts(contexts), needles=needles, sheets=sheets,
            question_orders=question_orders, prompts=prompts, prompt=prompt, new_tokens=new_tokens,
        )  # fmt: skip
        names, torch_dtype = split_list(formats), parse_dtype(dtype)
        for name in names:
            check_format(name)
        folder = out or Path(f"report-{Path(model).stem}")
        record_file = folder / RECORD
        with progress_bar() as bar:
            loaded, tokenizer = load_model(model, torch_dtype, bar, device)
            measure(
                loaded, tokenizer, names, sizes, model_name=model, progress=_also_in_logs(bar),
                save=lambda found: write_json(record_file, **found),
            )  # fmt: skip
    try:
        record: Any = json.loads(record_file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"--from: expected the JSON of `nibblekv report`, got {record_file}: {error}") from error
    for path in render(record, folder):
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)


def _contexts(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in split_list(text)}))
    except ValueError as error:
        raise ValueError(f"contexts: expected numbers of tokens such as 1024,8192, got {text!r}") from error


def _also_in_logs(bar: Progress) -> Progress:
    """Return a progress function that prints a line for every stage where there is no terminal to draw a bar in."""
    begin, last = time.perf_counter(), ""

    def update(stage: str, done: int, total: int) -> None:
        nonlocal last
        bar(stage, done, total)
        if not errors.is_terminal and stage != last:
            last = stage
            line = f"{time.perf_counter() - begin:6.0f} s  {stage}  {done} of {total}"
            errors.print(line, markup=False, highlight=False)

    return update
