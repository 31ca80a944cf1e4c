"""vLLM on CUDA GPUs: takes the place of TRITON_ATTN, and passes every layer of another cache dtype on to it.

Prefills attend to their own raw keys and values and read stored pages for what came before; decoding, speculative
verification and everything inside a captured CUDA graph read stored pages only.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from nibblekv.formats import HEAD_SIZE_MULTIPLE, MAX_HEAD_SIZE, MIN_HEAD_SIZE
from nibblekv.integrations.vllm import attention
from nibblekv.integrations.vllm.attention import QuantizedAttention

if current_platform.is_cuda():
    # Prefills take vLLM's FlashAttention once it is imported, which vLLM does for its own backend only.
    with contextlib.suppress(ImportError):
        import vllm.vllm_flash_attn.flash_attn_interface  # noqa: F401

logger = init_logger("vllm.nibblekv")

# New tokens of a request up to which it counts as decoding, draft tokens included. Below about this many, reading packed
# pages costs less than preparing a prefill.
DECODE_LEN = 16


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

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        use_alibi_sqrt: bool = False,
        chunk_lookback: int = -1,
    ) -> None:
        self.is_ours = attention.is_ours(kv_cache_dtype)
        if self.is_ours and attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY):
            logger.info_once("nibblekv leaves encoder attention as it is: it keeps no KV cache.")
            self.is_ours, kv_cache_dtype = False, "auto"
        if self.is_ours:
            self.configure(
                head_size, scale, num_kv_heads, sliding_window, kv_cache_dtype, logits_soft_cap, attn_type,
                kv_sharing_target_layer_name, use_alibi_sqrt, chunk_lookback,
            )  # fmt: skip
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name, sinks, use_alibi_sqrt, chunk_lookback,
        )  # fmt: skip

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store new keys and values (vLLM's interface)."""
        if self.is_ours:
            self.nibblekv_write(layer, key, value, kv_cache, slot_mapping)
        else:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend one step's queries (vLLM's interface). Without metadata, in the profiling run, the output is 0."""
        if not self.is_ours:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )  # fmt: skip
        if output_block_scale is not None:
            raise NotImplementedError("output_block_scale: expected None, got fused block-scaled output quantization")
        if attn_metadata is None:
            return output.fill_(0)
        options: dict[str, Any] = {
            "causal": attn_metadata.causal,
            "alibi_slopes": self.alibi_slopes,
            "sinks": None if self.sinks is None else self.sinks.float(),
        }
        if attn_metadata.mm_prefix_range_tensor is not None:
            options["mm_prefix_ranges"] = attn_metadata.mm_prefix_range_tensor
            options["mm_prefix_clamp"] = getattr(layer, "mm_prefix_clamp_sliding_window", False)
        if attn_metadata.rswa_prefix_lens is not None:
            options["rswa_prefix_lens"] = attn_metadata.rswa_prefix_lens
            options["rswa_window"] = attn_metadata.rswa_window
        self.nibblekv_attend(layer, query, key, value, kv_cache, attn_metadata, output, output_scale, options)
        return output


class NibbleKVTritonBackend(TritonAttentionBackend):
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

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return the spec with our bytes per head and token (vLLM 0.28 and newer)."""
        if attention.is_our_spec(spec):
            return attention.customize_spec(spec)
        return super().customize_spec(spec)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return the cache's shape (vLLM 0.28 and older)."""
        if attention.is_ours(cache_dtype_str):
            return attention.kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str)
        return TritonAttentionBackend.get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str)

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
