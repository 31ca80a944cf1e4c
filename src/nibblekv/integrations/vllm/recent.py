"""The last tokens of each request, unquantized: a second kind of pages that vLLM manages beside the packed ones.

Every layer that stores packed pages gets a companion in vLLM's table of layers, which asks for a sliding window of W tokens
in the model's dtype. vLLM keeps layers of one kind in a group with block tables of its own, so it allocates the companions'
blocks from the same pool, counts them, frees them as tokens leave the window, and takes a prefix from the cache only where
the W tokens before its end are there unquantized too: no result depends on which requests ran before.

A page of a companion is as large as a packed one and holds fewer tokens, [tokens, num_kv_heads, key and value].
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder, MultipleOf
from vllm.v1.kv_cache_interface import SlidingWindowSpec

__all__ = ["RecentLayer", "RecentTokens", "check_window", "recent_name"]


def recent_name(layer_name: str) -> str:
    """Return the name of a layer's companion: with the same number in it, by which vLLM orders layers."""
    return f"{layer_name}.recent"


def check_window(config: Any, longest_decode: int) -> None:
    """Raise NotImplementedError where vLLM could not keep unquantized tokens as this module needs it.

    longest_decode: new tokens of a request up to which it is attended from the store as it is.
    """
    speculative, skipped = config.speculative_config, config.cache_config.kv_cache_dtype_skip_layers
    reasons = {
        "a vLLM release from 0.29 on, in which a layer states the bytes of its pages": not hasattr(
            AttentionBackend, "supported_kv_cache_layouts"
        ),
        "vLLM's hybrid KV cache manager, which frees tokens that left a window": bool(
            config.scheduler_config.disable_hybrid_kv_cache_manager
        ),
        "no --kv-transfer-config: a connector's peers would have to keep the unquantized tokens too": (
            config.kv_transfer_config is not None
        ),
        "no --kv-cache-dtype-skip-layers, whose pages are of another size": bool(skipped),
        "no draft model beside it (ngram and suffix drafts are served)": (
            speculative is not None and speculative.method not in ("ngram", "ngram_gpu", "suffix")
        ),
        f"at most {longest_decode - 1} draft tokens": (
            speculative is not None and speculative.num_speculative_tokens >= longest_decode
        ),
        "no decode context parallelism": config.parallel_config.decode_context_parallel_size > 1,
        "no Mamba layers in the model": bool(config.model_config.is_hybrid),
        "no chunked local attention, for which vLLM cuts requests into several": (
            config.model_config.attention_chunk_size is not None
        ),
    }
    for expected, refused in reasons.items():
        if refused:
            raise NotImplementedError(f"NIBBLEKV_WINDOW: expected {expected}; leave the window out, or change that")


@dataclass
class RecentMetadata:
    """Where a step's unquantized tokens lie, the same for all layers of a group.

    block_table: [num_seqs, max_blocks], seq_lens: [num_seqs], as vLLM gives them for the companions' group.
    block_size: tokens of a page.
    written: (page, place in it) of each new token, [num_tokens] int64; of padding, page 0, which vLLM gives to no request.
    stored: the pages of a ring that ends with each sequence, [num_seqs, pages] int64, long enough for decoding. In a CUDA
        graph these two are read where they were at capture.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    block_size: int
    written: tuple[torch.Tensor, torch.Tensor]
    stored: torch.Tensor


def ring_pages(block_table: torch.Tensor, ends: torch.Tensor, length: int, block_size: int) -> torch.Tensor:
    """Return the pages [num_seqs, pages] int64 of a ring that holds at least the last `length` tokens before each end.

    Block b of a sequence is page b % pages of the ring, so position p is row p % (pages * block_size). Blocks before a
    sequence's first are any of its table.
    """
    pages = page_count(length, block_size)
    newest = (ends.long()[:, None] - 1) // block_size
    block = newest - (newest - torch.arange(pages, device=ends.device)) % pages
    return block_table.gather(1, block.clamp_(0, block_table.shape[1] - 1)).long()


def page_count(length: int, block_size: int) -> int:
    """Return the most pages that `length` consecutive tokens lie in."""
    return 1 + -(-(length - 1) // block_size)


class RecentMetadataBuilder(AttentionMetadataBuilder):
    """Finds the places of a step's unquantized tokens."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return that nothing here limits the graphs."""
        return AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        scheduler = vllm_config.scheduler_config

        self.ring = layer.ring
        self.pages = torch.zeros(2, scheduler.max_num_batched_tokens, dtype=torch.int64, device=device)
        stored = page_count(layer.ring, kv_cache_spec.block_size)
        self.stored = torch.zeros(scheduler.max_num_seqs, stored, dtype=torch.int64, device=device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> RecentMetadata:
        """Return the metadata of one step."""
        common, size = common_attn_metadata, self.kv_cache_spec.block_size
        seq_lens, table = common.seq_lens[: common.num_reqs], common.block_table_tensor[: common.num_reqs]
        slots = common.slot_mapping[: common.num_actual_tokens].clamp(min=0)
        page, place = self.pages[:, : len(slots)]
        torch.div(slots, size, rounding_mode="floor", out=page)
        torch.remainder(slots, size, out=place)
        stored = self.stored[: len(seq_lens)].copy_(ring_pages(table, seq_lens, self.ring, size))
        return RecentMetadata(table, seq_lens, size, (page, place), stored)


class RecentLayer(AttentionLayerBase):
    """The companion of a layer with packed pages, in vLLM's table of layers."""

    def __init__(self, layer: Any, window: int, longest_decode: int, dtype: torch.dtype, layers: dict[str, Any]) -> None:
        """Take what the companion keeps.

        Args:
            layer: vLLM's attention layer.
            window: tokens that a query reads unquantized, its own included.
            longest_decode: new tokens of a request up to which it is attended from the store as it is.
            dtype: of keys and values.
            layers: vLLM's table, in which all layers are found when vLLM asks for the pages.
        """
        self.layer = layer
        self.window = window
        self.ring = window + longest_decode - 1
        self.dtype = dtype
        self.layers = layers
        self.kv_cache = torch.tensor([])

    @property
    def pages(self) -> torch.Tensor:
        """vLLM's pages, [num_blocks, num_kv_heads, block_size, bytes], as [num_blocks, block_size, num_kv_heads, values]."""
        num_blocks, num_kv_heads, block_size, content = self.kv_cache.shape
        if num_kv_heads > 1 and self.kv_cache.stride(1) != block_size * content:
            raise NotImplementedError(
                f"NIBBLEKV_WINDOW: expected pages in one piece, got heads {self.kv_cache.stride(1)} bytes apart; leave "
                "VLLM_KV_CACHE_LAYOUT out"
            )
        strides = (self.kv_cache.stride(0), num_kv_heads * content, content, 1)
        pages = self.kv_cache.as_strided((num_blocks, block_size, num_kv_heads, content), strides)
        return pages.view(self.dtype)

    def get_attn_backend(self) -> Any:
        """Return the layer's backend with a builder of its own and any block size."""
        return _recent_backend(self.layer.get_attn_backend())

    def get_kv_cache_spec(self, vllm_config: Any) -> SlidingWindowSpec:
        """Return a sliding window in pages of the packed pages' size: groups of layers share one pool."""
        companions = [layer for layer in self.layers.values() if isinstance(layer, RecentLayer)]
        page_bytes = max(companion.packed_spec(vllm_config).page_size_bytes for companion in companions)
        packed = self.packed_spec(vllm_config)
        content = (packed.head_size + packed.head_size_v) * self.dtype.itemsize
        fitting = page_bytes // (packed.num_kv_heads * content)
        sizes = [size for size in range(1, fitting + 1) if packed.block_size % size == 0]
        if not sizes:
            raise NotImplementedError(
                f"NIBBLEKV_WINDOW: expected packed pages that hold an unquantized token of "
                f"{packed.num_kv_heads * content} bytes, got {page_bytes} bytes; raise --block-size"
            )
        return SlidingWindowSpec(
            block_size=sizes[-1],
            num_kv_heads=packed.num_kv_heads,
            head_size=packed.head_size,
            head_size_v=packed.head_size_v,
            # The packed pages' own: caches that differ in these are zeroed by vLLM whenever a block changes hands.
            dtype=packed.dtype,
            kv_quant_mode=packed.kv_quant_mode,
            state_content_bytes=content,
            page_size_padded=page_bytes,
            sliding_window=self.window,
        )

    def packed_spec(self, vllm_config: Any) -> Any:
        """Return the spec of the layer's packed pages."""
        return self.layer.get_attn_backend().customize_spec(self.layer.get_kv_cache_spec(vllm_config))


@functools.cache
def _recent_backend(base: Any) -> Any:
    fields = {
        "__module__": __name__,
        "get_builder_cls": staticmethod(lambda: RecentMetadataBuilder),
        "get_supported_kernel_block_sizes": staticmethod(lambda kv_cache_spec=None: [MultipleOf(1)]),
    }
    return type(f"{base.__name__}Recent", (base,), fields)


class RecentTokens:
    """The unquantized tokens of one layer in one step: written once, and read as the options of an attention call."""

    def __init__(self, companion: RecentLayer, metadata: RecentMetadata) -> None:
        self.metadata = metadata
        self.window = companion.window
        self.longest_decode = companion.ring - companion.window + 1
        self.pages = companion.pages
        self.head_size = companion.layer.head_size

    def write(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the step's new tokens [num_tokens, num_kv_heads, head_size(_v)]; rows beyond them are padding."""
        page, place = self.metadata.written
        num_tokens = min(page.shape[0], key.shape[0])
        page, place = page[:num_tokens], place[:num_tokens]
        self.pages[page, place, :, : self.head_size] = key[:num_tokens].to(self.pages.dtype)
        self.pages[page, place, :, self.head_size :] = value[:num_tokens].to(self.pages.dtype)

    def of_decodes(self, last: int) -> dict[str, Any]:
        """Return the options for the first sequences, each with at most `longest_decode` queries."""
        return self._options(self.metadata.stored[:last])

    def of_prefill(self, sequence: int, query_len: int) -> dict[str, Any]:
        """Return the options for one sequence whose queries may be many: its own tokens are read from the store too."""
        ends = self.metadata.seq_lens[sequence : sequence + 1]
        return self._options(self._ring(sequence, ends, self.window + query_len - 1))

    def before_prefills(self, first: int, query_start_loc: torch.Tensor) -> dict[str, Any]:
        """Return the options for sequences whose own keys and values the call has: the tokens before those."""
        lengths = query_start_loc[1:] - query_start_loc[:-1]
        ends = self.metadata.seq_lens[first : first + len(lengths)] - lengths
        return self._options(self._ring(first, ends, self.window))

    def _ring(self, first: int, ends: torch.Tensor, length: int) -> torch.Tensor:
        table = self.metadata.block_table[first : first + len(ends)]
        return ring_pages(table, ends, length, self.metadata.block_size)

    def _options(self, ring: torch.Tensor) -> dict[str, Any]:
        # Whole pages: on a CPU four times as fast as token by token.
        pages = self.pages.index_select(0, ring.flatten())
        rows = pages.view(ring.shape[0], -1, *pages.shape[2:])  # [num_seqs, ring, num_kv_heads, key and value]
        return {
            "raw_key": rows[..., : self.head_size],
            "raw_value": rows[..., self.head_size :],
            "raw_window": self.window,
        }
