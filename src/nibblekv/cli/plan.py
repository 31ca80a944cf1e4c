"""`nibblekv plan`: how many tokens fit."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from nibblekv.cli.common import (
    OWN_FORMATS_HELP,
    Columns,
    JsonOption,
    format_bytes,
    parse_bytes,
    print_table,
    progress_bar,
    split_list,
    write_json,
)
from nibblekv.models import load_config
from nibblekv.plan import DEFAULT_BLOCK_SIZE, AttentionLayer, attention_layers, plan_rows

COLUMNS: Columns = {
    "format": ("format", str),
    "bits_per_value": ("bits/value", "{:.3f}".format),
    "bytes_per_token": ("bytes/token", "{:,}".format),
    "ratio_to_16_bit": ("smaller than 16 bit", "{:.2f}x".format),
    "tokens": ("tokens of one sequence", "{:,}".format),
    "bytes_per_sequence": ("bytes at context", format_bytes),
    "sequences": ("sequences at context", "{:,}".format),
}


def plan(
    memory: Annotated[str, typer.Option(help="For the cache alone, such as 24GiB.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A model as elsewhere; only its config is read.")
    ] = None,
    formats: Annotated[str, typer.Option("--formats", "-f", help=OWN_FORMATS_HELP)] = "none,int4",
    context: Annotated[int, typer.Option(help="Tokens of one sequence.")] = 8192,
    block_size: Annotated[int, typer.Option(help="Tokens of a page.")] = DEFAULT_BLOCK_SIZE,
    layers: Annotated[int, typer.Option(help="Without --model: layers.")] = 0,
    kv_heads: Annotated[int, typer.Option(help="Without --model: KV heads of a layer.")] = 0,
    head_size: Annotated[int, typer.Option(help="Without --model: values of a head.")] = 0,
    sliding_layers: Annotated[int, typer.Option(help="Without --model: how many of the layers slide.")] = 0,
    sliding_window: Annotated[int, typer.Option(help="Without --model: their window.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Count the tokens that fit into a memory, by format.

    Layers with a sliding window count with their window alone, as vLLM keeps them; attach keeps every token.
    """
    numbers: dict[str, Any] = {"layers": layers, "kv_heads": kv_heads, "head_size": head_size}
    if model is not None:
        if any(numbers.values()) or sliding_layers or sliding_window:
            raise ValueError("model: expected --model or explicit numbers, got both")
        with progress_bar() as progress:
            kept = attention_layers(load_config(model, progress))
    else:
        for name, value in numbers.items():
            if value < 1:
                raise ValueError(f"{name}: expected at least 1 without --model, got {value}")
        if not 0 <= sliding_layers <= layers or (sliding_layers > 0) != (sliding_window > 0):
            raise ValueError(
                f"sliding_layers: expected 0 to {layers}, with a sliding_window, got {sliding_layers} and {sliding_window}"
            )
        kept = [AttentionLayer(kv_heads, head_size, head_size)] * (layers - sliding_layers)
        kept += [AttentionLayer(kv_heads, head_size, head_size, sliding_window)] * sliding_layers
    rows = plan_rows(kept, split_list(formats), parse_bytes(memory), context, block_size)
    print_table(f"{model or 'the model'}: {memory} for the cache, context {context:,}", rows, COLUMNS)
    write_json(json_file, rows, model=model, memory=parse_bytes(memory), context=context)
