"""One engine of `nibblekv.benchmarking_serve`, in a process of its own: `python -m ... CONFIG.json RESULT.json`.

The result file is written anew after every phase, so that a run that is cut off leaves what it has measured.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

from nibblekv.integrations.vllm import register
from nibblekv.integrations.vllm.recent import page_count

LATENCY_ROUNDS = 3
LISTED_TOKENS = 10
# Teacher-forced: the first tokens of a window are its prompt, so few that they count as decoding; the rest is forced.
PROMPT_TOKENS = 8
# Predictions of a window's first quarter read little cache and are not scored, as in `nibblekv.evaluation`.
UNSCORED_FRACTION = 4
_FORCED_LOGIT = 1e9

Report = Callable[[dict[str, Any]], None]


def build(config: dict[str, Any], report: Report) -> LLM:
    """Build the engine of a configuration and report how long that took, what it holds and which class attends."""
    register()  # where the package is on the path and not installed, vLLM finds no entry point
    report({"import_s": time.time() - config["started"]})
    begin = time.perf_counter()
    llm = LLM(**config["engine"])
    cache = llm.llm_engine.vllm_config.cache_config
    size, _ = packed_blocks(llm)
    attention = {name for rank in llm.apply_model(implementations) for name in rank}
    report(
        {
            "start_s": time.perf_counter() - begin,
            "cache_tokens": cache.num_gpu_blocks * size,
            "attention": ", ".join(sorted(attention)),
        }
    )
    return llm


def implementations(model: torch.nn.Module) -> set[str]:
    """Return the classes that attend in a model."""
    impls = (module.impl for module in model.modules() if hasattr(module, "impl"))
    return {f"{type(impl).__module__}.{type(impl).__name__}" for impl in impls}


def companions(model: torch.nn.Module) -> set[tuple[int, int]]:
    """Return (tokens of a packed page, blocks that a request's window takes) of a model's layers that keep a window."""
    found = set()
    module: Any
    for module in model.modules():
        companion = getattr(getattr(module, "impl", None), "nibblekv_companion", None)
        if companion is not None:
            found.add((module.kv_cache.shape[2], page_count(companion.window, companion.kv_cache.shape[2])))
    return found


def packed_blocks(llm: LLM) -> tuple[int, int]:
    """Return the tokens of a block with packed pages, and how many blocks a request takes beside those."""
    found = {sizes for rank in llm.apply_model(companions) for sizes in rank}
    # With a window, vLLM's own figure is the smallest block of any kind.
    return max(found, default=(llm.llm_engine.vllm_config.cache_config.block_size, 0))


def measure(config: dict[str, Any], report: Report) -> None:
    """Build the engine and time prefills, decoding and single requests.

    Args:
        config: engine (arguments of `vllm.LLM`), context, new_tokens, vocab_size, requests (None: as many as the pool holds
            at once), and rounds, of which the fastest counts.
        report: takes figures as they are found: those of `build`, requests, warm_s (the first prompts, which compile
            kernels), ttft_ms (median of single requests), first_prefill_s, prefill_tok_s, decode_tok_s (new tokens after
            the first, of all requests together), total_tok_s (prompt and new tokens over the whole time), output_tok_s
            (new tokens over the whole time). A load that fills the pool is served once: it has neither prefill_tok_s nor
            decode_tok_s.
    """
    llm = build(config, report)
    context, new_tokens = config["context"], config["new_tokens"]
    cache = llm.llm_engine.vllm_config.cache_config
    size, beside = packed_blocks(llm)
    # In whole blocks, of which vLLM keeps one for itself.
    fitting = (cache.num_gpu_blocks - 1) // (-(-(context + new_tokens) // size) + beside)
    requests = config["requests"] or min(fitting, config["engine"]["max_num_seqs"])
    draw = random.Random(0)
    prompts = [
        {"prompt_token_ids": [draw.randrange(10, config["vocab_size"]) for _ in range(context)]} for _ in range(requests)
    ]

    def run(batch: list[Any], tokens: int) -> float:
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, detokenize=False)
        begin = time.perf_counter()
        llm.generate(batch, sampling, use_tqdm=False)
        return time.perf_counter() - begin

    # Three prompts: the second and the third are cut, so that chunks with stored tokens before them are met too.
    report({"requests": requests, "warm_s": run(prompts[:3], 2)})
    report({"ttft_ms": 1000 * statistics.median(run([prompts[i % requests]], 1) for i in range(LATENCY_ROUNDS))})
    if config["requests"]:
        # Kernels for so many requests and queries are compiled during the first.
        report({"first_prefill_s": run(prompts, 1)})
    prefills, totals = [], []
    for _ in range(config["rounds"] if config["requests"] else 1):
        if config["requests"]:
            prefills.append(run(prompts, 1))
        totals.append(run(prompts, new_tokens))
        total_s = min(totals)
        report(
            {
                "total_s": total_s,
                "total_tok_s": requests * (context + new_tokens) / total_s,
                "output_tok_s": requests * new_tokens / total_s,
            }
        )
        if prefills:
            prefill_s = min(prefills)
            report(
                {
                    "prefill_s": prefill_s,
                    "prefill_tok_s": requests * context / prefill_s,
                    "decode_tok_s": requests * (new_tokens - 1) / (total_s - prefill_s),
                }
            )


def measure_quality(config: dict[str, Any], report: Report) -> None:
    """Build the engine, force it through windows of text token by token, and compare what it serves with a reference.

    All windows are decoded side by side, through CUDA graphs where the engine has them: after a prompt of `PROMPT_TOKENS`
    tokens each, every step's logits are kept (as the hidden states that they are a matrix product of) and the next token of
    the text is made the only likely one. Every key and value that attention reads was then stored.

    Args:
        config: engine, windows ([N, window] token numbers) and states, a file: written by the process whose `reference` is
            true, read by the others.
        report: takes the figures of `build`, perplexity, tokens and, but for the reference, kl_mean, kl_median, kl_p99 and
            top1 as in `nibblekv.evaluation.evaluate`.
    """
    llm = build(config, report)
    windows = torch.tensor(config["windows"])
    first = windows.shape[1] // UNSCORED_FRACTION
    count, steps = len(windows), windows.shape[1] - PROMPT_TOKENS
    states: list[torch.Tensor] = []
    product: list[Callable[..., torch.Tensor]] = []

    def force(model: torch.nn.Module) -> None:
        compute_logits: Any = model.compute_logits
        targets = windows[:, PROMPT_TOKENS:].to(next(model.parameters()).device)
        product.append(compute_logits)

        def forced(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            logits = compute_logits(hidden, *args, **kwargs)
            if hidden.shape[0] != count or len(states) == steps:
                return logits
            logits = logits.clone()
            logits.scatter_(1, targets[:, len(states), None], _FORCED_LOGIT)
            states.append(hidden.clone())
            return logits

        model.compute_logits = forced  # type: ignore[assignment]

    llm.apply_model(force)
    begin = time.perf_counter()
    results = llm.generate(
        [{"prompt_token_ids": row[:PROMPT_TOKENS].tolist()} for row in windows],
        SamplingParams(max_tokens=steps, ignore_eos=True, temperature=0.0, detokenize=False),
        use_tqdm=False,
    )
    report({"decode_s": time.perf_counter() - begin})
    for row, result in zip(windows, results, strict=True):
        if list(result.outputs[0].token_ids) != row[PROMPT_TOKENS:].tolist():
            raise RuntimeError("windows: expected every request to follow its text, got other tokens: batches were cut")
    # Step s gives the prediction after position PROMPT_TOKENS - 1 + s.
    scored = range(first - PROMPT_TOKENS + 1, steps)
    if config["reference"]:
        torch.save(torch.stack(states), config["states"])
        expected = states
    else:
        expected = list(torch.load(config["states"], map_location=states[0].device))
    kl, nll, agree = [], [], []
    with torch.inference_mode():
        for step in scored:
            q = product[0](states[step]).float().log_softmax(-1)
            p = product[0](expected[step]).float().log_softmax(-1)
            kl.append((p.exp() * (p - q)).sum(-1).cpu())
            nll.append(-q.gather(1, windows[:, PROMPT_TOKENS + step, None].to(q.device))[:, 0].cpu())
            agree.append((p.argmax(-1) == q.argmax(-1)).float().cpu())
    divergence = torch.cat(kl).double()
    report({"perplexity": float(torch.cat(nll).double().mean().exp()), "tokens": divergence.numel()})
    if not config["reference"]:
        report(
            {
                "kl_mean": float(divergence.mean()),
                "kl_median": float(divergence.median()),
                "kl_p99": float(divergence.quantile(0.99)),
                "top1": float(torch.cat(agree).double().mean()),
            }
        )


def measure_tokens(config: dict[str, Any], report: Report) -> None:
    """Build the engine and report the log-probabilities of two tokens after each prompt: the second is read from pages.

    Args:
        config: engine, prompts (token numbers).
        report: takes the figures of `build` and steps: per prompt two records of token and logprobs (token -> value).
    """
    llm = build(config, report)
    sampling = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0, detokenize=False, logprobs=LISTED_TOKENS)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in config["prompts"]], sampling, use_tqdm=False)
    report(
        {
            "steps": [
                [
                    {"token": token, "logprobs": {str(t): entry.logprob for t, entry in step.items()}}
                    for token, step in zip(output.outputs[0].token_ids, output.outputs[0].logprobs or (), strict=True)
                ]
                for output in outputs
            ]
        }
    )


def main(config_file: Path, result_file: Path) -> None:
    """Run what a configuration asks for."""
    config = json.loads(config_file.read_text())
    found: dict[str, Any] = {}

    def report(figures: dict[str, Any]) -> None:
        found.update(figures)
        partial = result_file.with_suffix(".partial")
        partial.write_text(json.dumps(found))
        os.replace(partial, result_file)

    if "prompts" in config:
        measure_tokens(config, report)
    elif "windows" in config:
        measure_quality(config, report)
    else:
        measure(config, report)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
