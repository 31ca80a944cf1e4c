"""Times of the operations beside torch's own attention on raw tensors, in one run, with an error gate.

A ratio is only as good as its baseline: torch's fastest arrangement of the same attention is searched for in every row.
Turns are interleaved (ours, theirs, ours, ...), so that a busy machine slows both, and medians are compared. A turn of
decode calls one arrangement for `LAYERS` caches one after another, as a step of a model does: no cache is still near the
core when its turn comes again, but the code is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from nibblekv.layout import KVCacheLayout
from nibblekv.ops import gather_and_dequantize, paged_attention, reshape_and_cache
from nibblekv.plan import split_window

__all__ = ["MAX_ERROR", "SHAPES", "bench_attention_cpu"]

# Above this error against float64 over the same pages a row has no ratio.
MAX_ERROR = 1e-3
# Caches of a turn of decode.
LAYERS = 4
# (query heads, KV heads, head size) of Llama-3-8B's and SmolLM2-135M's layers.
SHAPES = ((32, 8, 128), (9, 3, 64))

Calls = list[Callable[[], object]]  # of a turn
Arrangements = dict[str, Calls]


def bench_attention_cpu(
    formats: Iterable[str] = ("int4",),
    *,
    backend: str = "cpu",
    contexts: Iterable[int] = (4096, 16384),
    threads: Iterable[int] = (1, 2),
    prefill_tokens: int = 2048,
    repeats: int = 30,
    progress: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Time decode, prefill and write on the CPU.

    decode: one query after `context` tokens. prefill: `prefill_tokens` queries with their raw keys and values, as a model's
    first step calls it. write: one token's keys and values, beside a 16-bit index_put of both.

    Args:
        formats: names in `FORMATS`; with a suffix (`int4+w32s4`) decode alone, with a raw window and sinks.
        backend: see `select_backend`.
        contexts, prefill_tokens: tokens.
        threads: of torch; its setting is restored.
        repeats: turns of each arrangement, after two that are not timed.
        progress: called with a line before each measurement.

    Returns:
        Rows of op, shape, format, backend, baseline, time_us, baseline_us, ratio (baseline / time: above 1 is faster; None
        where the error is above `MAX_ERROR`), threads, rel_err (None for writes).
    """
    before = torch.get_num_threads()
    rows = []
    contexts, formats = tuple(contexts), tuple(formats)
    try:
        for count in threads:
            torch.set_num_threads(count)
            for shape in SHAPES:
                for name in formats:
                    jobs = [_decode(shape, name, backend, context) for context in contexts]
                    if split_window(name)[0] == name:  # a window changes what a decoded token reads
                        jobs += [_prefill(shape, name, backend, prefill_tokens), _write(shape, name, backend)]
                    for make in jobs:
                        op, label, ours, theirs, error = make()
                        progress(f"{op} {label} {name}, {count} threads")
                        row = _row(ours, theirs, error, repeats if op != "prefill" else max(3, repeats // 2))
                        rows.append({"op": op, "shape": label, "format": name, **row, "threads": count})
    finally:
        torch.set_num_threads(before)
    for row in rows:
        row["backend"] = backend
    return rows


def _row(ours: Calls, theirs: Arrangements, error: float | None, repeats: int) -> dict[str, Any]:
    calls = {"": ours, **theirs}
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for turn in range(repeats + 2):
            for name, turn_calls in calls.items():
                begin = time.perf_counter()
                for call in turn_calls:
                    call()
                if turn >= 2:
                    times[name].append((time.perf_counter() - begin) * 1e6 / len(turn_calls))
    medians = {name: statistics.median(values) for name, values in times.items()}
    baseline = min(theirs, key=medians.__getitem__)
    good = error is None or error <= MAX_ERROR
    return {
        "baseline": baseline,
        "time_us": medians[""],
        "baseline_us": medians[baseline],
        "ratio": medians[baseline] / medians[""] if good else None,
        "rel_err": error,
    }


Job = Callable[[], tuple[str, str, Calls, Arrangements, float | None]]


def _decode(shape: tuple[int, int, int], name: str, backend: str, context: int) -> Job:
    def make() -> tuple[str, str, Calls, Arrangements, float | None]:
        heads, kv_heads, head_size = shape
        states = [_State(shape, name, context, 1) for _ in range(LAYERS)]
        ours: Calls = [
            partial(paged_attention, *state.inputs, out=state.out, backend=backend, **state.raw) for state in states
        ]
        theirs: Arrangements = {}
        for dtype in (torch.bfloat16, torch.float32):
            packed, grouped = f"SDPA {_short(dtype)}, packed heads", f"SDPA {_short(dtype)}, enable_gqa"
            theirs |= {packed: [], grouped: []}
            for state in states:
                # [1, KV heads, group, head_size]: the heads of a group as rows, which torch does not find by itself.
                rows = state.query.view(1, kv_heads, heads // kv_heads, head_size).to(dtype)
                query = state.query.transpose(0, 1)[None].to(dtype)
                key, value = (x.transpose(0, 1)[None].to(dtype).contiguous() for x in (state.key, state.value))
                theirs[packed].append(_sdpa(rows, key, value))
                theirs[grouped].append(_sdpa(query, key, value, enable_gqa=True))
        error = states[0].error(states[0].query, backend)
        return "decode", f"{heads}/{kv_heads} D={head_size} L={context}", ours, theirs, error

    return make


def _prefill(shape: tuple[int, int, int], name: str, backend: str, tokens: int) -> Job:
    def make() -> tuple[str, str, Calls, Arrangements, float | None]:
        heads, kv_heads, head_size = shape
        state = _State(shape, name, tokens, tokens)

        def ours() -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
            return paged_attention(*state.inputs, out=state.out, key=state.key, value=state.value, backend=backend)

        theirs: Arrangements = {}
        query, key, value = (x.transpose(0, 1)[None].contiguous() for x in (state.query, state.key, state.value))
        repeated = [x.repeat_interleave(heads // kv_heads, 1) for x in (key, value)]
        for dtype in (torch.bfloat16, torch.float32):
            theirs[f"SDPA {_short(dtype)}, repeated heads"] = [_sdpa_in(dtype, query, *repeated, is_causal=True)]
            theirs[f"SDPA {_short(dtype)}, enable_gqa"] = [
                _sdpa_in(dtype, query, key, value, is_causal=True, enable_gqa=True)
            ]
        few = state.query[-8:].contiguous()
        return "prefill", f"{heads}/{kv_heads} D={head_size} T={tokens}", [ours], theirs, state.error(few, backend)

    return make


def _write(shape: tuple[int, int, int], name: str, backend: str) -> Job:
    def make() -> tuple[str, str, Calls, Arrangements, float | None]:
        heads, kv_heads, head_size = shape
        state = _State(shape, name, 4096, 1)
        key, value, slot = state.key[:1].clone(), state.value[:1].clone(), torch.tensor([1234])
        kv_cache, layout = state.inputs[1], state.layout

        def theirs() -> None:
            state.key.index_put_((slot,), key)
            state.value.index_put_((slot,), value)

        def ours() -> None:
            reshape_and_cache(key, value, kv_cache, slot, layout, backend=backend)

        return "write", f"{heads}/{kv_heads} D={head_size} T=1", [ours], {"index_put bf16": [theirs]}, None

    return make


class _State:
    """One sequence in pages, and the raw rows that it was written from."""

    def __init__(self, shape: tuple[int, int, int], name: str, tokens: int, queries: int) -> None:
        heads, kv_heads, head_size = shape
        gen = torch.Generator().manual_seed(0)

        def rows(count: int, of: int) -> torch.Tensor:
            return torch.randn(count, of, head_size, generator=gen).to(torch.bfloat16)

        self.query, self.key, self.value = rows(queries, heads), rows(tokens, kv_heads), rows(tokens, kv_heads)
        base, window, sinks = split_window(name)
        self.layout = KVCacheLayout.create(base, num_kv_heads=kv_heads, head_size=head_size)
        num_blocks = -(-tokens // self.layout.block_size)
        kv_cache = self.layout.allocate(num_blocks)
        order = torch.randperm(num_blocks, generator=gen)  # pages as a server leaves them
        position = torch.arange(tokens)
        slots = order[position // self.layout.block_size] * self.layout.block_size + position % self.layout.block_size
        reshape_and_cache(self.key, self.value, kv_cache, slots, self.layout)
        self.inputs = (
            self.query, kv_cache, order.to(torch.int32)[None], torch.tensor([tokens], dtype=torch.int32),
            torch.tensor([0, queries], dtype=torch.int32), self.layout,
        )  # fmt: skip
        self.out = torch.full((queries, heads, head_size), torch.nan, dtype=torch.bfloat16)
        self.unquantized = (position < sinks) | (position >= tokens - window)
        self.raw: dict[str, Any] = {}
        if window or sinks:
            kept = position[self.unquantized]
            places = torch.where(kept < sinks, kept, sinks + (kept - sinks) % max(window, 1))
            self.raw = {"raw_window": window, "raw_sinks": sinks}
            for side, whole in (("raw_key", self.key), ("raw_value", self.value)):
                self.raw[side] = torch.empty(1, sinks + window, kv_heads, head_size, dtype=torch.bfloat16)
                self.raw[side][0, places] = whole[kept]

    def error(self, query: torch.Tensor, backend: str) -> float:
        """Return the relative error of the last queries' rows against float64 over the same pages, float32 output."""
        _, kv_cache, table, seq_lens, _, layout = self.inputs
        starts = torch.tensor([0, query.shape[0]], dtype=torch.int32)
        out = paged_attention(query.float(), kv_cache, table, seq_lens, starts, layout, backend=backend, **self.raw)
        assert isinstance(out, torch.Tensor)
        key, value = gather_and_dequantize(kv_cache, table[0], int(seq_lens), layout)
        if self.raw:
            key[self.unquantized], value[self.unquantized] = (x[self.unquantized].float() for x in (self.key, self.value))
        key, value = (x.double().transpose(0, 1)[None] for x in (key, value))
        length, count = key.shape[2], query.shape[0]
        mask = torch.arange(length)[None, :] <= torch.arange(length - count, length)[:, None]
        expected = torch.nn.functional.scaled_dot_product_attention(
            query.double().transpose(0, 1)[None], key, value, attn_mask=mask, enable_gqa=True
        )[0].transpose(0, 1)
        return float((out.double() - expected).norm() / expected.norm())


def _sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Callable[[], object]:
    return lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)


def _sdpa_in(dtype: torch.dtype, *rows: torch.Tensor, **options: Any) -> Callable[[], object]:
    """Attend in another dtype than the model's, which has to convert what it has just computed."""

    def call() -> torch.Tensor:
        query, key, value = (x.to(dtype) for x in rows)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, **options).to(rows[0].dtype)

    return call


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
