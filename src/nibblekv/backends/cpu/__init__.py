"""Write, decode and prefill on packed pages with compiled kernels (csrc/), on the threads of torch.

The kernels are C++ compiled when the package is installed, loaded with ctypes, and for plain calls as an extension module.
Why not Numba: it reaches the integer dot products that make the difference only through LLVM intrinsics emitted by hand, and
every group size, code kind and dtype is another variant to compile, for seconds, on the user's time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from itertools import pairwise

import torch

from nibblekv.backends.cpu._library import (
    ATTENTION_ARGS,
    DTYPES,
    WRITE_ARGS,
    attend_tensors,
    cache_shapes,
    geometry,
    index,
    library,
    unavailable_reason,
)
from nibblekv.layout import KVCacheLayout
from nibblekv.options import AttentionOptions, defaults_beside

__all__ = ["attend_at_once", "paged_attention", "reshape_and_cache", "supports", "unavailable_reason"]

# From here on a chunk of queries goes to torch: below, its calls cost more than they save.
TORCH_QUERIES = 64
# Values of a query that are widened at once, 8 MB: more leave the caches, fewer heads torch balances badly over threads.
WIDE_VALUES = 1 << 21
CHECKS_PAGES = True
_AT_ONCE = ("softmax_scale", "sliding_window", "raw_key", "raw_value", "raw_window", "raw_sinks")
_NOT_AT_ONCE = defaults_beside(_AT_ONCE)


def supports(layout: KVCacheLayout, options: AttentionOptions | None, device: torch.device) -> str | None:
    """Return None where the kernels serve the call, else why not."""
    if device.type != "cpu":
        return f"it runs on cpu, got {device}"
    return None


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, layout: KVCacheLayout
) -> None:
    """Rotate, quantize and write rows to their slots in one pass; see `nibblekv.reshape_and_cache`."""
    size = key.element_size()
    key_token, key_head, _ = key.stride()
    value_token, value_head, _ = value.stride()
    library().nibblekv_write(
        WRITE_ARGS.pack(
            geometry(layout, kv_cache), kv_cache.data_ptr(), key.data_ptr(), value.data_ptr(),
            key_token * size, key_head * size, value_token * size, value_head * size, DTYPES[key.dtype],
            *index(slot_mapping), key.shape[0], torch.get_num_threads(),
        )
    )  # fmt: skip


def attend_at_once(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    layout: KVCacheLayout,
    options: AttentionOptions,
    out: torch.Tensor,
    max_query_len: int | None,
    max_seq_len: int | None,
) -> bool:
    """Check a call and attend in one call of the library, without options or with windows; see `nibblekv.paged_attention`.

    Returns:
        False, with nothing written, where an argument is wrong, another option is given, or a cache of this layout and
        these strides is new.
    """
    shape, attend = cache_shapes.get(id(layout)), attend_tensors()
    if shape is None or attend is None:
        return False
    given = options.__dict__
    for name, default in _NOT_AT_ONCE:
        if given[name] is not default:
            return False
    return attend(
        shape, query, kv_cache, block_table, seq_lens, query_start_loc, out, options.raw_key, options.raw_value,
        options.softmax_scale, options.sliding_window, options.raw_window, options.raw_sinks, torch.get_num_threads(),
    )  # fmt: skip


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    layout: KVCacheLayout,
    options: AttentionOptions,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    max_query_len: int,
    max_seq_len: int,
) -> None:
    """Attend over packed pages into `out` (and `lse`); see `nibblekv.paged_attention`."""
    if (
        key is not None
        and value is not None
        and _torch_attends_chunk(query, key, value, options, max_query_len, max_seq_len)
    ):
        _prefill(query, kv_cache, block_table, seq_lens, query_start_loc, layout, options, out, lse, key, value)
    else:
        _attend(query, kv_cache, block_table, seq_lens, query_start_loc, layout, options, out, lse, key, value, False)


def _torch_attends_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
    max_query_len: int,
    max_seq_len: int,
) -> bool:
    """Say whether torch's flash attention serves the queries' own rows: twice as fast as the kernels' float path.

    It knows no option beside the causal flag, one dtype, one head size; and it multiplies masked values by zero, so that
    one that is not a number would reach queries that do not see it.
    """
    return (
        max_query_len >= TORCH_QUERIES
        and not options.batch_invariant
        and isinstance(options.causal, bool)
        and (options.sliding_window == 0 or (options.causal and options.sliding_window >= max_seq_len))
        and options.chunk_lookback < 0
        and options.softcap == 0.0
        and options.rswa_prefix_lens is None
        and options.alibi_slopes is None
        and options.qq_bias is None
        and options.mm_prefix_ranges is None
        and options.output_scale is None
        and query.dtype == key.dtype == value.dtype
        and query.shape[-1] == value.shape[-1]
        and math.isfinite(float(value.sum(dtype=torch.float32)))
    )


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: tuple[int, int], options: AttentionOptions
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Attend one chunk to itself: yields KV heads, their rows [queries, heads, group, head_size] and lse without head_size.

    Without tile instructions (AMX) torch multiplies 16-bit matrices 1.7 times slower than float32 ones; then some KV heads
    after others are widened, so that what is widened stays small.
    """
    grouped = query.unflatten(1, heads).permute(1, 2, 0, 3)
    own_key, own_value = (rows.transpose(0, 1).unsqueeze(1).expand_as(grouped) for rows in (key, value))

    def attend(*rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *rows, 0.0, bool(options.causal), attn_mask=None, scale=options.softmax_scale
        )
        return out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)

    if query.dtype == torch.float32 or (query.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()):
        yield slice(None), *attend(grouped, own_key, own_value)
        return
    step = max(1, WIDE_VALUES // grouped[0].numel())
    for head in range(0, heads[0], step):
        part = slice(head, head + step)
        wide = [rows[part, :1].float().expand_as(grouped[part]) for rows in (own_key, own_value)]
        yield part, *attend(grouped[part].float(), *wide)


def _prefill(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    layout: KVCacheLayout,
    options: AttentionOptions,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Attend to the pages before the queries with the kernels, to the queries' own rows with torch, and merge by weight."""
    layout.check_pages(block_table, seq_lens, kv_cache.shape[0])
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    plain = dataclasses.replace(options, sinks=None, sliding_window=0)
    heads = (layout.num_kv_heads, query.shape[1] // layout.num_kv_heads)
    prefix = prefix_lse = None
    if any(length > end - begin for length, (begin, end) in zip(lengths, pairwise(starts), strict=True)):
        prefix = torch.empty(out.shape, dtype=torch.float32)
        prefix_lse = torch.empty(out.shape[:2], dtype=torch.float32)
        _attend(
            query, kv_cache, block_table, seq_lens, query_start_loc, layout, plain, prefix, prefix_lse, None, None, True
        )  # fmt: skip
    for begin, end in pairwise(starts):
        if begin == end:
            continue
        for part, rows, rows_lse in _flash(query[begin:end], key[begin:end], value[begin:end], heads, options):
            total = rows_lse
            if prefix_lse is not None:
                total = torch.logaddexp(total, prefix_lse[begin:end].unflatten(1, heads)[:, part])
            if options.sinks is not None:
                total = torch.logaddexp(total, options.sinks.float().view(heads)[part])
            if total is not rows_lse:
                rows = rows * (rows_lse - total).exp().unsqueeze(-1)
            if prefix is not None and prefix_lse is not None:
                share = (prefix_lse[begin:end].unflatten(1, heads)[:, part] - total).exp().unsqueeze(-1)
                rows = rows + prefix[begin:end].unflatten(1, heads)[:, part] * share
            out[begin:end].unflatten(1, heads)[:, part].copy_(rows)
            if lse is not None:
                lse[begin:end].unflatten(1, heads)[:, part].copy_(total)


def _attend(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    layout: KVCacheLayout,
    options: AttentionOptions,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    prefix_only: bool,
) -> None:
    size, out_size = query.element_size(), out.element_size()
    query_token, query_head, _ = query.stride()
    out_token, out_head, _ = out.stride()
    wide = block_table.dtype is torch.int64
    entry = 8 if wide else 4
    table_row, table_column = block_table.stride()
    raw = (0,) * 8
    if key is not None and value is not None:
        k_size, v_size = key.element_size(), value.element_size()
        raw = (
            key.data_ptr(), value.data_ptr(), key.stride(0) * k_size, key.stride(1) * k_size, value.stride(0) * v_size,
            value.stride(1) * v_size, DTYPES[key.dtype], DTYPES[value.dtype],
        )  # fmt: skip
    kept: tuple[int, ...] = (0,) * 12
    if options.raw_key is not None and options.raw_value is not None:
        raw_size = options.raw_key.element_size()
        strides = (stride * raw_size for raw in (options.raw_key, options.raw_value) for stride in raw.stride()[:3])
        kept = (
            options.raw_key.data_ptr(), options.raw_value.data_ptr(), *strides, DTYPES[options.raw_key.dtype],
            options.raw_ring, options.raw_sinks, options.raw_window,
        )  # fmt: skip
    # Tensors made here must live until the call returns.
    flags = options.causal.to(torch.bool).contiguous() if isinstance(options.causal, torch.Tensor) else None
    prefix_lens = _as(options.rswa_prefix_lens, torch.int64)
    slopes, sinks, bias = (_as(t, torch.float32) for t in (options.alibi_slopes, options.sinks, options.qq_bias))
    ranges = _as(options.mm_prefix_ranges, torch.int32)
    status = library().nibblekv_attention(
        ATTENTION_ARGS.pack(
            geometry(layout, kv_cache), kv_cache.data_ptr(),
            query.data_ptr(), query_token * size, query_head * size, DTYPES[query.dtype],
            out.data_ptr(), out_token * out_size, out_head * out_size, DTYPES[out.dtype],
            _address(lse), *raw,
            block_table.data_ptr(), table_row * entry, table_column * entry, wide,
            *index(seq_lens), *index(query_start_loc), seq_lens.shape[0], query.shape[1], kv_cache.shape[0],
            flags is None and bool(options.causal), _address(flags),
            options.sliding_window, options.chunk_size, options.chunk_lookback, _address(prefix_lens), options.rswa_window,
            _address(slopes), options.alibi_sqrt, _address(sinks), _address(bias), 0 if bias is None else bias.shape[0],
            _address(ranges), 0 if ranges is None else ranges.shape[1], options.mm_prefix_clamp,
            *kept, options.batch_invariant, prefix_only, torch.get_num_threads(),
            options.softmax_scale, options.softcap,
            0.0 if options.output_scale is None else float(options.output_scale),
        )
    )  # fmt: skip
    if status == 2:
        layout.check_pages(block_table, seq_lens, kv_cache.shape[0])
    if status:
        raise MemoryError("paged_attention: no memory for the states of the splits")


def _as(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(dtype).contiguous()


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
