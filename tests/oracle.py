"""The attention of `AttentionOptions` written out a second time from its docstring: one query at a time, in float64."""

from __future__ import annotations

import torch

from nibblekv import AttentionOptions


def sees(q: int, k: int, seq: int, options: AttentionOptions) -> bool:
    """Say whether the query at position q sees the key at position k of sequence `seq`."""
    causal = bool(options.causal[seq]) if isinstance(options.causal, torch.Tensor) else options.causal
    window = options.sliding_window
    base = k <= q or not causal
    if options.chunk_lookback >= 0:
        chunk = window // (options.chunk_lookback + 1)
        base = base and q // chunk - k // chunk <= options.chunk_lookback
    elif options.rswa_prefix_lens is not None:
        base = base and (k < int(options.rswa_prefix_lens[seq]) or q - k < options.rswa_window)
    elif window:
        base = base and q - k < window and (causal or k - q < window)
    if base or options.mm_prefix_ranges is None:
        return base
    near = not options.mm_prefix_clamp or not window or q - k < window
    return near and any(a < b and a <= q <= b and a <= k <= b for a, b in options.mm_prefix_ranges[seq].tolist())


def attend(
    query: torch.Tensor,
    rows: list[tuple[torch.Tensor, torch.Tensor]],
    query_start_loc: list[int],
    options: AttentionOptions,
    raw: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [num_tokens, num_query_heads, head_size_v] and lse [num_tokens, num_query_heads], both float64.

    Args:
        rows: per sequence (key [seq_len, num_kv_heads, head_size], value [seq_len, num_kv_heads, head_size_v]).
        query_start_loc: the first query of each sequence, and the end.
        raw: as rows: what is read in their place at a sequence's first raw_sinks and a query's last raw_window positions.
    """
    heads = query.shape[1]
    out = torch.zeros(query.shape[0], heads, rows[0][1].shape[2], dtype=torch.float64)
    lse = torch.full((query.shape[0], heads), -torch.inf, dtype=torch.float64)
    for b, (key, value) in enumerate(rows):
        begin, end, length = query_start_loc[b], query_start_loc[b + 1], key.shape[0]
        for i in range(begin, end):
            q = length - (end - i)
            seen = [k for k in range(length) if sees(q, k, b, options)]
            k = torch.tensor(seen, dtype=torch.long)
            read_key, read_value = key.clone(), value.clone()
            for p in seen if raw is not None else []:
                if p < options.raw_sinks or (options.raw_window and p > q - options.raw_window):
                    read_key[p], read_value[p] = raw[b][0][p], raw[b][1][p]
            for h in range(heads):
                kv_head = h // (heads // key.shape[1])
                score = read_key[k, kv_head].double() @ query[i, h].double() * options.softmax_scale
                if options.softcap:
                    score = options.softcap * torch.tanh(score / options.softcap)
                if options.alibi_slopes is not None:
                    linear = (k - q).double()
                    distance = -(-linear).clamp(min=0).sqrt() if options.alibi_sqrt else linear
                    score = score + float(options.alibi_slopes[h]) * distance
                if options.qq_bias is not None:
                    own = k - (length - (end - begin))
                    bias = options.qq_bias[i - begin].double()[own.clamp(min=0)]
                    score = score + torch.where(own >= 0, bias, 0.0)
                sink = [] if options.sinks is None else [options.sinks[h].double().reshape(1)]
                lse[i, h] = torch.logsumexp(torch.cat([score, *sink]), 0)
                if seen:
                    shift = 0.0 if lse[i, h] == -torch.inf else lse[i, h]  # every score is -inf: no weight at all
                    out[i, h] = torch.exp(score - shift) @ read_value[k, kv_head].double()
    if options.output_scale is not None:
        out = (out / options.output_scale.double()).clamp(-448, 448)
    return out, lse
