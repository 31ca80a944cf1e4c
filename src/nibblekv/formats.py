"""Quantized formats: one table row each, and the only torch code that knows their bits.

A format stores one row (one token of one KV head, `head_size` values) as `row_bytes(head_size)` bytes of codes and one
32-bit scale word. Every format decodes by the same affine formula, in the rotated domain:

    y_hat[d] = scale * code[d] + bias        (scale, bias) = unpack_scale_word(word)

and a word of zero decodes to (0, 0), so a zeroed page reads as zeros. `docs/format.md` is the normative text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from nibblekv.rotation import RotationKind

__all__ = ["FORMATS", "QuantFormat", "decode_rows", "encode_rows", "get_format", "unpack_codes", "unpack_scale_word"]

CodeKind = Literal["uint4", "uint3", "uint2", "int8", "fp8"]
WordKind = Literal["scale_zero", "scale_min", "scale"]
PageKind = Literal["interleaved", "planar"]
Role = Literal["key", "value"]

SCALE_WORD_BYTES = 4
MIN_HEAD_SIZE, MAX_HEAD_SIZE, HEAD_SIZE_MULTIPLE = 32, 512, 8

_CODE_BITS = {"uint4": 4, "uint3": 3, "uint2": 2, "int8": 8, "fp8": 8}
_CODE_MAX = {"uint4": 15.0, "uint3": 7.0, "uint2": 3.0, "int8": 127.0, "fp8": 448.0}
# Bits of the planes that a row of unsigned codes is cut into, the codes' lowest bits first: bytes hold whole parts of codes.
_PLANES = {"uint4": (4,), "uint3": (2, 1), "uint2": (2,)}
_ZERO_POINT_MASK = 0xF
_HIGH_HALF = -0x10000  # 0xffff0000 as a signed 32-bit integer
_NAN_WORD = {"scale_zero": 0x7FC00000, "scale": 0x7FC00000, "scale_min": 0x7FC07FC0}
# A scale below this is stored as 0 (scale_min) or raised to it (the fp32 words): its reciprocal would leave float32.
SCALE_FLOOR = 2.0**-100
# The outermost codes of `scale_min` lie inside the row's range by one such part of it: a quarter of a step for `uint4`, else
# half. Steps are then 3, 12 and 25 % smaller, and the outermost values still no further than half a step from their codes.
EDGE = {"uint4": 62.0, "uint3": 16.0, "uint2": 8.0}
# The refit of a key is dropped if all its codes are equal, so that their covariance with the row, in steps squared, is below
# the first of these but for rounding; and if rounding its bias would shift it by more than the second, in steps.
REFIT_COVARIANCE, REFIT_SHIFT = 0.5, 0.125


@dataclass(frozen=True)
class QuantFormat:
    """One way to store a row of keys or values.

    Attributes:
        name: what a user types.
        version: raised whenever the meaning of stored bytes changes; peers compare it before they exchange pages.
        code: how one value is stored. `uint4`: two to a byte, even dimension in the low nibble. `uint2`: four to a byte.
            `uint3`: the two low bits of all values as `uint2`, then their high bits, eight to a byte.
        word: what the 32-bit scale word holds (see `unpack_scale_word`).
        rotation: applied to the head vector before coding, undone after decoding (see `rotation.py`).
        page: the page arrangement that the format uses unless a layout asks for the other (see `layout.py`).
        summary: one line for people.
    """

    name: str
    version: int
    code: CodeKind
    word: WordKind
    rotation: RotationKind
    page: PageKind
    summary: str

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return _CODE_BITS[self.code]

    @property
    def code_max(self) -> float:
        """Largest code value."""
        return _CODE_MAX[self.code]

    def row_bytes(self, head_size: int) -> int:
        """Bytes of the codes of one row, without its scale word."""
        return head_size * self.bits // 8

    def bits_per_value(self, head_size: int) -> float:
        """Stored bits per value, scale word included."""
        return 8 * (self.row_bytes(head_size) + SCALE_WORD_BYTES) / head_size


FORMATS: dict[str, QuantFormat] = {
    f.name: f
    for f in (
        QuantFormat("int4", 1, "uint4", "scale_min", "full", "planar", "4-bit, whole-head rotation, 16-bit scale and min"),
        QuantFormat("int3", 1, "uint3", "scale_min", "full", "planar", "3-bit, otherwise as int4"),
        QuantFormat("int2", 1, "uint2", "scale_min", "full", "planar", "2-bit, otherwise as int4"),
        QuantFormat(
            "int4_per_token_head", 1, "uint4", "scale_zero", "block", "interleaved", "4-bit, the bytes that vLLM writes"
        ),
        QuantFormat("int8_per_token_head", 1, "int8", "scale", "none", "interleaved", "8-bit integers, symmetric"),
        QuantFormat("fp8_per_token_head", 1, "fp8", "scale", "none", "interleaved", "8-bit floats (e4m3), symmetric"),
    )
}


def get_format(format: str | QuantFormat) -> QuantFormat:
    """Return the table row of a name (a row passes through).

    Raises:
        ValueError: the name is not in `FORMATS`.
    """
    if isinstance(format, QuantFormat):
        return format
    if format not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {format!r}")
    return FORMATS[format]


def check_head_size(head_size: int, name: str = "head_size") -> None:
    """Raise ValueError unless a head of this size can be stored."""
    if not (MIN_HEAD_SIZE <= head_size <= MAX_HEAD_SIZE and head_size % HEAD_SIZE_MULTIPLE == 0):
        raise ValueError(
            f"{name}: expected a multiple of {HEAD_SIZE_MULTIPLE} from {MIN_HEAD_SIZE} to {MAX_HEAD_SIZE}, got {head_size}"
        )


def encode_rows(y: torch.Tensor, fmt: QuantFormat, role: Role = "value") -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rotated rows.

    A row that holds NaN or Inf, or whose scale leaves float32, is stored as code 0 with a NaN scale word, so that it decodes
    to NaN in every dimension and nothing else does.

    Args:
        y: [..., head_size] float32, in the rotated domain.
        role: what the rows are. Codes do not depend on it; the scale words of keys do, in `scale_min` formats (`_refit`).

    Returns:
        codes: [..., row_bytes] uint8.
        words: [...] int32, the scale words.
    """
    lo, hi = y.amin(-1), y.amax(-1)
    if fmt.word == "scale_min":
        margin = (hi - lo) / EDGE[fmt.code]
        bias = _round_bfloat16(lo + margin, up=False)
        span = hi - margin - bias
        scale = _round_bfloat16(span / fmt.code_max, up=True)
        scale = torch.where(scale < SCALE_FLOOR, torch.zeros_like(scale), scale)
        inverse = torch.where(scale > 0, 1.0 / scale, torch.zeros_like(scale))
        codes = (y - bias[..., None]) * inverse[..., None]
        if role == "key":
            scale, bias = _refit(codes, scale, bias, fmt)
        words = scale.view(torch.int32) | ((bias.view(torch.int32) >> 16) & 0xFFFF)
    elif fmt.word == "scale_zero":
        # The range always includes zero: a zero point clamped to 0..15 cannot express a row that does not straddle it.
        lo, hi = lo.clamp(max=0.0), hi.clamp(min=0.0)
        span = hi - lo
        scale = (span / fmt.code_max).clamp(min=SCALE_FLOOR)
        zero_point = torch.floor(-lo / scale + 0.5).clamp(0, fmt.code_max)
        codes = y * (1.0 / scale)[..., None] + zero_point[..., None]
        words = (scale.view(torch.int32) & ~_ZERO_POINT_MASK) | zero_point.nan_to_num(0.0).to(torch.int32)
    else:
        span = torch.maximum(hi, -lo)
        scale = (span / fmt.code_max).clamp(min=SCALE_FLOOR)
        codes = y * (1.0 / scale)[..., None]
        words = scale.view(torch.int32)
    bad = ~torch.isfinite(span)  # NaN and Inf of the row reach it through min and max, which propagate NaN
    words = torch.where(bad, torch.full_like(words, _NAN_WORD[fmt.word]), words)
    codes = torch.where(bad[..., None], torch.zeros_like(codes), codes)
    return _pack_codes(codes, fmt), words


def decode_rows(codes: torch.Tensor, words: torch.Tensor, fmt: QuantFormat) -> torch.Tensor:
    """Return [..., head_size] float32 in the rotated domain from codes [..., row_bytes] uint8 and words [...] int32."""
    scale, bias = unpack_scale_word(words, fmt)
    return unpack_codes(codes, fmt) * scale[..., None] + bias[..., None]


def unpack_codes(codes: torch.Tensor, fmt: QuantFormat) -> torch.Tensor:
    """Return the code values [..., head_size] float32 of packed codes [..., row_bytes] uint8."""
    if fmt.code in _PLANES:
        head_size = codes.shape[-1] * 8 // fmt.bits
        planes = _PLANES[fmt.code]
        values, offset = torch.zeros_like(codes[..., :1]), 0
        for bits, plane in zip(planes, codes.split([head_size * bits // 8 for bits in planes], -1), strict=True):
            shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
            values = values | (((plane[..., None] >> shifts) & (1 << bits) - 1) << offset).flatten(-2)
            offset += bits
        return values.to(torch.float32)
    return codes.view(torch.int8 if fmt.code == "int8" else torch.float8_e4m3fn).to(torch.float32)


def unpack_scale_word(words: torch.Tensor, fmt: QuantFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (scale, bias), each [...] float32, of int32 scale words.

    scale_min: bits 31..16 are `scale` and bits 15..0 are `bias`, both bfloat16.
    scale_zero: bits 3..0 are the zero point z, the word with those bits cleared is `scale` as float32; bias = -z * scale.
    scale: the word is `scale` as float32; bias = 0.
    """
    if fmt.word == "scale_min":
        return (words & _HIGH_HALF).view(torch.float32), (words << 16).view(torch.float32)
    if fmt.word == "scale_zero":
        scale = (words & ~_ZERO_POINT_MASK).view(torch.float32)
        return scale, -(words & _ZERO_POINT_MASK).to(torch.float32) * scale
    return words.view(torch.float32), torch.zeros(words.shape, dtype=torch.float32, device=words.device)


def _refit(
    steps: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, fmt: QuantFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and bias with which the rounded codes of a key are unbiased along the key itself.

    Rounding adds noise to a row, so a row fitted to its codes by least squares, or nearly so, is too short along itself by
    the noise's part, and a query that looks for the key sees its score too near the mean. The scale that undoes this is
    var(y) / cov(code, y). A pair that would move codes too far is not taken (docs/format.md).

    Args:
        steps: [..., head_size] float32, (y - bias) / scale: the codes before they are rounded.
    """
    # Sums in float64: their order then decides no bit.
    codes, steps = _round_codes(steps, fmt).double(), steps.double()
    scale, bias = scale.double(), bias.double()
    steps_mean, codes_mean = steps.mean(-1), codes.mean(-1)
    centred = steps - steps_mean[..., None]
    covariance = (centred * (codes - codes_mean[..., None])).sum(-1)
    new_scale = (scale * ((centred * centred).sum(-1) / covariance)).bfloat16().double()
    exact_bias = bias + scale * steps_mean - new_scale * codes_mean
    new_bias = exact_bias.bfloat16().double()
    # Comparisons with NaN are false.
    taken = (covariance >= REFIT_COVARIANCE) & ((new_scale - scale).abs() * fmt.code_max <= scale)
    taken = taken & ((new_bias - exact_bias).abs() <= scale * REFIT_SHIFT)
    return torch.where(taken, new_scale, scale).float(), torch.where(taken, new_bias, bias).float()


def _round_codes(codes: torch.Tensor, fmt: QuantFormat) -> torch.Tensor:
    return torch.floor(codes + 0.5).clamp(0, fmt.code_max)


def _pack_codes(codes: torch.Tensor, fmt: QuantFormat) -> torch.Tensor:
    if fmt.code in _PLANES:
        values = _round_codes(codes, fmt).to(torch.uint8)
        planes = []
        for bits in _PLANES[fmt.code]:
            shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
            planes.append(((values & (1 << bits) - 1).unflatten(-1, (-1, 8 // bits)) << shifts).sum(-1, dtype=torch.uint8))
            values = values >> bits
        return torch.cat(planes, -1)
    if fmt.code == "int8":
        rounded = torch.trunc(codes + torch.copysign(torch.full_like(codes, 0.5), codes))
        return rounded.clamp(-128, fmt.code_max).to(torch.int8).view(torch.uint8)
    return codes.clamp(-fmt.code_max, fmt.code_max).to(torch.float8_e4m3fn).view(torch.uint8)


def _round_bfloat16(x: torch.Tensor, up: bool) -> torch.Tensor:
    """Round float32 to a bfloat16 value (returned as float32), towards +inf or -inf."""
    bits = x.contiguous().view(torch.int32)
    truncated = bits & _HIGH_HALF  # towards zero
    away = (bits & 0xFFFF) != 0
    step = away & ((x > 0) if up else (x < 0))
    return torch.where(step, truncated + 0x10000, truncated).view(torch.float32)
