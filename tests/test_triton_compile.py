"""Kernels compile for every GPU generation, without spills where speed matters, without a GPU at hand."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are compiled here, not interpreted", allow_module_level=True)

from triton_compile import TARGETS, Launch, compiling_for, meta

from nibblekv import AttentionOptions, KVCacheLayout
from nibblekv.backends.triton import attention, prefill, write

SHARED_LIMIT = {"sm_80": 163 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "sm_120": 99 << 10}
NUM_SEQS, CONTEXT, BLOCKS = 32, 8192, 512


def window(num_seqs: int) -> dict[str, Any]:
    """Return the options of a raw window and sinks."""
    rows = meta(num_seqs, 68, 8, 128, dtype=torch.bfloat16)
    return {"raw_key": rows, "raw_value": rows, "raw_window": 32, "raw_sinks": 4}


def decode(target: str, format: str = "int4", head_size: int = 128, query_len: int = 1, **options: Any) -> list[Launch]:
    """Compile what one decode call launches: 32 query heads on 8 KV heads, bfloat16."""
    layout = KVCacheLayout.create(format, num_kv_heads=8, head_size=head_size)
    tokens = NUM_SEQS * query_len
    with compiling_for(TARGETS[target]) as launches:
        attention.attend(
            meta(tokens, 32, head_size, dtype=torch.bfloat16), meta(*layout.shape(NUM_SEQS * BLOCKS), dtype=torch.uint8),
            meta(NUM_SEQS, BLOCKS, dtype=torch.int32), meta(NUM_SEQS, dtype=torch.int32),
            meta(NUM_SEQS + 1, dtype=torch.int32), layout, AttentionOptions(softmax_scale=0.1, **options),
            meta(tokens, 32, head_size, dtype=torch.bfloat16), None, query_len, CONTEXT,
        )  # fmt: skip
    return launches


def check(target: str, launches: list[Launch], kernel: str, local_bytes: int = 0) -> None:
    """Assert that the kernel is there, fits in shared memory and keeps at most so many bytes of registers in memory."""
    (launch,) = [x for x in launches if x.name == kernel]
    assert launch.shared_bytes <= SHARED_LIMIT.get(target, 64 << 10), launch.shared_bytes
    if target.startswith("sm_"):
        used = launch.resources()
        assert used["STACK"] + used["LOCAL"] <= local_bytes, used


@pytest.mark.parametrize("target", TARGETS)
def test_decode_compiles(target: str) -> None:
    check(target, decode(target), "attention_kernel")


@pytest.mark.parametrize("target", TARGETS)
def test_decode_with_a_raw_window_compiles(target: str) -> None:
    launches = decode(target, **window(NUM_SEQS))
    check(target, launches, "attention_kernel")
    assert [x.name for x in launches] == ["attention_kernel", "combine_kernel"]


@pytest.mark.parametrize("format", ["int3", "int2", "int8_per_token_head", "fp8_per_token_head"])
def test_other_decode_compiles(format: str) -> None:
    check("sm_90", decode("sm_90", format), "attention_kernel")


@pytest.mark.parametrize(
    ("target", "dtype", "format"),
    [
        ("sm_80", torch.float16, "int4"),
        ("sm_90", torch.bfloat16, "int4"),
        ("sm_90", torch.bfloat16, "int3"),
        ("gfx942", torch.bfloat16, "int4"),
    ],
)
def test_write_compiles(target: str, dtype: torch.dtype, format: str) -> None:
    layout = KVCacheLayout.create(format, num_kv_heads=8, head_size=128)
    with compiling_for(TARGETS[target]) as launches:
        rows = meta(4096, 8, 128, dtype=dtype)
        write.reshape_and_cache(
            rows, rows, meta(*layout.shape(512), dtype=torch.uint8), meta(4096, dtype=torch.int64), layout
        )
    check(target, launches, "write_kernel", local_bytes=8 if target == "sm_80" else 0)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_long_prefill_compiles(target: str) -> None:
    layout = KVCacheLayout.create("int4", num_kv_heads=8, head_size=128)
    options = AttentionOptions(softmax_scale=0.1, softcap=3.0)
    query = meta(256, 32, 128, dtype=torch.bfloat16)
    raw = attention.RawPart(meta(256, 32, 128, dtype=torch.bfloat16), meta(256, 32, dtype=torch.float32))
    with compiling_for(TARGETS[target]) as launches:
        prefill._attend_prefix(
            query, meta(*layout.shape(64), dtype=torch.uint8), meta(64, dtype=torch.int32), meta(1, dtype=torch.int32),
            meta(2, dtype=torch.int32), layout, options, query, raw, 768,
        )  # fmt: skip
    assert {x.name for x in launches} == {"rotate_kernel", "dequantize_kernel", "dense_kernel", "combine_kernel"}
    check(target, launches[:1], "rotate_kernel")


@pytest.mark.parametrize(
    ("target", "head_size", "dtype", "config"),
    [
        ("sm_89", 128, torch.bfloat16, 0),
        ("sm_80", 256, torch.bfloat16, 0),
        ("sm_89", 256, torch.bfloat16, 1),
        ("gfx942", 256, torch.bfloat16, 0),
        ("sm_89", 512, torch.bfloat16, 1),
        ("sm_90", 256, torch.float32, 1),
    ],
)
def test_dense_prefill_fits_in_shared_memory(
    target: str, head_size: int, dtype: torch.dtype, config: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt alone, with a window, which no library serves; config: the first that fits, of `_dense_configs`."""
    layout = KVCacheLayout.create("int4", num_kv_heads=1, head_size=head_size)
    query, rows = meta(1024, 4, head_size, dtype=dtype), meta(1024, 1, head_size, dtype=dtype)
    configs = prefill._dense_configs
    monkeypatch.setattr(prefill, "_dense_configs", lambda block_m, tile: configs(block_m, tile)[config:])
    with compiling_for(TARGETS[target]) as launches:
        prefill.attend(
            query, meta(*layout.shape(64), dtype=torch.uint8), meta(1, 64, dtype=torch.int32), meta(1, dtype=torch.int32),
            meta(2, dtype=torch.int32), layout, AttentionOptions(softmax_scale=0.1, sliding_window=512), query, None,
            rows, rows, 1024, 1024,
        )  # fmt: skip
    (launch,) = launches
    assert launch.name == "dense_kernel"
    assert launch.shared_bytes <= SHARED_LIMIT.get(target, 64 << 10)


def test_hopper_decode_spends_few_instructions_a_value() -> None:
    """The memory roof leaves 3.3 issue slots a value; a wider loop loses to issue before it loses to memory."""
    (launch,) = [x for x in decode("sm_90") if x.name == "attention_kernel"]
    loop = launch.longest_loop()
    values = 2 * 128 * 128  # keys and values of one tile of 128 tokens
    assert len(loop) * 4 * 32 / values < 3.7
    assert not any(x.startswith(("STL", "LDL")) for x in loop)
