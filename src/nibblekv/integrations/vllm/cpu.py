"""vLLM on CPU: takes the place of CPU_ATTN, and passes every layer of another cache dtype on to it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionMetadataBuilder, AttentionType, MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import compute_mm_prefix_range_tensor

from nibblekv.integrations.vllm import attention
from nibblekv.integrations.vllm.attention import PrefillSplit, QuantizedAttention
from nibblekv.integrations.vllm.settings import DTYPES
from nibblekv.layout import BLOCK_SIZE_MULTIPLE

logger = init_logger("vllm.nibblekv")

# New tokens of a request up to which it counts as decoding, draft tokens included.
DECODE_LEN = 8


@dataclass
class NibbleKVCPUMetadata:
    """What one step of vLLM asks of the layers of a group (tensors as in `nibblekv.paged_attention`)."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    max_seq_len: int
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor
    mm_prefix_ranges: torch.Tensor | None
    nibblekv_split: PrefillSplit | None


class NibbleKVCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds metadata for a group of our layers, and vLLM's own for any other group."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.is_ours = attention.is_our_spec(kv_cache_spec)
        if self.is_ours:
            AttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)
            self._init_reorder_batch_threshold(DECODE_LEN)
            return
        if vllm_config.cache_config.cache_dtype in DTYPES:
            # A layer that is left unquantized: vLLM's builder would plan for the dtype of the whole model.
            vllm_config = copy.copy(vllm_config)
            vllm_config.cache_config = copy.copy(vllm_config.cache_config)
            vllm_config.cache_config.cache_dtype = "auto"
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Return the metadata of one step."""
        if not self.is_ours:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        common = common_attn_metadata
        ranges = common.mm_req_doc_ranges
        return NibbleKVCPUMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc[: common.num_reqs + 1],
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens[: common.num_reqs],
            block_table=common.block_table_tensor[: common.num_reqs],
            slot_mapping=common.slot_mapping,
            causal=common.causal,
            mm_prefix_ranges=compute_mm_prefix_range_tensor(ranges, common.num_reqs, common.seq_lens.device),
            nibblekv_split=attention.split_prefills(common, DECODE_LEN),
        )


class NibbleKVCPUImpl(QuantizedAttention, CPUAttentionBackendImpl):
    """One layer's attention on CPU."""

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
    ) -> None:
        self.is_ours = attention.is_ours(kv_cache_dtype)
        if kv_cache_dtype in DTYPES and not self.is_ours:
            # vLLM's own CPU backend would accept the dtype and read its bytes as something else.
            raise ValueError(
                f"kv_cache_dtype: expected 'auto' on CPU where nibblekv is switched off, got {kv_cache_dtype!r}"
            )
        if self.is_ours and attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY):
            logger.info_once("nibblekv leaves encoder attention as it is: it keeps no KV cache.")
            self.is_ours, kv_cache_dtype = False, "auto"
        if self.is_ours:
            self.configure(
                num_heads, head_size, scale, num_kv_heads, sliding_window, kv_cache_dtype, logits_soft_cap, attn_type,
                kv_sharing_target_layer_name,
            )  # fmt: skip
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name, sinks,
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
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale: expected None on CPU, got fused output quantization")
        if attn_metadata is None:
            return output.fill_(0)
        options: dict[str, Any] = {
            "causal": attn_metadata.causal,
            "alibi_slopes": self.alibi_slopes,
            "sinks": None if self.sinks is None else self.sinks.float(),
        }
        if attn_metadata.mm_prefix_ranges is not None:
            options["mm_prefix_ranges"] = attn_metadata.mm_prefix_ranges
            options["mm_prefix_clamp"] = getattr(layer, "mm_prefix_clamp_sliding_window", False)
        self.nibblekv_attend(layer, query, key, value, kv_cache, attn_metadata, output, None, options)
        return output


class NibbleKVCPUBackend(CPUAttentionBackend):
    """Stands for CPU_ATTN in vLLM's table."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = [*CPUAttentionBackend.supported_kv_cache_dtypes, *DTYPES]

    @staticmethod
    def get_name() -> str:
        """Return the name of the backend whose place this one takes."""
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type[NibbleKVCPUImpl]:
        """Return the implementation class."""
        return NibbleKVCPUImpl

    @staticmethod
    def get_builder_cls() -> type[NibbleKVCPUMetadataBuilder]:
        """Return the metadata builder class."""
        return NibbleKVCPUMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return the spec with our bytes per head and token (vLLM 0.28 and newer)."""
        return attention.customize_spec(spec)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return the cache's shape (vLLM 0.28 and older)."""
        if attention.is_ours(cache_dtype_str):
            return attention.kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str)
        return CPUAttentionBackend.get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return the block sizes that a layer can take: any multiple of 16 for ours."""
        if attention.is_our_spec(kv_cache_spec) or (kv_cache_spec is None and attention.model_is_ours()):
            return [MultipleOf(BLOCK_SIZE_MULTIPLE)]
        return CPUAttentionBackend.get_supported_kernel_block_sizes()
