"""The Hopper kernels, emulated lane by lane on the CPU: decode against float64, write and rotation against torch."""

from __future__ import annotations

import math

import pytest
import torch

import nibblekv
from nibblekv.formats import FORMATS
from nibblekv.layout import KVCacheLayout
from nibblekv.ops import gather_and_dequantize
from nibblekv.options import AttentionOptions

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


def attend(
    layout, lens, group, query_len, splits, dtype=torch.float16, window=0, causal=True, spoil=None, raw=(0, 0),
    spoil_raw=None,
):  # fmt: skip
    """Return (out, expected): rows of the emulated kernel, merged and rotated back in float64, and exact ones.

    raw: a raw window and sinks, of rows that have nothing to do with the stored ones.
    """
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
    raw_window, raw_sinks = raw
    ring = raw_window + query_len if raw_window else 0
    raw_rows = torch.randn(2, len(lens), max(lens), heads, head_size).to(dtype)  # by position
    if spoil_raw is not None:
        raw_rows[1, 0, spoil_raw, 0, 7] = math.inf
    store = torch.full((2, len(lens), raw_sinks + ring, heads, head_size), math.nan, dtype=dtype)
    for seq, seq_len in enumerate(lens):
        for p in (p for p in range(seq_len) if p < raw_sinks or p >= seq_len - ring):
            store[:, seq, p if p < raw_sinks else raw_sinks + (p - raw_sinks) % ring] = raw_rows[:, seq, p]
    rows = tokens * num_heads
    flat = torch.full((rows * (splits + 1), head_size), math.nan)
    flat_lse = torch.full((rows * (splits + 1),), math.nan)
    k_kind, v_kind, scale = layout.k_format.rotation, layout.v_format.rotation, head_size**-0.5 * launch.LOG2_E
    emulate(
        kernels.decode_kernel, (kernels,), len(lens) * heads * splits, query, kv_cache, table, seq_lens, starts, flat,
        flat_lse, query.stride(0), query.stride(1), kv_cache.stride(0), kv_cache.stride(1), table.stride(0),
        scale * launch.rotation_gain(k_kind, head_size), window, raw_window, raw_sinks, heads, splits, group, query_len,
        head_size, block, T, STAGES, layout.page == "interleaved",
        *format_constants(layout.k_format), *format_constants(layout.v_format), causal, window > 0, raw != (0, 0),
        dtype == torch.float16, launch._signs(k_kind, head_size), False,
    )  # fmt: skip
    partial, partial_lse = flat[: rows * splits].view(rows, splits, -1), flat_lse[: rows * splits].view(rows, splits)
    if raw != (0, 0):
        emulate(
            kernels.attend_raw, (kernels,), len(lens) * query_len * num_heads, query, store[0], store[1], seq_lens, starts,
            flat, flat_lse, query.stride(0), query.stride(1), *store.stride()[1:4], scale,
            1.0 / (launch.rotation_gain(v_kind, head_size) * (1 if v_kind == "none" else head_size)),
            window, raw_window, raw_sinks, ring, rows * splits, num_heads, group, query_len, head_size, causal, window > 0,
            dtype == torch.float16, launch._signs(v_kind, head_size),
        )  # fmt: skip
        partial = torch.cat((partial, flat[rows * splits :, None]), 1)
        partial_lse = torch.cat((partial_lse, flat_lse[rows * splits :, None]), 1)
    partial, partial_lse = (x.unflatten(0, (tokens, num_heads)) for x in (partial, partial_lse))
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
        unpacked = torch.arange(seq_len) < raw_sinks
        if raw_window:
            unpacked = unpacked | (at - torch.arange(seq_len) < raw_window)
        raw_key, raw_value = (x[:seq_len].double() for x in raw_rows[:, seq])
        score, raw_score = (torch.einsum("qhgd,khd->hgqk", q, x) * head_size**-0.5 for x in (key, raw_key))
        weight = torch.where(unpacked, raw_score, score).masked_fill(~visible, -math.inf).softmax(-1)
        rows = torch.einsum("hgqk,khd->qhgd", weight * ~unpacked, value)
        rows += torch.einsum("hgqk,khd->qhgd", weight * unpacked, raw_value.nan_to_num(posinf=0))
        expected.append(rows.flatten(1, 2))
    return out, torch.cat(expected)


SHAPES = {
    "d128": (128, 16, (1, 149), 4, 1, 2),
    "four-queries": (128, 128, (70, 147), 3, 4, 1),
    "d64": (64, 32, (65, 90), 8, 1, 2),
    "d256": (256, 16, (3, 77), 8, 1, 1),
}
FORMAT_PAIRS = [name for name, fmt in FORMATS.items() if fmt.code in launch.CODES]
FORMAT_PAIRS += ["int8_per_token_head/int4", "int4_per_token_head/fp8_per_token_head"]
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


@pytest.mark.parametrize("v_name", list(FORMATS))
@pytest.mark.parametrize("k_name", list(FORMATS))
def test_codes_that_the_kernels_do_not_read_are_refused(k_name, v_name, monkeypatch):
    """Catches bit planes read as words of codes, and a check that sends every format to the portable kernels."""
    monkeypatch.setattr(launch, "is_hopper", lambda device: True)
    layout = KVCacheLayout.create(k_name, v_format=v_name, num_kv_heads=2, head_size=128)
    options, device = AttentionOptions(softmax_scale=0.1), torch.device("cuda")
    reason = launch.supports(layout, options, torch.float16, 1, device, 8, layout.allocate(2))
    if FORMATS[k_name].bits in (4, 8) and FORMATS[v_name].bits in (4, 8):
        assert reason is None
    else:
        assert reason.startswith("needs codes of")


@pytest.mark.parametrize("page", ["planar", "interleaved"])
@pytest.mark.parametrize(("window", "causal"), [(0, False), (37, True)])
def test_masks(page, window, causal):
    layout = KVCacheLayout.create("int4_per_token_head", num_kv_heads=1, head_size=64, page=page)
    out, expected = attend(layout, (9, 150), 2, 3, 2, torch.bfloat16, window, causal)
    assert float((out[3:] - expected[3:]).norm() / expected[3:].norm()) < 6e-4


@pytest.mark.parametrize(
    ("shape", "name", "raw", "dtype"),
    [
        ("d128", "int4", (32, 4), torch.float16),
        ("d128", "int8_per_token_head/fp8_per_token_head", (0, 5), torch.bfloat16),
        ("four-queries", "int4", (70, 20), torch.bfloat16),
        ("d64", "int4_per_token_head", (9, 3), torch.bfloat16),
        ("d256", "int4_per_token_head/int4", (1, 66), torch.float16),
    ],
)
def test_raw_window_and_sinks(shape, name, raw, dtype):
    """Catches a key read in both forms or in neither, a raw row of another position, and one rotated otherwise."""
    head_size, block, lens, group, query_len, splits = SHAPES[shape]
    k_format, _, v_format = name.partition("/")
    layout = KVCacheLayout.create(k_format, v_format=v_format or None, num_kv_heads=2, head_size=head_size, block_size=block)
    lens = tuple(max(n, query_len) for n in lens)
    out, expected = attend(layout, lens, group, query_len, splits, dtype, 0, True, None, raw)
    assert float((out - expected).norm() / expected.norm()) < 6e-4


@pytest.mark.parametrize(("window", "causal"), [(0, False), (37, True)])
def test_raw_window_beside_masks(window, causal):
    layout = KVCacheLayout.create("int4", num_kv_heads=1, head_size=64)
    out, expected = attend(layout, (9, 150), 2, 3, 2, torch.bfloat16, window, causal, None, (13, 2))
    assert float((out[3:] - expected[3:]).norm() / expected[3:].norm()) < 6e-4


def test_a_raw_nan_row_reaches_exactly_the_queries_that_read_it():
    layout = KVCacheLayout.create("int4", num_kv_heads=1, head_size=64)
    out, _ = attend(layout, (90,), 4, 4, 1, raw=(6, 2), spoil_raw=82)  # read by the queries 86 and 87 of 86 to 89
    assert torch.isnan(out[:2]).all()
    assert torch.isfinite(out[2:]).all()


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
