"""The specification: every operation in plain torch, on any device, one sequence at a time. Clear before fast."""

from __future__ import annotations

import torch

from nibblekv.formats import QuantFormat, Role, decode_rows, encode_rows
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
    sides: tuple[tuple[Role, torch.Tensor, QuantFormat, torch.Tensor, torch.Tensor], ...] = (
        ("key", key, layout.k_format, views.key_cache, views.k_scale_cache),
        ("value", value, layout.v_format, views.value_cache, views.v_scale_cache),
    )
    for role, rows, fmt, codes_view, words_view in sides:
        codes, words = encode_rows(rotate(rows[keep], fmt.rotation), fmt, role)
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
            k, v = _with_chunk(k, v, key[begin:end], value[begin:end])
        raw = None
        if options.raw_key is not None and options.raw_value is not None:
            rows_of = raw_rows(torch.arange(seq_len, device=query.device), options)
            raw = options.raw_key[b, rows_of].float(), options.raw_value[b, rows_of].float()
            if key is not None and value is not None:
                raw = _with_chunk(*raw, key[begin:end], value[begin:end])
        for first in range(begin, end, QUERY_CHUNK):
            last = min(first + QUERY_CHUNK, end)
            position = torch.arange(first - begin, last - begin, device=query.device) + seq_len - (end - begin)
            rows, rows_lse = _attend(query[first:last].float(), k, v, raw, position, seq_len - (end - begin), b, options)
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


def raw_rows(position: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """Return the row of each position in raw_key and raw_value; without a ring, any row beyond the sinks."""
    sinks, ring = options.raw_sinks, options.raw_ring
    return torch.where(position < sinks, position, sinks + (position - sinks) % ring if ring else 0)


def raw_mask(query_position: torch.Tensor, key_position: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """Return [queries, keys] bool: which keys each query reads unquantized (the rule of `AttentionOptions`)."""
    q, k = query_position[:, None], key_position[None, :]
    window = q - k < options.raw_window if options.raw_window else torch.zeros_like(k < q)
    return (k < options.raw_sinks) | window


def _with_chunk(
    key: torch.Tensor, value: torch.Tensor, own_key: torch.Tensor, own_value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [L, ..] with the last ones replaced by the queries' own."""
    context_len = key.shape[0] - own_key.shape[0]
    return torch.cat((key[:context_len], own_key.float())), torch.cat((value[:context_len], own_value.float()))


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    raw: tuple[torch.Tensor, torch.Tensor] | None,
    query_position: torch.Tensor,
    context_len: int,
    seq: int,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend query [Q, Hq, D] to key [L, Hk, D] and value [L, Hk, Dv]; return ([Q, Hq, Dv], lse [Q, Hq]), float32.

    raw: the key and value that are read in their place where `raw_mask` says so.
    """
    num_queries, num_query_heads, head_size = query.shape
    seq_len, num_kv_heads, head_size_v = value.shape
    group = num_query_heads // num_kv_heads
    key_position = torch.arange(seq_len, device=query.device)
    mask = visible_mask(query_position, key_position, seq, options)
    grouped = query.view(num_queries, num_kv_heads, group, head_size)
    score = torch.einsum("qhgd,khd->hgqk", grouped, key) * options.softmax_scale
    sources = [(value, mask)]
    if raw is not None:
        unquantized = raw_mask(query_position, key_position, options)
        raw_score = torch.einsum("qhgd,khd->hgqk", grouped, raw[0]) * options.softmax_scale
        score = torch.where(unquantized, raw_score, score)
        sources = [(value, mask & ~unquantized), (raw[1], mask & unquantized)]
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
    # Divided by their sum, and not taken from lse: beside scores of 1e8 it is rounded by whole units.
    top = torch.where(lse == -torch.inf, torch.zeros_like(lse), logits.amax(-1))[..., None]
    total = torch.exp(logits - top).sum(-1, keepdim=True)
    weight = torch.exp(score - top) / torch.where(total == 0, torch.ones_like(total), total)
    rows = torch.zeros(num_queries, num_kv_heads, group, head_size_v, device=query.device)
    seen = torch.zeros(num_queries, num_kv_heads, device=query.device)
    for source, read in sources:
        # A value row that is NaN reaches exactly the queries that see it: 0 * NaN must not.
        broken = ~torch.isfinite(source).all(-1)  # [L, Hk]
        finite = torch.where(broken[..., None], torch.zeros_like(source), source)
        rows = rows + torch.einsum("hgqk,khd->qhgd", weight.masked_fill(~read, 0.0), finite)
        seen = seen + torch.einsum("qk,kh->qh", read.float(), broken.float())
    rows = torch.where((seen > 0)[:, :, None, None], torch.full_like(rows, torch.nan), rows)
    return rows.reshape(num_queries, num_query_heads, head_size_v), lse.permute(2, 0, 1).reshape(num_queries, -1)
