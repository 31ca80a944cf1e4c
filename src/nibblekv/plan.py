"""Count how many tokens of a model's cache fit into a memory, by format. Needs a config or numbers, never weights."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from nibblekv.cache import raw_row_count
from nibblekv.formats import get_format
from nibblekv.layout import BLOCK_SIZE_MULTIPLE, KVCacheLayout

__all__ = [
    "AttentionLayer",
    "attention_layers",
    "bits_per_value",
    "bytes_per_token",
    "calibration_suffix",
    "plan_rows",
    "raw_bytes",
    "split_format",
    "split_window",
    "tokens_that_fit",
]

# A cache without quantization, by the bytes of its values.
UNQUANTIZED_BYTES = {"none": 2, "float32": 4, "float16": 2, "bfloat16": 2}
DEFAULT_BLOCK_SIZE = 16
CALIBRATED, DERIVED = "+calib", "+derived"


@dataclass(frozen=True)
class AttentionLayer:
    """What one layer keeps in its cache.

    Attributes:
        num_kv_heads, head_size, head_size_v: of the layer; head_size counts a key's values, head_size_v a value's.
        sliding_window: positions that the layer can see, 0 for all.
    """

    num_kv_heads: int
    head_size: int
    head_size_v: int
    sliding_window: int = 0

    @property
    def values_per_token(self) -> int:
        """Key and value numbers of one token."""
        return self.num_kv_heads * (self.head_size + self.head_size_v)


def attention_layers(config: Any) -> list[AttentionLayer]:
    """Read the attention layers that keep a cache from a transformers config.

    Layers that reuse another layer's cache and layers without attention (linear, convolution) are left out.

    Raises:
        NotImplementedError: latent attention, whose cache has no keys and values per head.
        ValueError: the config names no heads or layers.
    """
    config = config.get_text_config(decoder=True)
    if getattr(config, "kv_lora_rank", None):
        raise NotImplementedError(f"model: expected keys and values per head, got latent attention ({config.model_type})")
    num_layers = getattr(config, "num_hidden_layers", None) or 0
    if num_layers < 0:
        raise ValueError(f"model: expected num_hidden_layers of at least 1 in the config, got {num_layers}")
    # Gemma 4's full layers have other heads than its sliding ones.
    layer_configs = list(getattr(config, "per_layer_config", None) or [config] * num_layers)
    if not layer_configs or not getattr(layer_configs[0], "num_attention_heads", None):
        raise ValueError(f"model: expected num_hidden_layers and num_attention_heads in the config, got {config.model_type}")
    types = getattr(config, "layer_types", None) or [None] * len(layer_configs)
    kept = len(types) - (getattr(config, "num_kv_shared_layers", None) or 0)
    layers = [_attention_layer(*pair) for pair in zip(layer_configs[:kept], types[:kept], strict=True)]
    return [layer for layer in layers if layer is not None]


def _attention_layer(config: Any, kind: str | None) -> AttentionLayer | None:
    """Read one layer of a type in `config.layer_types`, or of a config without; None if it keeps no keys and values."""
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    head_size_v = getattr(config, "v_head_dim", None) or head_size
    window = getattr(config, "sliding_window", None) or 0
    if not getattr(config, "use_sliding_window", True):
        window = 0
    windows = {
        None: window,
        "full_attention": 0,
        "hybrid": 0,  # attention beside a state (Falcon-H1)
        "sliding_attention": window,
        "chunked_attention": getattr(config, "attention_chunk_size", None) or 0,
    }
    return AttentionLayer(num_kv_heads, head_size, head_size_v, windows[kind]) if kind in windows else None


def split_window(format: str) -> tuple[str, int, int]:
    """Split `int4+w32s4` into the name before, the window and the sinks that are kept unquantized; `+w32` or `+s4` do too.

    A further `+calib` or `+derived` (`calibration_suffix`) is left out.

    Raises:
        ValueError: not such a suffix.
    """
    name, plus, suffix = format.removesuffix(calibration_suffix(format)).partition("+")
    found = re.fullmatch(r"(?:w(\d+))?(?:s(\d+))?", suffix)
    if found is None or bool(plus) != bool(suffix):
        raise ValueError(f"format: expected a suffix such as +w32s4, window and sinks, got {format!r}")
    window, sinks = (int(number or 0) for number in found.groups())
    return name, window, sinks


def calibration_suffix(format: str) -> str:
    """Return the end of a format's name that asks for constants: `+calib` for saved ones, `+derived`, or nothing."""
    return next((suffix for suffix in (CALIBRATED, DERIVED) if format.endswith(suffix)), "")


def split_format(format: str) -> tuple[str, str]:
    """Split `int8_per_token_head/int4` into the formats of keys and values; one name serves both.

    Args:
        format: suffixes (`split_window`, `calibration_suffix`) are checked and left out.

    Raises:
        ValueError: not a name in `FORMATS`.
    """
    k_format, _, v_format = split_window(format)[0].partition("/")
    return get_format(k_format).name, get_format(v_format or k_format).name


def bytes_per_token(layer: AttentionLayer, format: str) -> int:
    """Return the bytes of one token in one layer, scale words included.

    Args:
        format: a name in `FORMATS`, two of them as K/V, or an unquantized one (`UNQUANTIZED_BYTES`; `none` is 16 bits). A
            window and sinks cost nothing per token (`raw_bytes`).
    """
    if format in UNQUANTIZED_BYTES:
        return layer.values_per_token * UNQUANTIZED_BYTES[format]
    k_format, v_format = split_format(format)
    layout = KVCacheLayout.create(
        k_format,
        v_format=v_format,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        head_size_v=layer.head_size_v,
    )
    return layout.bytes_per_token


def bits_per_value(layers: list[AttentionLayer], format: str) -> float:
    """Return the stored bits per key or value number, scale words included."""
    values = sum(layer.values_per_token for layer in layers)
    return 8 * sum(bytes_per_token(layer, format) for layer in layers) / values


def raw_bytes(layers: list[AttentionLayer], format: str) -> int:
    """Return the bytes of one sequence's unquantized window and sinks in 16 bit, the window's margin included."""
    if format in UNQUANTIZED_BYTES:
        return 0
    _, window, sinks = split_window(format)
    return raw_row_count(window, sinks) * sum(layer.values_per_token for layer in layers) * 2


def cache_bytes(layers: list[AttentionLayer], format: str, num_tokens: int, block_size: int = DEFAULT_BLOCK_SIZE) -> int:
    """Return the bytes of one sequence of num_tokens, in whole pages, with what it keeps unquantized.

    A sliding layer keeps its window and at most one page more, as in vLLM; `attach` keeps every token of it.
    """
    total = raw_bytes(layers, format)
    for layer in layers:
        kept = num_tokens if not layer.sliding_window else min(num_tokens, layer.sliding_window + block_size - 1)
        total += -(-kept // block_size) * block_size * bytes_per_token(layer, format)
    return total


def tokens_that_fit(
    layers: list[AttentionLayer], format: str, memory: int, block_size: int = DEFAULT_BLOCK_SIZE
) -> int | None:
    """Return the longest sequence, a multiple of block_size, whose cache fits into `memory` bytes.

    None if the length is not limited: every layer slides and their windows fit.
    """
    if memory < 0:
        raise ValueError(f"memory: expected 0 bytes or more, got {memory}")
    growing = sum(bytes_per_token(layer, format) for layer in layers if not layer.sliding_window)
    if growing == 0:
        widest = max((layer.sliding_window for layer in layers), default=0) + 2 * block_size
        if cache_bytes(layers, format, widest, block_size) <= memory:
            return None
    if raw_bytes(layers, format) > memory:
        return 0
    low, high = 0, memory // block_size + 1  # pages; every token takes at least one byte
    while high - low > 1:
        middle = (low + high) // 2
        if cache_bytes(layers, format, middle * block_size, block_size) <= memory:
            low = middle
        else:
            high = middle
    return low * block_size


def plan_rows(
    layers: list[AttentionLayer], formats: list[str], memory: int, context: int, block_size: int = DEFAULT_BLOCK_SIZE
) -> list[dict[str, Any]]:
    """Return one row per format: what a token costs and what fits.

    Args:
        memory: bytes for the cache.
        context: tokens of one sequence, for `sequences` and `bytes_per_sequence`.
    """
    if context < 1:
        raise ValueError(f"context: expected at least 1 token, got {context}")
    if block_size < 1 or block_size % BLOCK_SIZE_MULTIPLE:
        raise ValueError(f"block_size: expected a positive multiple of {BLOCK_SIZE_MULTIPLE}, got {block_size}")
    if not layers:
        raise ValueError("model: expected at least one layer with a key-value cache, got none")
    plain = sum(bytes_per_token(layer, "none") for layer in layers)
    rows = []
    for format in formats:
        per_token = sum(bytes_per_token(layer, format) for layer in layers)
        per_sequence = cache_bytes(layers, format, context, block_size)
        rows.append(
            {
                "format": format,
                "bits_per_value": bits_per_value(layers, format),
                "bytes_per_token": per_token,
                "ratio_to_16_bit": plain / per_token,
                "tokens": tokens_that_fit(layers, format, memory, block_size),
                "context": context,
                "bytes_per_sequence": per_sequence,
                "sequences": memory // per_sequence,
            }
        )
    return rows
