"""The caches that a table compares, by name: ours, transformers' 16-bit cache, and its quantized caches.

Names: `none` (DynamicCache in the dtype of the model), every name in `FORMATS` or two of them as K/V, `hf-quanto`, `hf-hqq`
(transformers' QuantizedCache at 4 bits in groups of 64). Ours take a suffix: `int4+w32s4` reads the last 32 and the first 4
tokens unquantized, and a further `+calib` maps keys and values by the calibration that was saved for the model, `+derived`
by the one that `attach` derives where none was.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from nibblekv.calibration import Calibration, derive_calibration, find_calibration, fingerprint
from nibblekv.plan import (
    CALIBRATED,
    DERIVED,
    attention_layers,
    bits_per_value,
    calibration_suffix,
    split_format,
    split_window,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

__all__ = ["PEERS", "cache_argument", "cache_bytes", "cache_maker", "check_format", "stored_bits_per_value"]

# transformers' documentation asks for axis 0 with quanto and axis 1 with HQQ.
PEERS: dict[str, tuple[str, int]] = {"hf-quanto": ("quanto", 0), "hf-hqq": ("hqq", 1)}


def check_format(format: str) -> None:
    """Raise ValueError unless a cache of this name can be asked for."""
    if format != "none" and format not in PEERS:
        try:
            split_format(format)
        except ValueError as error:
            others = (
                f"also none, {', '.join(PEERS)}, two formats as K/V, a window and sinks as int4+w32s4, and +calib or "
                "+derived at the end"
            )
            raise ValueError(f"{error}; {others}") from error


@contextlib.contextmanager
def cache_maker(
    model: PreTrainedModel, format: str, *, strict: bool = False, max_tokens: int | None = None
) -> Iterator[Callable[[], Cache]]:
    """Prepare a model for caches of one format; yield a function that makes an empty one. Restores the model.

    Args:
        format: a name as the module says.
        strict: every key and value that attention reads is the stored one, the prompt's own included.
        max_tokens: room that our caches allocate at once; None: they grow, and hold free pages meanwhile.

    Raises:
        NotImplementedError, ValueError: the model cannot use the format; the message says why.
        ImportError: the peer's package is missing.
    """
    from transformers import DynamicCache, QuantizedCache

    check_format(format)
    if format == "none":
        yield lambda: DynamicCache(config=model.config)
    elif format in PEERS:
        backend, axis = PEERS[format]

        def make_peer() -> Cache:
            cache = QuantizedCache(backend, model.config, nbits=4, axis_key=axis, axis_value=axis, q_group_size=64)
            if strict:
                for layer in cache.layers:
                    _read_stored(layer)
            return cache

        make_peer()
        yield make_peer
    else:
        from nibblekv.integrations.transformers import attach, detach

        k_format, v_format = split_format(format)
        _, window, sinks = split_window(format)
        calibrations = {CALIBRATED: _saved_calibration, DERIVED: derive_calibration}
        suffix = calibration_suffix(format)
        calibration = calibrations[suffix](model) if suffix else None
        try:
            attach(model, k_format, v_format=v_format, calibration=calibration)
            yield lambda: attach(
                model, k_format, v_format=v_format, strict=strict, max_tokens=max_tokens, window=window, sinks=sinks,
                calibration=calibration,
            )  # fmt: skip
        finally:
            detach(model)


def cache_argument(model: PreTrainedModel, cache: Cache) -> dict[str, Any]:
    """Return a cache as the keyword that the model's forward calls it by (`cache` since transformers 5.24)."""
    return {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}


def cache_bytes(cache: Cache) -> int:
    """Return the bytes of a cache's tensors, scales and reserves included."""
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes)
    storages: dict[int, int] = {}
    _collect([vars(layer) for layer in cache.layers], storages)
    return sum(storages.values())


def stored_bits_per_value(model: PreTrainedModel, format: str, cache: Cache) -> float:
    """Return the bits per key or value number that a cache really holds (peers), or that the format defines (ours).

    A window and sinks of ours are not counted: their bytes are a sequence's, not a token's (`plan.raw_bytes`).
    """
    layers = attention_layers(model.config)
    if format == "none":
        return 8.0 * model.dtype.itemsize
    if format not in PEERS:
        return bits_per_value(layers, format)
    return 8 * cache_bytes(cache) / (sum(layer.values_per_token for layer in layers) * cache.get_seq_length())


def _saved_calibration(model: PreTrainedModel) -> Calibration:
    """Return the calibration that was saved for a model; raise FileNotFoundError with what to do if there is none."""
    path = find_calibration(model)
    if path is None:
        raise FileNotFoundError("calibration: expected one saved for this model, got none; run `nibblekv calibrate MODEL`")
    return Calibration.load(path, fingerprint(model))


def _read_stored(layer: Any) -> None:
    """Make a QuantizedLayer return what it stored: its first update otherwise returns the raw prompt."""
    layer.residual_length = 1
    update = layer.update

    def update_and_read(self: Any, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        update(key, value, *args, **kwargs)
        return self._dequantize(self._quantized_keys), self._dequantize(self._quantized_values)

    layer.update = MethodType(update_and_read, layer)


def _collect(found: Any, storages: dict[int, int]) -> None:
    """Note the storage of every tensor in nested containers, tensor subclasses taken apart, each once."""
    if isinstance(found, torch.Tensor):
        if hasattr(found, "__tensor_flatten__"):
            names, _ = found.__tensor_flatten__()
            _collect([getattr(found, name) for name in names], storages)
        else:
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    elif isinstance(found, dict):
        _collect(list(found.values()), storages)
    elif isinstance(found, list | tuple):
        for item in found:
            _collect(item, storages)
