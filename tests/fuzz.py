"""Differential fuzzing: random calls on a backend against a slow dictionary of rows.

    python tests/fuzz.py --seconds 600 [--seed N] [--backend NAME] [--jobs N] [--json FILE]
    python tests/fuzz.py --replay FILE

A run is a list of (call, seed) pairs on one cache. Sequences grow, are attended, read, cropped, forked and freed; the cache
lies padded in an allocation of canaries, and every byte that is not a written row is poison. After each call the whole
allocation must equal a shadow that only the call's own rows may have changed. A failing list is shrunk by leaving out
calls, printed with its seed, and kept in the summary, whose findings `--replay` runs again, on this machine or another.
Several processes may run at once; their calls are summed up.

Half of the runs drive the operations, half a `PagedKVCache`, with and without a window and sinks. The CPU kernels run with
one instruction set or another and on one or two threads. With TRITON_INTERPRET=1 the Triton kernels are a backend of this
machine too.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from batches import CANARY, POISON, place, usable_backends
from interpreter import take_numpy_2_4
from oracle import attend

from nibblekv import (
    FORMATS,
    AttentionOptions,
    KVCacheLayout,
    QuantFormat,
    dequantize,
    gather_and_dequantize,
    paged_attention,
    quantize,
    reshape_and_cache,
)
from nibblekv.backends import get_backend
from nibblekv.backends.cpu import _library
from nibblekv.cache import RAW_MARGIN, CacheFullError, PagedKVCache
from nibblekv.formats import Role, decode_rows, encode_rows, unpack_scale_word
from nibblekv.machine import write_report
from nibblekv.rotation import inverse_gain, rotate, unrotate

# Relative error of a row of attention that a backend may have against float64 on the same pages.
TOLERANCE = {"reference": 2e-5}
DEFAULT_TOLERANCE = 1e-3
FLOAT16 = torch.finfo(torch.float16)  # the queries that Triton holds
# Uniform errors have a third of their bound's square as their variance: 3 of the root sum of squares are 5.2 sigma.
ROUNDING_SIGMAS = 3.0
MAX_LENGTH, MAX_SEQUENCES = 45, 6
SEEDS_APART = 10**7  # of processes: more than one of them will try
SHRINK_SECONDS = 60.0  # sixty interpreted calls, each left out in turn, would take an hour
PER_SEQUENCE = {"rswa_prefix_lens", "mm_prefix_ranges", "raw_key", "raw_value"}
Calls = list[tuple[str, int]]


@dataclass
class Sequence:
    """Pages in order, and how many of their slots are in use."""

    pages: list[int]
    length: int = 0


@dataclass(frozen=True)
class Finding:
    """A list of calls that fails, and all that it takes to run it again.

    failure: what `calls` ends with; first_failure: what the run did before its calls were left out, which may be another.
    instruction_set: of the CPU kernels, "" for other backends.
    """

    backend: str
    seed: int
    instruction_set: str
    calls: Calls
    failure: str
    first_failure: str

    def __str__(self) -> str:
        where = f"{self.backend}{self.instruction_set and f' with {self.instruction_set}'}"
        return f"{where}: seed {self.seed}, {len(self.calls)} calls {self.calls}\n{self.failure}"


class Machine:
    """One cache, what it must hold, and the calls that change both."""

    CALLS: tuple[str, ...] = ("grow", "grow", "attend", "attend", "attend", "read", "crop", "fork", "free", "refuse")

    def __init__(self, backend: str, seed: int) -> None:
        random = Random(seed)
        self.backend = backend
        page, order = random.choice([("planar", "HND"), ("interleaved", "HND"), ("interleaved", "NHD")])
        self.layout = KVCacheLayout.create(
            random.choice(list(FORMATS)),
            v_format=random.choice([None, None, *FORMATS]),
            num_kv_heads=random.randint(1, 3),
            head_size=random.choice([32, 64, 64, 96, 104, 128]),
            head_size_v=random.choice([None, None, 40, 64]),
            block_size=random.choice([16, 16, 32]),
            page=page,
            block_order=order,
        )
        self.group = random.choice([1, 1, 2, 3, 5])
        self.dtype = random.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
        # The Triton kernels hold operands as float16: keys of 1e-8 and the queries of 1e8 that go with them are beyond it.
        decades = (-3.0, 3.0) if backend == "triton" else (-8.0, 4.7)
        self.key_size, self.value_size = (
            10.0 ** random.choice([random.uniform(-1, 1), random.uniform(*decades)]) for _ in range(2)
        )
        self.blocks = random.randint(4, 9)
        self.pads = {name: 4 * random.randint(0, 3) for name in ("offset", "pad_row", "pad_head", "pad_block")}
        self.allocation, self.kv_cache = place(self.layout, self.blocks, **self.pads)
        self.kv_cache.fill_(POISON)
        self.shadow = self.allocation.clone()
        self.free_pages = list(range(self.blocks))
        self.owners = [0] * self.blocks
        self.sequences: list[Any] = []
        self.rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # slot -> key and value as stored
        self.refused = 0
        self.long = False  # a step that can be attended only once

    def step(self, call: str, seed: int) -> None:
        """Make one call and compare everything that it may and may not have changed."""
        getattr(self, call)(Random(seed))
        if not torch.equal(self.allocation, self.shadow):
            changed = (self.allocation != self.shadow).nonzero().flatten()
            raise AssertionError(f"{call} changed {len(changed)} bytes that are not its own, the first at {int(changed[0])}")

    # --- writing

    def grow(self, random: Random) -> None:
        """Append tokens to old and new sequences in one write, in any order, with skipped rows among them."""
        chosen = random.sample(self.sequences, min(len(self.sequences), random.randint(0, 2)))
        if not chosen or (random.random() < 0.5 and len(self.sequences) < MAX_SEQUENCES):
            self.sequences.append(Sequence([]))
            chosen.append(self.sequences[-1])
        slots: list[int] = []
        for sequence in chosen:
            for _ in range(random.choice([1, 1, 3, random.randint(1, 20)])):
                slot = self._next_slot(sequence)
                if slot is not None:
                    slots.append(slot)
        slots += [-random.randint(1, 3)] * random.choice([0, 0, 2])
        random.shuffle(slots)
        self._write(slots, random)
        self.sequences = [s for s in self.sequences if s.length]

    def _next_slot(self, sequence: Sequence) -> int | None:
        size = self.layout.block_size
        if sequence.length >= MAX_LENGTH:
            return None
        offset = sequence.length % size
        if offset == 0:
            if not self.free_pages:
                return None
            sequence.pages.append(self.free_pages.pop())
            self.owners[sequence.pages[-1]] = 1
        elif self.owners[sequence.pages[-1]] > 1:
            return None  # a shared page that is not full: only its owners' copy may grow
        sequence.length += 1
        return sequence.pages[-1] * size + offset

    def _write(self, slots: list[int], random: Random) -> None:
        layout = self.layout
        key, value = (
            self._tensor(random, len(slots), layout.num_kv_heads, n, size, bad=0.03)
            for n, size in ((layout.head_size, self.key_size), (layout.head_size_v, self.value_size))
        )
        mapping = torch.tensor(slots, dtype=random.choice([torch.int32, torch.int64]))
        if self._refuses(None):
            return
        reshape_and_cache(key, value, self.kv_cache, mapping, layout, backend=self.backend)
        views = layout.views(self.kv_cache)
        shadow = layout.views(
            self.shadow.as_strided(self.kv_cache.shape, self.kv_cache.stride(), self.kv_cache.storage_offset())
        )
        kept = mapping >= 0
        block, slot = mapping[kept] // layout.block_size, mapping[kept] % layout.block_size
        stored = []
        sides: tuple[tuple[Role, torch.Tensor, QuantFormat, str, str], ...] = (
            ("key", key[kept], layout.k_format, "key_cache", "k_scale_cache"),
            ("value", value[kept], layout.v_format, "value_cache", "v_scale_cache"),
        )
        for role, raw, fmt, codes, words in sides:
            code_rows, word_rows = getattr(views, codes)[block, slot], getattr(views, words)[block, slot]
            check_rows(raw, code_rows, word_rows, fmt, role)
            getattr(shadow, codes)[block, slot] = code_rows
            getattr(shadow, words)[block, slot] = word_rows
            stored.append(unrotate(decode_rows(code_rows, word_rows, fmt), fmt.rotation))
        self.rows.update(zip(mapping[kept].tolist(), zip(*stored, strict=True), strict=True))

    def _tensor(
        self, random: Random, tokens: int, heads: int, head_size: int, size: float, bad: float = 0.0
    ) -> torch.Tensor:
        gen = torch.Generator().manual_seed(random.getrandbits(40))
        wide = torch.randn(tokens, heads + 1, head_size + 8, generator=gen) * size
        if random.random() < 0.3:
            wide[..., random.randrange(head_size)] *= 30
        if random.random() < 0.2:
            wide = wide.abs()
        for token in range(tokens):
            if random.random() < bad:
                wide[token, random.randrange(heads), random.randrange(head_size)] = random.choice(
                    [math.nan, math.inf, -math.inf]
                )
        tensor = wide.clamp(-6e4, 6e4) if self.dtype == torch.float16 else wide
        tensor = torch.where(wide.isfinite(), tensor, wide).to(self.dtype)[:, :heads, :head_size]
        return tensor if random.random() < 0.5 else tensor.contiguous()

    # --- reading

    def attend(self, random: Random) -> None:
        """Attend some sequences, with random options, and compare with float64 over the dictionary."""
        chosen = random.sample(self.sequences, min(len(self.sequences), random.randint(1, 3)))
        query_lens = [min(s.length, random.choice([0, 1, 1, 2, 5])) for s in chosen]
        own: dict[str, torch.Tensor] = {}
        if random.random() < 0.25:
            layout, total = self.layout, sum(query_lens)
            own["key"] = self._tensor(random, total, layout.num_kv_heads, layout.head_size, self.key_size)
            own["value"] = self._tensor(random, total, layout.num_kv_heads, layout.head_size_v, self.value_size)
        if chosen:
            self._attend(random, chosen, query_lens, own)

    def _attend(self, random: Random, chosen: list, query_lens: list[int], own: dict[str, torch.Tensor]) -> None:
        """Attend the last tokens of sequences; `own` are their raw keys and values, or nothing."""
        layout = self.layout
        total, heads = sum(query_lens), layout.num_kv_heads * self.group
        query = self._tensor(random, total, heads, layout.head_size, 1 / self.key_size)
        options = self._options(random, len(chosen), heads, max(query_lens))
        kept, rule = self._kept(random, chosen, query_lens, options)
        opts = AttentionOptions(**options)
        if self._refuses(opts):
            return
        dtype = self.dtype if opts.output_scale is None else torch.float8_e4m3fn
        got = self._call(query, chosen, query_lens, random, **own, **self._outputs(query, dtype), **options)
        starts = [0, *torch.tensor(query_lens).cumsum(0).tolist()]
        rows = []
        for b, sequence in enumerate(chosen):
            keys, values = self._stored(sequence)
            if own and query_lens[b]:
                for pair in [(keys, values)] if kept is None else [(keys, values), kept[b]]:
                    for part, name in zip(pair, ("key", "value"), strict=True):
                        part[-query_lens[b] :] = own[name][starts[b] : starts[b + 1]].float()
            rows.append((keys, values))
        expected, expected_lse = attend(query, rows, starts, dataclasses.replace(opts, **rule), kept)
        tolerance = TOLERANCE.get(self.backend, DEFAULT_TOLERANCE)
        if self.backend == "triton" and own:  # a chunk's own part is rounded before that of its prefix is added
            tolerance += torch.finfo(self.dtype).eps / 2
        scale = 1.0 if opts.output_scale is None else float(opts.output_scale)
        size = max((float(v.nan_to_num(0).abs().max()) for _, v in rows + (kept or []) if len(v)), default=0.0) / scale
        rounding = self._score_rounding(query, [keys for keys, _ in rows], starts, opts.softmax_scale)
        compare("out", got[0].double(), expected, ((tolerance + rounding) * size)[..., None].expand_as(expected), dtype)
        whole = ~expected.isnan().any(-1)  # a row that a NaN value made NaN may or may not have a log-sum-exp
        compare("lse", got[1].double()[whole], expected_lse[whole], (10 * tolerance + rounding)[whole], torch.float32)
        if opts.batch_invariant and not self.long:
            b = random.randrange(len(chosen))
            mine = slice(starts[b], starts[b + 1])
            alone = {name: value[b : b + 1] if name in PER_SEQUENCE else value for name, value in options.items()}
            alone["causal"] = opts.causal[b : b + 1] if isinstance(opts.causal, torch.Tensor) else opts.causal
            own = {name: rows[mine] for name, rows in own.items()}
            outputs = self._outputs(query[mine], dtype)
            again = self._call(query[mine], chosen[b : b + 1], query_lens[b : b + 1], random, **own, **outputs, **alone)
            for name, lone, among in zip(("out", "lse"), again, got, strict=True):
                same = lone.view(torch.uint8) == among[mine].contiguous().view(torch.uint8)
                assert same.all(), f"{name}: a row alone and in a batch differ, with batch_invariant"

    def _score_rounding(
        self, query: torch.Tensor, keys: list[torch.Tensor], starts: list[int], softmax_scale: float
    ) -> torch.Tensor:
        """Bound what the scores of each row lose, [num_tokens, num_query_heads]: Triton holds rotated queries as float16.

        Every coordinate is off by half a unit of its last place at most. Such errors times a key's coordinates add up to
        `ROUNDING_SIGMAS` times the root of the sum of their squares at most: surely where few coordinates count, else all
        but surely. An error of every score by x moves a row of the output by at most x times the largest value.
        """
        rounding = torch.zeros(query.shape[:2], dtype=torch.float64)
        if self.backend != "triton":
            return rounding
        from nibblekv.backends.triton.attention import QUERY_GAIN

        smallest = torch.tensor(FLOAT16.tiny * FLOAT16.eps / QUERY_GAIN.value, dtype=torch.float64)
        fmt = self.layout.k_format
        orthonormal = math.sqrt(inverse_gain(fmt.rotation, self.layout.head_size))
        for b, stored in enumerate(keys):
            rotated = rotate(query[starts[b] : starts[b + 1]], fmt.rotation).double() * orthonormal
            error = torch.maximum(rotated.abs() * FLOAT16.eps, smallest) / 2
            squares = (rotate(stored.nan_to_num(0, 0, 0), fmt.rotation).double() * orthonormal) ** 2
            per_key = torch.einsum("qhd,khd->qhk", error**2, squares.repeat_interleave(self.group, 1)).sqrt()
            if per_key.numel():
                rounding[starts[b] : starts[b + 1]] = per_key.amax(-1) * (ROUNDING_SIGMAS * abs(softmax_scale))
        return rounding

    def _outputs(self, query: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
        out = torch.full((*query.shape[:2], self.layout.head_size_v), math.nan).to(dtype)
        return {"out": out, "return_lse": True}

    def _kept(
        self, random: Random, chosen: list, query_lens: list[int], options: dict
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]] | None, dict[str, int]]:
        """Add raw rows to the options, or none; return what they hold at every position, and the oracle's options too."""
        if random.random() < 0.75:
            return None, {}
        return self._raw_rows(random, chosen, max(query_lens), options), {}

    def read(self, random: Random) -> None:
        """Gather a part of a sequence: exactly the stored rows."""
        if self.sequences:
            sequence = random.choice(self.sequences)
            length = random.randint(0, sequence.length)
            got = gather_and_dequantize(self.kv_cache, self._table([sequence], random)[0], length, self.layout)
            for rows, expected in zip(got, self._stored(sequence), strict=True):
                assert same_rows(rows, expected[:length]), "rows are not those written"

    def _call(self, query: torch.Tensor, chosen: list, query_lens: list[int], random: Random, **arguments: Any) -> Any:
        """Call `paged_attention` on sequences."""
        index = random.choice([torch.int32, torch.int64])
        return paged_attention(
            query,
            self.kv_cache,
            self._table(chosen, random),
            torch.tensor([s.length for s in chosen], dtype=index),
            torch.tensor([0, *query_lens]).cumsum(0).to(index),
            self.layout,
            backend=self.backend,
            **arguments,
        )

    def _table(self, chosen: list, random: Random) -> torch.Tensor:
        """Return a block table, perhaps of a wider one; entries past a sequence's pages name no page."""
        width = max(len(s.pages) for s in chosen) + random.randint(0, 2)
        wide = random.randint(0, 2)
        rows = [s.pages + [random.randrange(2**20) for _ in range(width + wide - len(s.pages))] for s in chosen]
        return torch.tensor(rows, dtype=random.choice([torch.int32, torch.int64]))[:, :width]

    def _stored(self, sequence: Any) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.layout.block_size
        rows = [self.rows[sequence.pages[i // size] * size + i % size] for i in range(sequence.length)]
        return torch.stack([key for key, _ in rows]), torch.stack([value for _, value in rows])

    def _raw_rows(
        self, random: Random, chosen: list, max_query_len: int, options: dict
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Add a raw window and sinks to the options; return each sequence's raw (key, value), float32, at every position.

        They have nothing to do with the stored rows. Rows that the rule does not name are NaN.
        """
        window, sinks = random.choice([(0, 3), (1, 0), (random.randint(1, 20), random.randint(0, 5))])
        ring = window + max(max_query_len - 1, 0) + random.randint(0, 4) if window else 0
        rows = []
        for name, head_size, size in (
            ("raw_key", self.layout.head_size, self.key_size),
            ("raw_value", self.layout.head_size_v, self.value_size),
        ):
            of_sequences = [self._tensor(random, s.length, self.layout.num_kv_heads, head_size, size) for s in chosen]
            shape = (len(chosen), sinks + ring, self.layout.num_kv_heads, head_size)
            options[name] = torch.full(shape, torch.nan, dtype=self.dtype)
            for b, tensor in enumerate(of_sequences):
                for p in range(len(tensor)):
                    if p < sinks or p >= len(tensor) - ring:
                        options[name][b, p if p < sinks else sinks + (p - sinks) % ring] = tensor[p]
            rows.append([tensor.float().clone() for tensor in of_sequences])
        options["raw_window"], options["raw_sinks"] = window, sinks
        return list(zip(*rows, strict=True))

    def _options(self, random: Random, seqs: int, heads: int, queries: int) -> dict:
        gen = torch.Generator().manual_seed(random.getrandbits(40))
        options: dict = {"softmax_scale": random.uniform(0.5, 2) * self.layout.head_size**-0.5 / 3}

        def maybe(probability: float = 0.15) -> bool:
            return random.random() < probability

        if maybe():
            options["causal"] = random.choice([False, torch.rand(seqs, generator=gen) < 0.5])
        kind = random.choice(["all", "all", "window", "chunks", "rswa"])
        if kind in ("window", "chunks"):
            options["sliding_window"] = random.randint(1, 30)
        if kind == "chunks":
            options["chunk_lookback"] = random.randint(0, options["sliding_window"] - 1) if maybe(0.5) else 0
        if kind == "rswa":
            options["rswa_prefix_lens"] = torch.randint(0, 20, (seqs,), generator=gen, dtype=torch.int32)
            options["rswa_window"] = random.randint(1, 20)
        if maybe():
            options["softcap"] = random.choice([0.01, 1.0, 30.0])
        if maybe():
            options["alibi_slopes"] = torch.rand(heads, generator=gen) * 0.3
            options["alibi_sqrt"] = maybe(0.5)
        if maybe():
            options["sinks"] = torch.randn(heads, generator=gen) * 3
        if maybe() and queries:
            bias = torch.randn(queries, queries, generator=gen)
            options["qq_bias"] = bias if maybe(0.5) else torch.where(bias > 0.5, -torch.inf, 0.0)
        if maybe():
            ranges = torch.randint(0, MAX_LENGTH, (seqs, random.randint(1, 3), 2), generator=gen, dtype=torch.int32)
            options["mm_prefix_ranges"] = ranges
            options["mm_prefix_clamp"] = maybe(0.5)
        if maybe(0.1):
            options["output_scale"] = torch.tensor([self.value_size / random.choice([1.0, 100.0])])
        if maybe(0.2):
            options["batch_invariant"] = True
        return options

    def _refuses(self, options: AttentionOptions | None) -> bool:
        refuses = get_backend(self.backend).supports(self.layout, options, torch.device("cpu")) is not None
        self.refused += refuses
        return refuses

    # --- lifetimes

    def crop(self, random: Random) -> None:
        """Drop the last tokens of a sequence. Their bytes stay, and must not be read."""
        if not self.sequences:
            return
        sequence = random.choice(self.sequences)
        sequence.length = random.randint(1, sequence.length)
        keep = -(-sequence.length // self.layout.block_size)
        for page in sequence.pages[keep:]:
            self._release(page)
        del sequence.pages[keep:]

    def fork(self, random: Random) -> None:
        """Make a second sequence of the same pages; a shared page is not written while it is shared."""
        if 0 < len(self.sequences) < MAX_SEQUENCES:
            parent = random.choice(self.sequences)
            for page in parent.pages:
                self.owners[page] += 1
            self.sequences.append(Sequence(list(parent.pages), parent.length))

    def free(self, random: Random) -> None:
        """End a sequence. Pages that nobody owns become poison."""
        if self.sequences:
            for page in self.sequences.pop(random.randrange(len(self.sequences))).pages:
                self._release(page)

    def _release(self, page: int) -> None:
        self.owners[page] -= 1
        if self.owners[page] == 0:
            self.kv_cache[page].fill_(POISON)
            self.shadow.as_strided(self.kv_cache.shape, self.kv_cache.stride(), self.kv_cache.storage_offset())[page].fill_(
                POISON
            )
            self.free_pages.append(page)

    def refuse(self, random: Random) -> None:
        """Make a call that must raise and write nothing."""
        layout = self.layout
        key = torch.zeros(3, layout.num_kv_heads, layout.head_size, dtype=self.dtype)
        value = torch.zeros(3, layout.num_kv_heads, layout.head_size_v, dtype=self.dtype)
        slots = torch.tensor([0, 1, 2])
        match random.choice(["slot", "dtype", "shape", "value"]):
            case "slot":
                slots[random.randrange(3)] = self.blocks * layout.block_size + random.randrange(3)
            case "dtype":
                value = value.to(torch.float64)
            case "shape":
                key = key[..., :-8]
            case "value":
                value = value[:2]
        try:
            reshape_and_cache(key, value, self.kv_cache, slots, layout, backend=self.backend)
        except (ValueError, TypeError):
            return
        raise AssertionError("a bad write was accepted")


Rows = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class StoredSequence:
    """A sequence of a `PagedKVCache`, and what each layer must hold of it: in its pages, and raw.

    raw: what was written, or was put back into the ring; at every position. raw_start: the ring lost those before it.
    """

    seq_id: int
    rows: Rows
    raw: Rows
    raw_start: int = 0

    @property
    def length(self) -> int:
        return self.rows[0][0].shape[0]


class PagedMachine(Machine):
    """The same calls on a `PagedKVCache` of one or two layers: allocation, shared pages, copies on write, a full pool."""

    CALLS = (*Machine.CALLS, "turn", "turn")

    def __init__(self, backend: str, seed: int) -> None:
        super().__init__(backend, seed)
        random = Random(seed)
        self.window, self.sinks = random.choice([(0, 0), (0, 3), (6, 0), (9, 4)])
        self.raw_dtype = random.choice([torch.float32, self.dtype])
        if self.window or self.sinks:
            row = torch.zeros(1, self.sinks + self.window, 1, 1)
            raw = {"raw_key": row, "raw_value": row, "raw_window": self.window, "raw_sinks": self.sinks}
            if get_backend(backend).supports(self.layout, AttentionOptions(1.0, **raw), torch.device("cpu")) is not None:
                self.window = self.sinks = 0
        fixed = random.random() < 0.5
        self.cache = PagedKVCache(
            [self.layout] * random.randint(1, 2),
            num_blocks=self.blocks if fixed else None,
            backend=backend,
            window=self.window,
            sinks=self.sinks,
            raw_dtype=self.raw_dtype,
        )
        self.canaries: Rows = []  # allocations, and which of their bytes are no page's
        for layer in range(len(self.cache.layouts) if fixed else 0):
            allocation, self.cache.kv_caches[layer] = place(self.layout, self.blocks, **self.pads)
            outside = torch.ones(len(allocation), dtype=torch.bool)
            pages = self.cache.kv_caches[layer]
            outside.as_strided(pages.shape, pages.stride(), pages.storage_offset()).fill_(False)
            self.canaries.append((allocation, outside))
        self.before = [kv_cache.clone() for kv_cache in self.cache.kv_caches]
        self.layer = 0

    def step(self, call: str, seed: int) -> None:
        """Make one call; then every sequence must hold exactly its rows, and every byte that is nobody's is poison."""
        if self._refuses(None):
            return
        getattr(self, call)(Random(seed))
        if call in ("attend", "read"):
            for kv_cache, before in zip(self.cache.kv_caches, self.before, strict=True):
                assert torch.equal(kv_cache, before), f"{call} wrote to pages"
            return
        for sequence in self.sequences:
            for layer, expected in enumerate(sequence.rows):
                for got, rows in zip(self.cache.gather(sequence.seq_id, layer), expected, strict=True):
                    assert same_rows(got, rows), f"{call} changed another sequence's rows"
        for allocation, outside in self.canaries:
            assert (allocation[outside] == CANARY).all(), f"{call} wrote beside the pages"
        unused = torch.ones(self.cache.num_blocks, self.cache.block_size, dtype=torch.bool)
        for sequence in self.sequences:
            for i, page in enumerate(self.cache.blocks(sequence.seq_id)):
                unused[page, : sequence.length - i * self.cache.block_size] = False
        for kv_cache in self.cache.kv_caches:
            views = self.layout.views(kv_cache)
            views.key_cache[unused], views.value_cache[unused] = POISON, POISON
            views.k_scale_cache[unused], views.v_scale_cache[unused] = -1, -1
        self.before = [kv_cache.clone() for kv_cache in self.cache.kv_caches]

    def grow(self, random: Random) -> None:
        """Append to old and new sequences; a full pool must refuse and change nothing."""
        chosen = self._choose(random)
        counts = [min(random.choice([0, 1, 1, 3, 17]), MAX_LENGTH - s.length) for s in chosen]
        given = [self._rows(random, sum(counts)) for _ in self.cache.layouts]
        try:
            self.cache.append([s.seq_id for s in chosen], [k for k, _ in given], [v for _, v in given], counts)
        except CacheFullError:
            return
        self._note(chosen, counts, given)

    def turn(self, random: Random) -> None:
        """Make a step as a model does: room for all layers, then per layer a write and the attention of the new tokens."""
        chosen = self._choose(random)
        counts = [min(random.choice([1, 1, 2, RAW_MARGIN + 1, 40]), MAX_LENGTH - s.length) for s in chosen]
        given = [self._rows(random, sum(counts), 0.0) for _ in self.cache.layouts]
        try:
            self.now = self.cache.extend([s.seq_id for s in chosen], counts)
        except CacheFullError:
            return
        for layer, (key, value) in enumerate(given):
            self.cache.write(self.now, key, value, layer)
        self._note(chosen, counts, given)
        self.long = self.window > 0 and max(counts) > RAW_MARGIN + 1
        self.strict = random.random() < 0.5
        for self.layer, (key, value) in enumerate(given):
            passed = self.long or random.random() < 0.7
            self.passed = {"key": key, "value": value, "strict": self.strict} if passed else {}
            self._attend(random, chosen, counts, {} if self.strict or not passed else {"key": key, "value": value})
        self.now, self.passed, self.long = None, None, False

    now: Any = None  # the step of a turn, and its arguments
    passed: Any = None

    def _choose(self, random: Random) -> list[StoredSequence]:
        """Return old sequences, perhaps with a new one among them."""
        chosen = random.sample(self.sequences, min(len(self.sequences), random.randint(0, 2)))
        if not chosen or (random.random() < 0.5 and len(self.sequences) < MAX_SEQUENCES):
            empty = torch.zeros(0, self.layout.num_kv_heads, self.layout.head_size)
            empty_v = torch.zeros(0, self.layout.num_kv_heads, self.layout.head_size_v)
            rows = [(empty, empty_v)] * len(self.cache.layouts)
            self.sequences.append(StoredSequence(self.cache.add_sequences()[0], rows, rows))
            chosen.append(self.sequences[-1])
        return chosen

    def _note(self, chosen: list[StoredSequence], counts: list[int], given: Rows) -> None:
        """Enter the tokens of a step, of all layers, into the model; check how they were stored."""
        first = 0
        for sequence, count in zip(chosen, counts, strict=True):
            self._put_back(sequence, sequence.length - self.window + 1)
            sequence.raw_start = max(sequence.raw_start, sequence.length + count - self.window - RAW_MARGIN)
            rows, raw = [], []
            for layer, pair in enumerate(given):
                got = self.cache.gather(sequence.seq_id, layer)
                new = [x[first : first + count] for x in pair]
                for role, x, stored in zip(("key", "value"), new, got, strict=True):
                    check_decoded(x, stored[sequence.length :], self.layout, role)
                old_and_new = [torch.cat((o, n[len(o) :])) for o, n in zip(sequence.rows[layer], got, strict=True)]
                rows.append((old_and_new[0], old_and_new[1]))
                as_kept = [x.to(self.raw_dtype).float() for x in new]
                raw_rows = [torch.cat((o, n)) for o, n in zip(sequence.raw[layer], as_kept, strict=True)]
                raw.append((raw_rows[0], raw_rows[1]))
            sequence.rows, sequence.raw = rows, raw
            first += count

    def _put_back(self, sequence: StoredSequence, first: int) -> None:
        """Follow a crop below what the ring still has: what a step reads of it from `first` on is as stored."""
        first, last = max(first, self.sinks), min(sequence.raw_start, sequence.length)
        if not self.window or first >= last:
            return
        raw = []
        for rows, stored in zip(sequence.raw, sequence.rows, strict=True):
            pair = [x.clone() for x in rows]
            for x, y in zip(pair, stored, strict=True):
                x[first:last] = y[first:last].to(self.raw_dtype).float()
            raw.append((pair[0], pair[1]))
        sequence.raw, sequence.raw_start = raw, first

    def _rows(self, random: Random, tokens: int, bad: float = 0.03) -> tuple[torch.Tensor, torch.Tensor]:
        heads = self.layout.num_kv_heads
        return (
            self._tensor(random, tokens, heads, self.layout.head_size, self.key_size, bad),
            self._tensor(random, tokens, heads, self.layout.head_size_v, self.value_size, bad),
        )

    def attend(self, random: Random) -> None:
        """Attend in one of the layers."""
        self.layer = random.randrange(len(self.cache.layouts))
        super().attend(random)

    def _kept(
        self, random: Random, chosen: list, query_lens: list[int], options: dict
    ) -> tuple[Rows | None, dict[str, int]]:
        if not self.window and not self.sinks:
            return (None, {}) if self.now else super()._kept(random, chosen, query_lens, options)
        for sequence, count in zip(chosen, query_lens, strict=True):
            if not self.now:
                oldest = sequence.length - self.window - RAW_MARGIN
                self._put_back(sequence, max(sequence.length - count - self.window + 1, oldest))
        kept = []
        for sequence in chosen:
            key, value = (x.clone() for x in sequence.raw[self.layer])
            value[~value.isfinite().all(-1)] = math.nan  # what a backend makes of an infinite raw value
            kept.append((key, value))
        return kept, {"raw_window": self.window, "raw_sinks": self.sinks}

    def _call(self, query: torch.Tensor, chosen: list, query_lens: list[int], random: Random, **arguments: Any) -> Any:
        seq_ids = [s.seq_id for s in chosen]
        if self.now and self.now.seq_ids == tuple(seq_ids):
            return self.cache.attend(self.now, query, self.layer, **arguments | self.passed)
        return self.cache.attend(self.cache.view(seq_ids, query_lens), query, self.layer, **arguments)

    def _stored(self, sequence: Any) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = sequence.rows[self.layer]
        return key.clone(), value.clone()

    def read(self, random: Random) -> None:
        """Read nothing: every step reads all there is."""

    def crop(self, random: Random) -> None:
        """Drop the last tokens of a sequence, perhaps all."""
        if self.sequences:
            sequence = random.choice(self.sequences)
            length = random.randint(0, sequence.length)
            self.cache.crop(sequence.seq_id, length)
            sequence.rows, sequence.raw = (
                [(k[:length], v[:length]) for k, v in rows] for rows in (sequence.rows, sequence.raw)
            )
            sequence.raw_start = min(sequence.raw_start, length)

    def fork(self, random: Random) -> None:
        """Fork sequences, one of them perhaps twice."""
        few = 0 < len(self.sequences) < MAX_SEQUENCES
        parents = [random.choice(self.sequences) for _ in range(random.randint(1, 2) if few else 0)]
        for parent, seq_id in zip(parents, self.cache.fork([p.seq_id for p in parents]), strict=True):
            self.sequences.append(StoredSequence(seq_id, list(parent.rows), list(parent.raw), parent.raw_start))

    def free(self, random: Random) -> None:
        """End one or two sequences."""
        ended = random.sample(self.sequences, min(len(self.sequences), random.randint(1, 2)))
        self.cache.free([s.seq_id for s in ended])
        self.sequences = [s for s in self.sequences if s not in ended]

    def refuse(self, random: Random) -> None:
        """Make a call that must raise and change nothing."""
        ids = [s.seq_id for s in self.sequences]
        keys, values = ([rows[i] for rows in [self._rows(random, 1)] * len(self.cache.layouts)] for i in (0, 1))
        calls: list[Any] = [lambda: self.cache.append([-1], keys, values), lambda: self.cache.free([*ids, 10**9])]

        def append() -> None:
            """Fail in the last layer: the ring has then lost a token to the one that was taken back."""
            try:
                self.cache.append(ids[:1], [*keys[:-1], keys[-1].double()], values)
            except TypeError:
                sequence = self.sequences[0]
                self._put_back(sequence, sequence.length - self.window + 1)
                overwritten = sequence.length + 1 - self.window - RAW_MARGIN
                sequence.raw_start = min(max(sequence.raw_start, overwritten), sequence.length)
                raise

        if ids:
            calls += [lambda: self.cache.crop(ids[0], MAX_LENGTH + 100), append, lambda: self.cache.extend([ids[0], ids[0]])]
        try:
            random.choice(calls)()
        except (ValueError, TypeError, CacheFullError):
            return
        raise AssertionError("a bad call was accepted")


def check_decoded(raw: torch.Tensor, decoded: torch.Tensor, layout: KVCacheLayout, role: Role) -> None:
    """Check read-back rows [tokens, heads, head_size]: hardly worse than the reference's, and the NaN policy."""
    bad = ~raw.isfinite().all(-1)
    assert torch.equal(decoded.isnan().all(-1), bad), "exactly the rows with NaN or Inf must decode to NaN"
    x, decoded = raw[~bad].float(), decoded[~bad]
    fmt = layout.k_format if role == "key" else layout.v_format
    ideal = (dequantize(*quantize(x, fmt, role=role), fmt) - x).norm(dim=-1)
    assert ((decoded - x).norm(dim=-1) <= 1.2 * ideal + 1e-3 * x.norm(dim=-1)).all(), "rows read back wrong"


def check_error(y: torch.Tensor, decoded: torch.Tensor, words: torch.Tensor, fmt: QuantFormat, steps: float = 0.51) -> None:
    """Check decoded rows [..., head_size], still rotated, against y: within so many of their steps, or half a float8's."""
    scale = unpack_scale_word(words, fmt)[0][..., None]
    bound = steps * scale if fmt.code != "fp8" else torch.maximum(y.abs() / 15, scale * 2.0**-9)
    error = (y - decoded).abs()
    within = error <= bound + 1e-5 * y.abs().amax(-1, keepdim=True)
    assert within.all(), f"error {float((error - bound).max())} beyond {steps} steps"


def check_rows(raw: torch.Tensor, codes: torch.Tensor, words: torch.Tensor, fmt: QuantFormat, role: Role) -> None:
    """Check stored rows [tokens, heads, ...] against raw ones [.., head_size]: bounds, steps, and the NaN policy.

    role: "key" if the words are refitted.
    """
    y, decoded = rotate(raw, fmt.rotation), decode_rows(codes, words, fmt)
    bad = ~raw.isfinite().all(-1)
    assert decoded[bad].isnan().all(), "a row with NaN or Inf must decode to NaN"
    y, decoded, words = y[~bad], decoded[~bad], words[~bad]
    if not len(y):
        return
    scale, _ = unpack_scale_word(words, fmt)
    plain = encode_rows(y, fmt)[1]
    ideal, _ = unpack_scale_word(plain, fmt)
    size = y.abs().amax(-1)
    right, half = (scale - ideal).abs() <= 0.01 * ideal + 1e-6 * size, 0.51
    if role == "key" and fmt.word == "scale_min":
        # One code that is rounded the other way changes the pair, but never that it is unbiased along the row.
        centred = y.double() - y.double().mean(-1, keepdim=True)
        variance, half = (centred * centred).sum(-1), 17 / 8 * fmt.code_max / (fmt.code_max - 1) + 0.01
        rounding = 1e-6 * size * centred.abs().sum(-1)
        unbiased = ((centred * decoded.double()).sum(-1) - variance).abs() <= 0.005 * variance + rounding
        left = (encode_rows(y, fmt, role)[1] != plain) & ~unbiased  # a row at the border of what is refitted may stay
        assert left.sum() <= 1 + 0.02 * left.numel(), f"{int(left.sum())} keys are not refitted"
        right = right | unbiased
    assert right.all(), f"scale {scale} where {ideal} is right"
    check_error(y, decoded, words, fmt, half)


def compare(name: str, got: torch.Tensor, expected: torch.Tensor, tolerance: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise unless NaN and infinities agree and finite values do within their tolerance and one rounding to dtype.

    A value not below the largest that dtype holds by more than its tolerance may be an infinity of its sign.
    """
    assert torch.equal(got.isnan(), expected.isnan()), (
        f"{name}: NaN in {int(got.isnan().sum())}, not {int(expected.isnan().sum())}"
    )
    infinite = expected.isinf()
    assert torch.equal(got[infinite], expected[infinite]), f"{name}: infinities differ"
    finite = expected.isfinite()
    info = torch.finfo(dtype)
    bound = tolerance[finite] + expected[finite].abs() * info.eps + info.tiny * info.eps
    beyond = got[finite].isinf() & (got[finite] * expected[finite] > 0) & (expected[finite].abs() + bound >= info.max)
    error = (got[finite] - expected[finite]).abs().masked_fill(beyond, 0.0)
    if (error > bound).any():
        worst = (error - bound).argmax()
        raise AssertionError(f"{name}: error {float(error[worst]):.3g} where {float(bound[worst]):.3g} is allowed")


def same_rows(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Tell whether rows decoded twice agree: a sum of the inverse rotation may round otherwise among other rows."""
    got, expected = got.nan_to_num(7.0), expected.nan_to_num(7.0)
    return torch.allclose(got, expected, rtol=2**-23, atol=1e-14 * float(expected.abs().max()) if expected.numel() else 0.0)


MACHINES: tuple[type[Machine], ...] = (Machine, PagedMachine)


def run(
    backend: str, seed: int, calls: Calls, end: float = math.inf, instruction_set: str | None = None
) -> tuple[str | None, Machine, int]:
    """Run a list of calls on a fresh machine; return (what failed, or None; the machine; calls that were started).

    end: of the monotonic clock, after which no further call is started. instruction_set: default `drawn_instruction_set`.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(Random(~seed).choice([1] * 9 + [2]))
    if backend == "cpu":
        _library.use_instruction_set(instruction_set or drawn_instruction_set(backend, seed))
    machine = MACHINES[seed % 2](backend, seed)
    try:
        for i, (call, call_seed) in enumerate(calls):
            if time.monotonic() > end:
                return None, machine, i
            try:
                machine.step(call, call_seed)
            except Exception:
                return f"{call}: {traceback.format_exc(limit=-3)}", machine, i + 1
        return None, machine, len(calls)
    finally:
        torch.set_num_threads(threads)
        if backend == "cpu":
            _library.use_instruction_set("")


def drawn_instruction_set(backend: str, seed: int) -> str:
    """Return the instruction set that a seed's calls run with: those to draw from are the machine's."""
    return Random(f"instruction set {seed}").choice(instruction_sets()) if backend == "cpu" else ""


@functools.cache
def instruction_sets() -> list[str]:
    """Return those of the CPU kernels that this machine runs."""
    found = []
    for name in ("generic", "avx2", "avx512"):
        with contextlib.suppress(ValueError):
            _library.use_instruction_set(name)
            found.append(name)
    return found


def shrink(backend: str, seed: int, calls: Calls, end: float = math.inf) -> Calls:
    """Leave out runs of calls, halving their length, without which the list still fails, until `end` of the clock."""
    size = len(calls)
    while size:
        for i in range(len(calls) - size, -1, -size):
            shorter = calls[:i] + calls[i + size :]
            failure, _, started = run(backend, seed, shorter, end)
            if failure is not None:
                calls = shorter[:started]
        size //= 2
    return calls


def fuzz(backend: str, seconds: float, seed: int) -> tuple[int, Finding | None]:
    """Run fresh machines until the time is over; return (calls made, the first finding).

    A finding is shrunk for `SHRINK_SECONDS` more at most.
    """
    end, made = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        random = Random(seed)
        calls = [("grow", random.getrandbits(40))] * 2
        calls += [(random.choice(MACHINES[seed % 2].CALLS), random.getrandbits(40)) for _ in range(60)]
        first_failure, machine, started = run(backend, seed, calls, end)
        if first_failure is not None:
            print(f"{backend}: seed {seed}, shrinking {started} calls\n{first_failure}", flush=True)
            smallest = shrink(backend, seed, calls[:started], time.monotonic() + SHRINK_SECONDS)
            failure = run(backend, seed, smallest)[0] or "nothing: it fails now and then"
            return made, Finding(backend, seed, drawn_instruction_set(backend, seed), smallest, failure, first_failure)
        made += started - machine.refused
        seed += 1
    return made, None


def fuzz_backends(backends: list[str], seconds: float, seed: int) -> Iterator[dict[str, Any]]:
    """Fuzz each backend for an equal share of the time; yield a row for each, and print it."""
    for backend in backends:
        made, finding = fuzz(backend, seconds / len(backends), seed)
        print(f"{backend}: seeds from {seed}, {made} calls, {finding or 'no findings'}", flush=True)
        yield {"backend": backend, "calls": made, "findings": [dataclasses.asdict(finding)] if finding else []}


def replay(file: Path) -> int:
    """Run the findings of a summary again, print what each does here, and return how many still fail."""
    failing = 0
    for row in json.loads(file.read_text())["rows"]:
        for finding in row["findings"]:
            backend, seed, instruction_set = finding["backend"], finding["seed"], finding["instruction_set"]
            failure = run(backend, seed, finding["calls"], instruction_set=instruction_set)[0]
            print(f"{backend}: seed {seed}, {len(finding['calls'])} calls, {failure or 'no failure'}", flush=True)
            failing += failure is not None
    return failing


def fuzz_in_parallel(jobs: int, seconds: float, seed: int, arguments: list[str]) -> Iterator[list[dict[str, Any]]]:
    """Run this file in processes with seeds far apart; whenever one has ended, yield the rows so far, summed up by backend.

    A process that dies is a finding, without calls.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{job}.json" for job in range(jobs)]
        started = []
        for job, file in enumerate(files):
            own = ["--seconds", str(seconds), "--seed", str(seed + job * SEEDS_APART), "--json", str(file)]
            command = [sys.executable, *(f"-W{option}" for option in sys.warnoptions), "-X", "faulthandler", __file__]
            started.append(subprocess.Popen([*command, *arguments, *own]))
        total: dict[str, dict[str, Any]] = {}
        for job, (process, file) in enumerate(zip(started, files, strict=True)):
            code = process.wait()
            rows = json.loads(file.read_text())["rows"] if file.exists() else []
            if code not in (0, 1):
                first = seed + job * SEEDS_APART
                died = Finding("unknown", first, "", [], f"the process of seeds from {first} ended with {code}", "")
                rows.append({"backend": died.backend, "calls": 0, "findings": [dataclasses.asdict(died)]})
            for row in rows:
                sums = total.setdefault(row["backend"], {"backend": row["backend"], "calls": 0, "findings": []})
                sums["calls"] += row["calls"]
                sums["findings"] += row["findings"]
            yield list(total.values())


def main() -> int:
    """Fuzz every usable backend for an equal share of the time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None, help="the first seed (default: from the clock)")
    parser.add_argument("--backend", default=None, help="one backend (default: every one that serves CPU tensors)")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each for all of the time")
    parser.add_argument("--json", type=Path, default=None, help="a summary, with the machine and the command")
    parser.add_argument("--replay", type=Path, default=None, help="run the findings of such a summary again")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        take_numpy_2_4()
    if arguments.replay is not None:
        return 1 if replay(arguments.replay) else 0
    seed = int(time.time()) if arguments.seed is None else arguments.seed
    command = f"make fuzz SECONDS={arguments.seconds:g} JOBS={arguments.jobs}"
    rows: list[dict[str, Any]] = []
    calls = findings = 0
    for rows in _rows_so_far(arguments, seed):
        # After each, so that a run that is cut short leaves what it found.
        calls, findings = sum(row["calls"] for row in rows), sum(len(row["findings"]) for row in rows)
        write_report(arguments.json, command, rows, first_seed=seed, calls=calls, findings=findings)
    print(f"calls: {calls}, findings: {findings}")
    return 1 if findings else 0


def _rows_so_far(arguments: argparse.Namespace, seed: int) -> Iterator[list[dict[str, Any]]]:
    """Fuzz as the arguments say; yield the rows that there are, again and again."""
    if arguments.jobs > 1:
        only = ["--backend", arguments.backend] if arguments.backend else []
        yield from fuzz_in_parallel(arguments.jobs, arguments.seconds, seed, only)
        return
    backends = [arguments.backend] if arguments.backend else usable_backends()
    rows: list[dict[str, Any]] = []
    for row in fuzz_backends(backends, arguments.seconds, seed):
        rows.append(row)
        yield rows


if __name__ == "__main__":
    sys.exit(main())
