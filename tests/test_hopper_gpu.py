"""The Hopper decode path against float64 attention over its own pages, on the GPU that it is made for."""

from __future__ import annotations

import math

import pytest
import torch

import nibblekv
from nibblekv.backends.reference import raw_mask, raw_rows
from nibblekv.cache import PagedKVCache
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
        sources = [(value, torch.ones_like(position <= at))]
        if options.raw_key is not None:
            places = raw_rows(position, options)
            raw_key, raw_value = (x[seq, places].double() @ rotation.T for x in (options.raw_key, options.raw_value))
            raw = raw_mask(at[:, 0], position, options)
            raw_score = torch.einsum("qhgd,khd->hgqk", q, raw_key) * (options.softmax_scale * gain)
            score = torch.where(raw, raw_score, score)
            sources = [(value, ~raw), (raw_value.nan_to_num(0), raw)]
        visible = position <= at if options.causal else torch.ones_like(position <= at)
        if options.sliding_window:
            visible = visible & (at - position < options.sliding_window)
        score = score.masked_fill(~visible, -math.inf)
        weight = score.softmax(-1)
        rows = sum(torch.einsum("hgqk,khd->qhgd", weight * read, rows) for rows, read in sources).flatten(1, 2)
        outs.append(rows @ rotation * gain)
        lses.append(score.logsumexp(-1).permute(2, 0, 1).flatten(1))
    return torch.cat(outs), torch.cat(lses)


def make_rows(layout, lens, query_len, dtype, window, sinks):
    """Return the options of a raw window and sinks; rows that no query reads are NaN."""
    ring = window + query_len + 1 if window else 0
    options = {"raw_window": window, "raw_sinks": sinks}
    for name in ("raw_key", "raw_value"):
        rows = torch.randn(len(lens), sinks + ring, layout.num_kv_heads, layout.head_size, device=DEVICE).to(dtype)
        for seq, seq_len in enumerate(lens):
            kept = [p for p in range(seq_len) if p < sinks or p > seq_len - query_len - window]
            places = {p if p < sinks else sinks + (p - sinks) % ring for p in kept}
            rows[seq, [place for place in range(sinks + ring) if place not in places]] = math.nan
        options[name] = rows
    return options


def run(
    layout, lens, group=4, query_len=1, dtype=torch.bfloat16, scale=1.0, kv_cache=None, block_table=None, raw=None, **options
):
    if kv_cache is None:
        kv_cache, block_table = make_pages(layout, lens)
    torch.manual_seed(1)
    if raw is not None:
        options |= make_rows(layout, lens, query_len, dtype, *raw)
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
    pytest.param(128, 16, {"lens": (1, 4, 37, 64, 1000, 9000), "raw": (32, 4)}, id="raw"),
    pytest.param(128, 16, {"lens": (70, 3000), "raw": (0, 5), "dtype": torch.float16, "scale": 4.0}, id="raw-sinks-sharp"),
    pytest.param(128, 64, {"lens": (90, 700), "raw": (200, 66), "group": 8}, id="raw-long-window"),
    pytest.param(128, 16, {"lens": (4, 300, 1001), "query_len": 4, "raw": (7, 3)}, id="raw-four-queries"),
    pytest.param(128, 16, {"lens": (300, 9), "query_len": 4, "raw": (9, 20), "sliding_window": 50}, id="raw-in-a-window"),
    pytest.param(64, 16, {"lens": (1000, 65), "group": 8, "raw": (32, 4), "causal": False}, id="raw-d64-not-causal"),
    pytest.param(256, 16, {"lens": (1000, 65), "group": 8, "raw": (32, 4)}, id="raw-d256"),
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


@pytest.mark.parametrize("name", ["int8_per_token_head", "fp8_per_token_head", "int8_per_token_head/int4"])
@pytest.mark.parametrize(("head_size", "query_len"), [(64, 1), (128, 1), (128, 4), (256, 1)])
def test_eight_bit_pages(name, head_size, query_len):
    k_format, _, v_format = name.partition("/")
    layout = KVCacheLayout.create(k_format, v_format=v_format or None, num_kv_heads=2, head_size=head_size)
    lens = (query_len, 63, 1001, 9000)
    torch.manual_seed(4)
    blocks = -(-max(lens) // layout.block_size)
    kv_cache = torch.full(layout.shape(len(lens) * blocks), 0xFF, dtype=torch.uint8, device=DEVICE)
    table = torch.randperm(len(lens) * blocks, device=DEVICE).int().view(len(lens), blocks)
    for seq, seq_len in enumerate(lens):
        position = torch.arange(seq_len, device=DEVICE)
        slots = table[seq].long()[position // layout.block_size] * layout.block_size + position % layout.block_size
        rows = torch.randn(2, seq_len, 2, head_size, dtype=torch.float16, device=DEVICE)
        nibblekv.reshape_and_cache(rows[0], rows[1], kv_cache, slots, layout)
    query = torch.randn(len(lens) * query_len, 8, head_size, device=DEVICE).half()
    out = torch.full(query.shape, math.nan, device=DEVICE)
    hopper.decode(
        query, kv_cache, table, torch.tensor(lens, device=DEVICE).int(),
        torch.arange(len(lens) + 1, device=DEVICE).int() * query_len, layout, AttentionOptions(head_size**-0.5), out, None,
        query_len, max(lens),
    )  # fmt: skip
    for seq, seq_len in enumerate(lens):
        key, value = (x.double() for x in nibblekv.gather_and_dequantize(kv_cache, table[seq], seq_len, layout))
        these = slice(seq * query_len, (seq + 1) * query_len)
        score = torch.einsum("qhgd,khd->hgqk", query[these].double().unflatten(1, (2, 4)), key) * head_size**-0.5
        at = torch.arange(seq_len - query_len, seq_len, device=DEVICE)[:, None]
        score = score.masked_fill(torch.arange(seq_len, device=DEVICE) > at, -math.inf)
        expected = torch.einsum("hgqk,khd->qhgd", score.softmax(-1), value).flatten(1, 2)
        assert float((out[these] - expected).norm() / expected.norm()) <= 1e-3


def test_nan_row_reaches_exactly_the_queries_that_see_it():
    layout = KVCacheLayout.create("int4", num_kv_heads=1, head_size=128)
    kv_cache, block_table = make_pages(layout, (100,))
    layout.views(kv_cache).v_scale_cache[block_table[0, 98 // 16].long(), 98 % 16] = 0x7FC07FC0
    out, _, _ = run(layout, (100,), query_len=4, kv_cache=kv_cache, block_table=block_table)
    assert torch.isfinite(out[:2]).all()
    assert torch.isnan(out[2:]).all()


def test_raw_nan_reaches_exactly_the_queries_that_read_it():
    layout = KVCacheLayout.create("int4", num_kv_heads=1, head_size=128)
    raw = make_rows(layout, (100,), 4, torch.bfloat16, 6, 2)
    raw["raw_value"][0, 2 + (92 - 2) % (raw["raw_value"].shape[1] - 2), 0, 9] = (
        math.inf
    )  # of the queries 96 to 99, 96 and 97
    out, _, _ = run(layout, (100,), query_len=4, **raw)
    assert torch.isnan(out[:2]).all()
    assert torch.isfinite(out[2:]).all()


def test_paged_cache_keeps_a_window_without_waiting():
    """A prompt, steps of one and of three tokens, against the reference on the CPU; writes and reads never sync."""
    layout = KVCacheLayout.create("int4", num_kv_heads=2, head_size=128)
    caches = [
        PagedKVCache(layout, device=device, backend=backend, window=32, sinks=4, raw_dtype=torch.float16)
        for device, backend in (("cuda", "triton"), ("cpu", "reference"))
    ]
    ids = [cache.add_sequences(2) for cache in caches]
    torch.manual_seed(3)
    for counts in ([150, 20], [1, 1], [3, 3], [1, 1]):
        key, value = torch.randn(2, sum(counts), 2, 128).half()
        query = torch.randn(sum(counts), 8, 128).half()
        outs = []
        for cache, seq_ids in zip(caches, ids, strict=True):
            step = cache.extend(seq_ids, counts)
            k, v, q = (x.to(cache.device) for x in (key, value, query))
            for warm in (True, False):
                torch.cuda.set_sync_debug_mode("default" if warm else "error")
                try:
                    cache.write(step, k, v)
                    own = {"key": k, "value": v} if max(counts) > 3 else {}
                    out = cache.attend(step, q, **own)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            outs.append(out.cpu().double())
        # Codes of a write may differ by one here and there; without the window it would be 4e-2.
        assert float((outs[0] - outs[1]).norm() / outs[1].norm()) < 1e-2


@pytest.mark.parametrize("raw", [False, True], ids=["packed", "window"])
def test_first_call_inside_capture_and_replays(raw):
    layout = KVCacheLayout.create("int4", num_kv_heads=2, head_size=128)
    kv_cache, block_table = make_pages(layout, (3000, 40))
    query = torch.randn(2, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    lens = torch.tensor((3000, 40), device=DEVICE, dtype=torch.int32)
    starts = torch.arange(3, device=DEVICE, dtype=torch.int32)
    options = AttentionOptions(128**-0.5)
    if raw:
        rows = torch.randn(2, 40, 2, 128, device=DEVICE, dtype=torch.bfloat16)
        options = AttentionOptions(128**-0.5, raw_key=rows, raw_value=rows.flip(0), raw_window=32, raw_sinks=4)
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


@pytest.mark.parametrize(
    ("name", "page"), [("int4", "planar"), ("int4", "interleaved"), ("int4_per_token_head", "interleaved")]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(("head_size", "num_tokens", "steps"), [(128, 1, 1), (128, 1003, 4), (256, 77, 1), (256, 300, 2)])
def test_write_equals_reference(head_size, num_tokens, steps, dtype, name, page):
    """All bytes but those that float32 sums round to the other side; bad rows, skipped slots and other slots too."""
    torch.manual_seed(2)
    layout = KVCacheLayout.create(name, num_kv_heads=3, head_size=head_size, page=page)
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
    ours, its = layout.views(kv_cache), layout.views(expected)
    for codes, exact_codes in ((ours.key_cache, its.key_cache), (ours.value_cache, its.value_cache)):
        assert float((codes != exact_codes).float().mean()) <= 5e-4
    for words, exact_words in ((ours.k_scale_cache, its.k_scale_cache), (ours.v_scale_cache, its.v_scale_cache)):
        # The last bits of a float32 scale follow the order of sums; its lowest four are the zero point.
        differ = (words - exact_words).abs() > 256 if name == "int4_per_token_head" else words != exact_words
        zero_points = (words & 15) != (exact_words & 15)
        assert int((differ | zero_points).sum()) <= 2 + num_tokens // 100
