"""Serving with vLLM: the same load for its 16-bit cache, its own 4-bit cache and ours, one engine process after the other.

    python -m nibblekv.benchmarking_serve --requests 32 --context 8000 --new-tokens 128 --json result.json
    python -m nibblekv.benchmarking_serve --quality --model MODEL --windows tokens.json --json result.json
    python -m nibblekv.benchmarking_serve --ranks 2 --json result.json

Weights are random in the shape of Llama-3.1-8B unless a model folder is named: throughput does not depend on their values.
The JSON file is written anew after every engine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nibblekv.machine import write_report

__all__ = [
    "CONTENDERS",
    "QUALITY_CONTENDERS",
    "Contender",
    "bench_quality",
    "bench_ranks",
    "bench_serve",
    "write_random_llama",
]

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
# Shapes for random weights that two ranks can share: one that leaves a GPU's memory to the cache, and one for CPUs.
SMALL = LLAMA_8B | {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "vocab_size": 32000,
}
TINY = LLAMA_8B | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
}
# At most this many requests run at once when the pool alone limits them.
MOST_REQUESTS = 1024
# Graphs are captured for these numbers of requests and for the load's own; capturing vLLM's default list takes longer.
_GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512)
_COLUMNS = ("requests", "cache_tokens", "prefill_tok_s", "decode_tok_s", "total_tok_s", "output_tok_s", "ttft_ms")
_RANKS_COLUMNS = ("cache_tokens", "tokens_ratio", "first_token_error", "second_token_error")
_QUALITY_COLUMNS = ("tokens", "cache_tokens", "perplexity", "kl_mean", "eval_kl_mean", "kl_median", "kl_p99", "top1")

# progress(contender, done, total); done(rows so far).
Progress = Callable[[str, int, int], None]
Done = Callable[[list[dict[str, Any]]], None]


@dataclass(frozen=True)
class Contender:
    """One way to serve: arguments of `vllm.LLM`, environment variables of its process, the devices that can, the format."""

    engine: dict[str, Any]
    environment: dict[str, str]
    devices: tuple[str, ...]
    format: str = "none"


# The names say what is stored, whatever the caller's environment asks for.
_STOCK = {"NIBBLEKV_DISABLE": "1"}
_OURS = {"NIBBLEKV_DISABLE": "0", "NIBBLEKV_FORMAT": "int4", "NIBBLEKV_WINDOW": "0", "NIBBLEKV_CALIBRATION": "off"}
CONTENDERS = {
    "16-bit, vLLM": Contender({"kv_cache_dtype": "auto"}, _STOCK, ("cuda", "cpu")),
    # vLLM on CPU accepts the dtype and generates noise, so there is nothing to time.
    "int4, vLLM": Contender({"kv_cache_dtype": "int4_per_token_head"}, _STOCK, ("cuda",), "int4_per_token_head"),
    "int4, nibblekv": Contender({"kv_cache_dtype": "int4_per_token_head"}, _OURS, ("cuda", "cpu"), "int4"),
    "int4 and window, nibblekv": Contender(
        {"kv_cache_dtype": "int4_per_token_head"}, _OURS | {"NIBBLEKV_WINDOW": "32"}, ("cuda", "cpu")
    ),
}
# The first is the reference; the second shows how far two of vLLM's own 16-bit backends are from each other.
QUALITY_CONTENDERS = {
    "16-bit, vLLM": CONTENDERS["16-bit, vLLM"],
    "16-bit, vLLM, Triton": Contender({"kv_cache_dtype": "auto", "attention_backend": "TRITON_ATTN"}, _STOCK, ("cuda",)),
    "int4, vLLM": CONTENDERS["int4, vLLM"],
    "int4, nibblekv": CONTENDERS["int4, nibblekv"],
    "int4 and window, nibblekv": CONTENDERS["int4 and window, nibblekv"],
    "int4_per_token_head, nibblekv": Contender(
        {"kv_cache_dtype": "int4_per_token_head"},
        _OURS | {"NIBBLEKV_FORMAT": "int4_per_token_head"},
        ("cuda", "cpu"),
        "int4_per_token_head",
    ),
    "int8, nibblekv": Contender({"kv_cache_dtype": "int8_per_token_head"}, _OURS, ("cuda", "cpu"), "int8_per_token_head"),
}


def bench_serve(
    model: str | None = None,
    *,
    requests: int | None = 32,
    context: int = 8000,
    new_tokens: int = 128,
    rounds: int = 2,
    contenders: tuple[str, ...] = tuple(CONTENDERS),
    engine: dict[str, Any] | None = None,
    timeout_s: float = 580.0,
    progress: Progress | None = None,
    done: Done | None = None,
) -> list[dict[str, Any]]:
    """Serve the same random prompts with each contender and return one row for each.

    Args:
        model: a folder; None for random weights in the shape of Llama-3.1-8B.
        requests: prompts served together; None for as many as each contender's pool holds (a pool-bound load).
        context, new_tokens: tokens of a prompt, and to generate.
        rounds: times that the load is served; the fastest counts. A pool-bound load is served once.
        contenders: names in `CONTENDERS`; those that this machine's device cannot run are left out.
        engine: further arguments of `vllm.LLM`.
        timeout_s: for one contender.
        progress: called before each contender and at the end.
        done: called after each contender.

    Returns:
        Rows with contender, context, new_tokens, process_s and the figures of `integrations.vllm.benchmark.measure`; a
        contender that failed has those that it found, and `error`, the last lines of its output.

    Raises:
        ValueError: an unknown contender, or lengths that make no load.
    """
    if context < 1 or new_tokens < 2:
        raise ValueError(f"context, new_tokens: expected at least 1 and 2, got {context} and {new_tokens}")
    largest = requests or MOST_REQUESTS
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        common: dict[str, Any] = {
            "model": model or str(folder / "llama8b"),
            "max_model_len": context + new_tokens + 16,
            "max_num_batched_tokens": 8192,
        } | _engine(largest)
        if model is None:
            common["load_format"] = "dummy"
            (folder / "llama8b").mkdir()
            (folder / "llama8b" / "config.json").write_text(json.dumps(LLAMA_8B))
        vocab_size = json.loads((Path(common["model"]) / "config.json").read_text())["vocab_size"]
        load = {
            "requests": requests,
            "context": context,
            "new_tokens": new_tokens,
            "rounds": rounds,
            "vocab_size": vocab_size,
        }
        columns = {name: {"context": context, "new_tokens": new_tokens} for name in contenders}
        return _run_all(CONTENDERS, contenders, common | (engine or {}), load, columns, folder, timeout_s, progress, done)


def bench_quality(
    model: str,
    windows: list[list[int]],
    *,
    contenders: tuple[str, ...] = tuple(QUALITY_CONTENDERS),
    expected: dict[str, float] | None = None,
    engine: dict[str, Any] | None = None,
    timeout_s: float = 580.0,
    progress: Progress | None = None,
    done: Done | None = None,
) -> list[dict[str, Any]]:
    """Decode the same text with each contender, token by token, and compare what is served with vLLM's 16-bit cache.

    Args:
        model: a folder with weights.
        windows: token numbers, rows of equal length, all decoded side by side.
        contenders: names in `QUALITY_CONTENDERS`; the first of that table, the reference, always runs, and first.
        expected: format -> kl_mean that `nibblekv.evaluation.evaluate` gave on the same windows, to be put beside.
        engine, timeout_s, progress, done: see `bench_serve`.

    Returns:
        Rows with contender, process_s and the figures of `integrations.vllm.benchmark.measure_quality`, or `error`; and
        eval_kl_mean where `expected` has the format.

    Raises:
        ValueError: an unknown contender, or windows of unequal or too few tokens.
    """
    lengths = {len(row) for row in windows}
    if len(lengths) != 1 or min(lengths) < 64:
        raise ValueError(f"windows: expected rows of one length of at least 64 tokens, got lengths {sorted(lengths)}")
    reference = next(iter(QUALITY_CONTENDERS))
    names = (reference, *(name for name in contenders if name != reference))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        common: dict[str, Any] = {
            "model": model,
            "dtype": "bfloat16",
            "max_model_len": max(lengths) + 16,
            "kv_cache_memory_bytes": 4 << 30,
        } | _engine(len(windows))
        load = {"windows": windows, "states": str(folder / "states.pt"), "reference": reference}
        columns = {
            name: {"eval_kl_mean": expected[contender.format]}
            for name, contender in QUALITY_CONTENDERS.items()
            if expected is not None and contender.format in expected
        }
        return _run_all(QUALITY_CONTENDERS, names, common | (engine or {}), load, columns, folder, timeout_s, progress, done)


def bench_ranks(
    ranks: int,
    model: str | None = None,
    *,
    prompts: int = 8,
    context: int = 500,
    engine: dict[str, Any] | None = None,
    timeout_s: float = 580.0,
    progress: Progress | None = None,
    done: Done | None = None,
) -> list[dict[str, Any]]:
    """Serve the same prompts from our cache with one process and with a model split over several (tensor parallel).

    Args:
        ranks: processes of the second engine, a GPU each.
        model: a folder with weights; None for random ones in the shape `SMALL`.
        prompts, context: random prompts, and tokens of each.
        engine, timeout_s, progress, done: see `bench_serve`.

    Returns:
        Two rows with contender, process_s and the figures of `integrations.vllm.benchmark.measure_tokens` but for the
        logarithms of probabilities; the second has tokens_ratio (its cache_tokens to those of the first), and
        first_token_error and second_token_error: the largest difference of a log-probability that both engines list, for
        the token after the prompt, and for the one after that where both chose the same first token.

    Raises:
        ValueError: fewer than 2 ranks.
    """
    if ranks < 2:
        raise ValueError(f"ranks: expected at least 2, got {ranks}")

    def bare(rows: list[dict[str, Any]]) -> None:
        if done is not None:
            done([{name: value for name, value in row.items() if name != "steps"} for row in rows])

    table = {
        f"{n} rank{'s' * (n > 1)}": Contender(
            {"kv_cache_dtype": "int4_per_token_head", "tensor_parallel_size": n}, _OURS, ("cuda", "cpu")
        )
        for n in (1, ranks)
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if model is None:
            model = str(folder / "small")
            write_random_llama(folder / "small", SMALL)
        vocabulary = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
        draw = random.Random(0)
        common = {"model": model, "max_model_len": context + 16} | _engine(prompts)
        load = {"prompts": [[draw.randrange(10, vocabulary) for _ in range(context)] for _ in range(prompts)]}
        rows = _run_all(table, tuple(table), common | (engine or {}), load, {}, folder, timeout_s, progress, bare)
    steps = [row.pop("steps", None) for row in rows]
    if None not in steps:
        rows[1]["tokens_ratio"] = rows[1]["cache_tokens"] / rows[0]["cache_tokens"]
        pairs = list(zip(*steps, strict=True))
        rows[1]["first_token_error"] = max(_difference(a[0], b[0]) for a, b in pairs)
        rows[1]["second_token_error"] = max(
            (_difference(a[1], b[1]) for a, b in pairs if a[0]["token"] == b[0]["token"]), default=math.nan
        )
    if done is not None:
        done(rows)
    return rows


def _difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Return the largest difference of two steps' log-probabilities over the tokens that both list, infinite for none."""
    shared = a["logprobs"].keys() & b["logprobs"].keys()
    return max((abs(a["logprobs"][token] - b["logprobs"][token]) for token in shared), default=math.inf)


def write_random_llama(folder: Path, config: dict[str, Any], logit_std: float = 0.3) -> None:
    """Write a Llama with random weights whose attention is far from uniform, as a folder that vLLM loads.

    Args:
        config: as in config.json; torch_dtype is that of the weights.
        logit_std: standard deviation of the logits.
    """
    from safetensors.torch import save_file

    hidden, inner, head_size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * head_size, config["num_key_value_heads"] * head_size
    generator = torch.Generator().manual_seed(1)
    dtype = getattr(torch, config["torch_dtype"])

    def matrix(rows: int, columns: int, gain: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * (gain / math.sqrt(columns))).to(dtype)

    def ones() -> torch.Tensor:
        return torch.ones(hidden, dtype=dtype)

    weights = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden, math.sqrt(hidden)),
        "model.norm.weight": ones(),
        "lm_head.weight": matrix(config["vocab_size"], hidden, logit_std),
    }
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        weights |= {
            prefix + "input_layernorm.weight": ones(),
            prefix + "post_attention_layernorm.weight": ones(),
            prefix + "self_attn.q_proj.weight": matrix(heads, hidden, 1.7),
            prefix + "self_attn.k_proj.weight": matrix(kv_heads, hidden, 1.7),
            prefix + "self_attn.v_proj.weight": matrix(kv_heads, hidden, 1.7),
            prefix + "self_attn.o_proj.weight": matrix(hidden, heads, 1.6),
            prefix + "mlp.gate_proj.weight": matrix(inner, hidden, 1.1),
            prefix + "mlp.up_proj.weight": matrix(inner, hidden, 1.1),
            prefix + "mlp.down_proj.weight": matrix(hidden, inner, 0.8),
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def _engine(largest: int) -> dict[str, Any]:
    """Return what all engines are built with, for at most so many requests at once."""
    arguments: dict[str, Any] = {
        "gpu_memory_utilization": 0.85,
        "enable_prefix_caching": False,
        "max_num_seqs": largest,
        "disable_log_stats": True,
        "skip_tokenizer_init": True,
    }
    if torch.cuda.is_available():
        sizes = sorted({size for size in _GRAPH_SIZES if size < largest} | {min(largest, _GRAPH_SIZES[-1])})
        arguments["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    return arguments


def _run_all(
    table: dict[str, Contender],
    names: tuple[str, ...],
    engine: dict[str, Any],
    load: dict[str, Any],
    columns: dict[str, dict[str, Any]],
    folder: Path,
    timeout_s: float,
    progress: Progress | None,
    done: Done | None,
) -> list[dict[str, Any]]:
    """Run contenders of a table one after the other and return their rows."""
    if unknown := set(names) - set(table):
        raise ValueError(f"contenders: expected some of {'; '.join(table)}, got {'; '.join(sorted(unknown))}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = tuple(name for name in names if device in table[name].devices)
    rows: list[dict[str, Any]] = []
    for i, name in enumerate(names):
        if progress is not None:
            progress(name, i, len(names))
        config = load | {"engine": engine | table[name].engine}
        if "reference" in load:
            config["reference"] = name == load["reference"]
        figures = _run_contender(config, table[name].environment, folder, timeout_s)
        rows.append({"contender": name, **columns.get(name, {}), **figures})
        if done is not None:
            done(rows)
    if progress is not None:
        progress("", len(names), len(names))
    return rows


def _run_contender(config: dict[str, Any], variables: dict[str, str], folder: Path, timeout_s: float) -> dict[str, Any]:
    """Run one engine process and return its figures, with its error if it failed."""
    result = folder / "result.json"
    (folder / "config.json").write_text(json.dumps(config | {"started": time.time()}))
    result.unlink(missing_ok=True)
    defaults = {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-m", "nibblekv.integrations.vllm.benchmark", str(folder / "config.json"), str(result)]
    begin, failure = time.perf_counter(), None
    with (folder / "log").open("w+") as log:
        try:
            subprocess.run(
                command, env=defaults | os.environ | variables, stdout=log, stderr=subprocess.STDOUT, timeout=timeout_s,
                check=True,
            )  # fmt: skip
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            log.seek(0)
            failure = f"{str(error).replace(str(folder), '...')}\n{log.read()[-4000:]}"
    row = json.loads(result.read_text()) if result.exists() else {}
    row["process_s"] = time.perf_counter() - begin
    return row if failure is None else row | {"error": failure}


def main() -> None:
    """Print a table of the contenders, and write the rows as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model (default: random weights, Llama-3.1-8B's shape)")
    parser.add_argument("--requests", default="32", help="prompts served together, or 'fit': as many as the pool holds")
    parser.add_argument("--context", type=int, default=8000, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens to generate")
    parser.add_argument("--rounds", type=int, default=2, help="times that the load is served; the fastest counts")
    parser.add_argument("--quality", action="store_true", help="measure the divergence from the 16-bit cache")
    parser.add_argument("--ranks", type=int, help="compare this many GPUs (tensor parallel) with one")
    parser.add_argument("--windows", type=Path, help="JSON file with rows of token numbers, for --quality")
    parser.add_argument("--eval", type=Path, help="JSON file of nibblekv eval, for --quality: to be put beside")
    parser.add_argument("--contenders", default=None, help=f"some of: {'; '.join(QUALITY_CONTENDERS)} (separated by ';')")
    parser.add_argument("--engine", default="{}", help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--timeout", type=float, default=580.0, help="seconds for one contender")
    parser.add_argument("--json", type=Path, help="file for the rows, written after each contender")
    arguments = parser.parse_args()
    if arguments.quality and (arguments.model is None or arguments.windows is None):
        parser.error("--quality needs --model and --windows")
    begin = time.perf_counter()
    command = shlex.join(["python", "-m", "nibblekv.benchmarking_serve", *sys.argv[1:]])

    def progress(name: str, i: int, total: int) -> None:
        print(f"[{time.perf_counter() - begin:.0f} s, {i}/{total}] {name}", file=sys.stderr, flush=True)

    def done(rows: list[dict[str, Any]]) -> None:
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        write_report(arguments.json, command, rows)

    names = tuple(QUALITY_CONTENDERS if arguments.quality else CONTENDERS)
    common: dict[str, Any] = {
        "engine": json.loads(arguments.engine),
        "timeout_s": arguments.timeout,
        "progress": progress,
        "done": done,
    }
    chosen = names if arguments.contenders is None else tuple(arguments.contenders.split(";"))
    if arguments.ranks is not None:
        rows = bench_ranks(arguments.ranks, arguments.model, **common)
    elif arguments.quality:
        found = [] if arguments.eval is None else json.loads(arguments.eval.read_text())["rows"]
        expected = {row["format"]: row["kl_mean"] for row in found if "kl_mean" in row}
        rows = bench_quality(
            arguments.model, json.loads(arguments.windows.read_text()), contenders=chosen, expected=expected, **common
        )  # fmt: skip
    else:
        requests = None if arguments.requests == "fit" else int(arguments.requests)
        rows = bench_serve(
            arguments.model,
            requests=requests,
            context=arguments.context,
            new_tokens=arguments.new_tokens,
            rounds=arguments.rounds,
            contenders=chosen,
            **common,
        )
    columns = _QUALITY_COLUMNS if arguments.quality else _COLUMNS if arguments.ranks is None else _RANKS_COLUMNS
    print(f"{'':30}" + "".join(f"{column:>15}" for column in columns))
    for row in rows:
        cells = (f"{row[column]:,.5g}" if column in row else "-" for column in columns)
        print(f"{row['contender']:30}" + "".join(f"{cell:>15}" for cell in cells) + ("  failed" if "error" in row else ""))


if __name__ == "__main__":
    main()
