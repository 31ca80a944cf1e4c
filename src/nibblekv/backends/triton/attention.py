"""Attention over packed pages: split-KV, any query length, at most two launches.

A program owns BLOCK_M rows of one KV head (query tokens x the heads of its group) and one split of the keys. Queries are
rotated in the prologue, so packed keys are used as they lie: score = (q . code) * scale + sum(q) * bias, with code streams
as float16 dot operands (codec.py) and float32 accumulation. Values likewise: out = sum of (p * scale) * (code + ratio),
where `ratio` = bias / scale multiplies the *same rounded* p * scale. Codes are positive, so the two sums nearly cancel:
each tile's product starts from zero and is added in plain float32, because tensor cores truncate what they accumulate,
always the same way, and a chain over a whole split would show (1e-3 at 262,144 tokens).
The running maximum is that of score + log2(value scale), so p * scale never leaves float16, whatever the scales.

The rotation of the output is undone once per row: in this kernel's epilogue if one split holds all keys, else in
`combine_kernel`, which merges the splits, sinks, and the part of a row that was attended from raw keys.

Raw keys are the queries' own (prefill.py) or those of a window and sinks: these are a split of their own, one more program
beside those of the packed keys, which leave them out. It reads its few rows once for all heads of a group.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nibblekv.backends.triton import is_hopper, rotation
from nibblekv.backends.triton.codec import (
    UINT3,
    code_offset,
    code_unit,
    encode_float8,
    format_constants,
    join_planes,
    join_streams,
    odd_stream_gain,
    read_dtype,
    split_streams,
    unpack_scale_ratio,
    unpack_scale_words,
    unpack_streams,
)
from nibblekv.backends.triton.geometry import Geometry, geometry_of
from nibblekv.backends.triton.launch import cdiv, launch, next_power_of_2, scratch
from nibblekv.backends.triton.rotation import rotate_rows
from nibblekv.layout import KVCacheLayout
from nibblekv.options import AttentionOptions

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))
# Below every score, yet finite: -inf minus -inf would be NaN.
LOWEST = tl.constexpr(-1e30)
# log2 of how far p * scale may exceed 1: keeps small weights out of float16's subnormals.
HEADROOM = tl.constexpr(8.0)
# Rotated queries are held as float16 times this: sqrt(512) * 65,504 then stays finite.
QUERY_GAIN = tl.constexpr(0.015625)

# Tokens of a split in batch-invariant mode, whatever the batch.
INVARIANT_SPLIT = 2048
MAX_SPLITS = 128
# Context from which plain int4 decode reads 256 tokens at once.
LONG_TILE_FROM = 4096
# Programs per multiprocessor that splits aim at.
SPLIT_WAVES = 2
# Up to so many rows `combine_kernel` takes one a program; beyond, 32, with dots.
COMBINE_ROWS_AT_MOST = 4096
PREFETCH, SPLIT_Q = True, False


@triton.jit
def key_range(
    q_first, q_last, seq_len, causal, seq, rswa_prefix_ptr, rswa_window, mm_ranges_ptr, sliding_window, chunk_size,
    chunk_lookback: tl.constexpr, MM_CLAMP: tl.constexpr, TILE: tl.constexpr, PRUNE: tl.constexpr,
):  # fmt: skip
    """Return (prefix tiles, first tile, end tile): tiles outside [0, prefix) and [first, end) hold nothing visible."""
    low = q_first * 0
    high = seq_len
    prefix = q_first * 0
    if PRUNE:
        if mm_ranges_ptr is None:
            if causal:
                high = tl.minimum(seq_len, q_last + 1)
            elif chunk_lookback < 0 and rswa_prefix_ptr is None and sliding_window > 0:
                high = tl.minimum(seq_len, q_last + sliding_window)
        if chunk_lookback >= 0:
            if mm_ranges_ptr is None:
                low = tl.maximum(q_first // chunk_size - chunk_lookback, 0) * chunk_size
        elif rswa_prefix_ptr is not None:
            if mm_ranges_ptr is None:
                low = tl.maximum(q_first - rswa_window + 1, 0)
                prefix = tl.minimum(tl.load(rswa_prefix_ptr + seq).to(tl.int32), high)
        elif sliding_window > 0:
            if mm_ranges_ptr is None or MM_CLAMP:
                low = tl.maximum(q_first - sliding_window + 1, 0)
    first = low // TILE
    end = tl.maximum(tl.cdiv(high, TILE), first)
    return tl.minimum(tl.cdiv(tl.maximum(prefix, 0), TILE), first), first, end


@triton.jit
def visible_keys(
    q, k, seq, causal, rswa_prefix_ptr, rswa_window, mm_ranges_ptr, sliding_window, chunk_size,
    chunk_lookback: tl.constexpr, NUM_MM: tl.constexpr, MM_CLAMP: tl.constexpr,
):  # fmt: skip
    """Return [rows, keys] bool by the rule of `AttentionOptions`; q [rows, 1] and k [1, keys] are positions."""
    mask = (k <= q) | (causal == 0)
    if chunk_lookback >= 0:
        mask = mask & (q // chunk_size - k // chunk_size <= chunk_lookback)
    elif rswa_prefix_ptr is not None:
        mask = mask & ((k < tl.load(rswa_prefix_ptr + seq)) | (q - k < rswa_window))
    elif sliding_window > 0:
        mask = mask & (q - k < sliding_window) & ((k - q < sliding_window) | (causal != 0))
    if mm_ranges_ptr is not None:
        for r in tl.static_range(NUM_MM):
            first = tl.load(mm_ranges_ptr + (seq * NUM_MM + r) * 2)
            last = tl.load(mm_ranges_ptr + (seq * NUM_MM + r) * 2 + 1)
            both = (q >= first) & (q <= last) & (k >= first) & (k <= last) & (first < last)
            if MM_CLAMP:
                if sliding_window > 0:
                    both = both & (q - k < sliding_window)
            mask = mask | both
    return mask


@triton.jit
def packed_keys(q, k, raw_window, raw_sinks):
    """Return [rows, keys] bool: the keys that are read as stored beside a raw window and sinks; shapes as above."""
    return (k >= raw_sinks) & ((raw_window == 0) | (q - k >= raw_window))


@triton.jit
def modify_scores(
    s, q, k, context_len, token, row_mask, head, softcap, alibi_ptr, qq_bias_ptr, qq_stride,
    SOFTCAP: tl.constexpr, ALIBI_SQRT: tl.constexpr,
):  # fmt: skip
    """Apply softcap (to natural scores) and biases; return scores in units of log 2. q [rows, 1], k [1, keys]."""
    if SOFTCAP:
        s = softcap * LOG2E * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E / softcap)) + 1.0))
    if alibi_ptr is not None:
        slope = tl.load(alibi_ptr + head).to(tl.float32)[:, None] * LOG2E
        if ALIBI_SQRT:
            s -= slope * tl.sqrt(tl.maximum(q - k, 0).to(tl.float32))
        else:
            s += slope * (k - q).to(tl.float32)
    if qq_bias_ptr is not None:
        column = k - context_len
        use = row_mask[:, None] & (column >= 0) & (column < qq_stride)
        s += tl.load(qq_bias_ptr + token[:, None] * qq_stride + column, mask=use, other=0.0) * LOG2E
    return s


@triton.jit
def store_rows(
    y, row_ptr, row_mask, matrix_ptr, gain, raw_row_ptr, raw_weight, output_scale_ptr,
    DV: tl.constexpr, DVP: tl.constexpr, ROWS: tl.constexpr, ROTATED: tl.constexpr, PRECISION: tl.constexpr,
    BY_SUM: tl.constexpr,
):  # fmt: skip
    """Undo the rotation of y [ROWS, DVP] float32, add weighted raw rows, scale for float8, cast and store.

    Works on a block of output columns at a time. BY_SUM: a plain float32 product instead of a dot, for one row.
    """
    BLOCK_N: tl.constexpr = DVP if (not ROTATED or DVP <= 64) else (64 if DVP <= 128 else 32)
    i = tl.arange(0, DVP)
    for n0 in tl.static_range(0, DVP, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        if ROTATED:
            m = tl.load(matrix_ptr + i[:, None] * DVP + n[None, :]).to(tl.float32)
            if BY_SUM:
                x = tl.sum(tl.reshape(y, (DVP, 1)) * m, 0)[None, :]
            else:
                x = tl.dot(y, m, input_precision=PRECISION)
        else:
            x = y
        x = x * gain
        mask = row_mask[:, None] & (n < DV)[None, :]
        if raw_row_ptr is not None:
            raw = tl.load(raw_row_ptr[:, None] + n[None, :], mask=mask, other=0.0).to(tl.float32)
            x += tl.where((raw_weight == 0)[:, None], 0.0, raw * raw_weight[:, None])
        target = row_ptr[:, None] + n[None, :]
        if output_scale_ptr is not None:
            tl.store(target, encode_float8(x / tl.load(output_scale_ptr)).to(tl.uint8), mask=mask)
        else:
            tl.store(target, x.to(row_ptr.dtype.element_ty), mask=mask)


@triton.jit
def attend_raw(
    query_row, key_ptr, value_ptr, own_row, own_lse_ptr, row_mask, head, token, position, q_first, context_len, key_end, seq,
    causal, rswa_prefix_ptr, alibi_ptr, qq_bias_ptr, mm_ranges_ptr, key_r, value_r, score_scale, softcap, sliding_window,
    chunk_size, rswa_window, qq_stride, raw_window, raw_sinks, raw_ring,
    CHUNK_LOOKBACK: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI_SQRT: tl.constexpr, NUM_MM: tl.constexpr,
    MM_CLAMP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Attend rows to the raw window and sinks before `key_end`; return (rows [BLOCK_M, DVP] float32, natural log-sum-exp).

    key_ptr, value_ptr: row 0 of the ring of this sequence and KV head. With own_row, the rows' part that was attended from
    the queries' own keys goes first.
    """
    d = tl.arange(0, DP)
    dv = tl.arange(0, DVP)
    sinks_end = tl.minimum(raw_sinks, key_end)
    window_first = tl.maximum(q_first - raw_window + 1, raw_sinks)
    count = sinks_end
    if raw_window > 0:
        count += tl.maximum(key_end - window_first, 0)
    q = tl.load(query_row[:, None] + d[None, :], mask=row_mask[:, None] & (d < D)[None, :], other=0.0)
    SAME: tl.constexpr = (
        not INTERPRET and query_row.dtype.element_ty == key_ptr.dtype.element_ty and key_ptr.dtype.element_ty != tl.float32
    )
    if not SAME:
        q = q.to(tl.float32)
    m = tl.full([BLOCK_M], LOWEST, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    acc = tl.zeros([BLOCK_M, DVP], tl.float32)
    if own_row is not None:
        own_lse = tl.load(own_lse_ptr, mask=row_mask, other=-INF) * LOG2E
        m = tl.maximum(own_lse, LOWEST)
        l = tl.where(own_lse == -INF, 0.0, 1.0)  # noqa: E741
        own = tl.load(own_row[:, None] + dv[None, :], mask=row_mask[:, None] & (dv < DV)[None, :], other=0.0)
        acc = tl.where((l == 0)[:, None], 0.0, own.to(tl.float32))
    for start in tl.range(0, count, TILE, num_stages=1):
        j = start + tl.arange(0, TILE)
        inside = j < count
        k = tl.where(j < sinks_end, j, window_first + j - sinks_end)
        place = tl.where(k < raw_sinks, k, raw_sinks + (k - raw_sinks) % raw_ring).to(tl.int64)
        keys = tl.load(key_ptr + place[None, :] * key_r + d[:, None], mask=inside[None, :] & (d < D)[:, None], other=0.0)
        values = tl.load(
            value_ptr + place[:, None] * value_r + dv[None, :], mask=inside[:, None] & (dv < DV)[None, :], other=0.0
        )
        if SAME:
            s = tl.dot(q, keys) * score_scale
        else:
            s = tl.dot(q, keys.to(tl.float32), input_precision=PRECISION) * score_scale
        if SOFTCAP or alibi_ptr is not None or qq_bias_ptr is not None:
            s = modify_scores(
                s, position[:, None], k[None, :], context_len, token, row_mask, head, softcap, alibi_ptr, qq_bias_ptr,
                qq_stride, SOFTCAP, ALIBI_SQRT,
            )  # fmt: skip
        mask = visible_keys(
            position[:, None], k[None, :], seq, causal, rswa_prefix_ptr, rswa_window, mm_ranges_ptr, sliding_window,
            chunk_size, CHUNK_LOOKBACK, NUM_MM, MM_CLAMP,
        )  # fmt: skip
        mask = mask & inside[None, :] & (packed_keys(position[:, None], k[None, :], raw_window, raw_sinks) == 0)
        # As in `prefill.dense_kernel`: a value row with NaN or Inf reaches the queries that see it, and no other.
        broken = tl.max(tl.where(tl.abs(values.to(tl.float32)) < INF, 0, 1), 1) > 0
        values = tl.where(broken[:, None], 0.0, values).to(values.dtype)
        s = tl.where(broken[None, :], float("nan"), s)
        s = tl.where(mask, s, -INF)
        m_new = tl.maximum(m, tl.max(s, 1))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(s - m_new[:, None])
        m = m_new
        l = l * alpha + tl.sum(p, 1)  # noqa: E741
        acc = acc * alpha[:, None]
        if INTERPRET or value_ptr.dtype.element_ty == tl.float32:
            acc = tl.dot(p, values.to(tl.float32), acc, input_precision=PRECISION)
        else:
            # Weights of 8 bits would show (1e-3): what their rounding took goes in a second product.
            high = p.to(values.dtype)
            acc = tl.dot(high, values, acc)
            acc = tl.dot((p - high.to(tl.float32)).to(values.dtype), values, acc)
    y = acc * tl.where(l == 0, 0.0, 1.0 / l)[:, None]
    return y, tl.where(l == 0, -INF, (m + tl.log2(l)) * LN2)


@triton.jit
def store_partial(y, lse, partial_ptr, partial_lse_ptr, row, row_mask, split, num_splits, DVP: tl.constexpr):
    """Store a split's rows [ROWS, DVP] and their log-sum-exp; row: token * heads + head."""
    index = row * num_splits + split
    column = tl.arange(0, DVP)
    tl.store(partial_ptr + index[:, None] * DVP + column[None, :], y, mask=row_mask[:, None])
    tl.store(partial_lse_ptr + index, lse, mask=row_mask)


@triton.jit
def _add_both(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit(do_not_specialize=["num_q_tiles", "num_splits", "own_before"])
def attention_kernel(
    query_ptr, codes_k_ptr, codes_v_ptr, words_ptr, block_table_ptr, seq_lens_ptr, query_start_ptr,
    k_matrix_ptr, v_matrix_ptr, partial_ptr, partial_lse_ptr, out_ptr, lse_ptr,
    causal_ptr, rswa_prefix_ptr, alibi_ptr, sinks_ptr, qq_bias_ptr, mm_ranges_ptr, output_scale_ptr,
    raw_query_ptr, raw_key_ptr, raw_value_ptr, own_ptr, own_lse_ptr,
    query_t, query_h, table_stride, out_t, out_h,
    k_offset, k_b, k_s, k_h, v_offset, v_b, v_s, v_h, kw_offset, kw_b, kw_s, kw_h, vw_offset, vw_b, vw_s, vw_h,
    score_scale, query_gain, out_gain, softcap, sliding_window, chunk_size, rswa_window, qq_stride,
    raw_query_t, raw_query_h, raw_key_b, raw_key_r, raw_key_h, raw_value_b, raw_value_r, raw_value_h,
    own_t, own_h, own_lse_t, own_lse_h, raw_score_scale, raw_window, raw_sinks, raw_ring,
    num_q_tiles, num_splits, own_before,
    CHUNK_LOOKBACK: tl.constexpr, CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI_SQRT: tl.constexpr,
    NUM_MM: tl.constexpr, MM_CLAMP: tl.constexpr, PREFIX_ONLY: tl.constexpr, SPLIT_TOKENS: tl.constexpr,
    FINAL: tl.constexpr, SHARED_LIMIT: tl.constexpr, PREFETCH: tl.constexpr, SPLIT_Q: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, K_CODE: tl.constexpr, K_WORD: tl.constexpr, K_ROTATED: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, V_CODE: tl.constexpr, V_WORD: tl.constexpr, V_ROTATED: tl.constexpr,
    K_ALIGN: tl.constexpr, V_ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, RAW_TILE: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Attend one tile of rows to one split of the keys of a sequence; grid (sequences * q tiles, KV heads, splits).

    With raw keys there is one more split, theirs: its partial rows are not rotated, its log-sum-exp is natural, and the
    rows' part from the queries' own keys (own, own_lse) is merged into it.

    Token t of sequence b lies at row query_start[b] + t of query and out; the query comes raw, or (K_ROTATED False) as
    float32 already rotated. FINAL writes out and lse; else the partial result [row, split, DVP] (rotated, normalised) and
    its log2-sum-exp.
    CAUSAL: 1, 0, or 2 to read `causal_ptr`. PREFIX_ONLY leaves out the queries' own keys and the own_before in
    front of them. SPLIT_TOKENS > 0 fixes splits.
    """
    D4: tl.constexpr = DP // 4
    DV4: tl.constexpr = DVP // 4
    BLOCK_K: tl.constexpr = 64
    PLAIN: tl.constexpr = not SOFTCAP and alibi_ptr is None and qq_bias_ptr is None
    seq = tl.program_id(0) // num_q_tiles
    kv_head = tl.program_id(1)
    cache_head = kv_head.to(tl.int64)  # heads of a cache may lie gigabytes apart
    split = tl.program_id(2)
    q_begin = tl.load(query_start_ptr + seq).to(tl.int32)
    q_len = tl.load(query_start_ptr + seq + 1).to(tl.int32) - q_begin
    token_tile = (tl.program_id(0) % num_q_tiles) * BLOCK_M // GROUP
    if token_tile >= q_len:
        return
    seq_len = tl.load(seq_lens_ptr + seq).to(tl.int32)
    context_len = seq_len - q_len
    if CAUSAL == 2:
        causal = tl.load(causal_ptr + seq).to(tl.int32)
    else:
        causal = seq_len * 0 + CAUSAL

    row = (tl.program_id(0) % num_q_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    row_mask = token < q_len
    position = context_len + token
    last_row = (tl.program_id(0) % num_q_tiles) * BLOCK_M + BLOCK_M - 1
    last_token = tl.minimum(last_row // GROUP, q_len - 1)

    key_end = context_len - own_before if PREFIX_ONLY else seq_len
    if raw_key_ptr is not None:
        num_slots = num_splits + 1
        if split == num_splits:
            raw_query = raw_query_ptr + (q_begin + token).to(tl.int64) * raw_query_t + head * raw_query_h
            raw_key = raw_key_ptr + seq.to(tl.int64) * raw_key_b + kv_head * raw_key_h
            raw_value = raw_value_ptr + seq.to(tl.int64) * raw_value_b + kv_head * raw_value_h
            own_row = None
            own_lse_row = None
            if own_ptr is not None:
                own_row = own_ptr + (q_begin + token).to(tl.int64) * own_t + head * own_h
                own_lse_row = own_lse_ptr + (q_begin + token).to(tl.int64) * own_lse_t + head * own_lse_h
            y, raw_lse = attend_raw(
                raw_query, raw_key, raw_value, own_row, own_lse_row, row_mask, head, token, position,
                context_len + token_tile, context_len, key_end, seq, causal, rswa_prefix_ptr, alibi_ptr, qq_bias_ptr,
                mm_ranges_ptr, raw_key_r, raw_value_r, raw_score_scale, softcap, sliding_window, chunk_size, rswa_window,
                qq_stride, raw_window, raw_sinks, raw_ring, CHUNK_LOOKBACK, SOFTCAP, ALIBI_SQRT, NUM_MM, MM_CLAMP,
                D, DP, DV, DVP, BLOCK_M, RAW_TILE, PRECISION, INTERPRET,
            )  # fmt: skip
            store_partial(
                y, raw_lse, partial_ptr, partial_lse_ptr, (q_begin + token).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head,
                row_mask, split, num_slots, DVP,
            )  # fmt: skip
            return
    else:
        num_slots = num_splits
    prefix, first, end = key_range(
        context_len + token_tile, context_len + last_token, key_end, causal, seq, rswa_prefix_ptr, rswa_window,
        mm_ranges_ptr, sliding_window, chunk_size, CHUNK_LOOKBACK, MM_CLAMP, TILE, SPLIT_TOKENS == 0,
    )  # fmt: skip
    packed_end = key_end
    if raw_key_ptr is not None:
        # Tiles of sinks alone, and those within every row's window, hold nothing that is read as stored.
        if raw_window > 0:
            packed_end = tl.minimum(key_end, tl.maximum(context_len + last_token - raw_window + 1, 0))
        if SPLIT_TOKENS == 0:
            first = tl.maximum(first, raw_sinks // TILE)
        end = tl.maximum(tl.minimum(end, tl.cdiv(packed_end, TILE)), first)
    if SPLIT_TOKENS > 0:
        lo = split * (SPLIT_TOKENS // TILE)
        hi = tl.minimum(lo + SPLIT_TOKENS // TILE, end)
    else:
        per_split = tl.cdiv(prefix + end - first, num_splits)
        lo = split * per_split
        hi = tl.minimum(lo + per_split, prefix + end - first)

    query_row = query_ptr + (q_begin + token).to(tl.int64) * query_t + head * query_h
    q = rotate_rows(query_row, row_mask, k_matrix_ptr, D, DP, BLOCK_M, BLOCK_K, K_ROTATED, PRECISION, INTERPRET)
    q = q * query_gain
    q_high = q.to(tl.float16)
    q_sum = tl.sum(q_high.to(tl.float32), 1)
    odd_k: tl.constexpr = odd_stream_gain(K_CODE, ASM)
    q0, q1, q2, q3 = split_streams(q_high, BLOCK_M, D4)
    q1 = (q1 * odd_k).to(tl.float16)
    q3 = (q3 * odd_k).to(tl.float16)
    if SPLIT_Q:
        q_low = (q - q_high.to(tl.float32)).to(tl.float16)
        q_sum += tl.sum(q_low.to(tl.float32), 1)
        r0, r1, r2, r3 = split_streams(q_low, BLOCK_M, D4)
        r1 = (r1 * odd_k).to(tl.float16)
        r3 = (r3 * odd_k).to(tl.float16)
    k_factor = score_scale * code_unit(K_CODE, ASM)

    m = tl.full([BLOCK_M], LOWEST, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    a0 = tl.zeros([BLOCK_M, DV4], tl.float32)
    a1 = tl.zeros([BLOCK_M, DV4], tl.float32)
    a2 = tl.zeros([BLOCK_M, DV4], tl.float32)
    a3 = tl.zeros([BLOCK_M, DV4], tl.float32)
    K_BIASED: tl.constexpr = K_WORD != 2 or code_offset(K_CODE, ASM) != 0
    CENTRED: tl.constexpr = V_WORD != 2 or code_offset(V_CODE, ASM) != 0
    z = tl.zeros([BLOCK_M], tl.float32)
    # Zeros that the compiler does not know to be zeros: it would fold each tile's product into one long accumulation.
    nothing = tl.zeros([BLOCK_M, DV4], tl.float32) + (num_splits < 0).to(tl.float32)
    v_unit: tl.constexpr = code_unit(V_CODE, ASM)
    odd_v: tl.constexpr = odd_stream_gain(V_CODE, ASM)

    within = tl.arange(0, TILE)
    column_k = tl.arange(0, D4)
    column_v = tl.arange(0, DV4)
    table = block_table_ptr + seq.to(tl.int64) * table_stride
    if PREFETCH:
        # Scale words one tile ahead, their block numbers two: neither is waited for in the tile that asks.
        k_next = tl.where(lo < prefix, lo, first + lo - prefix) * TILE + within
        page = tl.load(table + k_next // BLOCK_SIZE, mask=k_next < key_end, other=0).to(tl.int64)
        inner = k_next % BLOCK_SIZE
        k_word = tl.load(words_ptr + kw_offset + page * kw_b + inner * kw_s + cache_head * kw_h)
        v_word = tl.load(words_ptr + vw_offset + page * vw_b + inner * vw_s + cache_head * vw_h)
        k_next = tl.where(lo + 1 < prefix, lo + 1, first + lo + 1 - prefix) * TILE + within
        next_page = tl.load(table + k_next // BLOCK_SIZE, mask=k_next < key_end, other=0)
    for j in tl.range(lo, hi, num_stages=STAGES):
        k = tl.where(j < prefix, j, first + j - prefix) * TILE + within
        page = tl.load(table + k // BLOCK_SIZE, mask=k < key_end, other=0).to(tl.int64)
        inner = k % BLOCK_SIZE
        k_row = tl.multiple_of(k_offset + page * k_b + inner * k_s + cache_head * k_h, [K_ALIGN])
        v_row = tl.multiple_of(v_offset + page * v_b + inner * v_s + cache_head * v_h, [V_ALIGN])
        if D == DP:
            k_codes = tl.load(codes_k_ptr + (k_row[None, :] + column_k[:, None]))
        else:
            k_codes = tl.load(codes_k_ptr + (k_row[None, :] + column_k[:, None]), mask=(column_k < D // 4)[:, None], other=0)
        if DV == DVP:
            v_codes = tl.load(codes_v_ptr + (v_row[:, None] + column_v[None, :]))
        else:
            v_codes = tl.load(
                codes_v_ptr + (v_row[:, None] + column_v[None, :]), mask=(column_v < DV // 4)[None, :], other=0
            )
        if K_CODE == UINT3:
            k_codes = join_planes(k_codes, codes_k_ptr + k_row[None, :], column_k[:, None], D)
        if V_CODE == UINT3:
            v_codes = join_planes(v_codes, codes_v_ptr + v_row[:, None], column_v[None, :], DV)
        if PREFETCH:
            k_words = k_word
            v_words = v_word
            ahead = tl.where(j + 1 < prefix, j + 1, first + j + 1 - prefix) * TILE + within
            ahead_page = next_page.to(tl.int64)
            k_word = tl.load(words_ptr + kw_offset + ahead_page * kw_b + (ahead % BLOCK_SIZE) * kw_s + cache_head * kw_h)
            v_word = tl.load(words_ptr + vw_offset + ahead_page * vw_b + (ahead % BLOCK_SIZE) * vw_s + cache_head * vw_h)
            ahead = tl.where(j + 2 < prefix, j + 2, first + j + 2 - prefix) * TILE + within
            next_page = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < key_end, other=0)
        else:
            k_words = tl.load(words_ptr + kw_offset + page * kw_b + inner * kw_s + cache_head * kw_h)
            v_words = tl.load(words_ptr + vw_offset + page * vw_b + inner * vw_s + cache_head * vw_h)
        k_scale, k_bias = unpack_scale_words(k_words, K_CODE, K_WORD, ASM)
        v_scale, v_ratio, poison = unpack_scale_ratio(v_words, V_CODE, V_WORD, ASM)

        c0, c1, c2, c3 = unpack_streams(k_codes, K_CODE, ASM)
        s = tl.dot(q0, c0)
        s = tl.dot(q1, c1, s)
        s = tl.dot(q2, c2, s)
        s = tl.dot(q3, c3, s)
        if SPLIT_Q:
            s = tl.dot(r0, c0, s)
            s = tl.dot(r1, c1, s)
            s = tl.dot(r2, c2, s)
            s = tl.dot(r3, c3, s)
        # A visible value row of NaN makes the score NaN, and so the row; a hidden one is masked with its score.
        k_factors = k_scale * k_factor + poison
        log_scale = tl.log2(v_scale)
        if PLAIN:
            if K_BIASED:
                s = s * k_factors[None, :] + (q_sum[:, None] * (k_bias * score_scale)[None, :] + log_scale[None, :])
            else:
                s = s * k_factors[None, :] + log_scale[None, :]
        else:
            s = s * k_factors[None, :]
            if K_BIASED:
                s += q_sum[:, None] * (k_bias * score_scale)[None, :]
            s = modify_scores(
                s, position[:, None], k[None, :], context_len, token, row_mask, head, softcap, alibi_ptr, qq_bias_ptr,
                qq_stride, SOFTCAP, ALIBI_SQRT,
            )  # fmt: skip
            s += log_scale[None, :]
        if SHARED_LIMIT:
            inside = k < packed_end
            if raw_key_ptr is not None:
                inside = inside & (k >= raw_sinks)
            s = tl.where(inside[None, :], s, -INF)
        else:
            mask = visible_keys(
                position[:, None], k[None, :], seq, causal, rswa_prefix_ptr, rswa_window, mm_ranges_ptr, sliding_window,
                chunk_size, CHUNK_LOOKBACK, NUM_MM, MM_CLAMP,
            )  # fmt: skip
            if raw_key_ptr is not None:
                mask = mask & packed_keys(position[:, None], k[None, :], raw_window, raw_sinks)
            s = tl.where(mask & (k < key_end)[None, :], s, -INF)

        m_new = tl.maximum(m, tl.max(s, 1) - HEADROOM)
        alpha = tl.exp2(m - m_new)
        scaled_p = tl.exp2(s - m_new[:, None])  # p * v_scale
        m = m_new
        weight = scaled_p.to(tl.float16)
        c0, c1, c2, c3 = unpack_streams(v_codes, V_CODE, ASM)
        a0 = a0 * alpha[:, None] + tl.dot(weight, c0, nothing)
        a1 = a1 * alpha[:, None] + tl.dot(weight, c1, nothing)
        a2 = a2 * alpha[:, None] + tl.dot(weight, c2, nothing)
        a3 = a3 * alpha[:, None] + tl.dot(weight, c3, nothing)
        p = scaled_p * (1.0 / v_scale)[None, :]
        if CENTRED:
            p_sum, bias_sum = tl.reduce((p, weight.to(tl.float32) * v_ratio[None, :]), 1, _add_both)
            z = z * alpha + bias_sum
        else:
            p_sum = tl.sum(p, 1)
        l = l * alpha + p_sum  # noqa: E741

    # NaN sums stay NaN; a row that saw nothing returns zeros.
    inverse = tl.where(l == 0, 0.0, 1.0 / l)
    y = join_streams(a0, a1 * odd_v, a2, a3 * odd_v, BLOCK_M, DV4) * v_unit
    if CENTRED:
        y += z[:, None]
    y = y * inverse[:, None]
    log_sum = tl.where(l == 0, -INF, m + tl.log2(l))
    out_token = (q_begin + token).to(tl.int64)
    if FINAL:
        if sinks_ptr is not None:
            whole = _log2_add(log_sum, tl.load(sinks_ptr + head).to(tl.float32) * LOG2E)
            y = y * _weight_of(log_sum, whole)[:, None]
            log_sum = whole
        store_rows(
            y, out_ptr + out_token * out_t + head * out_h, row_mask, v_matrix_ptr, out_gain, None, None, output_scale_ptr,
            DV, DVP, BLOCK_M, V_ROTATED, PRECISION, False,
        )  # fmt: skip
        if lse_ptr is not None:
            tl.store(lse_ptr + out_token * (NUM_KV_HEADS * GROUP) + head, log_sum * LN2, mask=row_mask)
    else:
        store_partial(
            y, log_sum, partial_ptr, partial_lse_ptr, out_token * (NUM_KV_HEADS * GROUP) + head, row_mask, split, num_slots,
            DVP,
        )  # fmt: skip


@triton.jit(do_not_specialize=["partial_t", "partial_h", "partial_lse_t", "partial_lse_h", "num_rows", "num_splits"])
def combine_kernel(
    partial_ptr, partial_lse_ptr, matrix_ptr, raw_ptr, raw_lse_ptr, out_ptr, lse_ptr, sinks_ptr, output_scale_ptr,
    partial_s, partial_lse_s, raw_t, raw_h, raw_lse_t, raw_lse_h, out_t, out_h, lse_t, lse_h,
    gain, partial_lse_unit, raw_lse_unit, partial_t, partial_h, partial_lse_t, partial_lse_h, num_rows, num_splits,
    NUM_HEADS: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, ROWS: tl.constexpr, SPLITS_AT_ONCE: tl.constexpr,
    ROTATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Merge the splits of ROWS rows, and the raw part of each, by log-sum-exp; undo the rotation; store out and lse.

    partial [token, head, split, DV], partial_lse [token, head, split]; raw [token, head, DV], raw_lse [token, head]. The
    units turn a log-sum-exp into log2; `lse` is stored natural. Raw and out may be one tensor, as may raw_lse and lse.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = row < num_rows
    token = row // NUM_HEADS
    head = row % NUM_HEADS
    column = tl.arange(0, DVP)
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    y = tl.zeros([ROWS, DVP], tl.float32)
    part_row = partial_ptr + token * partial_t + head * partial_h
    part_lse = partial_lse_ptr + token * partial_lse_t + head * partial_lse_h
    for s0 in tl.range(0, num_splits, SPLITS_AT_ONCE):
        split = s0 + tl.arange(0, SPLITS_AT_ONCE)
        use = row_mask[:, None] & (split < num_splits)[None, :]
        lse = tl.load(part_lse[:, None] + split[None, :] * partial_lse_s, mask=use, other=-INF) * partial_lse_unit
        new_top = tl.maximum(top, tl.max(lse, 1))
        weight = tl.exp2(lse - new_top[:, None])
        alpha = tl.exp2(top - new_top)
        part = tl.load(
            part_row[:, None, None] + split[None, :, None] * partial_s + column[None, None, :],
            mask=use[:, :, None] & (column < DV)[None, None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        y = y * alpha[:, None] + tl.sum(part * weight[:, :, None], 1)
        total = total * alpha + tl.sum(weight, 1)
        top = new_top
    log_sum = tl.where(total == 0, -INF, top + tl.log2(total))
    y = y * tl.where(total == 0, 0.0, 1.0 / total)[:, None]
    whole = log_sum
    if raw_ptr is not None:
        raw_lse = tl.load(raw_lse_ptr + token * raw_lse_t + head * raw_lse_h, mask=row_mask, other=-INF) * raw_lse_unit
        whole = _log2_add(whole, raw_lse)
    if sinks_ptr is not None:
        whole = _log2_add(whole, tl.load(sinks_ptr + head, mask=row_mask, other=-INF).to(tl.float32) * LOG2E)
    y = y * _weight_of(log_sum, whole)[:, None]
    out_row = out_ptr + token * out_t + head * out_h
    if raw_ptr is not None:
        raw_row = raw_ptr + token * raw_t + head * raw_h
        store_rows(
            y, out_row, row_mask, matrix_ptr, gain, raw_row, _weight_of(raw_lse, whole), output_scale_ptr,
            DV, DVP, ROWS, ROTATED, PRECISION, ROWS == 1,
        )  # fmt: skip
    else:
        store_rows(
            y,
            out_row,
            row_mask,
            matrix_ptr,
            gain,
            None,
            None,
            output_scale_ptr,
            DV,
            DVP,
            ROWS,
            ROTATED,
            PRECISION,
            ROWS == 1,
        )
    if lse_ptr is not None:
        tl.store(lse_ptr + token * lse_t + head * lse_h, whole * LN2, mask=row_mask)


@triton.jit
def _log2_add(a, b):
    """log2(2^a + 2^b); -inf if both are."""
    top = tl.maximum(tl.maximum(a, b), LOWEST)
    total = tl.exp2(a - top) + tl.exp2(b - top)
    return tl.where(total == 0, -INF, top + tl.log2(total))


@triton.jit
def _weight_of(part, whole):
    """2^(part - whole), 0 where the whole is empty; NaN stays NaN."""
    return tl.where(whole == -INF, 0.0, tl.exp2(part - tl.maximum(whole, LOWEST)))


@dataclass(frozen=True)
class RawPart:
    """Rows attended from raw keys, to be merged: rows [num_tokens, num_query_heads, head_size_v], any float dtype, and
    their natural log-sum-exp lse [num_tokens, num_query_heads] float32."""

    rows: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class Config:
    """How `attention_kernel` is launched."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int
    num_splits: int
    split_tokens: int
    max_registers: int | None = None


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; 1 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def choose_config(
    layout: KVCacheLayout, num_seqs: int, num_query_heads: int, max_query_len: int, max_seq_len: int, invariant: bool,
    device: torch.device, skew: int = 1,
) -> Config:  # fmt: skip
    """Choose tiles and splits from what the host knows: nothing here reads a tensor.

    Splits fill the device for any query length and batch, `skew` times over where lengths differ. Batch-invariant calls fix
    every choice that rounding depends on.
    """
    group = num_query_heads // layout.num_kv_heads
    widest = max(rotation.padded(layout.head_size), rotation.padded(layout.head_size_v))
    # Always one row of tensor-core tiles: with 32 rows Triton 3.6 spills (3.4 times the instructions a value), with 64 it
    # takes warpgroup products and the result was wrong. Programs of one sequence share its pages through the L2 cache.
    block_m = 16
    bits = max(layout.k_format.bits, layout.v_format.bits, 4)  # fewer are widened
    tile = 128 if 64 * bits < widest * bits <= 1024 else 64
    if widest * bits == 512 and max_query_len == 1 and max_seq_len >= LONG_TILE_FROM and not invariant and is_hopper(device):
        tile = 256
    num_warps = 2 if widest == 64 else (4 if widest <= 256 else 8)
    # Page numbers and codes are loaded in turn, so five stages prefetch codes two tiles ahead. AMD has 64 KiB for them.
    stages = (5 if widest <= 128 else 3) if rotation.uses_nvidia_assembly() else 2
    if invariant:
        return Config(block_m, tile, num_warps, stages, cdiv(max_seq_len, INVARIANT_SPLIT), INVARIANT_SPLIT)
    programs = num_seqs * layout.num_kv_heads * cdiv(group * max_query_len, block_m)
    wanted = skew * SPLIT_WAVES * multiprocessors(device) // programs
    num_splits = max(1, min(wanted, cdiv(max_seq_len, tile), MAX_SPLITS))
    return Config(block_m, tile, num_warps, stages, num_splits, 0)


def attend(
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
    raw: RawPart | None = None,
    config: Config | None = None,
    skew: int = 1,
    own_before: int = 0,
) -> None:
    """Attend queries to packed pages; with `raw`, only to keys before the queries' own, and merge that part.

    own_before: keys before the first query that `raw` covers too, where the queries are not the first of their chunk.
    Launches one kernel if one split holds all keys, else two. Split results live in one buffer of torch's allocator, which
    belongs to the graph where the call is captured; nothing waits for the device or depends on what tensors hold.
    """
    num_tokens, num_query_heads = query.shape[:2]
    num_seqs = seq_lens.shape[0]
    device = query.device
    if query.stride(2) != 1:
        query = query.contiguous()
    fixed, places, chosen = _prepare(
        layout, kv_cache.shape[1:], kv_cache.stride(), query.dtype, device, options.softmax_scale, num_seqs, num_query_heads,
        max_query_len, max_seq_len, options.batch_invariant, skew,
    )  # fmt: skip
    config = config or chosen
    num_splits = config.num_splits
    raw_key, raw_value = options.raw_key, options.raw_value
    windowed = raw_key is not None and raw_value is not None
    num_slots = num_splits + windowed
    final = num_slots == 1 and config.split_tokens == 0 and raw is None
    group = num_query_heads // layout.num_kv_heads
    num_q_tiles = cdiv(max_query_len * group, config.block_m)
    size_v = fixed.v[1]
    plain_mask = options.sliding_window == 0 and options.rswa_prefix_lens is None and options.chunk_lookback < 0
    plain_mask = plain_mask and options.mm_prefix_ranges is None
    same_end = not windowed and (raw is not None or options.causal is False)
    shared = plain_mask and (max_query_len == 1 or same_end)
    causal, ranges, qq_bias = options.causal, options.mm_prefix_ranges, options.qq_bias
    per_seq = isinstance(causal, torch.Tensor)
    target = out.view(torch.uint8) if options.output_scale is not None else out
    partial = partial_lse = None
    if not final:
        values = num_tokens * num_query_heads * num_slots * size_v
        partial = scratch(values + num_tokens * num_query_heads * num_slots, device)
        partial_lse = partial[values:]
    rotated = layout.k_format.rotation != "none"
    # A program that rotates its queries reads a matrix first (4 us); a launch costs less than two waves of that.
    many = num_seqs * num_q_tiles * layout.num_kv_heads * num_splits >= 4 * multiprocessors(device)
    matrix, query_gain = fixed.k_matrix, fixed.query_gain
    raw_query = query
    if rotated and many and not options.batch_invariant:
        query = rotation.rotate(query, layout.k_format.rotation, dtype=torch.float32, gain=fixed.orthonormal_gain)
        rotated, matrix, query_gain = False, None, 1.0
    launch(
        attention_kernel,
        (num_seqs * num_q_tiles, layout.num_kv_heads, num_slots),
        (
            query, kv_cache.view(fixed.k_dtype), kv_cache.view(fixed.v_dtype), kv_cache.view(torch.int32),
            block_table, seq_lens, query_start_loc, matrix, fixed.v_matrix if final else None, partial, partial_lse,
            target if final else None, lse if final else None,
            causal.view(torch.uint8) if isinstance(causal, torch.Tensor) else None,
            options.rswa_prefix_lens, options.alibi_slopes, options.sinks if final else None,
            None if qq_bias is None else qq_bias.contiguous(), None if ranges is None else ranges.contiguous(),
            options.output_scale if final else None,
            raw_query if windowed else None, raw_key, raw_value,
            raw.rows if windowed and raw is not None else None, raw.lse if windowed and raw is not None else None,
        ),
        (
            query.stride(0), query.stride(1), block_table.stride(0), out.stride(0), out.stride(1),
            *places.k_codes, *places.v_codes, *places.k_words, *places.v_words,
            fixed.natural_scale if options.softcap > 0 else fixed.score_scale, query_gain, fixed.out_gain,
            float(options.softcap), options.sliding_window, options.chunk_size, options.rswa_window,
            0 if qq_bias is None else qq_bias.shape[1],
            *_raw_scalars(raw_query, options, raw),
        ),
        (num_q_tiles, num_splits, own_before),
        (
            options.chunk_lookback, 2 if per_seq else int(bool(causal)), options.softcap > 0, options.alibi_sqrt,
            0 if ranges is None else ranges.shape[1], options.mm_prefix_clamp, raw is not None,
            config.split_tokens, final, shared, PREFETCH, SPLIT_Q, layout.num_kv_heads, group, layout.block_size,
            *fixed.k, rotated, *fixed.v, places.k_align, places.v_align,
            config.block_m, config.tile, _raw_tile(raw_key, max(fixed.k[1], fixed.v[1])), config.num_stages, fixed.asm,
            fixed.precision, rotation.interpreting(),
        ),
        num_warps=config.num_warps,
        **({"maxnreg": config.max_registers} if config.max_registers and fixed.asm else {}),
    )  # fmt: skip
    if partial is not None and partial_lse is not None:
        row = num_slots * size_v
        strides = (num_query_heads * row, row, size_v, num_query_heads * num_slots, num_slots, 1)
        if windowed:
            shape = (num_tokens, num_query_heads)
            raw = RawPart(
                partial.as_strided((*shape, size_v), (num_query_heads * row, row, 1), num_splits * size_v),
                partial_lse.as_strided(shape, strides[3:5], values + num_splits),
            )
        combine(
            partial, partial_lse, strides, num_splits, 1.0, raw, target, lse, layout, options.sinks, options.output_scale
        )


def _raw_scalars(query: torch.Tensor, options: AttentionOptions, own: RawPart | None) -> tuple[float, ...]:
    """Return the arguments of `attention_kernel` that say where raw rows lie and which they are."""
    key, value = options.raw_key, options.raw_value
    if key is None or value is None:
        return (0,) * 16
    return (
        query.stride(0), query.stride(1), *key.stride()[:3], *value.stride()[:3],
        *((0, 0, 0, 0) if own is None else (*own.rows.stride()[:2], *own.lse.stride())),
        options.softmax_scale * (1.0 if options.softcap > 0 else LOG2E.value),
        options.raw_window, options.raw_sinks, max(options.raw_ring, 1),
    )  # fmt: skip


def _raw_tile(raw_key: torch.Tensor | None, widest: int) -> int:
    """Return the raw rows that are attended at once: keys and values of 32 KiB, which any shared memory holds."""
    return 0 if raw_key is None else max(16, min(64, (32 << 10) // (2 * widest * raw_key.element_size())))


def combine(
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    strides: tuple[int, int, int, int, int, int],
    num_splits: int,
    partial_lse_unit: float,
    raw: RawPart | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    layout: KVCacheLayout,
    sinks: torch.Tensor | None,
    output_scale: torch.Tensor | None,
    gain: float = 1.0,
) -> None:
    """Launch `combine_kernel` over out [num_tokens, num_heads, head_size_v] and lse [num_tokens, num_heads].

    strides: of partial (token, head, split) and partial_lse (token, head, split); gain: multiplies the merged partial rows.
    """
    num_tokens, num_heads = out.shape[:2]
    fmt, size = layout.v_format, rotation.padded(layout.head_size_v)
    num_rows = num_tokens * num_heads
    rows = 1 if num_rows <= COMBINE_ROWS_AT_MOST else 16
    matrix = None
    if fmt.rotation != "none":
        matrix = rotation.matrix(fmt.rotation, layout.head_size_v, True, torch.bfloat16, out.device)
    at_once = max(1, min(next_power_of_2(num_splits), 8192 // (rows * size)))
    launch(
        combine_kernel,
        (cdiv(num_rows, rows),),
        (
            partial, partial_lse, matrix, None if raw is None else raw.rows, None if raw is None else raw.lse, out, lse,
            sinks, output_scale,
        ),
        (
            strides[2], strides[5], *((0, 0, 0, 0) if raw is None else (*raw.rows.stride()[:2], *raw.lse.stride())),
            out.stride(0), out.stride(1), *((0, 0) if lse is None else lse.stride()),
            gain * rotation.backward_gain(fmt.rotation, layout.head_size_v), partial_lse_unit, LOG2E.value,
        ),
        (strides[0], strides[1], strides[3], strides[4], num_rows, num_splits),
        (num_heads, layout.head_size_v, size, rows, at_once, matrix is not None, rotation.dot_precision()),
        num_warps=4 if rows == 1 or size <= 128 else 8,
    )  # fmt: skip


@dataclass(frozen=True)
class _Fixed:
    k_matrix: torch.Tensor | None
    v_matrix: torch.Tensor | None
    k_dtype: torch.dtype
    v_dtype: torch.dtype
    query_gain: float
    orthonormal_gain: float
    out_gain: float
    score_scale: float
    natural_scale: float
    k: tuple[int, int, int, int]
    v: tuple[int, int, int, int, bool]
    asm: bool
    precision: str


@functools.lru_cache(maxsize=1024)
def _prepare(
    layout: KVCacheLayout, page_shape: tuple[int, ...], cache_strides: tuple[int, ...], dtype: torch.dtype,
    device: torch.device, softmax_scale: float, num_seqs: int, num_query_heads: int, max_query_len: int, max_seq_len: int,
    invariant: bool, skew: int,
) -> tuple[_Fixed, Geometry, Config]:  # fmt: skip
    """Return all that a call's metadata decide, by one look-up: hashing a layout takes 3 us."""
    with rotation.capture_safe(device):
        fixed = _fixed_arguments(layout, dtype, device, softmax_scale)
    config = choose_config(layout, num_seqs, num_query_heads, max_query_len, max_seq_len, invariant, device, skew)
    return fixed, geometry_of(layout, page_shape, cache_strides), config


@functools.lru_cache(maxsize=256)
def _fixed_arguments(layout: KVCacheLayout, dtype: torch.dtype, device: torch.device, softmax_scale: float) -> _Fixed:
    """Return what depends on layout and dtype only. The query is held orthonormal, times QUERY_GAIN."""
    k_fmt, v_fmt = layout.k_format, layout.v_format
    k_rotated, v_rotated = k_fmt.rotation != "none", v_fmt.rotation != "none"
    root = math.sqrt(rotation.inverse_gain(k_fmt.rotation, layout.head_size))
    score = softmax_scale * root / QUERY_GAIN.value
    return _Fixed(
        rotation.matrix(k_fmt.rotation, layout.head_size, False, dtype, device) if k_rotated else None,
        rotation.matrix(v_fmt.rotation, layout.head_size_v, True, torch.bfloat16, device) if v_rotated else None,
        read_dtype(k_fmt),
        read_dtype(v_fmt),
        rotation.forward_gain(k_fmt.rotation, layout.head_size) * root * QUERY_GAIN.value,
        root * QUERY_GAIN.value,
        rotation.backward_gain(v_fmt.rotation, layout.head_size_v),
        score * LOG2E.value,
        score,
        (layout.head_size, rotation.padded(layout.head_size), *format_constants(k_fmt)),
        (layout.head_size_v, rotation.padded(layout.head_size_v), *format_constants(v_fmt), v_rotated),
        rotation.uses_nvidia_assembly(),
        rotation.dot_precision(),
    )
