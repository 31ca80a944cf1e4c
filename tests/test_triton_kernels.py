"""Every kernel of the Triton backend against the reference, on the same pages, poisoned where nothing may be read.

Runs on a GPU where there is one, else in Triton's interpreter (`test_triton_interpreter.py` starts it so). Shapes are small
and odd; outputs start as NaN, pages as 0xFF, unused block-table entries far out of range.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

import fuzz
import pytest
import torch
from interpreter import take_numpy_2_4

from nibblekv import AttentionOptions, KVCacheLayout
from nibblekv.backends import reference
from nibblekv.rotation import inverse_gain, rotate, unrotate

ON_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1", reason="no GPU, no interpreter")
if ON_GPU or os.environ.get("TRITON_INTERPRET") == "1":
    from nibblekv.backends import triton as backend
    from nibblekv.backends.triton import attention, codec, prefill, rotation, write

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
HEADS = 2
NAN = float("nan")


@pytest.fixture(autouse=True)
def _interpreter_takes_numpy_2_4(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        take_numpy_2_4(monkeypatch.setattr)


@dataclasses.dataclass
class Batch:
    """A cache that holds sequences, and queries at their ends."""

    layout: KVCacheLayout
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    max_query_len: int
    max_seq_len: int

    def attend(
        self, module: Any, options: AttentionOptions, raw: bool = False, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, log-sum-exp) of a backend, both poisoned before."""
        if dtype is None:
            dtype = self.query.dtype if options.output_scale is None else torch.float8_e4m3fn
        shape = (*self.query.shape[:2], self.layout.head_size_v)
        out = torch.empty(shape, dtype=dtype, device=DEVICE)
        out.view(torch.uint8).fill_(0xFF)
        lse = torch.full(shape[:2], NAN, device=DEVICE)
        module.paged_attention(
            self.query, self.kv_cache, self.block_table, self.seq_lens, self.query_start_loc, self.layout, options, out, lse,
            self.key if raw else None, self.value if raw else None, self.max_query_len, self.max_seq_len,
        )  # fmt: skip
        return out, lse


def make_batch(
    layout: KVCacheLayout,
    query_lens: list[int],
    seq_lens: list[int],
    group: int = 2,
    dtype: torch.dtype = torch.float32,
    index: torch.dtype = torch.int32,
    change: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None,
) -> Batch:
    """Fill a poisoned cache by the reference; `change` may alter a sequence's keys and values first."""
    torch.manual_seed(1)
    pages = [-(-n // layout.block_size) for n in seq_lens]
    kv_cache = layout.allocate(sum(pages) + 2, DEVICE)
    kv_cache.fill_(0xFF)
    order = torch.randperm(sum(pages) + 2)
    table = torch.full((len(pages), max(pages) + 1), -123456, dtype=index)
    keys, values, used = [], [], 0
    for seq, (count, seq_len, query_len) in enumerate(zip(pages, seq_lens, query_lens, strict=True)):
        table[seq, :count] = order[used : used + count]
        used += count
        position = torch.arange(seq_len)
        slots = table[seq].long()[position // layout.block_size] * layout.block_size + position % layout.block_size
        key = torch.randn(seq_len, layout.num_kv_heads, layout.head_size).to(dtype)
        value = torch.randn(seq_len, layout.num_kv_heads, layout.head_size_v).to(dtype)
        if change is not None:
            change(seq, key, value)
        reference.reshape_and_cache(key.to(DEVICE), value.to(DEVICE), kv_cache, slots.to(DEVICE), layout)
        keys.append(key[seq_len - query_len :])
        values.append(value[seq_len - query_len :])
    query = torch.randn(sum(query_lens), layout.num_kv_heads * group, layout.head_size).to(dtype)
    return Batch(
        layout, query.to(DEVICE), torch.cat(keys).to(DEVICE), torch.cat(values).to(DEVICE), kv_cache, table.to(DEVICE),
        torch.tensor(seq_lens, dtype=index, device=DEVICE),
        torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=index, device=DEVICE),
        max(query_lens), max(seq_lens),
    )  # fmt: skip


def raw_rows(batch: Batch, window: int, sinks: int, dtype: torch.dtype = torch.float32, spare: int = 2) -> dict[str, Any]:
    """Return the options of a raw window and sinks: rows that have nothing to do with the stored ones, all others NaN."""
    torch.manual_seed(3)
    ring = window + batch.max_query_len - 1 + spare if window else 0
    position = torch.arange(batch.max_seq_len)
    places = torch.where(position < sinks, position, sinks + (position - sinks) % max(ring, 1))
    tensors = []
    for head_size in (batch.layout.head_size, batch.layout.head_size_v):
        # A slice of a wider store: strides are not the shape's.
        shape = (batch.seq_lens.shape[0], sinks + ring, batch.layout.num_kv_heads + 1, head_size)
        store = torch.full(shape, NAN, dtype=dtype)[:, :, 1:]
        for seq, seq_len in enumerate(batch.seq_lens.tolist()):
            kept = [p for p in range(seq_len) if p < sinks or p >= seq_len - ring]
            store[seq, places[kept]] = torch.randn(len(kept), batch.layout.num_kv_heads, head_size).to(dtype)
        tensors.append(store.to(DEVICE))
    return {"raw_key": tensors[0], "raw_value": tensors[1], "raw_window": window, "raw_sinks": sinks}


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return |out - expected| / |expected|; NaN if out holds one."""
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def create(format: str = "int4", head_size: int = 64, **options: Any) -> KVCacheLayout:
    return KVCacheLayout.create(format, num_kv_heads=HEADS, head_size=head_size, **options)


LAYOUTS = {
    "int4-128": create(head_size=128),
    "vllm-int4-64": create("int4_per_token_head"),
    "vllm-int4-80-nhd": create("int4_per_token_head", 80, block_order="NHD"),
    "int8-int4-72-96": create("int8_per_token_head", 72, v_format="int4", head_size_v=96, block_size=48),
    "fp8-vllm-int4-72-32": create("fp8_per_token_head", 72, v_format="int4_per_token_head", head_size_v=32, page="planar"),
    "int4-interleaved-256-200": create(head_size=256, head_size_v=200, page="interleaved"),
    "int4-fp8-40-512": create(head_size=40, v_format="fp8_per_token_head", head_size_v=512),
    "int3-int2-64-40": create("int3", v_format="int2", head_size_v=40),
    "int2-int3-interleaved-40-96": create("int2", 40, v_format="int3", head_size_v=96, page="interleaved"),
}


# The part of scale words that sums in another order may round to another bfloat16.
WORDS_OFF = 0.05


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"])
def test_write_equals_reference(layout: KVCacheLayout, dtype: torch.dtype) -> None:
    """Codes differ by one in few elements at most (sums in another order); NaN rows, constant rows, skipped slots."""
    torch.manual_seed(0)
    pad = 3  # rows of a larger tensor: strides are not the shape's
    key = torch.randn(9, HEADS + pad, layout.head_size).to(dtype)[:, :HEADS]
    value = torch.randn(9, HEADS + pad, layout.head_size_v).to(dtype)[:, :HEADS]
    key[1, 1, 3], value[2, 0, 1] = NAN, float("inf")
    value[3], key[4] = 0.0, 1.5
    key[5] *= 3e4 if dtype == torch.float16 else 1e6  # near the largest float16, where 16-bit rotations overflow
    key.clamp_(-65504, 65504)
    num_slots = 3 * layout.block_size
    slots = torch.tensor([3, 17, -1, 30, 8, 9, num_slots, num_slots - 1, 0], device=DEVICE)
    ours, expected = layout.allocate(3, DEVICE), layout.allocate(3, DEVICE)
    ours.fill_(0xAA)
    expected.fill_(0xAA)
    write.reshape_and_cache(key.to(DEVICE), value.to(DEVICE), ours, slots, layout)
    keep = slots < num_slots
    reference.reshape_and_cache(key.to(DEVICE)[keep], value.to(DEVICE)[keep], expected, slots[keep], layout)
    assert (ours != expected).float().mean() < 0.005
    for name in ("k_scale_cache", "v_scale_cache"):
        mine, theirs = (getattr(layout.views(x), name).view(torch.float32) for x in (ours, expected))
        assert torch.equal(mine.isnan(), theirs.isnan())
    if layout.k_format.word == "scale_min":  # else a key's words, a few bytes of many, could all be those of a value
        mine, theirs = (layout.views(x).k_scale_cache for x in (ours, expected))
        assert (mine != theirs).sum() <= 1 + WORDS_OFF * (8 * HEADS)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_attention_equals_reference(layout: KVCacheLayout) -> None:
    batch = make_batch(layout, [1, 4], [19, 50], group=3, index=torch.int64)
    options = AttentionOptions(softmax_scale=layout.head_size**-0.5)
    out, lse = batch.attend(backend, options)
    expected, expected_lse = batch.attend(reference, options)
    assert relative_error(out, expected) < 1e-3
    torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=0)


@pytest.mark.parametrize("size", [1.0, 2.0**-10], ids=["ordinary", "tiny"])
@pytest.mark.parametrize("format", ["int4", "int4_per_token_head", "fp8_per_token_head"])
def test_large_scores_lose_the_float16_rounding_of_queries_and_nothing_else(format: str, size: float) -> None:
    """Catches a coarser query, and an error of another kind that passes for its rounding: 1e-3 does not hold such scores.

    A large channel in queries and keys makes scores of several hundred. With the rotated query rounded as the kernel holds
    it, the reference agrees as ever. Queries lie on a grid on which every order of summing rotates them to equal values.
    """

    def widen(seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        key[..., 5] *= 30
        key /= size

    batch = make_batch(create(format), [2, 1], [40, 23], change=widen)
    batch.query.mul_(4096).round_().mul_(size / 4096)
    batch.query[..., 5] *= 30
    options = AttentionOptions(softmax_scale=0.25)
    out, lse = batch.attend(backend, options)
    exact_lse = batch.attend(reference, options)[1]
    kind, gain = batch.layout.k_format.rotation, attention.QUERY_GAIN.value
    gain *= math.sqrt(inverse_gain(kind, batch.layout.head_size))
    held = (rotate(batch.query, kind) * gain).to(torch.float16).float() / gain
    rounded, rounded_lse = dataclasses.replace(batch, query=unrotate(held, kind)).attend(reference, options)
    assert (lse - exact_lse).abs().max() > 2e-3
    torch.testing.assert_close(lse, rounded_lse, atol=1e-3, rtol=0)
    assert relative_error(out, rounded) < 1e-3


@pytest.mark.parametrize("group", [1, 5, 40])
def test_groups_of_query_heads(group: int) -> None:
    """A tile of rows may begin and end inside the heads of one token."""
    batch = make_batch(create(), [2], [21], group=group, dtype=torch.float16)
    options = AttentionOptions(softmax_scale=0.2)
    assert relative_error(batch.attend(backend, options)[0], batch.attend(reference, options)[0]) < 1e-3


def _slopes() -> torch.Tensor:
    return torch.tensor([0.5, 0.1, 0.02, 1.0], device=DEVICE)


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "window": lambda: {"sliding_window": 13},
    "window-both-sides": lambda: {"sliding_window": 13, "causal": False},
    "not-causal": lambda: {"causal": False},
    "causal-per-sequence": lambda: {"causal": torch.tensor([False, True], device=DEVICE)},
    "chunks": lambda: {"sliding_window": 16, "chunk_lookback": 1},
    "rswa": lambda: {"rswa_prefix_lens": torch.tensor([3, 20], device=DEVICE), "rswa_window": 7},
    "softcap": lambda: {"softcap": 2.0},
    "softcap-far-exceeded": lambda: {"softcap": 0.005},
    "alibi": lambda: {"alibi_slopes": _slopes()},
    "alibi-sqrt": lambda: {"alibi_slopes": _slopes(), "alibi_sqrt": True},
    "sinks": lambda: {"sinks": torch.tensor([-2.0, 0.0, 3.0, 9.0], device=DEVICE)},
    "qq-bias": lambda: {"qq_bias": torch.linspace(-2, 2, 25, device=DEVICE).view(5, 5)},
    "mm-prefix": lambda: {
        "mm_prefix_ranges": torch.tensor([[[15, 22], [5, 5]], [[2, 50], [7, 3]]], dtype=torch.int32, device=DEVICE),
        "sliding_window": 9,
    },
    "mm-prefix-clamped": lambda: {
        "mm_prefix_ranges": torch.tensor([[[5, 22], [5, 5]], [[2, 52], [7, 3]]], dtype=torch.int32, device=DEVICE),
        "sliding_window": 9,
        "mm_prefix_clamp": True,
    },
    "fp8-output": lambda: {"output_scale": torch.tensor([0.001], device=DEVICE)},  # a part of the values saturates
    "batch-invariant": lambda: {"batch_invariant": True},
    "host-lengths": lambda: {"host_lengths": ([0, 2, 7], [23, 54])},
}


@pytest.mark.parametrize("raw", [False, True], ids=["stored", "raw"])
@pytest.mark.parametrize("name", OPTIONS)
def test_option_equals_reference(name: str, raw: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases 12, 14 and 11 among them: finite softcap, clamped ranges, float8 after the inverse rotation."""
    monkeypatch.setattr(prefill, "LONG_QUERY", 5)  # one sequence of each kind
    monkeypatch.setattr(prefill, "WORKSPACE_BYTES", 16 * 2 * 128)  # 16 keys of one head at a time
    layout = create("int4_per_token_head") if name == "fp8-output" else create()
    batch = make_batch(layout, [2, 5], [23, 54])
    options = AttentionOptions(softmax_scale=0.125, **OPTIONS[name]())
    out, lse = batch.attend(backend, options, raw)
    expected, expected_lse = batch.attend(reference, options, raw, dtype=torch.float32)
    assert relative_error(out, expected) < (0.04 if name == "fp8-output" else 1e-3)
    torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=1e-3)


# Borders inside tiles and across them, a window longer than a sequence, one without the other.
WINDOWS = [(7, 3), (1, 0), (0, 5), (40, 66)]


# What the part of the queries' own keys, or the dequantized prefix, could lack.
OWN_OPTIONS = ["window", "softcap", "sinks", "fp8-output", "batch-invariant"]


@pytest.mark.parametrize(
    ("name", "own"),
    [(name, False) for name in OPTIONS] + [(name, True) for name in (OPTIONS if ON_GPU else OWN_OPTIONS)],
)
def test_raw_window_with_every_option(name: str, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a raw score that lacks what a packed one gets, and keys that are read in both forms, or in neither."""
    monkeypatch.setattr(prefill, "LONG_QUERY", 5)
    # 16 keys of one head, and three queries, at a time; once is enough for the slow interpreter.
    monkeypatch.setattr(prefill, "WORKSPACE_BYTES", 16 * 2 * 128 if ON_GPU or name == "window" else 1 << 20)
    layout = create("int4_per_token_head") if name == "fp8-output" else create()
    batch = make_batch(layout, [2, 5], [23, 54])
    for window, sinks in WINDOWS if ON_GPU else WINDOWS[:1]:
        options = AttentionOptions(softmax_scale=0.125, **OPTIONS[name](), **raw_rows(batch, window, sinks))
        out, lse = batch.attend(backend, options, own)
        expected, expected_lse = batch.attend(reference, options, own, dtype=torch.float32)
        assert relative_error(out, expected) < (0.04 if name == "fp8-output" else 1e-3), (window, sinks)
        torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=1e-3)


def test_indices_of_any_strides() -> None:
    """Catches kernels that take the columns of a table, and every second entry of a list, for neighbours."""
    layout = create()
    batch = make_batch(layout, [1, 3], [20, 50])
    options = AttentionOptions(softmax_scale=0.125)
    expected, _ = batch.attend(reference, options)

    def spread(index: torch.Tensor) -> torch.Tensor:
        return torch.stack((index, torch.full_like(index, -9)), -1).flatten(-2)[..., ::2]

    strided = dataclasses.replace(
        batch,
        block_table=spread(batch.block_table),
        seq_lens=spread(batch.seq_lens),
        query_start_loc=spread(batch.query_start_loc),
    )
    assert relative_error(strided.attend(backend, options)[0], expected) < 1e-3
    slots = spread(torch.tensor([3, 17, 30, 8], device=DEVICE))
    rows = torch.randn(2, 4, HEADS, layout.head_size, device=DEVICE)
    ours, theirs = layout.allocate(3, DEVICE), layout.allocate(3, DEVICE)
    backend.reshape_and_cache(*rows, ours, slots, layout)
    backend.reshape_and_cache(*rows, theirs, slots.contiguous(), layout)
    assert ours.any()
    assert torch.equal(ours, theirs)


def test_options_of_any_strides() -> None:
    """Catches kernels that take the next sequence's or head's entry for the neighbour of the last: here it is NaN or -9."""
    layout = create()
    batch = make_batch(layout, [2, 3], [40, 50])

    def spread(entries: list[Any], other: Any) -> torch.Tensor:
        return torch.tensor([[x, other] for x in entries], device=DEVICE)[:, 0]

    given = {
        "causal": spread([False, True], True), "rswa_prefix_lens": spread([5, 17], -9), "rswa_window": 6,
        "alibi_slopes": spread([0.1, 0.2, 0.3, 0.4], NAN), "sinks": torch.zeros(1, device=DEVICE).expand(4),
    }  # fmt: skip
    options = AttentionOptions(softmax_scale=0.125, **given)
    for raw in (False, True):
        expected, expected_lse = batch.attend(reference, options, raw)
        out, lse = batch.attend(backend, options, raw)
        assert relative_error(out, expected) < 1e-3
        torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=1e-3)


def test_an_integer_softcap_is_launched_as_a_float(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a kernel compiled for an integer, which a later launch with the equal float would take for its own."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(attention, "launch", lambda *arguments, **options: seen.append(arguments[3]))
    layout = create()
    make_batch(layout, [1], [20]).attend(backend, AttentionOptions(softmax_scale=0.125, softcap=30))
    assert [type(x) for x in seen[0] if x == 30] == [float]


@pytest.mark.skipif(ON_GPU, reason="needs 13 GiB of addresses, of which memory is not behind all")
@pytest.mark.parametrize("raw", [False, True], ids=["packed", "dequantized"])
def test_heads_gigabytes_apart(raw: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches 32-bit products of a head and its stride: the third head lies 2^31 words behind the first."""
    layout = KVCacheLayout.create("int4", num_kv_heads=3, head_size=64)
    monkeypatch.setattr(prefill, "LONG_QUERY", 4 if raw else prefill.LONG_QUERY)
    batch = make_batch(layout, [5], [45])
    blocks, head_bytes = batch.kv_cache.shape[0], (1 << 32) + 4096
    strides = (layout.page_bytes // 3, head_bytes, 1)
    far = torch.empty(3 * head_bytes, dtype=torch.uint8).as_strided(batch.kv_cache.shape, strides)
    key, value = torch.randn(2, 16 * blocks, 3, 64)
    for cache in (far, batch.kv_cache):
        backend.reshape_and_cache(key, value, cache, torch.arange(16 * blocks), layout)
    assert torch.equal(far, batch.kv_cache)
    options = AttentionOptions(softmax_scale=0.125)
    expected, _ = batch.attend(reference, options, raw)
    out, _ = dataclasses.replace(batch, kv_cache=far).attend(backend, options, raw)
    assert relative_error(out, expected) < 1e-3


@pytest.mark.parametrize(("window", "sinks"), WINDOWS)
def test_raw_window_of_one_query(window: int, sinks: int) -> None:
    """Decoding, where all rows share a limit and whole tiles are left out; the first sequence is shorter than the window."""
    batch = make_batch(create(), [1, 1, 1], [5, 64, 200], group=3)
    options = AttentionOptions(softmax_scale=0.125, **raw_rows(batch, window, sinks, spare=0))
    out, lse = batch.attend(backend, options)
    expected, expected_lse = batch.attend(reference, options)
    assert relative_error(out, expected) < 1e-3
    torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=0)


DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("query_dtype", DTYPES if ON_GPU else DTYPES[1:2], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_raw_window_of_any_dtype(dtype: torch.dtype, query_dtype: torch.dtype) -> None:
    """Catches queries or weights that are rounded to the dtype of the raw rows."""
    batch = make_batch(create(), [3], [70], dtype=query_dtype)
    options = AttentionOptions(softmax_scale=0.125, **raw_rows(batch, 32, 4, dtype))
    out, _ = batch.attend(backend, options, dtype=torch.float32)
    assert relative_error(out, batch.attend(reference, options, dtype=torch.float32)[0]) < 1e-3


@pytest.mark.parametrize("name", LAYOUTS if ON_GPU else ["int8-int4-72-96", "int4-interleaved-256-200"])
def test_raw_window_beside_every_layout(name: str) -> None:
    """Catches raw rows that are rotated back, and head sizes of keys and values that are mixed up."""
    layout = LAYOUTS[name]
    batch = make_batch(layout, [1, 4], [19, 50], group=3, index=torch.int64)
    dtype = torch.float32 if layout.head_size_v <= backend.WIDEST_RAW else torch.bfloat16
    options = AttentionOptions(softmax_scale=layout.head_size**-0.5, **raw_rows(batch, 9, 2, dtype))
    assert backend.supports(layout, options, DEVICE) is None
    out, lse = batch.attend(backend, options)
    expected, expected_lse = batch.attend(reference, options)
    assert relative_error(out, expected) < 1e-3
    torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=0)


def test_wide_raw_rows_of_float32_are_refused() -> None:
    layout = LAYOUTS["int4-fp8-40-512"]
    options = AttentionOptions(softmax_scale=1.0, **raw_rows(make_batch(layout, [1], [2]), 1, 0))
    assert "head size 256, got 512" in (backend.supports(layout, options, DEVICE) or "")


@pytest.mark.parametrize("own", [False, True], ids=["stored", "own"])
def test_raw_nan_reaches_exactly_the_queries_that_read_it(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query beyond the window reads the stored form of the same position, which is a number."""
    monkeypatch.setattr(prefill, "LONG_QUERY", 4)
    batch = make_batch(create(), [4, 2], [40, 30])
    raw = raw_rows(batch, 6, 2)
    ring = raw["raw_key"].shape[1] - 2
    raw["raw_value"][0, 2 + (32 - 2) % ring, 0, 7] = float("inf")  # queries 36 and 37 read it, 38 and 39 do not
    raw["raw_key"][1, 1, 1, 3] = NAN  # a sink
    options = AttentionOptions(softmax_scale=0.125, **raw)
    out, _ = batch.attend(backend, options, own)
    expected, _ = batch.attend(reference, options, own)
    assert torch.equal(out.isnan(), expected.isnan())
    assert out[:2, :2].isnan().all()
    assert not out[:4, 2:].isnan().any()
    assert not out[2:4].isnan().any()
    assert out[4:, 2:].isnan().all()
    clean = ~expected.isnan()
    assert relative_error(out[clean], expected[clean]) < 1e-3


def test_packed_nan_inside_the_window_changes_nothing() -> None:
    """The page of a token that is read raw may hold anything."""

    def spoil(seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        key[-3:, 0], value[1] = NAN, NAN

    batch = make_batch(create(), [1, 2], [20, 70], change=spoil)
    options = AttentionOptions(softmax_scale=0.125, **raw_rows(batch, 5, 2))
    out, _ = batch.attend(backend, options)
    assert relative_error(out, batch.attend(reference, options)[0]) < 1e-3


@pytest.mark.parametrize(
    "layout", [create("int3", v_format="int2", head_size_v=40), create(v_format="int3")], ids=["int3-int2", "int4-int3"]
)
def test_prefix_of_few_bits_equals_reference(layout: KVCacheLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches planes that the kernel for long prefixes puts together wrongly."""
    monkeypatch.setattr(prefill, "LONG_QUERY", 5)
    batch = make_batch(layout, [2, 5], [23, 54])
    options = AttentionOptions(softmax_scale=0.125)
    out, _ = batch.attend(backend, options, raw=True)
    assert relative_error(out, batch.attend(reference, options, raw=True)[0]) < 1e-3


def test_row_that_sees_nothing_is_zero() -> None:
    """A window that ends before the query hides every key."""
    batch = make_batch(create(), [1], [17])
    options = AttentionOptions(softmax_scale=0.125, rswa_prefix_lens=torch.tensor([0], device=DEVICE), rswa_window=-5)
    out, lse = batch.attend(backend, options)
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("raw", [False, True], ids=["stored", "raw"])
def test_hidden_nan_changes_nothing_and_visible_nan_spoils_only_its_rows(raw: bool) -> None:
    """Case 13: 0 * NaN. Key 3 of head 0 and value 9 of head 1 are NaN; the window hides them from the second sequence."""

    def spoil(seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        key[3, 0, 0] = NAN
        value[9, 1, 5] = NAN

    batch = make_batch(create(), [2, 2], [20, 40], change=spoil)
    options = AttentionOptions(softmax_scale=0.125, sliding_window=18)
    out, _ = batch.attend(backend, options, raw)
    expected, _ = batch.attend(reference, options, raw)
    assert torch.equal(out.isnan(), expected.isnan())
    assert expected[:2].isnan().any()
    assert not expected[2:].isnan().any()
    assert relative_error(out[2:], expected[2:]) < 1e-3


@pytest.mark.parametrize("scale", [1e-4, 1.0, 3e4], ids=["tiny", "normal", "huge"])
def test_value_scales_beyond_float16(scale: float) -> None:
    """P times the value scale is held as float16: unscaled it would overflow or vanish. Half the rows are constant."""

    def rescale(seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        value *= scale
        value[::2] = value[::2, :, :1] * 0 + scale

    batch = make_batch(create("int4_per_token_head"), [3], [40], change=rescale)
    options = AttentionOptions(softmax_scale=0.125)
    assert relative_error(batch.attend(backend, options)[0], batch.attend(reference, options)[0]) < 1e-3


def test_batch_invariant_rows_are_bitwise_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 16: the same sequence alone, and beside longer ones with more queries. Splits to fill the device would differ."""
    monkeypatch.setattr(attention, "INVARIANT_SPLIT", 128)
    monkeypatch.setattr(attention, "multiprocessors", lambda device: 4)
    splits = [attention.choose_config(create(), n, 4, 1, 290, False, DEVICE).num_splits for n in (1, 2)]
    assert splits[0] != splits[1]
    options = AttentionOptions(softmax_scale=0.125, batch_invariant=True)
    alone = make_batch(create(), [1], [150])
    among = make_batch(create(), [1, 6], [150, 290])
    assert torch.equal(alone.query[0, 0, :0], among.query[0, 0, :0])
    among.query[0], table = alone.query[0], among.block_table
    alone.kv_cache, alone.block_table = among.kv_cache, table[:1]
    assert torch.equal(alone.attend(backend, options)[0][0], among.attend(backend, options)[0][0])
    raw = raw_rows(among, 40, 3)
    first = {**raw, "raw_key": raw["raw_key"][:1], "raw_value": raw["raw_value"][:1]}
    windowed, its = (dataclasses.replace(options, **x) for x in (raw, first))
    assert torch.equal(alone.attend(backend, its)[0][0], among.attend(backend, windowed)[0][0])


def test_batch_invariant_prompts_are_bitwise_equal() -> None:
    """A prompt alone and beside one with a prefix, with sinks: made in one pass and merged of two, its rows would differ."""
    among = make_batch(create(), [20, 5], [20, 9])
    alone = dataclasses.replace(
        among, query=among.query[:20], key=among.key[:20], value=among.value[:20], block_table=among.block_table[:1],
        seq_lens=among.seq_lens[:1], query_start_loc=among.query_start_loc[:2],
    )  # fmt: skip
    sinks = torch.randn(among.query.shape[1], device=DEVICE)
    options = AttentionOptions(softmax_scale=0.125, batch_invariant=True, sinks=sinks)
    together = among.attend(backend, options, raw=True)
    assert relative_error(together[0], among.attend(reference, options, raw=True)[0]) < 1e-3
    for lone, beside in zip(alone.attend(backend, options, raw=True), together, strict=True):
        assert torch.equal(lone, beside[:20])


def test_splits_fill_the_device_for_any_query_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 15: no fall into one split when several draft tokens are verified."""
    monkeypatch.setattr(attention, "multiprocessors", lambda device: 132)
    layout = KVCacheLayout.create("int4", num_kv_heads=8, head_size=128)
    for query_len in (1, 2, 8, 16):
        config = attention.choose_config(layout, 1, 32, query_len, 7400, False, DEVICE)
        assert config.num_splits * 8 * -(-query_len * 4 // config.block_m) >= 132
    assert attention.choose_config(layout, 128, 32, 1, 8192, False, DEVICE).num_splits == 1


@pytest.mark.parametrize("windowed", [False, True], ids=["packed", "windowed"])
def test_splits_of_many_queries_stay_in_their_scratch_memory(windowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 23. Catches scratch memory sized for one query a sequence, by the keys' head size, or without the raw split."""
    monkeypatch.setattr(attention, "multiprocessors", lambda device: 9)
    made: list[tuple[torch.Tensor, int]] = []

    def scratch(count: int, device: torch.device) -> torch.Tensor:
        made.append((torch.full((count + 4096,), 7.0, device=device), count))
        return made[-1][0][:count]

    monkeypatch.setattr(attention, "scratch", scratch)
    batch = make_batch(create(head_size=40, v_format="int8_per_token_head", head_size_v=96), [1, 4], [19, 260], group=3)
    raw = raw_rows(batch, 9, 2) if windowed else {}
    options = AttentionOptions(softmax_scale=0.125, **raw)
    out, lse = batch.attend(backend, options)
    expected, expected_lse = batch.attend(reference, options)
    assert relative_error(out, expected) < 1e-3
    torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=0)
    ((buffer, count),) = made
    assert count >= 5 * 6 * 96 * 3, "at least three splits"
    assert (buffer[count:] == 7.0).all()


class SmallSharedMemory:
    """`dense_kernel` on a GPU that holds one stage, and tells that it needs more when it is loaded."""

    def __init__(self, kernel: Any, most_stages: int = 1) -> None:
        self.kernel, self.most_stages, self.refused = kernel, most_stages, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, STAGES: int, **kwargs: Any) -> Any:
            if self.most_stages < STAGES:
                self.refused += 1
                raise prefill.OutOfResources(262144, 232448, "shared memory")
            return self.kernel[grid](*args, STAGES=STAGES, **kwargs)

        return launch


def test_rows_too_wide_for_shared_memory_take_smaller_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a prefill that fails where tiles of the usual size do not fit: float32 rows of 256, or a smaller GPU."""
    batch = make_batch(create(head_size=256), [9], [9])
    options = AttentionOptions(softmax_scale=0.0625)
    expected = batch.attend(reference, options, raw=True)
    small = SmallSharedMemory(prefill.dense_kernel)
    monkeypatch.setattr(prefill, "dense_kernel", small)
    monkeypatch.setattr(prefill, "_too_large", {})
    for tried in (2, 2):  # the second call knows
        out, lse = batch.attend(backend, options, raw=True)
        assert relative_error(out, expected[0]) < 1e-3
        torch.testing.assert_close(lse, expected[1], atol=1e-3, rtol=0)
        assert small.refused == tried
    small.most_stages = 0
    with pytest.raises(NotImplementedError, match="do not fit in the shared memory"):
        batch.attend(backend, options, raw=True)


def test_workspace_is_bounded() -> None:
    """Case 25: dequantized keys and values and rotated queries never exceed 64 MiB, whatever the lengths."""
    for head_size, context, group in ((128, 30720, 4), (512, 1_000_000, 1), (64, 10, 1), (256, 30000, 8)):
        layout = KVCacheLayout.create("int4", num_kv_heads=8, head_size=head_size)
        rows = min(100_000, prefill.queries_at_once(layout, group)) * group
        heads, keys = prefill.workspace_chunks(layout, context, rows)
        assert heads * (2 * keys + rows) * 2 * head_size <= 64 << 20
        assert 8 % heads == 0
        assert 1 <= keys <= context


@pytest.mark.parametrize("name", ["host-lengths", "window", "alibi", "sinks", "softcap"])
def test_long_stored_queries_equal_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries that read stored keys alone, in slices over a dequantized prefix and their own keys."""
    monkeypatch.setattr(prefill, "LONG_QUERY", 5)
    monkeypatch.setattr(prefill, "queries_at_once", lambda layout, group: 4)
    batch = make_batch(create(), [2, 7], [23, 34])
    options = AttentionOptions(softmax_scale=0.125, **{**OPTIONS[name](), "host_lengths": ([0, 2, 9], [23, 34])})
    out, lse = batch.attend(backend, options)
    expected, expected_lse = batch.attend(reference, options, dtype=torch.float32)
    assert relative_error(out, expected) < 1e-3
    torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["alibi", "window"])
def test_slices_of_queries_keep_their_positions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches slices of a long prompt that take themselves for the last queries of the sequence."""
    monkeypatch.setattr(prefill, "LONG_QUERY", 5)
    monkeypatch.setattr(prefill, "queries_at_once", lambda layout, group: 2)
    batch = make_batch(create(), [2, 5], [23, 54])
    options = AttentionOptions(softmax_scale=0.125, **OPTIONS[name]())
    out, lse = batch.attend(backend, options, True)
    expected, expected_lse = batch.attend(reference, options, True, dtype=torch.float32)
    assert relative_error(out, expected) < 1e-3
    torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("head_size", [64, 96, 136, 256])
@pytest.mark.parametrize("kind", ["full", "block"])
def test_rotation_and_its_inverse(head_size: int, kind: Any) -> None:
    """136 = 8 * 17 has no Hadamard matrix here: Hartley's, float32."""
    from nibblekv.rotation import rotate, unrotate

    x = torch.randn(3, 2, head_size, device=DEVICE).to(torch.float16)
    torch.testing.assert_close(rotation.rotate(x, kind, dtype=torch.float32), rotate(x, kind), atol=1e-4, rtol=1e-4)
    y = torch.randn(5, head_size, device=DEVICE)
    torch.testing.assert_close(rotation.rotate(y, kind, inverse=True), unrotate(y, kind), atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not ON_GPU, reason="uses float8 conversion of torch as the oracle on many values")
def test_backend_is_available_on_gpu() -> None:
    assert backend.unavailable_reason() is None
    assert backend.supports(create(), None, DEVICE) is None


def test_formats_all_have_kernel_constants() -> None:
    """A format added to the table without its kernel constants must fail here, not at a launch."""
    from nibblekv import FORMATS

    for fmt in FORMATS.values():
        assert len(codec.format_constants(fmt)) == 2
        assert codec.read_word_bytes(fmt) in (1, 2, 4)


@pytest.mark.skipif(ON_GPU, reason="the fuzzer's tensors are the CPU's")
def test_random_calls_agree_with_a_dictionary_of_rows() -> None:
    """Catches what no test here lists; `make fuzz SECONDS=600` runs longer. The seed is in the message."""
    made, failure = fuzz.fuzz("triton", 5.0, seed=20_000)
    assert failure is None, str(failure)
    assert made > 0


@pytest.mark.skipif(ON_GPU, reason="the fuzzer's tensors are the CPU's")
def test_the_fuzzer_allows_the_rounding_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a bound of 1e-3 for scores that it cannot hold: a step of a model, shrunk, whose queries round to float16."""
    seed, calls = 7069, [("turn", 858912126605)]
    assert fuzz.run("triton", seed, calls)[0] is None
    monkeypatch.setattr(
        fuzz.Machine, "_score_rounding", lambda self, query, *rest: torch.zeros(query.shape[:2], dtype=torch.float64)
    )
    failure = fuzz.run("triton", seed, calls)[0]
    assert failure is not None
    assert "out: error" in failure
