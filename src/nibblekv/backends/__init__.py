"""The backends: one module each behind the same functions, one line each in a table, chosen plainly.

A backend module has `unavailable_reason() -> str | None` (why it cannot run on this machine), `supports(layout, options,
device) -> str | None` (why it cannot serve this call), `reshape_and_cache` and `paged_attention` with the signatures of
`reference.py`. Backends never import one another. `CHECKS_PAGES = True` says that its `paged_attention` refuses a block
table with pages outside the cache itself, as `KVCacheLayout.check_pages` does, before it writes anything.
`attend_at_once`, where a module has one, takes a plain call of unchecked arguments and returns whether it served it.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from types import ModuleType

import torch

from nibblekv.layout import KVCacheLayout
from nibblekv.options import AttentionOptions

__all__ = ["attend_at_once", "available_backends", "get_backend", "select_backend"]

# Preferred order of `auto`: the first whose device types hold the tensors' and that supports the call.
BACKENDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "triton": ("nibblekv.backends.triton", ("cuda",)),
    "cpu": ("nibblekv.backends.cpu", ("cpu",)),
    "reference": ("nibblekv.backends.reference", ()),
}


@functools.cache
def get_backend(name: str) -> ModuleType:
    """Import a backend by its name in `BACKENDS`.

    Raises:
        ValueError: no such name.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend: expected 'auto' or one of {', '.join(BACKENDS)}, got {name!r}")
    return importlib.import_module(BACKENDS[name][0])


def available_backends() -> dict[str, str | None]:
    """Return, per backend, None if it can run on this machine, else the reason why not."""
    return {name: get_backend(name).unavailable_reason() for name in BACKENDS}


def select_backend(name: str, layout: KVCacheLayout, options: AttentionOptions | None, device: torch.device) -> ModuleType:
    """Return the module that serves a call.

    Args:
        name: a backend, which is then used or refused and never replaced; or `auto`, the first of `BACKENDS` that is
            made for the device, available, and supports the layout and options. One that it passes over is named in a
            warning, once for each reason.
        options: None for a write.

    Raises:
        ValueError: unknown name.
        NotImplementedError: the named backend cannot serve the call; the message says why.
    """
    if name != "auto":
        backend = get_backend(name)
        reason = backend.unavailable_reason() or backend.supports(layout, options, device)
        if reason is not None:
            raise NotImplementedError(f"backend {name!r} cannot serve this call: {reason}")
        return backend
    for candidate, (_, device_types) in BACKENDS.items():
        if device_types and device.type not in device_types:
            continue
        backend = get_backend(candidate)
        why = backend.unavailable_reason() or backend.supports(layout, options, device)
        if why is None:
            return backend
        _warn_once(candidate, device.type, why)
    raise AssertionError("the reference backend supports every call")


@functools.cache
def attend_at_once(name: str, device_type: str) -> Callable[..., bool] | None:
    """Return the function of that name of the backend that serves a device's calls, None where it has none.

    It checks and serves a call over stored keys in one go, or returns False, with nothing done: then all is checked again.
    """
    if name == "auto":
        name = next((candidate for candidate, (_, types) in BACKENDS.items() if device_type in types), "")
    return getattr(get_backend(name), "attend_at_once", None) if name in BACKENDS else None


@functools.cache
def _warn_once(name: str, device_type: str, why: str) -> None:
    warnings.warn(f"backend {name!r}, made for {device_type}, cannot serve a call: {why}; taking a slower one", stacklevel=4)
