"""Attention of every backend against the float64 oracle on the same pages, option by option."""

from __future__ import annotations

import math

import pytest
import torch
from batches import NORMAL_ERROR, POISON, Batch, usable_backends
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import attend

from nibblekv import FORMATS, AttentionOptions, KVCacheLayout, paged_attention, quantize, reshape_and_cache
from nibblekv.backends.reference import visible_mask
from nibblekv.rotation import rotation_signs

SEQ_LENS, QUERY_LENS = [37, 5, 64, 20], [7, 5, 1, 0]
SLOPES = torch.tensor([0.5, -0.1, 0.03, 1.0, 0.0, 0.2])
RANGES = torch.tensor([[[2, 20], [25, 33]], [[0, 4], [0, 0]], [[60, 63], [5, 5]], [[1, 9], [3, 2]]], dtype=torch.int32)
# Every option alone and the pairs that interact. A value is made per call, so tests cannot change one another's tensors.
OPTIONS = {
    "causal": {},
    "non-causal": {"causal": False},
    "per-sequence causal": {"causal": torch.tensor([True, False, False, True])},
    "window": {"sliding_window": 6},
    "window of one": {"sliding_window": 1},
    "non-causal window": {"causal": False, "sliding_window": 6},
    "chunks": {"sliding_window": 8, "chunk_lookback": 0},
    "chunks with lookback": {"sliding_window": 12, "chunk_lookback": 2},
    "non-causal chunks": {"sliding_window": 8, "chunk_lookback": 1, "causal": False},
    "R-SWA": {"rswa_prefix_lens": torch.tensor([9, 0, 17, 3], dtype=torch.int32), "rswa_window": 5},
    "softcap": {"softcap": 2.0},
    "ALiBi": {"alibi_slopes": SLOPES},
    "non-causal ALiBi": {"alibi_slopes": SLOPES, "causal": False},
    "ALiBi-sqrt": {"alibi_slopes": SLOPES, "alibi_sqrt": True},
    "non-causal ALiBi-sqrt": {"alibi_slopes": SLOPES, "alibi_sqrt": True, "causal": False},
    "sinks": {"sinks": torch.tensor([0.0, 3.0, -2.0, 8.0, -torch.inf, 1.0])},
    "query-query bias": {"qq_bias": torch.randn(8, 8, generator=torch.Generator().manual_seed(2))},
    "tree mask": {"qq_bias": torch.zeros(7, 7).masked_fill(torch.eye(7).roll(-1, 0).bool(), -torch.inf)},
    "multimodal prefix": {"mm_prefix_ranges": RANGES},
    "multimodal prefix and window": {"mm_prefix_ranges": RANGES, "sliding_window": 4},
    "multimodal prefix clamped": {"mm_prefix_ranges": RANGES, "sliding_window": 4, "mm_prefix_clamp": True},
    "softmax scale": {"softmax_scale": 0.7},
    "everything": {
        "sliding_window": 9,
        "softcap": 5.0,
        "alibi_slopes": SLOPES,
        "sinks": torch.tensor([0.0, 3.0, -2.0, 8.0, -torch.inf, 1.0]),
        "qq_bias": torch.randn(7, 7, generator=torch.Generator().manual_seed(2)),
        "mm_prefix_ranges": RANGES,
    },
}


def expect(batch: Batch, options: dict, raw_chunk: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    opts = AttentionOptions(**{"softmax_scale": batch.layout.head_size**-0.5, **options})
    return attend(batch.query, batch.dequantized(raw_chunk), batch.query_start_loc.tolist(), opts)


@pytest.fixture(params=usable_backends(), autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(Batch, "backend", request.param)
    return request.param


def at_most(tolerance: float) -> float:
    """Return the tolerance of the reference, and the 1e-3 of the contract for every other backend."""
    return tolerance if Batch.backend == "reference" else max(tolerance, 1e-3)


def assert_matches(out: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-6) -> None:
    assert out.isfinite().all()  # the output was NaN before the call
    assert expected.abs().max() > 0.1  # zeros must not pass
    assert (out - expected).norm(dim=-1).max() <= at_most(tolerance) * expected.norm(dim=-1).max()


@pytest.fixture(scope="module")
def batch() -> Batch:
    return Batch.make(KVCacheLayout.create("int4", num_kv_heads=2, head_size=64), SEQ_LENS, QUERY_LENS, 6, seed=1)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("raw_chunk", [False, True], ids=["stored", "raw"])
def test_option_equals_the_oracle(batch: Batch, options: dict, raw_chunk: bool):
    """Cases 9, 10 and 14. Catches an option that is accepted and ignored: dropping any of them is an error of 3-107 %."""
    own = {"key": batch.key, "value": batch.value} if raw_chunk else {}
    out, lse = batch.attend(return_lse=True, **own, **options)
    expected, expected_lse = expect(batch, options, raw_chunk)
    assert_matches(out, expected)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=at_most(1e-5))


@pytest.mark.parametrize("name", [n for n in OPTIONS if n not in ("causal", "softmax scale")])
def test_no_option_is_a_no_op(batch: Batch, name: str):
    """Catches a test batch on which an option changes nothing, so that ignoring it would pass."""
    plain, _ = expect(batch, {})
    changed, _ = expect(batch, OPTIONS[name])
    assert (plain - changed).norm() > 0.01 * plain.norm()


@pytest.mark.parametrize("format", list(FORMATS))
@pytest.mark.parametrize("page", ["planar", "interleaved"])
def test_every_format_and_arrangement(format: str, page: str):
    layout = KVCacheLayout.create(format, num_kv_heads=2, head_size=64, page=page)
    batch = Batch.make(layout, SEQ_LENS, QUERY_LENS, 4)
    expected, _ = expect(batch, {})
    assert_matches(batch.attend(), expected)
    raw, _ = attend(
        batch.query,
        list(zip(batch.stored_key, batch.stored_value, strict=True)),
        batch.query_start_loc.tolist(),
        AttentionOptions(softmax_scale=64**-0.5),
    )
    least, most = NORMAL_ERROR[FORMATS[format].bits]
    assert least < (batch.attend() - raw).norm() / raw.norm() < 1.2 * most  # keys and values add up; averages take some away


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (1, 40), (3, 3), (2, 7), (5, 8), (1, 12)])
def test_any_gqa_ratio(kv_heads: int, group: int):
    """Catches query heads read against another KV head, and group sizes padded to a power of two."""
    layout = KVCacheLayout.create("int4", num_kv_heads=kv_heads, head_size=32)
    batch = Batch.make(layout, [19, 3], [2, 1], kv_heads * group)
    assert_matches(batch.attend(), expect(batch, {})[0])


@pytest.mark.parametrize(("head_size", "head_size_v"), [(192, 128), (64, 96), (40, 80), (72, 32), (256, 512)])
@pytest.mark.parametrize(
    "formats", [("int4", None), ("int8_per_token_head", "int4"), ("int4_per_token_head", "int4")], ids=str
)
def test_head_sizes_and_formats_of_keys_and_values_may_differ(head_size: int, head_size_v: int, formats: tuple):
    """Catches an output sized, rotated back or scaled by the key's head size or format."""
    layout = KVCacheLayout.create(
        formats[0], v_format=formats[1], num_kv_heads=2, head_size=head_size, head_size_v=head_size_v
    )
    batch = Batch.make(layout, [21, 16], [3, 1], 4)
    out = batch.attend()
    assert out.shape == (4, 4, head_size_v)
    assert_matches(out, expect(batch, {})[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_queries(dtype: torch.dtype):
    """Catches scores or sums in 16 bit: the output may only be rounded once, to the query's dtype."""
    layout = KVCacheLayout.create("int4", num_kv_heads=2, head_size=64)
    batch = Batch.make(layout, SEQ_LENS, QUERY_LENS, 4, dtype=dtype)
    out = batch.attend()
    assert out.dtype == dtype
    expected, _ = expect(batch, {})
    assert (out.double() - expected).abs().max() <= 1.01 * torch.finfo(dtype).eps / 2 * expected.abs().max() + at_most(1e-5)


@pytest.mark.parametrize("cap", [1e-3, 0.5, 30.0])
def test_softcap_is_finite_for_huge_scores(cap: float):
    """Case 12. Catches tanh written as (e^2x - 1) / (e^2x + 1): inf / inf where |score / cap| > 88."""
    layout = KVCacheLayout.create("int4", num_kv_heads=1, head_size=64)
    batch = Batch.make(layout, [40], [6], 2, magnitude=30.0)
    assert float((batch.query.flatten(0, 1) @ batch.stored_key[0][:, 0].T).abs().max()) / 8 / cap > 88
    # scores reach 1e3, so a relative error of 1e-6 moves one that happens to be near zero by cap's own order
    tolerance = 1e-4 if Batch.backend == "reference" else 3e-3
    assert_matches(batch.attend(softcap=cap), expect(batch, {"softcap": cap})[0], tolerance)


def test_huge_scores_without_softcap_are_finite():
    """Catches exp before the maximum is subtracted."""
    batch = Batch.make(KVCacheLayout.create("int4", num_kv_heads=1, head_size=64), [40], [6], 2, magnitude=300.0)
    assert_matches(batch.attend(), expect(batch, {})[0], tolerance=1e-2)


@pytest.mark.parametrize("format", ["int4", "int4_per_token_head"])
def test_fp8_output_is_scaled_after_the_inverse_rotation(format: str):
    """Case 11. Catches scale, clamp and cast in the rotated domain: 76-81 % error where e4m3 itself costs 3-4 %."""
    batch = Batch.make(KVCacheLayout.create(format, num_kv_heads=2, head_size=128), SEQ_LENS, QUERY_LENS, 4)
    scale = torch.tensor([0.002])
    out = batch.attend(output_scale=scale)
    assert out.dtype == torch.float8_e4m3fn
    exact, _ = expect(batch, {})
    scaled = (exact / 0.002).clamp(-448, 448)
    assert (exact.abs() / 0.002 > 600).any()  # saturation is tested
    slack = at_most(1e-5) * exact.abs().max() / 0.002
    assert ((out.double() - scaled).abs() <= scaled.abs() / 16 * 1.0001 + 2.0**-10 + slack).all()
    assert (out.double() - scaled).norm() < 0.04 * scaled.norm()


def test_row_that_sees_nothing_is_zero_with_lse_of_minus_infinity():
    """Catches 0 / 0: a tree mask can take every key of a row, and a merge by log-sum-exp then weighs it by 0."""
    batch = Batch.make(KVCacheLayout.create("int4", num_kv_heads=1, head_size=64), [3, 20], [3, 3], 2)
    blind = torch.full((3, 3), -math.inf)
    out, lse = batch.attend(return_lse=True, qq_bias=blind)
    assert not out[:3].any()
    assert (lse[:3] == -math.inf).all()
    assert out[3:].abs().amax(-1).min() > 0.1  # these still see 17 keys before their own
    out, lse = batch.attend(return_lse=True, qq_bias=blind, sinks=torch.tensor([1.5, -1.0]))
    assert not out[:3].any()
    torch.testing.assert_close(lse[:3], torch.tensor([1.5, -1.0]).expand(3, 2), rtol=1e-6, atol=0)


def test_outlier_channel_does_not_matter():
    """Cases 1 and 8. Catches sums that cancel only nearly: an outlier key channel must not raise the error."""
    layout = KVCacheLayout.create("int4", num_kv_heads=1, head_size=64)
    for channel in (0, 1, 63):
        batch = Batch.make(layout, [100], [4], 2)
        batch.stored_key[0][:, :, channel] += 100
        slots = batch.block_table[0].long()[torch.arange(100) // 16] * 16 + torch.arange(100) % 16
        reshape_and_cache(batch.stored_key[0], batch.stored_value[0], batch.kv_cache, slots, layout, backend="reference")
        assert_matches(batch.attend(), expect(batch, {})[0], tolerance=2e-5)


def test_long_context():
    """Case 8. Catches an error that grows with length: 16,384 keys, one query, checked against float64 in full."""
    layout = KVCacheLayout.create("int4", num_kv_heads=1, head_size=128)
    batch = Batch.make(layout, [16384], [1], 2)
    key, value = batch.dequantized()[0]
    score = torch.einsum("hd,kd->hk", batch.query[0].double(), key[:, 0].double()) * 128**-0.5
    expected = torch.softmax(score, -1) @ value[:, 0].double()
    assert (batch.attend()[0] - expected).norm() < at_most(1e-5) * expected.norm()


# --- what a query does not see -------------------------------------------------------------------------------------------


def poison_row(batch: Batch, seq: int, position: int) -> None:
    """Overwrite one token's codes and words with 0xFF: NaN in every format."""
    views = batch.layout.views(batch.kv_cache)
    block, slot = int(batch.block_table[seq, position // batch.layout.block_size]), position % batch.layout.block_size
    for view in (views.key_cache, views.value_cache):
        view[block, slot] = POISON
    for view in (views.k_scale_cache, views.v_scale_cache):
        view[block, slot] = -1


@pytest.mark.parametrize("format", list(FORMATS))
@pytest.mark.parametrize("name", list(OPTIONS))
def test_poison_reaches_exactly_the_queries_that_see_it(format: str, name: str):
    """Cases 3 and 13. Catches 0 * NaN: masked data and masked scales must change no bit of a row, visible ones make it NaN.

    Everything past the sequences' ends and every free page is 0xFF already.
    """
    options = OPTIONS[name]
    batch = Batch.make(KVCacheLayout.create(format, num_kv_heads=2, head_size=32), SEQ_LENS, QUERY_LENS, 6, seed=4)
    opts = AttentionOptions(**{"softmax_scale": 1.0, **options})
    clean = batch.attend(**options)
    assert clean.isfinite().all()
    poisoned = [(0, 0), (0, 3), (0, 12), (0, 34), (1, 2), (2, 40), (2, 63)]
    for seq, position in poisoned:
        poison_row(batch, seq, position)
    out = batch.attend(**options)
    starts = batch.query_start_loc.tolist()
    for seq, length in enumerate(SEQ_LENS):
        queries = torch.arange(length - QUERY_LENS[seq], length)
        hit = visible_mask(queries, torch.tensor([p for s, p in poisoned if s == seq]), seq, opts).any(-1)
        rows, before = out[starts[seq] : starts[seq + 1]], clean[starts[seq] : starts[seq + 1]]
        assert rows[hit].isnan().all()
        assert torch.equal(rows[~hit], before[~hit])


def test_nan_input_makes_nan_output_only_where_it_is_seen():
    """Case 3. Catches a NaN key or value that is stored as a finite row, and one that poisons another head's row."""
    layout = KVCacheLayout.create("int4", num_kv_heads=2, head_size=64)
    for which in ("stored_key", "stored_value"):
        batch = Batch.make(layout, [20], [4], 4)
        rows = getattr(batch, which)[0]
        rows[17, 1, 5] = math.nan
        slots = batch.block_table[0].long()[torch.arange(20) // 16] * 16 + torch.arange(20) % 16
        reshape_and_cache(batch.stored_key[0], batch.stored_value[0], batch.kv_cache, slots, layout, backend="reference")
        out = batch.attend()
        assert out[:, :2].isfinite().all()
        assert out[0].isfinite().all()  # position 16
        assert out[1:, 2:].isnan().all()


def test_nan_query_spoils_its_own_row_only():
    batch = Batch.make(KVCacheLayout.create("int4", num_kv_heads=2, head_size=64), [20], [4], 4)
    clean = batch.attend()
    batch.query[1, 2, 7] = math.nan
    out = batch.attend()
    assert out[1, 2].isnan().all()
    out[1, 2] = clean[1, 2]
    assert torch.equal(out, clean)


# --- composition ---------------------------------------------------------------------------------------------------------


def test_rows_do_not_depend_on_the_batch_around_them():
    """Case 16. Catches any decision that is taken from the whole batch: each sequence alone gives the same bits."""
    layout = KVCacheLayout.create("int4", num_kv_heads=2, head_size=64)
    batch = Batch.make(layout, SEQ_LENS, QUERY_LENS, 6)
    together = batch.attend(batch_invariant=True)
    starts = batch.query_start_loc.tolist()
    for b in range(3):
        alone = paged_attention(
            batch.query[starts[b] : starts[b + 1]],
            batch.kv_cache,
            batch.block_table[b : b + 1],
            batch.seq_lens[b : b + 1],
            torch.tensor([0, QUERY_LENS[b]]),
            layout,
            backend=Batch.backend,
            batch_invariant=True,
        )
        assert torch.equal(alone, together[starts[b] : starts[b + 1]])


def test_long_prompts_are_cut_into_query_chunks_that_agree():
    """Catches wrong positions in the second chunk of 128 queries."""
    batch = Batch.make(KVCacheLayout.create("int4", num_kv_heads=1, head_size=32), [150], [140], 1)
    assert_matches(batch.attend(sliding_window=50), expect(batch, {"sliding_window": 50})[0])


def test_prefill_in_pieces_equals_prefill_at_once():
    """Catches a chunk boundary that shifts positions: stored pages give the same rows however a prompt is cut."""
    layout = KVCacheLayout.create("int4", num_kv_heads=2, head_size=64)
    batch = Batch.make(layout, [40], [40], 4)
    whole = batch.attend()
    for first, last in ((0, 13), (13, 16), (16, 40)):
        piece = paged_attention(
            batch.query[first:last],
            batch.kv_cache,
            batch.block_table,
            torch.tensor([last]),
            torch.tensor([0, last - first]),
            layout,
            backend=Batch.backend,
        )
        torch.testing.assert_close(piece, whole[first:last], rtol=0, atol=at_most(1e-6))


@settings(deadline=None, max_examples=30, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_batches_equal_the_oracle(data: st.DataObject):
    """Catches what no listed case holds: random formats, sizes, lengths of 0-3 blocks, groups, windows and magnitudes."""
    draw = data.draw
    page, order = draw(st.sampled_from([("planar", "HND"), ("interleaved", "HND"), ("interleaved", "NHD")]))
    layout = KVCacheLayout.create(
        draw(st.sampled_from(list(FORMATS))),
        v_format=draw(st.sampled_from([None, *FORMATS])),
        num_kv_heads=draw(st.integers(1, 3)),
        head_size=draw(st.sampled_from([32, 40, 64, 104])),
        page=page,
        block_order=order,
    )
    lengths = draw(st.lists(st.integers(1, 48), min_size=1, max_size=3))
    query_lens = [draw(st.integers(0 if b else 1, min(n, 6))) for b, n in enumerate(lengths)]
    heads = layout.num_kv_heads * draw(st.integers(1, 5))
    magnitude = 10.0 ** draw(st.integers(-8, 4))
    batch = Batch.make(layout, lengths, query_lens, heads, seed=draw(st.integers(0, 999)), magnitude=magnitude)
    options = {
        "causal": draw(st.booleans()),
        "sliding_window": draw(st.integers(0, 20)),
        "softcap": draw(st.sampled_from([0.0, 1.0, 50.0])),
        "softmax_scale": draw(st.sampled_from([0.1, 1.0])) / max(magnitude**2, 1.0),
    }
    expected, _ = expect(batch, options)
    out = batch.attend(**options)
    assert out.isfinite().all()
    assert (out - expected).abs().max() <= at_most(1e-5) * (magnitude + expected.abs().max())
    assert expected.abs().max() > 0.05 * magnitude


def test_shipped_pages_are_read_in_the_stock_convention():
    """Catches a decoder that drops the 1 / block of vLLM's unnormalised rotation: a row along the signs reads back."""
    x = 2.0 * rotation_signs("block", 64).float()
    codes, word = quantize(x, "int4_per_token_head")
    assert int(word) & 15 == 0
    assert bytes(codes.tolist()) == bytes([0x0F] + [0] * 31)  # 128 in channel 0 of the rotated domain


# --- raw window and sinks ------------------------------------------------------------------------------------------------


def expect_raw(batch: Batch, options: dict, raw_chunk: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the oracle's rows where `options` hold `Batch.raw`: the raw rows are the batch's own, not those of the ring."""
    opts = AttentionOptions(**{"softmax_scale": batch.layout.head_size**-0.5, **options})
    stored = [(key.float(), value.float()) for key, value in zip(batch.stored_key, batch.stored_value, strict=True)]
    return attend(batch.query, batch.dequantized(raw_chunk), batch.query_start_loc.tolist(), opts, stored)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("raw_chunk", [False, True], ids=["stored", "raw"])
@pytest.mark.parametrize(("window", "sinks"), [(6, 3), (11, 0), (0, 4), (1, 1), (80, 80)])
def test_raw_rows_replace_stored_ones(batch: Batch, options: dict, raw_chunk: bool, window: int, sinks: int):
    """Catches a key that is read twice, in the wrong form, from another position's row, or a form chosen per call where it
    depends on the query. Unused raw rows are NaN."""
    own = {"key": batch.key, "value": batch.value} if raw_chunk else {}
    raw = batch.raw(window, sinks)
    out, lse = batch.attend(return_lse=True, **own, **raw, **options)
    expected, expected_lse = expect_raw(batch, {**raw, **options}, raw_chunk)
    assert_matches(out, expected)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=at_most(1e-5))


def test_raw_rows_change_the_result(batch: Batch):
    """Catches a batch on which window or sinks alone change nothing; a window of everything reads no page at all."""
    plain, _ = expect(batch, {})
    for window, sinks in ((6, 0), (0, 3)):
        changed, _ = expect_raw(batch, batch.raw(window, sinks))
        assert (plain - changed).norm() > 0.01 * plain.norm()
    batch.kv_cache, kept = torch.full_like(batch.kv_cache, POISON), batch.kv_cache
    everything = batch.attend(**batch.raw(64, 1))
    batch.kv_cache = kept
    assert_matches(everything, expect_raw(batch, batch.raw(64, 1))[0])


@pytest.mark.parametrize("format", list(FORMATS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_raw_rows_of_any_dtype_beside_any_format(format: str, dtype: torch.dtype):
    layout = KVCacheLayout.create(format, num_kv_heads=2, head_size=40, head_size_v=72)
    batch = Batch.make(layout, [37, 300, 16], [7, 2, 1], 6)
    batch.stored_key, batch.stored_value = ([x.to(dtype) for x in y] for y in (batch.stored_key, batch.stored_value))
    raw = batch.raw(32, 4, dtype=dtype)
    assert_matches(batch.attend(**raw), expect_raw(batch, raw)[0])


@pytest.mark.parametrize("which", ["raw_key", "raw_value"])
def test_poison_among_raw_rows_reaches_exactly_the_queries_that_read_it(which: str):
    """A NaN raw row spoils the queries that read it raw and no others, those that read the same position packed included."""
    batch = Batch.make(KVCacheLayout.create("int4", num_kv_heads=2, head_size=64), [37], [7], 4, seed=5)
    raw = batch.raw(4, 2)
    clean = batch.attend(**raw)
    ring = raw["raw_key"].shape[1] - 2
    raw[which][0, 2 + (31 - 2) % ring, 1] = math.nan  # position 31; the queries stand at 30 to 36
    out = batch.attend(**raw)
    assert out[1:5, 2:].isnan().all()
    out[1:5, 2:] = clean[1:5, 2:]
    assert torch.equal(out, clean)
    raw[which][0, 1, 0] = math.nan  # a sink: every query reads it
    assert batch.attend(**raw)[:, :2].isnan().all()


def test_raw_rows_in_a_batch_are_those_alone():
    """Case 16, with window and sinks."""
    batch = Batch.make(KVCacheLayout.create("int4", num_kv_heads=2, head_size=64), SEQ_LENS, QUERY_LENS, 6)
    raw = batch.raw(9, 2)
    together = batch.attend(batch_invariant=True, **raw)
    starts = batch.query_start_loc.tolist()
    for b in range(3):
        alone = paged_attention(
            batch.query[starts[b] : starts[b + 1]],
            batch.kv_cache,
            batch.block_table[b : b + 1],
            batch.seq_lens[b : b + 1],
            torch.tensor([0, QUERY_LENS[b]]),
            batch.layout,
            backend=Batch.backend,
            batch_invariant=True,
            **{**raw, "raw_key": raw["raw_key"][b : b + 1], "raw_value": raw["raw_value"][b : b + 1]},
        )
        assert torch.equal(alone, together[starts[b] : starts[b + 1]])
