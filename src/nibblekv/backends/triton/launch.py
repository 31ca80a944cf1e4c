"""Launching kernels again at low host cost.

Triton binds and specializes every argument on every launch, about 1 us each for kernels of 80 arguments. Here a launch whose
specialization was seen before goes straight to the compiled kernel, with addresses in place of tensors: of a tensor, its
launcher asks the driver.

Above that, `replay` keeps a whole call: its launches depend on metadata alone, so a call whose metadata were seen before
repeats them on the addresses of its tensors. All that a body of `replay` may do on the device is thus to `launch`, on inputs
of the call, `scratch` memory, and constants made known by `persist`; a call that uses anything else is not kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton

_ALIGNMENT = 16
_RELAXED_CAPTURE = 2
_compiled: dict[tuple[Any, ...], Any] = {}
# None: not to be repeated.
_replays: dict[tuple[Any, ...], Replay | None] = {}
# Kinds of launches and calls remembered at most: new strides or gains in every call must not fill the memory.
_MOST_COMPILED, _MOST_REPLAYS = 4096, 4096
_persistent: dict[int, torch.Tensor] = {}
_state = threading.local()


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
            compiled = kernel[grid](*tensors, *scalars, *varying, *constants, **options)
        if len(_compiled) >= _MOST_COMPILED:
            _compiled.clear()
        _compiled[key] = compiled
    else:
        compiled[(*grid, 1, 1)[:3]](*addresses, *scalars, *varying, *constants)
    recorder = getattr(_state, "recorder", None)
    if recorder is not None:
        recorder.add(compiled, grid, tensors, (*scalars, *varying, *constants))


def scratch(count: int, device: torch.device) -> torch.Tensor:
    """Return uninitialised float32 [count] for the kernels of one call."""
    buffer = torch.empty(count, dtype=torch.float32, device=device)
    recorder = getattr(_state, "recorder", None)
    if recorder is not None:
        recorder.scratch.append(buffer)
    return buffer


def persist(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that kernels of later calls may read as it is now; it is never freed."""
    _persistent[id(tensor)] = tensor
    return tensor


def replay(
    metadata: tuple[Any, ...], inputs: tuple[torch.Tensor | None, ...], keep: object, body: Callable[[], None]
) -> None:
    """Do what `body()` does, on the current stream: call it, or repeat its launches if they are known.

    Args:
        metadata: everything that the body's launches depend on, but for the inputs' addresses; hashable.
        inputs: every tensor of the call that kernels read or write; the first on the device.
        keep: what metadata name by its id.
        body: see the module's text.
    """
    first = inputs[0]
    assert first is not None
    if first.is_cpu:
        body()
        return
    key, addresses, known = _find_call(metadata, inputs)
    if known is not None:
        known(addresses, first.device)
        return
    if key in _replays:
        body()
        return
    _state.recorder = recorder = Recorder(inputs)
    try:
        body()
    finally:
        _state.recorder = None
    if len(_replays) >= _MOST_REPLAYS:
        _replays.clear()
    _replays[key] = recorder.finish(keep)


def repeat(metadata: tuple[Any, ...], inputs: tuple[torch.Tensor | None, ...], device: torch.device) -> bool:
    """Repeat the launches of a call that `replay` knows, on its inputs; False, with nothing launched, if it does not."""
    _, addresses, known = _find_call(metadata, inputs)
    if known is None:
        return False
    known(addresses, device)
    return True


def _find_call(
    metadata: tuple[Any, ...], inputs: tuple[torch.Tensor | None, ...]
) -> tuple[tuple[Any, ...], list[int | None], Replay | None]:
    """Return what a call is known by, the addresses of its inputs, and what repeats it: None while hooks watch launches."""
    addresses = [None if t is None else t.data_ptr() for t in inputs]
    key = (inputs[0].get_device(), *metadata, *[a and a % _ALIGNMENT for a in addresses])  # type: ignore[union-attr]
    hooked = _hooks.launch_enter_hook.calls or _hooks.launch_exit_hook.calls
    return key, addresses, None if hooked else _replays.get(key)


_hooks: Any = triton.knobs.runtime


class Recorder:
    """The launches of one call, by where their tensors came from."""

    def __init__(self, inputs: Sequence[torch.Tensor | None]) -> None:
        self.inputs = inputs
        self.scratch: list[torch.Tensor] = []
        self._launches: list[tuple[Any, tuple[int, ...], list[tuple[str, int]], tuple[Any, ...]]] = []
        self._constants: list[torch.Tensor | None] = []
        given = [t.data_ptr() for t in inputs if t is not None]
        self._known = len(set(given)) == len(given)

    def add(
        self, compiled: Any, grid: tuple[int, ...], tensors: tuple[torch.Tensor | None, ...], tail: tuple[Any, ...]
    ) -> None:
        """Note a launch."""
        self._launches.append((compiled, grid, [self._origin(t) for t in tensors], tail))

    def _origin(self, tensor: torch.Tensor | None) -> tuple[str, int]:
        """Return where a tensor begins: (kind, number) of an input or constant, (scratch number, byte) of scratch memory."""
        if tensor is None or id(tensor) in _persistent:
            self._constants.append(tensor)
            return "constant", len(self._constants) - 1
        address = tensor.data_ptr()
        for i, given in enumerate(self.inputs):
            if given is not None and given.data_ptr() == address:
                return "input", i
        for i, buffer in enumerate(self.scratch):
            if 0 <= address - buffer.data_ptr() < 4 * buffer.numel():
                return f"scratch {i}", address - buffer.data_ptr()
        self._known = False
        return "unknown", 0

    def finish(self, keep: object) -> Replay | None:
        """Return the call, None if not all of its tensors are known."""
        if not self._known:
            return None
        count, made = len(self.inputs), len(self.scratch)
        derived = sorted({origin for _, _, origins, _ in self._launches for origin in origins if origin[0][:7] == "scratch"})

        def place(origin: tuple[str, int]) -> int:
            if origin[0] == "input":
                return origin[1]
            if origin[0] == "constant":
                return count + made + len(derived) + origin[1]
            return count + made + derived.index(origin)

        launches = [
            (compiled.run, *(*grid, 1, 1)[:3], compiled.function, compiled.packed_metadata,
             operator.itemgetter(*map(place, origins)), tail)
            for compiled, grid, origins, tail in self._launches
        ]  # fmt: skip
        return Replay(
            [buffer.numel() for buffer in self.scratch],
            [(count + int(kind.split()[1]), offset) for kind, offset in derived],
            [None if t is None else t.data_ptr() for t in self._constants],
            launches,
            keep,
        )


class Replay:
    """The launches of a call, with the places of their tensors in a list of addresses: inputs, scratch buffers, parts of
    these, constants."""

    def __init__(
        self, scratch: list[int], derived: list[tuple[int, int]], constants: list[int | None],
        launches: list[tuple[Any, ...]], keep: object,
    ) -> None:  # fmt: skip
        self._scratch, self._derived, self._constants, self._launches = scratch, derived, constants, launches
        self._keep = keep

    def __call__(self, addresses: list[int | None], device: torch.device) -> None:
        held = [torch.empty(count, dtype=torch.float32, device=device) for count in self._scratch]
        addresses += [buffer.data_ptr() for buffer in held]
        addresses += [addresses[place] + offset for place, offset in self._derived]  # type: ignore[operator]
        addresses += self._constants
        current_device, current_stream = _current()
        stream = current_stream(current_device())
        for run, x, y, z, function, metadata, pick, tail in self._launches:
            run(x, y, z, stream, function, metadata, None, None, None, *pick(addresses), *tail)


@functools.cache
def _current() -> tuple[Callable[[], int], Callable[[int], int]]:
    """Return the driver's functions (current device, its current stream)."""
    active: Any = triton.runtime.driver.active
    return active.get_current_device, active.get_current_stream
