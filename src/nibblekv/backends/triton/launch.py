"""Launching a kernel again at low host cost.

Triton binds and specializes every argument on every launch, about 1 us each for kernels of 80 arguments. Here a launch whose
specialization was seen before goes straight to the compiled kernel, with addresses in place of tensors: of a tensor, its
launcher asks the driver.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import torch

_ALIGNMENT = 16
_RELAXED_CAPTURE = 2
_compiled: dict[tuple[Any, ...], Any] = {}


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up (Triton's own takes 5 us a call on the host)."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


@contextlib.contextmanager
def capture_safe(device: torch.device) -> Iterator[None]:
    """Let the body load kernels and copy constants even if the current stream is being captured into a CUDA graph."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        yield
        return
    mode = ctypes.c_int(_RELAXED_CAPTURE)
    driver = ctypes.CDLL("libcuda.so.1" if torch.version.hip is None else "libamdhip64.so")
    exchange = (
        driver.cuThreadExchangeStreamCaptureMode if torch.version.hip is None else driver.hipThreadExchangeStreamCaptureMode
    )
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: tuple[torch.Tensor | None, ...],
    scalars: tuple[float, ...],
    varying: tuple[float, ...],
    constants: tuple[Any, ...],
    **options: int,
) -> None:
    """Launch kernel(*tensors, *scalars, *varying, *constants).

    Args:
        kernel: a jitted function with parameters in that order; those of `varying` are in its `do_not_specialize`.
        grid: one to three sizes.
        scalars: a new value compiles or looks up anew: strides, offsets, gains.
        varying: what changes from call to call.
        constants: values of the constexpr parameters.
        options: num_warps and the like.
    """
    first = tensors[0]
    if first is None or not first.is_cuda:
        kernel[grid](*tensors, *scalars, *varying, *constants, **options)
        return
    addresses = [None if t is None else t.data_ptr() for t in tensors]
    pointers = [None if t is None else t.dtype for t in tensors] + [0 if a is None else a % _ALIGNMENT for a in addresses]
    key = (id(kernel), first.get_device(), *pointers, scalars, constants, *options.values())
    compiled = _compiled.get(key)
    if compiled is None:
        with capture_safe(first.device):
            _compiled[key] = kernel[grid](*tensors, *scalars, *varying, *constants, **options)
    else:
        compiled[(*grid, 1, 1)[:3]](*addresses, *scalars, *varying, *constants)
