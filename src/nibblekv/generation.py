"""Generate with several cache formats side by side, and time it: all formats in one process, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nibblekv.peers import cache_argument, cache_bytes, cache_maker, check_format

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.cache_utils import Cache

__all__ = ["bench_generate", "generate_side_by_side", "generate_tokens"]

# progress(stage, done, total), in calls of `generate`.
Progress = Callable[[str, int, int], None]

DEFAULT_ROUNDS = 5


def generate_side_by_side(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    formats: Sequence[str],
    *,
    new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    chat: bool = True,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Continue one prompt with every format.

    Args:
        prompt: the user's text; wrapped in the tokenizer's chat template if it has one and `chat` is True.
        formats: names as `nibblekv.peers` lists them.
        new_tokens: at most; generation ends at the model's end token.
        temperature: 0 is greedy; above, every format samples from the same random numbers.

    Returns:
        One row per format: format, text, prompt_tokens, new_tokens, seconds (prefill included), tokens_per_second (of the
        new tokens, prefill included), cache_bytes. A format that the model cannot use has `format` and `note`.
    """
    _check_count("new_tokens", new_tokens)
    if not temperature >= 0:
        raise ValueError(f"temperature: expected 0 (greedy) or more, got {temperature}")
    for format in formats:
        check_format(format)
    if chat and tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        chatted: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        ids = chatted["input_ids"]
    else:
        ids = tokenizer(prompt).input_ids
    if not ids:
        raise ValueError("prompt: expected at least one token, got an empty text")
    inputs = torch.tensor([ids], device=model.device)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    rows: list[dict[str, Any]] = []
    for done, format in enumerate(formats):
        if progress is not None:
            progress(f"generate: {format}", done, len(formats))
        try:
            with cache_maker(model, format, max_tokens=len(ids) + new_tokens) as make_cache:
                cache = make_cache()
                torch.manual_seed(seed)
                begin = time.perf_counter()
                out = generate_tokens(model, inputs, cache, max_new_tokens=new_tokens, **sampling)
                seconds = time.perf_counter() - begin
                size = cache_bytes(cache)
        except (FileNotFoundError, ImportError, NotImplementedError, ValueError) as error:
            rows.append({"format": format, "note": str(error).splitlines()[0]})
            continue
        count = out.shape[1] - len(ids)
        rows.append(
            {
                "format": format,
                "text": tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True),
                "prompt_tokens": len(ids),
                "new_tokens": count,
                "seconds": seconds,
                "tokens_per_second": count / seconds,
                "cache_bytes": size,
            }
        )
    return rows


def bench_generate(
    model: PreTrainedModel,
    prompt: torch.Tensor,
    formats: Sequence[str],
    *,
    model_name: str,
    new_tokens: int = 16,
    rounds: int = DEFAULT_ROUNDS,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Time decoding after one prompt with every format, and measure the caches.

    Each format's cache takes the prompt once; then the formats take turns of `new_tokens` tokens each, through the model's
    `generate`, for `rounds` rounds and one that is not counted.

    Args:
        prompt: [1, context] int64.
        formats: names as `nibblekv.peers` lists them; ratios are against `none` where it is among them.

    Returns:
        One row per format: model, format, dtype, context, new_tokens, prefill_s, time_per_token_ms (median of the rounds'),
        tokens_per_second (of the median), cache_bytes, bytes_per_token, and speed_ratio and memory_ratio (how many times
        faster and smaller than `none`). A format that the model cannot use has `note` in place of figures.
    """
    _check_count("new_tokens", new_tokens)
    _check_count("rounds", rounds)
    for format in formats:
        check_format(format)
    context = prompt.shape[1]
    max_tokens = context + (rounds + 1) * new_tokens
    prompt = prompt.to(model.device)
    rows: dict[str, dict[str, Any]] = {}
    caches: dict[str, Cache] = {}
    tokens: dict[str, torch.Tensor] = {}
    times: dict[str, list[float]] = {}
    total, done = len(formats) * (rounds + 2), 0
    for format in formats:
        rows[format] = {"model": model_name, "format": format}
        if progress is not None:
            progress(f"prefill: {format}", done, total)
        try:
            with cache_maker(model, format, max_tokens=max_tokens) as make_cache:
                caches[format] = make_cache()
                begin = time.perf_counter()
                tokens[format] = generate_tokens(model, prompt, caches[format], max_new_tokens=1, min_new_tokens=1)
                prefill = time.perf_counter() - begin
        except (FileNotFoundError, ImportError, NotImplementedError, ValueError) as error:
            rows[format]["note"] = str(error).splitlines()[0]
            caches.pop(format, None)
            continue
        rows[format] |= {
            "dtype": str(model.dtype).removeprefix("torch."),
            "context": context,
            "new_tokens": new_tokens * rounds,
            "prefill_s": prefill,
        }
        done += 1
        times[format] = []
    for turn in range(rounds + 1):
        for format, cache in caches.items():
            if progress is not None:
                progress(f"decode: {format}", done, total)
            with cache_maker(model, format):
                begin = time.perf_counter()
                tokens[format] = generate_tokens(
                    model, tokens[format], cache, max_new_tokens=new_tokens, min_new_tokens=new_tokens
                )
                if turn:
                    times[format].append((time.perf_counter() - begin) / new_tokens)
            done += 1
    for format, cache in caches.items():
        per_token = statistics.median(times[format])
        size = cache_bytes(cache)
        rows[format] |= {
            "time_per_token_ms": 1e3 * per_token,
            "tokens_per_second": 1 / per_token,
            "cache_bytes": size,
            "bytes_per_token": size / cache.get_seq_length(),
        }
    plain = rows.get("none")
    for format in caches:
        if plain is not None:
            rows[format]["speed_ratio"] = plain["time_per_token_ms"] / rows[format]["time_per_token_ms"]
            rows[format]["memory_ratio"] = plain["cache_bytes"] / rows[format]["cache_bytes"]
    return list(rows.values())


def generate_tokens(model: PreTrainedModel, tokens: torch.Tensor, cache: Cache, **arguments: Any) -> torch.Tensor:
    """Continue tokens [batch, length], of which the cache holds a beginning; return [batch, longer], greedy unless told."""
    with torch.inference_mode():
        return model.generate(  # type: ignore[operator]
            tokens,
            attention_mask=torch.ones_like(tokens),
            pad_token_id=0,
            **{"do_sample": False, **arguments},
            **cache_argument(model, cache),
        )


def _check_count(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")
