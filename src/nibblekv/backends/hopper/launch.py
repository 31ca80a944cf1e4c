"""Host side of the Hopper decode path: what it serves, how it divides the work, its two launches."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from nibblekv.backends.hopper.decode import combine_kernel, decode_kernel
from nibblekv.formats import SCALE_WORD_BYTES
from nibblekv.layout import KVCacheLayout
from nibblekv.options import AttentionOptions
from nibblekv.rotation import rotation_signs

__all__ = ["Plan", "decode", "plan", "supports"]

HEAD_SIZES = (64, 128, 256)
ALIGNMENT = 16
SHARED_BYTES, RESERVED_BYTES, MAX_BLOCKS, REGISTERS = 233472, 1024, 32, 65536
POOL = 1 << 20
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Plan:
    """Launch parameters: tokens of a tile, tiles in flight, splits of a sequence; warps and rows a step of the merge."""

    tile: int
    stages: int
    splits: int
    merge_warps: int
    merge_rows: int
    dependent: bool = True


def supports(
    layout: KVCacheLayout, options: AttentionOptions, query_dtype: torch.dtype, max_query_len: int, device: torch.device
) -> str | None:
    """Return None if `decode` serves such a call, else the reason. Group size and addresses: see `decode`."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return f"needs a GPU of compute capability 9.0, got {device}"
    if layout.page != "planar" or layout.k_format.name != "int4" or layout.v_format.name != "int4":
        return f"needs planar int4 pages, got {layout.k_format.name}/{layout.v_format.name} {layout.page}"
    if layout.head_size not in HEAD_SIZES or layout.head_size_v != layout.head_size:
        return f"needs equal head sizes of {HEAD_SIZES}, got {layout.head_size} and {layout.head_size_v}"
    if layout.block_size & (layout.block_size - 1):
        return f"needs a power of two as block_size, got {layout.block_size}"
    if query_dtype not in (torch.float16, torch.bfloat16):
        return f"needs float16 or bfloat16 queries, got {query_dtype}"
    plain = AttentionOptions(options.softmax_scale, causal=options.causal, sliding_window=options.sliding_window)
    if isinstance(options.causal, torch.Tensor) or not (options.causal or options.sliding_window == 0) or options != plain:
        return "serves no options beside causal and a causal sliding window"
    return None


def shared_bytes(tile: int, stages: int, head_size: int) -> int:
    """Return the bytes of a block's ring of tiles and its barriers."""
    return -(-(stages * (tile * (head_size + 2 * SCALE_WORD_BYTES) + 8)) // 128) * 128


def max_columns(head_size: int) -> int:
    """Return the most query rows (group size x queries of a sequence) that one warp's accumulators hold."""
    return 2048 // head_size if head_size < 256 else 8


@functools.cache
def _signs(kind: str, head_size: int) -> int:
    signs = rotation_signs(kind, head_size)  # type: ignore[arg-type]
    return sum(1 << d for d, sign in enumerate(signs.tolist()) if sign < 0)


def plan(num_seqs: int, num_kv_heads: int, max_seq_len: int, head_size: int, num_sms: int, columns: int) -> Plan:
    """Choose launch parameters from sizes that the host knows: one full wave of one-warp blocks."""
    tile = 32 if head_size == 256 else 64
    stages = 2
    shared = SHARED_BYTES // (stages * tile * (head_size + 2 * SCALE_WORD_BYTES) + RESERVED_BYTES + 128)
    resident = num_sms * min(shared, 12)
    splits = max(1, min(resident // (num_seqs * num_kv_heads), -(-max_seq_len // tile)))
    return Plan(tile, stages, splits, 1 if splits <= 16 else 8, 8 if splits <= 16 else 32)


def decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    layout: KVCacheLayout,
    options: AttentionOptions,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    max_query_len: int,
    max_seq_len: int,
    parameters: Plan | None = None,
) -> None:
    """Attend over packed pages into `out` (and `lse`), in two launches; nothing waits for the device.

    Args: those of `nibblekv.paged_attention`, for a call that `supports` accepts. out may be any float dtype.
        parameters: overrides `plan`.
    """
    num_tokens, num_query_heads, head_size = query.shape
    num_kv_heads = layout.num_kv_heads
    group = num_query_heads // num_kv_heads
    num_seqs = seq_lens.shape[0]
    if parameters is None:
        num_sms = _num_sms(query.device)
        parameters = plan(num_seqs, num_kv_heads, max_seq_len, head_size, num_sms, group * max_query_len)
    splits = parameters.splits
    partial = torch.empty((num_tokens, num_query_heads, splits, head_size), dtype=torch.float32, device=query.device)
    partial_lse = torch.empty((num_tokens, num_query_heads, splits), dtype=torch.float32, device=query.device)
    counters = _zeroed_counters(num_seqs * num_kv_heads, query.device)
    signs = _signs(layout.k_format.rotation, head_size)
    decode_kernel[(num_seqs * num_kv_heads * splits,)](
        query, kv_cache, block_table, seq_lens, query_start_loc, counters, partial, partial_lse,
        query.stride(0), query.stride(1), kv_cache.stride(0), kv_cache.stride(1), block_table.stride(0),
        options.softmax_scale * LOG2_E / math.sqrt(head_size), options.sliding_window,
        num_kv_heads, splits, group, max_query_len, head_size, layout.block_size, parameters.tile, parameters.stages,
        bool(options.causal), options.sliding_window > 0, query.dtype == torch.float16, signs, parameters.dependent,
        num_warps=1, launch_pdl=parameters.dependent,
    )  # fmt: skip
    combine_kernel[(num_tokens * num_query_heads,)](
        counters, partial, partial_lse, out, lse if lse is not None else partial_lse, out.stride(0), out.stride(1),
        1.0 / math.sqrt(head_size), num_seqs * num_kv_heads, splits, num_query_heads, head_size, signs, parameters.merge_rows,
        lse is not None, parameters.dependent, num_warps=parameters.merge_warps, launch_pdl=parameters.dependent,
    )  # fmt: skip


@functools.cache
def _num_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class _Counters:
    """Zeroed int32 counters that every call leaves zeroed. Calls of one stream share; every captured call owns its own."""

    def __init__(self) -> None:
        self._shared: dict[tuple[torch.device, int], torch.Tensor] = {}
        self._pools: dict[torch.device, torch.Tensor] = {}
        self._used: dict[torch.device, int] = {}

    def take(self, count: int, device: torch.device) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            pool = self._pools.get(device)
            used = self._used.get(device, 0)
            if pool is None or used + count > pool.numel():
                return torch.zeros(count, dtype=torch.int32, device=device)
            self._used[device] = used + count
            return pool[used : used + count]
        key = (device, torch.cuda.current_stream(device).cuda_stream)
        shared = self._shared.get(key)
        if shared is None or shared.numel() < count:
            shared = self._shared[key] = torch.zeros(max(count, 4096), dtype=torch.int32, device=device)
            if device not in self._pools or self._used.get(device, 0) > POOL // 2:
                self._pools[device] = torch.zeros(POOL, dtype=torch.int32, device=device)
                self._used[device] = 0
        return shared


_counters = _Counters()
_zeroed_counters = _counters.take
