"""What an attention call may ask for, beside its tensors: one frozen record that every backend receives."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

__all__ = ["AttentionOptions", "defaults_beside", "make_options"]


@dataclass(frozen=True)
class AttentionOptions:
    """Options of one attention call. Positions are absolute: query i of a sequence stands at seq_len - query_len + i.

    A key at position k is visible to a query at position q if

        base = (k <= q if causal else True)
               and (window:  q - k < sliding_window, and k - q < sliding_window where not causal)
               and (chunks:  q // chunk_size - k // chunk_size <= chunk_lookback, in place of the window)
               and (R-SWA:   k < rswa_prefix_lens[b] or q - k < rswa_window, in place of the window)
        visible = base or (q and k lie in one mm_prefix range; with mm_prefix_clamp also q - k < sliding_window)

    and its score is softcap(softmax_scale * q.k) + ALiBi + query-query bias. A key that is not visible never changes the
    row, whatever bytes it holds. A row that sees nothing returns zeros and a log-sum-exp of -inf.

    With raw_key and raw_value, a query reads from them, unquantized, the keys and values at

        k < raw_sinks or (raw_window > 0 and q - k < raw_window)

    in place of their stored form; all others are read from the pages. So with several queries in a call, which form of a
    key is read depends on the query. The row of position p is p if p < raw_sinks, else raw_sinks + (p - raw_sinks) % ring,
    ring = raw_key.shape[1] - raw_sinks: a store of fixed size that a token enters when it is written and leaves when it is
    overwritten. Rows that no query reads may hold anything. The queries' own key and value, if the call has them, go first.

    Attributes:
        softmax_scale: multiplies q.k.
        causal: one flag, or [B] bool, one per sequence.
        sliding_window: visible positions including the query's own; 0 means all.
        chunk_lookback: -1 means no chunks; else chunk_size = sliding_window // (chunk_lookback + 1).
        rswa_prefix_lens: [B] integer, with rswa_window >= 1: every query sees the prefix and a window.
        softcap: scores become softcap * tanh(score / softcap); 0 means none.
        alibi_slopes: [num_query_heads] float32; adds slope * (k - q).
        alibi_sqrt: adds -slope * sqrt(q - k) for k <= q and 0 beyond, in place of the linear term.
        sinks: [num_query_heads] float32; one extra logit per head that takes probability and gives no value (lse counts it).
        qq_bias: [max query_len, max query_len] float32, added between the queries of one call.
        mm_prefix_ranges: [B, R, 2] int32, inclusive (first, last) positions; ranges with first >= last are unused.
        mm_prefix_clamp: see above.
        raw_key, raw_value: [B, raw_sinks + ring, num_kv_heads, head_size(_v)] float16, bfloat16 or float32. The ring has at
            least raw_window + max query_len - 1 rows, or raw_window where the call has the queries' own key and value.
        raw_window, raw_sinks: the newest and the first positions of a sequence that are read from raw_key and raw_value.
        output_scale: [1] float32; the output is out / output_scale, saturated to float8_e4m3fn.
        batch_invariant: bitwise the same row whatever else is in the batch.
        host_lengths: (query_start_loc, seq_lens) as integers, where the host knows them: a GPU call with raw keys behind
            stored ones then waits for nothing, and one over uneven lengths divides its work better. In a CUDA graph they
            hold for every replay.
    """

    softmax_scale: float
    causal: bool | torch.Tensor = True
    sliding_window: int = 0
    chunk_lookback: int = -1
    rswa_prefix_lens: torch.Tensor | None = None
    rswa_window: int = 0
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    alibi_sqrt: bool = False
    sinks: torch.Tensor | None = None
    qq_bias: torch.Tensor | None = None
    mm_prefix_ranges: torch.Tensor | None = None
    mm_prefix_clamp: bool = False
    raw_key: torch.Tensor | None = None
    raw_value: torch.Tensor | None = None
    raw_window: int = 0
    raw_sinks: int = 0
    output_scale: torch.Tensor | None = None
    batch_invariant: bool = False
    host_lengths: tuple[Sequence[int], Sequence[int]] | None = None

    @property
    def raw_ring(self) -> int:
        """Rows of the ring in raw_key, 0 without."""
        return 0 if self.raw_key is None else self.raw_key.shape[1] - self.raw_sinks

    @property
    def chunk_size(self) -> int:
        """Positions of a chunk of chunked attention, 0 without chunks."""
        return self.sliding_window // (self.chunk_lookback + 1) if self.chunk_lookback >= 0 else 0

    def check(self, num_seqs: int, num_query_heads: int, device: torch.device) -> None:
        """Raise ValueError or TypeError for options that contradict themselves or the call. Reads metadata only."""
        if not (math.isfinite(self.softmax_scale) and self.softmax_scale > 0):
            raise ValueError(f"softmax_scale: expected a positive finite number, got {self.softmax_scale}")
        if self.sliding_window < 0:
            raise ValueError(f"sliding_window: expected 0 (none) or more, got {self.sliding_window}")
        if not (math.isfinite(self.softcap) and self.softcap >= 0):
            raise ValueError(f"softcap: expected 0 (none) or a positive finite number, got {self.softcap}")
        if self.chunk_lookback < -1:
            raise ValueError(f"chunk_lookback: expected -1 (none) or more, got {self.chunk_lookback}")
        if self.chunk_lookback >= 0 and self.chunk_size < 1:
            raise ValueError(
                f"sliding_window: expected at least chunk_lookback + 1 = {self.chunk_lookback + 1} with chunked attention, "
                f"got {self.sliding_window}"
            )
        if self.rswa_window < 0 or (self.rswa_prefix_lens is None) != (self.rswa_window == 0):
            raise ValueError(
                f"rswa_window: expected at least 1 together with rswa_prefix_lens, else 0, got {self.rswa_window}"
            )
        if self.rswa_prefix_lens is not None and self.chunk_lookback >= 0:
            raise ValueError("rswa_window: expected no chunk_lookback beside it")
        if self.alibi_sqrt and self.alibi_slopes is None:
            raise ValueError("alibi_sqrt: expected alibi_slopes with it, got None")
        if self.host_lengths is not None:
            sizes = [len(lengths) for lengths in self.host_lengths]
            if sizes != [num_seqs + 1, num_seqs]:
                raise ValueError(f"host_lengths: expected {num_seqs + 1} starts and {num_seqs} lengths, got {sizes}")
        if self.mm_prefix_clamp and self.mm_prefix_ranges is None:
            raise ValueError("mm_prefix_clamp: expected mm_prefix_ranges with it, got None")
        if min(self.raw_window, self.raw_sinks) < 0:
            raise ValueError(f"raw_window, raw_sinks: expected 0 (none) or more, got {self.raw_window} and {self.raw_sinks}")
        if not (self.raw_key is None) == (self.raw_value is None) == (self.raw_window == self.raw_sinks == 0):
            raise ValueError(
                "raw_key, raw_value: expected both together with a raw_window or raw_sinks, got "
                f"{self.raw_key is not None}, {self.raw_value is not None}, {self.raw_window} and {self.raw_sinks}"
            )
        values = self.__dict__
        for name, kind, shape in _TENSORS:
            tensor = values[name]
            if isinstance(tensor, torch.Tensor):
                wanted: list[int | str] = [num_seqs if n == "B" else num_query_heads if n == "Q" else n for n in shape]
                _check_tensor(name, tensor, kind, wanted, device)


# Name, kind and shape of every tensor: B sequences, Q query heads; other letters are any size, equal ones the same.
_TENSORS: tuple[tuple[str, str, tuple[int | str, ...]], ...] = (
    ("causal", "bool", ("B",)),
    ("rswa_prefix_lens", "int", ("B",)),
    ("alibi_slopes", "float", ("Q",)),
    ("sinks", "float", ("Q",)),
    ("qq_bias", "float", ("N", "N")),
    ("mm_prefix_ranges", "int", ("B", "R", 2)),
    ("raw_key", "float", ("B", "N", "H", "D")),
    ("raw_value", "float", ("B", "N", "H", "D")),
    ("output_scale", "float", (1,)),
)
_DEFAULTS = {field.name: field.default for field in fields(AttentionOptions)}


def defaults_beside(names: Collection[str]) -> tuple[tuple[str, Any], ...]:
    """Return (name, default) of every option that is not in `names`: what a call must leave as it is where only those are
    served."""
    return tuple((name, default) for name, default in _DEFAULTS.items() if name not in names)


def make_options(softmax_scale: float, options: dict[str, Any]) -> AttentionOptions:
    """Return AttentionOptions(softmax_scale, **options) without its constructor, which takes longer than a launch."""
    if not options.keys() <= _DEFAULTS.keys():
        return AttentionOptions(softmax_scale, **options)  # which says what it does not know
    made = AttentionOptions.__new__(AttentionOptions)
    made.__dict__.update(_DEFAULTS, softmax_scale=softmax_scale, **options)
    return made


def _check_tensor(name: str, tensor: torch.Tensor, kind: str, shape: Sequence[int | str], device: torch.device) -> None:
    """Raise unless the tensor has the kind of dtype, the shape (equal letters are equal sizes) and the device."""
    dtype = tensor.dtype
    actual = "float" if dtype.is_floating_point else "bool" if dtype == torch.bool else "int"
    if actual != kind:
        raise TypeError(f"{name}: expected a tensor of {kind}, got {dtype}")
    letters: dict[int | str, int] = {}
    right = tensor.dim() == len(shape)
    if right:
        for m, n in zip(tensor.shape, shape, strict=True):
            right = right and m == (n if isinstance(n, int) else letters.setdefault(n, m))
    if not right:
        raise ValueError(f"{name}: expected shape [{', '.join(map(str, shape))}], got {list(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name}: expected device {device}, got {tensor.device}")
