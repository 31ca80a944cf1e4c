"""Host side of the Hopper decode path: what it serves, how it divides the work, its two launches."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from nibblekv.backends.triton import is_hopper
from nibblekv.backends.triton.attention import multiprocessors
from nibblekv.backends.triton.codec import format_constants
from nibblekv.backends.triton.hopper.kernels import combine_kernel, decode_kernel
from nibblekv.backends.triton.launch import launch, scratch
from nibblekv.formats import SCALE_WORD_BYTES
from nibblekv.layout import KVCacheLayout
from nibblekv.options import AttentionOptions, defaults_beside
from nibblekv.rotation import RotationKind, rotation_signs

__all__ = ["Plan", "decode", "plan", "supports"]

HEAD_SIZES = (64, 128, 256)
# What tensor cores take as it is masked out of a word; bit planes must be joined first.
CODES = ("uint4", "int8", "fp8")
ALIGNMENT = 16
LOG2_E = 1.4426950408889634
_SERVED = (
    "softmax_scale", "causal", "sliding_window", "host_lengths", "raw_key", "raw_value", "raw_window", "raw_sinks"
)  # fmt: skip
_UNSERVED = defaults_beside(_SERVED)


@dataclass(frozen=True)
class Plan:
    """Launch parameters.

    Attributes:
        warps: KV heads of a block, one to a warp; divides num_kv_heads.
        tile: tokens of a step. stages: tiles in flight per warp.
        splits: blocks that share a sequence.
        merge_warps, merge_rows: warps of a merge block, and the splits that it reads in one step.
        dependent: launch each kernel before the one in front of it has drained.
    """

    warps: int
    tile: int
    stages: int
    splits: int
    merge_warps: int
    merge_rows: int
    dependent: bool = True


def supports(
    layout: KVCacheLayout,
    options: AttentionOptions,
    query_dtype: torch.dtype,
    max_query_len: int,
    device: torch.device,
    num_query_heads: int,
    kv_cache: torch.Tensor,
) -> str | None:
    """Return None if `decode` serves such a call, else the reason why not. Reads metadata only."""
    if not is_hopper(device):
        return f"needs a GPU of compute capability 9.0, got {device}"
    if layout.k_format.code not in CODES or layout.v_format.code not in CODES:
        return f"needs codes of {CODES}, got {layout.k_format.name} and {layout.v_format.name}"
    if layout.head_size not in HEAD_SIZES or layout.head_size_v != layout.head_size:
        return f"needs equal head sizes of {HEAD_SIZES}, got {layout.head_size} and {layout.head_size_v}"
    if layout.block_size & (layout.block_size - 1):
        return f"needs a power of two as block_size, got {layout.block_size}"
    if query_dtype not in (torch.float16, torch.bfloat16):
        return f"needs float16 or bfloat16 queries, got {query_dtype}"
    columns = num_query_heads // layout.num_kv_heads * max_query_len
    if columns > max_columns(layout.head_size):
        return f"serves {max_columns(layout.head_size)} queries of a KV head at head size {layout.head_size}, got {columns}"
    if kv_cache.dim() == 4 and kv_cache.stride(2) != layout.slot_bytes:
        return f"needs the rows of a head to follow one another, got strides {kv_cache.stride()}"
    if kv_cache.data_ptr() % ALIGNMENT or kv_cache.stride(0) % ALIGNMENT or kv_cache.stride(1) % ALIGNMENT:
        return f"needs tiles at multiples of {ALIGNMENT} bytes, got strides {kv_cache.stride()}"
    raw_key, raw_value = options.raw_key, options.raw_value
    if raw_key is not None and raw_value is not None:
        if raw_key.dtype != query_dtype:
            return f"needs raw keys of the queries' dtype, {query_dtype}, got {raw_key.dtype}"
        misplaced = raw_key.data_ptr() % ALIGNMENT or raw_value.data_ptr() % ALIGNMENT
        if raw_key.stride() != raw_value.stride() or misplaced or any(n % 8 for n in raw_key.stride()[:3]):
            return f"needs raw rows at multiples of {ALIGNMENT} bytes and equal strides, got {raw_key.stride()}"
    for name, default in _UNSERVED:
        value = getattr(options, name)
        if value is not default and (isinstance(value, torch.Tensor) or value != default):
            return f"serves causal, sliding_window and raw rows only, got {name}"
    if isinstance(options.causal, torch.Tensor) or (options.sliding_window > 0 and not options.causal):
        return "serves one causal flag for all sequences, and a window only with it"
    return None


def max_columns(head_size: int) -> int:
    """Return the most queries of one KV head (group size x queries of a sequence) that a warp's registers hold."""
    return 2048 // head_size


def shared_bytes(warps: int, tile: int, stages: int, slot_bytes: int) -> int:
    """Return the bytes of a block's ring of tiles and its barriers; slot_bytes: of a token of one head."""
    row = 128 * warps
    return -(-stages * (warps * tile * slot_bytes + 8) // row) * row


def rotation_gain(kind: RotationKind, head_size: int) -> float:
    """Return what q.k, or the output, must be multiplied with, the kernels' Hadamard sums being unnormalised.

    `full` stores orthonormal rows, `block` (of these head sizes one block) unnormalised ones.
    """
    return {"none": 1.0, "full": head_size**-0.5, "block": 1.0 / head_size}[kind]


@functools.lru_cache(maxsize=4096)
def plan(
    num_seqs: int, num_kv_heads: int, max_seq_len: int, head_size: int, num_sms: int, slot_bytes: int | None = None,
    skew: int = 1,
) -> Plan:  # fmt: skip
    """Choose launch parameters from what the host knows: one wave of one-warp blocks.

    Eight blocks a multiprocessor keep 139 KB in flight on each; more only lengthen the queues and the merge. At head size
    256, where a split's rows to merge weigh twice as much, four: one to a scheduler. Tiles of longer rows have half as many
    tokens.

    Args:
        slot_bytes: of a token of one head; default: of 4-bit codes.
        skew: how many times as many splits, where one sequence is much longer than the mean.
    """
    widest = max(head_size, 128) + 2 * SCALE_WORD_BYTES
    warps, tile, stages = 1, 64 if slot_bytes is None or slot_bytes <= widest else 32, 2
    blocks = num_sms * (4 if head_size == 256 else 8) // warps
    splits = max(1, min(skew * blocks // (num_seqs * (num_kv_heads // warps)), -(-max_seq_len // tile)))
    if splits > 8 and splits * tile < max_seq_len // 4 and head_size < 256:
        # Few long sequences: half as many splits, each with a third tile in flight, leave less to merge. Two crowd a few
        # multiprocessors in the merge: with rings so large that four blocks fill each, all get as many. One leaves room
        # for its merge instead, so that no block of it waits for a split to end.
        stages, quarters = {1: (2, 3), 2: (6, 2)}.get(num_seqs, (3, 2))
        splits = splits * quarters // 4
    if splits <= 4:
        merge = (1, 4)
    elif splits <= 8 or (head_size == 256 and splits <= 16):
        merge = (1 if head_size == 256 else 2, 8)
    elif splits <= 32:
        merge = (4, 16 if splits <= 16 else 32)
    else:
        merge = (8 if head_size == 256 else 4, 64)
    return Plan(warps, tile, stages, splits, *merge)


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
    skew: int = 1,
) -> None:
    """Attend over packed pages into `out` (and `lse`), in two launches; nothing waits for the device.

    Which thread adds what depends on sizes alone: a call gives the same bits every time.

    Args: those of `nibblekv.paged_attention`, for a call that `supports` accepts. query is read 16 bytes at a time where it
        is aligned so, else copied first. out may have any float dtype. The call allocates its split buffer only:
        4 * (head_size + 1) bytes per query row, head and split (a raw window or sinks count as one).
        parameters: overrides `plan`; skew: see there.
    """
    num_tokens, num_query_heads, head_size = query.shape
    num_kv_heads, num_seqs = layout.num_kv_heads, seq_lens.shape[0]
    if query.data_ptr() % ALIGNMENT or query.stride(0) % 8 or query.stride(1) % 8 or query.stride(2) != 1:
        query = query.contiguous().clone()
    if parameters is None:
        reach = min(max_seq_len, options.sliding_window + max_query_len) if options.sliding_window else max_seq_len
        num_sms = multiprocessors(query.device)
        parameters = plan(num_seqs, num_kv_heads, reach, head_size, num_sms, layout.slot_bytes, skew)
    raw = options.raw_key is not None
    raw_rows = num_tokens * num_query_heads * parameters.splits
    rows = raw_rows + (num_tokens * num_query_heads if raw else 0)
    buffer = scratch(rows * (head_size + 1), query.device)
    partial, partial_lse = buffer, buffer[rows * head_size :]
    k_kind, v_kind = layout.k_format.rotation, layout.v_format.rotation
    score_scale = options.softmax_scale * LOG2_E
    group, half = num_query_heads // num_kv_heads, query.dtype == torch.float16
    masks = (bool(options.causal), options.sliding_window > 0, raw, half)
    launch(
        decode_kernel,
        (num_seqs * (num_kv_heads // parameters.warps) * parameters.splits,),
        (query, kv_cache, block_table, seq_lens, query_start_loc, partial, partial_lse),
        (query.stride(0), query.stride(1), kv_cache.stride(0), kv_cache.stride(1), block_table.stride(0)),
        (
            score_scale * rotation_gain(k_kind, head_size), options.sliding_window, options.raw_window, options.raw_sinks,
            num_kv_heads, parameters.splits,
        ),
        (
            group, max_query_len, head_size, layout.block_size, parameters.tile, parameters.stages,
            layout.page == "interleaved", *format_constants(layout.k_format), *format_constants(layout.v_format), *masks,
            _signs(k_kind, head_size), parameters.dependent,
        ),
        num_warps=parameters.warps, launch_pdl=parameters.dependent,
    )  # fmt: skip
    gain = rotation_gain(v_kind, head_size)
    # H H = head_size: raw rows, rotated by sums alone, times this are rows as stored.
    raw_gain = 1.0 / (gain * (1 if v_kind == "none" else head_size))
    launch(
        combine_kernel,
        (num_query_heads * (num_seqs * max_query_len if raw else num_tokens),),
        (
            partial, partial_lse, out, partial_lse if lse is None else lse, query, options.raw_key, options.raw_value,
            seq_lens, query_start_loc,
        ),
        (
            out.stride(0), out.stride(1), query.stride(0), query.stride(1),
            *(options.raw_key.stride()[:3] if options.raw_key is not None else (0, 0, 0)),
        ),
        (
            gain, score_scale, raw_gain, options.sliding_window, options.raw_window, options.raw_sinks,
            options.raw_ring, raw_rows, parameters.splits,
        ),
        (
            num_query_heads, group, max_query_len, head_size, *masks, _signs(v_kind, head_size), parameters.merge_rows,
            lse is not None, parameters.dependent,
        ),
        num_warps=parameters.merge_warps, launch_pdl=parameters.dependent,
    )  # fmt: skip


@functools.cache
def _signs(kind: RotationKind, head_size: int) -> int:
    """Return the signs of a rotation as bits, 0 for none."""
    signs = rotation_signs(kind, head_size)
    return sum(1 << d for d, sign in enumerate(signs.tolist()) if sign < 0)
