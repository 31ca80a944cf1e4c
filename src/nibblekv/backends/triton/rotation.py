"""Rotations in kernels, the matrices they read, and the standalone rotation."""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl

from nibblekv.backends.triton import is_hopper
from nibblekv.backends.triton.launch import capture_safe, cdiv, launch, next_power_of_2, persist, scratch
from nibblekv.rotation import RotationKind, inverse_gain, rotation_factors, rotation_matrix


@functools.cache
def padded(head_size: int) -> int:
    """Columns that kernels work on: the next power of two, at least 64 (a dot needs 16 columns in each of four streams)."""
    return max(64, next_power_of_2(head_size))


def interpreting() -> bool:
    """Return True if kernels run in Triton's interpreter (TRITON_INTERPRET=1)."""
    return bool(triton.knobs.runtime.interpret)


def uses_nvidia_assembly() -> bool:
    """Return True where kernels may use PTX."""
    return not interpreting() and torch.version.hip is None


def dot_precision() -> str:
    """Return the `input_precision` by which float32 dots keep float32 accuracy: three TF32 products where there are any."""
    return "tf32x3" if uses_nvidia_assembly() else "ieee"


@functools.cache
def _is_signs(kind: RotationKind, head_size: int) -> bool:
    return kind != "none" and bool((rotation_factors(kind, head_size)[1].abs() == 1).all())


@functools.cache
def matrix(kind: RotationKind, head_size: int, inverse: bool, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return M with `rows @ M * gain` the (inverse) rotation of rows, [padded, padded], padded with zeros. Cached.

    Where the rotation is made of signs, M holds +1 and -1 exactly and `forward_gain`, `backward_gain` carry the rest, so
    that products with 16-bit values are exact in tensor cores; else (Hartley's matrices) M is float32, whatever dtype asks.
    """
    size = padded(head_size)
    m = torch.zeros(size, size, dtype=torch.float64)
    r = rotation_matrix(kind, head_size) * math.sqrt(head_size if kind == "full" else 1)
    m[:head_size, :head_size] = r if inverse else r.T
    exact = _is_signs(kind, head_size)
    m = m.round().to(dtype) if exact else m.to(torch.float32)
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return persist(m.to(device))
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        copied = m.pin_memory().to(device, non_blocking=True)
    side.synchronize()
    return persist(copied)


@functools.cache
def forward_gain(kind: RotationKind, head_size: int) -> float:
    """Return g of y = g * (x @ matrix(inverse=False))."""
    return head_size**-0.5 if kind == "full" else 1.0


@functools.cache
def backward_gain(kind: RotationKind, head_size: int) -> float:
    """Return g of x = g * (y @ matrix(inverse=True))."""
    return forward_gain(kind, head_size) * inverse_gain(kind, head_size)


@triton.jit
def rotate_rows(
    row_ptr, row_mask, matrix_ptr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    ROTATED: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Load rows (pointers [ROWS], D values each) and return rows @ matrix, [ROWS, DP] float32, without the gain.

    The product runs over BLOCK_K dimensions at a time, so that a matrix of 512 columns fits in shared memory.
    """
    n = tl.arange(0, DP)
    if ROTATED:
        y = tl.zeros([ROWS, DP], tl.float32)
        for k0 in tl.static_range(0, DP, BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            x = tl.load(row_ptr[:, None] + k[None, :], mask=row_mask[:, None] & (k < D)[None, :], other=0.0)
            m = tl.load(matrix_ptr + k[:, None] * DP + n[None, :])
            y = multiply(x, m, y, PRECISION, INTERPRET)
        return y
    else:
        return tl.load(row_ptr[:, None] + n[None, :], mask=row_mask[:, None] & (n < D)[None, :], other=0.0).to(tl.float32)


@triton.jit
def multiply(x, m, y, PRECISION: tl.constexpr, INTERPRET: tl.constexpr):
    """y + x @ m in float32; operands of 16 bits stay so, which is exact for a matrix of signs."""
    # The interpreter's bfloat16 dot is wrong; float32 matrices (Hartley) ask for float32 rows.
    if INTERPRET or m.dtype == tl.float32:
        x = x.to(tl.float32)
        m = m.to(tl.float32)
    return tl.dot(x, m, y, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_rows"])
def rotate_kernel(
    x_ptr, out_ptr, matrix_ptr, x_t, x_h, out_t, out_h, gain, num_rows,
    NUM_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    ROTATED: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Write out[row] = gain * x[row] @ matrix for rows (token, head)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < num_rows
    token = (row // NUM_HEADS).to(tl.int64)
    head = row % NUM_HEADS
    y = (
        rotate_rows(x_ptr + token * x_t + head * x_h, mask, matrix_ptr, D, DP, ROWS, BLOCK_K, ROTATED, PRECISION, INTERPRET)
        * gain
    )
    n = tl.arange(0, DP)
    target = out_ptr + (token * out_t + head * out_h)[:, None] + n[None, :]
    tl.store(target, y.to(out_ptr.dtype.element_ty), mask=mask[:, None] & (n < D)[None, :])


def rotate(
    x: torch.Tensor,
    kind: RotationKind = "full",
    *,
    inverse: bool = False,
    dtype: torch.dtype | None = None,
    gain: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return gain * R x (or R^-1 x) for every row of x, in one launch, products in float32.

    Args:
        x: [num_tokens, num_heads, head_size] or [num_rows, head_size] float16, bfloat16 or float32, the last
            dimension contiguous.
        kind: see `nibblekv.rotation`.
        dtype: of the result; default x's.
        out: a tensor to write, of x's shape; may be x itself.

    Raises:
        ValueError: number of dimensions, strides, or the shape of out.
    """
    if x.dim() not in (2, 3) or x.stride(-1) != 1:
        raise ValueError(
            f"x: expected 2 or 3 dimensions, the last contiguous, got shape {tuple(x.shape)}, strides {x.stride()}"
        )
    if out is None:
        if (dtype or x.dtype) == torch.float32:
            out = scratch(x.numel(), x.device).view(x.shape)
        else:
            out = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    elif out.shape != x.shape or out.stride(-1) != 1:
        raise ValueError(f"out: expected shape {tuple(x.shape)}, the last dimension contiguous, got {tuple(out.shape)}")
    rows, target = (x[:, None], out[:, None]) if x.dim() == 2 else (x, out)
    num_tokens, num_heads, head_size = rows.shape
    num_rows = num_tokens * num_heads
    if num_rows == 0:
        return out
    if is_hopper(x.device) and (x.dim() == 2 or all(t.stride(0) == num_heads * t.stride(1) for t in (x, out))):
        from nibblekv.backends.triton import hopper

        flat, flat_out = rows.flatten(0, 1), target.flatten(0, 1)
        if hopper.rotate_supports(flat, flat_out, kind):
            hopper.rotate(
                flat, flat_out, kind, inverse, gain * (backward_gain if inverse else forward_gain)(kind, head_size)
            )
            return out
    size = padded(head_size)
    block = (64 if size <= 256 else 32) if num_rows >= 8192 else 16
    with capture_safe(x.device):
        m = matrix(kind, head_size, inverse, x.dtype, x.device) if kind != "none" else None
        launch(
            rotate_kernel,
            (cdiv(num_rows, block),),
            (rows, target, m),
            (
                rows.stride(0), rows.stride(1), target.stride(0), target.stride(1),
                gain * (backward_gain if inverse else forward_gain)(kind, head_size),
            ),
            (num_rows,),
            (
                num_heads, head_size, size, block, size if size <= 128 else 64, m is not None,
                dot_precision(), interpreting(),
            ),
            num_warps=4 if size <= 128 else 8,
        )  # fmt: skip
    return out
