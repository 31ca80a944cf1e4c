"""Bits of the quantized formats inside kernels: the only Triton code that knows them (docs/format.md is normative).

Reading. A row is read in words of four values: bytes of `uint2` rows and of the low plane of `uint3` rows (`join_planes`
adds the high one), 16-bit words of `uint4` rows, 32-bit words of 8-bit rows. Word w unpacks
into four streams, stream s holding dimension 4 w + s as float16. With `ASM` (NVIDIA) the bits of a code become a float16
*subnormal* by masking alone, n * 2^-24 (n * 2^-20 in the odd streams of `uint4`), with no conversion instruction; tensor
cores take subnormals exactly, and the factor is folded into scales and queries. Without it (AMD, interpreter) codes are
converted. 8-bit floats become float16 by moving bits (value * 2^-8), so no native fp8 is needed. Codes of less than 4 bits
are widened to words of `uint4` first.

Writing. `encode_rows` turns rotated float32 rows into integer codes and scale words, `store_codes` packs and stores them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from nibblekv.formats import EDGE as SCALE_EDGE
from nibblekv.formats import REFIT_COVARIANCE, REFIT_SHIFT, SCALE_FLOOR, QuantFormat

UINT4, INT8, FP8, UINT3, UINT2 = (tl.constexpr(i) for i in range(5))
SCALE_MIN, SCALE_ZERO, SCALE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FLOOR = tl.constexpr(SCALE_FLOOR)
COVARIANCE, SHIFT = tl.constexpr(REFIT_COVARIANCE), tl.constexpr(REFIT_SHIFT)
INF = tl.constexpr(float("inf"))

_CODES = {"uint4": UINT4.value, "int8": INT8.value, "fp8": FP8.value, "uint3": UINT3.value, "uint2": UINT2.value}
_EDGES = tuple(SCALE_EDGE.get(name, 0.0) for name in _CODES)
_WORDS = {"scale_min": SCALE_MIN.value, "scale_zero": SCALE_ZERO.value, "scale": SCALE.value}


def format_constants(fmt: QuantFormat) -> tuple[int, int]:
    """Return (CODE, WORD), the constants by which kernels know a format."""
    return _CODES[fmt.code], _WORDS[fmt.word]


def read_word_bytes(fmt: QuantFormat) -> int:
    """Bytes of the words in which kernels read a row's codes: four values each, in the low plane of `uint3`."""
    return max(fmt.bits // 2, 1)


def read_dtype(fmt: QuantFormat) -> torch.dtype:
    """Return the dtype of those words."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[read_word_bytes(fmt)]


def write_word_bytes(fmt: QuantFormat) -> int:
    """Bytes of the words that `store_codes` stores."""
    return 4 if fmt.bits >= 4 else 1


@triton.constexpr_function
def code_bits(code: Any) -> int:
    """Bits of one code."""
    return (4, 8, 8, 3, 2)[code]


@triton.constexpr_function
def code_max(code: Any) -> float:
    """Largest unsigned code."""
    return 2.0 ** code_bits(code) - 1.0


@triton.constexpr_function
def edge(code: Any) -> float:
    """The row's range divided by the margin between its ends and the outermost codes."""
    return _EDGES[code]


@triton.constexpr_function
def is_nibble(code: Any) -> bool:
    """Whether codes are unpacked as `uint4`."""
    return code in (0, 3, 4)


@triton.constexpr_function
def code_unit(code: Any, asm: Any) -> float:
    """The factor that turns an unpacked even stream into code values."""
    return 256.0 if code == 2 else (16777216.0 if asm else 1.0)


@triton.constexpr_function
def odd_stream_gain(code: Any, asm: Any) -> float:
    """The further factor of the odd streams."""
    return 0.0625 if asm and is_nibble(code) else 1.0


@triton.constexpr_function
def code_offset(code: Any, asm: Any) -> float:
    """What unpacked streams hold too much: signed codes are unpacked as code + 128 where they become subnormals."""
    return 128.0 if asm and code == 1 else 0.0


@triton.jit
def unpack_streams(x, CODE: tl.constexpr, ASM: tl.constexpr):
    """Unpack words of four codes into four float16 tensors of the same shape (see the module's text)."""
    if is_nibble(CODE):
        if CODE != UINT4:
            x = _widen(x, CODE)
        if ASM:
            return tl.inline_asm_elementwise(
                """
                {
                .reg .b32 h;
                and.b32 $0, $4, 0x000f000f;
                and.b32 $1, $4, 0x00f000f0;
                shr.u32 h, $4, 8;
                and.b32 $2, h, 0x000f000f;
                and.b32 $3, h, 0x00f000f0;
                }""",
                "=r,=r,=r,=r,r",
                [x],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            return (
                (x & 0xF).to(tl.float16),
                ((x >> 4) & 0xF).to(tl.float16),
                ((x >> 8) & 0xF).to(tl.float16),
                ((x >> 12) & 0xF).to(tl.float16),
            )
    elif CODE == INT8:
        if ASM:
            return tl.inline_asm_elementwise(
                """
                {
                .reg .b32 a, b, t;
                xor.b32 a, $4, 0x80808080;
                xor.b32 b, $5, 0x80808080;
                prmt.b32 t, a, b, 0x4400;
                and.b32 $0, t, 0x00ff00ff;
                prmt.b32 t, a, b, 0x5511;
                and.b32 $1, t, 0x00ff00ff;
                prmt.b32 t, a, b, 0x6622;
                and.b32 $2, t, 0x00ff00ff;
                prmt.b32 t, a, b, 0x7733;
                and.b32 $3, t, 0x00ff00ff;
                }""",
                "=&r,=&r,=&r,=&r,r,r",
                [x],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            return (
                ((x << 24) >> 24).to(tl.float16),
                ((x << 16) >> 24).to(tl.float16),
                ((x << 8) >> 24).to(tl.float16),
                (x >> 24).to(tl.float16),
            )
    else:
        if ASM:
            return tl.inline_asm_elementwise(
                """
                {
                .reg .b32 s, t;
                prmt.b32 t, $4, $5, 0x4400;
                and.b32 s, t, 0x80008000;
                shr.u32 t, t, 1;
                and.b32 t, t, 0x3f803f80;
                or.b32 $0, s, t;
                prmt.b32 t, $4, $5, 0x5511;
                and.b32 s, t, 0x80008000;
                shr.u32 t, t, 1;
                and.b32 t, t, 0x3f803f80;
                or.b32 $1, s, t;
                prmt.b32 t, $4, $5, 0x6622;
                and.b32 s, t, 0x80008000;
                shr.u32 t, t, 1;
                and.b32 t, t, 0x3f803f80;
                or.b32 $2, s, t;
                prmt.b32 t, $4, $5, 0x7733;
                and.b32 s, t, 0x80008000;
                shr.u32 t, t, 1;
                and.b32 t, t, 0x3f803f80;
                or.b32 $3, s, t;
                }""",
                "=&r,=&r,=&r,=&r,r,r",
                [x],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            return (
                _float8_to_float16(x),
                _float8_to_float16(x >> 8),
                _float8_to_float16(x >> 16),
                _float8_to_float16(x >> 24),
            )


@triton.jit
def join_planes(low, row_ptr, column, D: tl.constexpr):
    """Put the high bits of `uint3` codes above the bytes of the low plane: `low` was loaded from row_ptr + column."""
    high = tl.load(row_ptr + (D // 4 + column // 2), mask=column < D // 4, other=0)
    return low.to(tl.int32) | (((high.to(tl.int32) >> (column % 2 * 4)) & 0xF) << 8)


@triton.jit
def _widen(x, CODE: tl.constexpr):
    """Widen four codes, their two low bits side by side in bits 7..0 and `uint3`'s high ones in bits 11..8, to `uint4`."""
    x = x.to(tl.int32)
    low = x & 0xFF
    low = (low | (low << 4)) & 0x0F0F
    low = (low | (low << 2)) & 0x3333
    if CODE == UINT3:
        high = x >> 8
        high = (high | (high << 6)) & 0x0303
        low = low | (((high | (high << 3)) & 0x1111) << 2)
    return low.to(tl.int16)


@triton.jit
def _float8_to_float16(x):
    """The low byte of int32 words as e4m3, times 2^-8: the exponent bias moves from 7 to 15 and subnormals stay right."""
    return (((x & 0x80) << 8) | ((x & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def split_streams(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Split x [ROWS, 4 WIDTH] into its four streams [ROWS, WIDTH]: column 4 w + s becomes column w of stream s."""
    even, odd = tl.split(tl.reshape(x, (ROWS, WIDTH, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def join_streams(x0, x1, x2, x3, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Invert `split_streams`."""
    return tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), (ROWS, 4 * WIDTH))


@triton.jit
def unpack_scale_words(words, CODE: tl.constexpr, WORD: tl.constexpr, ASM: tl.constexpr):
    """Return (scale, bias) float32 of int32 words, for codes as `unpack_streams` gives them: y = scale * stream + bias."""
    if WORD == SCALE_MIN:
        scale = (words & -65536).to(tl.float32, bitcast=True)
        bias = (words << 16).to(tl.float32, bitcast=True)
    elif WORD == SCALE_ZERO:
        scale = (words & -16).to(tl.float32, bitcast=True)
        bias = -(words & 15).to(tl.float32) * scale
    else:
        scale = words.to(tl.float32, bitcast=True)
        bias = -code_offset(CODE, ASM) * scale
    return scale, bias


@triton.jit
def unpack_scale_ratio(words, CODE: tl.constexpr, WORD: tl.constexpr, ASM: tl.constexpr):
    """Return (scale, ratio, poison) with y = scale * (stream + ratio), scale > 0 finite, and poison 0, or NaN where y is.

    A scale of 0 (a constant row) is replaced by one so small beside the bias that stored codes cannot show.
    """
    scale, bias = unpack_scale_words(words, CODE, WORD, ASM)
    finite = (tl.abs(scale) < INF) & (tl.abs(bias) < INF)
    scale = tl.where(finite, scale, 0.0)
    bias = tl.where(finite, bias, 0.0)
    if WORD == SCALE_MIN:
        scale = tl.maximum(scale, tl.maximum(tl.abs(bias) * 0.0009765625, FLOOR))
        ratio = bias / scale
    elif WORD == SCALE_ZERO:
        scale = tl.maximum(scale, FLOOR)
        ratio = -(words & 15).to(tl.float32)
    else:
        scale = tl.maximum(scale, FLOOR)
        ratio = tl.zeros_like(scale) - code_offset(CODE, ASM)
    return scale, ratio, tl.where(finite, 0.0, float("nan"))


@triton.jit
def encode_rows(y, columns, D: tl.constexpr, CODE: tl.constexpr, WORD: tl.constexpr, KEY: tl.constexpr):
    """Quantize rotated rows; the same arithmetic as `nibblekv.formats.encode_rows`.

    y: [ROWS, DP] float32, columns [DP] their dimension; columns from D on are padding. KEY: whether they are keys.
    Returns codes [ROWS, DP] int32 and words [ROWS] int32.
    """
    real = (columns < D)[None, :]
    broken = tl.max(tl.where(real & ~(tl.abs(y) < INF), 1, 0), 1) > 0
    y = tl.where(broken[:, None], 0.0, y)
    lo = tl.min(tl.where(real, y, INF), 1)
    hi = tl.max(tl.where(real, y, -INF), 1)
    if WORD == SCALE_MIN:
        margin = tl.math.div_rn(hi - lo, edge(CODE))
        bias = _round_bfloat16_down(lo + margin)
        scale = -_round_bfloat16_down(-tl.math.div_rn(hi - margin - bias, code_max(CODE)))
        scale = tl.where(scale < FLOOR, 0.0, scale)
        inverse = tl.where(scale > 0, tl.math.div_rn(1.0, tl.where(scale > 0, scale, 1.0)), 0.0)
        codes = (y - bias[:, None]) * inverse[:, None]
        if KEY:
            scale, bias = _refit(codes, scale, bias, real, D, CODE)
        words = scale.to(tl.int32, bitcast=True) | ((bias.to(tl.int32, bitcast=True) >> 16) & 0xFFFF)
        nan_word = 0x7FC07FC0
    elif WORD == SCALE_ZERO:
        lo = tl.minimum(lo, 0.0)
        hi = tl.maximum(hi, 0.0)
        scale = tl.maximum(tl.math.div_rn(hi - lo, 15.0), FLOOR)
        zero_point = tl.minimum(tl.maximum(tl.floor(tl.math.div_rn(-lo, scale) + 0.5), 0.0), 15.0)
        codes = y * tl.math.div_rn(1.0, scale)[:, None] + zero_point[:, None]
        words = (scale.to(tl.int32, bitcast=True) & -16) | zero_point.to(tl.int32)
        nan_word = 0x7FC00000
    else:
        limit = 127.0 if CODE == INT8 else 448.0
        scale = tl.maximum(tl.math.div_rn(tl.maximum(hi, -lo), limit), FLOOR)
        codes = y * tl.math.div_rn(1.0, scale)[:, None]
        words = scale.to(tl.int32, bitcast=True)
        nan_word = 0x7FC00000
    broken = broken | ~((tl.abs(scale) < INF) & (tl.abs(hi - lo) < INF))
    codes = tl.where(broken[:, None], 0.0, codes)
    if is_nibble(CODE):
        integers = tl.minimum(tl.maximum(tl.floor(codes + 0.5), 0.0), code_max(CODE)).to(tl.int32)
    elif CODE == INT8:
        rounded = tl.where(codes < 0, -tl.floor(0.5 - codes), tl.floor(codes + 0.5))
        integers = tl.minimum(tl.maximum(rounded, -128.0), 127.0).to(tl.int32) & 0xFF
    else:
        integers = encode_float8(codes)
    integers = tl.where(real, integers, 0)
    return integers, tl.where(broken, nan_word, words)


@triton.jit
def _refit(steps, scale, bias, real, D: tl.constexpr, CODE: tl.constexpr):
    """Return the scale and bias with which the rounded codes of keys are unbiased along the keys themselves."""
    # Sums of products in one pass, about the middle code: the mean is not known yet, and rows would be held twice.
    middle: tl.constexpr = code_max(CODE) / 2
    codes = tl.minimum(tl.maximum(tl.floor(steps + 0.5), 0.0), code_max(CODE)) - middle
    codes = tl.where(real, codes, 0.0)
    steps = tl.where(real, steps - middle, 0.0)
    steps_mean = tl.sum(steps, 1) * (1.0 / D)
    codes_mean = tl.sum(codes, 1) * (1.0 / D)
    variance = tl.sum(steps * steps, 1) - steps_mean * steps_mean * D
    covariance = tl.sum(codes * steps, 1) - codes_mean * steps_mean * D
    related = covariance >= COVARIANCE
    new_scale = _round_bfloat16_nearest(scale * tl.math.div_rn(variance, tl.where(related, covariance, 1.0)))
    exact_bias = bias + scale * (steps_mean + middle) - new_scale * (codes_mean + middle)
    new_bias = _round_bfloat16_nearest(exact_bias)
    taken = related & (tl.abs(new_scale - scale) * code_max(CODE) <= scale)
    taken = taken & (tl.abs(new_bias - exact_bias) <= scale * SHIFT)
    return tl.where(taken, new_scale, scale), tl.where(taken, new_bias, bias)


@triton.jit
def _round_bfloat16_nearest(x):
    """Round float32, not NaN, to the nearest bfloat16 value."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _round_bfloat16_down(x):
    """Round float32 towards -inf to a bfloat16 value."""
    bits = x.to(tl.int32, bitcast=True)
    step = tl.where(((bits & 0xFFFF) != 0) & (x < 0), 0x10000, 0)
    return ((bits & -65536) + step).to(tl.float32, bitcast=True)


@triton.jit
def encode_float8(x):
    """Round float32 to the nearest e4m3 (ties to even, saturated at 448, NaN kept); return its bits as int32."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = (bits + (-0x3C000000 + 0x7FFFF) + ((bits >> 20) & 1)) >> 20
    # Below 2^-6 codes are multiples of 2^-9: adding 2^14 makes float32 rounding do the work.
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    return sign | tl.where(x == x, code, 0x7F)


@triton.jit
def store_codes(
    codes, cache_ptr, target, keep, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, CODE: tl.constexpr
):  # fmt: skip
    """Pack codes [ROWS, DP] int32 and store them where `keep`; target [ROWS] counts words of `write_word_bytes`."""
    if code_bits(CODE) >= 4:
        _store_plane(codes, cache_ptr + target, keep, D, DP, ROWS, code_bits(CODE), 32 // code_bits(CODE))
    else:
        target = cache_ptr.to(tl.pointer_type(tl.uint8)) + target
        _store_plane(codes & 3, target, keep, D, DP, ROWS, 2, 4)
        if CODE == UINT3:
            _store_plane(codes >> 2, target + D // 4, keep, D, DP, ROWS, 1, 8)


@triton.jit
def _store_plane(
    codes, target, keep, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, PER_WORD: tl.constexpr
):  # fmt: skip
    """Store PER_WORD codes of BITS bits to a word, the first dimension lowest."""
    word = tl.arange(0, DP // PER_WORD)
    shift = tl.arange(0, PER_WORD) * BITS
    packed = tl.sum(tl.reshape(codes, (ROWS, DP // PER_WORD, PER_WORD)) << shift[None, None, :], 2)
    mask = keep[:, None] & (word < D // PER_WORD)[None, :]
    tl.store(target[:, None] + word[None, :], packed.to(target.dtype.element_ty), mask=mask)
