"""A paged cache: pages of packed keys and values, who owns them, and how long each sequence is.

A page is `block_size` consecutive tokens of one sequence, at one index in every layer's kv_cache tensor, so that one
block table serves all layers. Pages are counted: sequences that share a prefix share its pages, and a shared page that
is not yet full is copied when one of its owners writes to it. Stored bytes are never written twice.

With a window and sinks, attention reads the newest and the first tokens of a sequence unquantized: a store beside the
pages, one row of fixed size per sequence and layer, holds them as well. Every token is in its page all the same.

With a calibration, both hold mapped keys and values (`nibblekv.calibration`); callers see plain ones.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from nibblekv import ops
from nibblekv.backends import select_backend
from nibblekv.calibration import LayerCalibration
from nibblekv.layout import KVCacheLayout
from nibblekv.options import AttentionOptions

__all__ = ["RAW_MARGIN", "CacheFullError", "CacheStep", "PagedKVCache", "raw_row_count"]

# Tokens beyond the window that the store of unquantized tokens keeps: as many may be cropped, or verified in one step,
# before the window is short of a token. transformers drafts 20 at a time.
RAW_MARGIN = 32

# A pool without a fixed size grows by 1/64, so that at most that is idle. Per token this copies as many bytes as
# attention reads at a context of 64 tokens.
GROWTH_DIVISOR = 64
MAX_SLOTS = 2**31 - 1
# Kinds of calls remembered at most: a caller that makes new option tensors for every call must not fill the memory.
MAX_CHECKED_CALLS = 512


def raw_row_count(window: int, sinks: int) -> int:
    """Return the tokens that a sequence keeps unquantized, the margin of the window included."""
    if min(window, sinks) < 0:
        raise ValueError(f"window, sinks: expected 0 (none) or more, got {window} and {sinks}")
    return sinks + (window + RAW_MARGIN if window else 0)


class CacheFullError(RuntimeError):
    """A pool of fixed size has too few free pages; nothing was changed."""


@dataclass(frozen=True)
class CacheStep:
    """What one call on some sequences needs: where their new tokens go and what their queries see.

    Valid until the cache's next change: block_table may be a view of the cache's own table.

    seq_ids, num_tokens: the sequences, and how many tokens (queries) each has in this step.
    slot_mapping: [sum(num_tokens)] int32, the slot of each new token.
    block_table: [num_seqs, max_blocks] int32, seq_lens: [num_seqs] int32 (new tokens included), query_start_loc:
        [num_seqs + 1] int32.
    max_query_len, max_seq_len: on the host, so that a GPU call reads nothing back.
    rows: of the sequences in the block table and in the unquantized store: a slice or [num_seqs] int64.
    raw_tokens, raw_slots: which new tokens the unquantized store keeps (None: all) and where, [n] int64 each.
    """

    seq_ids: tuple[int, ...]
    num_tokens: tuple[int, ...]
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    max_query_len: int
    max_seq_len: int
    rows: slice | torch.Tensor
    raw_tokens: torch.Tensor | None = None
    raw_slots: torch.Tensor | None = None


@dataclass
class _Sequence:
    row: int  # in the block table and the unquantized store
    length: int = 0
    raw_start: int = 0  # positions from here on are in the ring; those before it were overwritten
    blocks: list[int] = field(default_factory=list)  # ceil(length / block_size) pages


class PagedKVCache:
    """Pages of one or more layers, allocated to sequences.

    A step is `extend` (room for new tokens: all of it, or an error and no change), then per layer `write` and `attend`.
    `append` does the first two for callers with one layer or with all layers' tensors at hand.
    """

    # What may allocate leaves inference mode: its tensors could never be written to outside, as in `generate` after a
    # prompt that was read in it.

    @torch.inference_mode(False)
    def __init__(
        self,
        layouts: KVCacheLayout | Sequence[KVCacheLayout],
        *,
        num_blocks: int | None = None,
        device: torch.device | str = "cpu",
        backend: str = "auto",
        window: int = 0,
        sinks: int = 0,
        raw_dtype: torch.dtype = torch.bfloat16,
        calibrations: Sequence[LayerCalibration | None] | None = None,
    ) -> None:
        """Create an empty cache.

        Args:
            layouts: one per layer; formats, heads and head sizes may differ, block_size may not.
            num_blocks: pages of the pool, allocated now; None: the pool grows on demand.
            device: of the pages.
            backend: see `nibblekv.backends.select_backend`.
            window, sinks: the last and the first tokens of each sequence that are read unquantized; 0: none.
            raw_dtype: of these tokens.
            calibrations: one per layer, None for a layer without; none at all by default.

        Raises:
            ValueError: no layout, negative window or sinks, different block sizes, num_blocks below 1 or beyond 2**31 slots,
                calibrations of other sizes than the layers'.
        """
        layouts = [layouts] if isinstance(layouts, KVCacheLayout) else list(layouts)
        if not layouts:
            raise ValueError("layouts: expected at least one, got none")
        if num_blocks is not None and num_blocks < 1:
            raise ValueError(f"num_blocks: expected at least 1 or None, got {num_blocks}")
        self.block_size = layouts[0].block_size
        self.device = torch.device(device)
        self.backend = backend
        self.window = window
        self.sinks = sinks
        self.raw_dtype = raw_dtype
        self._raw_rows = raw_row_count(window, sinks)
        self._raw: list[tuple[torch.Tensor, torch.Tensor]] = []  # [sequence rows, tokens, num_kv_heads, head_size(_v)]
        self._raw_capacity = 0
        # Of a layer whose newest step overwrote rows that its own queries read: the step, and the rows before it.
        self._raw_before: dict[int, tuple[CacheStep, torch.Tensor, torch.Tensor]] = {}
        self.layouts: list[KVCacheLayout] = []
        self.calibrations: list[LayerCalibration | None] = []
        self.kv_caches: list[torch.Tensor] = []
        self.growable = num_blocks is None
        self.num_blocks = 1 if num_blocks is None else num_blocks
        self._check_slots(self.num_blocks)
        self._references = [0] * self.num_blocks
        self._free_blocks = list(range(self.num_blocks - 1, -1, -1))
        self._sequences: dict[int, _Sequence] = {}
        self._next_id = 0
        self._free_rows: list[int] = []
        self._block_table = torch.zeros(0, 4, dtype=torch.int32, device=self.device)
        # A call of a kind that passed every check once goes straight to its backend: the checks cost 0.1 ms per layer,
        # and the indices are our own.
        self._checked: dict[Any, Any] = {}
        for layout, calibration in zip(layouts, calibrations or [None] * len(layouts), strict=True):
            self.add_layer(layout, calibration)

    @torch.inference_mode(False)
    def add_layer(self, layout: KVCacheLayout, calibration: LayerCalibration | None = None) -> int:
        """Add a layer that shares the block tables, with zeroed pages; return its index."""
        if calibration is not None:
            calibration.check(layout.num_kv_heads, layout.head_size, layout.head_size_v)
            calibration = calibration.to(self.device)
        if layout.block_size != self.block_size:
            raise ValueError(f"layout: expected block_size {self.block_size}, got {layout.block_size}")
        # All memory first: an allocation that fails leaves no list longer than another.
        kv_cache = layout.allocate(self.num_blocks, self.device)
        if self._raw_rows:
            self._raw.append(self._allocate_raw(layout, self._raw_capacity))
        self.kv_caches.append(kv_cache)
        self.layouts.append(layout)
        self.calibrations.append(calibration)
        return len(self.layouts) - 1

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' pages, free ones included, and of the unquantized tokens."""
        raw = sum(tensor.nbytes for pair in self._raw for tensor in pair)
        return raw + self.num_blocks * sum(layout.page_bytes for layout in self.layouts)

    @property
    def num_free_blocks(self) -> int:
        """Pages that no sequence owns."""
        return len(self._free_blocks)

    @property
    def seq_ids(self) -> tuple[int, ...]:
        """The sequences, oldest first."""
        return tuple(self._sequences)

    def length(self, seq_id: int) -> int:
        """Tokens of a sequence."""
        return self._lookup((seq_id,))[0].length

    def blocks(self, seq_id: int) -> tuple[int, ...]:
        """The pages of a sequence, in order."""
        return tuple(self._lookup((seq_id,))[0].blocks)

    @torch.inference_mode(False)
    def add_sequences(self, count: int = 1) -> list[int]:
        """Create empty sequences and return their ids, which are never used again."""
        if count < 1:
            raise ValueError(f"count: expected at least 1, got {count}")
        rows: list[int] = []
        try:
            while len(rows) < count:
                rows.append(self._take_row())
            self._reserve_raw(1 + max(rows))
        except BaseException:
            self._free_rows = sorted(self._free_rows + rows)
            raise
        added = list(range(self._next_id, self._next_id + count))
        self._sequences.update(zip(added, map(_Sequence, rows), strict=True))
        self._next_id += count
        return added

    def fork(self, seq_ids: Sequence[int]) -> list[int]:
        """Create one copy per entry (an id may repeat) that shares all pages; return the new ids. Copies no page.

        What is kept unquantized is copied.
        """
        parents = self._lookup(seq_ids)
        children = self.add_sequences(len(parents)) if parents else []
        if parents:
            rows = [self._sequences[child].row for child in children]
            sources = [parent.row for parent in parents]
            try:
                self._block_table[rows] = self._block_table[sources]
                for tensor in (tensor for pair in self._raw for tensor in pair):
                    tensor[rows] = tensor[sources]
            except BaseException:  # a device without memory for the copied rows
                self.free(children)
                raise
        for parent, child_id in zip(parents, children, strict=True):
            child = self._sequences[child_id]
            child.length, child.blocks, child.raw_start = parent.length, parent.blocks.copy(), parent.raw_start
            for block in parent.blocks:
                self._references[block] += 1
        return children

    def free(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences; pages that nobody else shares become free."""
        seq_ids = tuple(seq_ids)
        for seq_id, sequence in zip(seq_ids, self._lookup(seq_ids, distinct=True), strict=True):
            self._release(sequence, 0)
            heapq.heappush(self._free_rows, sequence.row)
            del self._sequences[seq_id]

    def crop(self, seq_id: int, length: int) -> None:
        """Shorten a sequence to its first `length` tokens.

        The window stays whole if at most RAW_MARGIN tokens were dropped since the sequence was longest; beyond that, the
        tokens that are no longer kept unquantized are read as stored.
        """
        sequence = self._lookup((seq_id,))[0]
        if not 0 <= length <= sequence.length:
            raise ValueError(f"length: expected 0 to {sequence.length}, got {length}")
        self._release(sequence, -(-length // self.block_size))
        sequence.length = length
        sequence.raw_start = min(sequence.raw_start, length)

    @torch.inference_mode(False)
    def extend(self, seq_ids: Sequence[int], num_tokens: int | Sequence[int] = 1) -> CacheStep:
        """Make room for new tokens and return the step that writes them. All sequences are extended, or none.

        Args:
            seq_ids: distinct sequences.
            num_tokens: new tokens of each, or of every one.

        Raises:
            CacheFullError: a fixed pool has too few free pages; nothing was changed.
            MemoryError, torch.OutOfMemoryError: of the host or the device; nothing was changed, but that a pool that grows
                may have grown.
            ValueError: unknown or repeated ids, negative counts.
        """
        sequences = self._lookup(seq_ids, distinct=True)
        counts = self._counts(num_tokens, len(sequences))
        self._reserve(sequences, counts)
        for sequence in sequences:
            self._refill(sequence, sequence.length - self.window + 1)
        before = [(sequence.length, sequence.raw_start, sequence.blocks[-1:]) for sequence in sequences]
        try:
            copies: list[tuple[int, int]] = []
            for sequence, count in zip(sequences, counts, strict=True):
                sequence.raw_start = max(sequence.raw_start, sequence.length + count - self._raw_rows + self.sinks)
                self._extend_one(sequence, count, copies)
            if copies:
                source, target = ([pair[i] for pair in copies] for i in (0, 1))
                for kv_cache in self.kv_caches:
                    kv_cache[target] = kv_cache[source]
            return self._make_step(seq_ids, sequences, counts)
        except BaseException:  # a device without memory for the step's own tensors
            for sequence, (length, raw_start, last) in zip(sequences, before, strict=True):
                self._take_back(sequence, length, last)
                sequence.raw_start = raw_start
            raise

    def cancel(self, step: CacheStep) -> None:
        """Take back the newest `extend` of these sequences, for a caller that could not write."""
        for seq_id, count in zip(step.seq_ids, step.num_tokens, strict=True):
            self.crop(seq_id, self.length(seq_id) - count)

    def view(self, seq_ids: Sequence[int], num_tokens: int | Sequence[int] = 1) -> CacheStep:
        """Return the step whose queries are the last stored tokens of each sequence; changes nothing."""
        sequences = self._lookup(seq_ids)
        counts = self._counts(num_tokens, len(sequences))
        for seq_id, sequence, count in zip(seq_ids, sequences, counts, strict=True):
            if count > sequence.length:
                raise ValueError(f"num_tokens: expected at most {sequence.length} for sequence {seq_id}, got {count}")
            self._refill(sequence, max(sequence.length - count - self.window + 1, self._raw_first(sequence)))
        return self._make_step(seq_ids, sequences, counts)

    def write(self, step: CacheStep, key: torch.Tensor, value: torch.Tensor, layer: int = 0) -> None:
        """Quantize one layer's new tokens into their slots.

        Args:
            step: from `extend`.
            key: [sum(num_tokens), num_kv_heads, head_size]; value: [.., head_size_v]; see `nibblekv.reshape_and_cache`.
        """
        calibration = self.calibrations[layer]
        if calibration is not None:
            key, value = calibration.stored(key, value)
        kv_cache, layout, slots = self.kv_caches[layer], self.layouts[layer], step.slot_mapping
        kind = (
            layer,
            key.shape,
            value.shape,
            key.dtype,
            value.dtype,
            key.device,
            value.device,
            key.stride(-1),
            value.stride(-1),
        )
        backend_write = self._checked.get(kind)
        if backend_write is not None and key.shape[0] == slots.shape[0]:
            backend_write(key, value, kv_cache, slots, layout)
            self._write_raw(step, key, value, layer)
            return
        ops.reshape_and_cache(key, value, kv_cache, slots, layout, backend=self.backend)
        if slots.shape[0]:
            self._remember(kind, select_backend(self.backend, layout, None, kv_cache.device).reshape_and_cache)
            self._write_raw(step, key, value, layer)

    def append(
        self,
        seq_ids: Sequence[int],
        key: torch.Tensor | Sequence[torch.Tensor],
        value: torch.Tensor | Sequence[torch.Tensor],
        num_tokens: int | Sequence[int] = 1,
    ) -> CacheStep:
        """Extend sequences and write the new tokens of every layer; on an error the sequences are as before.

        Args:
            key, value: as in `write`; a list with one tensor per layer where there are several.
        """
        keys = [key] if isinstance(key, torch.Tensor) else list(key)
        values = [value] if isinstance(value, torch.Tensor) else list(value)
        for name, tensors in (("key", keys), ("value", values)):
            if len(tensors) != len(self.layouts):
                raise ValueError(f"{name}: expected one tensor per layer, {len(self.layouts)}, got {len(tensors)}")
        step = self.extend(seq_ids, num_tokens)
        try:
            for layer, (layer_key, layer_value) in enumerate(zip(keys, values, strict=True)):
                self.write(step, layer_key, layer_value, layer)
        except BaseException:
            self.cancel(step)
            raise
        return step

    def attend(
        self,
        step: CacheStep,
        query: torch.Tensor,
        layer: int = 0,
        *,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        strict: bool = False,
        **options: Any,
    ) -> Any:
        """Attend a step's queries to their sequences in one layer.

        Args:
            query: [sum(num_tokens), num_query_heads, head_size].
            key, value: the step's raw keys and values, attended in place of their stored form; left out, only stored
                bytes are read, and what the window and sinks keep. With a window, a step of more than RAW_MARGIN + 1
                tokens of a sequence needs them.
            strict: key and value are read only where the window and sinks say so, as a later query would.
            options: `softmax_scale`, `out`, `return_lse` and the fields of `AttentionOptions`.

        Returns:
            As `nibblekv.paged_attention`.
        """
        calibration = self.calibrations[layer]
        if calibration is not None:
            attend = functools.partial(self._attend, step, layer=layer, strict=strict)
            return calibration.attend(attend, query, key=key, value=value, **options)
        return self._attend(step, query, layer, key=key, value=value, strict=strict, **options)

    def _attend(
        self,
        step: CacheStep,
        query: torch.Tensor,
        layer: int,
        *,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        strict: bool = False,
        **options: Any,
    ) -> Any:
        """Attend as `attend` does, to what the cache holds."""
        kv_cache, layout = self.kv_caches[layer], self.layouts[layer]
        # Rows that attention reads in place are the same tensors in every call of a kind.
        in_place = bool(self._raw_rows) and isinstance(step.rows, slice) and not self._overwrites(step)
        first_row = step.rows.start if in_place and isinstance(step.rows, slice) else -1
        kind = (
            layer, query.shape, query.dtype, query.device, query.stride(-1), len(step.seq_ids), first_row, *options.items()
        )  # fmt: skip
        if strict:
            own_key, own_value = None, None
        else:
            own_key, own_value = key, value
        reads_own = own_key is not None or own_value is not None
        # `ops` keeps autocast and gradients away from a backend; lengths of the host's are another call's every time.
        by_ops = (
            reads_own
            or "host_lengths" in options
            or torch.is_autocast_enabled(query.device.type)
            or (query.requires_grad and torch.is_grad_enabled())
        )
        checked = None if by_ops else self._checked.get(kind)
        raw: dict[str, Any] = {}
        if self._raw_rows and (checked is None or not in_place):
            raw = self._raw_of_step(step, layer, key, value, strict)
        if checked is not None and query.shape[0] == step.slot_mapping.shape[0]:
            at_once, backend_attend, attention_options = checked
            if raw:
                attention_options = dataclasses.replace(attention_options, **raw)
            out = query.new_empty(*query.shape[:2], layout.head_size_v)
            if at_once is not None and at_once(
                query, kv_cache, step.block_table, step.seq_lens, step.query_start_loc, layout, attention_options, out,
                step.max_query_len, step.max_seq_len,
            ):  # fmt: skip
                return out
            backend_attend(
                query, kv_cache, step.block_table, step.seq_lens, step.query_start_loc, layout, attention_options,
                out, None, None, None, step.max_query_len, step.max_seq_len,
            )  # fmt: skip
            return out
        lengths: dict[str, Any] = {}
        if reads_own and not query.is_cpu and "host_lengths" not in options:
            starts = [0, *accumulate(step.num_tokens)]
            lengths["host_lengths"] = starts, [self._sequences[seq_id].length for seq_id in step.seq_ids]
        result = ops.paged_attention(
            query,
            kv_cache,
            step.block_table,
            step.seq_lens,
            step.query_start_loc,
            layout,
            key=own_key,
            value=own_value,
            max_query_len=step.max_query_len,
            max_seq_len=step.max_seq_len,
            backend=self.backend,
            **raw,
            **lengths,
            **options,
        )
        if query.shape[0] and not {"out", "return_lse", "output_scale", "host_lengths"} & options.keys():
            scale = options.pop("softmax_scale", None)
            attention_options = AttentionOptions(layout.head_size**-0.5 if scale is None else scale, **raw, **options)
            module = select_backend(self.backend, layout, attention_options, query.device)
            if raw and not in_place:  # hold no rows that no call will read again
                attention_options = dataclasses.replace(attention_options, raw_key=None, raw_value=None)
            at_once = getattr(module, "attend_at_once", None)
            self._remember(kind, (at_once, module.paged_attention, attention_options))
        return result

    def gather(self, seq_id: int, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a layer stores of a sequence as float32: key [length, num_kv_heads, head_size] and value."""
        sequence = self._lookup((seq_id,))[0]
        table = self._block_table[sequence.row]
        stored = ops.gather_and_dequantize(self.kv_caches[layer], table, sequence.length, self.layouts[layer])
        calibration = self.calibrations[layer]
        return stored if calibration is None else calibration.restored(*stored)

    def _allocate_raw(self, layout: KVCacheLayout, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (capacity, self._raw_rows, layout.num_kv_heads)
        return (
            torch.zeros(*shape, layout.head_size, dtype=self.raw_dtype, device=self.device),
            torch.zeros(*shape, layout.head_size_v, dtype=self.raw_dtype, device=self.device),
        )

    def _reserve_raw(self, capacity: int) -> None:
        """Make room for the unquantized tokens of that many sequence rows."""
        if not self._raw_rows or capacity <= self._raw_capacity:
            return
        self._checked.clear()  # calls that read the smaller store
        kept = self._raw_capacity
        capacity = max(capacity, kept + kept // 8)  # else adding n sequences one by one copies n ** 2 / 2
        for layer, layout in enumerate(self.layouts):
            grown = self._allocate_raw(layout, capacity)
            for new, old in zip(grown, self._raw[layer], strict=True):
                new[:kept] = old[:kept]  # longer where an earlier growth ran out of memory in a later layer
            self._raw[layer] = grown
        self._raw_capacity = capacity

    def _raw_row(self, position: Any) -> Any:
        """Return the row of a position beyond the sinks; a number or a tensor."""
        return self.sinks + (position - self.sinks) % (self._raw_rows - self.sinks)

    def _raw_first(self, sequence: _Sequence) -> int:
        """Return the oldest position that the ring has room for."""
        return sequence.length - self._raw_rows + self.sinks

    def _refill(self, sequence: _Sequence, first: int) -> None:
        """Put stored tokens from `first` on into the ring where a crop has left none."""
        first = max(first, self.sinks)
        last = min(sequence.raw_start, sequence.length)
        if not self.window or first >= last:
            return
        page = first // self.block_size
        begin = page * self.block_size
        rows = self._raw_row(torch.arange(first, last, device=self.device))
        for layer, layout in enumerate(self.layouts):
            table = self._block_table[sequence.row, page:]
            stored = ops.gather_and_dequantize(self.kv_caches[layer], table, last - begin, layout)
            for kept, tokens in zip(self._raw[layer], stored, strict=True):
                kept[sequence.row, rows] = tokens[first - begin :].to(kept.dtype)
        sequence.raw_start = first

    def _overwrites(self, step: CacheStep) -> bool:
        """Say whether a step is too long for the ring to hold what its first queries read and its last tokens."""
        return bool(self.window) and step.max_query_len + self.window - 1 > self._raw_rows - self.sinks

    def _has_context(self, step: CacheStep) -> bool:
        return any(self._sequences[i].length > n for i, n in zip(step.seq_ids, step.num_tokens, strict=True))

    def _write_raw(self, step: CacheStep, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
        if step.raw_slots is None:
            return
        self._raw_before.pop(layer, None)
        if self._overwrites(step) and self._has_context(step):
            key_before, value_before = (kept[step.rows].clone() for kept in self._raw[layer])
            self._raw_before[layer] = step, key_before, value_before
        for kept, tokens in zip(self._raw[layer], (key, value), strict=True):
            if step.raw_tokens is not None:
                tokens = tokens[step.raw_tokens]
            kept.flatten(0, 1).index_copy_(0, step.raw_slots, tokens.detach().to(kept.dtype))

    def _raw_of_step(
        self, step: CacheStep, layer: int, key: torch.Tensor | None, value: torch.Tensor | None, strict: bool
    ) -> dict[str, Any]:
        """Return the options that make attention read unquantized tokens."""
        kept_key, kept_value = (kept[step.rows] for kept in self._raw[layer])
        if self._overwrites(step):
            if key is None or value is None:
                raise ValueError(
                    f"key: expected the step's own key and value with a window and more than {RAW_MARGIN + 1} tokens of a "
                    f"sequence, got {step.max_query_len} tokens and None"
                )
            before = self._raw_before.get(layer)
            old_key, old_value = kept_key, kept_value
            if before is not None and before[0] is step:
                _, old_key, old_value = before
            elif self._has_context(step):
                raise ValueError(
                    f"step: expected the step that layer {layer} wrote last, with a window and more than {RAW_MARGIN + 1} "
                    f"tokens of a sequence, got another of {step.max_query_len} tokens"
                )
            if strict:
                kept_key = self._long_ring(step, kept_key, old_key, key)
                kept_value = self._long_ring(step, kept_value, old_value, value)
            else:
                kept_key, kept_value = old_key, old_value
        return {"raw_key": kept_key, "raw_value": kept_value, "raw_window": self.window, "raw_sinks": self.sinks}

    def _long_ring(self, step: CacheStep, kept: torch.Tensor, old: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Return rows as in the store, with a ring that holds the window before a step and all of its tokens.

        Args:
            kept, old: [num_seqs, tokens, ...], after and before the step was written.
            own: [sum(num_tokens), ...], the step's tokens.
        """
        ring = self.window + step.max_query_len - 1
        rows = torch.zeros(kept.shape[0], self.sinks + ring, *kept.shape[2:], dtype=kept.dtype, device=kept.device)
        rows[:, : self.sinks] = kept[:, : self.sinks]
        begin = 0
        for b, (seq_id, count) in enumerate(zip(step.seq_ids, step.num_tokens, strict=True)):
            length = self._sequences[seq_id].length
            context = length - count
            first = min(max(self.sinks, context - self.window + 1), context)
            before = torch.arange(first, context, device=kept.device)
            rows[b, self.sinks + (before - self.sinks) % ring] = old[b, self._raw_row(before)]
            first = min(max(self.sinks, context), length)
            after = torch.arange(first, length, device=kept.device)
            tokens = own[begin + first - context : begin + count]
            rows[b, self.sinks + (after - self.sinks) % ring] = tokens.to(kept.dtype)
            begin += count
        return rows

    def _remember(self, kind: Any, call: Any) -> None:
        if len(self._checked) >= MAX_CHECKED_CALLS:
            self._checked.clear()
        self._checked[kind] = call

    def _lookup(self, seq_ids: Sequence[int], distinct: bool = False) -> list[_Sequence]:
        try:
            sequences = [self._sequences[seq_id] for seq_id in seq_ids]
        except KeyError as error:
            raise ValueError(f"seq_ids: expected sequences of this cache, got {error.args[0]}") from None
        if distinct and len(set(seq_ids)) != len(seq_ids):
            raise ValueError(f"seq_ids: expected each sequence once, got {list(seq_ids)}")
        return sequences

    @staticmethod
    def _counts(num_tokens: int | Sequence[int], num_seqs: int) -> tuple[int, ...]:
        counts = (num_tokens,) * num_seqs if isinstance(num_tokens, int) else tuple(num_tokens)
        if len(counts) != num_seqs or any(count < 0 for count in counts):
            raise ValueError(f"num_tokens: expected {num_seqs} counts of 0 or more, got {list(counts)}")
        return counts

    def _reserve(self, sequences: list[_Sequence], counts: tuple[int, ...]) -> None:
        """Grow, or raise CacheFullError, unless the pages that this step takes are free."""
        need = 0
        writers: dict[int, int] = {}  # of a shared page that is not full
        for sequence, count in zip(sequences, counts, strict=True):
            if count:
                need += -(-(sequence.length + count) // self.block_size) - len(sequence.blocks)
                if sequence.length % self.block_size:
                    last = sequence.blocks[-1]
                    if self._references[last] > 1:
                        writers[last] = writers.get(last, 0) + 1
        # The last owner of a page may keep it.
        need += sum(min(count, self._references[block] - 1) for block, count in writers.items())
        missing = need - len(self._free_blocks)
        if missing > 0:
            if not self.growable:
                raise CacheFullError(
                    f"the cache is full: expected {need} free pages of {self.block_size} tokens, got "
                    f"{len(self._free_blocks)} of {self.num_blocks}; free or crop sequences, or create it with more pages"
                )
            self._grow(max(missing, self.num_blocks // GROWTH_DIVISOR))

    def _grow(self, extra: int) -> None:
        num_blocks = self.num_blocks + extra
        self._check_slots(num_blocks)
        for layer, layout in enumerate(self.layouts):
            grown = layout.allocate(num_blocks, self.device)
            grown[: self.num_blocks] = self.kv_caches[layer][: self.num_blocks]
            self.kv_caches[layer] = grown
        self._free_blocks[:0] = range(num_blocks - 1, self.num_blocks - 1, -1)
        self._references.extend([0] * extra)
        self.num_blocks = num_blocks

    def _check_slots(self, num_blocks: int) -> None:
        if num_blocks * self.block_size > MAX_SLOTS:
            raise ValueError(f"num_blocks: expected at most {MAX_SLOTS // self.block_size}, got {num_blocks}")

    def _extend_one(self, sequence: _Sequence, count: int, copies: list[tuple[int, int]]) -> None:
        """Take the pages of one sequence's new tokens; they are free, `_reserve` saw to it."""
        if not count:
            return
        first = len(sequence.blocks)
        if sequence.length % self.block_size:
            last = sequence.blocks[-1]
            if self._references[last] > 1:
                self._references[last] -= 1
                first -= 1
                sequence.blocks[first] = self._take_block()
                copies.append((last, sequence.blocks[first]))
        sequence.length += count
        while len(sequence.blocks) * self.block_size < sequence.length:
            sequence.blocks.append(self._take_block())
        if first < len(sequence.blocks):
            self._fill_row(sequence, first)

    def _take_back(self, sequence: _Sequence, length: int, last: list[int]) -> None:
        """Give a sequence its former length and its former last page, if it had one; no byte of that has changed."""
        keep = -(-length // self.block_size)
        self._release(sequence, keep)
        if sequence.blocks[-1:] != last:
            self._references[last[0]] += 1
            self._release(sequence, keep - 1)
            sequence.blocks += last
            self._fill_row(sequence, keep - 1)
        sequence.length = length

    def _take_block(self) -> int:
        block = self._free_blocks.pop()
        self._references[block] = 1
        return block

    def _release(self, sequence: _Sequence, keep: int) -> None:
        for block in reversed(sequence.blocks[keep:]):
            self._references[block] -= 1
            if not self._references[block]:
                self._free_blocks.append(block)
        del sequence.blocks[keep:]

    def _take_row(self) -> int:
        if not self._free_rows:
            rows, width = self._block_table.shape
            grown = torch.zeros(max(2 * rows, 4), width, dtype=torch.int32, device=self.device)
            grown[:rows] = self._block_table
            self._block_table = grown
            self._free_rows = list(range(rows, grown.shape[0]))
        return heapq.heappop(self._free_rows)

    def _fill_row(self, sequence: _Sequence, first: int) -> None:
        rows, width = self._block_table.shape
        if len(sequence.blocks) > width:
            grown = torch.zeros(rows, max(2 * width, len(sequence.blocks)), dtype=torch.int32, device=self.device)
            grown[:, :width] = self._block_table
            self._block_table = grown
        new = torch.tensor(sequence.blocks[first:], dtype=torch.int32)
        self._block_table[sequence.row, first : len(sequence.blocks)] = new

    def _make_step(self, seq_ids: Sequence[int], sequences: list[_Sequence], counts: tuple[int, ...]) -> CacheStep:
        lengths = [sequence.length for sequence in sequences]
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        rows = self._rows(sequences)
        # One host tensor, so one copy to the device: lengths, starts, rows for the unquantized store, slots.
        num_seqs = len(lengths)
        tokens, places = self._raw_places(sequences, counts) if self._raw_rows else (None, None)
        first = 2 * num_seqs + 1 + len(tokens or ())
        end = first + len(places or ())
        meta_list = [*lengths, *starts, *(tokens or ()), *(places or ())]
        if max(counts, default=0) <= 1:
            size = self.block_size
            slots = [
                s.blocks[-1] * size + (s.length - 1) % size for s, count in zip(sequences, counts, strict=True) if count
            ]
            meta = torch.tensor(meta_list + slots, dtype=torch.int32)
        else:
            meta = torch.tensor(meta_list, dtype=torch.int32)
            meta = torch.cat((meta, *(self._slots(s, count) for s, count in zip(sequences, counts, strict=True))))
        meta = meta.to(self.device)
        return CacheStep(
            tuple(seq_ids),
            counts,
            meta[end:],
            self._block_table[rows],
            meta[:num_seqs],
            meta[num_seqs : 2 * num_seqs + 1],
            max(counts, default=0),
            max(lengths, default=0),
            rows,
            None if tokens is None else meta[2 * num_seqs + 1 : first].long(),
            None if places is None else meta[first:end].long(),
        )

    def _raw_places(self, sequences: list[_Sequence], counts: tuple[int, ...]) -> tuple[list[int] | None, list[int] | None]:
        """Return which of the last tokens the unquantized store keeps, and where; None for all, or for none."""
        if max(counts, default=0) <= 1 and (self.window or all(s.length <= self.sinks for s in sequences)):
            slots = []  # as below, for one token of each, in half the time
            for sequence, count in zip(sequences, counts, strict=True):
                if count:
                    position = sequence.length - 1
                    row = position if position < self.sinks else self._raw_row(position)
                    slots.append(sequence.row * self._raw_rows + row)
            return None, slots
        tokens: list[int] = []
        slots = []
        begin = 0
        for sequence, count in zip(sequences, counts, strict=True):
            context = sequence.length - count
            kept = [*range(context, min(self.sinks, sequence.length))]
            if self.window:
                kept += range(max(context, self.sinks, self._raw_first(sequence)), sequence.length)
            tokens += [begin + position - context for position in kept]
            rows = [p if p < self.sinks else self._raw_row(p) for p in kept]
            slots += [sequence.row * self._raw_rows + row for row in rows]
            begin += count
        return (tokens, slots) if tokens else (None, None)

    def _slots(self, sequence: _Sequence, count: int) -> torch.Tensor:
        """Slots of the last `count` tokens, [count] int32."""
        begin = sequence.length - count
        first = begin // self.block_size
        pages = torch.tensor(sequence.blocks[first:], dtype=torch.int32)
        slots = (pages * self.block_size)[:, None] + torch.arange(self.block_size, dtype=torch.int32)
        return slots.flatten()[begin - first * self.block_size :][:count]

    def _rows(self, sequences: list[_Sequence]) -> slice | torch.Tensor:
        rows = [sequence.row for sequence in sequences]
        if rows and rows == list(range(rows[0], rows[0] + len(rows))):
            return slice(rows[0], rows[0] + len(rows))
        return torch.tensor(rows, dtype=torch.long, device=self.device)
