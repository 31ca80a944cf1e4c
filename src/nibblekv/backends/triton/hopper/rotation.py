"""The rotation alone, for head sizes from 128: memory is read and written once, in whole sectors, and no matrix is read.

A warp takes 8 rows; write.py tells how tensor cores and register sums transform them.
"""

# ruff: noqa: RUF005
# mypy: ignore-errors

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nibblekv.backends.triton.hopper import ptx
from nibblekv.backends.triton.hopper.kernels import _as_float, _sign_word
from nibblekv.backends.triton.hopper.launch import _signs
from nibblekv.backends.triton.hopper.write import ALIGNMENT, _load_step, _sign_masks, _sign_matrix, _transform
from nibblekv.backends.triton.launch import launch
from nibblekv.rotation import RotationKind

HEAD_SIZES = (128, 256, 512)
NUM_WARPS = 4


@gluon.jit(do_not_specialize=["num_rows"])
def rotate_kernel(
    x, out, x_stride, out_stride, gain, num_rows, D: gl.constexpr, HALF: gl.constexpr, SIGNS: gl.constexpr,
    INVERSE: gl.constexpr,
):  # fmt: skip
    """Write out[r] = gain * H (s x[r]), or (INVERSE) gain * s (H x[r]), for rows this many values apart."""
    WARPS: gl.constexpr = gl.num_warps()
    thread = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    lane, warp = thread & 31, thread >> 5
    g, t = lane >> 2, lane & 3
    first = (gl.program_id(0) * WARPS + warp) * 8
    words = _load_step(x, first + g, num_rows, x_stride, 8 * t.to(gl.int64), D)
    gains = gl.zeros_like(thread).to(gl.float32) + gain
    masks = _sign_masks(lane, 0 if INVERSE else SIGNS, D)
    y = _transform(words, masks, _sign_matrix(lane, HALF), gains * 0.0, D, HALF)
    for r in gl.static_range(2):
        row = first + 2 * t + r
        inside = (row < num_rows).to(gl.int32)
        address = out.to(gl.int64) + 2 * (row.to(gl.int64) * out_stride + 8 * g)
        for c in gl.static_range(D // 64):
            packed = ()
            for w in gl.static_range(4):
                pair = ptx.pack2(y[(2 * c + r) * 8 + 2 * w] * gains, y[(2 * c + r) * 8 + 2 * w + 1] * gains, HALF)
                if INVERSE:
                    bits = gl.where(g >= 4, _sign_word(SIGNS, 2 * c + 1), _sign_word(SIGNS, 2 * c)) >> (8 * (g & 3))
                    pair = pair ^ (((bits << (30 - 2 * w)) & -2147483648) | ((bits << (15 - 2 * w)) & 0x8000))
                packed = packed + (_as_float(pair),)
            ptx.store_global4(address, packed[0], packed[1], packed[2], packed[3], inside, 128 * c)


def rotate_supports(x: torch.Tensor, out: torch.Tensor, kind: RotationKind) -> bool:
    """Return True if `rotate` serves such rows [num_rows, head_size]: 16-bit, 16-byte aligned, rotated as one block."""
    return (
        kind in ("full", "block")
        and x.shape[-1] in HEAD_SIZES
        and x.dtype in (torch.float16, torch.bfloat16)
        and out.dtype == x.dtype
        and not (x.data_ptr() | out.data_ptr()) % ALIGNMENT
        and not (x.stride(0) | out.stride(0)) % (ALIGNMENT // 2)
    )


def rotate(x: torch.Tensor, out: torch.Tensor, kind: RotationKind, inverse: bool, gain: float) -> None:
    """Write gain * H (s x), or its inverse without normalisation, to out, for rows that `rotate_supports` accepts."""
    num_rows, head_size = x.shape
    launch(
        rotate_kernel,
        (-(-num_rows // (8 * NUM_WARPS)),),
        (x, out),
        (x.stride(0), out.stride(0), gain),
        (num_rows,),
        (head_size, x.dtype == torch.float16, _signs(kind, head_size), inverse),
        num_warps=NUM_WARPS,
    )
