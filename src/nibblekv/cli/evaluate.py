"""`nibblekv eval`: what each format costs a model in accuracy."""

from __future__ import annotations

from typing import Annotated

import typer

from nibblekv import evaluation
from nibblekv.cli.common import (
    FORMATS_HELP,
    Columns,
    DeviceOption,
    JsonOption,
    ModelOption,
    console,
    parse_dtype,
    print_table,
    progress_bar,
    split_list,
    write_json,
)
from nibblekv.models import load_model
from nibblekv.peers import check_format

COLUMNS: Columns = {
    "format": ("format", str),
    "bits_per_value": ("bits/value", "{:.3f}".format),
    "perplexity": ("perplexity", "{:.3f}".format),
    "kl_mean": ("KL mean", "{:.5f}".format),
    "kl_median": ("median", "{:.5f}".format),
    "kl_p99": ("99 %", "{:.4f}".format),
    "kl_p999": ("99.9 %", "{:.4f}".format),
    "top1": ("top-1", "{:.2%}".format),
    "tokens": ("tokens", "{:,}".format),
    "copy_correct": ("copied right", "{:.1%}".format),
    "copy_kl": ("copy KL", "{:.4f}".format),
    "greedy_agreement": ("greedy same", "{:.1%}".format),
    "greedy_divergence": ("first differs at", "{:.1f}".format),
}


def evaluate_formats(
    model: ModelOption = "smollm2",
    formats: Annotated[str, typer.Option("--formats", "-f", help=FORMATS_HELP)] = (
        "none,int4,int4+w32s4,int4+w32s4+derived,int8_per_token_head"
    ),
    windows: Annotated[int, typer.Option(help="Windows of text, shared among the texts.")] = 9,
    window: Annotated[int, typer.Option(help="Tokens of a window.")] = 1024,
    text: Annotated[
        list[str] | None, typer.Option("--text", help=f"{', '.join(evaluation.TEXTS)} or a file; may be repeated.")
    ] = None,
    copy: Annotated[int, typer.Option(help="Windows of the copy task; 0 leaves it out.")] = 0,
    greedy: Annotated[int, typer.Option(help="Tokens to generate greedily per window; 0 leaves it out.")] = 0,
    dtype: Annotated[str, typer.Option(help="Of the model: float32, bfloat16, float16 or auto.")] = "float32",
    device: DeviceOption = "cpu",
    json_file: JsonOption = None,
) -> None:
    """Compare formats with the unquantized cache: perplexity, KL, top-1, copying, greedy text.

    Every key and value that attention reads is its stored, quantized version, the prompt's own included, but for those in a
    format's window and sinks (`int4+w32s4`). `+calib` behind takes the calibration that `nibblekv calibrate`
    saved, `+derived` the one that attach makes where none was.
    """
    names = split_list(formats)
    for name in names:
        check_format(name)
    torch_dtype = parse_dtype(dtype)
    if copy < 0 or greedy < 0:
        raise ValueError(f"copy, greedy: expected 0 or more, got {min(copy, greedy)}")
    sources = text or list(evaluation.TEXTS)
    contents = [evaluation.load_text(name) for name in sources]
    with progress_bar() as progress:
        loaded, tokenizer = load_model(model, torch_dtype, progress, device)
        rows = evaluation.evaluate(
            loaded,
            names,
            evaluation.text_windows(tokenizer, contents, windows, window),
            model_name=model,
            copy=evaluation.copy_windows(tokenizer, copy, window) if copy else None,
            new_tokens=greedy,
            progress=progress,
        )
    print_table(f"{model}, {windows} windows of {window:,} tokens, {dtype}", rows, COLUMNS)
    console.print(f"texts: {', '.join(sources)}", highlight=False)
    write_json(json_file, rows, texts=sources, windows=windows, window=window, dtype=dtype)
