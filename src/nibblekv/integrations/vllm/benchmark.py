"""One engine of `nibblekv.benchmarking_serve`, in a process of its own: `python -m ... CONFIG.json RESULT.json`."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from nibblekv.integrations.vllm import register

LATENCY_ROUNDS = 5


def measure(config: dict[str, Any]) -> dict[str, Any]:
    """Build the engine and time prefills, decoding and single requests.

    Args:
        config: engine (arguments of `vllm.LLM`), context, new_tokens, vocab_size, and requests (None: as many as the
            pool holds at once).

    Returns:
        requests, cache_tokens, prefill_tok_s, decode_tok_s (new tokens after the first, of all requests together),
        total_tok_s (prompt and new tokens over the whole time), ttft_ms (median of single requests), start_s.
    """
    register()  # where the package is on the path and not installed, vLLM finds no entry point
    context, new_tokens = config["context"], config["new_tokens"]
    begin = time.perf_counter()
    llm = LLM(**config["engine"])
    start_s = time.perf_counter() - begin
    cache = llm.llm_engine.vllm_config.cache_config
    cache_tokens = cache.num_gpu_blocks * cache.block_size
    requests = config["requests"] or min(cache_tokens // (context + new_tokens), config["engine"]["max_num_seqs"])
    draw = random.Random(0)
    prompts = [
        {"prompt_token_ids": [draw.randrange(10, config["vocab_size"]) for _ in range(context)]} for _ in range(requests)
    ]

    def run(batch: list[Any], tokens: int) -> float:
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, detokenize=False)
        begin = time.perf_counter()
        llm.generate(batch, sampling, use_tqdm=False)
        return time.perf_counter() - begin

    run(prompts[:2], 2)
    ttft = [run([prompts[i % requests]], 1) for i in range(LATENCY_ROUNDS)]
    prefill_s = run(prompts, 1)
    total_s = run(prompts, new_tokens)
    return {
        "requests": requests,
        "cache_tokens": cache_tokens,
        "prefill_tok_s": requests * context / prefill_s,
        "decode_tok_s": requests * (new_tokens - 1) / (total_s - prefill_s),
        "total_tok_s": requests * (context + new_tokens) / total_s,
        "ttft_ms": 1000 * statistics.median(ttft),
        "start_s": start_s,
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(measure(json.loads(Path(sys.argv[1]).read_text()))))
