"""What only a GPU shows of the Triton backend: extra memory of a call, launches, and a first call inside a capture."""

from __future__ import annotations

import functools

import pytest
import torch

import nibblekv
from nibblekv.layout import KVCacheLayout

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from nibblekv.backends.triton import attention, prefill  # noqa: E402
from nibblekv.benchmarking_cuda import count_kernels  # noqa: E402

DEVICE = torch.device("cuda")
WINDOW, SINKS = 32, 4
# Of torch's allocator: it rounds each tensor up, and leaves a free block whole whose rest would be below 1 MiB.
ROUNDING, WHOLE_BLOCK = 16 << 10, 1 << 20
PAGES = {
    "planar": {"format": "int4"},
    "interleaved": {"format": "int4_per_token_head"},
    "int8": {"format": "int8_per_token_head"},
}


def make_call(layout, num_seqs, query_len, context, group=4, dtype=torch.bfloat16, raw=False, window=False):
    """Return a call of `paged_attention` over a filled cache, everything that it needs allocated before.

    raw: with the queries' own keys and values. window: with a raw window and sinks.
    """
    torch.manual_seed(0)
    blocks = -(-context // layout.block_size)
    kv_cache = layout.allocate(num_seqs * blocks, DEVICE)
    for part in torch.arange(num_seqs * blocks * layout.block_size, device=DEVICE).split(1 << 16):
        rows = torch.randn(2, part.numel(), layout.num_kv_heads, layout.head_size, dtype=dtype, device=DEVICE)
        nibblekv.reshape_and_cache(rows[0], rows[1], kv_cache, part, layout)
    tokens = num_seqs * query_len
    query = torch.randn(tokens, layout.num_kv_heads * group, layout.head_size, dtype=dtype, device=DEVICE)
    arguments = {
        "query": query,
        "kv_cache": kv_cache,
        "block_table": torch.randperm(num_seqs * blocks, device=DEVICE).int().view(num_seqs, blocks),
        "seq_lens": torch.full((num_seqs,), context, dtype=torch.int32, device=DEVICE),
        "query_start_loc": torch.arange(num_seqs + 1, dtype=torch.int32, device=DEVICE) * query_len,
        "layout": layout,
        "max_query_len": query_len,
        "max_seq_len": context,
        "out": torch.empty_like(query),
    }
    if window:
        size = (2, num_seqs, SINKS + WINDOW + query_len, layout.num_kv_heads, layout.head_size)
        arguments["raw_key"], arguments["raw_value"] = torch.randn(size, dtype=dtype, device=DEVICE)
        arguments["raw_window"], arguments["raw_sinks"] = WINDOW, SINKS
    if raw:
        arguments["key"], arguments["value"] = torch.randn(
            2, tokens, layout.num_kv_heads, layout.head_size, device=DEVICE
        ).to(dtype)
        arguments["host_lengths"] = ([query_len * i for i in range(num_seqs + 1)], [context] * num_seqs)
    return functools.partial(nibblekv.paged_attention, **arguments)


def extra_bytes(call):
    """Return by how much a warm call raises the allocator's peak."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def split_bytes(layout, num_seqs, query_len, context, group=4, window=False):
    """Return the bytes of the split buffers of such a call: float32 rows and log-sum-exp, and rotated queries beside one
    split where there is only one."""
    heads = layout.num_kv_heads * group
    splits = attention.choose_config(layout, num_seqs, heads, query_len, context, False, DEVICE).num_splits
    if torch.cuda.get_device_capability() == (9, 0):
        hopper = pytest.importorskip("nibblekv.backends.triton.hopper.launch")
        chosen = hopper.plan(num_seqs, layout.num_kv_heads, context, layout.head_size, attention.multiprocessors(DEVICE))
        splits = max(splits, chosen.splits) + window
    return num_seqs * query_len * heads * splits * 4 * (layout.head_size_v + 1)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("window", [False, True], ids=["packed", "window"])
@pytest.mark.parametrize(("num_seqs", "query_len", "context"), [(1, 1, 16384), (32, 1, 2048), (64, 4, 512)])
def test_decode_allocates_its_split_buffers_only(page, num_seqs, query_len, context, window):
    layout = KVCacheLayout.create(**PAGES[page], num_kv_heads=8, head_size=128)
    extra = extra_bytes(make_call(layout, num_seqs, query_len, context, window=window))
    assert extra <= split_bytes(layout, num_seqs, query_len, context, window=window) + WHOLE_BLOCK


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("window", [False, True], ids=["packed", "window"])
@pytest.mark.parametrize(
    ("num_seqs", "query_len", "context"), [(1, 2048, 16384), (1, 8192, 8192), (3, 1024, 4096), (4, 64, 4096)]
)
def test_prefill_allocates_its_workspace_and_split_buffers_only(page, num_seqs, query_len, context, window):
    """A context dequantized as a whole would take 64 MiB for every 16,384 tokens."""
    layout = KVCacheLayout.create(**PAGES[page], num_kv_heads=8, head_size=128)
    extra = extra_bytes(make_call(layout, num_seqs, query_len, context, raw=True, window=window))
    lse = 4 * num_seqs * query_len * layout.num_kv_heads * 4
    # Of long queries, one sequence's float16 rows over its prefix are what is merged.
    splits = 2 * query_len * layout.num_kv_heads * 4 * layout.head_size_v
    if query_len < prefill.LONG_QUERY:
        splits = split_bytes(layout, num_seqs, query_len, context, window=window)
    assert extra <= prefill.WORKSPACE_BYTES + 2 * lse + splits + ROUNDING


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("window", [False, True], ids=["packed", "window"])
def test_a_layer_takes_four_launches_at_most(page, window):
    layout = KVCacheLayout.create(**PAGES[page], num_kv_heads=8, head_size=128)
    call = make_call(layout, 8, 1, 4096, window=window)
    call()
    key, value = torch.randn(2, 8, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    slots = torch.arange(8, device=DEVICE) * 4096 + 4095
    write = functools.partial(nibblekv.reshape_and_cache, key, value, call.keywords["kv_cache"], slots, layout)
    write()
    assert 2 <= count_kernels(call) + count_kernels(write) <= 4


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("window", [False, True], ids=["packed", "window"])
def test_a_repeated_call_reads_and_writes_the_tensors_that_it_is_given(page, window):
    """Eager calls after the first repeat its launches on new addresses."""
    layout = KVCacheLayout.create(**PAGES[page], num_kv_heads=8, head_size=128)
    expected = []
    for step in range(3):
        call = make_call(layout, 4, 1, 3000 - step, window=window)
        arguments = call.keywords | {
            "query": call.keywords["query"] * (step + 1),
            "out": torch.empty_like(call.keywords["out"]),
        }
        for name in ("kv_cache", "raw_key", "raw_value"):
            if name in arguments:
                arguments[name] = arguments[name] * (1 if name == "kv_cache" else step + 1)
        row = torch.randn(2, 4, 8, 128, dtype=torch.bfloat16, device=DEVICE)
        slots = torch.arange(4, device=DEVICE) + 64 * step
        kept = arguments["kv_cache"].clone()
        nibblekv.reshape_and_cache(row[0], row[1], arguments["kv_cache"], slots, layout)
        nibblekv.reshape_and_cache(row[0], row[1], kept, slots, layout, backend="reference")
        assert float((kept != arguments["kv_cache"]).float().mean()) < 1e-3
        exact = nibblekv.paged_attention(**{k: v for k, v in arguments.items() if k != "out"}, backend="reference")
        out = nibblekv.paged_attention(**arguments)
        assert out is arguments["out"]
        assert float((out.float() - exact.float()).norm() / exact.float().norm()) < 6e-3  # both rounded to bfloat16
        expected.append((out, out.clone()))
    assert all(torch.equal(out, copy) for out, copy in expected)


@pytest.mark.parametrize("window", [False, True], ids=["packed", "window"])
def test_a_call_like_an_earlier_one_is_checked(window):
    """Catches arguments that are not looked at because a call of the kind was served before."""
    arguments = make_call(KVCacheLayout.create("int4", num_kv_heads=8, head_size=128), 4, 1, 300, window=window).keywords
    nibblekv.paged_attention(**arguments)
    query, table, lengths = (arguments[name] for name in ("query", "block_table", "seq_lens"))
    for name, value, message in (
        ("query", query.cpu(), "device"), ("query", query[:, :7], "query"), ("block_table", table[:3], "block_table"),
        ("block_table", table.float(), "block_table"), ("seq_lens", lengths.cpu(), "seq_lens"),
        ("out", arguments["out"].float(), "out"), ("softmax_scale", 0.0, "softmax_scale"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=message):
            nibblekv.paged_attention(**{**arguments, name: value})


@pytest.mark.parametrize("head_size", [256, 512])
def test_wide_float32_prompts_take_smaller_tiles(head_size):
    """With a window, which no library serves. Catches tiles of a usual size, for which there is no shared memory."""
    layout = KVCacheLayout.create("int4", num_kv_heads=1, head_size=head_size)
    arguments = make_call(layout, 2, 300, 300, dtype=torch.float32, raw=True).keywords | {"sliding_window": 100}
    out = nibblekv.paged_attention(**arguments).clone()
    exact = nibblekv.paged_attention(**{k: v for k, v in arguments.items() if k != "out"}, backend="reference")
    assert float((out - exact).norm() / exact.norm()) < 1e-3


@pytest.mark.parametrize("page", PAGES)
def test_long_queries_read_stored_keys_alone(page):
    """Without raw keys, where the host knows the lengths: dense attention over dequantized keys, the queries' own too."""
    layout = KVCacheLayout.create(**PAGES[page], num_kv_heads=8, head_size=128)
    arguments = make_call(layout, 2, 300, 1000, dtype=torch.float16).keywords | {"return_lse": True}
    expected, expected_lse = nibblekv.paged_attention(**arguments | {"out": None}, backend="reference")
    lengths = {"host_lengths": ([0, 300, 600], [1000, 1000])}
    out, lse = nibblekv.paged_attention(**arguments | lengths)
    assert float((out.float() - expected.float()).norm() / expected.float().norm()) < 1e-3
    torch.testing.assert_close(lse, expected_lse, atol=2e-3, rtol=1e-3)
