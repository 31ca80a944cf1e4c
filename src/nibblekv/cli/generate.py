"""`nibblekv generate`: one prompt, several formats, side by side."""

from __future__ import annotations

from typing import Annotated

import typer

from nibblekv import generation
from nibblekv.cli.common import (
    FORMATS_HELP,
    Columns,
    DeviceOption,
    JsonOption,
    ModelOption,
    console,
    format_bytes,
    parse_dtype,
    print_table,
    progress_bar,
    split_list,
    write_json,
)
from nibblekv.models import load_model

COLUMNS: Columns = {
    "format": ("format", str),
    "prompt_tokens": ("prompt", "{:,}".format),
    "new_tokens": ("new tokens", "{:,}".format),
    "tokens_per_second": ("tokens/s", "{:.1f}".format),
    "cache_bytes": ("cache", format_bytes),
}


def generate(
    prompt: Annotated[str, typer.Argument(help="What to continue or to answer.")],
    model: ModelOption = "smollm2",
    formats: Annotated[str, typer.Option("--formats", "-f", help=FORMATS_HELP)] = "none,int4",
    new_tokens: Annotated[int, typer.Option(help="At most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    chat: Annotated[bool, typer.Option(help="Wrap the prompt in the model's chat template, if it has one.")] = True,
    dtype: Annotated[str, typer.Option(help="Of the model: auto, float32, bfloat16 or float16.")] = "auto",
    device: DeviceOption = "cpu",
    json_file: JsonOption = None,
) -> None:
    """Generate with each format from the same prompt."""
    names, torch_dtype = split_list(formats), parse_dtype(dtype)
    with progress_bar() as progress:
        loaded, tokenizer = load_model(model, torch_dtype, progress, device)
        rows = generation.generate_side_by_side(
            loaded, tokenizer, prompt, names, new_tokens=new_tokens, temperature=temperature, seed=seed, chat=chat,
            progress=progress,
        )  # fmt: skip
    print_texts(rows)
    print_table(f"{model}, {loaded.dtype}", rows, COLUMNS)
    write_json(json_file, rows, model=model, prompt=prompt)


def print_texts(rows: list[dict[str, object]]) -> None:
    """Print the generated texts under their formats' names."""
    for row in rows:
        if "text" in row:
            console.rule(str(row["format"]), align="left")
            console.print(str(row["text"]), markup=False, highlight=False)
