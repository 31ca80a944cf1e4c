"""The CPU kernels' attention against the reference and float64 on the same pages, on each instruction set of the machine."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import struct

import pytest
import torch
from batches import POISON, Batch
from oracle import attend as oracle_attend
from test_attention import OPTIONS, QUERY_LENS, SEQ_LENS

from nibblekv import FORMATS, AttentionOptions, KVCacheLayout, paged_attention, reshape_and_cache
from nibblekv.backends import cpu, reference
from nibblekv.backends.cpu import _library
from nibblekv.rotation import inverse_gain, unrotate

pytestmark = pytest.mark.skipif(cpu.unavailable_reason() is not None, reason=str(cpu.unavailable_reason()))

# Operands of the integer dot products have 16 bits: 2^-16 of the largest value, summed over a row.
TOLERANCE = 4e-4
HEAD_SIZES = [32, 40, 64, 80, 96, 112, 128, 192, 256, 504, 512]


def machine_sets() -> list[str]:
    if cpu.unavailable_reason() is not None:
        return []
    sets = []
    for name in ("avx512", "avx2", "generic"):
        try:
            _library.use_instruction_set(name)
            sets.append(name)
        except ValueError:
            continue
    _library.use_instruction_set("")
    return sets


@pytest.fixture(params=machine_sets())
def instruction_set(request: pytest.FixtureRequest):
    _library.use_instruction_set(request.param)
    assert _library.instruction_set() == request.param
    yield request.param
    _library.use_instruction_set("")


def assert_close(out: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert out.isfinite().all()  # the output was NaN before the call
    assert expected.abs().max() > 0.1  # zeros must not pass
    error = (out.double() - expected.double()).norm(dim=-1)
    assert error.max() <= tolerance * expected.double().norm(dim=-1).max()


def assert_equals_reference(batch: Batch, tolerance: float = TOLERANCE, **options: object) -> None:
    out, lse = batch.attend(backend="cpu", return_lse=True, **options)
    expected, expected_lse = batch.attend(backend="reference", return_lse=True, **options)
    assert_close(out, expected, tolerance)
    assert torch.equal(lse.isinf(), expected_lse.isinf())
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("format", list(FORMATS))
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_every_format_and_head_size(instruction_set: str, format: str, head_size: int):
    """Catches a tail of a row that is dropped, doubled or read beyond its end (the bytes beyond are poison)."""
    layout = KVCacheLayout.create(format, num_kv_heads=2, head_size=head_size)
    assert_equals_reference(Batch.make(layout, [37, 5, 150], [3, 5, 1], 6))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("raw_chunk", [False, True], ids=["stored", "raw"])
def test_every_option(instruction_set: str, options: dict, raw_chunk: bool):
    """Catches an option that is accepted and ignored (cases 9, 10 and 14)."""
    layout = KVCacheLayout.create("int4", num_kv_heads=2, head_size=64)
    batch = Batch.make(layout, SEQ_LENS, QUERY_LENS, 6, seed=1)
    own = {"key": batch.key, "value": batch.value} if raw_chunk else {}
    assert_equals_reference(batch, **own, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 130},
        {"causal": False, "sliding_window": 200},
        {"sliding_window": 256, "chunk_lookback": 1},
        {"rswa_prefix_lens": torch.tensor([9, 150]), "rswa_window": 140},
        {"mm_prefix_ranges": torch.tensor([[[300, 420], [1, 3]], [[5, 200], [390, 399]]], dtype=torch.int32)},
    ],
    ids=["causal", "window", "non-causal window", "chunks", "R-SWA", "multimodal prefix"],
)
def test_ranges_that_cross_tiles(instruction_set: str, options: dict):
    """Catches a mask that is right inside a tile of 128 tokens and wrong where a range begins in one, ends in another."""
    layout = KVCacheLayout.create("int4", num_kv_heads=1, head_size=64, block_size=32)
    batch = Batch.make(layout, [430, 400], [150, 40], 2, seed=3)
    assert_equals_reference(batch, **options)
    assert_equals_reference(batch, key=batch.key, value=batch.value, **options)


@pytest.mark.parametrize(("cap", "scale"), [(0.005, 0.125), (2.0, 50.0)])
@pytest.mark.parametrize("raw_chunk", [False, True], ids=["stored", "raw"])
def test_softcap_far_exceeded(instruction_set: str, cap: float, scale: float, raw_chunk: bool):
    """Case 12. Catches tanh written as (e^2x - 1) / (e^2x + 1): infinity over infinity where |score / cap| > 44."""
    batch = Batch.make(KVCacheLayout.create("int4", num_kv_heads=2, head_size=64), [21, 9], [3, 1], 4)
    own = {"key": batch.key, "value": batch.value} if raw_chunk else {}
    assert_equals_reference(batch, softcap=cap, softmax_scale=scale, **own)


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (1, 40), (3, 3), (2, 7), (5, 8), (1, 12), (2, 33)])
def test_any_gqa_ratio(instruction_set: str, kv_heads: int, group: int):
    """Catches rows lost where a group is no multiple of the kernels' tiles of 4 and 32 rows."""
    layout = KVCacheLayout.create("int4", num_kv_heads=kv_heads, head_size=32)
    assert_equals_reference(Batch.make(layout, [19, 203], [2, 1], kv_heads * group))


@pytest.mark.parametrize(("head_size", "head_size_v"), [(192, 128), (64, 96), (40, 80), (72, 32), (256, 512)])
@pytest.mark.parametrize(
    ("format", "v_format"),
    [
        ("int4", None), ("int8_per_token_head", "int4"), ("int4_per_token_head", "fp8_per_token_head"),
        ("fp8_per_token_head", "int8_per_token_head"), ("int4", "int3"), ("int2", "int8_per_token_head"),
    ],
)  # fmt: skip
def test_keys_and_values_may_differ(
    instruction_set: str, head_size: int, head_size_v: int, format: str, v_format: str | None
):
    """Catches an accumulator, an output or a rotation sized or chosen by the keys."""
    layout = KVCacheLayout.create(format, v_format=v_format, num_kv_heads=2, head_size=head_size, head_size_v=head_size_v)
    assert_equals_reference(Batch.make(layout, [37, 150], [3, 1], 6))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("raw_chunk", [False, True], ids=["stored", "raw"])
def test_dtypes(instruction_set: str, dtype: torch.dtype, raw_chunk: bool):
    """Catches a conversion that truncates, and a model's dtype rounded on the way in."""
    layout = KVCacheLayout.create("int4", num_kv_heads=2, head_size=64)
    batch = Batch.make(layout, SEQ_LENS, QUERY_LENS, 6, dtype=dtype)
    own = {"key": batch.key, "value": batch.value} if raw_chunk else {}
    out = batch.attend(backend="cpu", **own)
    wide = dataclasses.replace(batch, query=batch.query.float())
    assert out.dtype == dtype
    assert_close(out.float(), wide.attend(**own), TOLERANCE + torch.finfo(dtype).eps / 2)


def test_float8_output(instruction_set: str):
    """Case 11: scaled, clamped and cast after the inverse rotation; the reference's codes but for rounding.

    Next to zero float8's steps are finer than the kernel's own error.
    """
    layout = KVCacheLayout.create("int4", num_kv_heads=2, head_size=64)
    batch = Batch.make(layout, SEQ_LENS, QUERY_LENS, 6)
    scale = torch.tensor([0.004])
    out = batch.attend(backend="cpu", output_scale=scale)
    expected = batch.attend(output_scale=scale)
    assert out.dtype == expected.dtype == torch.float8_e4m3fn
    assert expected.float().abs().max() > 100
    codes, expected_codes = (x.view(torch.uint8).int() for x in (out, expected))
    ranks = (torch.where(c >= 128, 128 - c, c) for c in (codes, expected_codes))  # sign and magnitude; -0 is 0
    steps = torch.sub(*ranks).abs()
    close = (out.float() - expected.float()).abs() * scale <= 0.1 * TOLERANCE * batch.attend().norm(dim=-1).max()
    assert ((steps <= 1) | close).all()
    assert (steps > 0).float().mean() < 0.01


@pytest.mark.parametrize("page", ["planar", "interleaved"])
@pytest.mark.parametrize("format", ["int4", "int4_per_token_head"])
def test_any_strides(instruction_set: str, format: str, page: str):
    """Case 18. Catches addresses computed from shapes: padded pages at an offset, token-major order, strided queries,
    64-bit and strided indices."""
    layout = KVCacheLayout.create(format, num_kv_heads=2, head_size=80, page=page, block_size=48)
    batch = Batch.make(layout, SEQ_LENS, QUERY_LENS, 6)
    expected = batch.attend()
    pages, heads, *inner = batch.kv_cache.shape
    room = torch.full((pages, heads + 1, *inner[:-1], inner[-1] + 8), POISON, dtype=torch.uint8).flatten()
    strides = torch.empty(pages, heads + 1, *inner[:-1], inner[-1] + (8 if page == "interleaved" else 0)).stride()
    padded = room.as_strided(batch.kv_cache.shape, strides, storage_offset=4)
    padded.copy_(batch.kv_cache)
    query = torch.full((batch.query.shape[0], 7, 96), torch.nan)[:, 1:, 8:88].copy_(batch.query)
    out = torch.full((batch.query.shape[0], 9, 80), torch.nan)[:, 2:8]
    table = torch.stack((batch.block_table.long(),) * 2, -1)[..., 0]
    moved = dataclasses.replace(
        batch, kv_cache=padded, query=query, block_table=table,
        seq_lens=batch.seq_lens.long().repeat_interleave(2)[::2], query_start_loc=batch.query_start_loc.long(),
    )  # fmt: skip
    assert moved.attend(backend="cpu", out=out) is out
    assert_close(out, expected)
    if page == "interleaved":
        swapped = KVCacheLayout.create(format, num_kv_heads=2, head_size=80, page=page, block_size=48, block_order="NHD")
        cache = swapped.allocate(pages)
        cache.copy_(batch.kv_cache)
        assert_close(dataclasses.replace(batch, layout=swapped, kv_cache=cache).attend(backend="cpu"), expected)


@pytest.mark.parametrize("which", ["key", "value", "query"])
@pytest.mark.parametrize("raw_chunk", [False, True], ids=["stored", "raw"])
def test_not_a_number_reaches_exactly_the_rows_that_see_it(instruction_set: str, which: str, raw_chunk: bool):
    """Cases 3 and 13. Catches 0 * NaN in a masked row, and a visible NaN row read as zeros."""
    layout = KVCacheLayout.create("int4", num_kv_heads=2, head_size=64)
    batch = Batch.make(layout, [150], [9], 4)
    clean = batch.attend(backend="cpu", **({"key": batch.key, "value": batch.value} if raw_chunk else {}))
    key, value, query = batch.key.clone(), batch.value.clone(), batch.query.clone()
    {"key": key, "value": value, "query": query}[which][5, 1, 7] = torch.nan
    if which != "query":
        slots = batch.block_table[0, torch.arange(141, 150) // 16].long() * 16 + torch.arange(141, 150) % 16
        reshape_and_cache(key, value, batch.kv_cache, slots, layout, backend="cpu")
    own = {"key": key, "value": value} if raw_chunk else {}
    out, lse = dataclasses.replace(batch, query=query).attend(backend="cpu", return_lse=True, **own)
    broken = torch.zeros(9, 4, dtype=torch.bool)
    if which == "query":
        broken[5, 1] = True
    else:
        broken[5:, 2:] = True  # KV head 1 serves query heads 2 and 3
    assert out[broken].isnan().all()
    assert lse[broken].isnan().all()
    assert torch.equal(out[~broken], clean[~broken])


@pytest.mark.parametrize("format", ["int4", "fp8_per_token_head"])
def test_bytes_that_are_not_visible_change_nothing(instruction_set: str, format: str):
    """Case 13: every byte before a window and after the queries is poison, scale words included."""
    layout = KVCacheLayout.create(format, num_kv_heads=2, head_size=64)
    batch = Batch.make(layout, [300], [1], 4)
    expected = batch.attend(backend="cpu", sliding_window=40)
    hidden = layout.views(batch.kv_cache)
    for position in range(260):
        page, slot = int(batch.block_table[0, position // 16]), position % 16
        hidden.key_cache[page, slot], hidden.value_cache[page, slot] = POISON, POISON
        hidden.k_scale_cache[page, slot] = hidden.v_scale_cache[page, slot] = -1
    assert torch.equal(batch.attend(backend="cpu", sliding_window=40), expected)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("page", [-1, "beyond", 2**31 - 1])
def test_a_page_that_the_cache_lacks_is_refused_before_anything_is_read(index: torch.dtype, page: int | str):
    """Catches kernels that read outside the cache: they look themselves, once for all pages of a call."""
    batch = Batch.make(KVCacheLayout.create("int4", num_kv_heads=2, head_size=64), [37, 20], [1, 2], 4)
    num_blocks = batch.kv_cache.shape[0]
    batch.block_table[1, 1] = num_blocks if page == "beyond" else page
    batch.block_table = batch.block_table.to(index)
    out = torch.full_like(batch.query, torch.nan)
    for own in ({}, {"key": batch.key, "value": batch.value}):
        with pytest.raises(ValueError, match=f"block_table: expected pages 0 to {num_blocks - 1}, got"):
            batch.attend(backend="cpu", out=out, **own)
        assert out.isnan().all()


needs_tensor_calls = pytest.mark.skipif(
    cpu.unavailable_reason() is not None or _library.attend_tensors() is None, reason="no Python headers, or an older torch"
)


@needs_tensor_calls
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["planar", "HND", "NHD"])
def test_a_plain_call_at_once_gives_the_same_bits(
    index: torch.dtype, dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch
):
    """Catches a stride, a dtype or a default that the library reads of a tensor otherwise than Python does."""
    page, order = ("planar", "HND") if layout == "planar" else ("interleaved", layout)
    created = KVCacheLayout.create(
        "int4", num_kv_heads=2, head_size=64, head_size_v=96, block_size=32, page=page, block_order=order
    )
    batch = Batch.make(created, SEQ_LENS, QUERY_LENS, 6, dtype=dtype)
    tokens = batch.query.shape[0]
    batch.query = torch.full((tokens, 7, 72), torch.nan, dtype=dtype)[:, 1:, 4:68].copy_(batch.query)
    batch.block_table = torch.stack((batch.block_table.to(index),) * 2, -1)[..., 0]
    batch.seq_lens = batch.seq_lens.to(index).repeat_interleave(2)[::2]
    batch.query_start_loc = batch.query_start_loc.to(index)
    expected = batch.attend(backend="cpu", sinks=torch.full((6,), -torch.inf))  # an option, which is the long way
    inputs = (batch.query, batch.kv_cache, batch.block_table, batch.seq_lens, batch.query_start_loc, created)
    out = torch.full((tokens, 8, 96), torch.nan, dtype=dtype)[:, 1:7]
    plain = AttentionOptions(softmax_scale=64**-0.5)
    assert cpu.attend_at_once(*inputs, plain, out, None, None)
    assert torch.equal(out, expected)
    calls: list[int] = []
    monkeypatch.setattr(cpu, "paged_attention", lambda *_: calls.append(1))
    for made in (paged_attention(*inputs, backend="cpu"), paged_attention(*inputs), batch.attend(backend="cpu")):
        assert made.dtype == dtype
        assert torch.equal(made, expected)
    wide = created.allocate(2 * batch.kv_cache.shape[0])[::2].copy_(batch.kv_cache)  # caches of one layout, other strides
    assert not cpu.attend_at_once(batch.query, wide, *inputs[2:], plain, out, None, None)
    assert not calls


@needs_tensor_calls
@pytest.mark.parametrize(
    ("window", "sinks", "sliding"), [(9, 2, 0), (3, 0, 0), (0, 5, 0), (9, 2, 12), (70, 3, 0), (0, 0, 7)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_windows_at_once_give_the_same_bits(
    window: int, sinks: int, sliding: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """Catches a raw row of another place, dtype or stride than Python's way reads; windows and first tokens share a tile."""
    batch = Batch.make(KVCacheLayout.create("int4", num_kv_heads=2, head_size=64), SEQ_LENS, QUERY_LENS, 6)
    options = {**(batch.raw(window, sinks, dtype=dtype) if window or sinks else {}), "sliding_window": sliding}
    expected = batch.attend(backend="cpu", sinks=torch.full((6,), -torch.inf), **options)  # an option of the long way
    exact = batch.attend(backend="reference", **options)
    assert float((expected - exact).norm() / exact.norm()) < 1e-3
    calls: list[int] = []
    monkeypatch.setattr(cpu, "paged_attention", lambda *_: calls.append(1))
    assert torch.equal(batch.attend(backend="cpu", **options), expected)
    assert not calls


@needs_tensor_calls
def test_tensors_whose_data_are_elsewhere_are_not_read_at_once():
    """Catches a subclass, whose data may be anywhere, or a tensor without data taken for one of the host."""
    batch = Batch.make(KVCacheLayout.create("int4", num_kv_heads=2, head_size=64), [37, 20], [1, 2], 4)
    expected = batch.attend(backend="cpu")
    out = torch.full_like(batch.query, torch.nan)
    inputs = [
        batch.query,
        batch.kv_cache,
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
        batch.layout,
        AttentionOptions(softmax_scale=0.125),
        out,
    ]
    assert cpu.attend_at_once(*inputs, None, None)
    assert torch.equal(out, expected)
    out.fill_(torch.nan)
    for at, tensor in enumerate(inputs):
        if not isinstance(tensor, torch.Tensor):
            continue
        for other in (torch.nn.Parameter(tensor, requires_grad=False), tensor.to("meta"), tensor[..., None], None, 3.0):
            assert not cpu.attend_at_once(*inputs[:at], other, *inputs[at + 1 :], None, None)
    assert not cpu.attend_at_once(*inputs[:6], AttentionOptions(softmax_scale=1), out, None, None)
    assert out.isnan().all()


def test_a_row_that_sees_nothing(instruction_set: str):
    layout = KVCacheLayout.create("int4", num_kv_heads=1, head_size=32)
    batch = Batch.make(layout, [20], [20], 2)
    hidden = torch.full((20, 20), -torch.inf)
    out, lse = batch.attend(backend="cpu", return_lse=True, qq_bias=hidden)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("own_threads", [False, True], ids=["torch's threads", "own threads"])
def test_splits_over_threads(threads: int, own_threads: bool):
    """Catches a split that is lost or merged twice: one KV head and one query leave nothing else to spread."""
    layout = KVCacheLayout.create("int4", num_kv_heads=1, head_size=64)
    batch = Batch.make(layout, [3000, 700], [1, 3], 2)
    team = _library.team()
    torch.set_num_threads(threads)
    if own_threads:
        _library.library().nibblekv_set_team(None)
    try:
        assert_equals_reference(batch)
        assert_equals_reference(batch, key=batch.key, value=batch.value, sinks=torch.tensor([0.5, 4.0]))
    finally:
        _library.library().nibblekv_set_team(team)


@pytest.mark.parametrize("query_len", [1, 2, 8])
def test_draft_tokens_are_spread_over_threads_as_one_query_is(query_len: int):
    """Case 15. Catches splits for single queries only: verifying drafts then runs on one thread of eight."""
    layout = KVCacheLayout.create("int4", num_kv_heads=1, head_size=64)
    batch = Batch.make(layout, [4000], [query_len], 2, magnitude=1.5)
    asked: list[int] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    def team(worker: int, shared: int, num_threads: int, flags: int) -> None:
        asked.append(num_threads)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(worker)(shared)

    own, threads = _library.team(), torch.get_num_threads()
    _library.library().nibblekv_set_team(team)
    torch.set_num_threads(8)
    try:
        out = batch.attend(backend="cpu")
    finally:
        _library.library().nibblekv_set_team(own)
        torch.set_num_threads(threads)
    assert asked == [8]
    assert_close(out, batch.attend(backend="reference"))


@pytest.mark.parametrize("raw_chunk", [False, True], ids=["stored", "raw"])
def test_batch_invariant_rows_are_equal_bit_for_bit(instruction_set: str, raw_chunk: bool):
    """Case 16: alone, in a batch, in another order, on one thread or two, a row has the same bits."""
    layout = KVCacheLayout.create("int4", num_kv_heads=2, head_size=64)
    lens, queries = [2500, 1030, 90, 5000], [3, 70, 90, 1]
    batch = Batch.make(layout, lens, queries, 6)
    own = {"key": batch.key, "value": batch.value} if raw_chunk else {}
    together = batch.attend(backend="cpu", batch_invariant=True, **own)
    starts = batch.query_start_loc.tolist()
    for order in ([0], [3], [2, 1], [3, 0, 2]):
        rows = torch.cat([torch.arange(starts[b], starts[b + 1]) for b in order])
        part = dataclasses.replace(
            batch, query=batch.query[rows], block_table=batch.block_table[order], seq_lens=batch.seq_lens[order],
            query_start_loc=torch.tensor([0, *(queries[b] for b in order)]).cumsum(0).int(),
        )  # fmt: skip
        own = {"key": batch.key[rows], "value": batch.value[rows]} if raw_chunk else {}
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert torch.equal(part.attend(backend="cpu", batch_invariant=True, **own), together[rows])


@pytest.mark.parametrize("options", [{}, {"sinks": torch.tensor([0.0, 3.0, -2.0, 8.0])}, {"causal": False}], ids=str)
@pytest.mark.parametrize("context", [0, 45])
def test_prefill_through_torch(options: dict, context: int):
    """Catches a prefix counted twice, forgotten, or merged with the wrong weight."""
    layout = KVCacheLayout.create("int4", num_kv_heads=2, head_size=64)
    batch = Batch.make(layout, [cpu.TORCH_QUERIES + context, 40 + context, 9], [cpu.TORCH_QUERIES, 40, 0], 4)
    assert_equals_reference(batch, key=batch.key, value=batch.value, **options)


def test_prefill_with_a_value_that_is_not_a_number():
    """Catches torch's flash attention multiplying a masked value by zero."""
    layout = KVCacheLayout.create("int4", num_kv_heads=1, head_size=64)
    batch = Batch.make(layout, [80], [80], 2)
    batch.value[50, 0, 3] = torch.inf
    out = batch.attend(backend="cpu", key=batch.key, value=batch.value)
    assert out[:50].isfinite().all()
    assert out[50:].isnan().all()


@pytest.mark.parametrize("format", ["int4", "int4_per_token_head", "int8_per_token_head", "fp8_per_token_head"])
@pytest.mark.parametrize("channel", [0, 1, 37])
def test_long_context_with_an_outlier(format: str, channel: int):
    """Case 8: 131,072 tokens, an outlier in one channel of keys and values, float64 over the same pages.

    Catches a zero point or minimum whose sum cancels in low precision, which the inverse rotation gathers into channel 0.
    """
    length, head_size = 131_072, 64
    layout = KVCacheLayout.create(format, num_kv_heads=1, head_size=head_size, block_size=128)
    gen = torch.Generator().manual_seed(channel)
    key, value = torch.randn(2, length, 1, head_size, generator=gen)
    key[..., channel] += 100.0
    value[..., channel] += 100.0
    kv_cache = layout.allocate(length // 128)
    reshape_and_cache(key, value, kv_cache, torch.arange(length), layout, backend="cpu")
    table = torch.arange(length // 128, dtype=torch.int32)[None]
    query = torch.randn(1, 2, head_size, generator=gen)
    query[..., channel] = 0.0  # scores stay of order 1; the outlier acts on the sums alone
    out = torch.full((1, 2, head_size), torch.nan)
    paged_attention(
        query, kv_cache, table, torch.tensor([length]), torch.tensor([0, 1]), layout, out=out, backend="cpu"
    )  # fmt: skip
    stored_key, stored_value = reference.gather_and_dequantize(kv_cache, table[0], length, layout)
    weight = torch.softmax(stored_key[:, 0].double() @ query[0].double().T * head_size**-0.5, 0)
    assert_close(out[0], weight.T @ stored_value[:, 0].double(), 1e-4)


@pytest.mark.parametrize("format", ["int4", "int4_per_token_head", "int8_per_token_head"])
@pytest.mark.parametrize("head_size", [64, 96, 128])
def test_outliers_in_queries_and_keys(instruction_set: str, format: str, head_size: int):
    """Catches an operand of the integer dot products that saturates or is rounded for its pair of values instead of itself:
    an outlier channel of queries and keys, and queries that are spikes after rotation, on even, on odd and on both."""
    layout = KVCacheLayout.create(format, num_kv_heads=1, head_size=head_size)
    fmt = FORMATS[format]
    for channel in (0, 1, head_size - 1):
        batch = Batch.make(layout, [300], [6], 2, seed=channel)
        slots = batch.block_table[0].long()[torch.arange(300) // 16] * 16 + torch.arange(300) % 16
        key = batch.stored_key[0].clone()
        key[..., channel] += 20.0
        reshape_and_cache(key, batch.stored_value[0], batch.kv_cache, slots, layout, backend="reference")
        spikes = torch.zeros(5, head_size)
        for row, (even, odd) in enumerate([(1, 0), (0, 1), (1, 1), (1, -1), (-0.06, 1)]):
            spikes[row, channel // 2 * 2] = 8.0 * even
            spikes[row, channel // 2 * 2 + 1] = 8.0 * odd
        query = 0.1 * batch.query
        query[0, :, channel] = 20.0
        query[1:] += unrotate(spikes, fmt.rotation)[:, None] * inverse_gain(fmt.rotation, head_size) ** -0.5
        moved = dataclasses.replace(batch, query=query)
        stored_key, stored_value = (x[:, 0].double() for x in moved.dequantized()[0])
        score = torch.einsum("qhd,kd->qhk", query.double(), stored_key) * head_size**-0.5
        hidden = torch.arange(300) > torch.arange(294, 300)[:, None]
        weight = torch.softmax(score.masked_fill(hidden[:, None], -torch.inf), -1)
        assert_close(moved.attend(backend="cpu"), weight @ stored_value)


def test_scores_far_apart(instruction_set: str):
    """Catches a softmax that overflows, or a tile of tiny weights that is lost beside a large one."""
    layout = KVCacheLayout.create("int4", num_kv_heads=1, head_size=64)
    batch = Batch.make(layout, [700], [4], 2, magnitude=4.0)
    assert_equals_reference(batch, 2e-3)  # scores of several hundred, each exact to 1e-5 of itself


def test_matches_the_oracle_directly():
    """Catches an error that kernel and reference share."""
    layout = KVCacheLayout.create("int4", num_kv_heads=2, head_size=96)
    batch = Batch.make(layout, SEQ_LENS, QUERY_LENS, 6)
    expected, _ = oracle_attend(
        batch.query, batch.dequantized(), batch.query_start_loc.tolist(), AttentionOptions(softmax_scale=1 / math.sqrt(96))
    )
    assert_close(batch.attend(backend="cpu"), expected)


def test_without_the_compiled_kernels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_library, "_path", lambda: None)
    assert "compiler" in str(cpu.unavailable_reason())
    layout = KVCacheLayout.create("int4", num_kv_heads=2, head_size=64)
    with pytest.raises(NotImplementedError, match="compiler"):
        Batch.make(layout, [5], [1], 2).attend(backend="cpu")


def test_kernels_of_other_sources_are_refused(monkeypatch: pytest.MonkeyPatch):
    """Catches a checkout that moved on without compiling: the kernels would read a record that is not theirs."""
    monkeypatch.setattr(_library, "ATTENTION_ARGS", struct.Struct("60q3d"))
    with pytest.raises(RuntimeError, match="compiled from other sources"):
        _library.library.__wrapped__()


def test_refuses_other_devices_and_instruction_sets():
    layout = KVCacheLayout.create("int4", num_kv_heads=2, head_size=64)
    assert "cuda" in str(cpu.supports(layout, None, torch.device("cuda")))
    with pytest.raises(ValueError, match="'sse'"):
        _library.use_instruction_set("sse")


# --- raw window and sinks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("raw_chunk", [False, True], ids=["stored", "raw"])
def test_raw_rows_with_every_option(instruction_set: str, options: dict, raw_chunk: bool):
    """Catches a score of a raw row that lacks what a packed one gets: softcap, slopes, biases by position."""
    layout = KVCacheLayout.create("int4", num_kv_heads=2, head_size=64)
    batch = Batch.make(layout, SEQ_LENS, QUERY_LENS, 6, seed=1)
    own = {"key": batch.key, "value": batch.value} if raw_chunk else {}
    assert_equals_reference(batch, **own, **batch.raw(6, 3), **options)


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (0, 1), (32, 4), (140, 130), (128, 128), (500, 0), (0, 500)])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 130}, {"causal": False}], ids=str)
def test_raw_rows_that_cross_tiles(instruction_set: str, window: int, sinks: int, options: dict):
    """Catches a border between packed and raw that is right in a tile or in one query, and wrong beyond."""
    layout = KVCacheLayout.create("int4", num_kv_heads=1, head_size=64, block_size=32)
    batch = Batch.make(layout, [430, 400, 100], [150, 40, 1], 2, seed=3)
    raw = batch.raw(window, sinks, dtype=torch.bfloat16 if window else torch.float16)
    assert_equals_reference(batch, **raw, **options)
    assert_equals_reference(batch, key=batch.key, value=batch.value, **raw, **options)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan], ids=str)
def test_a_raw_key_that_is_not_finite(instruction_set: str, bad: float):
    """Catches a score of +inf whose softmax is a finite something: a NaN row by IEEE arithmetic, as the reference has it."""
    layout = KVCacheLayout.create("int4", num_kv_heads=1, head_size=64)
    batch = Batch.make(layout, [37], [3], 4)
    raw = batch.raw(0, 4)
    raw["raw_key"][0, 2, 0, 5] = bad
    out = batch.attend(backend="cpu", **raw)
    expected = batch.attend(backend="reference", **raw)
    assert 0 < int(expected.isnan().sum()) <= expected.numel()
    assert torch.equal(out.isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert (out[finite] - expected[finite]).abs().max() < 1e-3 if finite.any() else True


@pytest.mark.parametrize("format", list(FORMATS))
@pytest.mark.parametrize(("head_size", "head_size_v"), [(40, 80), (128, 128), (192, 128), (256, 512)])
def test_raw_rows_beside_every_format(instruction_set: str, format: str, head_size: int, head_size_v: int):
    """Catches raw sums that are rotated back or scaled like packed ones, and rows of strided stores read as contiguous."""
    layout = KVCacheLayout.create(format, num_kv_heads=2, head_size=head_size, head_size_v=head_size_v)
    batch = Batch.make(layout, [37, 5, 150], [3, 5, 1], 6)
    raw = batch.raw(16, 4)
    for name in ("raw_key", "raw_value"):
        room = torch.full((3, *(n + 3 for n in raw[name].shape[1:])), torch.nan)
        raw[name] = room[:, 1:-2, 2:-1, :-3].copy_(raw[name])
    assert_equals_reference(batch, **raw)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_raw_rows_with_splits_over_threads(threads: int):
    """Catches raw rows counted once per split."""
    layout = KVCacheLayout.create("int4", num_kv_heads=1, head_size=64)
    batch = Batch.make(layout, [3000, 700, 20], [1, 3, 1], 2)
    torch.set_num_threads(threads)
    raw = batch.raw(32, 4)
    assert_equals_reference(batch, **raw)
    assert_equals_reference(batch, key=batch.key, value=batch.value, sinks=torch.tensor([0.5, 4.0]), **raw)


@pytest.mark.parametrize("context", [0, 45, 2])
def test_prefill_through_torch_after_raw_rows(context: int):
    """Catches raw rows of earlier tokens forgotten where torch attends a chunk to itself."""
    layout = KVCacheLayout.create("int4", num_kv_heads=2, head_size=64)
    batch = Batch.make(layout, [cpu.TORCH_QUERIES + context, 40 + context, 9], [cpu.TORCH_QUERIES, 40, 0], 4)
    assert_equals_reference(batch, key=batch.key, value=batch.value, **batch.raw(16, 4))
