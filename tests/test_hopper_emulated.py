"""The Hopper kernels, emulated lane by lane on the CPU: decode against float64, write and rotation against torch."""

from __future__ import annotations

import math

import pytest
import torch

import nibblekv
from nibblekv.formats import FORMATS
from nibblekv.layout import KVCacheLayout
from nibblekv.ops import gather_and_dequantize

pytest.importorskip("triton.experimental.gluon._runtime")
kernels = pytest.importorskip("nibblekv.backends.triton.hopper.kernels")
launch = pytest.importorskip("nibblekv.backends.triton.hopper.launch")
writing = pytest.importorskip("nibblekv.backends.triton.hopper.write")
rotating = pytest.importorskip("nibblekv.backends.triton.hopper.rotation")

from hopper_emulation import emulate  # noqa: E402

from nibblekv.backends.triton.codec import format_constants  # noqa: E402
from nibblekv.backends.triton.geometry import geometry  # noqa: E402
from nibblekv.rotation import rotate, unrotate  # noqa: E402

T, STAGES = 64, 2


def attend(layout, lens, group, query_len, splits, dtype=torch.float16, window=0, causal=True, spoil=None, raw=None):
    """Return (out, expected): rows of the emulated kernel, merged and rotated back in float64, and exact ones."""
    torch.manual_seed(3)
    head_size, heads, block = layout.head_size, layout.num_kv_heads, layout.block_size
    per_seq = -(-max(lens) // block)
    kv_cache = torch.full(layout.shape(len(lens) * per_seq), 0xFF, dtype=torch.uint8)
    table = torch.randperm(len(lens) * per_seq).int().view(len(lens), per_seq)
    for seq, seq_len in enumerate(lens):
        rows = torch.randn(2, seq_len, heads, head_size) * torch.tensor([1.0, 300.0 if seq else 1e-4]).view(2, 1, 1, 1)
        position = torch.arange(seq_len)
        slots = table[seq].long()[position // block] * block + position % block
        if spoil is not None:
            rows[1, spoil] = math.nan
        nibblekv.reshape_and_cache(rows[0], rows[1], kv_cache, slots, layout, backend="reference")
        table[seq, -(-seq_len // block) :] = 2**31 - 1
    tokens, num_heads = len(lens) * query_len, heads * group
    query = (torch.randn(tokens, num_heads, head_size) * 2).to(dtype)
    seq_lens, starts = torch.tensor(lens, dtype=torch.int32), torch.arange(len(lens) + 1, dtype=torch.int32) * query_len
    raw_window, raw_sinks, raw_splits = raw or (0, 0, 0)
    slots = splits + raw_splits
    partial = torch.full((tokens, num_heads, slots, head_size), math.nan)
    partial_lse = torch.full((tokens, num_heads, slots), math.nan)
    # The store: sinks, and a ring of the newest tokens; its rows differ from the stored ones altogether.
    ring = raw_window + query_len + 3
    raw_rows = torch.randn(2, len(lens), max(lens), heads, head_size).to(dtype)
    store = torch.full((2, len(lens), raw_sinks + ring, heads, head_size), math.nan, dtype=dtype)
    for seq, seq_len in enumerate(lens):
        for position in (*range(min(raw_sinks, seq_len)), *range(max(raw_sinks, seq_len - ring), seq_len)):
            row = position if position < raw_sinks else raw_sinks + (position - raw_sinks) % ring
            store[:, seq, row] = raw_rows[:, seq, position]
    scale = head_size**-0.5 * launch.LOG2_E
    k_kind, v_kind = layout.k_format.rotation, layout.v_format.rotation
    emulate(
        kernels.decode_kernel, (kernels,), len(lens) * heads * slots, query, kv_cache, table, seq_lens, starts, partial,
        partial_lse, store[0] if raw else None, store[1] if raw else None,
        query.stride(0), query.stride(1), kv_cache.stride(0), kv_cache.stride(1), table.stride(0), *store[0].stride()[:3],
        scale * launch.rotation_gain(k_kind, head_size), scale,
        1.0 / (launch.rotation_gain(v_kind, head_size) * (1 if v_kind == "none" else head_size)),
        window, raw_window, raw_sinks, ring, heads, splits, raw_splits, group, query_len,
        head_size, block, T, STAGES, layout.page == "interleaved",
        *format_constants(layout.k_format), *format_constants(layout.v_format), causal, window > 0,
        raw is not None, dtype == torch.float16, launch._signs(k_kind, head_size), launch._signs(v_kind, head_size), False,
    )  # fmt: skip
    weight = torch.softmax(partial_lse.double() * math.log(2), -1)
    merged = (weight[..., None] * partial.double().masked_fill(partial_lse[..., None] == -math.inf, 0)).sum(2)
    out = unrotate(merged.float(), v_kind).double()
    expected = []
    for seq, seq_len in enumerate(lens):
        key, value = (x.double() for x in gather_and_dequantize(kv_cache, table[seq], seq_len, layout))
        q = query[seq * query_len : (seq + 1) * query_len].double().unflatten(1, (heads, group))
        at = torch.arange(seq_len - query_len, seq_len)[:, None]
        visible = (torch.arange(seq_len) <= at) | (not causal)
        if window:
            visible = visible & (at - torch.arange(seq_len) < window)
        reads_raw = (torch.arange(seq_len) < raw_sinks) | ((raw_window > 0) & (at - torch.arange(seq_len) < raw_window))
        raw_key, raw_value = raw_rows[:, seq, :seq_len].double()
        score = torch.where(
            reads_raw, torch.einsum("qhgd,khd->hgqk", q, raw_key), torch.einsum("qhgd,khd->hgqk", q, key)
        ) * head_size**-0.5  # fmt: skip
        weight = score.masked_fill(~visible, -math.inf).softmax(-1)
        rows = torch.einsum("hgqk,khd->qhgd", weight.masked_fill(reads_raw, 0), value)
        rows += torch.einsum("hgqk,khd->qhgd", weight.masked_fill(~reads_raw, 0), raw_value)
        expected.append(rows.flatten(1, 2))
    return out, torch.cat(expected)


SHAPES = {
    "d128": (128, 16, (1, 149), 4, 1, 2),
    "four-queries": (128, 128, (70, 147), 3, 4, 1),
    "d64": (64, 32, (65, 90), 8, 1, 2),
    "d256": (256, 16, (3, 77), 8, 1, 1),
}
FORMAT_PAIRS = [*FORMATS, "int8_per_token_head/int4", "int4_per_token_head/fp8_per_token_head"]
CASES = [("d128", name, page) for name in FORMAT_PAIRS for page in ("planar", "interleaved")]
CASES += [
    (shape, name, page)
    for shape in ("four-queries", "d64", "d256")
    for name, page in (("int4", "planar"), ("int4_per_token_head", "interleaved"), ("int8_per_token_head", "interleaved"))
]


@pytest.mark.parametrize(("shape", "name", "page"), CASES)
def test_decode_equals_exact_attention(shape, name, page):
    """Catches a lane that reads another token's or dimension's code, in either page, and a scale word misread."""
    head_size, block, lens, group, query_len, splits = SHAPES[shape]
    lens = tuple(max(n, query_len) for n in lens)
    k_format, _, v_format = name.partition("/")
    layout = KVCacheLayout.create(
        k_format, v_format=v_format or None, num_kv_heads=2, head_size=head_size, block_size=block, page=page
    )
    out, expected = attend(layout, lens, group, query_len, splits)
    for seq in range(len(lens)):  # their values differ by 10^6
        rows = slice(seq * query_len, (seq + 1) * query_len)
        assert float((out[rows] - expected[rows]).norm() / expected[rows].norm()) < 6e-4


@pytest.mark.parametrize("page", ["planar", "interleaved"])
@pytest.mark.parametrize(("window", "causal"), [(0, False), (37, True)])
def test_masks(page, window, causal):
    layout = KVCacheLayout.create("int4_per_token_head", num_kv_heads=1, head_size=64, page=page)
    out, expected = attend(layout, (9, 150), 2, 3, 2, torch.bfloat16, window, causal)
    assert float((out[3:] - expected[3:]).norm() / expected[3:].norm()) < 6e-4


@pytest.mark.parametrize("name", ["int4", "int4_per_token_head", "int8_per_token_head", "int8_per_token_head/int4"])
@pytest.mark.parametrize(("query_len", "window"), [(1, 0), (3, 41)], ids=["decode", "three-queries-window"])
def test_raw_window_and_sinks(name, query_len, window):
    """Catches raw rows that are rotated as another format's, or read in place of the wrong keys."""
    k_format, _, v_format = name.partition("/")
    layout = KVCacheLayout.create(k_format, v_format=v_format or None, num_kv_heads=1, head_size=64)
    out, expected = attend(layout, (5, 131), 4, query_len, 2, torch.float16, window, raw=(20, 3, 2))
    for rows in (slice(0, query_len), slice(query_len, None)):
        assert float((out[rows] - expected[rows]).norm() / expected[rows].norm()) < 1e-3


@pytest.mark.parametrize("page", ["planar", "interleaved"])
def test_a_nan_row_reaches_exactly_the_queries_that_see_it(page):
    layout = KVCacheLayout.create("int4_per_token_head", num_kv_heads=1, head_size=64, page=page)
    out, _ = attend(layout, (90,), 4, 4, 1, spoil=88)
    assert torch.isfinite(out[:2]).all()
    assert torch.isnan(out[2:]).all()


@pytest.mark.parametrize("name", ["int4", "int4_per_token_head"])
@pytest.mark.parametrize(("head_size", "dtype"), [(128, torch.float16), (256, torch.bfloat16)], ids=["d128", "d256"])
def test_write_equals_reference(head_size, dtype, name):
    """All bytes but those that float32 sums round to the other side; bad rows and skipped slots too."""
    torch.manual_seed(2)
    layout = KVCacheLayout.create(name, num_kv_heads=2, head_size=head_size)
    kind = layout.k_format.rotation
    key, value = torch.randn(19, 4, head_size).to(dtype).chunk(2, 1)
    key[1], key[2, 1], key[3, 0, 5], value[4, 1, 7] = 0, 3, math.nan, math.inf
    value[6] *= 300
    slots = torch.randperm(48)[:19]
    slots[9] = -1
    kv_cache = torch.full(layout.shape(3), 0x55, dtype=torch.uint8)
    expected = kv_cache.clone()
    nibblekv.reshape_and_cache(key, value, expected, slots, layout, backend="reference")
    places = geometry(layout, kv_cache)
    for of_value in (0, 1):
        emulate(
            writing.write_kernel, (kernels, writing), 3 * 2, key, value, kv_cache.view(torch.int32), slots,
            key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            *places.k_rows, *places.k_words, *places.v_rows, *places.v_words,
            1.0 if kind == "block" else head_size**-0.5, 19, 48, 2, 16, head_size, 1, dtype == torch.float16,
            layout.k_format.word == "scale_zero", launch._signs(kind, head_size), axis1=of_value,
        )  # fmt: skip
    assert float((kv_cache != expected).float().mean()) <= 1e-3


@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
@pytest.mark.parametrize(("head_size", "kind", "dtype"), [(128, "block", torch.float16), (512, "full", torch.bfloat16)])
def test_rotation_equals_torch(head_size, kind, dtype, inverse):
    torch.manual_seed(5)
    x = torch.randn(13, 2 * head_size).to(dtype)[:, :head_size]
    out = torch.full((14, head_size), math.nan, dtype=dtype)
    gain = launch.rotation_gain(kind, head_size) if inverse or kind == "full" else 1.0
    signs = launch._signs(kind, head_size)
    emulate(
        rotating.rotate_kernel, (kernels, writing, rotating), 2, x, out, x.stride(0), out.stride(0), gain, 13,
        head_size, dtype == torch.float16, signs, inverse,
    )  # fmt: skip
    expected = (unrotate if inverse else rotate)(x.float(), kind)
    assert torch.isnan(out[13]).all()
    assert float((out[:13].float() - expected).norm() / expected.norm()) < (4e-4 if dtype == torch.float16 else 3e-3)
