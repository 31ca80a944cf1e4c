"""Write, decode and prefill on packed pages with compiled kernels (csrc/), on the threads of torch.

The kernels are C++ compiled when the package is installed, loaded with ctypes: nothing is compiled at first use.
"""

from __future__ import annotations

import struct

import torch

from nibblekv.backends.cpu._library import DTYPES, geometry, index, library, unavailable_reason
from nibblekv.layout import KVCacheLayout
from nibblekv.options import AttentionOptions

__all__ = ["paged_attention", "reshape_and_cache", "supports", "unavailable_reason"]

_WRITE_ARGS = struct.Struct("14q")
_ATTENTION_ARGS = struct.Struct("49q3d")


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
        _WRITE_ARGS.pack(
            geometry(layout, kv_cache), kv_cache.data_ptr(), key.data_ptr(), value.data_ptr(),
            key_token * size, key_head * size, value_token * size, value_head * size, DTYPES[key.dtype],
            *index(slot_mapping), key.shape[0], torch.get_num_threads(),
        )
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
    if query.stride(-1) != 1:
        query = query.contiguous()
    target = out if out.stride(-1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
    _attend(query, kv_cache, block_table, seq_lens, query_start_loc, layout, options, target, lse, key, value, False)
    if target is not out:
        out.copy_(target)


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
    # Tensors made here must live until the call returns.
    flags = options.causal.to(torch.bool).contiguous() if isinstance(options.causal, torch.Tensor) else None
    prefix_lens = _as(options.rswa_prefix_lens, torch.int64)
    slopes, sinks, bias = (_as(t, torch.float32) for t in (options.alibi_slopes, options.sinks, options.qq_bias))
    ranges = _as(options.mm_prefix_ranges, torch.int32)
    status = library().nibblekv_attention(
        _ATTENTION_ARGS.pack(
            geometry(layout, kv_cache), kv_cache.data_ptr(),
            query.data_ptr(), query_token * size, query_head * size, DTYPES[query.dtype],
            out.data_ptr(), out_token * out_size, out_head * out_size, DTYPES[out.dtype],
            _address(lse), *raw,
            block_table.data_ptr(), table_row * entry, table_column * entry, wide,
            *index(seq_lens), *index(query_start_loc), seq_lens.shape[0], query.shape[1],
            flags is None and bool(options.causal), _address(flags),
            options.sliding_window, options.chunk_size, options.chunk_lookback, _address(prefix_lens), options.rswa_window,
            _address(slopes), options.alibi_sqrt, _address(sinks), _address(bias), 0 if bias is None else bias.shape[0],
            _address(ranges), 0 if ranges is None else ranges.shape[1], options.mm_prefix_clamp,
            options.batch_invariant, prefix_only, torch.get_num_threads(),
            options.softmax_scale, options.softcap,
            0.0 if options.output_scale is None else float(options.output_scale),
        )
    )  # fmt: skip
    if status:
        raise MemoryError("paged_attention: no memory for the states of the splits")


def _as(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(dtype).contiguous()


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
