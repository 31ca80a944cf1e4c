"""The GPU backend: portable Triton kernels for NVIDIA (compute capability 8.0 and newer) and AMD.

Beside them, behind the same functions, `hopper/` writes 4-bit rows and decodes pages of 4- and 8-bit codes, for plain
options, on compute capability 9.0; a call that it does not serve (its `supports` says why) takes the portable kernels.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from nibblekv.layout import KVCacheLayout
from nibblekv.options import AttentionOptions

OLDEST_CAPABILITY = (8, 0)
HOPPER = (9, 0)
# Tokens to which the bound on a sequence's length is rounded up before a call is planned.
REACH = 256
MOST_SKEW = 8
# Of float32 rows: wider ones do not fit in the shared memory of every GPU. 16-bit rows fit at every head size.
WIDEST_RAW = 256


def unavailable_reason() -> str | None:
    """Return why Triton kernels cannot run on this machine, or None."""
    if _has_gpu():
        return None
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if _interpreting():
        return None
    return "no CUDA or ROCm GPU is visible to torch (TRITON_INTERPRET=1 runs the kernels, slowly, on a CPU)"


def supports(layout: KVCacheLayout, options: AttentionOptions | None, device: torch.device) -> str | None:
    """Return why this backend cannot serve a call, or None: every layout and every option, on a GPU."""
    widest = max(layout.head_size, layout.head_size_v)
    if (
        options is not None
        and options.raw_key is not None
        and options.raw_key.dtype == torch.float32
        and widest > WIDEST_RAW
    ):
        return f"its kernels read raw keys and values of float32 up to head size {WIDEST_RAW}, got {widest}"
    if device.type == "cpu":
        return None if _interpreting() else "its kernels need a GPU, the tensors are on the CPU"
    if device.type != "cuda":
        return f"its kernels need a GPU, the tensors are on {device}"
    if torch.version.hip is None and _has_gpu() and capability(device) < OLDEST_CAPABILITY:
        return f"compute capability {OLDEST_CAPABILITY} or newer needed, got {capability(device)}"
    return None


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, layout: KVCacheLayout
) -> None:
    """Quantize rows and write them to their slots; see `nibblekv.reshape_and_cache`."""
    from nibblekv.backends.triton.launch import replay

    slot_mapping = _dense(slot_mapping)

    def write() -> None:
        if is_hopper(key.device):
            from nibblekv.backends.triton import hopper

            if hopper.write_supports(key, value, layout):
                hopper.write_rows(key, value, kv_cache, slot_mapping, layout)
                return
        from nibblekv.backends.triton import write

        write.reshape_and_cache(key, value, kv_cache, slot_mapping, layout)

    with _current(key.device):
        replay(
            ("write", id(layout), key.dtype, slot_mapping.dtype, key.shape, key.stride(), value.stride(),
             kv_cache.shape, kv_cache.stride()),
            (key, value, kv_cache, slot_mapping), layout, write,
        )  # fmt: skip


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    layout: KVCacheLayout,
    options: AttentionOptions,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    max_query_len: int,
    max_seq_len: int,
) -> None:
    """Attend over packed pages into `out` (and `lse`); see `nibblekv.paged_attention`."""
    block_table, seq_lens, query_start_loc = _dense(block_table), _dense(seq_lens), _dense(query_start_loc)
    with _current(query.device):
        _attend(
            query, kv_cache, block_table, seq_lens, query_start_loc, layout, _dense_options(options), out, lse, key, value,
            max_query_len, max_seq_len,
        )  # fmt: skip


def _attend(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    layout: KVCacheLayout,
    options: AttentionOptions,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    max_query_len: int,
    max_seq_len: int,
) -> None:
    """Attend as above, on the current device, with indices and options that kernels can read."""
    if key is not None and value is not None:
        from nibblekv.backends.triton import prefill

        prefill.attend(
            query, kv_cache, block_table, seq_lens, query_start_loc, layout, options, out, lse, key, value,
            max_query_len, max_seq_len,
        )  # fmt: skip
        return
    if options.host_lengths is not None and options.raw_key is None and not options.batch_invariant:
        from nibblekv.backends.triton import prefill

        # A slice of a long query does not know the query-query bias of the whole, nor keys after it.
        if max_query_len >= prefill.LONG_QUERY and options.qq_bias is None and options.causal is True:
            prefill.attend_stored(query, kv_cache, block_table, seq_lens, query_start_loc, layout, options, out, lse)
            return
    from nibblekv.backends.triton.launch import replay

    reach = _reach(max_seq_len)
    skew = 1 if options.host_lengths is None else _skew(options.host_lengths[1])

    def attend() -> None:
        from nibblekv.backends.triton import attention, hopper

        inputs = (query, kv_cache, block_table, seq_lens, query_start_loc, layout, options, out, lse, max_query_len, reach)
        if _hopper_serves(query, kv_cache, layout, options, max_query_len):
            hopper.decode(*inputs, skew=skew)
        else:
            attention.attend(*inputs, skew=skew)

    tensors = _option_tensors(options)
    metadata = _metadata(
        query, kv_cache, block_table, seq_lens, query_start_loc, layout, options, tensors, out, max_query_len, reach, skew
    )
    replay(metadata, (query, kv_cache, block_table, seq_lens, query_start_loc, out, lse, *tensors), layout, attend)


def _reach(max_seq_len: int) -> int:
    """Round a bound up: one that grows by one each step would make every step a call of its own."""
    return -(-max_seq_len // REACH) * REACH


def _option_tensors(options: AttentionOptions) -> tuple[torch.Tensor | None, ...]:
    return (
        options.causal if isinstance(options.causal, torch.Tensor) else None, options.rswa_prefix_lens, options.alibi_slopes,
        options.sinks, options.qq_bias, options.mm_prefix_ranges, options.output_scale, options.raw_key, options.raw_value,
    )  # fmt: skip


def _metadata(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    layout: KVCacheLayout,
    options: AttentionOptions,
    tensors: tuple[torch.Tensor | None, ...],
    out: torch.Tensor,
    max_query_len: int,
    reach: int,
    skew: int,
) -> tuple[Any, ...]:
    """Return everything that the launches of a call over stored keys, and the checks of its arguments, depend on, but for
    addresses, devices, and the rows of the block table, which are as many as seq_lens."""
    return (
        "read", id(layout), query.dtype, query.shape, query.stride(), kv_cache.dtype, kv_cache.shape[1:], kv_cache.stride(),
        block_table.dtype, block_table.stride(), seq_lens.dtype, seq_lens.shape, seq_lens.stride(),
        query_start_loc.dtype, query_start_loc.shape, query_start_loc.stride(), out.dtype, out.shape, out.stride(),
        max_query_len, reach, skew, options.softmax_scale, options.causal if tensors[0] is None else None,
        options.sliding_window, options.chunk_lookback, options.rswa_window, options.softcap, options.alibi_sqrt,
        options.mm_prefix_clamp, options.batch_invariant, options.raw_window, options.raw_sinks,
        *[None if t is None else (t.dtype, t.shape, t.stride()) for t in tensors],
    )  # fmt: skip


def attend_at_once(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    layout: KVCacheLayout,
    options: AttentionOptions,
    out: torch.Tensor,
    max_query_len: int | None,
    max_seq_len: int | None,
) -> bool:
    """Repeat a call over stored keys that is, in all that is checked, like one that was served; see `paged_attention`.

    Returns:
        False, with nothing launched, where no such call is known.
    """
    index = query.get_device()
    if index < 0 or options.host_lengths is not None or index != torch.cuda.current_device():
        return False
    tensors = _option_tensors(options)
    inputs = (query, kv_cache, block_table, seq_lens, query_start_loc, out, None, *tensors)
    for tensor in inputs:
        if tensor is not None and tensor.get_device() != index:
            return False
    rows, capacity = block_table.shape[0], block_table.shape[-1] * layout.block_size
    if seq_lens.shape != (rows,):
        return False
    from nibblekv.backends.triton.launch import repeat

    if max_query_len is None:
        longest = query.shape[0]
    else:
        longest = max_query_len
        if options.raw_window and options.raw_ring < options.raw_window + longest - 1:
            return False
    reach = _reach(capacity if max_seq_len is None else min(max_seq_len, capacity))
    metadata = _metadata(
        query, kv_cache, block_table, seq_lens, query_start_loc, layout, options, tensors, out, longest, reach, 1
    )
    return repeat(metadata, inputs, query.device)


def _dense(index: torch.Tensor) -> torch.Tensor:
    """Return the entries with a last stride of 1, which the kernels take for granted."""
    return index if index.stride(-1) == 1 else index.contiguous()


def _dense_options(options: AttentionOptions) -> AttentionOptions:
    """Return the options with `_dense` lists: one value expanded to all heads or sequences is a usual way to give them."""
    causal, prefix_lens, slopes, sinks = options.causal, options.rswa_prefix_lens, options.alibi_slopes, options.sinks
    if prefix_lens is None and slopes is None and sinks is None and not isinstance(causal, torch.Tensor):
        return options
    return replace(
        options,
        causal=_dense(causal) if isinstance(causal, torch.Tensor) else causal,
        rswa_prefix_lens=None if prefix_lens is None else _dense(prefix_lens),
        alibi_slopes=None if slopes is None else _dense(slopes),
        sinks=None if sinks is None else _dense(sinks),
    )


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a GPU the current one, on which and on whose stream Triton launches, whatever tensors it is given."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def _skew(lengths: Sequence[int]) -> int:
    """Return how many times as long as the mean the longest sequence is, 1 to `MOST_SKEW`: so many times as many splits let
    it fill the device when the others have ended."""
    return max(1, min(MOST_SKEW, round(max(lengths) * len(lengths) / max(1, sum(lengths)))))


def _hopper_serves(
    query: torch.Tensor, kv_cache: torch.Tensor, layout: KVCacheLayout, options: AttentionOptions, max_query_len: int
) -> bool:
    if not is_hopper(query.device):
        return False
    from nibblekv.backends.triton import hopper

    return hopper.supports(layout, options, query.dtype, max_query_len, query.device, query.shape[1], kv_cache) is None


# Asking torch for GPUs takes longer than a launch.
@functools.cache
def _has_gpu() -> bool:
    return importlib.util.find_spec("triton") is not None and torch.cuda.is_available()


# Properties of a device take 3 us to ask for, more than a launch.
@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)


def is_hopper(device: torch.device) -> bool:
    """Return True for a GPU that the kernels of `hopper/` are made for."""
    return device.type == "cuda" and torch.version.hip is None and capability(device) == HOPPER


def _interpreting() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    from nibblekv.backends.triton import rotation

    return rotation.interpreting()
