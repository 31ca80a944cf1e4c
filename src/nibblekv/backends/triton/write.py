"""Rotate, quantize, pack and scatter new keys and values: one launch, no temporaries."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from nibblekv.backends.triton import rotation
from nibblekv.backends.triton.codec import encode_rows, format_constants, store_codes
from nibblekv.backends.triton.geometry import geometry
from nibblekv.backends.triton.launch import cdiv, launch
from nibblekv.backends.triton.rotation import multiply, rotate_rows
from nibblekv.layout import KVCacheLayout

# Rows of one (token, head) that a program takes: each reads the rotation matrix once, and few rows start sooner.
SMALL_ROWS, LARGE_ROWS = 16, 64
LARGE_CALL = 4096
NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_rows", "num_slots"])
def write_kernel(
    key_ptr, value_ptr, cache_ptr, slot_ptr, k_matrix_ptr, v_matrix_ptr,
    key_t, key_h, value_t, value_h,
    k_offset, k_b, k_s, k_h, kw_offset, kw_b, kw_s, kw_h,
    v_offset, v_b, v_s, v_h, vw_offset, vw_b, vw_s, vw_h,
    k_gain, v_gain, num_rows, num_slots,
    NUM_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, K_CODE: tl.constexpr, K_WORD: tl.constexpr, K_ROTATED: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, V_CODE: tl.constexpr, V_WORD: tl.constexpr, V_ROTATED: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Write keys (program_id(1) = 0) or values (1): rows (token, head), ROWS of them a program."""
    if tl.program_id(1) == 0:
        _write_rows(
            key_ptr, cache_ptr, slot_ptr, k_matrix_ptr, num_rows, num_slots, key_t, key_h,
            k_offset, k_b, k_s, k_h, kw_offset, kw_b, kw_s, kw_h, k_gain, NUM_HEADS, BLOCK_SIZE,
            D, DP, K_CODE, K_WORD, K_ROTATED, True, ROWS, PRECISION, INTERPRET,
        )  # fmt: skip
    else:
        _write_rows(
            value_ptr, cache_ptr, slot_ptr, v_matrix_ptr, num_rows, num_slots, value_t, value_h,
            v_offset, v_b, v_s, v_h, vw_offset, vw_b, vw_s, vw_h, v_gain, NUM_HEADS, BLOCK_SIZE,
            DV, DVP, V_CODE, V_WORD, V_ROTATED, False, ROWS, PRECISION, INTERPRET,
        )  # fmt: skip


@triton.jit
def _write_rows(
    x_ptr, cache_ptr, slot_ptr, matrix_ptr, num_rows, num_slots, x_t, x_h,
    c_offset, c_b, c_s, c_h, w_offset, w_b, w_s, w_h, gain, NUM_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, CODE: tl.constexpr, WORD: tl.constexpr, ROTATED: tl.constexpr,
    KEY: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, DP)
    ONE_BLOCK: tl.constexpr = ROTATED and DP <= 128
    if ONE_BLOCK:
        matrix = tl.load(matrix_ptr + column[:, None] * DP + column[None, :])
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (row // NUM_HEADS).to(tl.int64)
    head = row % NUM_HEADS
    cache_head = head.to(tl.int64)  # heads of a cache may lie gigabytes apart
    slot = tl.load(slot_ptr + token, mask=row < num_rows, other=-1).to(tl.int64)
    keep = (slot >= 0) & (slot < num_slots)
    x_row = x_ptr + token * x_t + head * x_h
    if ONE_BLOCK:
        x = tl.load(x_row[:, None] + column[None, :], mask=keep[:, None] & (column < D)[None, :], other=0.0)
        y = multiply(x, matrix, tl.zeros([ROWS, DP], tl.float32), PRECISION, INTERPRET) * gain
    else:
        y = rotate_rows(x_row, keep, matrix_ptr, D, DP, ROWS, 64, ROTATED, PRECISION, INTERPRET) * gain
    codes, words = encode_rows(y, column, D, CODE, WORD, KEY)
    # Only now: places held while rows are encoded take 11 registers more on Hopper, and spill 24 bytes on Ampere.
    block, inner = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    store_codes(codes, cache_ptr, c_offset + block * c_b + inner * c_s + cache_head * c_h, keep, D, DP, ROWS, CODE)
    tl.store(cache_ptr + w_offset + block * w_b + inner * w_s + cache_head * w_h, words, mask=keep)


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, layout: KVCacheLayout
) -> None:
    """Quantize rows and write them to their slots; see `nibblekv.reshape_and_cache`."""
    places = geometry(layout, kv_cache)
    device = kv_cache.device
    num_rows = slot_mapping.shape[0] * layout.num_kv_heads
    widest = max(rotation.padded(layout.head_size), rotation.padded(layout.head_size_v))
    rows = LARGE_ROWS if num_rows >= LARGE_CALL and widest <= 256 and key.dtype != torch.float32 else SMALL_ROWS
    with rotation.capture_safe(device):
        k_matrix, k_gain, k_constants = _row_constants(layout, False, key.dtype, device)
        v_matrix, v_gain, v_constants = _row_constants(layout, True, key.dtype, device)
        launch(
            write_kernel,
            (cdiv(num_rows, rows), 2),
            (key, value, kv_cache.view(torch.int32), slot_mapping, k_matrix, v_matrix),
            (
                key.stride(0), key.stride(1), value.stride(0), value.stride(1),
                *places.k_rows, *places.k_words, *places.v_rows, *places.v_words, k_gain, v_gain,
            ),
            (num_rows, kv_cache.shape[0] * layout.block_size),
            (
                layout.num_kv_heads, layout.block_size, *k_constants, *v_constants,
                rows, rotation.dot_precision(), rotation.interpreting(),
            ),
            num_warps=NUM_WARPS if widest <= 128 else 8,
            num_stages=1,
        )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _row_constants(
    layout: KVCacheLayout, of_value: bool, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor | None, float, tuple[int, int, int, int, bool]]:
    """Return the rotation matrix the gain, and (D, DP, CODE, WORD, ROTATED) of keys or values."""
    fmt, size = (layout.v_format, layout.head_size_v) if of_value else (layout.k_format, layout.head_size)
    rotated = fmt.rotation != "none"
    m = rotation.matrix(fmt.rotation, size, False, dtype, device) if rotated else None
    gain = rotation.forward_gain(fmt.rotation, size)
    return m, gain, (size, rotation.padded(size), *format_constants(fmt), rotated)
