"""Pages that travel: written by one backend on one machine, checked by every backend of another.

    python tests/page_exchange.py write FILE --backend triton --device cuda
    python tests/page_exchange.py check FILE [FILE ...]

A file holds, per case, the pages, their checksum, and what the writer's attention made of them. The rows and queries come
from integers alone, so that a reader knows them exactly: it checks the bytes against the reference's, and the attention of
each of its backends against the writer's. A file that is cut, changed or of another version is refused in one sentence.

Pages that an earlier encoder wrote need not hold the bytes of today's reference; they must decode to the rows all the same.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from batches import usable_backends
from fuzz import check_error, check_rows
from interpreter import take_numpy_2_4

from nibblekv import (
    FORMATS,
    AttentionOptions,
    KVCacheLayout,
    QuantFormat,
    available_backends,
    paged_attention,
    reshape_and_cache,
)
from nibblekv.backends import get_backend
from nibblekv.formats import Role, decode_rows
from nibblekv.rotation import rotate

KIND = "nibblekv pages 1"
ENCODER = "refit"  # files from before keys were refitted name none
HEADS, GROUP, BLOCKS, TOKENS, QUERIES = 2, 2, 3, 37, 2
PAGES = [2, 0, 1]  # of the sequence, in order
CASES: dict[str, dict[str, Any]] = {
    "int4": {"format": "int4", "head_size": 128},
    "int4 interleaved": {"format": "int4", "head_size": 96, "page": "interleaved", "block_order": "NHD"},
    "vLLM's int4": {"format": "int4_per_token_head", "head_size": 64},
    "8-bit keys": {"format": "int8_per_token_head", "v_format": "int4", "head_size": 64},
    "8 bits": {"format": "int8_per_token_head", "head_size": 40, "block_order": "NHD"},
    "3 bits": {"format": "int3", "head_size": 64},
    "2 bits": {"format": "int2", "head_size": 40, "page": "interleaved"},
    "float8": {"format": "fp8_per_token_head", "head_size": 32},
}
CASES |= {name: {"format": name, "head_size": 64} for name in FORMATS if name not in {c["format"] for c in CASES.values()}}


def rows(tokens: int, heads: int, head_size: int, seed: int) -> torch.Tensor:
    """Return [tokens, heads, head_size] float32 from integers: a hash in [-1, 1), with a spike, an offset and zeros."""
    index = torch.arange(tokens * heads * head_size).view(tokens, heads, head_size)
    x = ((index * 104729 + seed * 7919 + 1) * 2654435761 % 2**32).double() / 2**31 - 1
    x[1, :, 3], x[2] = 40.0, x[2] + 6.0
    x[3, 0] = 0.0
    return x.float()


def describe(case: dict[str, Any]) -> KVCacheLayout:
    return KVCacheLayout.create(num_kv_heads=HEADS, block_size=16, **case)


def inputs(layout: KVCacheLayout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the key, the value, the slots and the query of a case."""
    position = torch.arange(TOKENS)
    slots = torch.tensor(PAGES)[position // layout.block_size] * layout.block_size + position % layout.block_size
    key, value = rows(TOKENS, HEADS, layout.head_size, 1), rows(TOKENS, HEADS, layout.head_size_v, 2)
    return key, value, slots, rows(4, HEADS * GROUP, layout.head_size, 3)[:QUERIES].clamp(-2, 2)


if "triton" in usable_backends():
    take_numpy_2_4()


def attend(pages: torch.Tensor, layout: KVCacheLayout, backend: str) -> torch.Tensor:
    """Return the attention of the case's queries over pages on their device, float32."""
    query = inputs(layout)[3].to(pages.device)
    table, length, starts = (
        torch.tensor(x, dtype=torch.int32, device=pages.device) for x in ([PAGES], [TOKENS], [0, QUERIES])
    )
    out = torch.full((*query.shape[:2], layout.head_size_v), torch.nan, device=pages.device)
    paged_attention(query, pages, table, length, starts, layout, out=out, backend=backend, max_seq_len=TOKENS)
    return out.cpu()


def pack(tensor: torch.Tensor) -> str:
    return base64.b64encode(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).decode()


def write(path: Path, backend: str, device: str) -> None:
    """Write the file of a backend; refuse to overwrite one."""
    cases = {}
    for name, case in CASES.items():
        layout = describe(case)
        key, value, slots, _ = (x.to(device) for x in inputs(layout))
        pages = layout.allocate(BLOCKS, device)
        reshape_and_cache(key, value, pages, slots, layout, backend=backend)
        packed = pack(pages.cpu())
        cases[name] = {
            **case,
            "versions": [layout.k_format.version, layout.v_format.version],
            "pages": packed,
            "sha256": hashlib.sha256(packed.encode()).hexdigest(),
            "out": pack(attend(pages, layout, backend)),
        }
    where = torch.cuda.get_device_name() if device.startswith("cuda") else device
    made = {"encoder": ENCODER, "backend": backend, "device": where, "torch": torch.__version__}
    record = {"kind": KIND, **made, "cases": cases}
    with path.open("x") as file:
        json.dump(record, file, indent=1)
        file.write("\n")


def read(path: Path) -> dict[str, tuple[KVCacheLayout, torch.Tensor, torch.Tensor]]:
    """Return each case's layout, pages and attention; raise ValueError, in a sentence, for anything but such a file."""
    try:
        record = json.loads(path.read_text())
        if record["kind"] != KIND:
            raise ValueError(f"expected the kind {KIND!r}, got {record['kind']!r}")
        return {name: read_case(dict(case)) for name, case in record["cases"].items()}
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"{path.name}: expected pages of this version, got {type(error).__name__}: {error}") from error


def read_case(case: dict[str, Any]) -> tuple[KVCacheLayout, torch.Tensor, torch.Tensor]:
    versions, packed, digest, out = (case.pop(name) for name in ("versions", "pages", "sha256", "out"))
    layout = describe(case)
    current = [FORMATS[fmt.name].version for fmt in (layout.k_format, layout.v_format)]
    if versions != current:
        raise ValueError(f"expected format versions {current}, got {versions}")
    if hashlib.sha256(packed.encode()).hexdigest() != digest:
        raise ValueError(f"expected pages of sha256 {digest}")
    pages = unpack(packed, torch.uint8, layout.shape(BLOCKS))
    return layout, pages, unpack(out, torch.float32, (QUERIES, HEADS * GROUP, layout.head_size_v))


def is_of_earlier_encoder(path: Path) -> bool:
    return bool(json.loads(path.read_text()).get("encoder") != ENCODER)


def unpack(text: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    try:
        content = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"expected base64, got {error}") from error
    expected = math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        raise ValueError(f"expected {expected} bytes, got {len(content)}")
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)


def check(path: Path, backends: list[str]) -> list[str]:
    """Check a file with every backend; return one line per case. Raise AssertionError where pages mean something else."""
    lines = []
    cases, earlier = read(path), is_of_earlier_encoder(path)
    for name, (layout, pages, out) in cases.items():
        key, value, slots, _ = inputs(layout)
        views = layout.views(pages)
        block, slot = slots // layout.block_size, slots % layout.block_size
        sides: tuple[tuple[Role, torch.Tensor, QuantFormat, torch.Tensor, torch.Tensor], ...] = (
            ("key", key, layout.k_format, views.key_cache, views.k_scale_cache),
            ("value", value, layout.v_format, views.value_cache, views.v_scale_cache),
        )
        for role, raw, fmt, codes, words in sides:
            stored = codes[block, slot], words[block, slot]
            if earlier:
                check_error(rotate(raw, fmt.rotation), decode_rows(*stored, fmt), stored[1], fmt)
            else:
                check_rows(raw, *stored, fmt, role)
        expected = layout.allocate(BLOCKS)
        reshape_and_cache(key, value, expected, slots, layout, backend="reference")
        differing = float((pages != expected).float().mean())
        assert earlier or differing < 0.005, f"{name}: {differing:.2%} of the bytes are not the reference's"
        untouched = torch.ones(BLOCKS, layout.block_size, dtype=torch.bool)
        untouched[block, slot] = False
        assert not views.key_cache[untouched].any(), f"{name}: bytes outside the rows"
        errors = []
        for backend in backends:
            if get_backend(backend).supports(layout, AttentionOptions(softmax_scale=1.0), pages.device) is None:
                got = attend(pages, layout, backend)
                errors.append(float((got - out).norm() / out.norm()))
                assert errors[-1] < 1e-3, f"{name}: {backend} is {errors[-1]:.1e} from the writer's attention"
        lines.append(f"{name}: {differing:.2%} of the bytes differ, attention within {max(errors):.1e}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writer = commands.add_parser("write")
    writer.add_argument("file", type=Path)
    writer.add_argument("--backend", default="reference", choices=list(available_backends()))
    writer.add_argument("--device", default="cpu")
    checker = commands.add_parser("check")
    checker.add_argument("files", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "write":
        write(arguments.file, arguments.backend, arguments.device)
        return
    backends = usable_backends()
    for path in arguments.files:
        print(f"{path}, read by {', '.join(backends)}:")
        for line in check(path, backends):
            print(f"  {line}")


if __name__ == "__main__":
    sys.exit(main())
