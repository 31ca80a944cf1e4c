"""The public operations as torch.library custom ops, so that torch.compile keeps them in its graph.

Importing this module registers `torch.ops.nibblekv.reshape_and_cache`, `.paged_attention` and `.paged_attention_out`. A
layout crosses the boundary as the string of `layout_key`, optional arguments by their names in `nibblekv.paged_attention`;
per-sequence causal flags come as `causal_mask`.
"""

from __future__ import annotations

import functools

import torch

from nibblekv import ops
from nibblekv.layout import KVCacheLayout

__all__ = ["layout_from_key", "layout_key", "paged_attention", "paged_attention_out", "reshape_and_cache"]


def layout_key(layout: KVCacheLayout) -> str:
    """Return the string that stands for a layout in a custom op's arguments."""
    return ",".join(
        str(x)
        for x in (
            layout.k_format.name, layout.v_format.name, layout.num_kv_heads, layout.head_size, layout.head_size_v,
            layout.block_size, layout.page, layout.block_order,
        )
    )  # fmt: skip


@functools.cache
def layout_from_key(key: str) -> KVCacheLayout:
    """Invert `layout_key`.

    Raises:
        ValueError: the key has not eight parts, or one of them is not valid.
    """
    parts = key.split(",")
    if len(parts) != 8:
        raise ValueError(f"layout: expected eight parts of layout_key, got {key!r}")
    return KVCacheLayout.create(
        parts[0],
        v_format=parts[1],
        num_kv_heads=int(parts[2]),
        head_size=int(parts[3]),
        head_size_v=int(parts[4]),
        block_size=int(parts[5]),
        page=parts[6],  # type: ignore[arg-type]
        block_order=parts[7],  # type: ignore[arg-type]
    )


@torch.library.custom_op("nibblekv::reshape_and_cache", mutates_args=("kv_cache",))
def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: str,
    backend: str = "auto",
) -> None:
    """Write keys and values into their slots; see `nibblekv.reshape_and_cache`."""
    ops.reshape_and_cache(key, value, kv_cache, slot_mapping, layout_from_key(layout), backend=backend)


@reshape_and_cache.register_fake
def _(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: str,
    backend: str = "auto",
) -> None:
    return None


@torch.library.custom_op("nibblekv::paged_attention_out", mutates_args=("out", "lse"))
def paged_attention_out(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    layout: str,
    softmax_scale: float | None = None,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    causal: bool = True,
    causal_mask: torch.Tensor | None = None,
    sliding_window: int = 0,
    chunk_lookback: int = -1,
    rswa_prefix_lens: torch.Tensor | None = None,
    rswa_window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    alibi_sqrt: bool = False,
    sinks: torch.Tensor | None = None,
    qq_bias: torch.Tensor | None = None,
    mm_prefix_ranges: torch.Tensor | None = None,
    mm_prefix_clamp: bool = False,
    raw_key: torch.Tensor | None = None,
    raw_value: torch.Tensor | None = None,
    raw_window: int = 0,
    raw_sinks: int = 0,
    output_scale: torch.Tensor | None = None,
    batch_invariant: bool = False,
    backend: str = "auto",
) -> None:
    """Attend into out (and lse, [num_tokens, num_query_heads] float32, if given); see `nibblekv.paged_attention`."""
    result = ops.paged_attention(
        query, kv_cache, block_table, seq_lens, query_start_loc, layout_from_key(layout),
        softmax_scale=softmax_scale, key=key, value=value, max_query_len=max_query_len, max_seq_len=max_seq_len,
        out=out, return_lse=lse is not None, backend=backend, causal=causal if causal_mask is None else causal_mask,
        sliding_window=sliding_window, chunk_lookback=chunk_lookback, rswa_prefix_lens=rswa_prefix_lens,
        rswa_window=rswa_window, softcap=softcap, alibi_slopes=alibi_slopes, alibi_sqrt=alibi_sqrt, sinks=sinks,
        qq_bias=qq_bias, mm_prefix_ranges=mm_prefix_ranges, mm_prefix_clamp=mm_prefix_clamp, raw_key=raw_key,
        raw_value=raw_value, raw_window=raw_window, raw_sinks=raw_sinks, output_scale=output_scale,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    if lse is not None:
        lse.copy_(result[1])


@paged_attention_out.register_fake
def _(out: torch.Tensor, lse: torch.Tensor | None, *arguments: object, **options: object) -> None:
    return None


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    layout: str,
    **options: object,
) -> torch.Tensor:
    """Allocate the output and attend into it by the custom op: [num_tokens, num_query_heads, head_size_v].

    Args:
        layout: of `layout_key`.
        options: the further arguments of `paged_attention_out`.
    """
    dtype = query.dtype if options.get("output_scale") is None else torch.float8_e4m3fn
    out = query.new_empty((query.shape[0], query.shape[1], layout_from_key(layout).head_size_v), dtype=dtype)
    torch.ops.nibblekv.paged_attention_out(
        out, None, query, kv_cache, block_table, seq_lens, query_start_loc, layout, **options
    )
    return out
