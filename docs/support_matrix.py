"""Write the support matrix of the README from what the backends' `supports` says: `python docs/support_matrix.py`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from nibblekv import FORMATS, AttentionOptions, KVCacheLayout
from nibblekv.backends import BACKENDS, get_backend

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- support matrix: begin -->", "<!-- support matrix: end -->"
HEAD_SIZES = range(32, 513, 8)

ONE, TWO = torch.ones(1), torch.ones(2)
LENGTHS = torch.ones(2, dtype=torch.int32)
RANGES = torch.zeros(2, 1, 2, dtype=torch.int32)
# Options of a call with 2 sequences and 2 query heads.
ATTENTION: dict[str, dict[str, Any]] = {
    "causal": {},
    "not causal": {"causal": False},
    "causal or not per sequence": {"causal": torch.tensor([True, False])},
    "sliding window": {"sliding_window": 128},
    "chunked attention": {"sliding_window": 128, "chunk_lookback": 0},
    "prefix and window (R-SWA)": {"rswa_prefix_lens": LENGTHS, "rswa_window": 64},
    "softcap": {"softcap": 30.0},
    "ALiBi": {"alibi_slopes": TWO},
    "ALiBi-sqrt": {"alibi_slopes": TWO, "alibi_sqrt": True},
    "sinks": {"sinks": TWO},
    "query-query bias": {"qq_bias": torch.zeros(4, 4)},
    "multimodal prefix": {"mm_prefix_ranges": RANGES},
    "multimodal prefix, clamped window": {"mm_prefix_ranges": RANGES, "sliding_window": 64, "mm_prefix_clamp": True},
    "raw window and sinks": {
        "raw_key": torch.zeros(2, 36, 2, 128),
        "raw_value": torch.zeros(2, 36, 2, 128),
        "raw_window": 32,
        "raw_sinks": 4,
    },
    "static FP8 output": {"output_scale": ONE},
    "batch invariant": {"batch_invariant": True},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "interleaved pages, HND": {"page": "interleaved"},
    "interleaved pages, NHD": {"page": "interleaved", "block_order": "NHD"},
    "8-bit keys, 4-bit values": {"format": "int8_per_token_head", "v_format": "int4"},
    "4-bit keys, 3-bit values": {"format": "int4", "v_format": "int3"},
    "key and value sizes differ (192, 128)": {"head_size": 192, "head_size_v": 128},
    "blocks of 64 tokens": {"block_size": 64},
}


def reason(backend: ModuleType, device: torch.device, layout: dict[str, Any], options: dict[str, Any] | None) -> str | None:
    """Return why a backend does not serve a layout (and options; None: a write), or None."""
    described = KVCacheLayout.create(**{"format": "int4", "num_kv_heads": 2, "head_size": 128, **layout})
    call = None if options is None else AttentionOptions(softmax_scale=0.1, **options)
    answer: str | None = backend.supports(described, call, device)
    return answer


def spans(sizes: list[int]) -> str:
    """Return multiples of 8 as ranges, `32-128, 256`."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and size == runs[-1][-1] + 8:
            runs[-1].append(size)
        else:
            runs.append([size])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or "none"


def matrix() -> str:
    """Return the tables, as Markdown."""
    backends = {
        name: (get_backend(name), torch.device((types or ("cpu",))[0]))
        for name, (module, types) in BACKENDS.items()
        if importlib.util.find_spec(module) is not None
    }
    notes: list[str] = []

    def mark(why: str | None) -> str:
        if why is None:
            return "yes"
        if why not in notes:
            notes.append(why)
        return f"no [{notes.index(why) + 1}]"

    head = [
        f"`{name}` ({device.type})" if BACKENDS[name][1] else f"`{name}` (any)" for name, (_, device) in backends.items()
    ]
    rule = "|---" * (len(backends) + 1) + "|"
    lines = ["Head sizes (multiples of 8) for writing and causal attention:", "", f"| format | {' | '.join(head)} |", rule]
    for format in FORMATS:
        cells = []
        for backend, device in backends.values():
            layouts = {size: {"format": format, "head_size": size} for size in HEAD_SIZES}
            cells.append(
                spans(
                    [n for n, layout in layouts.items() if not any(reason(backend, device, layout, o) for o in (None, {}))]
                )
            )
        lines.append(f"| `{format}` | {' | '.join(cells)} |")
    lines += ["", "Features (shown for `int4`, head size 128):", "", f"| feature | {' | '.join(head)} |", rule]
    for feature, options in ATTENTION.items():
        marks = [mark(reason(backend, device, {}, options)) for backend, device in backends.values()]
        lines.append(f"| {feature} | {' | '.join(marks)} |")
    for feature, layout in LAYOUTS.items():
        marks = [mark(reason(backend, device, layout, {})) for backend, device in backends.values()]
        lines.append(f"| {feature} | {' | '.join(marks)} |")
    lines += [""] * bool(notes) + [f"[{i}] {note}" + "  " for i, note in enumerate(notes, 1)]
    return "\n".join(line.rstrip() if not line.startswith("[") else line for line in lines)


def updated(readme: str) -> str:
    """Return the text of the README with a fresh matrix between its markers."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{matrix()}\n\n{END}{after}"


if __name__ == "__main__":
    README.write_text(updated(README.read_text()))
