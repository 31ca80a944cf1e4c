"""Reads and writes the same pages with vLLM's own INT4 kernels, in Triton's interpreter: `python interop.py RESULT.json`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl

from nibblekv import KVCacheLayout, gather_and_dequantize, paged_attention, reshape_and_cache

BLOCK_SIZE, NUM_BLOCKS, HEADS, KV_HEADS = 16, 9, 4, 2
SEQ_LENS, QUERY_LENS = [37, 16, 51], [1, 16, 7]


def vllm_kernels() -> ModuleType:
    """Import vLLM's kernel file. Without a GPU vLLM hides triton behind placeholders; the interpreter needs none."""
    import vllm.triton_utils as utils

    utils.triton, utils.tl = triton, tl
    from vllm.v1.attention.ops import int4_per_token_head

    return int4_per_token_head


def vllm_views(kv_cache: torch.Tensor, head_size: int) -> dict[str, torch.Tensor]:
    """Return vLLM's four views of interleaved pages [blocks, heads, slots, bytes], by its own arithmetic."""
    half = kv_cache.shape[-1] // 2
    key_cache, value_cache = kv_cache.transpose(1, 2).split(half, dim=-1)
    words = kv_cache.view(torch.float32).transpose(1, 2)
    at = head_size // 2 // 4
    return {
        "key_cache": key_cache,
        "value_cache": value_cache,
        "k_scale_cache": words[..., at],
        "v_scale_cache": words[..., half // 4 + at],
    }


def compare(kernels: ModuleType, head_size: int, block_order: str) -> dict[str, Any]:
    """Write with each implementation, read with the other."""
    generator = torch.Generator().manual_seed(head_size)
    layout = KVCacheLayout.create(
        "int4_per_token_head", num_kv_heads=KV_HEADS, head_size=head_size, block_size=BLOCK_SIZE, block_order=block_order
    )
    blocks = torch.randperm(NUM_BLOCKS, generator=generator).to(torch.int32)
    table, used = torch.zeros(3, 4, dtype=torch.int32), 0
    slots: list[int] = []
    for b, length in enumerate(SEQ_LENS):
        for i in range(-(-length // BLOCK_SIZE)):
            table[b, i] = blocks[used]
            used += 1
        slots += [int(table[b, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for p in range(length)]
    slot_mapping = torch.tensor([*slots, -1])
    key = torch.randn(len(slots) + 1, KV_HEADS, head_size, generator=generator)
    value = torch.randn(len(slots) + 1, KV_HEADS, head_size, generator=generator) + 0.5
    query = torch.randn(sum(QUERY_LENS), HEADS, head_size, generator=generator)
    starts = torch.tensor([0, *torch.tensor(QUERY_LENS).cumsum(0).tolist()], dtype=torch.int32)
    lengths = torch.tensor(SEQ_LENS, dtype=torch.int32)

    ours, theirs = layout.allocate(NUM_BLOCKS), layout.allocate(NUM_BLOCKS)
    reshape_and_cache(key, value, ours, slot_mapping, layout, backend="reference")
    views = vllm_views(theirs, head_size)
    kernels.reshape_and_cache_int4(
        key, value, views["key_cache"], views["value_cache"], slot_mapping,
        k_scale_cache=views["k_scale_cache"], v_scale_cache=views["v_scale_cache"],
    )  # fmt: skip

    def read_theirs(cache: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(query, torch.nan)
        v = vllm_views(cache, head_size)
        kernels.unified_attention_int4(
            query, v["key_cache"], v["value_cache"], out,
            cu_seqlens_q=starts, max_seqlen_q=max(QUERY_LENS), seqused_k=lengths, max_seqlen_k=max(SEQ_LENS),
            softmax_scale=head_size**-0.5, window_size=(-1, -1), block_table=table, softcap=0.0, sinks=None,
            alibi_slopes=None,            use_alibi_sqrt=False, qq_bias=None, output_scale=None, mm_prefix_range=None,
            k_scale_cache=v["k_scale_cache"], v_scale_cache=v["v_scale_cache"],
        )  # fmt: skip
        return out

    def read_ours(cache: torch.Tensor) -> torch.Tensor:
        return paged_attention(query, cache, table, lengths, starts, layout, backend="reference")

    def error(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a - b).norm() / b.norm())

    differing = [bool(d) for d in (ours != theirs).flatten(2).any(-1).flatten()]
    nibbles = (ours.int() ^ theirs.int()).bool()
    rows = [
        torch.cat([r.flatten() for r in gather_and_dequantize(c, table[2], SEQ_LENS[2], layout)]) for c in (ours, theirs)
    ]
    return {
        "head_size": head_size,
        "block_order": block_order,
        "bytes_written": int((ours != 0).sum()),
        "bytes_differing": int(nibbles.sum()),
        "tiles_differing": sum(differing),
        "rows_error": error(rows[0], rows[1]),
        "vllm_reads_ours": error(read_theirs(ours), read_ours(ours)),
        "we_read_theirs": error(read_ours(theirs), read_theirs(theirs)),
        "norm": float(read_ours(ours).norm()),
    }


if __name__ == "__main__":
    kernels = vllm_kernels()
    cases = [(64, "HND"), (128, "NHD"), (96, "HND")]
    Path(sys.argv[1]).write_text(json.dumps([compare(kernels, *case) for case in cases]))
