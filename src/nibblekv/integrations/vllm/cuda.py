"""vLLM on CUDA GPUs: takes the place of TRITON_ATTN, and passes every layer of another cache dtype on to it.

Prefills attend to their own raw keys and values and read stored pages for what came before; decoding, speculative
verification and everything inside a captured CUDA graph read stored pages only.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from nibblekv.formats import HEAD_SIZE_MULTIPLE, MAX_HEAD_SIZE, MIN_HEAD_SIZE
from nibblekv.integrations.vllm import attention
from nibblekv.integrations.vllm.attention import QuantizedAttention, QuantizedBackend

if current_platform.is_cuda():
    # Prefills take vLLM's FlashAttention once it is imported, which vLLM does for its own backend only.
    with contextlib.suppress(ImportError):
        import vllm.vllm_flash_attn.flash_attn_interface  # noqa: F401

# New tokens of a request up to which it counts as decoding, draft tokens included. Below about this many, reading packed
# pages costs less than preparing a prefill.
DECODE_LEN = 16
# Of each value of the queries, while they are mapped for a calibration: three copies in float32, four in float64.
_MAP_BYTES, _EXACT_MAP_BYTES = 12, 32


class NibbleKVTritonMetadataBuilder(TritonAttentionMetadataBuilder):
    """vLLM's metadata, and where the prefills of the batch begin."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return which batches a graph may serve: a launch is sized by the longest query, so one length for all requests."""
        if attention.is_our_spec(kv_cache_spec):
            return AttentionCGSupport.UNIFORM_BATCH
        return super().get_cudagraph_support(vllm_config, kv_cache_spec)

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.is_ours = attention.is_our_spec(kv_cache_spec)
        if self.is_ours:
            self._init_reorder_batch_threshold(DECODE_LEN)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Return the metadata of one step."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata.nibblekv_split = attention.split_prefills(common_attn_metadata, DECODE_LEN) if self.is_ours else None
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Return metadata to capture with: a graph reads stored pages whatever batch it is replayed for."""
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        metadata.nibblekv_split = None
        return metadata


class NibbleKVTritonImpl(QuantizedAttention, TritonAttentionImpl):
    """One layer's attention on a CUDA GPU."""

    longest_decode = DECODE_LEN

    def nibblekv_reserve(self, query: torch.Tensor) -> None:
        """Allocate what attention takes: the kernels' workspace, a float32 for each query's head, the requests' windows, and
        what maps queries for a calibration.
        """
        from nibblekv.backends.triton.prefill import WORKSPACE_BYTES

        size = WORKSPACE_BYTES + 4 * query.shape[0] * query.shape[1] + self.nibblekv_window_bytes
        if self.nibblekv_calibration is not None:
            size += query.numel() * (_EXACT_MAP_BYTES if self.nibblekv_strict else _MAP_BYTES)
        torch.empty(size, dtype=torch.uint8, device=query.device)


class NibbleKVTritonBackend(QuantizedBackend, TritonAttentionBackend):
    """Stands for TRITON_ATTN in vLLM's table."""

    @staticmethod
    def get_name() -> str:
        """Return the name of the backend whose place this one takes; vLLM compares it for some models."""
        return "TRITON_ATTN"

    @staticmethod
    def get_impl_cls() -> type[NibbleKVTritonImpl]:
        """Return the implementation class."""
        return NibbleKVTritonImpl

    @staticmethod
    def get_builder_cls() -> type[NibbleKVTritonMetadataBuilder]:
        """Return the metadata builder class."""
        return NibbleKVTritonMetadataBuilder

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *args: Any, **kwargs: Any
    ) -> str | None:
        """Return why a head size cannot be stored, or what vLLM's backend says."""
        fits = MIN_HEAD_SIZE <= head_size <= MAX_HEAD_SIZE and head_size % HEAD_SIZE_MULTIPLE == 0
        if attention.is_ours(kv_cache_dtype) and not fits:
            return f"head_size {head_size} is not a multiple of {HEAD_SIZE_MULTIPLE} from {MIN_HEAD_SIZE} to {MAX_HEAD_SIZE}"
        return super().supports_combination(head_size, dtype, kv_cache_dtype, *args, **kwargs)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Return the physical order of the shape's dimensions (vLLM 0.28 and older): head tiles whole, for our pages."""
        if attention.model_is_ours():
            return (1, 2, 0, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)
        return TritonAttentionBackend.get_kv_cache_stride_order(include_num_layers_dimension)

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        """Return the physical orders that keep head tiles whole, for our pages (vLLM 0.29 and newer)."""
        if attention.model_is_ours():
            from vllm.v1.kv_cache_interface import KVCacheLayout as Order

            return (Order.LBHNC, Order.BLHNC, Order.BHLNC, Order.LHBNC)
        return super().supported_kv_cache_layouts()
