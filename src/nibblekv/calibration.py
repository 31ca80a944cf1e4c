"""Constants that make keys and values easier to quantize, without changing what attention computes.

Per layer and KV head: vectors k_mean and v_mean, and a matrix k_map. The pages hold

    k' = k_map (k - k_mean),    v' = v - v_mean,    and are read with    q' = k_map^-T q.

Then q'.k' = q.k - q.k_mean differs from q.k by one number for all keys of a query, which softmax does not see, and the
output lacks v_mean, which is added once. So pages, windows and kernels stay as they are: only what goes in and what comes
out is mapped.

Quantization adds white noise in proportion to the size of k'. With S and Q the second moments of k - k_mean and of q, its
share of the scores is least where those of k' and of q' are equal, which S^-1 # Q = k_map^T k_map gives (# is the geometric
mean of matrices), whatever rotation follows. Of these the one that makes both diagonal is taken: the quantizer's Hadamard
rotation turns a vector with few large coordinates into a flat one, whose range is smallest for its size.

Rotary embeddings turn most of a key's mean away over the positions; statistics are therefore taken at positions spread over
all that the model has, each window of text at its own place: what is left of the mean is what does not turn.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "Calibration",
    "LayerCalibration",
    "calibrate",
    "checkpoint_fingerprint",
    "derive_calibration",
    "find_calibration",
    "fingerprint",
    "save_path",
    "saved_path",
]

# In a model's folder. Engines take every safetensors file that lies in the folder itself for weights.
FILE_NAME = Path("nibblekv", "calibration.safetensors")
FILE_FORMAT = "nibblekv-calibration"
FILE_VERSION = 2
_FIELDS = ("k_mean", "k_map", "v_mean")
# A map with entries beyond this, or whose inverse has such, is no calibration: fp16 could not hold what it makes of a query.
MAX_MAP = 65536.0
FP8_MAX = 448.0

# progress(stage, done, total), in forwards of the model.
Progress = Callable[[str, int, int], None]

# The calibrations that `derive_calibration` made.
_derived: weakref.WeakKeyDictionary[torch.nn.Module, Calibration] = weakref.WeakKeyDictionary()

# Windows begin at this power of an even spread, so that early positions, which every sequence has, count more: an even one
# takes away little of the mean there, and early positions alone make late ones worse than no calibration does.
_EARLY_POSITIONS = 2
# The first tokens of a window take the place of attention sinks: few, extreme, and read unquantized where it matters.
UNCOUNTED_TOKENS = 8
# Keys nearer than this are read unquantized (the default window), so that errors in their scores cost nothing.
_NEAR_TOKENS = 32
# Of the mean over all directions, added to each: Gemma has channels in which queries and keys are exactly 0.
_ENERGY_FLOOR = 1e-2
_SEED = 1
# What a calibration is derived from: as long as a prompt of 2,048 tokens takes. Half as many serve nearly as well.
_DERIVING_WINDOWS, _DERIVING_TOKENS = 16, 128
_NAMING_ROWS = 64  # embeddings that name a model whose norms have no weights
# Of rows and maps in `_fixed_point`: with sums of up to 2^9 products they fill the 53 bits of float64.
_ROW_BITS, _MAP_BITS = 23, 21


@dataclass(frozen=True)
class LayerCalibration:
    """The constants of one layer.

    Attributes:
        k_mean: [num_kv_heads, head_size] float32.
        k_map: [num_kv_heads, head_size, head_size] float32, invertible.
        v_mean: [num_kv_heads, head_size_v] float32.
    """

    k_mean: torch.Tensor
    k_map: torch.Tensor
    v_mean: torch.Tensor

    def to(self, device: torch.device | str) -> LayerCalibration:
        """Return the constants on a device."""
        return LayerCalibration(*(getattr(self, name).to(device) for name in _FIELDS))

    def check(self, num_kv_heads: int, head_size: int, head_size_v: int) -> None:
        """Raise ValueError unless the constants are for a layer of these sizes."""
        for name, sizes in (("k_mean", (head_size,)), ("k_map", (head_size, head_size)), ("v_mean", (head_size_v,))):
            shape = tuple(getattr(self, name).shape)
            if shape != (num_kv_heads, *sizes):
                raise ValueError(f"calibration: expected {name} of shape {(num_kv_heads, *sizes)}, got {shape}")

    def of_heads(self, heads: slice) -> LayerCalibration:
        """Return the constants of some KV heads."""
        return LayerCalibration(*(getattr(self, name)[heads] for name in _FIELDS))

    def stored(
        self, key: torch.Tensor, value: torch.Tensor, *, batch_invariant: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the cache holds of keys [num_tokens, num_kv_heads, head_size] and values, in their dtype.

        batch_invariant: a row is bitwise the same whatever other rows there are; slower.
        """
        centred = key - self.k_mean
        if batch_invariant:
            stored_key = _mapped(self._exact_k_map_t, _fixed_point(centred, -1, _ROW_BITS))
        else:
            stored_key = _mapped(self._k_map_t, centred)
        return stored_key.to(key.dtype), (value - self.v_mean).to(value.dtype)

    def restored(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Invert `stored`."""
        return (_mapped(self._k_unmap_t, key) + self.k_mean).to(key.dtype), (value + self.v_mean).to(value.dtype)

    def asked(self, query: torch.Tensor, *, batch_invariant: bool = False) -> torch.Tensor:
        """Return the queries that read stored keys: [num_tokens, num_query_heads, head_size], in their dtype.

        batch_invariant: as in `stored`.
        """
        if batch_invariant:
            return _mapped(self._exact_k_unmap, _fixed_point(query, -1, _ROW_BITS)).to(query.dtype)
        return _mapped(self._k_unmap, query).to(query.dtype)

    def attend(
        self,
        attend: Callable[..., Any],
        query: torch.Tensor,
        *,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        return_lse: bool = False,
        **options: Any,
    ) -> Any:
        """Attend plain queries to a cache that holds what `stored` returned.

        Args:
            attend: called as attend(query, key=..., value=..., softmax_scale=..., **options), which is
                `nibblekv.paged_attention` but for the arguments that say where the pages are; raw_key and raw_value, if
                any, hold rows from `stored`.
            query: [num_tokens, num_query_heads, head_size]; key, value: the queries' own, as the model made them.
            sinks: a sink's logit is compared with the scores of plain keys, so it is weighed here, not by the kernel.
            softmax_scale, softcap, out, output_scale, return_lse: of `nibblekv.paged_attention`.
            options: with `batch_invariant`, queries are mapped so as well.

        Returns:
            As `nibblekv.paged_attention` of a cache that holds plain keys and values.

        Raises:
            ValueError: softcap with key means other than 0: a bent score does see the constant.
        """
        if softcap:
            if self.has_k_mean:
                raise ValueError(f"softcap: expected 0 with a calibration that has key means, got {softcap}")
            options["softcap"] = softcap
        if softmax_scale is None:
            softmax_scale = query.shape[-1] ** -0.5
        if key is not None and value is not None:
            options["key"], options["value"] = self.stored(key, value)
        if out is not None and output_scale is None:
            options["out"] = out
        batch_invariant = bool(options.get("batch_invariant"))
        asked = self.asked(query, batch_invariant=batch_invariant)
        if not (return_lse or sinks is not None):
            result = attend(asked, softmax_scale=softmax_scale, **options)
            self._grouped(result).add_(self._v_mean_of_group)
            return _scaled(result, out, output_scale)
        result, lse = attend(asked, softmax_scale=softmax_scale, return_lse=True, **options)
        if batch_invariant:
            shift = (self._grouped(_fixed_point(query, -1, _ROW_BITS)) * self._exact_k_mean[:, None]).sum(-1).float()
        else:
            shift = (self._grouped(query).float() * self.k_mean[:, None]).sum(-1)
        lse = lse + softmax_scale * shift.view(lse.shape)
        share = (lse > -torch.inf).to(lse.dtype)  # of the probability that goes to keys
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype))
            share = torch.exp(lse - total)
            lse = total
        mixed = self._grouped(share[..., None]) * (self._grouped(result).float() + self._v_mean_of_group)
        result.copy_(mixed.view(result.shape))
        result = _scaled(result, out, output_scale)
        return (result, lse) if return_lse else result

    def prepare(self, *, batch_invariant: bool) -> dict[str, torch.Tensor]:
        """Compute now what calls would compute when they first need it, and return all tensors that they read."""
        needed = ["_exact_k_map_t", "_exact_k_unmap", "_exact_k_mean"] if batch_invariant else ["_k_map_t", "_k_unmap"]
        _ = self.has_k_mean
        return {name: getattr(self, name) for name in ("k_mean", "v_mean", "_v_mean_of_group", *needed)}

    @functools.cached_property
    def has_k_mean(self) -> bool:
        """Say whether any key mean is other than 0."""
        return bool(self.k_mean.any())

    @functools.cached_property
    def _k_unmap(self) -> torch.Tensor:
        inverse, singular = torch.linalg.inv_ex(self.k_map.double())
        return inverse.masked_fill((singular != 0)[:, None, None], torch.nan).float()

    @property
    def _largest(self) -> list[float]:
        """Largest entries of the map and of its inverse; NaN, which is below no limit, of a singular map."""
        return [float(x.abs().max()) for x in (self.k_map, self._k_unmap)]

    @functools.cached_property
    def _k_map_t(self) -> torch.Tensor:
        return self.k_map.mT.contiguous()

    @functools.cached_property
    def _k_unmap_t(self) -> torch.Tensor:
        return self._k_unmap.mT.contiguous()

    @functools.cached_property
    def _exact_k_map_t(self) -> torch.Tensor:
        return _fixed_point(self._k_map_t, -2, _MAP_BITS)

    @functools.cached_property
    def _exact_k_unmap(self) -> torch.Tensor:
        return _fixed_point(self._k_unmap, -2, _MAP_BITS)

    @functools.cached_property
    def _exact_k_mean(self) -> torch.Tensor:
        return _fixed_point(self.k_mean, -1, _MAP_BITS)

    @functools.cached_property
    def _v_mean_of_group(self) -> torch.Tensor:
        return self.v_mean[:, None]

    def _grouped(self, x: torch.Tensor) -> torch.Tensor:
        """View [num_tokens, num_query_heads, n] as [num_tokens, num_kv_heads, query heads of each, n]."""
        tokens, heads, size = x.shape
        return x.view(tokens, len(self.k_mean), heads // len(self.k_mean), size)


@dataclass(frozen=True)
class Calibration:
    """The constants of a model's layers, and where they come from.

    Attributes:
        layers: of the layers that keep a cache, in order.
        model: `fingerprint` of the model.
        positions: the statistics were taken at positions below this.
        source: of the tokens, for people.
    """

    layers: tuple[LayerCalibration, ...]
    model: str
    positions: int
    source: str

    def save(self, path: Path | str) -> None:
        """Write a safetensors file, whole or not at all."""
        from safetensors.torch import save

        path = Path(path)
        tensors = {
            f"{name}.{i}": getattr(layer, name).contiguous().cpu() for i, layer in enumerate(self.layers) for name in _FIELDS
        }
        metadata = {
            "format": FILE_FORMAT,
            "version": str(FILE_VERSION),
            "model": self.model,
            "positions": str(self.positions),
            "source": self.source,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
            try:
                file.write(save(tensors, metadata))
                file.flush()
                os.chmod(file.name, 0o644)
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise

    @classmethod
    def load(cls, path: Path | str, model: str | None = None) -> Calibration:
        """Read a file that `save` wrote, and check all of it.

        Args:
            model: the `fingerprint` that the file must name; None takes any.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not a calibration, another version or model, or figures that are none.
        """
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise FileNotFoundError(f"calibration: no such file: {path}")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, ValueError, json.JSONDecodeError) as error:
            raise ValueError(f"calibration: expected a whole safetensors file, got {path}: {error}") from error

        def refuse(expected: str, got: object) -> ValueError:
            return ValueError(f"calibration: expected {expected}, got {got} in {path}")

        if metadata.get("format") != FILE_FORMAT:
            raise refuse(f"a file that `nibblekv calibrate` wrote (format {FILE_FORMAT})", metadata.get("format"))
        if metadata.get("version") != str(FILE_VERSION):
            raise refuse(f"version {FILE_VERSION} (run `nibblekv calibrate` again)", metadata.get("version"))
        if not metadata.get("positions", "").isdecimal() or "model" not in metadata or "source" not in metadata:
            raise refuse("model, positions and source in the file's metadata", sorted(metadata))
        if model is not None and metadata["model"] != model:
            raise refuse(f"the calibration of this model ({model})", f"that of another ({metadata['model']})")
        num_layers = len(tensors) // len(_FIELDS)
        names = {f"{name}.{i}" for i in range(num_layers) for name in _FIELDS}
        if not names or names != set(tensors):
            raise refuse(
                f"{', '.join(_FIELDS)} of every layer", f"{len(tensors)} tensors, among them {min(tensors, default=None)}"
            )
        for name, tensor in tensors.items():
            dims = ("num_kv_heads", "head_size", "head_size")[: 3 if name.startswith("k_map") else 2]
            if tensor.dtype != torch.float32 or tensor.dim() != len(dims) or not tensor.numel():
                raise refuse(f"{name} of [{', '.join(dims)}] float32", f"{list(tensor.shape)} {tensor.dtype}")
            if not bool(torch.isfinite(tensor).all()):
                raise refuse(f"finite numbers in {name}", "NaN or infinity")
        layers = []
        for i in range(num_layers):
            layer = LayerCalibration(*(tensors[f"{name}.{i}"] for name in _FIELDS))
            layer.check(layer.k_mean.shape[0], layer.k_mean.shape[1], layer.v_mean.shape[1])
            largest = layer._largest
            if not all(x < MAX_MAP for x in largest):
                raise refuse(
                    f"k_map.{i} and its inverse below {MAX_MAP:.0f}", f"up to {largest[0]:.2g} and {largest[1]:.2g}"
                )
            layers.append(layer)
        return cls(tuple(layers), metadata["model"], int(metadata["positions"]), metadata["source"])


def fingerprint(model: torch.nn.Module) -> str:
    """Return 16 hex digits that name a model's weights, the same in every engine and for every quantization of its matrices.

    They are of the values of all one-dimensional weights (of the norms), rounded to bfloat16: no engine fuses, splits or
    quantizes those, and every training changes them. Where norms have none (OLMo), of the first embeddings.

    Raises:
        NotImplementedError: those weights are offloaded.
    """
    parameters = dict(model.named_parameters())
    weights: list[torch.Tensor] = [p for name, p in parameters.items() if p.dim() == 1 and name.endswith(".weight")]
    weights = weights or [p[:_NAMING_ROWS] for p in parameters.values()][:1]
    if any(weight.is_meta for weight in weights):
        raise NotImplementedError("calibration: expected loaded weights to tell the model by, got offloaded ones; pass None")
    return _name_of(weights)


def checkpoint_fingerprint(folder: Path, num_layers: int) -> str:
    """Return the `fingerprint` of the model whose weights are in a folder of safetensors files, without making the model.

    Args:
        num_layers: of the model. Further layers of a checkpoint predict drafts; transformers leaves them out too.

    Raises:
        ValueError: the folder has no such files, or none that can be read, or no weights to tell the model by.
    """
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    weights: list[torch.Tensor] = []
    embeddings: list[torch.Tensor] = []
    try:
        if index.is_file():
            paths = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        else:
            found = sorted(folder.glob("*.safetensors"))
            # Some checkpoints hold the same weights a second time.
            paths = [path for path in found if not path.name.startswith("consolidated")] or found
        for path in paths:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    part = file.get_slice(name)
                    if not name.endswith(".weight") or _of_drafts(name, num_layers):
                        continue
                    if len(part.get_shape()) == 1:
                        weights.append(file.get_tensor(name))
                    elif "embed" in name and len(part.get_shape()) == 2:
                        embeddings.append(part[:_NAMING_ROWS])
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise ValueError(f"calibration: expected a whole checkpoint in {folder}, got {error}") from error
    weights = weights or embeddings[:1]
    if not weights:
        raise ValueError(f"calibration: expected safetensors files to tell the model by, got none in {folder}")
    return _name_of(weights)


def _of_drafts(name: str, num_layers: int) -> bool:
    """Say whether a checkpoint's weight belongs to layers behind the model's own."""
    found = re.match(r"(?:model\.|language_model\.)*layers\.(\d+)\.", name)
    return "mtp" in name.split(".") or (found is not None and int(found[1]) >= num_layers)


def _name_of(weights: list[torch.Tensor]) -> str:
    """Return the hash of some weights, whatever their order and names."""
    digests = sorted(
        hashlib.sha256(weight.detach().to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes()).digest()
        for weight in weights
    )
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16]


def save_path(model: PreTrainedModel) -> Path:
    """Return where a model's calibration belongs: beside its weights, or in the cache directory.

    The latter where their folder cannot be written, or is itself in the cache, whose models take no more files.
    """
    from nibblekv.models import cache_directory

    folder = _folder(model)
    cached = folder is not None and folder.resolve().is_relative_to(cache_directory().resolve())
    if folder is not None and os.access(folder, os.W_OK) and not cached:
        return folder / FILE_NAME
    return _cached_path(fingerprint(model))


def find_calibration(model: PreTrainedModel) -> Path | None:
    """Return the calibration file of a model where `save_path` may have put it, or None."""
    return saved_path(_folder(model), lambda: fingerprint(model))


def saved_path(folder: Path | None, name: Callable[[], str]) -> Path | None:
    """Return the calibration file in a model's folder, else that of its `fingerprint` in the cache directory, or None."""
    if folder is not None and (folder / FILE_NAME).is_file():
        return folder / FILE_NAME
    cached = _cached_path(name())
    return cached if cached.is_file() else None


def calibrate(
    model: PreTrainedModel,
    windows: torch.Tensor,
    *,
    source: str,
    positions: int | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Take the statistics of a model's queries, keys and values on windows of text.

    Args:
        windows: [N, window] int64 tokens, each run by itself, unquantized, at positions of its own: the windows are spread
            over all positions, early ones more densely, and irregularly, so that no rotary frequency is in step with them.
            Of every second one, the first half is run twice: queries that look far back are rare in text.
        source: name of the text.
        positions: the positions to cover, default all that the model has.

    Raises:
        ValueError: positions that the model does not have, or fewer than a window.
        NotImplementedError: a model that `attach` refuses.
    """
    from nibblekv.integrations.transformers import attach, detach
    from nibblekv.peers import cache_argument

    config: Any = model.config.get_text_config(decoder=True)
    num_windows, window = windows.shape
    available = getattr(config, "max_position_embeddings", None)
    positions = positions or available or window
    if not window <= positions <= (available or positions):
        raise ValueError(f"positions: expected from {window}, a window, to {available}, the model's, got {positions}")
    if window <= UNCOUNTED_TOKENS:
        raise ValueError(f"windows: expected more than {UNCOUNTED_TOKENS} tokens each, got {window}")
    jitter = torch.rand(num_windows, generator=torch.Generator().manual_seed(_SEED))
    fraction = (torch.arange(num_windows) + jitter) / num_windows
    starts = (fraction**_EARLY_POSITIONS * (positions - window + 1)).long()
    statistics: dict[int, _Statistics] = {}

    def observe(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]) -> None:
        statistics.setdefault(layer, _Statistics()).add(query, key, value, options)

    try:
        for i, (row, start) in enumerate(zip(windows, starts.tolist(), strict=True)):
            # A window is attended in one call, and a call's own keys are read as they came: the format does not matter.
            cache = attach(model, "int8_per_token_head", window=0, sinks=0, calibration=None)
            cache.observe = observe
            position_ids = torch.arange(start, start + window, device=model.device)[None]
            if i % 2:
                row = torch.cat((row[: window // 2], row[1 : window - window // 2 + 1]))
            with torch.inference_mode():
                model.base_model(row[None].to(model.device), position_ids=position_ids, **cache_argument(model, cache))
            if progress is not None:
                progress("calibrate", i + 1, num_windows)
    finally:
        detach(model)
    layers = tuple(statistics[i].constants() for i in sorted(statistics))
    return Calibration(layers, fingerprint(model), positions, source)


@torch.inference_mode(False)
def derive_calibration(model: PreTrainedModel) -> Calibration:
    """Take the statistics of a model on random tokens: from its weights alone, without text or tokenizer, always the same.

    Most of what makes keys hard to quantize is in the weights, whatever the tokens are. Takes as long as a prompt of 2,048
    tokens, once: the result is kept while the model lives and its `fingerprint` does not change.

    Raises:
        NotImplementedError: a model that `attach` refuses, or whose weights are offloaded.
        ValueError: the statistics are no finite numbers.
        Exception: what the model raises when it is run on token ids and positions alone.
    """
    name = fingerprint(model)
    found = _derived.get(model)
    if found is None or found.model != name:
        config: Any = model.config.get_text_config(decoder=True)
        window = min(_DERIVING_TOKENS, getattr(config, "max_position_embeddings", None) or _DERIVING_TOKENS)
        generator = torch.Generator().manual_seed(_SEED)
        tokens = torch.randint(config.vocab_size, (_DERIVING_WINDOWS, window), generator=generator)
        found = calibrate(model, tokens, source="random tokens")
        for i, layer in enumerate(found.layers):
            finite = all(bool(torch.isfinite(mean).all()) for mean in (layer.k_mean, layer.v_mean))
            if not finite or not all(x < MAX_MAP for x in layer._largest):
                raise ValueError(f"calibration: expected finite statistics on random tokens, got others in layer {i}")
        _derived[model] = found
    return found


class _Statistics:
    """Sums over tokens of one layer, float64 on the CPU."""

    def __init__(self) -> None:
        self.count = 0
        self.softcap = False
        self.sums: dict[str, torch.Tensor] = {}

    def add(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]) -> None:
        """Take a sequence: query [T, num_query_heads, head_size]; key [T, num_kv_heads, head_size]; value."""
        heads = key.shape[1]
        queries = query.float().unflatten(1, (heads, -1)).permute(1, 2, 0, 3)
        keys, values = (x.float().transpose(0, 1)[:, None] for x in (key, value))
        cost = torch.stack([_error_cost(*x, options) for x in zip(queries, keys, values, strict=True)])
        # Of keys with a large constant, float32 sums lose all that is left when it is taken away.
        queries, keys, values, cost = (x.double() for x in (queries, keys, values, cost))
        counted = torch.ones_like(queries[..., UNCOUNTED_TOKENS:, 0])
        sums = {
            "keys": keys[..., UNCOUNTED_TOKENS:, :].sum((1, 2)),
            "values": values[..., UNCOUNTED_TOKENS:, :].sum((1, 2)),
            "key_moments": _moments(keys[..., UNCOUNTED_TOKENS:, :], counted[:, :1]),
            "query_moments": _moments(queries[..., UNCOUNTED_TOKENS:, :], counted / queries.shape[1]),
            "cost": cost.sum((1, 2, 3)),
            "costly_keys": (cost.sum((1, 2))[..., None] * keys[:, 0]).sum(1),
            "costly_key_moments": _moments(keys, cost.sum((1, 2))[:, None]),
            "costly_query_moments": _moments(queries, cost.sum(-1)),
        }
        self.sums = {name: self.sums.get(name, 0.0) + x.cpu() for name, x in sums.items()}
        self.count += key.shape[0] - UNCOUNTED_TOKENS
        self.softcap = self.softcap or bool(options.get("softcap"))

    def constants(self) -> LayerCalibration:
        """Return the constants that the statistics give."""
        s = self.sums
        k_mean, v_mean = s["keys"] / self.count, s["values"] / self.count
        if self.softcap:
            k_mean = torch.zeros_like(k_mean)
        k_moments = _centred(s["key_moments"], s["keys"], self.count, k_mean)
        costly_k_moments = _centred(s["costly_key_moments"], s["costly_keys"], s["cost"][:, None], k_mean)
        k_moments = _of_unit_energy(k_moments) + _of_unit_energy(costly_k_moments)
        q_moments = _of_unit_energy(s["query_moments"]) + _of_unit_energy(s["costly_query_moments"])
        return LayerCalibration(k_mean.float(), _key_map(k_moments, q_moments).float(), v_mean.float())


def _error_cost(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Return [group, T, T]: what an error in the score of a query and a key costs in the square of the output.

    That is (p |v - out|)^2 for a key of probability p and value v, and 0 for keys so near, or so early, that a window and
    sinks keep them. query: [group, T, size]; key, value: [1, T, size], of one head.
    """
    tokens = torch.arange(key.shape[1], device=key.device)
    distance = tokens[:, None] - tokens
    hidden = distance < 0
    if options["sliding_window"]:
        hidden = hidden | (distance >= options["sliding_window"])
    score = (query @ key.mT * options["softmax_scale"]).masked_fill(hidden, -torch.inf)
    p = score.softmax(-1)
    out = p @ value
    apart = value.square().sum(-1)[:, None] - 2 * out @ value.mT + out.square().sum(-1, keepdim=True)
    packed = (distance >= _NEAR_TOKENS) & (tokens >= UNCOUNTED_TOKENS)
    return p.square() * apart.clamp(min=0) * packed


def _moments(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return [heads, size, size], the weighted sums of x x^T over the rows of x [heads, group, T, size], float64."""
    x, weight = x.flatten(1, 2), weight.flatten(1)[..., None]
    return (x * weight).mT @ x


def _centred(moments: torch.Tensor, total: torch.Tensor, weight: float | torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Return the weighted sums of (x - mean) (x - mean)^T from those of x x^T, x and 1."""
    crossed = total[..., None] * mean[:, None]
    return moments - crossed - crossed.mT + (weight * mean)[..., None] * mean[:, None]


def _key_map(k_moments: torch.Tensor, q_moments: torch.Tensor) -> torch.Tensor:
    """Return the map that makes the second moments of keys and queries, [heads, size, size], equal and diagonal.

    The largest come first, and keys keep their mean square.
    """
    size = k_moments.shape[-1]
    floor = _ENERGY_FLOOR * torch.eye(size, dtype=k_moments.dtype)
    k_moments, q_moments = (_of_unit_energy(x) + floor for x in (k_moments, q_moments))
    energy, axes = torch.linalg.eigh(k_moments)
    root, inverse_root = (axes * energy[:, None] ** power @ axes.mT for power in (0.5, -0.5))
    squares, directions = torch.linalg.eigh(root @ q_moments @ root)
    k_map = squares.flip(-1)[..., None] ** 0.25 * directions.flip(-1).mT @ inverse_root
    return k_map / _mean_energy(k_map @ k_moments @ k_map.mT).sqrt()


def _of_unit_energy(moments: torch.Tensor) -> torch.Tensor:
    return moments / _mean_energy(moments)


def _mean_energy(moments: torch.Tensor) -> torch.Tensor:
    """Return the mean of the diagonal, [heads, 1, 1]; 1 where all is 0."""
    mean = moments.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    return torch.where(mean > 0, mean, 1.0)


def _fixed_point(x: torch.Tensor, dim: int, bits: int) -> torch.Tensor:
    """Round to multiples of 2^-bits of a power of two that the largest along a dimension lies below; return float64.

    Sums of products of such numbers are exact, so no order of summation shows: matrix products choose theirs by shape.
    """
    x = x.double()
    largest = x.abs().amax(dim, keepdim=True)
    step = torch.where(largest > 0, largest / torch.frexp(largest).mantissa, 1.0) * 2.0**-bits
    return (x / step).round() * step


def _mapped(maps: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Multiply rows [num_tokens, heads of each KV head in turn, size] by [num_kv_heads, size, size]; return their dtype."""
    tokens, heads, size = x.shape
    group = heads // len(maps)
    if tokens == 1:  # a decoded token, for which these calls are most of the work
        return torch.bmm(x.to(maps.dtype).view(len(maps), group, size), maps).view(x.shape)
    rows = x.to(maps.dtype).view(tokens, len(maps), group, size).transpose(0, 1).flatten(1, 2)
    return torch.bmm(rows, maps).view(len(maps), tokens, group, size).transpose(0, 1).reshape(x.shape)


def _folder(model: PreTrainedModel) -> Path | None:
    """Return the folder that a model was read from; None for a hub's model, or one that was made in memory."""
    name = model.config._name_or_path
    return Path(name) if name and Path(name).is_dir() else None  # Path("") is the working directory


def _cached_path(model: str) -> Path:
    from nibblekv.models import cache_directory

    return cache_directory() / "calibrations" / f"{model}.safetensors"


def _scaled(result: torch.Tensor, out: torch.Tensor | None, output_scale: torch.Tensor | None) -> torch.Tensor:
    """Return the output, divided and saturated where it is to be stored in 8 bits."""
    if output_scale is None:
        return result
    scaled = (result.float() / output_scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return scaled if out is None else out.copy_(scaled)
