"""Small batches of sequences in a cache whose every other byte is poison, and a search for the backends that are here."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from nibblekv import AttentionOptions, KVCacheLayout, gather_and_dequantize, paged_attention, reshape_and_cache
from nibblekv.backends import BACKENDS, get_backend

POISON = 0xFF  # code 15 or NaN, and a scale word that is NaN
CANARY = 0xA5
# (least, most) error of normal rows of any head size relative to their norm, by bits of a code.
NORMAL_ERROR = {2: (0.3, 0.48), 3: (0.14, 0.24), 4: (0.07, 0.14), 8: (0.002, 0.03)}


def usable_backends() -> list[str]:
    """Return the backends that are part of this installation and run on this machine's CPU tensors."""
    found = [name for name, (module, _) in BACKENDS.items() if importlib.util.find_spec(module) is not None]
    return [name for name in found if get_backend(name).unavailable_reason() is None and _serves_cpu(name)]


def _serves_cpu(name: str) -> bool:
    layout = KVCacheLayout.create("int4", num_kv_heads=1, head_size=64)
    return get_backend(name).supports(layout, AttentionOptions(softmax_scale=1.0), torch.device("cpu")) is None


def place(
    layout: KVCacheLayout, blocks: int, *, offset: int = 0, pad_row: int = 0, pad_head: int = 0, pad_block: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an allocation full of canaries and a cache of `layout` in it: offset and padded by these bytes."""
    if layout.page == "planar":
        tile = layout.tile_bytes + pad_head
        strides = (layout.num_kv_heads * tile + pad_block, tile, 1)
    else:
        row = layout.slot_bytes + pad_row
        if layout.block_order == "HND":
            head, slot = layout.block_size * row + pad_head, row
            strides = (layout.num_kv_heads * head + pad_block, head, slot, 1)
        else:
            head, slot = row, layout.num_kv_heads * row + pad_head
            strides = (layout.block_size * slot + pad_block, head, slot, 1)
    allocation = torch.full((offset + blocks * strides[0] + 8,), CANARY, dtype=torch.uint8)
    return allocation, allocation.as_strided(layout.shape(blocks), strides, offset)


@dataclass
class Batch:
    """Sequences in pages, and the queries that attend to them with `Batch.backend`."""

    backend: ClassVar[str] = "reference"
    layout: KVCacheLayout
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    stored_key: list[torch.Tensor]
    stored_value: list[torch.Tensor]

    @classmethod
    def make(
        cls,
        layout: KVCacheLayout,
        seq_lens: list[int],
        query_lens: list[int],
        num_query_heads: int,
        *,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        magnitude: float = 1.0,
    ) -> Batch:
        """Fill a poisoned cache with random rows, in pages of a random order. Unused table entries name no page."""
        gen = torch.Generator().manual_seed(seed)

        def rows(n: int, heads: int, head_size: int) -> torch.Tensor:
            return (torch.randn(n, heads, head_size, generator=gen) * magnitude).to(dtype)

        needed = [-(-n // layout.block_size) for n in seq_lens]
        num_blocks = sum(needed) + 2
        pages = torch.randperm(num_blocks, generator=gen).tolist()
        kv_cache = layout.allocate(num_blocks)
        kv_cache.fill_(POISON)
        block_table = torch.full((len(seq_lens), max(needed) + 1), 2**30, dtype=torch.int32)
        stored_key, stored_value = [], []
        for b, length in enumerate(seq_lens):
            own = torch.tensor([pages.pop() for _ in range(needed[b])], dtype=torch.int32)
            block_table[b, : needed[b]] = own
            position = torch.arange(length)
            slots = own.long()[position // layout.block_size] * layout.block_size + position % layout.block_size
            stored_key.append(rows(length, layout.num_kv_heads, layout.head_size))
            stored_value.append(rows(length, layout.num_kv_heads, layout.head_size_v))
            reshape_and_cache(stored_key[b], stored_value[b], kv_cache, slots, layout, backend="reference")
        starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
        own = [(k[len(k) - n :], v[len(v) - n :]) for k, v, n in zip(stored_key, stored_value, query_lens, strict=True)]
        return cls(
            layout,
            rows(int(starts[-1]), num_query_heads, layout.head_size),
            torch.cat([k for k, _ in own]),
            torch.cat([v for _, v in own]),
            kv_cache,
            block_table,
            torch.tensor(seq_lens, dtype=torch.int32),
            starts,
            stored_key,
            stored_value,
        )

    def attend(self, backend: str | None = None, **options: object) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Call `paged_attention` of a backend (`Batch.backend`) on the batch, into an output of NaN.

        Skip the test if the backend does not support the call.
        """
        backend = backend or self.backend
        known = {name: options[name] for name in options if name in AttentionOptions.__dataclass_fields__}
        described = AttentionOptions(**{"softmax_scale": 1.0, **known})  # type: ignore[arg-type]
        reason = get_backend(backend).supports(self.layout, described, self.query.device)
        if reason is not None:
            pytest.skip(f"{backend}: {reason}")
        if "out" not in options and options.get("output_scale") is None:
            shape = (*self.query.shape[:2], self.layout.head_size_v)
            options["out"] = torch.full(shape, torch.nan, dtype=self.query.dtype)
        return paged_attention(
            self.query,
            self.kv_cache,
            self.block_table,
            self.seq_lens,
            self.query_start_loc,
            self.layout,
            backend=backend,
            **options,  # type: ignore[arg-type]
        )

    def raw(self, window: int, sinks: int, spare: int = 3, dtype: torch.dtype = torch.float32) -> dict[str, object]:
        """Return the options that read the last `window` and the first `sinks` positions raw, other rows poisoned.

        The ring has `spare` rows more than the rule asks for.
        """
        ring = window + max(int(self.query_start_loc.diff().max()) - 1, 0) + spare if window else 0
        tensors = []
        for stored in (self.stored_key, self.stored_value):
            tensors.append(torch.full((len(stored), sinks + ring, *stored[0].shape[1:]), torch.nan, dtype=dtype))
            for b, rows in enumerate(stored):
                for p in range(len(rows)):
                    if p < sinks or p >= len(rows) - ring:
                        tensors[-1][b, p if p < sinks else sinks + (p - sinks) % ring] = rows[p].to(dtype)
        return {"raw_key": tensors[0], "raw_value": tensors[1], "raw_window": window, "raw_sinks": sinks}

    def dequantized(self, raw_chunk: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (key, value) of each sequence as stored, its queries' own rows raw if asked."""
        rows = []
        for b, length in enumerate(self.seq_lens.tolist()):
            key, value = gather_and_dequantize(self.kv_cache, self.block_table[b], length, self.layout)
            begin, end = self.query_start_loc[b : b + 2].tolist()
            if raw_chunk:
                context = length - (end - begin)
                key = torch.cat((key[:context], self.key[begin:end].float()))
                value = torch.cat((value[:context], self.value[begin:end].float()))
            rows.append((key, value))
        return rows
