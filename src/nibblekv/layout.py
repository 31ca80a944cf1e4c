"""Bytes of a page: shapes and zero-copy views of a paged KV cache, for any strides.

A page holds `block_size` tokens of every KV head. It is arranged in one of two ways, with the same bytes per token.

    interleaved   one row per (head, slot): [K codes | K word | V codes | V word]           vLLM's arrangement
    planar        one tile per head: [K codes: block_size rows | V codes: block_size rows
                                      | K words: block_size | V words: block_size]          every row stays aligned

Only interleaved rows of 2- and 3-bit codes may differ: their codes are padded to whole words of 4 bytes.

Nothing here writes: a cache starts as zeros, and zeros decode to zeros.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from nibblekv.formats import SCALE_WORD_BYTES, PageKind, QuantFormat, check_head_size, get_format

__all__ = ["KVCacheLayout", "KVCacheViews"]

BlockOrder = Literal["HND", "NHD"]
BLOCK_SIZE_MULTIPLE = 16
# Bytes of a huge page where pages have 4 KB.
HUGE_PAGE = 2 << 20
MADV_HUGEPAGE = 14  # of Linux


@dataclass(frozen=True)
class KVCacheViews:
    """Strided views into one kv_cache tensor; writing to them writes the cache.

    key_cache: [num_blocks, block_size, num_kv_heads, K row bytes] uint8.
    value_cache: [num_blocks, block_size, num_kv_heads, V row bytes] uint8.
    k_scale_cache, v_scale_cache: [num_blocks, block_size, num_kv_heads] int32 scale words.
    """

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    k_scale_cache: torch.Tensor
    v_scale_cache: torch.Tensor


@dataclass(frozen=True)
class KVCacheLayout:
    """How keys and values of one layer lie in its pages. Make one with `KVCacheLayout.create`.

    Attributes:
        k_format, v_format: table rows; they may differ.
        num_kv_heads, head_size, head_size_v: head_size counts a key's values, head_size_v a value's.
        block_size: tokens of a page.
        page: `planar` or `interleaved`.
        block_order: physical order inside an interleaved page that `allocate` uses, `HND` or `NHD`; planar is HND.
    """

    k_format: QuantFormat
    v_format: QuantFormat
    num_kv_heads: int
    head_size: int
    head_size_v: int
    block_size: int
    page: PageKind
    block_order: BlockOrder

    @classmethod
    def create(
        cls,
        format: str | QuantFormat = "int4",
        *,
        num_kv_heads: int,
        head_size: int,
        block_size: int = 16,
        v_format: str | QuantFormat | None = None,
        head_size_v: int | None = None,
        page: PageKind | None = None,
        block_order: BlockOrder = "HND",
    ) -> KVCacheLayout:
        """Describe a cache.

        Args:
            format: of keys, and of values unless `v_format` names another.
            num_kv_heads, head_size: from the model; head_size is a multiple of 8 from 32 to 512.
            block_size: tokens of a page, a multiple of 16.
            head_size_v: head size of values where it differs.
            page: overrides the format's own arrangement.
            block_order: see the class.

        Raises:
            ValueError: names the argument, what was expected and what came.
        """
        k_format = get_format(format)
        v_format = k_format if v_format is None else get_format(v_format)
        head_size_v = head_size if head_size_v is None else head_size_v
        check_head_size(head_size)
        check_head_size(head_size_v, "head_size_v")
        if num_kv_heads < 1:
            raise ValueError(f"num_kv_heads: expected at least 1, got {num_kv_heads}")
        if block_size < BLOCK_SIZE_MULTIPLE or block_size % BLOCK_SIZE_MULTIPLE:
            raise ValueError(f"block_size: expected a positive multiple of {BLOCK_SIZE_MULTIPLE}, got {block_size}")
        if page is None:
            page = "planar" if "planar" in (k_format.page, v_format.page) else "interleaved"
        if page not in ("planar", "interleaved"):
            raise ValueError(f"page: expected 'planar' or 'interleaved', got {page!r}")
        if block_order not in ("HND", "NHD"):
            raise ValueError(f"block_order: expected 'HND' or 'NHD', got {block_order!r}")
        if page == "planar" and block_order != "HND":
            raise ValueError(f"block_order: expected 'HND' for planar pages, got {block_order!r}")
        return cls(k_format, v_format, num_kv_heads, head_size, head_size_v, block_size, page, block_order)

    @cached_property
    def k_row_bytes(self) -> int:
        """Bytes of one key's codes."""
        return self.k_format.row_bytes(self.head_size)

    @cached_property
    def v_row_bytes(self) -> int:
        """Bytes of one value's codes."""
        return self.v_format.row_bytes(self.head_size_v)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of one token of one KV head: codes and scale words of key and value, and what pads interleaved ones."""
        return self._room(self.k_row_bytes) + self._room(self.v_row_bytes) + 2 * SCALE_WORD_BYTES

    def _room(self, row_bytes: int) -> int:
        """Return the bytes that a row's codes take: the scale word behind an interleaved row stays aligned."""
        return row_bytes if self.page == "planar" else -(-row_bytes // SCALE_WORD_BYTES) * SCALE_WORD_BYTES

    @cached_property
    def tile_bytes(self) -> int:
        """Bytes of one KV head's part of a page."""
        return self.block_size * self.slot_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: `block_size` tokens of all KV heads."""
        return self.num_kv_heads * self.tile_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all KV heads of this layer."""
        return self.num_kv_heads * self.slot_bytes

    def shape(self, num_blocks: int) -> tuple[int, ...]:
        """Logical shape of the kv_cache tensor: planar [blocks, heads, tile bytes], else [blocks, heads, slots, bytes]."""
        if self.page == "planar":
            return (num_blocks, self.num_kv_heads, self.tile_bytes)
        return (num_blocks, self.num_kv_heads, self.block_size, self.slot_bytes)

    def allocate(self, num_blocks: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return a zeroed kv_cache tensor of `shape(num_blocks)`, uint8, in the layout's physical order."""
        if num_blocks < 1:
            raise ValueError(f"num_blocks: expected at least 1, got {num_blocks}")
        if self.block_order == "NHD":
            physical = (num_blocks, self.block_size, self.num_kv_heads, self.slot_bytes)
            return _zeroed(physical, device).transpose(1, 2)
        return _zeroed(self.shape(num_blocks), device)

    def check(self, kv_cache: torch.Tensor) -> None:
        """Raise TypeError or ValueError unless `views(kv_cache)` is possible. Reads metadata only."""
        if kv_cache.dtype != torch.uint8:
            raise TypeError(f"kv_cache: expected torch.uint8, got {kv_cache.dtype}")
        geometry = (kv_cache.shape, kv_cache.stride(), kv_cache.storage_offset() % SCALE_WORD_BYTES)
        if geometry in self._accepted:  # a write of one token takes 8 us; looking again at the same cache took 3
            return
        expected = self.shape(kv_cache.shape[0] if kv_cache.dim() else 0)
        rows = (expected[0], self.num_kv_heads, self.block_size, self.slot_bytes)
        shape, strides = tuple(kv_cache.shape), kv_cache.stride()
        as_rows_of_tile = self.page == "planar" and shape == rows and strides[2] == self.slot_bytes
        if shape != expected and not as_rows_of_tile:
            raise ValueError(f"kv_cache: expected shape {('num_blocks', *expected[1:])}, got {shape}")
        if strides[-1] != 1:
            raise ValueError(f"kv_cache: expected bytes of a row to be contiguous, got strides {strides}")
        outer = strides[:2] if self.page == "planar" else strides[:3]
        if any(s % SCALE_WORD_BYTES for s in outer) or kv_cache.storage_offset() % SCALE_WORD_BYTES:
            raise ValueError(
                f"kv_cache: expected strides and storage offset in multiples of {SCALE_WORD_BYTES} bytes, "
                f"got strides {strides}, offset {kv_cache.storage_offset()}"
            )
        self._accepted.add(geometry)

    def check_pages(self, block_table: torch.Tensor, seq_lens: torch.Tensor, num_blocks: int) -> None:
        """Raise ValueError if a page of a sequence is not one of the cache's. Reads the tensors' data.

        Args:
            block_table: [num_seqs, max_blocks] int32 or int64.
            seq_lens: [num_seqs], tokens.
            num_blocks: pages of the cache.
        """
        first_slot = torch.arange(block_table.shape[1], device=block_table.device)[None, :] * self.block_size
        pages = block_table[first_slot < seq_lens[:, None]]
        if pages.numel():
            first, last = (int(page) for page in pages.aminmax())
            if not 0 <= first <= last < num_blocks:
                raise ValueError(f"block_table: expected pages 0 to {num_blocks - 1}, got {first} to {last}")

    @cached_property
    def _accepted(self) -> set[tuple[object, ...]]:
        return set()

    def views(self, kv_cache: torch.Tensor) -> KVCacheViews:
        """Return the codes and scale words of a cache as strided views.

        Args:
            kv_cache: uint8 of `shape(num_blocks)`; a planar cache may also come as [blocks, heads, slots, slot_bytes]
                with contiguous tiles. Outer strides and the storage offset are free, in multiples of 4 bytes.
        """
        self.check(kv_cache)
        if self.page == "planar":
            tiles = kv_cache if kv_cache.dim() == 3 else kv_cache.flatten(-2)
            words = tiles.view(torch.int32)
            k_end = self.block_size * self.k_row_bytes
            v_end = k_end + self.block_size * self.v_row_bytes
            word = v_end // SCALE_WORD_BYTES
            key = tiles[..., :k_end].unflatten(-1, (self.block_size, self.k_row_bytes))
            value = tiles[..., k_end:v_end].unflatten(-1, (self.block_size, self.v_row_bytes))
            k_scale = words[..., word : word + self.block_size]
            v_scale = words[..., word + self.block_size :]
        else:
            words = kv_cache.view(torch.int32)
            v_begin = self._room(self.k_row_bytes) + SCALE_WORD_BYTES
            key = kv_cache[..., : self.k_row_bytes]
            value = kv_cache[..., v_begin : v_begin + self.v_row_bytes]
            k_scale = words[..., v_begin // SCALE_WORD_BYTES - 1]
            v_scale = words[..., -1]
        return KVCacheViews(key.transpose(1, 2), value.transpose(1, 2), k_scale.transpose(1, 2), v_scale.transpose(1, 2))


def _zeroed(shape: tuple[int, ...], device: torch.device | str) -> torch.Tensor:
    """Return zeroed bytes, a large cache of the host in huge pages where Linux grants them.

    A sequence's pages lie all over the cache: with pages of 4 KB, reading it waits for an address translation all the time.
    """
    cache = torch.empty(shape, dtype=torch.uint8, device=device)
    if cache.is_cpu and cache.numel() >= HUGE_PAGE and sys.platform == "linux":
        begin = -(-cache.data_ptr() // HUGE_PAGE) * HUGE_PAGE
        size = cache.data_ptr() + cache.numel() - begin
        if size > 0:  # a hint: what the system answers does not matter
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), MADV_HUGEPAGE)
    return cache.zero_()
