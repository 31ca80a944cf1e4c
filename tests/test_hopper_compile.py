"""The Hopper kernels compiled for sm_90 on any machine: what a slower build would show before a GPU does."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from nibblekv.backends.triton.codec import format_constants
from nibblekv.layout import KVCacheLayout
from nibblekv.options import AttentionOptions

triton = pytest.importorskip("triton")
gluon_runtime = pytest.importorskip("triton.experimental.gluon._runtime")
kernels = pytest.importorskip("nibblekv.backends.triton.hopper.kernels")
launch = pytest.importorskip("nibblekv.backends.triton.hopper.launch")
rotating = pytest.importorskip("nibblekv.backends.triton.hopper.rotation")
writing = pytest.importorskip("nibblekv.backends.triton.hopper.write")

TYPES = {
    **dict.fromkeys(("query", "out"), "*bf16"),
    **dict.fromkeys(("partial", "partial_lse", "lse"), "*fp32"),
    **dict.fromkeys(("block_table", "seq_lens", "query_start_loc"), "*i32"),
    **dict.fromkeys(("factor", "gain", "raw_factor", "raw_gain"), "fp32"),
    **dict.fromkeys(("raw_key", "raw_value"), "*bf16"),
    **dict.fromkeys(("block_stride", "head_stride", "raw_seq_stride"), "i64"),
    "kv_cache": "*u8",
    "x": "*bf16",
    **{"key": "*fp16", "value": "*fp16", "cache": "*i32", "slots": "*i64"},
}


def compile_sm90(kernel, num_warps, **constants):
    """Return (compiled kernel, disassembly), compiled as a launch with these constants would be."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = gluon_runtime.GluonASTSource(kernel, signature, values, attrs={})
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options={"num_warps": num_warps})


def disassemble(compiled, tmp_path):
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    usage = subprocess.run([tools / "cuobjdump", "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    sass = subprocess.run([tools / "nvdisasm", "-c", binary], capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    return registers, stack, sass


# The last column bounds SASS instructions per packed value in the loop, with its edge path (measured: 1.5; the memory roof
# leaves 3.3); the one before it, registers, so that the blocks of a wave stay resident.
@pytest.mark.parametrize(
    ("name", "head_size", "group", "query_len", "raw", "registers", "per_value"),
    [
        ("int4", 128, 4, 1, False, 168, 1.65), ("int4", 128, 4, 4, False, 255, 3.3), ("int4", 64, 8, 1, False, 128, 2.75),
        ("int4", 256, 8, 1, False, 255, 2.2), ("int4_per_token_head", 128, 4, 1, False, 168, 1.8),
        ("int8_per_token_head", 128, 4, 1, False, 168, 2.4),
        ("fp8_per_token_head", 128, 4, 1, False, 168, 3.2), ("int4", 128, 4, 1, True, 168, 1.65),
    ],
)  # fmt: skip
def test_decode_kernel_fits_and_stays_lean(name, head_size, group, query_len, raw, registers, per_value, tmp_path):
    layout = KVCacheLayout.create(name, num_kv_heads=8, head_size=head_size)
    codes, signs = format_constants(layout.k_format), launch._signs(layout.k_format.rotation, head_size)
    chosen = launch.plan(32, 8, 8192, head_size, 132, layout.slot_bytes)
    compiled = compile_sm90(
        kernels.decode_kernel, chosen.warps, GROUP=group, QUERY_LEN=query_len, D=head_size, BLOCK=16, T=chosen.tile,
        STAGES=chosen.stages, MIXED=layout.page == "interleaved", K_CODE=codes[0], K_WORD=codes[1], V_CODE=codes[0],
        V_WORD=codes[1], CAUSAL=True, WINDOW=False, RAW=raw, HALF=False, SIGNS=signs, PDL=True,
    )  # fmt: skip
    used, stack, sass = disassemble(compiled, tmp_path)
    assert stack == 0, "spills to local memory"
    assert used <= registers
    # The ring is the kernel's only shared memory: its address is taken by name.
    assert compiled.metadata.shared == launch.shared_bytes(chosen.warps, chosen.tile, chosen.stages, layout.slot_bytes)
    lines = [line for line in sass.splitlines() if re.search(r"/\*[0-9a-f]{4,5}\*/", line)]
    first = next(i for i, line in enumerate(lines) if "PHASECHK" in line)
    last = max(i for i, line in enumerate(lines) if "UBLKCP" in line)
    assert first < last
    assert (last - first) * 32 <= per_value * chosen.tile * 2 * head_size


@pytest.mark.parametrize(
    ("head_size", "warps", "rows", "raw", "registers"),
    [(128, 1, 4, False, 88), (128, 1, 4, True, 88), (256, 8, 64, False, 255), (256, 8, 64, True, 255)],
    ids=["few-splits", "few-splits-raw", "many-splits", "many-splits-raw"],
)
def test_combine_kernel_does_not_spill(head_size, warps, rows, raw, registers, tmp_path):
    """With up to 88 registers eight programs are resident beside eight of the decode kernel: they start before it ends."""
    compiled = compile_sm90(
        kernels.combine_kernel, warps, HEADS=32, GROUP=4, QUERY_LEN=1, D=head_size, CAUSAL=True, WINDOW=False, RAW=raw,
        HALF=False, SIGNS=launch._signs("full", head_size), ROWS=rows, LSE=True, PDL=True,
    )  # fmt: skip
    used, stack, _ = disassemble(compiled, tmp_path)
    assert stack == 0
    assert used <= registers


# SASS instructions a packed value, set-up included, over keys and values. With the zero point both are encoded alike and the
# compiler makes one copy of the code, so that half of what each executes is counted; keys that are refitted have their own.
@pytest.mark.parametrize(
    ("head_size", "zero", "registers", "per_value"),
    [(128, False, 128, 24.0), (256, False, 255, 20.5), (128, True, 128, 12.0)],
    ids=["d128", "d256", "d128-zero-point"],
)
def test_write_kernel_fits_and_stays_lean(head_size, zero, registers, per_value, tmp_path):
    steps = writing.LONG_STEPS
    compiled = compile_sm90(
        writing.write_kernel, writing.NUM_WARPS, HEADS=8, BLOCK=16, D=head_size, STEPS=steps, HALF=True, ZERO=zero,
        SIGNS=launch._signs("full", head_size),
    )  # fmt: skip
    used, stack, sass = disassemble(compiled, tmp_path)
    assert stack == 0, "spills to local memory"
    assert used <= registers
    assert compiled.metadata.shared == 0
    instructions = len(re.findall(r"/\*[0-9a-f]{4,5}\*/", sass))
    assert instructions * 32 <= per_value * 2 * steps * 8 * head_size


@pytest.mark.parametrize("head_size", [128, 512])
def test_rotate_kernel_fits_and_uses_wide_accesses(head_size, tmp_path):
    compiled = compile_sm90(
        rotating.rotate_kernel, rotating.NUM_WARPS, D=head_size, HALF=False, SIGNS=launch._signs("full", head_size),
        INVERSE=False,
    )  # fmt: skip
    used, stack, sass = disassemble(compiled, tmp_path)
    assert stack == 0, "spills to local memory"
    assert used <= 255
    assert len(re.findall(r"LDG\.E\.128", sass)) == len(re.findall(r"STG\.E\.128", sass)) == head_size // 32
    # A row of 16 bits moves 4 bytes a value: at 14 instructions a value, issue takes three quarters of the roof.
    assert len(re.findall(r"/\*[0-9a-f]{4,5}\*/", sass)) * 32 <= 14 * 8 * head_size


@pytest.mark.parametrize("max_seq_len", [1, 1024, 131072])
@pytest.mark.parametrize(("num_seqs", "num_kv_heads"), [(1, 8), (32, 8), (3, 5), (500, 8)])
def test_plan_is_one_wave_and_splits_no_tile(num_seqs, num_kv_heads, max_seq_len):
    chosen = launch.plan(num_seqs, num_kv_heads, max_seq_len, 128, 132)
    assert num_kv_heads % chosen.warps == 0
    assert 1 <= chosen.splits <= -(-max_seq_len // chosen.tile)
    blocks = num_seqs * num_kv_heads // chosen.warps * chosen.splits
    assert chosen.splits == 1 or blocks <= 132 * 8


def _rows(dtype, start=0):
    """Return the options of a raw window, from this element of a store on."""
    store = torch.zeros(2 * 40 * 2 * 128 + start, dtype=dtype)[start:].view(2, 40, 2, 128)
    return {"raw_key": store, "raw_value": store, "raw_window": 32, "raw_sinks": 4}


def test_a_long_sequence_among_short_ones_gets_more_splits():
    """One of 131,072 tokens among 31 of 1,024: with even splits four warps a head would read it alone."""
    backend = pytest.importorskip("nibblekv.backends.triton")
    skew = backend._skew([131072] + [1024] * 31)
    assert launch.plan(32, 8, 131072, 128, 132, None, skew).splits >= 8 * launch.plan(32, 8, 131072, 128, 132).splits // 2
    assert backend._skew([8192] * 32) == backend._skew([1]) == backend._skew([0, 0]) == 1


@pytest.mark.parametrize(
    ("layout", "options", "dtype", "heads", "word"),
    [
        ({"page": "interleaved"}, {}, torch.bfloat16, 8, None),
        ({"format": "int4_per_token_head"}, {}, torch.bfloat16, 8, None),
        ({"format": "int4_per_token_head", "block_order": "NHD"}, {}, torch.bfloat16, 8, "follow one another"),
        ({"format": "int8_per_token_head", "v_format": "int4"}, {}, torch.bfloat16, 8, None),
        ({"v_format": "int2"}, {}, torch.bfloat16, 8, "int2"),
        ({"head_size": 96}, {}, torch.bfloat16, 8, "head sizes"),
        ({"block_size": 48}, {}, torch.bfloat16, 8, "block_size"),
        ({}, {}, torch.float32, 8, "float16"),
        ({}, {}, torch.bfloat16, 40, "20"),
        ({}, {"softcap": 30.0}, torch.bfloat16, 8, "softcap"),
        ({}, {"alibi_slopes": torch.ones(8)}, torch.bfloat16, 8, "alibi_slopes"),
        ({}, {"causal": False, "sliding_window": 64}, torch.bfloat16, 8, "window"),
        ({}, {"causal": True, "sliding_window": 64}, torch.bfloat16, 8, None),
        ({}, {**_rows(torch.bfloat16), "sliding_window": 64}, torch.bfloat16, 8, None),
        ({}, _rows(torch.float16), torch.bfloat16, 8, "dtype, torch.bfloat16"),
        ({}, _rows(torch.bfloat16, start=1), torch.bfloat16, 8, "16 bytes"),
    ],
)
def test_supports_names_the_reason(layout, options, dtype, heads, word, monkeypatch):
    monkeypatch.setattr(launch, "is_hopper", lambda device: True)
    made = KVCacheLayout.create(**{"format": "int4", "num_kv_heads": 2, "head_size": 128, **layout})
    reason = launch.supports(made, AttentionOptions(0.1, **options), dtype, 1, torch.device("cuda"), heads, made.allocate(3))
    assert reason is None if word is None else word in reason


def test_supports_only_hopper():
    made = KVCacheLayout.create("int4", num_kv_heads=2, head_size=128)
    reason = launch.supports(made, AttentionOptions(0.1), torch.bfloat16, 1, torch.device("cpu"), 8, made.allocate(3))
    assert "9.0" in reason
