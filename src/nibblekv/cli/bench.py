"""`nibblekv bench`: time attention, generation with each format, and serving with vLLM."""

from __future__ import annotations

from typing import Annotated

import typer

from nibblekv import benchmarking, benchmarking_cuda
from nibblekv.benchmarking_serve import bench_serve
from nibblekv.cli.common import (
    FORMATS_HELP,
    HELP_SETTINGS,
    Columns,
    JsonOption,
    ModelOption,
    format_bytes,
    parse_dtype,
    parse_object,
    print_table,
    progress_bar,
    split_list,
    user_errors,
    write_json,
)
from nibblekv.evaluation import TEXTS, load_text, text_windows
from nibblekv.formats import FORMATS, get_format
from nibblekv.generation import DEFAULT_ROUNDS, bench_generate
from nibblekv.models import DEMO_MODELS, fetch_demo_model, load_model

app = typer.Typer(help="Time attention, generation with each format, and serving with vLLM.", context_settings=HELP_SETTINGS)

ATTENTION_COLUMNS: Columns = {
    "op": ("operation", str),
    "shape": ("shape", str),
    "format": ("format", str),
    "backend": ("backend", str),
    "baseline": ("baseline", str),
    "time_us": ("us", "{:,.1f}".format),
    "baseline_us": ("baseline us", "{:,.1f}".format),
    "ratio": ("times faster", "{:.2f}".format),
}
CUDA_COLUMNS: Columns = {
    "op": ("operation", str),
    "shape": ("shape", str),
    "format": ("format", str),
    "time_us": ("us", "{:,.1f}".format),
    "roof_us": ("roof us", "{:,.1f}".format),
    "pct_roof": ("% of roof", "{:.0f}".format),
    "gbps": ("GB/s", "{:,.0f}".format),
    "fa3_us": ("FlashAttention 3 us", "{:,.1f}".format),
    "vllm_int4_us": ("vLLM int4 us", "{:,.1f}".format),
    "rel_err": ("error", "{:.1e}".format),
    "ratio": ("times faster than FA3", "{:.2f}".format),
}
GENERATE_COLUMNS: Columns = {
    "format": ("format", str),
    "context": ("context", "{:,}".format),
    "prefill_s": ("prefill s", "{:.2f}".format),
    "time_per_token_ms": ("ms/token", "{:.1f}".format),
    "tokens_per_second": ("tokens/s", "{:.1f}".format),
    "cache_bytes": ("cache", format_bytes),
    "bytes_per_token": ("bytes/token", "{:,.0f}".format),
    "speed_ratio": ("times faster", "{:.2f}".format),
    "memory_ratio": ("times smaller", "{:.2f}".format),
}

SERVE_COLUMNS: Columns = {
    "contender": ("cache", str),
    "requests": ("requests", "{:,}".format),
    "cache_tokens": ("cache tokens", "{:,}".format),
    "prefill_tok_s": ("prefill tok/s", "{:,.0f}".format),
    "decode_tok_s": ("decode tok/s", "{:,.0f}".format),
    "total_tok_s": ("total tok/s", "{:,.0f}".format),
    "ttft_ms": ("first token ms", "{:,.0f}".format),
}


@app.command("attention")
@user_errors
def attention(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    formats: Annotated[str, typer.Option("--formats", "-f", help=f"Comma-separated: {', '.join(FORMATS)}.")] = "int4",
    json_file: JsonOption = None,
) -> None:
    """Time attention and writes on packed pages against torch's own attention, in one process."""
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {device!r}")
    names = [get_format(name).name for name in split_list(formats)]
    with progress_bar() as progress:
        bench = benchmarking.bench_attention_cpu if device == "cpu" else benchmarking_cuda.bench_attention_cuda
        rows = bench(names, progress=lambda line: progress(line, 0, 0))
    print_table(f"attention on {device}", rows, ATTENTION_COLUMNS if device == "cpu" else CUDA_COLUMNS)
    write_json(json_file, rows)


@app.command("generate")
@user_errors
def generate(
    model: ModelOption = "smollm2",
    formats: Annotated[str, typer.Option("--formats", "-f", help=FORMATS_HELP)] = "none,int4",
    context: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 4096,
    new_tokens: Annotated[int, typer.Option(help="Tokens of a turn.")] = 16,
    rounds: Annotated[int, typer.Option(help="Turns of each format that are counted.")] = DEFAULT_ROUNDS,
    dtype: Annotated[str, typer.Option(help="Of the model: auto, float32, bfloat16 or float16.")] = "auto",
    json_file: JsonOption = None,
) -> None:
    """Time decoding through `generate` and measure the caches; the formats take turns in one process."""
    names, torch_dtype = split_list(formats), parse_dtype(dtype)
    with progress_bar() as progress:
        loaded, tokenizer = load_model(model, torch_dtype, progress)
        prompt = text_windows(tokenizer, [load_text(TEXTS[0])], 1, context)
        rows = bench_generate(
            loaded, prompt, names, model_name=model, new_tokens=new_tokens, rounds=rounds, progress=progress
        )
    print_table(f"{model}, {loaded.dtype}, greedy decoding after {context:,} tokens", rows, GENERATE_COLUMNS)
    write_json(json_file, rows)


@app.command("serve")
@user_errors
def serve(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="A demo model or a folder; default: random weights, Llama-3.1-8B's shape."),
    ] = None,
    requests: Annotated[int, typer.Option(help="Prompts served together; 0: as many as each pool holds.")] = 32,
    context: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 8000,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 128,
    engine: Annotated[str, typer.Option(help="Further arguments of vllm.LLM, as JSON.")] = "{}",
    json_file: JsonOption = None,
) -> None:
    """Serve the same load with vLLM's 16-bit cache, its int4 cache and ours, one engine after the other."""
    folder = str(fetch_demo_model(model)) if model in DEMO_MODELS else model
    with progress_bar() as progress:
        rows = bench_serve(
            folder,
            requests=requests or None,
            context=context,
            new_tokens=new_tokens,
            engine=parse_object("engine", engine),
            progress=progress,
        )
    print_table("vLLM", [row for row in rows if "error" not in row], SERVE_COLUMNS)
    for row in rows:
        if "error" in row:
            typer.echo(f"{row['contender']} failed: {row['error']}", err=True)
    write_json(json_file, rows)
