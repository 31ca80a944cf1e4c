"""Serving with vLLM: the same load for its 16-bit cache, its own 4-bit cache and ours, one engine process after the other.

    python -m nibblekv.benchmarking_serve --requests 32 --context 8000 --new-tokens 128 --json result.json

Weights are random in the shape of Llama-3.1-8B unless a model folder is named: throughput does not depend on their values.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["CONTENDERS", "Contender", "bench_serve"]

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
# At most this many requests run at once when the pool alone limits them.
MOST_REQUESTS = 1024
_COLUMNS = ("requests", "cache_tokens", "prefill_tok_s", "decode_tok_s", "total_tok_s", "ttft_ms")


@dataclass(frozen=True)
class Contender:
    """One way to serve: arguments of `vllm.LLM` and environment variables of its process."""

    engine: dict[str, Any]
    environment: dict[str, str]
    devices: tuple[str, ...]


CONTENDERS = {
    "16-bit, vLLM": Contender({"kv_cache_dtype": "auto"}, {"NIBBLEKV_DISABLE": "1"}, ("cuda", "cpu")),
    # vLLM on CPU accepts the dtype and generates noise, so there is nothing to time.
    "int4, vLLM": Contender({"kv_cache_dtype": "int4_per_token_head"}, {"NIBBLEKV_DISABLE": "1"}, ("cuda",)),
    "int4, nibblekv": Contender({"kv_cache_dtype": "int4_per_token_head"}, {"NIBBLEKV_DISABLE": "0"}, ("cuda", "cpu")),
}


def bench_serve(
    model: str | None = None,
    *,
    requests: int | None = 32,
    context: int = 8000,
    new_tokens: int = 128,
    contenders: tuple[str, ...] = tuple(CONTENDERS),
    engine: dict[str, Any] | None = None,
    timeout_s: float = 580.0,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Serve the same random prompts with each contender and return one row for each.

    Args:
        model: a folder; None for random weights in the shape of Llama-3.1-8B.
        requests: prompts served together; None for as many as each contender's pool holds (a pool-bound load).
        context, new_tokens: tokens of a prompt, and to generate.
        contenders: names in `CONTENDERS`; those that this machine's device cannot run are left out.
        engine: further arguments of `vllm.LLM`.
        timeout_s: for one contender.
        progress: called as progress(contender, done, total).

    Returns:
        Rows with contender, context, new_tokens and the figures of `integrations.vllm.benchmark.measure`; a contender that
        failed has `error`, the last lines of its output, in their place.

    Raises:
        ValueError: an unknown contender, or lengths that make no load.
    """
    if unknown := set(contenders) - set(CONTENDERS):
        raise ValueError(f"contenders: expected some of {', '.join(CONTENDERS)}, got {', '.join(sorted(unknown))}")
    if context < 1 or new_tokens < 2:
        raise ValueError(f"context, new_tokens: expected at least 1 and 2, got {context} and {new_tokens}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = [name for name in contenders if device in CONTENDERS[name].devices]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        common: dict[str, Any] = {
            "model": model or str(folder / "llama8b"),
            "max_model_len": context + new_tokens + 16,
            "gpu_memory_utilization": 0.85,
            "enable_prefix_caching": False,
            "max_num_seqs": requests or MOST_REQUESTS,
            "max_num_batched_tokens": 8192,
            "disable_log_stats": True,
            "skip_tokenizer_init": True,
        }
        if model is None:
            common["load_format"] = "dummy"
            (folder / "llama8b").mkdir()
            (folder / "llama8b" / "config.json").write_text(json.dumps(LLAMA_8B))
        vocab_size = json.loads((Path(common["model"]) / "config.json").read_text())["vocab_size"]
        for i, name in enumerate(names):
            if progress is not None:
                progress(name, i, len(names))
            config = {
                "engine": common | CONTENDERS[name].engine | (engine or {}),
                "requests": requests,
                "context": context,
                "new_tokens": new_tokens,
                "vocab_size": vocab_size,
            }
            figures = _run_contender(config, CONTENDERS[name].environment, folder, timeout_s)
            rows.append({"contender": name, "context": context, "new_tokens": new_tokens, **figures})
        if progress is not None:
            progress("", len(names), len(names))
    return rows


def _run_contender(config: dict[str, Any], variables: dict[str, str], folder: Path, timeout_s: float) -> dict[str, Any]:
    """Run one engine process and return its figures, or its error."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "result.json").unlink(missing_ok=True)
    defaults = {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-m", "nibblekv.integrations.vllm.benchmark"]
    command += [str(folder / "config.json"), str(folder / "result.json")]
    with (folder / "log").open("w+") as log:
        try:
            subprocess.run(
                command, env=defaults | os.environ | variables, stdout=log, stderr=subprocess.STDOUT, timeout=timeout_s,
                check=True,
            )  # fmt: skip
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            log.seek(0)
            return {"error": f"{error}\n{log.read()[-2000:]}"}
    return json.loads((folder / "result.json").read_text())


def main() -> None:
    """Print a table of the contenders, and write the rows as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model (default: random weights, Llama-3.1-8B's shape)")
    parser.add_argument("--requests", default="32", help="prompts served together, or 'fit': as many as the pool holds")
    parser.add_argument("--context", type=int, default=8000, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens to generate")
    parser.add_argument("--contenders", default=None, help=f"some of: {'; '.join(CONTENDERS)} (separated by ';')")
    parser.add_argument("--engine", default="{}", help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    rows = bench_serve(
        arguments.model,
        requests=None if arguments.requests == "fit" else int(arguments.requests),
        context=arguments.context,
        new_tokens=arguments.new_tokens,
        contenders=tuple(CONTENDERS) if arguments.contenders is None else tuple(arguments.contenders.split(";")),
        engine=json.loads(arguments.engine),
        progress=lambda name, done, total: print(f"[{done}/{total}] {name}", file=sys.stderr, flush=True),
    )
    print(f"{'':16}" + "".join(f"{column:>15}" for column in _COLUMNS))
    for row in rows:
        figures = row["error"] if "error" in row else "".join(f"{row[column]:>15,.0f}" for column in _COLUMNS)
        print(f"{row['contender']:16}{figures}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
