"""Codecs: exact bytes on rotated rows, error bounds on adversarial ones, one policy for NaN and Inf."""

from __future__ import annotations

import math
import struct
from fractions import Fraction as F

import numpy as np
import pytest
import torch
from batches import NORMAL_ERROR
from hypothesis import given, settings
from hypothesis import strategies as st

from nibblekv import FORMATS, QuantFormat, dequantize, quantize
from nibblekv.formats import decode_rows, encode_rows, get_format, unpack_codes, unpack_scale_word
from nibblekv.rotation import rotation_signs

D = 32
UINT4 = [f.name for f in FORMATS.values() if f.code == "uint4"]
UINT = [f.name for f in FORMATS.values() if f.code.startswith("uint")]
ALL = list(FORMATS)
NAN_WORDS = {
    "int4": 0x7FC0_7FC0,
    "int4_per_token_head": 0x7FC0_0000,
    "int3": 0x7FC0_7FC0,
    "int2": 0x7FC0_7FC0,
    "int8_per_token_head": 0x7FC0_0000,
    "fp8_per_token_head": 0x7FC0_0000,
}


def encode(row: list[float], name: str) -> tuple[bytes, int]:
    codes, words = encode_rows(torch.tensor(row, dtype=torch.float32), FORMATS[name])
    return bytes(codes.tolist()), int(words) & 0xFFFFFFFF


def test_table_states_bits_and_versions():
    """Catches a changed row of the table: peers compare the version before they exchange pages."""
    table = {f.name: (f.version, f.bits, f.row_bytes(128), f.bits_per_value(128)) for f in FORMATS.values()}
    assert table["int4"] == (1, 4, 64, 4.25)
    assert table["int4_per_token_head"] == (1, 4, 64, 4.25)
    assert table["int3"] == (1, 3, 48, 3.25)
    assert table["int2"] == (1, 2, 32, 2.25)
    assert table["int8_per_token_head"] == (1, 8, 128, 8.25)
    assert table["fp8_per_token_head"] == (1, 8, 128, 8.25)
    assert all(name == f.name and f.summary for name, f in FORMATS.items())


def test_get_format_passes_rows_and_refuses_unknown_names():
    assert get_format("int4") is FORMATS["int4"] is get_format(FORMATS["int4"])
    with pytest.raises(ValueError, match=r"format: expected one of int4, .*, got 'int3x'"):
        get_format("int3x")


# --- exact bytes -------------------------------------------------------------------------------------------------------


def test_int4_bytes_of_a_row_that_bfloat16_holds_exactly():
    """Catches swapped nibbles, swapped halves of the word and a rounded scale: min -1 = 0xbf80, scale 1/8 = 0x3e00.

    The row reaches from a quarter of a step below code 0 to a quarter of a step above code 15.
    """
    values = [c % 16 for c in range(D)]
    row = [-1.0 + 0.125 * c for c in values]
    row[0], row[15] = row[0] - 1 / 32, row[15] + 1 / 32
    packed = bytes(values[i] | values[i + 1] << 4 for i in range(0, D, 2))
    assert encode(row, "int4") == (packed, 0x3E00_BF80)


def test_int4_rounds_min_down_and_scale_up_to_bfloat16():
    """Catches rounding to nearest: min or max would fall outside the codes' range and be clamped.

    The margin is 1.877 / 62 = 0.030274: -0.970726 goes down to -0.97265625 (0xbf79), and (0.845726 + 0.97265625) / 15 =
    0.121225 goes up to 0.12158203 (0x3df9).
    """
    _, word = encode([-1.001, 0.876] + [0.0] * (D - 2), "int4")
    assert word == 0x3DF9_BF79


def test_int4_positive_row_keeps_its_minimum():
    """Catches a range that is forced to include zero (the shipped format's way): 5..6.875 has scale 1/8, min 5 = 0x40a0."""
    row = [5.0 + 0.125 * (c % 16) for c in range(D)]
    row[0], row[15] = row[0] - 1 / 32, row[15] + 1 / 32
    assert encode(row, "int4")[1] == 0x3E00_40A0


@pytest.mark.parametrize("name", ["int2", "int3"])
@pytest.mark.parametrize("head_size", [D, 40])
def test_low_bit_bytes_of_a_row_that_bfloat16_holds_exactly(name: str, head_size: int):
    """Catches planes in another order, codes in another order inside a byte, and padding: min -1 = 0xbf80, scale 1/8.

    The row reaches half a step beyond the outermost codes. Also of a head size whose row is not a whole number of words: 40
    values of 3 bits are 15 bytes, of 2 bits 10.
    """
    most = int(FORMATS[name].code_max)
    values = [(5 * d) % (most + 1) for d in range(head_size)]
    row = [-1.0 + 0.125 * c for c in values]
    row[values.index(0)] -= 1 / 16
    row[values.index(most)] += 1 / 16
    low = bytes(sum((values[i + k] & 3) << 2 * k for k in range(4)) for i in range(0, head_size, 4))
    high = bytes(sum((values[i + k] >> 2) << k for k in range(8)) for i in range(0, head_size, 8))
    assert encode(row, name) == (low + high * (name == "int3"), 0x3E00_BF80)


@pytest.mark.parametrize(("fraction", "code"), [(2.4375, 2), (2.5, 3), (2.5625, 3), (14.5, 15), (0.5, 1)])
def test_int4_rounds_half_up(fraction: float, code: int):
    """Catches rounding half to even: 2.5 and 0.5 steps above the minimum become 3 and 1."""
    codes, _ = encode([-1.0 - 1 / 32, 0.875 + 1 / 32, -1.0 + 0.125 * fraction] + [-1.0] * (D - 3), "int4")
    assert codes[1] & 0xF == code


def test_shipped_int4_word_hides_the_zero_point_in_the_scale():
    """Catches a zero point in other bits: range -2..1.75 has scale 1/4 = 0x3e800000 and zero point 8."""
    values = [c % 16 for c in range(D)]
    row = [0.25 * (c - 8) for c in values]
    packed = bytes(values[i] | values[i + 1] << 4 for i in range(0, D, 2))
    assert encode(row, "int4_per_token_head") == (packed, 0x3E80_0008)


def test_shipped_int4_clears_low_bits_of_a_scale_that_has_some():
    scale = np.float32(1.75 + 2.13) / np.float32(15)
    bits = struct.unpack("<I", struct.pack("<f", scale))[0]
    zero_point = math.floor(2.13 / float(scale) + 0.5)
    _, word = encode([-2.13, 1.75] + [0.0] * (D - 2), "int4_per_token_head")
    assert bits & 0xF  # else the row tests nothing
    assert word == (bits & ~0xF) | zero_point


@pytest.mark.parametrize(("row", "word"), [([15.0, 7.0], 0x3F80_0000), ([-15.0, -7.0], 0x3F80_000F)])
def test_shipped_int4_range_includes_zero(row: list[float], word: int):
    """Case 1. Catches a zero point clamped to 0..15 with scale (max - min) / 15, which reads 15 and 7 back as 8 and 0."""
    row = row + [row[0]] * (D - 2)
    codes, words = encode_rows(torch.tensor(row), FORMATS["int4_per_token_head"])
    assert int(words) & 0xFFFFFFFF == word
    assert decode_rows(codes, words, FORMATS["int4_per_token_head"]).tolist() == row


def test_int8_rounds_half_away_from_zero():
    codes, word = encode([127.0, 2.5, -2.5, 3.4, -127.0] + [0.0] * (D - 5), "int8_per_token_head")
    assert word == 0x3F80_0000
    assert np.frombuffer(codes, np.int8)[:5].tolist() == [127, 3, -3, 3, -127]


def test_fp8_is_e4m3_rounded_to_even():
    codes, word = encode([448.0, 1.0, -1.0, 17.0, 19.0, 2.0**-9] + [0.0] * (D - 6), "fp8_per_token_head")
    assert word == 0x3F80_0000
    assert codes[:6] == bytes([0x7E, 0x38, 0xB8, 0x58, 0x5A, 0x01])


@pytest.mark.parametrize("name", ALL)
def test_every_code_decodes_by_the_affine_formula(name: str):
    """Catches a decoder that knows another formula than scale * code + bias."""
    fmt = FORMATS[name]
    packed = torch.arange(384 if fmt.bits == 3 else 256).to(torch.uint8)  # every byte in every plane
    word = torch.tensor(
        {"scale_min": 0x3E00_BF80, "scale_zero": 0x3E80_0008, "scale": 0x3E80_0000}[fmt.word], dtype=torch.int32
    )
    scale, bias = {"scale_min": (0.125, -1.0), "scale_zero": (0.25, -2.0), "scale": (0.25, 0.0)}[fmt.word]
    if fmt.code == "uint4":
        values = [v for b in range(256) for v in (b & 15, b >> 4)]
    elif fmt.code == "uint2":
        values = [b >> shift & 3 for b in range(256) for shift in (0, 2, 4, 6)]
    elif fmt.code == "uint3":
        values = [(d // 4 >> 2 * (d % 4) & 3) + 4 * (d // 8 >> d % 8 & 1) for d in range(1024)]
    elif fmt.code == "int8":
        values = np.arange(256).astype(np.uint8).view(np.int8).tolist()
    else:
        values = [_e4m3(b) for b in range(256)]
    torch.testing.assert_close(
        decode_rows(packed, word, fmt), torch.tensor(values) * scale + bias, rtol=0, atol=0, equal_nan=True
    )


def _e4m3(byte: int) -> float:
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


@pytest.mark.parametrize("name", ALL)
def test_zeros_decode_to_zeros_and_encode_finite(name: str):
    """Case 17. Catches scales that need a fill before first use: zeroed bytes are rows of zeros."""
    fmt = FORMATS[name]
    codes, words = torch.zeros(3, fmt.row_bytes(D), dtype=torch.uint8), torch.zeros(3, dtype=torch.int32)
    assert torch.equal(decode_rows(codes, words, fmt), torch.zeros(3, D))
    assert torch.equal(decode_rows(*encode_rows(torch.zeros(3, D), fmt), fmt), torch.zeros(3, D))


# --- bounds on adversarial rows ------------------------------------------------------------------------------------------


@st.composite
def adversarial_rows(draw: st.DrawFn) -> torch.Tensor:
    """Draw [rows, head_size] rows that broke quantizers: constant, one-sided, spiked, offset, tiny beside huge."""
    head_size = draw(st.integers(4, 20)) * 8
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        row = rng.standard_normal(head_size)
        match draw(st.sampled_from(["normal", "constant", "positive", "negative", "spike", "offset", "two", "sparse"])):
            case "constant":
                row[:] = draw(st.sampled_from([-1.0, 1.0, 1 / 3]))
            case "positive":
                row = np.abs(row) + 0.5
            case "negative":
                row = -np.abs(row) - 0.5
            case "spike":
                row[draw(st.integers(0, head_size - 1))] = draw(st.sampled_from([-1e4, 100.0, 1e4]))
            case "offset":
                row = 1e-3 * row + draw(st.sampled_from([-7.7, 3.3]))
            case "two":
                row = np.where(row > 0, 1.0, -1e-3)
            case "sparse":
                row = np.where(row > 2, row, 0.0)
        rows.append(row / max(np.abs(row).max(), 1e-30) * 10.0 ** draw(st.floats(-8, math.log10(6e4))))
    return torch.tensor(np.array(rows), dtype=torch.float32)


@pytest.mark.parametrize("name", UINT)
@settings(deadline=None, max_examples=150, derandomize=True)
@given(rows=adversarial_rows())
def test_unsigned_error_is_at_most_half_a_step(name: str, rows: torch.Tensor):
    """Cases 1 and 7. Catches clamped zero points, ranges rounded inwards, truncation instead of rounding.

    Beyond half a step only float32 rounding: an ulp of the row, and 15 codes times the scale's low bits (1e-4 of a step).
    """
    fmt = FORMATS[name]
    codes, words = encode_rows(rows, fmt)
    scale, _ = unpack_scale_word(words, fmt)
    error = (rows - decode_rows(codes, words, fmt)).abs().amax(-1)
    ulp = 2.0**-23 * rows.abs().amax(-1)
    assert (error <= scale * 0.5001 + ulp).all()
    # and the step is no larger than the format promises, so that the bound means something
    lo, hi = rows.amin(-1), rows.amax(-1)
    if fmt.word == "scale_min":
        largest = (hi - lo + lo.abs() / 128) / fmt.code_max * (1 + 1 / 127) + ulp
    else:
        largest = (hi.clamp(min=0) - lo.clamp(max=0)) / 15 * (1 + 2.0**-22) + 2.0**-100
    assert (scale <= largest).all()


SCALE_MIN = [f.name for f in FORMATS.values() if f.word == "scale_min"]


def along(rows: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
    """Return the part of each row that is left of it along itself, both less their means: 1 where it is unbiased."""
    centred = rows.double() - rows.double().mean(-1, keepdim=True)
    return (centred * decoded.double()).sum(-1) / (centred * centred).sum(-1)


@pytest.mark.parametrize("name", SCALE_MIN)
@settings(deadline=None, max_examples=150, derandomize=True)
@given(rows=adversarial_rows())
def test_a_key_keeps_its_codes_and_is_unbiased_or_left_alone(name: str, rows: torch.Tensor):
    """Catches a pair fitted to other codes, one that leaves the documented bound, and a bias of a scale not yet rounded.

    The bound: half a step of rounding, what the mean moves by, the scale's change at most m steps away, the bias rounded.
    """
    fmt = FORMATS[name]
    codes, words = encode_rows(rows, fmt)
    key_codes, key_words = encode_rows(rows, fmt, "key")
    assert torch.equal(codes, key_codes)
    scale, _ = unpack_scale_word(words, fmt)
    key_scale, _ = unpack_scale_word(key_words, fmt)
    decoded = decode_rows(codes, key_words, fmt)
    ulp = 2.0**-22 * rows.abs().amax(-1)
    assert ((key_scale - scale).abs() * fmt.code_max <= scale).all()
    assert ((rows - decoded).abs().amax(-1) <= 17 / 8 * scale + ulp).all()
    assert ((rows - decoded).mean(-1).abs() <= torch.where(words == key_words, 0.5001, 0.1251) * scale + ulp).all()
    refitted = key_words != words
    rounding = 2.0**-8 + 4 * ulp.double() / (rows.double().std(-1) + 1e-300)
    assert ((along(rows, decoded) - 1).abs() <= rounding)[refitted].all()


@pytest.mark.parametrize("name", SCALE_MIN)
@pytest.mark.parametrize("head_size", [64, 128])
def test_keys_are_unbiased_where_values_are_short(name: str, head_size: int):
    """Catches a refit that is left out, and one whose guard lets through few rows. Values are short by 0.3 to 6 %."""
    fmt = FORMATS[name]
    x = torch.randn(500, head_size, generator=torch.Generator().manual_seed(3))
    codes, words = encode_rows(x, fmt)
    assert along(x, decode_rows(codes, words, fmt)).mean() < 1 - {4: 0.002, 3: 0.012, 2: 0.03}[fmt.bits]
    left = decode_rows(*encode_rows(x, fmt, "key"), fmt)
    scale, _ = unpack_scale_word(words, fmt)
    assert ((x - left).abs().amax(-1) < scale).all()  # as docs/format.md says of normal rows
    assert (along(x, left).mean() - 1).abs() < 5e-4
    assert ((along(x, left) - 1).abs() < 2.0**-8).float().mean() > 0.98


def test_a_key_is_refitted_by_the_documented_formulas():
    """Catches sums of y where those of codes belong: in exact fractions of a step, ends a quarter beyond codes 0 and 15."""
    steps = [F(-1, 4), F(61, 4)] + [F(75, 16), F(85, 16)] * (D // 2 - 1)
    codes = [0, 15] + [5, 5] * (D // 2 - 1)
    row = [-1.0 + 0.125 * float(s) for s in steps]
    mean, mean_code = sum(steps) / D, F(sum(codes), D)
    gain = sum((s - mean) ** 2 for s in steps) / sum((c - mean_code) * (s - mean) for c, s in zip(codes, steps, strict=True))
    scale = torch.tensor(0.125 * float(gain)).bfloat16()
    bias = torch.tensor(-1.0 + 0.125 * float(mean) - float(scale) * float(mean_code)).bfloat16()
    packed, words = encode_rows(torch.tensor(row), FORMATS["int4"], "key")
    assert unpack_codes(packed, FORMATS["int4"]).tolist() == codes
    assert unpack_scale_word(words, FORMATS["int4"]) == (float(scale), float(bias))
    assert float(scale) > 0.125


@pytest.mark.parametrize(
    "row", [[1 / 3] * D, [0.0] * D, [7.7 + 1e-3 * (-1) ** d for d in range(D)]], ids=["constant", "zeros", "far"]
)
@pytest.mark.parametrize("name", SCALE_MIN)
def test_a_key_that_no_pair_fits_better_is_stored_as_a_value(name: str, row: list[float]):
    """Catches 0 / 0, and a bias rounded to 2^-5 beside values that lie 2^-9 apart."""
    rows = torch.tensor([row])
    for mine, plain in zip(encode_rows(rows, FORMATS[name], "key"), encode_rows(rows, FORMATS[name]), strict=True):
        assert torch.equal(mine, plain)


@pytest.mark.parametrize("name", sorted(set(ALL) - set(SCALE_MIN)))
def test_other_words_do_not_depend_on_the_role(name: str):
    x = torch.randn(9, 64)
    assert all(torch.equal(a, b) for a, b in zip(quantize(x, name, role="key"), quantize(x, name), strict=True))


@settings(deadline=None, max_examples=100, derandomize=True)
@given(rows=adversarial_rows())
def test_int8_error_is_at_most_half_a_step_and_fp8_half_an_ulp(rows: torch.Tensor):
    """Catches a clipped maximum and a wrong rounding: e4m3 has 4 significant bits, and steps of 2^-9 below 2^-6."""
    absmax, ulp = rows.abs().amax(-1), 2.0**-23 * rows.abs().amax(-1)
    codes, words = encode_rows(rows, FORMATS["int8_per_token_head"])
    error = (rows - decode_rows(codes, words, FORMATS["int8_per_token_head"])).abs().amax(-1)
    assert (error <= absmax / 127 / 2 * 1.00001 + ulp).all()
    codes, words = encode_rows(rows, FORMATS["fp8_per_token_head"])
    error = (rows - decode_rows(codes, words, FORMATS["fp8_per_token_head"])).abs()
    bound = torch.maximum(rows.abs() / 16, (absmax / 448 * 2.0**-10)[:, None])
    assert (error <= bound * 1.00001 + ulp[:, None]).all()


@pytest.mark.parametrize("name", ALL)
@settings(deadline=None, max_examples=40, derandomize=True)
@given(data=st.data())
def test_bad_row_decodes_to_nan_and_no_other_row_changes(name: str, data: st.DataObject):
    """Case 3. Catches a min/max that drops NaN (a finite near-zero row), and NaN that leaks into a neighbour's bytes."""
    rows = data.draw(adversarial_rows())
    clean_codes, clean_words = encode_rows(rows, FORMATS[name], "key")
    bad = data.draw(st.integers(0, rows.shape[0] - 1))
    poisoned = rows.clone()
    for _ in range(data.draw(st.integers(1, 3))):
        poisoned[bad, data.draw(st.integers(0, rows.shape[1] - 1))] = data.draw(
            st.sampled_from([math.nan, math.inf, -math.inf])
        )
    codes, words = encode_rows(poisoned, FORMATS[name], "key")
    assert decode_rows(codes, words, FORMATS[name])[bad].isnan().all()
    assert not codes[bad].any()
    others = torch.arange(rows.shape[0]) != bad
    assert torch.equal(codes[others], clean_codes[others])
    assert torch.equal(words[others], clean_words[others])


@pytest.mark.parametrize(("name", "word"), list(NAN_WORDS.items()))
def test_nan_words_are_constants_of_the_format(name: str, word: int):
    assert encode([math.nan] + [1.0] * (D - 1), name) == (bytes(FORMATS[name].row_bytes(D)), word)


@pytest.mark.parametrize("name", UINT)
def test_range_beyond_float32_is_nan_and_not_a_finite_row(name: str):
    """Catches max - min that overflows to a scale of Inf and codes of 0 * Inf."""
    for role in ("key", "value"):
        codes, words = encode_rows(torch.tensor([[3e38, -3e38] + [0.0] * (D - 2)]), FORMATS[name], role)
        assert decode_rows(codes, words, FORMATS[name]).isnan().all()


# --- rotation and codec together -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("head_size", [32, 40, 64, 80, 96, 104, 112, 128, 192, 256, 512])
def test_normal_rows_keep_the_error_of_their_bits(name: str, head_size: int):
    """Case 4. Catches a head size whose rotation or packing is wrong, and a step that is larger than the bits allow."""
    x = torch.randn(64, head_size, generator=torch.Generator().manual_seed(head_size))
    low, high = NORMAL_ERROR[FORMATS[name].bits]
    for role in ("key", "value"):
        error = (dequantize(*quantize(x, name, role=role), name) - x).norm() / x.norm()
        assert low < error < high


@pytest.mark.parametrize("name", UINT4)
@pytest.mark.parametrize("head_size", [64, 96, 128])
def test_error_does_not_depend_on_the_channel_of_an_outlier(name: str, head_size: int):
    """Case 1. Catches the clamp failure: an outlier of 141 in channel 0 had an error of 0.60, in channel 1 of 0.046.

    Channel 0 may be better than the others (its column is constant, so it only moves the minimum), never worse.
    """
    noise = torch.randn(32, head_size, generator=torch.Generator().manual_seed(1))
    for outlier in (141.0, -141.0):
        x = noise + outlier * torch.eye(head_size)[:, None]  # [channel, 32, head_size]
        errors = ((dequantize(*quantize(x, name), name) - x).norm(dim=(1, 2)) / x.norm(dim=(1, 2))).tolist()
        assert max(errors) < 1.5 * sorted(errors)[head_size // 2]
        assert max(errors) < 0.1


@pytest.mark.parametrize("name", UINT4)
@pytest.mark.parametrize("channel", [0, 1, 31, 127])
def test_single_nonzero_channel_survives(name: str, channel: int):
    """Case 1. Catches the row of constant sign that a zero point clamped to 0..15 reads back as nearly nothing."""
    x = torch.zeros(1, 128)
    x[0, channel] = 3.0
    assert float((dequantize(*quantize(x, name), name) - x).norm()) < 0.1 * 3.0


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_largest_half_precision_rows_stay_finite(name: str, dtype: torch.dtype):
    """Case 2. Catches a rotation in fp16: 6e4 along the sign vector sums to 128 * 6e4 in channel 0."""
    random = torch.randn(128, generator=torch.Generator().manual_seed(0)).sign()
    x = (6e4 * torch.stack((torch.ones(128), random, rotation_signs("block", 128).float()))).to(dtype)
    decoded = dequantize(*quantize(x, name), name)
    assert decoded.isfinite().all()
    # the third row is one spike where it is rotated: all other values lie at the edge of the codes' range
    assert (decoded - x.float()).norm() / x.float().norm() < {2: 0.95, 3: 0.5}.get(FORMATS[name].bits, 0.15)


def test_biased_keys_lose_precision_in_4_bits_and_not_in_8():
    """Case 7. Qwen2-like keys: a channel bias of norm 800 under a signal of norm 8, which is all that softmax sees.

    Documents why such keys want `int8_per_token_head` with `int4` values: the step of a 4-bit row grows with the bias.
    """
    gen = torch.Generator().manual_seed(0)
    bias = torch.randn(128, generator=gen)
    bias *= 800 / bias.norm()
    signal = torch.randn(256, 128, generator=gen) * 8 / 128**0.5
    error = {
        name: float((dequantize(*quantize(bias + signal, name), name) - bias - signal).norm() / signal.norm())
        for name in ALL
    }
    assert error["int8_per_token_head"] < 0.8
    assert all(error[name] > 4 for name in UINT4)
    assert min(error, key=error.__getitem__) == "int8_per_token_head"


def test_a_row_that_needs_gradients_and_autocast_change_nothing():
    """Case 5. Catches a rotation that autocast runs in bfloat16, and matrices cached as inference tensors."""
    x = torch.randn(3, 96, requires_grad=True)
    with torch.inference_mode():
        quantize(torch.randn(1, 96))
    plain = quantize(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = quantize(x)
    assert torch.equal(plain[0], under_autocast[0])
    assert torch.equal(plain[1], under_autocast[1])


def test_adding_a_format_is_one_row():
    """A new uniform format works through the public functions without touching them."""
    mine = QuantFormat("mine", 1, "uint4", "scale_min", "none", "planar", "unrotated")
    x = torch.randn(5, 64)
    codes, words = quantize(x, mine)
    assert unpack_codes(codes, mine).shape == (5, 64)
    assert (dequantize(codes, words, mine) - x).norm() / x.norm() < 0.15


# --- interoperation with vLLM's bytes ------------------------------------------------------------------------------------


def stock_bytes(row: np.ndarray) -> tuple[bytes, int]:
    """Quantize one rotated row by the description of vLLM's format, in numpy float32 scalars.

    scale = max((max - min) / 15, 1e-6); zero = clamp(round(-min / scale)); code = clamp(round(x / scale + zero)), all
    halves away from zero; the scale's low four bits make room for the zero point; the even dimension is the low nibble.
    """
    one = np.float32
    scale = max((row.max() - row.min()) / one(15), one(1e-6))
    zero = np.clip(np.trunc(-row.min() / scale + one(0.5)), 0, 15).astype(one)
    shifted = row * (one(1) / scale) + zero
    codes = np.clip(np.trunc(shifted + np.copysign(one(0.5), shifted)), 0, 15).astype(np.uint8)
    bits = int(np.array(scale, one).view(np.uint32))
    return (codes[0::2] | codes[1::2] << 4).tobytes(), bits & ~15 | int(zero)


@pytest.mark.parametrize("head_size", [32, 64, 80, 128, 256])
def test_bytes_equal_the_stock_quantizer_where_rows_straddle_zero(head_size: int):
    """Catches any drift from the pages that vLLM writes: scale, zero point, rounding or nibble order."""
    rows = torch.randn(400, head_size, generator=torch.Generator().manual_seed(head_size)).to(torch.bfloat16).float()
    rows *= torch.logspace(-4, 4, 400)[:, None].to(torch.bfloat16).float()
    rows = rows[(rows.amin(-1) < 0) & (rows.amax(-1) > 0)]
    assert len(rows) > 350
    codes, words = encode_rows(rows, FORMATS["int4_per_token_head"])
    for i, row in enumerate(rows.numpy()):
        assert (bytes(codes[i].tolist()), int(words[i]) & 0xFFFFFFFF) == stock_bytes(row)
