"""Where a layout's codes and scale words lie, as the integers that kernels take."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from nibblekv.backends.triton.codec import read_word_bytes, write_word_bytes
from nibblekv.formats import SCALE_WORD_BYTES
from nibblekv.layout import KVCacheLayout, KVCacheViews


@dataclass(frozen=True)
class Geometry:
    """Offsets and strides (block, slot, head) of a cache from its first byte, each counted in the words of its user.

    Attributes:
        k_codes, v_codes: in the words in which attention reads codes (`read_word_bytes`).
        k_words, v_words: in 32-bit words.
        k_rows, v_rows: codes in the words in which the write kernel stores them (`write_word_bytes`).
        k_align, v_align: the power of two, in read words, that divides every offset and stride of the codes.
    """

    k_codes: tuple[int, int, int, int]
    v_codes: tuple[int, int, int, int]
    k_words: tuple[int, int, int, int]
    v_words: tuple[int, int, int, int]
    k_rows: tuple[int, int, int, int]
    v_rows: tuple[int, int, int, int]
    k_align: int
    v_align: int


def geometry(layout: KVCacheLayout, kv_cache: torch.Tensor) -> Geometry:
    """Describe a cache. Cached by layout, shape and strides: views cost more host time than a launch."""
    return geometry_of(layout, kv_cache.shape[1:], kv_cache.stride())


@functools.lru_cache(maxsize=256)
def geometry_of(layout: KVCacheLayout, page_shape: tuple[int, ...], strides: tuple[int, ...]) -> Geometry:
    """Describe a cache of this shape, without its first dimension, and these strides, with it."""
    views: KVCacheViews = layout.views(torch.empty_strided((1, *page_shape), strides, dtype=torch.uint8, device="meta"))

    def count(view: torch.Tensor, unit: int) -> tuple[int, int, int, int]:
        size = view.element_size()
        offset, block, slot, head = (x * size for x in (view.storage_offset(), *view.stride()[:3]))
        block = strides[0]  # of one page torch may report any stride
        return offset // unit, block // unit, slot // unit, head // unit

    k_unit, v_unit = read_word_bytes(layout.k_format), read_word_bytes(layout.v_format)
    k_codes, v_codes = count(views.key_cache, k_unit), count(views.value_cache, v_unit)
    return Geometry(
        k_codes,
        v_codes,
        count(views.k_scale_cache, SCALE_WORD_BYTES),
        count(views.v_scale_cache, SCALE_WORD_BYTES),
        count(views.key_cache, write_word_bytes(layout.k_format)),
        count(views.value_cache, write_word_bytes(layout.v_format)),
        _common_power(k_codes, 16 // k_unit),
        _common_power(v_codes, 16 // v_unit),
    )


def _common_power(numbers: tuple[int, ...], most: int) -> int:
    power = most
    while any(n % power for n in numbers):
        power //= 2
    return power
