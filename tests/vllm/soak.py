"""Mixed requests through vLLM's engine on CPU for minutes or hours: no leak, and every answer the one of its solo run.

    python tests/vllm/soak.py --minutes 60 [--json FILE] [--seed N] [--window TOKENS]

A tiny random model serves, in a pool that holds three or four requests, a stream of prompts of 1 to 150 tokens, half of them
with one of three common beginnings, answers of 1 to 32 tokens, requests cancelled at any step. So blocks are shared,
evicted, preempted and recomputed all the time. Every prompt was answered alone before, by an engine with room for all; in
strict mode the answers must be equal in every token and in every bit of the log-probabilities. Whenever the stream runs dry,
which it does every few hundred requests, no block may be in use; the memory of the process must not grow.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROMPTS, LONGEST_ANSWER, BLOCK_SIZE, BLOCKS = 40, 32, 16, 25
WINDOW_BLOCKS = 45  # more, where the newest tokens of each request are kept unquantized too
EPOCH = 150  # requests after which the stream runs dry
POOLS = {
    "alone": {"block_size": 128, "max_num_batched_tokens": 2048, "enable_prefix_caching": False},
    "mixed": {
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": BLOCKS,
        "max_num_batched_tokens": 64,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
    },
}


def make_prompts(seed: int) -> list[list[int]]:
    """Return random prompts, every other one behind one of three common beginnings."""
    rng = random.Random(seed)
    heads = [[rng.randrange(1, 500) for _ in range(n)] for n in (16, 40, 64)]
    prompts = []
    for i in range(PROMPTS):
        body = [rng.randrange(1, 500) for _ in range(rng.choice([1, 5, 15, 16, 17, 33, 60, 86]))]
        prompts.append(heads[i // 2 % 3] + body if i % 2 else body)
    return prompts


def answer_of(output: Any) -> list[Any]:
    """Return [token ids, log-probabilities of the best two at each step]."""
    sample = output.outputs[0]
    return [list(sample.token_ids), [sorted(p.logprob for p in step.values()) for step in sample.logprobs]]


def sampling(max_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=2, ignore_eos=True, detokenize=False)


def alone(llm: Any, prompts: list[list[int]]) -> list[Any]:
    """Answer each prompt when nothing else runs."""
    answers = []
    for prompt in prompts:
        outputs = llm.generate([{"prompt_token_ids": prompt}], sampling(LONGEST_ANSWER), use_tqdm=False)
        answers.append(answer_of(outputs[0]))
    return answers


def resident_mib() -> float:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def mixed(llm: Any, prompts: list[list[int]], expected: list[Any], seconds: float, seed: int) -> dict[str, Any]:
    """Serve a random stream of them until the time is over; raise AssertionError at the first wrong answer or lost block."""
    engine, rng = llm.llm_engine, random.Random(seed)
    pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    running: dict[str, tuple[int, int]] = {}  # request -> (prompt, tokens asked for)
    counts = {"requests": 0, "finished": 0, "cancelled": 0, "steps": 0, "epochs": 0, "tokens": 0}
    memory: list[float] = []
    free_when_empty = pool.get_num_free_blocks()
    end = time.monotonic() + seconds
    while time.monotonic() < end or not memory:
        started, epoch = counts["requests"], EPOCH if time.monotonic() < end else 1
        while counts["requests"] - started < epoch or running:
            while counts["requests"] - started < epoch and len(running) < 8 and rng.random() < 0.4:
                prompt, length = rng.randrange(len(prompts)), rng.choice([1, 2, 16, LONGEST_ANSWER])
                name = f"{counts['requests']}"
                engine.add_request(name, {"prompt_token_ids": prompts[prompt]}, sampling(length))
                running[name] = (prompt, length)
                counts["requests"] += 1
            if running and rng.random() < 0.02:
                name = rng.choice(list(running))
                engine.abort_request([name])
                del running[name]
                counts["cancelled"] += 1
            for output in engine.step():
                if output.finished and output.request_id in running:
                    prompt, length = running.pop(output.request_id)
                    tokens, logprobs = answer_of(output)
                    right_tokens, right_logprobs = expected[prompt]
                    assert tokens == right_tokens[:length], f"request {output.request_id}, prompt {prompt}: wrong tokens"
                    assert logprobs == right_logprobs[:length], f"request {output.request_id}: wrong log-probabilities"
                    counts["finished"] += 1
                    counts["tokens"] += len(tokens)
            counts["steps"] += 1
        while engine.has_unfinished_requests():
            engine.step()
        used = free_when_empty - pool.get_num_free_blocks()
        assert used == 0, f"{used} blocks are in use by nobody"
        counts["epochs"] += 1
        memory.append(resident_mib())
        if time.monotonic() >= end:
            break
    # The first tenth fills allocators' and the engine's own caches.
    settled = memory[len(memory) // 10 :]
    return counts | {"mib_first": memory[0], "mib_settled": settled[0], "mib_last": memory[-1], "mib_most": max(memory)}


def run(config: dict[str, Any]) -> Any:
    """Do one process's part."""
    sys.path.insert(0, str(HERE))
    from scenarios import counters, make_engine, make_exact

    make_exact()
    llm = make_engine({"engine": config["engine"]})
    if config["part"] == "alone":
        return alone(llm, config["prompts"])
    figures = mixed(llm, config["prompts"], config["expected"], config["seconds"], config["seed"])
    return figures | {name.removeprefix("vllm:"): value for name, value in counters(llm).items()}


def soak(
    model: str, minutes: float, seed: int, environment: dict[str, str], backend: str = "cpu", window: int = 0
) -> dict[str, Any]:
    """Run both parts, each in its own process; return the figures. Raise RuntimeError with the log's end if one fails."""
    prompts, results = make_prompts(seed), {}
    with tempfile.TemporaryDirectory() as scratch:
        for part, pool in POOLS.items():
            engine = {
                "model": model,
                "dtype": "float32",
                "max_model_len": 256,
                "kv_cache_dtype": "int4_per_token_head",
                **pool,
            }
            if window and "num_gpu_blocks_override" in pool:
                engine |= {"num_gpu_blocks_override": BLOCKS + WINDOW_BLOCKS}
            config = {"part": part, "engine": engine, "prompts": prompts, "seconds": 60 * minutes, "seed": seed}
            config["expected"] = results.get("alone")
            given, result = Path(scratch) / "config.json", Path(scratch) / "result.json"
            given.write_text(json.dumps(config))
            done = subprocess.run(
                [sys.executable, __file__, "--part", str(given), str(result)],
                env=environment | {"NIBBLEKV_STRICT": "1", "NIBBLEKV_BACKEND": backend, "NIBBLEKV_WINDOW": str(window)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            if done.returncode:
                raise RuntimeError(f"{part}: {done.stdout[-4000:]}")
            results[part] = json.loads(result.read_text())
    return results["mixed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--window", type=int, default=0, help="newest tokens that are read unquantized")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--part", type=Path, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        given, result = arguments.part
        result.write_text(json.dumps(run(json.loads(given.read_text()))))
        return
    from conftest import environment, save_tiny_model

    from nibblekv.machine import machine

    with tempfile.TemporaryDirectory() as folder:
        save_tiny_model(Path(folder))
        figures = soak(folder, arguments.minutes, arguments.seed, environment(), window=arguments.window)
    print(json.dumps(figures, indent=1))
    if arguments.json:
        command = f"python tests/vllm/soak.py --minutes {arguments.minutes:g} --seed {arguments.seed}"
        command += f" --window {arguments.window}" if arguments.window else ""
        record = {"command": command, "machine": machine(), "minutes": arguments.minutes, "rows": [figures]}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
