"""The public operations: check the arguments, select a backend, call it."""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

from nibblekv.backends import attend_at_once, reference, select_backend
from nibblekv.formats import QuantFormat, Role, check_head_size, decode_rows, encode_rows, get_format
from nibblekv.layout import KVCacheLayout
from nibblekv.options import AttentionOptions, make_options
from nibblekv.rotation import rotate, unrotate

__all__ = ["dequantize", "gather_and_dequantize", "paged_attention", "quantize", "reshape_and_cache"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_INDICES = (torch.int32, torch.int64)
# Up to here a Python list is looked through faster than torch reduces a tensor: 0.5 us against 3 us for one token.
FEW_TOKENS = 64


@torch.no_grad()
def quantize(
    x: torch.Tensor, format: str | QuantFormat = "int4", *, role: Role = "value"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate and quantize head vectors, each with its own scale word.

    x_hat = R^-1 (scale * code + bias); |R x - R x_hat| <= scale / 2 in every rotated dimension for `int4` values.

    Args:
        x: [..., head_size] float16, bfloat16 or float32. A row with NaN or Inf decodes to NaN; others are untouched.
        format: a name in `FORMATS`.
        role: "value" for the least error of the rows, "key" for the least error of their products with queries: the words
            that `reshape_and_cache` writes for keys, which differ in `int4`, `int3` and `int2` (docs/format.md, section 3).

    Returns:
        codes: [..., row_bytes] uint8 and words: [...] int32 (docs/format.md).

    Raises:
        TypeError, ValueError: dtype, head size, format or role.
    """
    fmt = get_format(format)
    _check_dtype("x", x, _FLOATS)
    check_head_size(x.shape[-1] if x.dim() else 0, "x.shape[-1]")
    if role not in ("key", "value"):
        raise ValueError(f"role: expected 'key' or 'value', got {role!r}")
    return encode_rows(rotate(x, fmt.rotation), fmt, role)


@torch.no_grad()
def dequantize(codes: torch.Tensor, words: torch.Tensor, format: str | QuantFormat = "int4") -> torch.Tensor:
    """Invert `quantize`: codes [..., row_bytes] uint8 and words [...] int32 to [..., head_size] float32."""
    fmt = get_format(format)
    _check_dtype("codes", codes, (torch.uint8,))
    _check_dtype("words", words, (torch.int32,))
    check_head_size(codes.shape[-1] * 8 // fmt.bits if codes.dim() else 0, "codes: head size")
    if codes.shape[:-1] != words.shape:
        raise ValueError(f"words: expected shape {tuple(codes.shape[:-1])}, got {tuple(words.shape)}")
    return unrotate(decode_rows(codes, words, fmt), fmt.rotation)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: KVCacheLayout,
    *,
    backend: str = "auto",
) -> None:
    """Rotate, quantize and write keys and values into their slots. Mutates kv_cache.

    Args:
        key: [num_tokens, num_kv_heads, head_size] float16, bfloat16 or float32; any strides, last dimension contiguous.
        value: [num_tokens, num_kv_heads, head_size_v], same dtype.
        kv_cache: uint8 of `layout.shape(num_blocks)`, any strides that `layout.views` takes.
        slot_mapping: [num_tokens] int32 or int64; slot s is row s % block_size of page s // block_size; negative: skip.
            No slot may be named twice: which of the rows then stays is undefined.
        backend: see `select_backend`.

    Raises:
        TypeError, ValueError: an argument, before anything is written. Slots out of range are found on the CPU; on a GPU,
            where a check would wait for the device, they are skipped.
        NotImplementedError: the named backend cannot serve the call.
    """
    layout.check(kv_cache)
    if slot_mapping.dim() != 1 or slot_mapping.dtype not in _INDICES:
        _check_index("slot_mapping", slot_mapping, ("num_tokens",))
    num_tokens = slot_mapping.shape[0]
    if (  # the checks below at once: they take longer than a write of one token
        key.shape != (num_tokens, layout.num_kv_heads, layout.head_size)
        or value.shape != (num_tokens, layout.num_kv_heads, layout.head_size_v)
        or not (key.dtype is value.dtype and key.dtype in _FLOATS)
        or key.stride(2) != 1
        or value.stride(2) != 1
    ):
        _check_rows("key", key, num_tokens, layout.num_kv_heads, layout.head_size)
        _check_rows("value", value, num_tokens, layout.num_kv_heads, layout.head_size_v)
        raise TypeError(f"value: expected the dtype of key, {key.dtype}, got {value.dtype}")
    on_cpu = kv_cache.is_cpu
    if not (on_cpu and key.is_cpu and value.is_cpu and slot_mapping.is_cpu):
        for name, tensor in (("key", key), ("value", value), ("slot_mapping", slot_mapping)):
            _check_device(name, tensor, kv_cache.device)
    if num_tokens == 0:
        return
    if on_cpu:
        num_slots = kv_cache.shape[0] * layout.block_size
        largest = max(slot_mapping.tolist()) if num_tokens <= FEW_TOKENS else int(slot_mapping.max())
        if largest >= num_slots:
            raise ValueError(f"slot_mapping: expected slots below {num_slots}, got {largest}")
    module = select_backend(backend, layout, None, kv_cache.device)
    if not torch.is_grad_enabled():
        module.reshape_and_cache(key, value, kv_cache, slot_mapping, layout)
        return
    with torch.no_grad():
        module.reshape_and_cache(key, value, kv_cache, slot_mapping, layout)


def gather_and_dequantize(
    kv_cache: torch.Tensor, block_table: torch.Tensor, seq_len: int, layout: KVCacheLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the key [seq_len, num_kv_heads, head_size] and value [.., head_size_v] of one sequence, as float32.

    Args:
        block_table: [max_blocks] int32 or int64, the sequence's pages in order.
        seq_len: tokens to read.
    """
    layout.check(kv_cache)
    _check_index("block_table", block_table, ("max_blocks",))
    _check_device("block_table", block_table, kv_cache.device)
    if not 0 <= seq_len <= block_table.shape[-1] * layout.block_size:
        raise ValueError(
            f"seq_len: expected 0 to {block_table.shape[-1] * layout.block_size}, the table's tokens, got {seq_len}"
        )
    if kv_cache.device.type == "cpu":
        layout.check_pages(block_table[None], torch.tensor([seq_len], device="cpu"), kv_cache.shape[0])
    return reference.gather_and_dequantize(kv_cache, block_table, seq_len, layout)


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    layout: KVCacheLayout,
    *,
    softmax_scale: float | None = None,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend queries to packed pages. The pages already hold every key and value, the queries' own included.

    out[i] = sum_j softmax_j(score(i, j)) v_hat[j] over the visible keys j; `AttentionOptions` states the rule.

    Args:
        query: [num_tokens, num_query_heads, head_size] float16, bfloat16 or float32; the sequences' queries one after
            another, the last of a sequence at its last position.
        kv_cache: uint8 pages of `layout`.
        block_table: [num_seqs, max_blocks] int32 or int64.
        seq_lens: [num_seqs] int32 or int64, tokens of each sequence with its queries.
        query_start_loc: [num_seqs + 1] int32 or int64, the first query of each sequence, and the end.
        softmax_scale: default head_size ** -0.5.
        key, value: [num_tokens, num_kv_heads, head_size(_v)], the queries' own raw keys and values. Given, they are
            attended in place of their stored form (prefill at full speed and accuracy; results then depend slightly on
            where a prompt is cut into chunks). Left out, only stored bytes are read.
        max_query_len, max_seq_len: upper bounds; given, a GPU call needs no read-back (default: from the shapes).
        out: [num_tokens, num_query_heads, head_size_v] to write; float8_e4m3fn with output_scale, else query's dtype.
        return_lse: also return the natural log-sum-exp of each row's scores, [num_tokens, num_query_heads] float32.
        options: the fields of `AttentionOptions`.

    Raises:
        TypeError, ValueError: an argument.
        NotImplementedError: the named backend cannot serve the call.
    """
    on_cpu = query.is_cpu
    if softmax_scale is None:
        softmax_scale = layout.head_size**-0.5
    opts = make_options(softmax_scale, options) if options else _plain_options(softmax_scale)
    if key is None and value is None and not return_lse:
        at_once = attend_at_once(backend, "cpu" if on_cpu else "cuda")
        if at_once is not None:  # what it does not take is checked again below, which says what is wrong
            if out is None and query.dim() == 3:
                dtype = query.dtype if opts.output_scale is None else torch.float8_e4m3fn
                out = torch.empty((query.shape[0], query.shape[1], layout.head_size_v), dtype=dtype, device=query.device)
            if out is not None and at_once(
                query, kv_cache, block_table, seq_lens, query_start_loc, layout, opts, out, max_query_len, max_seq_len
            ):
                return out
    layout.check(kv_cache)
    device, index = query.device, query.get_device()
    if not (  # the checks of _check_inputs at once: one by one they take longer than a launch
        len(seq_lens.shape) == 1
        and len(block_table.shape) == 2
        and len(query.shape) == 3
        and seq_lens.dtype in _INDICES
        and block_table.dtype in _INDICES
        and query_start_loc.dtype in _INDICES
        and query.dtype in _FLOATS
        and query_start_loc.shape == (seq_lens.shape[0] + 1,)
        and block_table.shape[0] == seq_lens.shape[0]
        and query.shape[2] == layout.head_size
        and query.shape[1]
        and not query.shape[1] % layout.num_kv_heads
        and query.stride(2) == 1
        and (
            (kv_cache.is_cpu and block_table.is_cpu and seq_lens.is_cpu and query_start_loc.is_cpu)
            if on_cpu
            else index >= 0
            and index
            == kv_cache.get_device()
            == block_table.get_device()
            == seq_lens.get_device()
            == query_start_loc.get_device()
        )
    ):
        _check_inputs(query, kv_cache, block_table, seq_lens, query_start_loc, layout)
    num_seqs = seq_lens.shape[0]
    if options:
        opts.check(num_seqs, query.shape[1], device)
    if (key is None) != (value is None):
        raise ValueError("value: expected key and value together, got one of them")
    if key is not None and value is not None:
        _check_rows("key", key, query.shape[0], layout.num_kv_heads, layout.head_size)
        _check_rows("value", value, query.shape[0], layout.num_kv_heads, layout.head_size_v)
        _check_device("key", key, device)
        _check_device("value", value, device)
    if opts.raw_key is not None and opts.raw_value is not None:
        _check_raw(opts.raw_key, opts.raw_value, num_seqs, layout)
    out_dtype = query.dtype if opts.output_scale is None else torch.float8_e4m3fn
    out_shape = (query.shape[0], query.shape[1], layout.head_size_v)
    if out is None:
        out = torch.empty(out_shape, dtype=out_dtype, device=device)
    elif out.shape != out_shape or out.dtype != out_dtype or out.device != device:
        raise ValueError(
            f"out: expected {out_shape} {out_dtype} on {device}, got {tuple(out.shape)} {out.dtype} on {out.device}"
        )
    if out.stride(2) != 1:
        _check_contiguous("out", out)
    lse = torch.empty(out_shape[:2], dtype=torch.float32, device=device) if return_lse else None
    capacity = block_table.shape[1] * layout.block_size
    if on_cpu:
        max_query_len, max_seq_len = _check_lengths(query, block_table, seq_lens, query_start_loc, layout)
        if opts.qq_bias is not None and opts.qq_bias.shape[0] < max_query_len:
            raise ValueError(
                f"qq_bias: expected at least {max_query_len} rows, the longest query, got {opts.qq_bias.shape[0]}"
            )
    if opts.raw_key is not None and max_query_len is not None:
        needed = opts.raw_window + (max_query_len - 1 if opts.raw_window and key is None and max_query_len else 0)
        if opts.raw_ring < needed:
            raise ValueError(
                f"raw_key: expected at least raw_sinks + {needed} = {opts.raw_sinks + needed} rows for queries of "
                f"{max_query_len} tokens, got {opts.raw_key.shape[1]}"
            )
    module = select_backend(backend, layout, opts, device)
    if on_cpu and not getattr(module, "CHECKS_PAGES", False):
        layout.check_pages(block_table, seq_lens, kv_cache.shape[0])
    if query.shape[0]:
        # Autocast would run a backend's products in 16 bit; a graph would keep every dequantized page alive.
        autocast = torch.is_autocast_enabled(device.type)
        graph = torch.no_grad() if torch.is_grad_enabled() else nullcontext()
        with graph, torch.autocast(device.type, enabled=False) if autocast else nullcontext():
            module.paged_attention(
                query, kv_cache, block_table, seq_lens, query_start_loc, layout, opts, out, lse, key, value,
                query.shape[0] if max_query_len is None else max_query_len,
                capacity if max_seq_len is None else min(max_seq_len, capacity),
            )  # fmt: skip
    return out if lse is None else (out, lse)


@lru_cache(maxsize=256)
def _plain_options(softmax_scale: float) -> AttentionOptions:
    """Return checked options with the scale alone: to make and check the record takes longer than a short call."""
    opts = AttentionOptions(softmax_scale=softmax_scale)
    opts.check(0, 0, torch.device("cpu"))
    return opts


def _check_inputs(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    layout: KVCacheLayout,
) -> None:
    """Raise for the first tensor of an attention call that is not as `paged_attention` says."""
    _check_index("seq_lens", seq_lens, ("num_seqs",))
    _check_index("query_start_loc", query_start_loc, (seq_lens.shape[0] + 1,))
    _check_index("block_table", block_table, (seq_lens.shape[0], "max_blocks"))
    if query.dim() != 3 or not query.shape[1] or query.shape[1] % layout.num_kv_heads or query.shape[2] != layout.head_size:
        raise ValueError(
            f"query: expected [num_tokens, a multiple of {layout.num_kv_heads} heads, {layout.head_size}], "
            f"got {tuple(query.shape)}"
        )
    _check_dtype("query", query, _FLOATS)
    _check_contiguous("query", query)
    _check_device("kv_cache", kv_cache, query.device)
    _check_device("block_table", block_table, query.device)
    _check_device("seq_lens", seq_lens, query.device)
    _check_device("query_start_loc", query_start_loc, query.device)


def _check_lengths(
    query: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    layout: KVCacheLayout,
) -> tuple[int, int]:
    """Check what only a host can read without waiting; return (longest query, longest sequence)."""
    starts = query_start_loc.tolist()
    lengths = seq_lens.tolist()
    if starts[0] != 0 or starts[-1] != query.shape[0] or starts != sorted(starts):
        raise ValueError(f"query_start_loc: expected 0 rising to {query.shape[0]}, got {starts}")
    capacity = block_table.shape[1] * layout.block_size
    if len(lengths) == 1 and starts[-1] <= lengths[0] <= capacity:  # a step of one sequence, whose call Python bounds
        return starts[-1], lengths[0]
    query_lens = [end - begin for begin, end in pairwise(starts)]
    for query_len, seq_len in zip(query_lens, lengths, strict=True):
        if not query_len <= seq_len <= capacity:
            raise ValueError(
                f"seq_lens: expected from the query length {query_len} to {capacity}, "
                f"the block table's tokens, got {seq_len}"
            )
    return max(query_lens, default=0), max(lengths, default=0)


def _check_raw(raw_key: torch.Tensor, raw_value: torch.Tensor, num_seqs: int, layout: KVCacheLayout) -> None:
    shape = (num_seqs, raw_key.shape[1], layout.num_kv_heads)
    if (  # the checks below at once
        raw_key.shape == (*shape, layout.head_size)
        and raw_value.shape == (*shape, layout.head_size_v)
        and raw_key.dtype is raw_value.dtype
        and raw_key.dtype in _FLOATS
        and raw_key.stride(3) == raw_value.stride(3) == 1
    ):
        return
    for name, raw, head_size in (("raw_key", raw_key, layout.head_size), ("raw_value", raw_value, layout.head_size_v)):
        _check_dtype(name, raw, _FLOATS)
        _check_contiguous(name, raw)
        if tuple(raw.shape) != (*shape, head_size):
            raise ValueError(f"{name}: expected shape {(*shape, head_size)}, got {tuple(raw.shape)}")
    if raw_value.dtype != raw_key.dtype:
        raise TypeError(f"raw_value: expected the dtype of raw_key, {raw_key.dtype}, got {raw_value.dtype}")


def _check_index(name: str, tensor: torch.Tensor, shape: tuple[int | str, ...]) -> None:
    if tensor.dtype not in _INDICES:
        _check_dtype(name, tensor, _INDICES)
    actual = tensor.shape
    if len(actual) != len(shape) or any(isinstance(n, int) and n != m for n, m in zip(shape, actual, strict=True)):
        raise ValueError(f"{name}: expected shape [{', '.join(map(str, shape))}], got {list(actual)}")


def _check_contiguous(name: str, tensor: torch.Tensor) -> None:
    if tensor.stride(-1) != 1:
        raise ValueError(f"{name}: expected a contiguous last dimension, got strides {tensor.stride()}")


def _check_dtype(name: str, tensor: torch.Tensor, expected: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in expected:
        raise TypeError(f"{name}: expected one of {', '.join(map(str, expected))}, got {tensor.dtype}")


def _check_device(name: str, tensor: torch.Tensor, expected: torch.device) -> None:
    if tensor.device != expected:
        raise ValueError(f"{name}: expected device {expected}, got {tensor.device}")


def _check_rows(name: str, rows: torch.Tensor, num_tokens: int, num_kv_heads: int, head_size: int) -> None:
    if rows.shape != (num_tokens, num_kv_heads, head_size):
        raise ValueError(f"{name}: expected shape {(num_tokens, num_kv_heads, head_size)}, got {tuple(rows.shape)}")
    if rows.dtype not in _FLOATS:
        _check_dtype(name, rows, _FLOATS)
    if rows.stride(-1) != 1:
        _check_contiguous(name, rows)
