"""A packed cache inside transformers: attention reads pages directly, through `generate` or a plain forward.

    from nibblekv.integrations.transformers import attach
    cache = attach(model, format="int4")
    model.generate(**inputs, past_key_values=cache)  # cache=cache since transformers 5.24, which warns of the old name

How a layer's call finds its pages: `PagedCache.update` returns the chunk's own key and value tensors, marked with the
layer that took them; the attention function that transformers then calls writes them and attends to the pages. A key
without that mark is refused. Padding reaches the attention function as a marked 2-D mask; pads are never stored, so a
padded batch computes what its sequences compute alone.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface

from nibblekv.cache import CacheStep, PagedKVCache, raw_row_count
from nibblekv.calibration import Calibration, derive_calibration, find_calibration, fingerprint
from nibblekv.formats import QuantFormat, check_head_size, get_format
from nibblekv.layout import KVCacheLayout

__all__ = ["PagedCache", "attach", "detach"]

IMPLEMENTATION = "nibblekv"
# Large pages keep block tables short; a sequence wastes half of one on average.
DEFAULT_BLOCK_SIZE = 64
# What four bits cost in answers falls to an eighth on SmolLM2 (benchmarks/results/h200-eval-smollm2.json), for the bytes of
# 240 more tokens of a sequence.
DEFAULT_WINDOW, DEFAULT_SINKS = 32, 4
# Codes of this many bits lose too little for `attach` to run the model over random tokens first.
UNCALIBRATED_BITS = 8
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
# A compiled model breaks its graph here; with fullgraph=True, torch refuses with this sentence.
EAGER = "nibblekv's packed cache runs eagerly: its pages are allocated in Python"
# Arguments of an attention call that change its result, and that no packed kernel honours.
REFUSED_ARGUMENTS = ("position_bias", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k", "block_mask", "score_mod")

# The attention implementations that models had before `attach`: [(config, name)], text config first.
_previous: weakref.WeakKeyDictionary[PreTrainedModel, list[tuple[Any, str]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Mask:
    """What the mask function learnt, carried on the tensor it returns.

    window, chunk: visible tokens of a sliding window or of a chunk, 0 for none.
    padding: [batch, tokens] bool, False at pads, or None where nothing is padded.
    """

    window: int
    chunk: int
    padding: torch.Tensor | None


@dataclass(frozen=True)
class _Plan:
    """One forward of the model, shared by its layers.

    step: of the page cache.
    shape: (batch, query length), pads included.
    rows: [tokens] int64, the tokens among batch * query length that are not pads; None if none is.
    """

    step: CacheStep
    shape: tuple[int, int]
    rows: torch.Tensor | None


class _PagedLayer(CacheLayerMixin):
    """One layer's place in a `PagedCache`: transformers calls `update`, the attention function does the work."""

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: PagedCache, layer_idx: int) -> None:
        super().__init__()
        self.cache = cache
        self.layer_idx = layer_idx
        self.layer: int | None = None  # in the page cache
        self.forwards = 0  # whose tokens this layer took
        self._sinks: tuple[torch.Tensor, int, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.layer = self.cache._add_layer(self.layer_idx, key_states, value_states)
        self.is_initialized = True

    @torch.compiler.disable(reason=EAGER)
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cache._begin(self)
        for tensor in (key_states, value_states):
            tensor._nibblekv_layer = self  # type: ignore[attr-defined]
        return key_states, value_states

    def float_sinks(self, sinks: torch.Tensor) -> torch.Tensor:
        """Return a model's sinks as float32, one tensor while they stay as they are: a call with another is checked anew."""
        version = -1 if sinks.is_inference() else sinks._version
        if self._sinks is None or self._sinks[0] is not sinks or self._sinks[1] != version:
            self._sinks = sinks, version, sinks.detach().float()
        return self._sinks[2]

    def get_seq_length(self) -> int:
        return self.cache.num_columns if self.forwards == self.cache._forwards else self.cache._previous_columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1 if self.cache.max_tokens is None else self.cache.max_tokens

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    def offload(self) -> None:
        raise NotImplementedError(
            "offloading: a packed cache stays on the model's device; pass a plain DynamicCache to offload"
        )

    prefetch = offload


class PagedCache(Cache):
    """A transformers cache that stores packed pages. Make one with `attach`.

    Attributes:
        pages: the `PagedKVCache` that holds the bytes; None before the first forward.
        num_columns: positions seen, pads included (what transformers calls the sequence length).
        lengths: stored tokens of each sequence of the batch, pads left out.
        calibration: what keys and values are mapped by, or None.
        observe: called with (layer index, query, key, value, options) of every attention call, rows without pads.
    """

    def __init__(
        self,
        num_layers: int,
        format: str | QuantFormat = "int4",
        *,
        v_format: str | QuantFormat | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        max_tokens: int | None = None,
        strict: bool = False,
        backend: str = "auto",
        window: int = 0,
        sinks: int = 0,
        calibration: Calibration | None = None,
    ) -> None:
        """Describe a cache for a model of `num_layers` layers; see `attach` for the arguments."""
        self.k_format = get_format(format)
        self.v_format = self.k_format if v_format is None else get_format(v_format)
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens: expected at least 1 or None, got {max_tokens}")
        self.block_size = block_size
        self.max_tokens = max_tokens
        self.strict = strict
        self.backend = backend
        raw_row_count(window, sinks)  # refuses what is negative
        self.window = window
        self.sinks = sinks
        if calibration is not None and len(calibration.layers) != num_layers:
            raise ValueError(
                f"calibration: expected {num_layers} layers, as the model caches, got {len(calibration.layers)}"
            )
        self.calibration = calibration
        self.observe: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]], None] | None = None
        self.pages: PagedKVCache | None = None
        self._layers = [_PagedLayer(self, layer_idx) for layer_idx in range(num_layers)]
        super().__init__(layers=list(self._layers))
        self._start()

    def _start(self) -> None:
        self.num_columns = 0
        self._previous_columns = 0
        self._forwards = 0
        self._seq_ids: list[int] = []
        self._waiting: _PagedLayer | None = None
        self._plan: _Plan | None = None
        # Of the columns seen so far, if any was a pad; columns beyond its width hold no pads.
        self._padding: torch.Tensor | None = None
        for layer in self._layers:
            layer.forwards = 0

    @property
    def lengths(self) -> list[int]:
        return [self.pages.length(seq_id) for seq_id in self._seq_ids] if self.pages is not None else []

    @property
    def nbytes(self) -> int:
        """Bytes of the pages of all layers, free ones included, and of the tokens kept unquantized."""
        return 0 if self.pages is None else self.pages.nbytes

    @property
    def batch_size(self) -> int:
        """Sequences, -1 before the first forward."""
        return len(self._seq_ids) or -1

    max_batch_size = batch_size

    def early_initialization(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("export: a packed cache has no static shapes; pass a StaticCache to export a model")

    def reset(self) -> None:
        """Forget all sequences; the pages stay allocated."""
        if self.pages is not None:
            self.pages.free(self._seq_ids)
        self._start()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest positions of every sequence: `-n` drops n, a positive number keeps that many, 0 does nothing.

        Also ends a forward that an exception interrupted, if it drops at least that forward's tokens.
        """
        keep = tokens_to_remove if tokens_to_remove > 0 else self.num_columns + tokens_to_remove
        if keep < 0:
            raise ValueError(f"crop: expected to drop at most {self.num_columns} positions, got {-tokens_to_remove}")
        interrupted = self._interrupted()
        if interrupted is not None and keep > self._previous_columns:
            raise RuntimeError(
                f"crop: expected to drop at least the {self.num_columns - self._previous_columns} positions of the forward "
                f"that was interrupted before layer {interrupted}, got {self.num_columns - keep}"
            )
        if keep >= self.num_columns or self.pages is None:
            return
        for seq_id, removed in zip(self._seq_ids, self._stored_after(keep), strict=True):
            self.pages.crop(seq_id, self.pages.length(seq_id) - removed)
        self.num_columns = self._previous_columns = keep
        if self._padding is not None:
            self._padding = self._padding[:, :keep]
        self._end_forward()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make sequence i a copy of sequence beam_idx[i]; pages are shared, not copied."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times in place; pages are shared, not copied."""
        self._select([i for i in range(len(self._seq_ids)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences at `indices` (or where a bool mask is True), in that order; pages are shared, not copied."""
        chosen = torch.as_tensor(indices)
        if chosen.dtype == torch.bool:
            chosen = chosen.nonzero().flatten()
        self._select([range(len(self._seq_ids))[i] for i in chosen.tolist()])

    def _select(self, indices: list[int]) -> None:
        if self.pages is None or not self._seq_ids or indices == list(range(len(self._seq_ids))):
            return
        chosen = self.pages.fork([self._seq_ids[i] for i in indices])
        self.pages.free(self._seq_ids)
        self._seq_ids = chosen
        if self._padding is not None:
            self._padding = self._padding[torch.tensor(indices, device=self._padding.device)]

    def _stored_after(self, column: int) -> list[int]:
        """Stored tokens of each sequence at or after a column."""
        if self._padding is None:
            return [self.num_columns - column] * len(self._seq_ids)
        width = self._padding.shape[1]
        unpadded = self.num_columns - max(column, width)
        return [count + unpadded for count in self._padding[:, column:].sum(1).tolist()]

    def _add_layer(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> int:
        """Create a layer's pages from its first keys and values, [batch, heads, length, head_size]."""
        layout = KVCacheLayout.create(
            self.k_format,
            v_format=self.v_format,
            num_kv_heads=key.shape[1],
            head_size=key.shape[3],
            head_size_v=value.shape[3],
            block_size=self.block_size,
        )
        calibration = None if self.calibration is None else self.calibration.layers[layer_idx]
        if self.pages is None:
            num_blocks = None if self.max_tokens is None else -(-self.max_tokens // self.block_size)
            self.pages = PagedKVCache(
                layout,
                num_blocks=num_blocks,
                device=key.device,
                backend=self.backend,
                window=self.window,
                sinks=self.sinks,
                raw_dtype=key.dtype,
                calibrations=[calibration],
            )
            return 0
        if key.device != self.pages.device:
            raise NotImplementedError(
                f"device_map: expected all layers of a packed cache on one device, {self.pages.device}, got {key.device}"
            )
        return self.pages.add_layer(layout, calibration)

    def _interrupted(self) -> int | None:
        """Return a layer that did not take the newest forward's tokens while others did."""
        return next((layer.layer_idx for layer in self._layers if layer.forwards != self._forwards), None)

    def _begin(self, layer: _PagedLayer) -> None:
        """Note that a layer brings the tokens of a forward; the first layer that does begins it."""
        if self._waiting is not None:
            idle = self._waiting.layer_idx
            self._abort()
            raise RuntimeError(
                f"layer {idle}: its keys went to another attention than nibblekv's, or to none, so nothing was stored; "
                "call attach(model) again if its attention implementation was changed"
            )
        if layer.forwards == self._forwards:
            interrupted = self._interrupted()
            if interrupted is not None:
                raise RuntimeError(
                    f"layer {interrupted}: the previous forward was interrupted before it; call cache.reset(), or "
                    f"cache.crop({self._previous_columns - self.num_columns}) to drop that forward's tokens"
                )
            self._previous_columns = self.num_columns
            self._plan = None
            self._forwards += 1
        layer.forwards += 1
        self._waiting = layer

    def _end_forward(self) -> None:
        """Put all layers in step."""
        for layer in self._layers:
            layer.forwards = self._forwards
        self._waiting = None
        self._plan = None

    def _abort(self) -> None:
        """Take back a forward that failed in attention: lengths are as before it, and an empty cache takes any batch."""
        if self._plan is not None:
            assert self.pages is not None
            self.pages.cancel(self._plan.step)
            self.num_columns = self._previous_columns
            if self._padding is not None:
                self._padding = self._padding[:, : self.num_columns]
        self._end_forward()
        if not self.num_columns:
            self.reset()

    def _plan_for(self, batch: int, query_len: int, mask: _Mask | None) -> _Plan:
        """Return this forward's plan; the first layer makes it."""
        if self._plan is not None:
            if self._plan.shape != (batch, query_len):
                raise ValueError(
                    f"query: expected {self._plan.shape} sequences and tokens as in other layers, got {batch, query_len}"
                )
            return self._plan
        assert self.pages is not None
        if not self._seq_ids:
            self._seq_ids = self.pages.add_sequences(batch)
        if batch != len(self._seq_ids):
            raise ValueError(
                f"input_ids: expected {len(self._seq_ids)} sequences, as the cache holds, got {batch}; "
                "call cache.batch_repeat_interleave(n) or cache.batch_select_indices(...) first, or cache.reset()"
            )
        counts, rows = self._count(batch, query_len, mask.padding if mask is not None else None)
        step = self.pages.extend(self._seq_ids, counts)
        if mask is not None and mask.padding is not None:
            self._padding = mask.padding.clone()
        self.num_columns += query_len
        self._plan = _Plan(step, (batch, query_len), rows)
        return self._plan

    def _count(
        self, batch: int, query_len: int, padding: torch.Tensor | None
    ) -> tuple[int | list[int], torch.Tensor | None]:
        """Return the new tokens of each sequence and which of the batch * query_len rows they are."""
        if padding is None:
            return query_len, None
        width = self.num_columns + query_len
        if tuple(padding.shape) != (batch, width):
            raise ValueError(
                f"attention_mask: expected shape {(batch, width)}, {self.num_columns} cached positions and the new ones, "
                f"got {tuple(padding.shape)}"
            )
        chunk = padding[:, self.num_columns :]
        counts, seen = torch.stack((chunk.sum(1), padding.sum(1))).tolist()
        assert self.pages is not None
        stored = self.lengths
        if [s - c for s, c in zip(seen, counts, strict=True)] != stored:
            raise ValueError(
                f"attention_mask: expected {stored} ones over the cached positions, one per stored token, got "
                f"{[s - c for s, c in zip(seen, counts, strict=True)]}; tokens cannot be masked after they were stored"
            )
        rows = None if all(c == query_len for c in counts) else chunk.flatten().nonzero().flatten()
        return counts, rows


class _NoBackward(torch.autograd.Function):
    """Pass a result through a forward that records gradients; fail with a sentence if one is asked for."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise NotImplementedError("backward: a packed cache is for inference; call detach(model) before training")


@torch.compiler.disable(reason=EAGER)
def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Store a layer's new keys and values and attend to its pages: the function that transformers calls.

    Args:
        query: [batch, heads, length, head_size]; key, value: as `PagedCache.update` returned them.
        attention_mask: as `_mask` returned it.
        scaling, softcap, s_aux (sinks): of the model. The window is the mask's, as in transformers' own attention.

    Returns:
        [batch, length, heads, head_size_v], zeros at pads, and None for the attention weights.
    """
    layer = _layer_of(module, key, value)
    cache = layer.cache
    try:
        _check_call(module, attention_mask, dropout, is_causal, kwargs)
        mask = getattr(attention_mask, "_nibblekv_mask", None)
        with torch.no_grad():
            out = _attend(cache, layer, query, key, value, mask, scaling, sliding_window, softcap, s_aux)
    except BaseException:
        cache._abort()
        raise
    if torch.is_grad_enabled() and query.requires_grad:
        out = _NoBackward.apply(out, query)
    return out, None


def _layer_of(module: torch.nn.Module, key: torch.Tensor, value: torch.Tensor) -> _PagedLayer:
    """Return the layer that handed out these keys and values."""
    layer = getattr(key, "_nibblekv_layer", None)
    if isinstance(layer, _PagedLayer) and getattr(value, "_nibblekv_layer", None) is layer:
        return cast(_PagedLayer, layer)
    raise RuntimeError(
        f"{_name(module)}: expected the keys and values that a nibblekv cache handed out, got others; pass "
        "past_key_values=cache (cache=cache since transformers 5.24) to the model, or call detach(model) to use it without"
    )


def _attend(
    cache: PagedCache,
    layer: _PagedLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: _Mask | None,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    batch, _, query_len, _ = query.shape
    plan = cache._plan_for(batch, query_len, mask)
    pages, layer_index = cache.pages, layer.layer
    assert pages is not None
    assert layer_index is not None
    # Under autocast, rotary embeddings give queries and keys a wider dtype than values have.
    query_rows, key_rows, value_rows = (_rows(x.to(query.dtype), plan.rows) for x in (query, key, value))
    # A layer that shares another's keys (Gemma 3n) brings them a second time: they are stored already.
    if cache._waiting is layer:
        pages.write(plan.step, key_rows, value_rows, layer_index)
        cache._waiting = None
    options: dict[str, Any] = {}
    if mask is None:
        options["sliding_window"] = sliding_window or 0
    elif mask.chunk:
        options["sliding_window"], options["chunk_lookback"] = mask.chunk, 0
    else:
        options["sliding_window"] = mask.window
    if softcap is not None:
        options["softcap"] = softcap
    if sinks is not None:
        options["sinks"] = layer.float_sinks(sinks)
    if cache.observe is not None:
        softmax_scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        cache.observe(layer.layer_idx, query_rows, key_rows, value_rows, {**options, "softmax_scale": softmax_scale})
    if query_len > 1:
        options["key"], options["value"] = key_rows, value_rows
    out = pages.attend(plan.step, query_rows, layer_index, strict=cache.strict, softmax_scale=scaling, **options)
    if plan.rows is not None:
        padded = out.new_zeros(batch * query_len, *out.shape[1:])
        padded[plan.rows] = out
        out = padded
    return out.view(batch, query_len, *out.shape[1:])


def _rows(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """[batch, heads, length, size] to [tokens, heads, size], pads left out."""
    flat = x.squeeze(2) if x.shape[2] == 1 else x.transpose(1, 2).flatten(0, 1)
    flat = flat if rows is None else flat[rows]
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _check_call(
    module: torch.nn.Module,
    attention_mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> None:
    """Refuse what the pages cannot honour: nothing is ignored that changes the result."""
    if attention_mask is not None and not hasattr(attention_mask, "_nibblekv_mask"):
        raise NotImplementedError(
            f"attention_mask: expected None or a 2-D mask of pads, got one of shape {tuple(attention_mask.shape)} that "
            f"{_name(module)} or its caller made; arbitrary masks do not work with a packed cache"
        )
    if is_causal is False or not getattr(module, "is_causal", True):
        raise NotImplementedError(f"{_name(module)}: expected causal self-attention, got is_causal=False")
    if dropout:
        raise NotImplementedError(f"dropout: expected 0 (model.eval()), got {dropout}")
    if kwargs.get("output_attentions"):
        raise NotImplementedError(
            "output_attentions: a packed cache never forms attention weights; detach(model) to see them"
        )
    for name in REFUSED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{name}: {_name(module)} asks for it, a packed cache does not support it")


def _mask(
    batch_size: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor:
    """Describe a mask instead of making it: the function that transformers calls before a forward.

    Returns:
        [batch, kv_length] bool, one where nothing is padded, with a `_Mask` attached.
    """
    if use_vmap or not allow_is_causal_skip:
        raise NotImplementedError(
            "attention_mask: this model or input needs another pattern than causal, window or chunks (bidirectional tokens, "
            "custom overlays), which a packed cache does not support"
        )
    window = chunk = 0
    if local_size is not None:
        # The token `local_size - 1` back from position `local_size` is inside a window, and in the chunk before.
        batch, head, position = (torch.zeros((), dtype=torch.long, device=device) for _ in range(3))
        if bool(mask_function(batch, head, position + local_size, position + 1)):
            window = local_size
        else:
            chunk = local_size
    padding = None if attention_mask is None or bool(attention_mask.all()) else attention_mask
    described = (
        torch.ones(1, 1, dtype=torch.bool, device=device).expand(batch_size, kv_length) if padding is None else padding
    )
    # A fresh tensor object: the caller's own carries no mark.
    described = described.view(described.shape)
    described._nibblekv_mask = _Mask(window, chunk, padding)  # type: ignore[attr-defined]
    return described


def _name(module: torch.nn.Module) -> str:
    layer_idx = getattr(module, "layer_idx", None)
    return type(module).__name__ if layer_idx is None else f"{type(module).__name__} (layer {layer_idx})"


def _check_model(model: Any) -> Any:
    """Return the text config of a model that a packed cache serves; refuse any other with a sentence."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a transformers PreTrainedModel, got {type(model).__name__}")
    name = type(model).__name__
    config: Any = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    reason = None
    if model.config.is_encoder_decoder:
        reason = "encoder-decoder models have cross-attention"
    elif getattr(config, "kv_lora_rank", None):
        reason = "latent attention (MLA) caches compressed vectors, not the keys and values of heads"
    elif any(layer_type not in LAYER_TYPES for layer_type in types):
        layer_idx = next(i for i, layer_type in enumerate(types) if layer_type not in LAYER_TYPES)
        reason = f"layer {layer_idx} is {types[layer_idx]!r}, expected {', '.join(LAYER_TYPES)}"
    elif getattr(model, "_is_stateful", False) or not model._supports_default_dynamic_cache():  # type: ignore[operator]
        reason = "it keeps a state other than keys and values"
    elif not getattr(config, "is_causal", True):
        reason = "its attention is bidirectional (config.is_causal is False)"
    elif not model._can_set_attn_implementation():
        reason = "it does not use transformers' AttentionInterface, so its attention cannot read pages"
    if reason is not None:
        raise NotImplementedError(f"{name} cannot use a packed cache: {reason}")
    for layer_config in getattr(config, "per_layer_config", [config]):
        head_size = getattr(layer_config, "head_dim", None) or layer_config.hidden_size // layer_config.num_attention_heads
        check_head_size(head_size, "head_dim")
    return config


def _derived_calibration(model: PreTrainedModel) -> Calibration | None:
    """Return a calibration that was derived from the model; None, with a warning, if it cannot be."""
    try:
        return derive_calibration(model)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:  # whatever its code raises
        reason = str(error).partition("\n")[0]
        warnings.warn(f"calibration: none, the model does not run on random tokens: {reason}", stacklevel=3)
        return None


def detach(model: PreTrainedModel) -> None:
    """Give a model the attention implementation back that it had before `attach`; without `attach`, do nothing."""
    for config, implementation in _previous.pop(model, []):
        config._attn_implementation_internal = implementation


def attach(
    model: PreTrainedModel,
    format: str | QuantFormat = "int4",
    *,
    v_format: str | QuantFormat | None = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
    max_tokens: int | None = None,
    strict: bool = False,
    backend: str = "auto",
    window: int = DEFAULT_WINDOW,
    sinks: int = DEFAULT_SINKS,
    calibration: Calibration | Path | str | None = "auto",
) -> PagedCache:
    """Make a model attend to packed pages, and return an empty cache to pass to it.

    Its argument is `past_key_values`, which transformers calls `cache` since 5.24.

    May be called again for further caches of the same model; each holds its own sequences. Until `detach`, the model
    runs only with such a cache.

    Args:
        model: a decoder that uses transformers' attention interface.
        format, v_format: of keys (and values), and of values where they differ; see `FORMATS`.
        block_size: tokens of a page, a multiple of 16.
        max_tokens: tokens of all sequences together, in whole pages, allocated once; None: the cache grows.
        strict: True: attention reads stored bytes only, so that results do not depend on how a prompt is cut into chunks;
            False: the tokens of one forward see each other unquantized (a decoded token is always read as stored).
        backend: see `nibblekv.backends.select_backend`.
        window, sinks: the last and the first tokens of each sequence that are read unquantized, in the model's dtype,
            whatever `strict` says: more accurate, at a fixed size per sequence; 0: none. Their pages hold them as well.
        calibration: what keys and values are mapped by (`nibblekv calibrate`): read from a file or made before; "auto": the
            one that was saved for this model; where none was and a format has fewer than 8 bits, one that the first call
            derives by running the model over 2,048 random tokens, as long as a prompt of that length takes, and later calls
            take over (`derive_calibration`); None: none. A saved one is more accurate.

    Warns:
        UserWarning: the model does not run on random tokens, so "auto" is None.

    Raises:
        FileNotFoundError: a calibration's file.
        NotImplementedError: the model has layers that a packed cache cannot hold; the message names them.
        TypeError, ValueError: an argument, a head size that cannot be stored, a broken calibration or another model's.
    """
    config = _check_model(model)
    automatic = calibration == "auto"
    if automatic:
        calibration = find_calibration(model)
    if isinstance(calibration, str | Path):
        calibration = Calibration.load(calibration, fingerprint(model))
    elif calibration is not None and calibration.model != fingerprint(model):
        raise ValueError(f"calibration: expected that of this model ({fingerprint(model)}), got {calibration.model}'s")
    cache = PagedCache(
        # The last layers of Gemma 3n read an earlier layer's keys and bring none.
        config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0),
        format,
        v_format=v_format,
        block_size=block_size,
        max_tokens=max_tokens,
        strict=strict,
        backend=backend,
        window=window,
        sinks=sinks,
        calibration=calibration,
    )
    if automatic and calibration is None and min(cache.k_format.bits, cache.v_format.bits) < UNCALIBRATED_BITS:
        cache.calibration = _derived_calibration(model)
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
    if config._attn_implementation != IMPLEMENTATION:
        previous = [(config, config._attn_implementation)]
        key = next((k for k in model.config.sub_configs if getattr(model.config, k) is config), None)
        if key is None:
            model.set_attn_implementation(IMPLEMENTATION)
        else:
            model.set_attn_implementation({key: IMPLEMENTATION})
        _previous[model] = previous
        if config._attn_implementation != IMPLEMENTATION:
            detach(model)
            raise NotImplementedError(f"{type(model).__name__}: its attention implementation cannot be changed")
    return cache
