"""Small calls of every kernel of the Triton backend, for a memory checker to watch: `bash tests/sanitize_gpu.sh`.

Inputs are made and results checked on the CPU, so that hardly anything but the kernels runs on the GPU. Each tensor is an
allocation of its own where PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that one byte beyond it is an error and not a neighbour.
"""

from __future__ import annotations

import sys
import time

import torch
from batches import Batch

from nibblekv import KVCacheLayout, paged_attention, reshape_and_cache

LAYOUTS = {
    "int4-128": {"format": "int4", "head_size": 128},
    "int4-64": {"format": "int4", "head_size": 64},
    "int4-256": {"format": "int4", "head_size": 256},
    "int4-96-nhd": {"format": "int4", "head_size": 96, "page": "interleaved", "block_order": "NHD"},
    "vllm-int4-64": {"format": "int4_per_token_head", "head_size": 64},
    "int8-int4-128": {"format": "int8_per_token_head", "v_format": "int4", "head_size": 128, "page": "planar"},
    "fp8-40": {"format": "fp8_per_token_head", "head_size": 40},
}
CALLS = {
    "decode": ([1, 1, 1], {}),
    "drafts": ([4, 4, 4], {"sliding_window": 21}),
    "raw window": ([1, 1, 1], {"raw": (9, 3)}),
    "prompt": ([37, 5, 70], {}),
    "raw prompt": ([37, 5, 20], {"own": True}),
}
SEQ_LENS = [37, 5, 1100]


def main() -> int:
    begin = time.perf_counter()
    for name, description in LAYOUTS.items():
        layout = KVCacheLayout.create(num_kv_heads=2, **description)
        for call, (query_lens, options) in CALLS.items():
            batch = Batch.make(layout, SEQ_LENS, query_lens, 8, dtype=torch.bfloat16)
            own = {"key": batch.key, "value": batch.value} if options.get("own") else {}
            raw = batch.raw(*options["raw"], dtype=torch.bfloat16) if "raw" in options else {}
            options = {key: value for key, value in options.items() if key not in ("own", "raw")}
            tensors = (batch.query, batch.kv_cache, batch.block_table, batch.seq_lens, batch.query_start_loc)
            arguments = {"max_query_len": max(query_lens), "max_seq_len": max(SEQ_LENS), **options}
            expected = paged_attention(*tensors, layout, backend="reference", **own, **raw, **options).float()
            got = paged_attention(
                *(tensor.cuda() for tensor in tensors),
                layout,
                backend="triton",
                **{key: value.cuda() if torch.is_tensor(value) else value for key, value in {**own, **raw}.items()},
                **arguments,
            )
            error = float((got.cpu().float() - expected).norm() / expected.norm())
            print(f"{name} {call}: error {error:.1e}", flush=True)
            if not error < 6e-3:  # the output has eight bits
                return 1
        written, slots = layout.allocate(4), torch.tensor([3, -1, 60, 17, 0, 63])
        key, value = batch.key[:6].contiguous(), batch.value[:6].contiguous()
        on_gpu = written.cuda()
        reshape_and_cache(key, value, written, slots, layout, backend="reference")
        reshape_and_cache(key.cuda(), value.cuda(), on_gpu, slots.cuda(), layout, backend="triton")
        differing = float((on_gpu.cpu() != written).float().mean())
        print(f"{name} write: {differing:.2%} of the bytes differ", flush=True)
        if differing > 0.005:
            return 1
    print(f"all right, {time.perf_counter() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
