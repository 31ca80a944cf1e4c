"""The write of 4-bit rows without a rotation matrix in memory: tensor cores and register sums rotate, registers pack.

A warp takes 8 tokens of one head a step. Write dimension d as 8 * k + j: a Hadamard matrix is the product of one over k and
one over j. For every j, one product with a 16 x 16 matrix of signs, made in registers, sums over k,

    A = 16 outputs k x 16 inputs k, B = 16 inputs k x 8 tokens

and leaves the values of all j of one (k, token) in one lane: sums over j and the packing of eight codes into a word need no
other lane, and only the range of a row is shared (by shuffles among the eight lanes that hold it). Of the two rows that a
lane holds, it works out scale and bias of one, its neighbour of the other.
Lane l reads, of token l // 4, four runs of 16 bytes, k = l % 4 + (0, 4, 8, 12); it holds and stores word k = l // 4 (+ 8) of
tokens 2 (l % 4) + (0, 1). Each load and store thus covers whole 32-byte sectors. Head size 256 does so twice and adds.
The arithmetic of codes is that of `formats.encode_rows`, with products and sums fused.
"""

# ruff: noqa: RUF005
# mypy: ignore-errors

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nibblekv.backends.triton.geometry import geometry
from nibblekv.backends.triton.hopper import ptx
from nibblekv.backends.triton.hopper.kernels import _as_bits, _as_float, _sign_word
from nibblekv.backends.triton.hopper.launch import _signs
from nibblekv.backends.triton.launch import launch
from nibblekv.formats import EDGE, REFIT_COVARIANCE, REFIT_SHIFT, SCALE_FLOOR
from nibblekv.layout import KVCacheLayout

HEAD_SIZES = (128, 256)
ALIGNMENT = 16
NUM_WARPS = 4
# Steps of 8 tokens that a warp takes one after another, the next one's rows already asked for; few tokens start sooner.
LONG_STEPS, SHORT_STEPS = 4, 1
LONG_CALL = 4096

_FLOOR = gl.constexpr(SCALE_FLOOR)
_EDGE = gl.constexpr(EDGE["uint4"])
_COVARIANCE, _SHIFT = gl.constexpr(REFIT_COVARIANCE), gl.constexpr(REFIT_SHIFT)
_INF = gl.constexpr(float("inf"))


@gluon.jit
def _load_step(x, token, num_tokens, token_stride, start, D: gl.constexpr):
    """Return the words of a token's runs, run by run; past the last token, that one's."""
    row = gl.minimum(token, num_tokens - 1).to(gl.int64) * token_stride
    address = x.to(gl.int64) + 2 * (row + start)
    words = ()
    for run in gl.static_range(D // 32):
        words = words + ptx.load_global4(address, 64 * run)
    return words


@gluon.jit
def _add_pairs(y, DISTANCE: gl.constexpr, COUNT: gl.constexpr):
    """One step of a Hadamard transform over a tuple: sums and differences of elements DISTANCE apart."""
    result = ()
    for i in gl.static_range(COUNT):
        if i & DISTANCE == 0:
            result = result + (y[i] + y[i + DISTANCE],)
        else:
            result = result + (y[i - DISTANCE] - y[i],)
    return result


@gluon.jit
def _transform(words, masks, matrix, zero, D: gl.constexpr, HALF: gl.constexpr):
    """Return the unnormalised rotation of 8 rows: y[(2 c + r) * 8 + j] is dimension 64 c + 8 (lane // 4) + j of row
    2 (lane % 4) + r."""
    HALVES: gl.constexpr = D // 128
    flipped = ()
    for i in gl.static_range(16 * HALVES):
        flipped = flipped + (words[i] ^ masks[i],)
    products = ()
    for half in gl.static_range(HALVES):
        for w in gl.static_range(4):
            first = ptx.pair_halves(flipped[16 * half + w], flipped[16 * half + 4 + w])
            second = ptx.pair_halves(flipped[16 * half + 8 + w], flipped[16 * half + 12 + w])
            for n in gl.static_range(2):
                products = products + ptx.mma(matrix, first[n], second[n], (zero, zero, zero, zero), HALF)
    y = ()
    for half in gl.static_range(HALVES):
        for c in gl.static_range(4):
            of_word = ()
            for j in gl.static_range(8):
                of_word = of_word + (products[32 * half + 4 * j + c],)
            for bit in gl.static_range(3):
                of_word = _add_pairs(of_word, 1 << bit, 8)
            y = y + of_word
    if HALVES >= 2:
        y = _add_pairs(y, 32, 32 * HALVES)
    if HALVES >= 4:
        y = _add_pairs(y, 64, 32 * HALVES)
    return y


@gluon.jit
def _sign_masks(lane, SIGNS: gl.constexpr, D: gl.constexpr):
    """Return what flips the signs of the words that `_load_step` returns."""
    masks = ()
    for run in gl.static_range(D // 32):
        bits = (lane * 0 + _sign_word(SIGNS, run)) >> (8 * (lane & 3))
        for w in gl.static_range(4):
            masks = masks + (((bits << (30 - 2 * w)) & -2147483648) | ((bits << (15 - 2 * w)) & 0x8000),)
    return masks


@gluon.jit
def _sign_matrix(lane, HALF: gl.constexpr):
    """Return this lane's part of the 16 x 16 Hadamard matrix of signs, as an A operand."""
    g, t = lane >> 2, lane & 3
    common = g & t
    odd = (common ^ (common >> 1)) & 1
    one: gl.constexpr = 0x3C003C00 if HALF else 0x3F803F80
    signed = (odd << 15) ^ ((odd ^ (g >> 2)) << 31) ^ one
    return (signed, signed, signed, signed ^ -2147450880)


@gluon.jit
def _fold_rows(first, second, odd):
    """Return two parts of what a lane's own row is reduced from: lanes of even g own the first row, of odd g the second."""
    return gl.where(odd, second, first), ptx.shuffle_xor(gl.where(odd, first, second), 4)


@gluon.jit
def _unfold_rows(own, odd):
    """Return the first row's register and the second's."""
    other = ptx.shuffle_xor(own, 4)
    return gl.where(odd, other, own), gl.where(odd, own, other)


@gluon.jit
def _sum_rows(first, second, odd):
    """Sum either row over the eight lanes that hold it; each lane gets its own row's."""
    mine, received = _fold_rows(first, second, odd)
    total = mine + received
    for bit in gl.static_range(2):
        total = total + ptx.shuffle_xor(total, 8 << bit)
    return total


@gluon.jit
def _range_rows(y, odd, D: gl.constexpr):
    """Return the smallest and the largest value of the lane's own row."""
    lows, highs = (), ()
    for r in gl.static_range(2):
        low = y[8 * r]
        high = y[8 * r]
        for c in gl.static_range(D // 64):
            for j in gl.static_range(8):
                low = gl.minimum(low, y[(2 * c + r) * 8 + j])
                high = gl.maximum(high, y[(2 * c + r) * 8 + j])
        lows, highs = lows + (low,), highs + (high,)
    mine, received = _fold_rows(lows[0], lows[1], odd)
    low = gl.minimum(mine, received)
    mine, received = _fold_rows(highs[0], highs[1], odd)
    high = gl.maximum(mine, received)
    for bit in gl.static_range(2):
        low = gl.minimum(low, ptx.shuffle_xor(low, 8 << bit))
        high = gl.maximum(high, ptx.shuffle_xor(high, 8 << bit))
    return low, high


@gluon.jit
def _nearest_bfloat16(x):
    """Round float32, not NaN, to the nearest bfloat16 value."""
    bits = _as_bits(x)
    return _as_float((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536)


@gluon.jit
def _encode_row(y, start, inverse, gain, zero, R: gl.constexpr, D: gl.constexpr, ZERO: gl.constexpr, KEY: gl.constexpr):
    """Return the packed words of row R; of a key also the sums of steps, of codes, of squared steps and of products of
    both, about code 8, since the mean is not known yet."""
    packed_words = ()
    steps_sum, codes_sum, squares, products = zero, zero, zero, zero
    for c in gl.static_range(D // 64):
        packed = _as_bits(zero)
        for n in gl.static_range(8):
            value = y[(2 * c + R) * 8 + 7 - n] * gain
            if ZERO:
                bits = ptx.floor_bits(gl.minimum(gl.maximum(value * inverse + start + 0.5, 0.0), 15.5))
            else:
                bits = ptx.floor_bits((value - start) * inverse + 0.5)
            packed = packed * 16 + bits
            if KEY and not ZERO:
                steps = (value - start) * inverse - 8.0
                code = _as_float(bits) - 8388616.0
                steps_sum = steps_sum + steps
                codes_sum = codes_sum + code
                squares = squares + steps * steps
                products = products + code * steps
        # Without the bits of 2^23, of which those of the two lowest codes remain.
        packed_words = packed_words + (packed + 0x05000000,)
    return packed_words, (steps_sum, codes_sum, squares, products)


@gluon.jit
def _refit(scale, bias, first, second, odd, D: gl.constexpr):
    """Return the scale and bias with which the rounded codes of the lane's own key are unbiased along the key itself.

    first, second: the sums of `_encode_row`.
    """
    steps_mean, codes_mean = _sum_rows(first[0], second[0], odd) * (1.0 / D), _sum_rows(first[1], second[1], odd) * (1.0 / D)
    variance = _sum_rows(first[2], second[2], odd) - steps_mean * steps_mean * D
    covariance = _sum_rows(first[3], second[3], odd) - codes_mean * steps_mean * D
    related = covariance >= _COVARIANCE
    new_scale = _nearest_bfloat16(scale * ptx.divide(variance, gl.where(related, covariance, 1.0)))
    exact_bias = bias + scale * (steps_mean + 8.0) - new_scale * (codes_mean + 8.0)
    new_bias = _nearest_bfloat16(exact_bias)
    taken = related & (gl.abs(new_scale - scale) * 15.0 <= scale) & (gl.abs(new_bias - exact_bias) <= scale * _SHIFT)
    return gl.where(taken, new_scale, scale), gl.where(taken, new_bias, bias)


@gluon.jit
def _write_step(
    words, masks, matrix, cache, slots, token, num_tokens, num_slots, places, head, g, gain,
    BLOCK: gl.constexpr, D: gl.constexpr, HALF: gl.constexpr, ZERO: gl.constexpr, KEY: gl.constexpr,
):  # fmt: skip
    """Rotate, quantize and store one step; token: the first of the two whose results this lane holds."""
    zero = gain * 0.0
    odd = (g & 1) != 0
    y = _transform(words, masks, matrix, zero, D, HALF)
    low, high = _range_rows(y, odd, D)
    low *= gain
    high *= gain
    if ZERO:
        broken = (gl.abs(high - low) < _INF) == 0
        low = gl.minimum(low, 0.0)
        scale = gl.maximum(ptx.divide(gl.maximum(high, 0.0) - low, zero + 15.0), _FLOOR)
        scale = gl.where(broken, 1.0, scale)
        inverse = ptx.divide(zero + 1.0, scale)
        zero_point = ptx.floor_bits(ptx.divide(gl.where(broken, 0.0, -low), scale) + 0.5)
        # y * inverse + zero point, as (y - bias) * inverse
        start = _as_float(zero_point) - 8388608.0
    else:
        margin = ptx.divide(high - low, zero + _EDGE)
        lowest = low + margin
        step = gl.where(((_as_bits(lowest) & 0xFFFF) != 0) & (lowest < 0.0), 0x10000, 0)
        start = _as_float((_as_bits(lowest) & -65536) + step)
        span = high - margin - start
        broken = (gl.abs(span) < _INF) == 0
        scale = _as_float((_as_bits(ptx.divide(span, zero + 15.0)) + 0xFFFF) & -65536)
        scale = gl.where(broken | (scale < _FLOOR), 0.0, scale)
        inverse = gl.where(scale > 0.0, ptx.divide(zero + 1.0, gl.where(scale > 0.0, scale, 1.0)), 0.0)
    # Inverses are not negative: a negative one marks a row without codes.
    starts, inverses = _unfold_rows(start, odd), _unfold_rows(gl.where(broken, -1.0, inverse), odd)
    first, first_sums = _encode_row(y, starts[0], inverses[0], gain, zero, 0, D, ZERO, KEY)
    second, second_sums = _encode_row(y, starts[1], inverses[1], gain, zero, 1, D, ZERO, KEY)
    if ZERO:
        word = gl.where(broken, 0x7FC00000, (_as_bits(scale) & -16) | (zero_point & 15))
    else:
        bias = start
        if KEY:
            scale, bias = _refit(scale, start, first_sums, second_sums, odd, D)
        word = gl.where(broken, 0x7FC07FC0, _as_bits(scale) | ((_as_bits(bias) >> 16) & 0xFFFF))

    cache_head = head.to(gl.int64)  # heads of a cache may lie gigabytes apart
    packed_words = first + second
    for r in gl.static_range(2):
        slot = gl.load(slots + token + r, mask=token + r < num_tokens, other=-1).to(gl.int64)
        keep = (slot >= 0) & (slot < num_slots)
        block, inner = slot // BLOCK, slot % BLOCK
        codes = cache + (places[0] + block * places[1] + inner * places[2] + cache_head * places[3] + g)
        for c in gl.static_range(D // 64):
            gl.store(codes + 8 * c, gl.where(inverses[r] < 0.0, 0, packed_words[D // 64 * r + c]), mask=keep)
        place = places[4] + block * places[5] + inner * places[6] + cache_head * places[7]
        gl.store(cache + place, word, mask=keep & (g == r))


@gluon.jit
def _write_rows(
    x, cache, slots, token_stride, head_stride, places, gain, num_tokens, num_slots, thread,
    HEADS: gl.constexpr, BLOCK: gl.constexpr, D: gl.constexpr, STEPS: gl.constexpr, HALF: gl.constexpr,
    ZERO: gl.constexpr, SIGNS: gl.constexpr, KEY: gl.constexpr,
):  # fmt: skip
    lane, warp = thread & 31, thread >> 5
    g, t = lane >> 2, lane & 3
    unit = gl.program_id(0) * gl.num_warps() + warp
    head = unit % HEADS
    first = unit // HEADS * (8 * STEPS)
    masks = _sign_masks(lane, SIGNS, D)
    matrix = _sign_matrix(lane, HALF)
    gains = gl.zeros_like(thread).to(gl.float32) + gain
    start = head.to(gl.int64) * head_stride + 8 * t
    words = _load_step(x, first + g, num_tokens, token_stride, start, D)
    for step in gl.static_range(STEPS):
        following = words
        if step + 1 < STEPS:
            following = _load_step(x, first + 8 * step + 8 + g, num_tokens, token_stride, start, D)
        _write_step(
            words, masks, matrix, cache, slots, first + 8 * step + 2 * t, num_tokens, num_slots, places, head, g, gains,
            BLOCK, D, HALF, ZERO, KEY,
        )  # fmt: skip
        words = following


@gluon.jit(do_not_specialize=["num_tokens", "num_slots"])
def write_kernel(
    key, value, cache, slots, key_t, key_h, value_t, value_h,
    k_offset, k_b, k_s, k_h, kw_offset, kw_b, kw_s, kw_h, v_offset, v_b, v_s, v_h, vw_offset, vw_b, vw_s, vw_h,
    gain, num_tokens, num_slots,
    HEADS: gl.constexpr, BLOCK: gl.constexpr, D: gl.constexpr, STEPS: gl.constexpr, HALF: gl.constexpr,
    ZERO: gl.constexpr, SIGNS: gl.constexpr,
):  # fmt: skip
    """Write keys (program_id(1) = 0) or values (1); a warp takes 8 * STEPS tokens of one head."""
    thread = gl.arange(0, 32 * gl.num_warps(), gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    if gl.program_id(1) == 0:
        _write_rows(
            key, cache, slots, key_t, key_h, (k_offset, k_b, k_s, k_h, kw_offset, kw_b, kw_s, kw_h), gain, num_tokens,
            num_slots, thread, HEADS, BLOCK, D, STEPS, HALF, ZERO, SIGNS, True,
        )  # fmt: skip
    else:
        _write_rows(
            value, cache, slots, value_t, value_h, (v_offset, v_b, v_s, v_h, vw_offset, vw_b, vw_s, vw_h), gain, num_tokens,
            num_slots, thread, HEADS, BLOCK, D, STEPS, HALF, ZERO, SIGNS, False,
        )  # fmt: skip


def write_supports(key: torch.Tensor, value: torch.Tensor, layout: KVCacheLayout) -> bool:
    """Return True if `write_rows` serves such rows: 16-bit, 16-byte aligned, in one 4-bit format, of one head size."""
    return (
        layout.k_format.code == "uint4"
        and layout.k_format == layout.v_format
        and layout.head_size == layout.head_size_v
        and layout.head_size in HEAD_SIZES
        and key.dtype in (torch.float16, torch.bfloat16)
        and not (key.data_ptr() | value.data_ptr()) % ALIGNMENT
        and not (key.stride(0) | key.stride(1) | value.stride(0) | value.stride(1)) % (ALIGNMENT // 2)
    )


def write_rows(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: KVCacheLayout,
    steps: int | None = None,
    num_warps: int = NUM_WARPS,
) -> None:
    """Quantize rows and write them to their slots, in one launch, for rows that `write_supports` accepts.

    Args: those of `nibblekv.reshape_and_cache`; steps, num_warps: override the launch parameters.
    """
    places, kind = geometry(layout, kv_cache), layout.k_format.rotation
    num_tokens, num_heads = slot_mapping.shape[0], layout.num_kv_heads
    if steps is None:
        steps = LONG_STEPS if num_tokens >= LONG_CALL else SHORT_STEPS
    units = -(-num_tokens // (8 * steps)) * num_heads
    launch(
        write_kernel,
        (-(-units // num_warps), 2),
        (key, value, kv_cache.view(torch.int32), slot_mapping),
        (
            key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            *places.k_rows, *places.k_words, *places.v_rows, *places.v_words,
            1.0 if kind == "block" else layout.head_size**-0.5,
        ),
        (num_tokens, kv_cache.shape[0] * layout.block_size),
        (
            num_heads, layout.block_size, layout.head_size, steps, key.dtype == torch.float16,
            layout.k_format.word == "scale_zero", _signs(kind, layout.head_size),
        ),
        num_warps=num_warps,
    )  # fmt: skip
