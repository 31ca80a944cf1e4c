"""The specification: every operation in plain torch, on any device, one sequence at a time. Clear before fast."""

from __future__ import annotations

import torch

from nibblekv.formats import decode_rows, encode_rows
from nibblekv.layout import KVCacheLayout
from nibblekv.options import AttentionOptions
from nibblekv.rotation import rotate, unrotate

FP8_MAX = 448.0
# Queries attended at once: bounds the score matrix at QUERY_CHUNK x heads x context.
QUERY_CHUNK = 128


def unavailable_reason() -> str | None:
    """Return None: the reference needs only torch."""
    return None


def supports(layout: KVCacheLayout, options: AttentionOptions | None, device: torch.device) -> str | None:
    """Return None: the reference supports every layout, option and device."""
    return None


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, layout: KVCacheLayout
) -> None:
    """Quantize rows and write them to their slots; see `nibblekv.reshape_and_cache`."""
    keep = slot_mapping >= 0
    slots = slot_mapping[keep].long()
    block, slot = slots // layout.block_size, slots % layout.block_size
    views = layout.views(kv_cache)
    for rows, fmt, codes_view, words_view in (
        (key, layout.k_format, views.key_cache, views.k_scale_cache),
        (value, layout.v_format, views.value_cache, views.v_scale_cache),
    ):
        codes, words = encode_rows(rotate(rows[keep], fmt.rotation), fmt)
        codes_view[block, slot] = codes
        words_view[block, slot] = words


def gather_and_dequantize(
    kv_cache: torch.Tensor, block_table: torch.Tensor, seq_len: int, layout: KVCacheLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return key [seq_len, num_kv_heads, head_size] and value [.., head_size_v], float32, of one sequence.

    Args:
        block_table: [max_blocks] integer, the sequence's pages; only those that hold seq_len tokens are read.
    """
    views = layout.views(kv_cache)
    blocks = block_table[: -(-seq_len // layout.block_size)].long()
    out = []
    for fmt, codes_view, words_view in (
        (layout.k_format, views.key_cache, views.k_scale_cache),
        (layout.v_format, views.value_cache, views.v_scale_cache),
    ):
        codes = codes_view[blocks].flatten(0, 1)[:seq_len]
        words = words_view[blocks].flatten(0, 1)[:seq_len]
        out.append(unrotate(decode_rows(codes, words, fmt), fmt.rotation))
    return out[0], out[1]


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
    starts = query_start_loc.tolist()
    for b, seq_len in enumerate(seq_lens.tolist()):
        begin, end = starts[b], starts[b + 1]
        if begin == end:
            continue
        k, v = gather_and_dequantize(kv_cache, block_table[b], seq_len, layout)
        if key is not None and value is not None:
            k = torch.cat((k[: seq_len - (end - begin)], key[begin:end].float()))
            v = torch.cat((v[: seq_len - (end - begin)], value[begin:end].float()))
        for first in range(begin, end, QUERY_CHUNK):
            last = min(first + QUERY_CHUNK, end)
            position = torch.arange(first - begin, last - begin, device=query.device) + seq_len - (end - begin)
            rows, rows_lse = _attend(query[first:last].float(), k, v, position, seq_len - (end - begin), b, options)
            if options.output_scale is not None:
                rows = (rows / options.output_scale).clamp(-FP8_MAX, FP8_MAX)
            out[first:last] = rows.to(out.dtype)
            if lse is not None:
                lse[first:last] = rows_lse


def visible_mask(
    query_position: torch.Tensor, key_position: torch.Tensor, seq: int, options: AttentionOptions
) -> torch.Tensor:
    """Return [queries, keys] bool: which keys of sequence `seq` each query sees (the rule of `AttentionOptions`)."""
    q, k = query_position[:, None], key_position[None, :]
    causal = bool(options.causal[seq]) if isinstance(options.causal, torch.Tensor) else options.causal
    mask = (k <= q) if causal else torch.ones_like(k <= q)
    if options.chunk_lookback >= 0:
        mask = mask & (q // options.chunk_size - k // options.chunk_size <= options.chunk_lookback)
    elif options.rswa_prefix_lens is not None:
        mask = mask & ((k < options.rswa_prefix_lens[seq]) | (q - k < options.rswa_window))
    elif options.sliding_window > 0:
        mask = mask & (q - k < options.sliding_window)
        if not causal:
            mask = mask & (k - q < options.sliding_window)
    if options.mm_prefix_ranges is not None:
        for first, last in options.mm_prefix_ranges[seq].tolist():
            if first < last:
                both = (q >= first) & (q <= last) & (k >= first) & (k <= last)
                if options.mm_prefix_clamp and options.sliding_window > 0:
                    both = both & (q - k < options.sliding_window)
                mask = mask | both
    return mask


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_position: torch.Tensor,
    context_len: int,
    seq: int,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend query [Q, Hq, D] to key [L, Hk, D] and value [L, Hk, Dv]; return ([Q, Hq, Dv], lse [Q, Hq]), float32."""
    num_queries, num_query_heads, head_size = query.shape
    seq_len, num_kv_heads, head_size_v = value.shape
    group = num_query_heads // num_kv_heads
    key_position = torch.arange(seq_len, device=query.device)
    mask = visible_mask(query_position, key_position, seq, options)
    grouped = query.view(num_queries, num_kv_heads, group, head_size)
    score = torch.einsum("qhgd,khd->hgqk", grouped, key) * options.softmax_scale
    if options.softcap > 0:
        score = options.softcap * torch.tanh(score / options.softcap)
    if options.alibi_slopes is not None:
        distance = (key_position[None, :] - query_position[:, None]).float()
        if options.alibi_sqrt:
            distance = -(-distance).clamp(min=0).sqrt()
        score = score + options.alibi_slopes.view(num_kv_heads, group, 1, 1) * distance
    if options.qq_bias is not None:
        row = query_position - context_len
        bias = options.qq_bias[row][:, : seq_len - context_len]
        score[..., context_len:] = score[..., context_len:] + bias
    score = score.masked_fill(~mask, -torch.inf)
    sink = None
    if options.sinks is not None:
        sink = options.sinks.float().view(num_kv_heads, group, 1, 1).expand(-1, -1, num_queries, 1)
    logits = score if sink is None else torch.cat((score, sink), -1)
    lse = torch.logsumexp(logits, -1)
    weight = torch.exp(score - torch.where(lse == -torch.inf, torch.zeros_like(lse), lse)[..., None])
    # A value row that is NaN reaches exactly the queries that see it: 0 * NaN must not.
    broken = ~torch.isfinite(value).all(-1)  # [L, Hk]
    rows = torch.einsum("hgqk,khd->qhgd", weight, torch.where(broken[..., None], torch.zeros_like(value), value))
    seen = torch.einsum("qk,kh->qh", mask.float(), broken.float()) > 0
    rows = torch.where(seen[:, :, None, None], torch.full_like(rows, torch.nan), rows)
    return rows.reshape(num_queries, num_query_heads, head_size_v), lse.permute(2, 0, 1).reshape(num_queries, -1)
