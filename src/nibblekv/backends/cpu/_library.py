"""The compiled kernels: finding the library, handing it tensors.

Why C++ compiled at installation and not Numba: see `nibblekv/backends/cpu/__init__.py`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.machinery
import struct
from collections.abc import Callable
from pathlib import Path

import torch

from nibblekv.layout import KVCacheLayout, KVCacheViews
from nibblekv.rotation import RotationKind, inverse_gain, rotation_factors, rotation_signs

__all__ = [
    "ATTENTION_ARGS",
    "DTYPES",
    "WRITE_ARGS",
    "attend_tensors",
    "cache_shapes",
    "geometry",
    "index",
    "instruction_set",
    "library",
    "unavailable_reason",
    "use_instruction_set",
]

# AttentionArgs and WriteArgs of csrc/abi.h.
ATTENTION_ARGS, WRITE_ARGS = struct.Struct("62q3d"), struct.Struct("14q")
# Numbers that csrc/abi.h gives to dtypes, codes and words.
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float8_e4m3fn: 3}
_CODES = {"uint4": 0, "uint3": 0, "uint2": 0, "int8": 1, "fp8": 2}
_WORDS = {"scale_min": 0, "scale_zero": 1, "scale": 2}

# Addresses of CacheShape records, by id(layout): of the first caches seen, those with other strides are checked in Python.
cache_shapes: dict[int, int] = {}

_keep: list[object] = []  # what the kernels point to


@functools.cache
def _path() -> Path | None:
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name("_native" + suffix)
        if path.exists():
            return path
    return None


def unavailable_reason() -> str | None:
    """Return None if the kernels were compiled, else how to get them."""
    if _path() is not None:
        return None
    return (
        "its kernels were not compiled when nibblekv was installed; install a C++17 compiler (g++ or clang) and run "
        "pip install --force-reinstall --no-deps nibblekv (in a checkout: python setup.py build_ext --inplace)"
    )


@functools.cache
def library() -> ctypes.CDLL:
    """Load the kernels and give them the threads of torch's OpenMP runtime.

    Raises:
        RuntimeError: they were compiled from other sources than these, as in a checkout that moved on.
    """
    lib = ctypes.CDLL(str(_path()))
    for name, args in (("nibblekv_attention_bytes", ATTENTION_ARGS), ("nibblekv_write_bytes", WRITE_ARGS)):
        record_bytes = getattr(lib, name, None)
        if record_bytes is None or record_bytes() != args.size:
            raise RuntimeError(
                f"{_path()} was compiled from other sources; compile it again: python setup.py build_ext --inplace"
            )
    for name in ("nibblekv_attention", "nibblekv_write"):
        getattr(lib, name).argtypes = [ctypes.c_char_p]
    lib.nibblekv_write.restype = None
    lib.nibblekv_instruction_set.restype = ctypes.c_char_p
    lib.nibblekv_use_instruction_set.argtypes = [ctypes.c_char_p]
    lib.nibblekv_set_team.argtypes = [ctypes.c_void_p]
    lib.nibblekv_set_team.restype = None
    lib.nibblekv_set_team(team())
    return lib


@functools.cache
def attend_tensors() -> Callable[..., bool] | None:
    """Return `attend` of csrc/tensors.cpp, or None: compiled without Python's headers, or a torch without DLPack's table."""
    try:
        native = importlib.import_module("nibblekv.backends.cpu._native")
    except ImportError:
        return None
    attend: Callable[..., bool] = native.attend
    return attend if native.bind(torch.Tensor) else None


def team() -> int | None:
    """Return the address of GOMP_parallel in the OpenMP runtime that torch has loaded, None where torch has none.

    GNU, LLVM and Intel runtimes all have this entry. Without it the kernels start threads of their own for every call.
    """
    try:  # a lookup in libtorch_cpu also searches what it links to
        entry = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    return ctypes.cast(entry, ctypes.c_void_p).value


def instruction_set() -> str:
    """Return which kernels run: `avx512` (integer dot products), `avx2` or `generic`."""
    return str(library().nibblekv_instruction_set().decode())


def use_instruction_set(name: str) -> None:
    """Run the kernels of that name from now on, for every thread; `` is the machine's best.

    Raises:
        ValueError: no such kernels, or this machine cannot run them.
    """
    if not library().nibblekv_use_instruction_set(name.encode()):
        raise ValueError(f"name: expected kernels that this machine runs (best: {instruction_set()}), got {name!r}")


def index(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return the address, the stride in bytes and whether the integers are 64 bits wide, of a 1-D tensor."""
    wide = tensor.dtype is torch.int64
    return tensor.data_ptr(), tensor.stride(0) * (8 if wide else 4), wide


@functools.cache
def _rotation(kind: RotationKind, head_size: int) -> int:
    """Return the address of a Rotation record."""
    p, base, outer = rotation_factors(kind, head_size)
    gain = head_size**-0.5 if kind == "full" else 1.0
    arrays = [t.to(torch.float32).contiguous() for t in (base, base.T, rotation_signs(kind, head_size))]
    record = ctypes.create_string_buffer(
        struct.pack(
            "4q2f3q",
            p,
            base.shape[0],
            outer,
            head_size,
            gain,
            inverse_gain(kind, head_size),
            *(t.data_ptr() for t in arrays),
        )
    )
    _keep.extend((arrays, record))
    return ctypes.addressof(record)


@functools.lru_cache(maxsize=1024)
def _geometry(layout: KVCacheLayout, offsets_and_strides: tuple[tuple[int, ...], ...]) -> int:
    sides = (
        (layout.k_format, layout.head_size, layout.k_row_bytes, 0),
        (layout.v_format, layout.head_size_v, layout.v_row_bytes, 1),
    )
    fields: list[int] = []
    for fmt, head_size, stored_bytes, side in sides:
        fields += offsets_and_strides[side] + offsets_and_strides[2 + side]
        row_bytes = head_size * max(fmt.bits, 4) // 8
        fields += (_CODES[fmt.code], fmt.bits, _WORDS[fmt.word], head_size, row_bytes, stored_bytes)
        fields.append(_rotation(fmt.rotation, head_size))
    record = ctypes.create_string_buffer(struct.pack(f"{len(fields) + 2}q", *fields, layout.block_size, layout.num_kv_heads))
    _keep.append(record)
    return ctypes.addressof(record)


_by_strides: dict[tuple[object, ...], int] = {}


def geometry(layout: KVCacheLayout, kv_cache: torch.Tensor) -> int:
    """Return the address of the Geometry record of caches of this layout with these strides."""
    key = (id(layout), kv_cache.stride())
    address = _by_strides.get(key)
    if address is None:
        views: KVCacheViews = layout.views(kv_cache)
        start = kv_cache.storage_offset()
        places = []
        for view in (views.key_cache, views.value_cache, views.k_scale_cache, views.v_scale_cache):
            size = view.element_size()
            _, slot, head = (stride * size for stride in view.stride()[:3])
            # Not the view's own: of a cache with one block that stride is arbitrary, and a grown cache has the same key.
            places.append((view.storage_offset() * size - start, kv_cache.stride(0), slot, head))
        address = _geometry(layout, tuple(places))
        _by_strides[key] = address
        _keep.append(layout)  # so that its id stays its own
        if id(layout) not in cache_shapes:
            dims, none = kv_cache.dim(), (0,) * (4 - kv_cache.dim())
            record = struct.pack("10q", address, dims, *kv_cache.shape, *none, *kv_cache.stride(), *none)
            _keep.append(buffer := ctypes.create_string_buffer(record))
            cache_shapes[id(layout)] = ctypes.addressof(buffer)
    return address
