"""`nibblekv bench`: time attention, generation with each format, and serving with vLLM."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from nibblekv import benchmarking, benchmarking_cuda
from nibblekv.benchmarking_serve import CONTENDERS, QUALITY_CONTENDERS, bench_quality, bench_serve
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
from nibblekv.plan import split_window

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
ATTENTION_FORMATS_HELP = f"Comma-separated: {', '.join(FORMATS)}; int4+w32s4 (window, sinks) too."
CUDA_COLUMNS: Columns = {
    "op": ("operation", str),
    "shape": ("shape", str),
    "format": ("format", str),
    "dtype": ("queries", str),
    "query_scale": ("times", "{:g}".format),
    "time_us": ("us", "{:,.1f}".format),
    "roof_us": ("roof us", "{:,.1f}".format),
    "ratio_to_roof": ("of roof", "{:.0%}".format),
    "gbps": ("GB/s", "{:,.0f}".format),
    "fa3_us": ("FA3 us", "{:,.1f}".format),
    "vllm_int4_us": ("vLLM int4 us", "{:,.0f}".format),
    "vllm_int8_us": ("vLLM int8 us", "{:,.0f}".format),
    "rel_err": ("error", "{:.1e}".format),
    "out_err": ("in its dtype", "{:.1e}".format),
    "kernels": ("launches", str),
    "host_us": ("host us", "{:,.0f}".format),
    "ratio_to_fa3": ("times faster than FA3", "{:.2f}".format),
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
    "output_tok_s": ("new tok/s", "{:,.0f}".format),
    "ttft_ms": ("first token ms", "{:,.0f}".format),
    "attention": ("attention", lambda path: str(path).rpartition(".")[2]),
}
QUALITY_COLUMNS: Columns = {
    "contender": ("cache", str),
    "tokens": ("tokens", "{:,}".format),
    "perplexity": ("perplexity", "{:.3f}".format),
    "kl_mean": ("KL mean", "{:.5f}".format),
    "kl_median": ("KL median", "{:.5f}".format),
    "kl_p99": ("KL p99", "{:.4f}".format),
    "top1": ("same top token", "{:.2%}".format),
    "attention": ("attention", lambda path: str(path).rpartition(".")[2]),
}


@app.command("attention")
@user_errors
def attention(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    formats: Annotated[str, typer.Option("--formats", "-f", help=ATTENTION_FORMATS_HELP)] = "int4",
    shapes: Annotated[
        str, typer.Option(metavar="REGEX", help="cuda: only rows whose operation and shape match, such as 'decode 32 x'.")
    ] = "",
    resume: Annotated[
        bool, typer.Option("--resume", help="cuda: keep the rows that the JSON file has, run the others.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="cuda: draw times, FlashAttention 3 and the roof (needs matplotlib).")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Time attention and writes on packed pages, in one process.

    On a CPU beside torch's own attention; on a CUDA GPU beside FlashAttention 3 and vLLM's kernels, where vLLM is installed,
    and the roof of the bytes moved.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {device!r}")
    if device == "cpu" and (shapes or resume or plot):
        raise ValueError("shapes, resume, plot: expected only with --device cuda")
    names = split_list(formats)
    for name in names:
        get_format(split_window(name)[0])
    with progress_bar() as progress:
        if device == "cpu":
            rows = benchmarking.bench_attention_cpu(names, progress=lambda line: progress(line, 0, 0))
        else:
            chosen = [shape for shape in benchmarking_cuda.SHAPES if re.search(shapes, f"{shape.op} {shape.name}")]
            if not chosen:
                every = "; ".join(f"{shape.op} {shape.name}" for shape in benchmarking_cuda.SHAPES)
                raise ValueError(f"shapes: expected a pattern that matches one of {every}; got {shapes!r}")
            for sentence in benchmarking_cuda.missing_rivals():
                typer.echo(sentence, err=True)
            done = json.loads(json_file.read_text())["rows"] if resume and json_file and json_file.exists() else []
            rows = benchmarking_cuda.bench_attention_cuda(
                names, shapes=chosen, done=done, progress=lambda line: progress(line, 0, 0),
                save=lambda rows: write_json(json_file, rows),
            )  # fmt: skip
    print_table(f"attention on {device}", rows, ATTENTION_COLUMNS if device == "cpu" else CUDA_COLUMNS)
    write_json(json_file, rows)
    if plot is not None:
        benchmarking_cuda.plot_attention(rows, plot)


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
    quality: Annotated[
        bool, typer.Option("--quality", help="Compare what is served with the 16-bit cache instead.")
    ] = False,
    windows: Annotated[int, typer.Option(help="Windows of 1,024 tokens of text, with --quality.")] = 9,
    contenders: Annotated[str, typer.Option(help="Some of the caches that the table names, separated by ';'.")] = "",
    engine: Annotated[str, typer.Option(help="Further arguments of vllm.LLM, as JSON.")] = "{}",
    json_file: JsonOption = None,
) -> None:
    """Serve the same load with vLLM's 16-bit cache, its int4 cache and ours, one engine after the other.

    With --quality: decode text and print how far each cache's predictions are from those of the 16-bit cache.
    """
    folder = str(fetch_demo_model(model)) if model in DEMO_MODELS else model
    if quality and folder is None:
        raise ValueError("--model: expected a model with weights for --quality, got none")
    names = tuple(name.strip() for name in contenders.split(";")) if contenders else None
    with progress_bar() as progress:
        common: dict[str, Any] = {
            "engine": parse_object("engine", engine), "progress": progress, "done": lambda rows: write_json(json_file, rows)
        }  # fmt: skip
        if quality and folder is not None:
            _, tokenizer = load_model(folder)
            tokens = text_windows(tokenizer, [load_text(name) for name in TEXTS], windows).tolist()
            rows = bench_quality(folder, tokens, contenders=names or tuple(QUALITY_CONTENDERS), **common)
        else:
            rows = bench_serve(
                folder,
                requests=requests or None,
                context=context,
                new_tokens=new_tokens,
                contenders=names or tuple(CONTENDERS),
                **common,
            )
    print_table("vLLM", [row for row in rows if "error" not in row], QUALITY_COLUMNS if quality else SERVE_COLUMNS)
    for row in rows:
        if "error" in row:
            typer.echo(f"{row['contender']} failed: {row['error']}", err=True)
