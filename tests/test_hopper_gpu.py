"""The Hopper decode path against float64 attention over its own pages, on the GPU that it is made for."""

from __future__ import annotations

import math

import pytest
import torch

import nibblekv
from nibblekv.layout import KVCacheLayout
from nibblekv.options import AttentionOptions
from nibblekv.rotation import inverse_gain, rotation_matrix

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)
hopper = pytest.importorskip("nibblekv.backends.triton.hopper")

DEVICE = torch.device("cuda")


def make_pages(layout, lens, seed=0):
    """Return (kv_cache, block_table): pages in random order; slots past a sequence's end are 0xFF, entries are wild."""
    torch.manual_seed(seed)
    per_seq = -(-max(lens) // layout.block_size) + 1
    num_blocks = len(lens) * per_seq
    kv_cache = torch.randint(0, 256, layout.shape(num_blocks), dtype=torch.uint8, device=DEVICE)
    views = layout.views(kv_cache)
    for words in (views.k_scale_cache, views.v_scale_cache):
        if layout.k_format.word == "scale_zero":
            scale = torch.rand(words.shape, device=DEVICE) * 0.2 + 0.3
            words.copy_((scale.view(torch.int32) & -16) | torch.randint(6, 10, words.shape, device=DEVICE).int())
            continue
        scale = (torch.rand(words.shape, device=DEVICE) * 0.2 + 0.3).bfloat16()
        bias = (-(7.5 + 0.3 * torch.randn(words.shape, device=DEVICE)) * scale.float()).bfloat16()
        words.copy_((scale.view(torch.int16).int() << 16) | (bias.view(torch.int16).int() & 0xFFFF))
    block_table = torch.randperm(num_blocks, device=DEVICE).view(len(lens), per_seq).int()
    for seq, seq_len in enumerate(lens):
        used = -(-seq_len // layout.block_size)
        if seq_len % layout.block_size:
            for view in (views.key_cache, views.value_cache):
                view[block_table[seq, used - 1].long(), seq_len % layout.block_size :] = 0xFF
            for view in (views.k_scale_cache, views.v_scale_cache):
                view[block_table[seq, used - 1].long(), seq_len % layout.block_size :] = -1
        block_table[seq, used:] = 2**31 - 1
    return kv_cache, block_table


def exact(query, kv_cache, block_table, lens, query_len, layout, options):
    """Return float64 (out, lse): the formula of `AttentionOptions`, from the stored codes and words."""
    views = layout.views(kv_cache)
    kind = layout.k_format.rotation
    rotation, gain = rotation_matrix(kind, layout.head_size).to(DEVICE), inverse_gain(kind, layout.head_size)
    outs, lses = [], []
    for seq, seq_len in enumerate(lens):
        blocks = block_table[seq, : -(-seq_len // layout.block_size)].long()
        decoded = []
        for codes, words in ((views.key_cache, views.k_scale_cache), (views.value_cache, views.v_scale_cache)):
            code, word = codes[blocks].flatten(0, 1)[:seq_len], words[blocks].flatten(0, 1)[:seq_len]
            nibbles = torch.stack((code & 15, code >> 4), -1).flatten(-2).double()
            scale, bias = (word & -65536).view(torch.float32).double(), (word << 16).view(torch.float32).double()
            if layout.k_format.word == "scale_zero":
                scale = (word & -16).view(torch.float32).double()
                bias = -(word & 15) * scale
            decoded.append(nibbles * scale[..., None] + bias[..., None])
        key, value = decoded
        q = query[seq * query_len : (seq + 1) * query_len].double() @ rotation.T
        q = q.unflatten(1, (layout.num_kv_heads, -1))
        score = torch.einsum("qhgd,khd->hgqk", q, key) * (options.softmax_scale * gain)
        position = torch.arange(seq_len, device=DEVICE)
        at = torch.arange(query_len, device=DEVICE)[:, None] + seq_len - query_len
        visible = position <= at if options.causal else torch.ones_like(position <= at)
        if options.sliding_window:
            visible = visible & (at - position < options.sliding_window)
        score = score.masked_fill(~visible, -math.inf)
        rows = torch.einsum("hgqk,khd->qhgd", score.softmax(-1), value).flatten(1, 2)
        outs.append(rows @ rotation * gain)
        lses.append(score.logsumexp(-1).permute(2, 0, 1).flatten(1))
    return torch.cat(outs), torch.cat(lses)


def run(layout, lens, group=4, query_len=1, dtype=torch.bfloat16, scale=1.0, kv_cache=None, block_table=None, **options):
    if kv_cache is None:
        kv_cache, block_table = make_pages(layout, lens)
    torch.manual_seed(1)
    shape = (len(lens) * query_len, layout.num_kv_heads * group, layout.head_size)
    query = (torch.randn(shape, device=DEVICE) * scale).to(dtype)
    seq_lens = torch.tensor(lens, device=DEVICE, dtype=torch.int32)
    starts = torch.arange(len(lens) + 1, device=DEVICE, dtype=torch.int32) * query_len
    opts = AttentionOptions(layout.head_size**-0.5, **options)
    assert hopper.supports(layout, opts, dtype, query_len, DEVICE, shape[1], kv_cache) is None
    for _ in range(2):  # the second call finds the counters as the first left them
        out = torch.full(shape, math.nan, device=DEVICE)
        lse = torch.full(shape[:2], math.nan, device=DEVICE)
        hopper.decode(query, kv_cache, block_table, seq_lens, starts, layout, opts, out, lse, query_len, max(lens))
    return out, lse, exact(query, kv_cache, block_table, lens, query_len, layout, opts)


CASES = [
    pytest.param(128, 16, {"lens": (1, 15, 16, 63, 64, 65, 1000)}, id="short-and-odd"),
    pytest.param(128, 16, {"lens": (32768,)}, id="32k"),
    pytest.param(128, 16, {"lens": (262144,)}, id="262k"),
    pytest.param(128, 16, {"lens": (1000, 4096), "scale": 4.0, "dtype": torch.float16}, id="sharp-fp16"),
    pytest.param(128, 16, {"lens": (1000,), "group": 1}, id="mha"),
    pytest.param(128, 16, {"lens": (1000,), "group": 3}, id="group-3"),
    pytest.param(128, 16, {"lens": (1000, 20), "group": 8, "scale": 4.0}, id="group-8-sharp"),
    pytest.param(128, 16, {"lens": (4, 100, 5001), "query_len": 4}, id="four-queries"),
    pytest.param(128, 16, {"lens": (4, 300, 1001), "query_len": 4, "sliding_window": 70}, id="four-queries-window"),
    pytest.param(128, 16, {"lens": (1, 99, 1001), "sliding_window": 100}, id="window"),
    pytest.param(128, 16, {"lens": (5, 300), "query_len": 4, "causal": False}, id="not-causal"),
    pytest.param(128, 64, {"lens": (1000, 65)}, id="block-64"),
    pytest.param(128, 256, {"lens": (1000, 65)}, id="block-256"),
    pytest.param(64, 16, {"lens": (1000, 65), "group": 8}, id="d64"),
    pytest.param(256, 16, {"lens": (1000, 65), "group": 8}, id="d256"),
]


@pytest.mark.parametrize(
    ("name", "page"), [("int4", "planar"), ("int4", "interleaved"), ("int4_per_token_head", "interleaved")]
)
@pytest.mark.parametrize(("head_size", "block_size", "call"), CASES)
def test_error_over_own_pages(head_size, block_size, call, name, page):
    layout = KVCacheLayout.create(name, num_kv_heads=2, head_size=head_size, block_size=block_size, page=page)
    out, lse, (expected, expected_lse) = run(layout, **call)
    assert float((out - expected).norm() / expected.norm()) <= 1e-3
    assert float((lse - expected_lse).abs().max()) <= 1e-2


def test_nan_row_reaches_exactly_the_queries_that_see_it():
    layout = KVCacheLayout.create("int4", num_kv_heads=1, head_size=128)
    kv_cache, block_table = make_pages(layout, (100,))
    layout.views(kv_cache).v_scale_cache[block_table[0, 98 // 16].long(), 98 % 16] = 0x7FC07FC0
    out, _, _ = run(layout, (100,), query_len=4, kv_cache=kv_cache, block_table=block_table)
    assert torch.isfinite(out[:2]).all()
    assert torch.isnan(out[2:]).all()


def test_first_call_inside_capture_and_replays():
    layout = KVCacheLayout.create("int4", num_kv_heads=2, head_size=128)
    kv_cache, block_table = make_pages(layout, (3000, 40))
    query = torch.randn(2, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    lens = torch.tensor((3000, 40), device=DEVICE, dtype=torch.int32)
    starts = torch.arange(3, device=DEVICE, dtype=torch.int32)
    options = AttentionOptions(128**-0.5)
    out = torch.zeros_like(query)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hopper.decode(query, kv_cache, block_table, lens, starts, layout, options, out, None, 1, 4096)
    for seq_len in (3000, 2999, 1):
        lens[0] = seq_len
        graph.replay()
        eager = torch.empty_like(out)
        hopper.decode(query, kv_cache, block_table, lens, starts, layout, options, eager, None, 1, 4096)
        torch.testing.assert_close(out, eager, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("page", ["planar", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(("head_size", "num_tokens", "steps"), [(128, 1, 1), (128, 1003, 4), (256, 77, 1), (256, 300, 2)])
def test_write_equals_reference(head_size, num_tokens, steps, dtype, page):
    """All bytes but those that float32 sums round to the other side; bad rows, skipped slots and other slots too."""
    torch.manual_seed(2)
    layout = KVCacheLayout.create("int4", num_kv_heads=3, head_size=head_size, page=page)
    # Rows of one tensor, as a projection leaves them: strides are not those of a tensor of their own.
    key, value = torch.randn(num_tokens, 6, head_size, device=DEVICE).to(dtype).chunk(2, 1)
    num_blocks = num_tokens // layout.block_size + 2
    slots = torch.randperm(num_blocks * layout.block_size, device=DEVICE)[:num_tokens]
    if num_tokens > 20:
        key[1] = 0
        key[2, 1] = 3
        key[3, 0, 5] = math.nan
        key[4, 1, 7], key[4, 1, 9] = math.inf, -math.inf
        value[0, 0, 0] = math.inf
        value[6] *= 300
        slots[9], slots[10] = -1, num_blocks * layout.block_size + 5
    assert hopper.write_supports(key, value, layout)
    kv_cache = torch.full(layout.shape(num_blocks), 0x55, dtype=torch.uint8, device=DEVICE)
    expected = kv_cache.clone()
    hopper.write_rows(key, value, kv_cache, slots, layout, steps=steps)
    fits = slots < num_blocks * layout.block_size
    nibblekv.reshape_and_cache(key[fits], value[fits], expected, slots[fits], layout, backend="reference")
    assert float((kv_cache != expected).float().mean()) <= 5e-4
    ours, its = layout.views(kv_cache), layout.views(expected)
    for words, exact_words in ((ours.k_scale_cache, its.k_scale_cache), (ours.v_scale_cache, its.v_scale_cache)):
        assert int((words != exact_words).sum()) <= 2 + num_tokens // 100
