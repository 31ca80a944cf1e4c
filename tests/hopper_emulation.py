"""Runs the Hopper kernels' own source lane by lane in numpy: Triton's interpreter knows neither Gluon nor inline PTX.

A program is one warp. Every value is an array over its lanes; pointers are addresses of this process's memory, so torch's
CPU tensors serve as global memory. Instructions of `ptx.py` are restated here, a matrix product in float64.
"""

from __future__ import annotations

import ctypes
import types

import numpy as np
import torch

LANES = np.arange(32)
NUMPY_TYPES = {
    torch.float32: np.float32, torch.float16: np.float16, torch.bfloat16: np.uint16, torch.uint8: np.uint8,
    torch.int32: np.int32, torch.int64: np.int64,
}  # fmt: skip


class Lanes(np.ndarray):
    """A value of every lane, or one for all."""

    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else self.astype(dtype)

    def __index__(self):
        return int(self.item())

    def __bool__(self):
        return bool(self.item())


def lanes(x, dtype=None):
    return np.atleast_1d(np.asarray(x, dtype)).view(Lanes)


class Pointer:
    """Addresses and the type of what lies there."""

    def __init__(self, address, dtype):
        self.address, self.dtype = lanes(address, np.int64), np.dtype(dtype)

    @staticmethod
    def of(tensor):
        return Pointer(tensor.data_ptr(), NUMPY_TYPES[tensor.dtype])

    def __add__(self, count):
        return Pointer(self.address + np.asarray(count, np.int64) * self.dtype.itemsize, self.dtype)

    def to(self, dtype):
        assert dtype == np.int64
        return self.address


def peek(address, dtype, count=1):
    return np.frombuffer(ctypes.string_at(int(address), np.dtype(dtype).itemsize * count), dtype)


def poke(address, values):
    data = np.ascontiguousarray(values).tobytes()
    ctypes.memmove(int(address), data, len(data))


class Language:
    """`triton.experimental.gluon.language` as far as the kernels use it."""

    float32, int32, int64 = np.float32, np.int32, np.int64
    constexpr = staticmethod(lambda x: x)
    static_range = staticmethod(range)
    num_warps = staticmethod(lambda: 1)
    cdiv = staticmethod(lambda a, b: -(-a // b))
    abs, log2 = staticmethod(np.abs), staticmethod(np.log2)
    exp2 = staticmethod(lambda x: np.exp2(x, dtype=np.float32).view(Lanes))
    maximum, minimum = staticmethod(np.fmax), staticmethod(np.fmin)
    BlockedLayout = SwizzledSharedLayout = SliceLayout = staticmethod(lambda *arguments: None)

    def __init__(self):
        self.pid = self.axis1 = self.programs = 0

    def program_id(self, axis):
        return lanes(self.pid if axis == 0 else self.axis1, np.int32)

    def num_programs(self, axis):
        return lanes(self.programs, np.int32)

    def arange(self, first, last, layout):
        return lanes(np.arange(first, last), np.int32)

    def zeros_like(self, x):
        return np.zeros_like(x)

    def full(self, shape, value, dtype, layout):
        return lanes(np.full(shape, value), dtype)

    def allocate_shared_memory(self, dtype, shape, layout):
        buffer = types.SimpleNamespace(store=lambda value: None)
        return types.SimpleNamespace(index=lambda i: buffer, _keep_alive=lambda: None)

    def where(self, condition, a, b):
        like = a if isinstance(a, np.ndarray) else b
        dtype = like.dtype if isinstance(like, np.ndarray) else (np.float32 if isinstance(a, float) else np.int32)
        return np.where(condition, a, b).astype(dtype).view(Lanes)

    def load(self, pointer, mask=None, other=None):
        address = pointer.address
        mask = np.broadcast_to(True if mask is None else mask, np.broadcast_shapes(np.shape(mask), address.shape))
        address = np.broadcast_to(address, mask.shape)
        return lanes([peek(a, pointer.dtype)[0] if m else other for a, m in zip(address, mask, strict=True)], pointer.dtype)

    def store(self, pointer, value, mask):
        for a, v, m in zip(*np.broadcast_arrays(pointer.address, value, mask), strict=True):
            if m:
                poke(a, v.astype(pointer.dtype))


class Instructions:
    """`nibblekv.backends.triton.hopper.ptx`; bulk copies complete at once, in poisoned shared memory."""

    def __init__(self, shared_bytes=200_000):
        self.shared = np.full(shared_bytes, 0xFF, np.uint8)
        self.expected = {}

    shared_base = staticmethod(lambda lane: lane * 0)
    barrier_init_fence = wait_for_dependency = launch_dependents = warp_sync = staticmethod(lambda lane: None)

    def barrier_init(self, address, arrivals, predicate):
        pass

    def barrier_expect(self, address, size, predicate):
        assert predicate.sum() == 1
        self.expected[int(address[0])] = int(np.broadcast_to(size, 32)[predicate == 1][0])

    def barrier_wait(self, address, parity):
        assert self.expected[int(address[0])] == 0, "the copies of a tile are not the bytes that were announced"

    def bulk_copy(self, target, source, size, barrier, predicate):
        for a, b, n, p in zip(*np.broadcast_arrays(target, source, size, predicate), strict=True):
            if p:
                assert a % 16 == b % 16 == n % 16 == 0, "bulk copies need multiples of 16 bytes"
                self.shared[a : a + n] = peek(b, np.uint8, n)
                self.expected[int(barrier[0])] -= int(n)

    def load_shared(self, address, offset, words):
        assert not (address + offset).astype(np.int64).view(np.ndarray).__mod__(4 * words).any(), "unaligned"
        places = (np.broadcast_to(address, 32) + offset)[:, None] + np.arange(4 * words)
        found = self.shared[places].view(np.int32)
        return tuple(lanes(found[:, i].copy()) for i in range(words))

    def load_global4(self, address, offset):
        found = np.stack([peek(a + offset, np.int32, 4) for a in np.broadcast_to(address, 32)])
        return tuple(lanes(found[:, i].copy()) for i in range(4))

    def store_global4(self, address, a, b, c, d, predicate, offset):
        rows = np.stack([np.broadcast_to(x, 32) for x in (a, b, c, d)], 1).astype(np.float32)
        for place, row, p in zip(np.broadcast_to(address, 32), rows, np.broadcast_to(predicate, 32), strict=True):
            if p:
                assert (place + offset) % 16 == 0
                poke(place + offset, row)

    def mma(self, a, b0, b1, c, half=True):
        g, t = LANES // 4, LANES % 4
        left, right = np.zeros((16, 16)), np.zeros((16, 8))
        for register, (row, column) in zip(a, ((g, 2 * t), (g + 8, 2 * t), (g, 2 * t + 8), (g + 8, 2 * t + 8)), strict=True):
            left[row, column], left[row, column + 1] = self.unpack2(register, half)
        right[2 * t, g], right[2 * t + 1, g] = self.unpack2(b0, half)
        right[2 * t + 8, g], right[2 * t + 9, g] = self.unpack2(b1, half)
        product = left @ right
        places = ((g, 2 * t), (g, 2 * t + 1), (g + 8, 2 * t), (g + 8, 2 * t + 1))
        return tuple(lanes(product[place] + held, np.float32) for place, held in zip(places, c, strict=True))

    def unpack_nibbles(self, word):
        h = word.view(np.uint32) >> np.uint32(8)
        word = word.view(np.uint32)
        parts = (word & 0x000F000F, word & 0x00F000F0, h & 0x000F000F, h & 0x00F000F0)
        return tuple(lanes(part.astype(np.uint32).view(np.int32)) for part in parts)

    def _spread(self, low, high, floats):
        """Two bytes of every lane as fp16: codes + 128 in subnormals, or e4m3 times 2^-8, all finite."""
        codes = np.stack([low, high], 1).astype(np.uint16)
        halves = (codes & 0x80) << 8 | (codes & 0x7F) << 7 if floats else codes ^ 0x80
        return lanes(np.ascontiguousarray(halves.astype(np.uint16)).view(np.int32)[:, 0].copy())

    def unpack_bytes(self, word, floats):
        parts = np.ascontiguousarray(word).view(np.ndarray).view(np.uint8).reshape(32, 4)
        return tuple(self._spread(parts[:, i], parts[:, i + 1], floats) for i in (0, 2))

    def pair_bytes(self, a, b, floats):
        a, b = (np.ascontiguousarray(x).view(np.ndarray).view(np.uint8).reshape(32, 4) for x in (a, b))
        return tuple(self._spread(a[:, i], b[:, i], floats) for i in range(4))

    def pair_halves(self, a, b):
        a, b = (x.view(np.ndarray).view(np.uint32) for x in (a, b))
        pairs = ((a & 0xFFFF) | (b << np.uint32(16)), (a >> np.uint32(16)) | (b & np.uint32(0xFFFF0000)))
        return tuple(lanes(pair.astype(np.uint32).view(np.int32)) for pair in pairs)

    def pack_half2(self, low, high):
        halves = np.stack([np.broadcast_to(x, 32).astype(np.float16) for x in (low, high)], 1)
        return lanes(halves.view(np.int32)[:, 0].copy())

    def pack2(self, low, high, half):
        if half:
            return self.pack_half2(low, high)
        words = np.stack([np.broadcast_to(x, 32) for x in (low, high)], 1).astype(np.float32).view(np.uint32)
        rounded = (words + 0x7FFF + (words >> 16 & 1)) >> 16  # no NaN is rotated here
        return lanes(np.ascontiguousarray(rounded.astype(np.uint16)).view(np.int32)[:, 0].copy())

    def add_nothing2(self, word, zeros, half):
        parts = [held + 0 * part for part, held in zip(self.unpack2(word, half), self.unpack2(zeros, half), strict=True)]
        return lanes(np.where(np.isnan(parts).any(0), 0x7FFF7FFF, 0), np.int32)

    def warp_or_bits(self, x):
        return lanes(np.full(32, np.bitwise_or.reduce(np.broadcast_to(x, 32))), np.int32)

    def divide(self, x, y):
        return (x / y).astype(np.float32)

    def floor_bits(self, x):
        return (np.float64(8388608) + np.floor(x.astype(np.float64))).astype(np.float32).view(np.int32).view(Lanes)

    def transpose8(self, pair):
        return lanes(pair.view(np.ndarray).view(np.uint16).reshape(8, 8).T.copy().view(np.int32).reshape(32))

    def shuffle_xor(self, x, mask):
        return np.broadcast_to(x, 32).view(Lanes)[LANES ^ mask]

    def broadcast_lane(self, x, source):
        return np.broadcast_to(x, 32).view(Lanes)[source]

    def warp_max_bits(self, x):
        return lanes(np.full(32, x.max()), np.int32)

    def round_half(self, x):
        return x.astype(np.float16).astype(np.float32)

    def unpack2(self, word, half):
        bits = np.ascontiguousarray(np.broadcast_to(word, 32)).view(np.ndarray).view(np.uint16).reshape(32, 2)
        for i in range(2):
            part = bits[:, i].copy()
            yield lanes(part.view(np.float16) if half else (part.astype(np.uint32) << 16).view(np.float32), np.float32)


class _Unpacked(Instructions):
    def unpack2(self, word, half):
        return tuple(Instructions.unpack2(self, word, half))


def emulate(kernel, modules, programs, *arguments, axis1=0):
    """Run the programs (0 to `programs` - 1, `axis1`) of a kernel in turn, with one warp each.

    Args:
        kernel: a jitted function. modules: those whose names it uses, its own last.
        arguments: tensors on the CPU, numbers and constants, in the kernel's order.
    """
    language, instructions = Language(), _Unpacked()
    scope = {"gl": language, "ptx": instructions, "_block_barrier": lambda: None}
    language.axis1, language.programs = axis1, programs
    for name, value in [item for module in modules for item in vars(module).items()]:
        if name in ("gl", "ptx", "_block_barrier"):
            continue
        function = getattr(value, "fn", None) or getattr(value, "__wrapped__", None)
        if isinstance(function, types.FunctionType):
            value = types.FunctionType(function.__code__, scope, name, function.__defaults__)
        scope[name] = getattr(value, "value", value) if type(value).__name__ == "constexpr" else value
    arguments = [Pointer.of(a) if isinstance(a, torch.Tensor) else a for a in arguments]
    for i, argument in enumerate(arguments):
        if isinstance(argument, float):
            arguments[i] = np.float32(argument)
    with np.errstate(all="ignore"):
        for language.pid in range(programs):
            instructions.shared.fill(0xFF)
            scope[kernel.fn.__name__](*arguments)
