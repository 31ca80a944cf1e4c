"""Launching a kernel again at low host cost.

Triton binds and specializes every argument on every launch, about 1 us each for kernels of 80 arguments. Here a launch whose
specialization was seen before goes straight to the compiled kernel.
"""

from __future__ import annotations

from typing import Any

import torch

_ALIGNMENT = 16
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: tuple[torch.Tensor | None, ...],
    scalars: tuple[float, ...],
    varying: tuple[int, ...],
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
    arguments = (*tensors, *scalars, *varying, *constants)
    first = tensors[0]
    if first is None or first.device.type != "cuda":
        kernel[grid](*arguments, **options)
        return
    pointers = tuple([None if t is None else (t.dtype, t.data_ptr() % _ALIGNMENT) for t in tensors])
    key = (kernel.__name__, first.device.index, pointers, scalars, constants, *options.values())
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*arguments, **options)
    else:
        compiled[(*grid, 1, 1)[:3]](*arguments)
