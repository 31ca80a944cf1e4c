"""Attention of queries whose own keys and values come raw: prefill at the speed of a dense kernel.

Three parts, merged by log-sum-exp:
    the chunk     the queries against their own raw keys and values: FlashAttention 3 or 2 where importable and the options
                  are plain, torch's fused attention for sequences of plain options, else `dense_kernel`;
    the prefix    the stored keys before them: short queries read packed pages (attention.py); long ones attend tiles that
                  `dequantize_kernel` writes once, as float16 in the rotated domain;
    the merge     `combine_kernel`, which also undoes the rotation of the prefix part.
A raw window and sinks before the chunk go in between: they are merged into the chunk's part, and the prefix leaves them out.
All that a call allocates beside unmerged rows stays within 64 MiB at a time, by groups of heads and slices of keys.
The inner loop over a long prefix never unpacks codes: 2,048 queries would unpack each key 64 times.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from nibblekv.backends.triton import attention, rotation
from nibblekv.backends.triton.attention import (
    INF,
    LN2,
    LOG2E,
    LOWEST,
    RawPart,
    _log2_add,
    _weight_of,
    key_range,
    modify_scores,
    store_rows,
    visible_keys,
)
from nibblekv.backends.triton.codec import (
    UINT3,
    code_unit,
    format_constants,
    join_planes,
    join_streams,
    odd_stream_gain,
    read_dtype,
    unpack_scale_words,
    unpack_streams,
)
from nibblekv.backends.triton.geometry import geometry
from nibblekv.backends.triton.launch import cdiv, launch, next_power_of_2
from nibblekv.layout import KVCacheLayout
from nibblekv.options import AttentionOptions

VLLM_FLASH = "vllm.vllm_flash_attn.flash_attn_interface"
# Bytes of dequantized keys and values and of rotated queries that exist at once; unmerged rows are a split buffer.
WORKSPACE_BYTES = 64 << 20
# From so many queries on a sequence's prefix is dequantized; fewer read packed pages.
LONG_QUERY = 128
# Dequantized rows are held as float16 times this: sqrt(512) * 65,504 then stays finite.
DENSE_GAIN = 0.03125


@triton.jit(do_not_specialize=["first_token", "num_tokens", "first_head"])
def dequantize_kernel(
    codes_ptr, words_ptr, table_ptr, dense_ptr, offset, stride_b, stride_s, stride_h, w_offset, w_b, w_s, w_h,
    gain, first_token, num_tokens, first_head,
    NUM_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CODE: tl.constexpr,
    WORD: tl.constexpr, ALIGN: tl.constexpr, TILE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Write dense [num_tokens, NUM_HEADS, D] = gain * (scale * code + bias), one sequence's tokens from first_token on."""
    D4: tl.constexpr = DP // 4
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head = tl.program_id(1)
    cache_head = (first_head + head).to(tl.int64)  # heads of a cache may lie gigabytes apart
    mask = row < num_tokens
    token = first_token + row
    page = tl.load(table_ptr + token // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
    inner = token % BLOCK_SIZE
    column = tl.arange(0, D4)
    codes_row = tl.multiple_of(offset + page * stride_b + inner * stride_s + cache_head * stride_h, [ALIGN])
    codes = tl.load(
        codes_ptr + (codes_row[:, None] + column[None, :]), mask=mask[:, None] & (column < D // 4)[None, :], other=0
    )
    if CODE == UINT3:
        codes = join_planes(codes, codes_ptr + codes_row[:, None], column[None, :], D)
    words = tl.load(words_ptr + w_offset + page * w_b + inner * w_s + cache_head * w_h, mask=mask, other=0)
    scale, bias = unpack_scale_words(words, CODE, WORD, ASM)
    c0, c1, c2, c3 = unpack_streams(codes, CODE, ASM)
    odd: tl.constexpr = odd_stream_gain(CODE, ASM)
    y = join_streams(c0.to(tl.float32), c1.to(tl.float32) * odd, c2.to(tl.float32), c3.to(tl.float32) * odd, TILE, D4)
    y = (y * (scale * code_unit(CODE, ASM))[:, None] + bias[:, None]) * gain
    n = tl.arange(0, DP)
    target = dense_ptr + (row.to(tl.int64) * NUM_HEADS + head)[:, None] * D + n[None, :]
    tl.store(target, y.to(dense_ptr.dtype.element_ty), mask=mask[:, None] & (n < D)[None, :])


@triton.jit(do_not_specialize=["num_q_tiles", "key_first", "key_count", "only_seq"])
def dense_kernel(
    query_ptr, key_ptr, value_ptr, seq_lens_ptr, query_start_ptr, out_ptr, lse_ptr,
    causal_ptr, rswa_prefix_ptr, alibi_ptr, sinks_ptr, qq_bias_ptr, mm_ranges_ptr, output_scale_ptr,
    query_t, query_h, key_t, key_h, value_t, value_h, out_t, out_h, lse_t, lse_h,
    score_scale, softcap, sliding_window, chunk_size, rswa_window, qq_stride, raw_window, num_q_tiles, key_first, key_count,
    only_seq,
    CHUNK_LOOKBACK: tl.constexpr, CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI_SQRT: tl.constexpr,
    NUM_MM: tl.constexpr, MM_CLAMP: tl.constexpr, OWN_KEYS: tl.constexpr, PRUNE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Attend one tile of rows of one KV head to dense keys; grid (sequences * q tiles, KV heads).

    OWN_KEYS: keys lie like queries, row query_start[b] + i is token i of the chunk. Else they are `key_count` tokens of
    sequence `only_seq` from position `key_first` on, without those that are nearer to a query than raw_window. Stores out
    and the natural log-sum-exp.
    """
    if OWN_KEYS:
        seq = tl.program_id(0) // num_q_tiles
    else:
        seq = only_seq + tl.program_id(0) * 0
    tile = tl.program_id(0) % num_q_tiles
    kv_head = tl.program_id(1)
    q_begin = tl.load(query_start_ptr + seq).to(tl.int32)
    q_len = tl.load(query_start_ptr + seq + 1).to(tl.int32) - q_begin
    # The last tiles see most keys: they start first.
    tile = num_q_tiles - 1 - tile
    if tile * BLOCK_M // GROUP >= q_len:
        return
    seq_len = tl.load(seq_lens_ptr + seq).to(tl.int32)
    context_len = seq_len - q_len
    if CAUSAL == 2:
        causal = tl.load(causal_ptr + seq).to(tl.int32)
    else:
        causal = seq_len * 0 + CAUSAL
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    row_mask = token < q_len
    position = context_len + token
    last_token = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, q_len - 1)
    if OWN_KEYS:
        key_begin = context_len
        key_end = seq_len
        key_base = q_begin
    else:
        key_begin = key_first + seq_len * 0
        key_end = key_first + key_count
        key_base = seq_len * 0

    prefix, first, end = key_range(
        context_len + tile * BLOCK_M // GROUP, context_len + last_token, key_end, causal, seq, rswa_prefix_ptr, rswa_window,
        mm_ranges_ptr, sliding_window, chunk_size, CHUNK_LOOKBACK, MM_CLAMP, 1, PRUNE,
    )  # fmt: skip
    if prefix > key_begin:
        first = key_begin
    first = tl.maximum(first, key_begin)
    end = tl.minimum(end, key_end)

    d = tl.arange(0, DP)
    dv = tl.arange(0, DVP)
    query_row = query_ptr + (q_begin + token).to(tl.int64) * query_t + head * query_h
    q = tl.load(query_row[:, None] + d[None, :], mask=row_mask[:, None] & (d < D)[None, :], other=0.0)
    if INTERPRET or key_ptr.dtype.element_ty == tl.float32:
        q = q.to(tl.float32)
    else:
        q = q.to(key_ptr.dtype.element_ty)
    m = tl.full([BLOCK_M], LOWEST, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    acc = tl.zeros([BLOCK_M, DVP], tl.float32)
    for start in tl.range(first, end, TILE, num_stages=STAGES):
        k = start + tl.arange(0, TILE)
        inside = k < end
        key_row = (key_base + k - key_begin).to(tl.int64)
        keys = tl.load(
            key_ptr + (key_row * key_t + kv_head * key_h)[None, :] + d[:, None],
            mask=inside[None, :] & (d < D)[:, None], other=0.0,
        )  # fmt: skip
        values = tl.load(
            value_ptr + (key_row * value_t + kv_head * value_h)[:, None] + dv[None, :],
            mask=inside[:, None] & (dv < DV)[None, :], other=0.0,
        )  # fmt: skip
        if INTERPRET:
            keys = keys.to(tl.float32)
            values = values.to(tl.float32)
        s = tl.dot(q, keys, input_precision=PRECISION) * score_scale
        if SOFTCAP or alibi_ptr is not None or qq_bias_ptr is not None:
            s = modify_scores(
                s, position[:, None], k[None, :], context_len, token, row_mask, head, softcap, alibi_ptr, qq_bias_ptr,
                qq_stride, SOFTCAP, ALIBI_SQRT,
            )  # fmt: skip
        mask = visible_keys(
            position[:, None], k[None, :], seq, causal, rswa_prefix_ptr, rswa_window, mm_ranges_ptr, sliding_window,
            chunk_size, CHUNK_LOOKBACK, NUM_MM, MM_CLAMP,
        )  # fmt: skip
        if raw_window > 0:
            mask = mask & (position[:, None] - k[None, :] >= raw_window)
        # A value row with NaN or Inf reaches the queries that see it through their scores, and no other.
        broken = tl.max(tl.where(tl.abs(values.to(tl.float32)) < INF, 0, 1), 1) > 0
        values = tl.where(broken[:, None], 0.0, values).to(values.dtype)
        s = tl.where(broken[None, :], float("nan"), s)
        s = tl.where(mask & inside[None, :], s, -INF)
        m_new = tl.maximum(m, tl.max(s, 1))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(s - m_new[:, None])
        m = m_new
        l = l * alpha + tl.sum(p, 1)  # noqa: E741
        acc = tl.dot(p.to(values.dtype), values, acc * alpha[:, None], input_precision=PRECISION)
    y = acc * tl.where(l == 0, 0.0, 1.0 / l)[:, None]
    log_sum = tl.where(l == 0, -INF, m + tl.log2(l))
    if sinks_ptr is not None:
        whole = _log2_add(log_sum, tl.load(sinks_ptr + head).to(tl.float32) * LOG2E)
        y = y * _weight_of(log_sum, whole)[:, None]
        log_sum = whole
    out_token = (q_begin + token).to(tl.int64)
    store_rows(
        y, out_ptr + out_token * out_t + head * out_h, row_mask, None, 1.0, None, None, output_scale_ptr,
        DV, DVP, BLOCK_M, False, "ieee", False,
    )  # fmt: skip
    if lse_ptr is not None:
        tl.store(lse_ptr + out_token * lse_t + head * lse_h, log_sum * LN2, mask=row_mask)


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
    key: torch.Tensor,
    value: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
) -> None:
    """Attend queries to their raw keys and values and to the stored ones before them.

    Host lengths decide what is launched for long queries: they are read back once per call, unless the caller gives them,
    one sequence without a prefix makes them known, or the stream is being captured (then packed pages are read, whatever
    the length).
    """
    num_tokens, num_query_heads = query.shape[:2]
    if query.stride(2) != 1:
        query = query.contiguous()
    # In one pass, rows differ in their last bits from those that beside other prompts take two.
    no_prefix = seq_lens.shape[0] == 1 and max_seq_len <= num_tokens and not options.batch_invariant
    starts: Sequence[int] | None = None
    lengths: Sequence[int] | None = None
    if no_prefix:
        starts, lengths = [0, num_tokens], [num_tokens]
    elif max_query_len >= LONG_QUERY and not options.batch_invariant:
        if options.host_lengths is not None:
            starts, lengths = options.host_lengths
        elif not _is_captured(query.device):
            starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
        no_prefix = starts is not None and lengths is not None and sum(lengths) == starts[-1]
    library = _library_for(query, key, value, layout, options, starts is not None)
    if no_prefix and (options.sinks is not None or options.output_scale is not None):
        library = None
    own = Dense(key, value, layout.num_kv_heads, num_query_heads // layout.num_kv_heads)
    if no_prefix and library is None:
        _attend_dense(query, own, seq_lens, query_start_loc, options, out, lse, max_query_len)
        return
    rows = out if out.dtype == query.dtype else torch.empty(out.shape, dtype=query.dtype, device=out.device)
    part_lse = torch.empty(num_tokens, num_query_heads, dtype=torch.float32, device=out.device) if lse is None else lse
    raw = RawPart(rows, part_lse)
    if library is None:
        bare = replace(options, sinks=None, output_scale=None)
        _attend_dense(query, own, seq_lens, query_start_loc, bare, rows, part_lse, max_query_len)
    elif starts is None or library != "torch":
        cu_seqlens = query_start_loc.to(torch.int32)
        its_out = rows if library == VLLM_FLASH else None
        part, its_lse = _attend_by_flash(
            library, query, key, value, cu_seqlens, cu_seqlens, max_query_len, max_query_len, options.softmax_scale, True,
            its_out,
        )  # fmt: skip
        if its_out is None:
            rows.copy_(part)
        part_lse.copy_(its_lse)
    else:
        for begin, end in itertools.pairwise(starts):
            if begin < end:
                _attend_chunk_by_torch(
                    query[begin:end], key[begin:end], value[begin:end], options.softmax_scale,
                    RawPart(rows[begin:end], part_lse[begin:end]),
                )  # fmt: skip
    if no_prefix:
        return
    if starts is None or lengths is None:
        attention.attend(
            query,
            kv_cache,
            block_table,
            seq_lens,
            query_start_loc,
            layout,
            options,
            out,
            lse,
            max_query_len,
            max_seq_len,
            raw,
        )
        return
    for first, last, tokens, are_short in _runs(starts):
        own_lse = None if lse is None else lse[tokens]
        its = RawPart(raw.rows[tokens], raw.lse[tokens])
        its_options = _options_of(options, first, last)
        its_starts = query_start_loc[first : last + 1] - starts[first]
        if are_short:
            if tokens.start < tokens.stop:
                attention.attend(
                    query[tokens], kv_cache, block_table[first:last], seq_lens[first:last], its_starts, layout, its_options,
                    out[tokens], own_lse, LONG_QUERY, max(lengths[first:last]), its,
                )  # fmt: skip
        else:
            if options.raw_key is not None and lengths[first] > tokens.stop - tokens.start:
                _attend_window(
                    query[tokens], kv_cache, block_table[first:last], seq_lens[first:last], its_starts, layout, its_options,
                    its, lengths[first],
                )  # fmt: skip
            most = queries_at_once(layout, query.shape[1] // layout.num_kv_heads)
            for begin in range(tokens.start, tokens.stop, most):
                these = slice(begin, min(begin + most, tokens.stop))
                its_lens = seq_lens[first:last]
                if tokens.stop - tokens.start > most:
                    its_lens = its_lens - (tokens.stop - these.stop)
                    its_starts = (query_start_loc[first : last + 1] - starts[first]).clamp(max=these.stop - begin)
                _attend_prefix(
                    query[these], kv_cache, block_table[first], its_lens, its_starts, layout, its_options, out[these],
                    RawPart(raw.rows[these], raw.lse[these]), lengths[first] - (tokens.stop - tokens.start),
                )  # fmt: skip


def attend_stored(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    layout: KVCacheLayout,
    options: AttentionOptions,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Attend queries to stored keys alone, their own included, for calls with `host_lengths` that have long queries.

    The packed kernel would unpack each key once for every few queries; here those of a long one are dequantized once.
    """
    assert options.host_lengths is not None
    starts, lengths = options.host_lengths
    if query.stride(2) != 1:
        query = query.contiguous()
    rows = out if out.dtype == query.dtype else torch.empty(out.shape, dtype=query.dtype, device=out.device)
    whole = torch.empty(query.shape[:2], dtype=torch.float32, device=out.device) if lse is None else lse
    group = query.shape[1] // layout.num_kv_heads
    key_bytes = 2 * (layout.head_size + layout.head_size_v)
    most = min(queries_at_once(layout, group), WORKSPACE_BYTES // 2 // key_bytes)
    for first, last, tokens, are_short in _runs(starts):
        its_options, its_starts = _options_of(options, first, last), query_start_loc[first : last + 1] - starts[first]
        if are_short:
            if tokens.start < tokens.stop:
                attention.attend(
                    query[tokens], kv_cache, block_table[first:last], seq_lens[first:last], its_starts, layout, its_options,
                    out[tokens], None if lse is None else lse[tokens], LONG_QUERY, max(lengths[first:last]),
                )  # fmt: skip
        else:
            whole[tokens] = -math.inf
            for begin in range(tokens.start, tokens.stop, most):
                these = slice(begin, min(begin + most, tokens.stop))
                after = tokens.stop - these.stop
                _attend_prefix(
                    query[these], kv_cache, block_table[first], seq_lens[first:last] - after,
                    its_starts.clamp(max=these.stop - begin), layout, its_options, out[these],
                    RawPart(rows[these], whole[these]), lengths[first] - after - (these.stop - begin), these.stop - begin,
                )  # fmt: skip


def _runs(starts: Sequence[int]) -> Iterator[tuple[int, int, slice, bool]]:
    """Yield (first sequence, last + 1, their tokens, whether they are short): short neighbours together, long ones alone."""
    queries = [end - begin for begin, end in itertools.pairwise(starts)]
    first = 0
    while first < len(queries):
        last = first + 1
        are_short = queries[first] < LONG_QUERY
        while are_short and last < len(queries) and queries[last] < LONG_QUERY:
            last += 1
        yield first, last, slice(starts[first], starts[last]), are_short
        first = last


@dataclass(frozen=True)
class Dense:
    """Dense keys [tokens, num_kv_heads, head_size] and values of `group` query heads each; if `first` is not None, those of
    the call's only sequence from that position on, else the queries' own."""

    key: torch.Tensor
    value: torch.Tensor
    num_kv_heads: int
    group: int
    first: int | None = None


def _attend_window(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    layout: KVCacheLayout,
    options: AttentionOptions,
    raw: RawPart,
    max_seq_len: int,
) -> None:
    """Merge one sequence's raw window and sinks before its queries into `raw`, in place, some queries at a time."""
    num_queries, num_heads = query.shape[:2]
    bare = replace(options, sinks=None, output_scale=None)
    config = attention.choose_config(layout, 1, num_heads, num_queries, max_seq_len, False, query.device)
    config = replace(config, num_splits=0)
    most = max(1, WORKSPACE_BYTES // (4 * num_heads * (rotation.padded(layout.head_size_v) + 1)))
    for begin in range(0, num_queries, most):
        these = slice(begin, min(begin + most, num_queries))
        its = RawPart(raw.rows[these], raw.lse[these])
        attention.attend(
            query[these], kv_cache, block_table, seq_lens - (num_queries - these.stop),
            query_start_loc.clamp(max=these.stop - begin), layout, bare, its.rows, its.lse, these.stop - begin, max_seq_len,
            its, config, own_before=begin,
        )  # fmt: skip


def _attend_prefix(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    layout: KVCacheLayout,
    options: AttentionOptions,
    out: torch.Tensor,
    raw: RawPart,
    context_len: int,
    own: int = 0,
) -> None:
    """Attend one sequence's queries to its stored prefix, by groups of heads and chunks of context, and merge with `raw`.

    With `own`, their number, they attend their own stored keys too. Intermediate merges go to raw's own tensors, the last
    one to out; raw.lse ends as the whole log-sum-exp.
    """
    num_queries = query.shape[0]
    group = query.shape[1] // layout.num_kv_heads
    first_key = max(_first_visible(options, context_len), options.raw_sinks)
    heads, chunk = workspace_chunks(layout, max(context_len - first_key, own), num_queries * group, own)
    device = query.device
    key_space = torch.empty(chunk * heads * layout.head_size, dtype=torch.float16, device=device)
    value_space = torch.empty(chunk * heads * layout.head_size_v, dtype=torch.float16, device=device)
    k_root = math.sqrt(rotation.inverse_gain(layout.k_format.rotation, layout.head_size))
    v_root = math.sqrt(rotation.inverse_gain(layout.v_format.rotation, layout.head_size_v))
    k_gain, v_gain = k_root * DENSE_GAIN, v_root * DENSE_GAIN
    bare = replace(
        options,
        softmax_scale=options.softmax_scale / (attention.QUERY_GAIN.value * DENSE_GAIN),
        sinks=None,
        output_scale=None,
    )
    target = out.view(torch.uint8) if options.output_scale is not None else out
    # Of the keys before `border` no query reads a raw form.
    border = max(first_key, context_len - options.raw_window + 1) if options.raw_window else context_len
    pieces = [(start, min(chunk, border - start), 0) for start in range(first_key, border, chunk)]
    pieces += [(start, min(chunk, context_len - start), options.raw_window) for start in range(border, context_len, chunk)]
    if own:
        pieces.append((context_len, own, 0))
    if not pieces and options.sinks is None and options.output_scale is None and out.data_ptr() == raw.rows.data_ptr():
        return
    library = _flash_library(layout, device)
    for head in range(0, layout.num_kv_heads, heads):
        q_heads = slice(head * group, (head + heads) * group)
        part_out, part_raw = target[:, q_heads], RawPart(raw.rows[:, q_heads], raw.lse[:, q_heads])
        its = _options_of_heads(bare, q_heads)
        sinks = None if options.sinks is None else options.sinks[q_heads]
        q = rotation.rotate(
            query[:, q_heads], layout.k_format.rotation, dtype=torch.float16, gain=k_root * attention.QUERY_GAIN.value
        )
        for piece in pieces:
            start, count, its_window = piece
            keys = key_space[: count * heads * layout.head_size].view(count, heads, layout.head_size)
            values = value_space[: count * heads * layout.head_size_v].view(count, heads, layout.head_size_v)
            _dequantize(kv_cache, table, layout, False, start, head, keys, k_gain)
            _dequantize(kv_cache, table, layout, True, start, head, values, v_gain)
            causal = start >= context_len
            plain = _is_plain(its) and not its_window
            if plain and library is not None:
                rows, lse = _attend_by_flash(
                    library, q, keys, values, _bounds(num_queries, device), _bounds(count, device), num_queries, count,
                    its.softmax_scale, causal,
                )  # fmt: skip
            elif plain and _torch_takes(q, keys, values, causal):
                rows, lse = _attend_by_torch(q, keys, values, causal, its.softmax_scale)
            else:
                rows = torch.empty(num_queries, heads * group, layout.head_size_v, dtype=torch.float16, device=device)
                lse = torch.empty(num_queries, heads * group, dtype=torch.float32, device=device)
                dense = Dense(keys, values, heads, group, start)
                its_options = replace(its, raw_window=its_window)
                _attend_dense(q, dense, seq_lens, query_start_loc, its_options, rows, lse, num_queries)
            last = piece is pieces[-1]
            _merge(rows, lse, 1, part_raw, part_out if last else part_raw.rows, layout, sinks if last else None,
                   options.output_scale if last else None, 1.0 / v_gain)  # fmt: skip
            del rows, lse  # before the next ones are allocated
        if not pieces:
            _merge(raw.rows, raw.lse, 0, part_raw, part_out, layout, sinks, options.output_scale, 1.0)


def queries_at_once(layout: KVCacheLayout, group: int) -> int:
    """Return how many queries of a sequence attend its prefix at once: those of one KV head take half of the workspace."""
    return max(LONG_QUERY, WORKSPACE_BYTES // 2 // (2 * group * layout.head_size))


def workspace_chunks(layout: KVCacheLayout, num_keys: int, num_rows: int, at_least: int = 0) -> tuple[int, int]:
    """Return (KV heads, keys) that are dequantized at once: of as many heads as half of WORKSPACE_BYTES holds num_rows
    rotated queries, as many keys as the rest holds, of few enough heads that `at_least` so many fit.

    Heads go first: a dense kernel takes 256 rows a multiprocessor, and with two KV heads of four 2,048 queries filled half.
    """
    row_bytes, key_bytes = 2 * layout.head_size * num_rows, 2 * (layout.head_size + layout.head_size_v)
    heads = max(
        h
        for h in range(1, layout.num_kv_heads + 1)
        if layout.num_kv_heads % h == 0
        and (h == 1 or h * (row_bytes + max(row_bytes, at_least * key_bytes)) <= WORKSPACE_BYTES)
    )
    return heads, min(max(num_keys, 1), max((WORKSPACE_BYTES // heads - row_bytes) // key_bytes, 1))


def _merge(
    rows: torch.Tensor,
    lse: torch.Tensor,
    num_splits: int,
    raw: RawPart,
    out: torch.Tensor,
    layout: KVCacheLayout,
    sinks: torch.Tensor | None,
    output_scale: torch.Tensor | None,
    gain: float,
) -> None:
    strides = (rows.stride(0), rows.stride(1), 0, lse.stride(0), lse.stride(1), 0)
    attention.combine(rows, lse, strides, num_splits, LOG2E.value, raw, out, raw.lse, layout, sinks, output_scale, gain)


def _dequantize(
    kv_cache: torch.Tensor, table: torch.Tensor, layout: KVCacheLayout, of_value: bool, first_token: int, first_head: int,
    dense: torch.Tensor, gain: float,
) -> None:  # fmt: skip
    """Write gain times the stored rows (rotated domain) of one sequence into dense [tokens, heads, head size] float16."""
    places = geometry(layout, kv_cache)
    fmt = layout.v_format if of_value else layout.k_format
    num_tokens, num_heads, size = dense.shape
    tile = 64
    launch(
        dequantize_kernel,
        (cdiv(num_tokens, tile), num_heads),
        (kv_cache.view(read_dtype(fmt)), kv_cache.view(torch.int32), table, dense),
        (*(places.v_codes if of_value else places.k_codes), *(places.v_words if of_value else places.k_words), gain),
        (first_token, num_tokens, first_head),
        (
            num_heads, layout.block_size, size, rotation.padded(size), *format_constants(fmt),
            places.v_align if of_value else places.k_align, tile, rotation.uses_nvidia_assembly(),
        ),
    )  # fmt: skip


def _attend_dense(
    query: torch.Tensor,
    dense: Dense,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    options: AttentionOptions,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    max_query_len: int,
) -> None:
    """Launch `dense_kernel`, with the largest tiles that this GPU's shared memory holds."""
    head_size, head_size_v = query.shape[2], dense.value.shape[2]
    widest = max(rotation.padded(head_size), rotation.padded(head_size_v))
    wide_type = query.dtype == torch.float32
    block_m = 64 if widest <= 128 and wide_type else (128 if widest <= 128 else (64 if widest <= 256 else 32))
    block_m = max(16, min(block_m, next_power_of_2(max_query_len * dense.group)))
    if options.batch_invariant:
        block_m = max(16, next_power_of_2(dense.group))
    tile = 64 if widest <= 256 and not wide_type else 32
    own = dense.first is None
    num_seqs = seq_lens.shape[0] if own else 1
    causal, ranges, qq_bias = options.causal, options.mm_prefix_ranges, options.qq_bias
    prune = not options.batch_invariant

    def launch_with(block_m: int, tile: int, stages: int) -> None:
        num_q_tiles = cdiv(max_query_len * dense.group, block_m)
        dense_kernel[(num_seqs * num_q_tiles, dense.num_kv_heads)](
            query, dense.key, dense.value, seq_lens, query_start_loc,
            out.view(torch.uint8) if options.output_scale is not None else out, lse,
            causal.view(torch.uint8) if isinstance(causal, torch.Tensor) else None, options.rswa_prefix_lens,
            options.alibi_slopes, options.sinks, None if qq_bias is None else qq_bias.contiguous(),
            None if ranges is None else ranges.contiguous(), options.output_scale,
            query.stride(0), query.stride(1), dense.key.stride(0), dense.key.stride(1),
            dense.value.stride(0), dense.value.stride(1), out.stride(0), out.stride(1),
            *((0, 0) if lse is None else lse.stride()),
            options.softmax_scale * (1.0 if options.softcap > 0 else LOG2E.value), options.softcap,
            options.sliding_window, options.chunk_size, options.rswa_window, 0 if qq_bias is None else qq_bias.shape[1],
            0 if own else options.raw_window, num_q_tiles, dense.first or 0, dense.key.shape[0], 0,
            options.chunk_lookback, 2 if isinstance(causal, torch.Tensor) else int(causal), options.softcap > 0,
            options.alibi_sqrt, 0 if ranges is None else ranges.shape[1], options.mm_prefix_clamp, own, prune,
            dense.num_kv_heads, dense.group,
            head_size, rotation.padded(head_size), head_size_v, rotation.padded(head_size_v),
            block_m, tile, STAGES=stages, PRECISION=rotation.dot_precision(), INTERPRET=rotation.interpreting(),
            num_warps=8 if block_m * widest >= 128 * 128 else 4,
        )  # fmt: skip

    key = (query.device, query.dtype, head_size, head_size_v, block_m, tile)
    configs = _dense_configs(block_m, tile)
    with rotation.capture_safe(query.device):
        for i in range(_too_large.get(key, 0), len(configs)):
            try:
                launch_with(*configs[i])
                return
            except OutOfResources:
                _too_large[key] = i + 1
    raise NotImplementedError(
        f"key, value: {query.dtype} rows of head sizes {head_size} and {head_size_v} do not fit in the shared memory of "
        "this GPU; pass 16-bit ones, or none, to read stored ones alone"
    )


# How many configurations of `_dense_configs` a GPU has no shared memory for, by what decides it.
_too_large: dict[tuple[object, ...], int] = {}


def _dense_configs(block_m: int, tile: int) -> list[tuple[int, int, int]]:
    """Return (query rows, keys of a tile, stages) from a wish down to what fits anywhere."""
    rows = [m for m in (32, 16) if m <= block_m]
    wished = [(block_m, tile, 2), (block_m, tile // 2, 2), (block_m, tile, 1), *[(m, 16, n) for m in rows for n in (2, 1)]]
    # Tiles of 16 keys with 64 rows of queries read memory that is not theirs when Triton 3.6 compiles them.
    return [config for config in dict.fromkeys(wished) if config[1] > 16 or config[0] <= 32]


def _attend_by_torch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend [n, heads, D] with torch's fused kernels; return rows [n, heads, DV] and natural log-sum-exp [n, heads]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    if torch.backends.cuda.can_use_cudnn_attention(_torch_params(query, key, value, causal)):
        results = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=softmax_scale
        )
    else:
        results = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=softmax_scale)
    return results[0][0].transpose(0, 1), results[1].view(query.shape[1], query.shape[0]).transpose(0, 1)


def _attend_chunk_by_torch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softmax_scale: float, raw: RawPart
) -> None:
    """Attend one sequence's queries causally to their own keys, into raw, by as many heads as half the workspace holds."""
    num_kv_heads, group = key.shape[1], query.shape[1] // key.shape[1]
    row_bytes = query.element_size() * query.shape[0] * group * value.shape[2]
    heads = max(1, min(num_kv_heads, WORKSPACE_BYTES // 2 // row_bytes))
    for head in range(0, num_kv_heads, heads):
        kv = slice(head, head + heads)
        q = slice(head * group, (head + heads) * group)
        rows, lse = _attend_by_torch(query[:, q], key[:, kv], value[:, kv], True, softmax_scale)
        raw.rows[:, q] = rows
        raw.lse[:, q] = lse


def _torch_params(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool
) -> torch.backends.cuda.SDPAParams:
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    return torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, True)


def _torch_takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> bool:
    if query.device.type != "cuda":
        return False
    params = _torch_params(query, key, value, causal)
    return torch.backends.cuda.can_use_cudnn_attention(params) or torch.backends.cuda.can_use_flash_attention(params)


def _attend_by_flash(
    library: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_start_loc: torch.Tensor,
    key_start_loc: torch.Tensor, max_query_len: int, max_key_len: int, softmax_scale: float, causal: bool,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attend sequences [n, heads, D] with FlashAttention's varlen function; return rows and natural log-sum-exp [n, heads].

    Args:
        query_start_loc, key_start_loc: int32.
        out: where vLLM's build writes the rows.
    """
    how: dict[str, Any] = {"return_attn_probs": True}
    if library == VLLM_FLASH:
        how = {"return_softmax_lse": True, "fa_version": _vllm_flash_version(), "out": out}
    results = importlib.import_module(library).flash_attn_varlen_func(
        q=query, k=key, v=value, cu_seqlens_q=query_start_loc, cu_seqlens_k=key_start_loc, max_seqlen_q=max_query_len,
        max_seqlen_k=max_key_len, softmax_scale=softmax_scale, causal=causal, **how,
    )  # fmt: skip
    return results[0], results[1].transpose(0, 1)


def _bounds(length: int, device: torch.device) -> torch.Tensor:
    """Return [0, length] int32, made on the device: a copy from the host would wait for it."""
    return torch.arange(0, 2 * length, length, dtype=torch.int32, device=device)


def _flash_library(layout: KVCacheLayout, device: torch.device) -> str | None:
    """Return the FlashAttention package that takes such heads, None if there is none."""
    if device.type != "cuda" or not layout.head_size == layout.head_size_v <= 256:
        return None
    # vLLM's build is taken where vLLM runs; importing all of vLLM for it would be a surprise.
    if VLLM_FLASH in sys.modules and _vllm_flash_version() is not None:
        return VLLM_FLASH
    return "flash_attn" if importlib.util.find_spec("flash_attn") is not None else None


@functools.cache
def _vllm_flash_version() -> int | None:
    """Return the newest FlashAttention of vLLM's build that runs here, None if none was built."""
    supported = importlib.import_module(VLLM_FLASH).is_fa_version_supported
    return next((version for version in (3, 2) if supported(version)), None)


def _library_for(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: KVCacheLayout,
    options: AttentionOptions,
    lengths_known: bool,
) -> str | None:
    """Return the library that attends the chunk: a FlashAttention package, "torch", or None for our own kernel."""
    if query.device.type != "cuda" or not _is_plain(options) or options.causal is not True or options.batch_invariant:
        return None
    if query.dtype not in (torch.float16, torch.bfloat16) or key.dtype != query.dtype or value.dtype != query.dtype:
        return None
    if query.shape[0] < LONG_QUERY:
        return None
    library = _flash_library(layout, query.device)
    if library is not None:
        return library
    return "torch" if lengths_known and _torch_takes(query, key, value, True) else None


def _is_plain(options: AttentionOptions) -> bool:
    """Return True if scores are softmax_scale * q.k and every key allowed by causality is visible."""
    masked = options.sliding_window > 0 or options.chunk_lookback >= 0 or options.rswa_prefix_lens is not None
    biased = options.softcap > 0 or options.alibi_slopes is not None or options.qq_bias is not None
    return not (masked or biased or options.mm_prefix_ranges is not None)


def _first_visible(options: AttentionOptions, context_len: int) -> int:
    """Return the first stored key that a query at position context_len or later may see."""
    if options.mm_prefix_ranges is not None and not (options.mm_prefix_clamp and options.sliding_window > 0):
        return 0
    if options.chunk_lookback >= 0:
        return (
            0
            if options.mm_prefix_ranges is not None
            else max(context_len // options.chunk_size - options.chunk_lookback, 0) * options.chunk_size
        )
    if options.rswa_prefix_lens is not None or options.sliding_window == 0:
        return 0
    return max(context_len - options.sliding_window + 1, 0)


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _options_of(options: AttentionOptions, first: int, last: int) -> AttentionOptions:
    """Return the options of sequences first to last - 1."""
    causal, prefix_lens, ranges = options.causal, options.rswa_prefix_lens, options.mm_prefix_ranges
    raw_key, raw_value = options.raw_key, options.raw_value
    return replace(
        options,
        causal=causal[first:last] if isinstance(causal, torch.Tensor) else causal,
        rswa_prefix_lens=None if prefix_lens is None else prefix_lens[first:last],
        mm_prefix_ranges=None if ranges is None else ranges[first:last],
        raw_key=None if raw_key is None else raw_key[first:last],
        raw_value=None if raw_value is None else raw_value[first:last],
    )


def _options_of_heads(options: AttentionOptions, heads: slice) -> AttentionOptions:
    return options if options.alibi_slopes is None else replace(options, alibi_slopes=options.alibi_slopes[heads])
