"""Write the golden file of a new format: `python tests/golden_pages.py FORMAT`. One that exists is never written again.

A file holds two pages of one KV head in which 20 of 32 slots were written, and what some slots decode to. `int4.v1`,
`int3.v1` and `int2.v1` are from before keys were refitted; `.refit` ones are what is written since.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from nibblekv import KVCacheLayout, QuantFormat, gather_and_dequantize, reshape_and_cache

FOLDER = Path(__file__).parent / "golden"
HEAD_SIZE, HEAD_SIZE_V, BLOCKS, WRITTEN, DECODED = 96, 40, 2, 20, (0, 7, 19)


def golden_rows(head_size: int) -> torch.Tensor:
    """Return [WRITTEN, 1, head_size] float32 from integers alone: a hash in [-1, 1), with spikes, an offset and zeros."""
    t, d = torch.arange(WRITTEN)[:, None], torch.arange(head_size)[None, :]
    x = ((t * 7919 + d * 104729 + 1) * 2654435761 % 2**32).double() / 2**31 - 1
    x[1, 3], x[2] = 40.0, x[2] + 6.0
    x[3] = 0.0
    x[4] *= 2.0**-20
    return x.float()[:, None, :]


def write_pages(layout: KVCacheLayout) -> torch.Tensor:
    """Return a fresh cache into which the golden rows were written by the reference."""
    kv_cache = layout.allocate(BLOCKS)
    key, value = golden_rows(layout.head_size), golden_rows(layout.head_size_v)
    reshape_and_cache(key, value, kv_cache, torch.arange(WRITTEN), layout, backend="reference")
    return kv_cache


def golden_file(fmt: QuantFormat) -> Path:
    """Return the file whose bytes today's encoder writes."""
    return FOLDER / f"{fmt.name}.v{fmt.version}{'.refit' if fmt.word == 'scale_min' else ''}.json"


def digits(row: torch.Tensor) -> list[float]:
    """Return the values to the nine digits that tell float32 numbers apart."""
    return [float(f"{x:.9g}") for x in row.tolist()]


def main() -> None:
    """Write one file."""
    layout = KVCacheLayout.create(sys.argv[1], num_kv_heads=1, head_size=HEAD_SIZE, head_size_v=HEAD_SIZE_V)
    kv_cache = write_pages(layout)
    key, value = gather_and_dequantize(kv_cache, torch.arange(BLOCKS), BLOCKS * layout.block_size, layout)
    record = {
        "format": layout.k_format.name,
        "version": layout.k_format.version,
        "page": layout.page,
        "head_size": HEAD_SIZE,
        "head_size_v": HEAD_SIZE_V,
        "pages": [bytes(page.flatten().tolist()).hex() for page in kv_cache],
        "slots": {str(slot): {"key": digits(key[slot, 0]), "value": digits(value[slot, 0])} for slot in DECODED},
    }
    with golden_file(layout.k_format).open("x") as file:  # "x": refuse to overwrite
        json.dump(record, file, separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    main()
