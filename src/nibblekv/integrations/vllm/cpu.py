"""vLLM on CPU: takes the place of CPU_ATTN, and passes every layer of another cache dtype on to it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionMetadataBuilder, MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import compute_mm_prefix_range_tensor

from nibblekv.integrations.vllm import attention
from nibblekv.integrations.vllm.attention import PrefillSplit, QuantizedAttention, QuantizedBackend
from nibblekv.integrations.vllm.settings import DTYPES
from nibblekv.layout import BLOCK_SIZE_MULTIPLE

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
    mm_prefix_range_tensor: torch.Tensor | None
    nibblekv_split: PrefillSplit | None
    rswa_prefix_lens: torch.Tensor | None = None


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
            mm_prefix_range_tensor=compute_mm_prefix_range_tensor(ranges, common.num_reqs, common.seq_lens.device),
            nibblekv_split=attention.split_prefills(common, DECODE_LEN),
        )


class NibbleKVCPUImpl(QuantizedAttention, CPUAttentionBackendImpl):
    """One layer's attention on CPU."""

    stock_is_wrong = True
    longest_decode = DECODE_LEN


class NibbleKVCPUBackend(QuantizedBackend, CPUAttentionBackend):
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

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return the block sizes that a layer can take: any multiple of 16 for ours."""
        if attention.is_our_spec(kv_cache_spec) or (kv_cache_spec is None and attention.model_is_ours()):
            return [MultipleOf(BLOCK_SIZE_MULTIPLE)]
        return CPUAttentionBackend.get_supported_kernel_block_sizes()
