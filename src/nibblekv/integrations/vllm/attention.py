"""What the CPU and the CUDA backend share: choosing a layout for a layer, and calling nibblekv's operations for vLLM.

Differences of vLLM's releases, and where they are bridged:

    what                       0.26 - 0.27                 0.28                    0.29 - 0.32
    shape of the cache         get_kv_cache_shape          get_kv_cache_shape      from the spec
    bytes per (head, token)    fixed, D + 8 for int4       customize_spec          customize_spec
    physical order             get_kv_cache_stride_order   the same                supported_kv_cache_layouts
    kernel block sizes         no argument                 no argument             optional kv_cache_spec
    cascade attention fields   in the metadata             in the metadata         gone after 0.31

Each backend defines all of these hooks; a release calls the ones that it knows. `settings.SUPPORTED` states the range.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionType

from nibblekv.calibration import LayerCalibration
from nibblekv.formats import check_head_size, get_format
from nibblekv.integrations.vllm.calibrated import Checkpoint, calibrate_layers, load_file
from nibblekv.integrations.vllm.recent import RecentLayer, RecentTokens, check_window, recent_name
from nibblekv.integrations.vllm.settings import DTYPES, Settings
from nibblekv.integrations.vllm.transfer import name_pages
from nibblekv.layout import KVCacheLayout
from nibblekv.ops import paged_attention, reshape_and_cache

logger = init_logger("vllm.nibblekv")

# Settings, cache dtype and owner of the layers of the model that this process has built last: vLLM calls some hooks outside
# its configuration context. The layers hold the cache, so they are not kept alive.
_last_settings: Settings | None = None
_last_dtype: str | None = None
_last_compilation: weakref.ref[Any] | None = None


@dataclass
class PrefillSplit:
    """Where the prefill requests of a batch begin. vLLM puts requests with few new tokens first, whole short prompts not.

    num_decodes, num_decode_tokens: requests and tokens before the first prefill.
    num_tokens: all tokens of the batch, without padding.
    query_start_loc: [num_prefills + 1] int32, counted from the first prefill token.
    starts: the same on the host.
    max_decode_len: longest query of the first part.
    host_lengths: of the prefills, see `AttentionOptions`; None where the host knows upper bounds only.
    """

    num_decodes: int
    num_decode_tokens: int
    num_tokens: int
    query_start_loc: torch.Tensor
    starts: list[int]
    max_decode_len: int
    host_lengths: tuple[list[int], list[int]] | None


def current_settings() -> Settings:
    """Return the settings of the model being built, else of the last one built, else of the environment."""
    global _last_settings, _last_dtype, _last_compilation
    config = get_current_vllm_config_or_none()
    if config is not None:
        _last_settings = Settings.from_environment().updated(config.additional_config)
        _last_dtype = None if config.cache_config is None else config.cache_config.cache_dtype
        _last_compilation = weakref.ref(config.compilation_config)
    elif _last_settings is None:
        return Settings.from_environment()
    return _last_settings


def is_ours(kv_cache_dtype: str | None) -> bool:
    """Say whether a layer of this cache dtype stores nibblekv's pages."""
    return kv_cache_dtype in DTYPES and not current_settings().disabled


def model_is_ours() -> bool:
    """Say whether the model being built, or the last one built, stores nibblekv's pages in any layer.

    A draft model of another cache dtype is built after its target, and shares the table of layers with it.
    """
    if current_settings().disabled:
        return False
    return _last_dtype in DTYPES or any(getattr(layer, "kv_cache_dtype", None) in DTYPES for layer in _built_layers())


def _built_layers() -> list[Any]:
    compilation = None if _last_compilation is None else _last_compilation()
    return [] if compilation is None else list(compilation.static_forward_context.values())


def is_our_spec(spec: Any) -> bool:
    """Say whether a KV cache spec belongs to a layer that stores nibblekv's pages (encoders keep no pages)."""
    mode = getattr(spec, "kv_quant_mode", None)
    if mode is None or "EncoderOnly" in type(spec).__name__:
        return False
    return is_ours(mode.name.lower())


@functools.cache
def layout_of(
    settings: Settings, kv_cache_dtype: str, num_kv_heads: int, head_size: int, head_size_v: int, block_size: int
) -> KVCacheLayout:
    """Return the layout of a layer's pages."""
    k_format, v_format = settings.formats(kv_cache_dtype)
    return KVCacheLayout.create(
        k_format, v_format=v_format, num_kv_heads=num_kv_heads, head_size=head_size,
        head_size_v=head_size_v, block_size=block_size,
    )  # fmt: skip


def customize_spec(spec: Any) -> Any:
    """Return vLLM's cache spec with the bytes that one (head, token) of the chosen formats takes.

    Layers of several head sizes share one pool, in which vLLM enlarges blocks where one page size divides the other, and
    else pads pages: `int4` rows of 264 and 520 bytes (head sizes 256 and 512) would waste half of the smaller layers' pages.
    So the larger rows are padded to a multiple of the smallest, 528 bytes.
    """
    if spec.state_content_bytes is not None:
        return spec
    settings, dtype = current_settings(), spec.kv_quant_mode.name.lower()

    def slot_bytes(head_size: int, head_size_v: int) -> int:
        # A spec that is only asked for its bytes per token may have a block size of 1.
        return layout_of(settings, dtype, spec.num_kv_heads, head_size, head_size_v, 16).slot_bytes

    content = slot_bytes(spec.head_size, spec.head_size_v)
    ours = (layer for layer in _built_layers() if getattr(layer, "kv_cache_dtype", None) == dtype)
    smallest = min((layer.head_size for layer in ours), default=spec.head_size)
    if spec.head_size == spec.head_size_v and spec.head_size % smallest == 0:
        content = max(content, spec.head_size // smallest * slot_bytes(smallest, smallest))
    return replace(spec, state_content_bytes=content)


def kv_cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, kv_cache_dtype: str
) -> tuple[int, int, int, int]:
    """Return the logical shape (blocks, heads, slots, bytes) of a layer's cache, for releases that ask a backend for it.

    Raises:
        NotImplementedError: these releases count D + 8 bytes for 4-bit rows themselves, and the formats take another size.
    """
    layout = layout_of(current_settings(), kv_cache_dtype, num_kv_heads, head_size, head_size, block_size)
    budget = 2 * get_format(DTYPES[kv_cache_dtype]).row_bytes(head_size) + 8
    if layout.slot_bytes != budget and not hasattr(AttentionBackend, "customize_spec"):
        raise NotImplementedError(
            f"NIBBLEKV_FORMAT: expected formats of {budget} bytes per head and token with this vLLM release, "
            f"got {layout.slot_bytes}; vLLM 0.28 or newer takes any"
        )
    return (num_blocks, num_kv_heads, block_size, layout.slot_bytes)


def split_prefills(common: Any, threshold: int) -> PrefillSplit | None:
    """Find the first request of a batch with more than `threshold` new tokens; None if there is no such request."""
    if common.max_query_len <= threshold:
        return None
    starts = common.query_start_loc_cpu[: common.num_reqs + 1]
    query_lens = starts[1:] - starts[:-1]
    prefills = query_lens > threshold
    if not bool(prefills.any()):  # max_query_len may be an upper bound
        return None
    num_decodes = int(prefills.int().argmax())
    num_decode_tokens = int(starts[num_decodes])
    lengths, prefilling = common.seq_lens_cpu_upper_bound, common.is_prefilling
    # vLLM knows the lengths of prompts; of a request whose drafts it has not verified yet, a bound. And it leaves these
    # lengths behind where a drafter that takes further tokens moves all the other fields on (`extend_all_queries_by_N`).
    known = lengths is not None and prefilling is not None
    known = known and int(lengths[: common.num_reqs].max()) >= common.max_seq_len
    host_starts = (starts[num_decodes:] - num_decode_tokens).tolist()
    if known and bool(prefilling[num_decodes : common.num_reqs].all()):
        host_lengths = (host_starts, lengths[num_decodes : common.num_reqs].tolist())
    else:
        host_lengths = None
    return PrefillSplit(
        num_decodes,
        num_decode_tokens,
        int(starts[-1]),
        common.query_start_loc[num_decodes : common.num_reqs + 1] - num_decode_tokens,
        host_starts,
        int(query_lens[:num_decodes].max()) if num_decodes else 0,
        host_lengths,
    )


class QuantizedBackend:
    """The part of an attention backend that describes nibblekv's pages: a mixin before one of vLLM's backends."""

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return the spec with our bytes per head and token (vLLM 0.28 and newer)."""
        return customize_spec(spec) if is_our_spec(spec) else super().customize_spec(spec)  # type: ignore[misc]

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return the cache's shape (vLLM 0.28 and older)."""
        shape = kv_cache_shape if is_ours(cache_dtype_str) else super().get_kv_cache_shape  # type: ignore[misc]
        return shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str)


class QuantizedAttention:
    """The part of an attention implementation that reads and writes nibblekv's pages, for one layer.

    A mixin before one of vLLM's implementations, which serves the layers of any other cache dtype. The constructor refuses
    what could not be served later.
    """

    # Whether vLLM's own implementation accepts these dtypes and reads their bytes as something else.
    stock_is_wrong = False
    # New tokens of a request up to which it counts as decoding, draft tokens included.
    longest_decode = 1

    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None

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
        **extra: Any,
    ) -> None:
        """Take vLLM's arguments, keep what the calls need, and build vLLM's implementation.

        Args:
            extra: use_alibi_sqrt and chunk_lookback, from the releases and backends that have them.

        Raises:
            ValueError, NotImplementedError: the layer cannot store these pages; the message says what to do.
        """
        self.is_ours = is_ours(kv_cache_dtype)
        if self.stock_is_wrong and kv_cache_dtype in DTYPES and not self.is_ours:
            raise ValueError(
                f"kv_cache_dtype: expected 'auto' on CPU where nibblekv is switched off, got {kv_cache_dtype!r}"
            )
        if self.is_ours and attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY):
            logger.info_once("nibblekv leaves encoder attention as it is: it keeps no KV cache.")
            self.is_ours, kv_cache_dtype = False, "auto"
        if self.is_ours:
            if attn_type != AttentionType.DECODER:
                raise NotImplementedError(
                    f"kv_cache_dtype: expected 'auto' for a model with {attn_type} attention layers (cross-attention keeps "
                    f"the encoder's keys), got {kv_cache_dtype!r}; run it without --kv-cache-dtype, or name the layers in "
                    "--kv-cache-dtype-skip-layers"
                )
            check_head_size(head_size)
            name_pages()
            self.nibblekv_settings = current_settings()
            # Raw keys stand for those of a request's own chunk, which is cut by what else is in the batch.
            self.nibblekv_strict = self.nibblekv_settings.strict or bool(envs.VLLM_BATCH_INVARIANT)
            self.nibblekv_dtype = kv_cache_dtype
            self.nibblekv_shape = (num_kv_heads, head_size)
            self.nibblekv_owns_cache = kv_sharing_target_layer_name is None
            self.nibblekv_stores_in = kv_sharing_target_layer_name
            self.nibblekv_companion: RecentLayer | None = None
            self.nibblekv_window_bytes = 0
            config = get_current_vllm_config_or_none()
            if self.nibblekv_settings.window and config is not None:
                check_window(config, self.longest_decode)
                row_bytes = 2 * num_kv_heads * head_size * config.model_config.dtype.itemsize
                ring = self.nibblekv_settings.window + self.longest_decode - 1
                self.nibblekv_window_bytes = config.scheduler_config.max_num_seqs * ring * row_bytes
            # Set when the weights are loaded: constants of the layer whose pages this one reads.
            self.nibblekv_calibration: LayerCalibration | None = None
            self.nibblekv_checkpoint: Checkpoint | None = None
            if self.nibblekv_settings.calibration != "off" and config is not None:
                self.nibblekv_checkpoint = Checkpoint.of(config)
                if not any(getattr(getattr(layer, "impl", None), "is_ours", False) for layer in _built_layers()):
                    # The first layer: what is wrong is said before the weights are read.
                    load_file(self.nibblekv_settings.calibration, self.nibblekv_checkpoint, before_weights=True)
            self.nibblekv_options: dict[str, Any] = {
                "softmax_scale": float(scale),
                "sliding_window": sliding_window or 0,
                "softcap": float(logits_soft_cap or 0.0),
                "alibi_sqrt": extra.get("use_alibi_sqrt", False),
                "chunk_lookback": extra.get("chunk_lookback", -1),
                "batch_invariant": self.nibblekv_strict,
            }
            k_format, v_format = self.nibblekv_settings.formats(kv_cache_dtype)
            logger.info_once(
                "nibblekv stores the KV cache of %s as %s keys and %s values%s%s.",
                kv_cache_dtype,
                k_format,
                v_format,
                f", the last {window} tokens unquantized beside them" if (window := self.nibblekv_settings.window) else "",
                ", strict mode" if self.nibblekv_strict else "",
            )
        super().__init__(  # type: ignore[call-arg]
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name, sinks, **extra,
        )  # fmt: skip

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Calibrate all layers, and add companions for unquantized tokens to vLLM's table of layers (vLLM's interface).

        The table is complete by now.
        """
        super().process_weights_after_loading(act_dtype)  # type: ignore[misc]
        compilation = None if _last_compilation is None else _last_compilation()
        if compilation is None or not self.is_ours:
            return
        if self.nibblekv_checkpoint is not None:
            _calibrate(compilation.static_forward_context, self.nibblekv_settings.calibration, self.nibblekv_checkpoint)
        if self.nibblekv_settings.window:
            _add_companions(compilation.static_forward_context, act_dtype)

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
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)  # type: ignore[misc]

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend one step's queries (vLLM's interface). Without metadata, in the profiling run, the output is 0."""
        if not self.is_ours:
            return super().forward(  # type: ignore[misc]
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )  # fmt: skip
        if output_block_scale is not None:
            raise NotImplementedError("output_block_scale: expected None, got fused block-scaled output quantization")
        if attn_metadata is None:
            self.nibblekv_reserve(query)
            return output.fill_(0)
        options: dict[str, Any] = {
            "causal": attn_metadata.causal,
            "alibi_slopes": self.alibi_slopes,
            "sinks": self.sinks,
        }
        if attn_metadata.mm_prefix_range_tensor is not None:
            options["mm_prefix_ranges"] = attn_metadata.mm_prefix_range_tensor
            options["mm_prefix_clamp"] = getattr(layer, "mm_prefix_clamp_sliding_window", False)
        if attn_metadata.rswa_prefix_lens is not None:
            options["rswa_prefix_lens"] = attn_metadata.rswa_prefix_lens
            options["rswa_window"] = attn_metadata.rswa_window
        self.nibblekv_attend(layer, query, key, value, kv_cache, attn_metadata, output, output_scale, options)
        return output

    def nibblekv_reserve(self, query: torch.Tensor) -> None:
        """Allocate, for vLLM's profiling run to see, what attending so many queries takes; nothing unless overridden."""

    def nibblekv_layout(self, layer: torch.nn.Module, kv_cache: torch.Tensor) -> KVCacheLayout:
        """Return the layout of this layer's cache."""
        num_kv_heads, head_size = self.nibblekv_shape
        head_size_v = getattr(layer, "head_size_v", head_size)
        return layout_of(
            self.nibblekv_settings, self.nibblekv_dtype, num_kv_heads, head_size, head_size_v, kv_cache.shape[2]
        )  # fmt: skip

    def nibblekv_pages(self, kv_cache: torch.Tensor, layout: KVCacheLayout) -> torch.Tensor:
        """Return the cache as bytes, without what `customize_spec` padded its rows by."""
        pages = kv_cache.view(torch.uint8)
        if pages.shape[-1] == layout.slot_bytes:
            return pages
        return pages.flatten(-2)[..., : layout.tile_bytes] if layout.page == "planar" else pages[..., : layout.slot_bytes]

    def nibblekv_write(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store the new tokens. key and value may be longer than slot_mapping: the rest is padding."""
        num_tokens = min(slot_mapping.shape[0], key.shape[0])
        key, value = self.nibblekv_stored(key[:num_tokens], value[:num_tokens])
        layout = self.nibblekv_layout(layer, kv_cache)
        reshape_and_cache(
            key,
            value,
            self.nibblekv_pages(kv_cache, layout),
            slot_mapping[:num_tokens],
            layout,
            backend=self.nibblekv_settings.backend,
        )

    def nibblekv_stored(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as pages, window and a call's own rows hold them."""
        if self.nibblekv_calibration is None:
            return key, value
        return self.nibblekv_calibration.stored(key, value, batch_invariant=self.nibblekv_strict)

    def nibblekv_attend(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None,
        options: dict[str, Any],
    ) -> None:
        """Attend the batch: requests with few new tokens to stored pages, prefills to their own raw keys as well.

        In strict mode, for layers that share another layer's cache, and in captured graphs, all read stored pages only; with
        a window, the last tokens before a query are read from the unquantized store in any case.
        """
        num_tokens = metadata.num_actual_tokens
        split: PrefillSplit | None = getattr(metadata, "nibblekv_split", None)
        reads_own = not self.nibblekv_strict and self.nibblekv_owns_cache and key is not None and value is not None
        recent = self.nibblekv_recent(layer)
        if recent is None and not reads_own:
            split = None
        reads_own = reads_own and split is not None
        writes_recent = recent is not None and self.nibblekv_owns_cache
        if (reads_own or writes_recent) and key is not None and value is not None:
            key, value = self.nibblekv_stored(key[:num_tokens], value[:num_tokens])
            if recent is not None:
                recent.write(key, value)
        options = {**self.nibblekv_options, **options}
        if output_scale is not None:
            options["output_scale"] = output_scale.view(1)
        layout = self.nibblekv_layout(layer, kv_cache)
        cache = self.nibblekv_pages(kv_cache, layout)

        def attend(seqs: slice, tokens: slice, query_start_loc: torch.Tensor, max_query_len: int, **more: Any) -> None:
            # Of what `more` brings, keys and values are as stored.
            call: Callable[..., Any] = functools.partial(
                paged_attention,
                kv_cache=cache,
                block_table=metadata.block_table[seqs],
                seq_lens=metadata.seq_lens[seqs],
                query_start_loc=query_start_loc,
                layout=layout,
                max_query_len=max_query_len,
                max_seq_len=metadata.max_seq_len,
                backend=self.nibblekv_settings.backend,
                **more,
            )
            if self.nibblekv_calibration is not None:
                call = functools.partial(self.nibblekv_calibration.attend, call)
            call(query[tokens], out=output[tokens], **_slice_options(options, seqs))

        num_decodes = metadata.seq_lens.shape[0] if split is None else split.num_decodes
        boundary = num_tokens if split is None else split.num_decode_tokens
        max_query_len = int(metadata.max_query_len)  # of chunked local attention: NumPy's, which no kernel takes
        if num_decodes:
            longest = max_query_len if split is None else split.max_decode_len
            raw: dict[str, Any] = {}
            if recent is not None:
                raw, longest = recent.of_decodes(num_decodes), min(longest, recent.longest_decode)
            starts = metadata.query_start_loc[: num_decodes + 1]
            attend(slice(0, num_decodes), slice(0, boundary), starts, longest, **raw)
        if split is None:
            return
        end = num_decodes + len(split.starts) - 1
        if reads_own and key is not None and value is not None:
            raw = {} if recent is None else recent.before_prefills(num_decodes, split.query_start_loc)
            tokens = slice(boundary, split.num_tokens)
            attend(
                slice(num_decodes, end), tokens, split.query_start_loc, max_query_len,
                key=key[tokens], value=value[tokens], host_lengths=split.host_lengths, **raw,
            )  # fmt: skip
        elif recent is not None:
            # One by one: each needs a ring as long as its queries.
            for i, (first, last) in enumerate(pairwise(split.starts)):
                starts = split.query_start_loc[i : i + 2] - split.query_start_loc[i]
                raw = recent.of_prefill(num_decodes + i, last - first)
                seqs = slice(num_decodes + i, num_decodes + i + 1)
                attend(seqs, slice(boundary + first, boundary + last), starts, last - first, **raw)

    def nibblekv_recent(self, layer: Any) -> RecentTokens | None:
        """Return where this layer's unquantized tokens lie in this step, or None without a window."""
        if not self.nibblekv_settings.window:
            return None
        context = get_forward_context()
        metadata = context.attn_metadata[0] if isinstance(context.attn_metadata, list) else context.attn_metadata
        name = recent_name(self.nibblekv_stores_in or layer.layer_name)
        return RecentTokens(context.no_compile_layers[name], metadata[name])


def _calibrate(layers: dict[str, Any], setting: str, checkpoint: Checkpoint) -> None:
    """Give the layers of a model whose weights are loaded their constants, unless they have them.

    A draft model, which is loaded later, has none of its own; layers that read another layer's pages take that one's.
    """
    if not _calibrated(layers.values()):
        found = load_file(setting, checkpoint)
        if found is None:
            logger.warning_once("NIBBLEKV_CALIBRATION=auto: no calibration was saved for this model, so it runs without.")
            for layer in layers.values():  # or every layer would read the checkpoint to search again
                if isinstance(impl := getattr(layer, "impl", None), QuantizedAttention):
                    impl.nibblekv_checkpoint = None
            return
        path, calibration = found
        owners = [
            layer
            for layer in layers.values()
            if getattr(layer, "attn_type", None) == AttentionType.DECODER and layer.kv_sharing_target_layer_name is None
        ]
        split = checkpoint.num_stages > 1
        numbers = [extract_layer_index(layer.layer_name) if split else i for i, layer in enumerate(owners)]
        expected = checkpoint.num_layers if split else len(owners)
        if len(calibration.layers) != expected:
            raise ValueError(
                f"NIBBLEKV_CALIBRATION: expected {expected} layers, as the model caches, got {len(calibration.layers)} in "
                f"{path}"
            )
        calibrate_layers(
            list(zip(numbers, owners, strict=True)), found,
            rank=get_tensor_model_parallel_rank(), num_ranks=get_tensor_model_parallel_world_size(),
            device=current_platform.device_type,
        )  # fmt: skip
        logger.info_once("nibblekv maps keys and values by %s, a calibration taken from %s.", path, calibration.source)
    for layer in layers.values():
        impl = getattr(layer, "impl", None)
        if isinstance(impl, QuantizedAttention) and impl.is_ours and impl.nibblekv_stores_in is not None:
            impl.nibblekv_calibration = layers[impl.nibblekv_stores_in].impl.nibblekv_calibration


def _calibrated(layers: Iterable[Any]) -> bool:
    """Say whether any of vLLM's layers has constants."""
    return any(getattr(getattr(layer, "impl", None), "nibblekv_calibration", None) is not None for layer in layers)


def _add_companions(layers: dict[str, Any], dtype: torch.dtype) -> None:
    """Add a companion for each layer that stores packed pages and has none."""
    for name, layer in list(layers.items()):
        impl = getattr(layer, "impl", None)
        if isinstance(impl, QuantizedAttention) and impl.is_ours and impl.nibblekv_owns_cache:
            window = impl.nibblekv_settings.window
            companion = RecentLayer(layer, window, impl.longest_decode, dtype, layers)
            impl.nibblekv_companion = layers.setdefault(recent_name(name), companion)


def _slice_options(options: dict[str, Any], seqs: slice) -> dict[str, Any]:
    """Cut the options that hold one entry per sequence to some of the sequences."""
    return {
        name: value[seqs]
        if name in ("causal", "rswa_prefix_lens", "mm_prefix_ranges") and isinstance(value, torch.Tensor)
        else value
        for name, value in options.items()
    }
