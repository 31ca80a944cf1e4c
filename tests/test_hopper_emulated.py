"""The Hopper decode kernel, emulated lane by lane on the CPU, against float64 attention over its own pages."""

from __future__ import annotations

import math

import pytest
import torch

import nibblekv
from nibblekv.layout import KVCacheLayout
from nibblekv.ops import gather_and_dequantize

pytest.importorskip("triton.experimental.gluon._runtime")
kernels = pytest.importorskip("nibblekv.backends.triton.hopper.kernels")
launch = pytest.importorskip("nibblekv.backends.triton.hopper.launch")

from hopper_emulation import emulate  # noqa: E402

T, STAGES = 64, 2


def attend(layout, lens, group, query_len, splits, dtype=torch.float16, window=0, causal=True, spoil=None):
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
    partial = torch.full((tokens, num_heads, splits, head_size), math.nan)
    partial_lse = torch.full((tokens, num_heads, splits), math.nan)
    kind = layout.k_format.rotation
    gain = launch.rotation_gain(layout)
    emulate(
        kernels.decode_kernel, kernels, len(lens) * heads * splits, query, kv_cache, table, seq_lens, starts, partial,
        partial_lse, query.stride(0), query.stride(1), kv_cache.stride(0), kv_cache.stride(1), table.stride(0),
        head_size**-0.5 * launch.LOG2_E * gain, window, heads, splits, group, query_len, head_size, block, T, STAGES,
        layout.page == "interleaved", layout.k_format.word == "scale_zero", causal, window > 0, dtype == torch.float16,
        launch._signs(kind, head_size), False,
    )  # fmt: skip
    weight = torch.softmax(partial_lse.double() * math.log(2), -1)
    merged = (weight[..., None] * partial.double().masked_fill(partial_lse[..., None] == -math.inf, 0)).sum(2)
    out = nibblekv.rotation.unrotate(merged.float(), kind).double()
    expected = []
    for seq, seq_len in enumerate(lens):
        key, value = (x.double() for x in gather_and_dequantize(kv_cache, table[seq], seq_len, layout))
        q = query[seq * query_len : (seq + 1) * query_len].double().unflatten(1, (heads, group))
        score = torch.einsum("qhgd,khd->hgqk", q, key) * head_size**-0.5
        at = torch.arange(seq_len - query_len, seq_len)[:, None]
        visible = (torch.arange(seq_len) <= at) | (not causal)
        if window:
            visible = visible & (at - torch.arange(seq_len) < window)
        score = score.masked_fill(~visible, -math.inf)
        expected.append(torch.einsum("hgqk,khd->qhgd", score.softmax(-1), value).flatten(1, 2))
    return out, torch.cat(expected)


@pytest.mark.parametrize("page", ["planar", "interleaved"])
@pytest.mark.parametrize("name", ["int4", "int4_per_token_head"])
@pytest.mark.parametrize(
    ("head_size", "block", "lens", "group", "query_len", "splits"),
    [(128, 16, (1, 149), 4, 1, 2), (128, 128, (70, 147), 3, 4, 1), (64, 32, (65, 90), 8, 1, 2), (256, 16, (3, 77), 8, 1, 1)],
    ids=["d128", "d128-four-queries", "d64", "d256"],
)
def test_decode_equals_exact_attention(page, name, head_size, block, lens, group, query_len, splits):
    """Catches a lane that reads another token's or dimension's code, in either page, and a scale word misread."""
    lens = tuple(max(n, query_len) for n in lens)
    layout = KVCacheLayout.create(name, num_kv_heads=2, head_size=head_size, block_size=block, page=page)
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


@pytest.mark.parametrize("page", ["planar", "interleaved"])
def test_a_nan_row_reaches_exactly_the_queries_that_see_it(page):
    layout = KVCacheLayout.create("int4_per_token_head", num_kv_heads=1, head_size=64, page=page)
    out, _ = attend(layout, (90,), 4, 4, 1, spoil=88)
    assert torch.isfinite(out[:2]).all()
    assert torch.isnan(out[2:]).all()
