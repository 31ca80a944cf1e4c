"""`nibblekv demo`: the two-minute story, on a real model."""

from __future__ import annotations

import time
from typing import Annotated

import torch
import typer

from nibblekv import evaluation, generation
from nibblekv.cli import bench, evaluate
from nibblekv.cli import generate as generate_command
from nibblekv.cli.common import Columns, JsonOption, console, format_bytes, print_table, progress_bar, write_json
from nibblekv.models import DEMO_MODELS, load_model
from nibblekv.plan import attention_layers, plan_rows

PROMPT = "Explain in three sentences why the sky is blue."
FORMATS = ["none", "int4"]
LONG_CONTEXT = 8192
BENCH_CONTEXT = 2048
EVAL_WINDOWS, EVAL_WINDOW = 3, 512
MEMORY = 2**30

PLAN_COLUMNS: Columns = {
    "format": ("format", str),
    "bits_per_value": ("bits/value", "{:.3f}".format),
    "bytes_per_token": ("bytes/token", "{:,}".format),
    "ratio_to_16_bit": ("smaller than 16 bit", "{:.2f}x".format),
    "bytes_per_sequence": (f"cache at {LONG_CONTEXT:,} tokens", format_bytes),
    "tokens": ("tokens in 1 GiB", "{:,}".format),
}


def demo(
    prompt: Annotated[str, typer.Option(help="What to ask the model.")] = PROMPT,
    new_tokens: Annotated[int, typer.Option(help="Tokens of the answer.")] = 60,
    json_file: JsonOption = None,
) -> None:
    """Show a real model with a 16-bit and a 4-bit cache side by side: text, memory, speed, accuracy."""
    begin = time.perf_counter()
    record = DEMO_MODELS["smollm2"]
    console.print(f"{record.summary} ({record.license})", highlight=False)
    with progress_bar() as progress:
        model, tokenizer = load_model(record.name, torch.bfloat16, progress)
        texts = generation.generate_side_by_side(model, tokenizer, prompt, FORMATS, new_tokens=new_tokens, progress=progress)
    console.print(f"\nprompt: {prompt}", markup=False, highlight=False)
    generate_command.print_texts(texts)

    memory = plan_rows(attention_layers(model.config), FORMATS, MEMORY, LONG_CONTEXT)
    print_table("\nMemory", memory, PLAN_COLUMNS)

    with progress_bar() as progress:
        window = evaluation.text_windows(tokenizer, [evaluation.load_text("austen")], 1, BENCH_CONTEXT)
        speed = generation.bench_generate(
            model, window, FORMATS, model_name=record.name, new_tokens=8, rounds=3, progress=progress
        )
    print_table(f"\nSpeed after {BENCH_CONTEXT:,} tokens", speed, bench.GENERATE_COLUMNS)

    with progress_bar() as progress:
        contents = [evaluation.load_text(name) for name in evaluation.TEXTS]
        windows = evaluation.text_windows(tokenizer, contents, EVAL_WINDOWS, EVAL_WINDOW)
        accuracy = evaluation.evaluate(model.float(), FORMATS, windows, model_name=record.name, progress=progress)
    print_table(f"\nAccuracy on {EVAL_WINDOWS} windows of {EVAL_WINDOW} tokens", accuracy, evaluate.COLUMNS)
    console.print(
        f"\n{time.perf_counter() - begin:.0f} s. Next: nibblekv eval, nibblekv plan, nibblekv doctor, nibblekv bench."
    )
    rows = [
        text | plan | timing | measured for text, plan, timing, measured in zip(texts, memory, speed, accuracy, strict=True)
    ]
    write_json(json_file, rows, prompt=prompt, seconds=time.perf_counter() - begin)
