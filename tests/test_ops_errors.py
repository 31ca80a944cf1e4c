"""Bad arguments: an error that names the argument, what was expected and what came, before a byte is written."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest
import torch

from nibblekv import (
    AttentionOptions,
    KVCacheLayout,
    dequantize,
    gather_and_dequantize,
    paged_attention,
    quantize,
    reshape_and_cache,
)
from nibblekv.backends import BACKENDS, available_backends, get_backend, select_backend

LAYOUT = KVCacheLayout.create("int4", num_kv_heads=2, head_size=64, head_size_v=32)
BLOCKS, TOKENS = 4, 5


def write(kv_cache: torch.Tensor, **changes: object) -> None:
    arguments = {
        "key": torch.ones(TOKENS, 2, 64),
        "value": torch.ones(TOKENS, 2, 32),
        "kv_cache": kv_cache,
        "slot_mapping": torch.arange(TOKENS),
        "layout": LAYOUT,
        "backend": "reference",
    }
    reshape_and_cache(**{**arguments, **changes})  # type: ignore[arg-type]


def read(**changes: object) -> object:
    arguments = {
        "query": torch.ones(3, 4, 64),
        "kv_cache": LAYOUT.allocate(BLOCKS),
        "block_table": torch.tensor([[0, 1], [2, 3]]),
        "seq_lens": torch.tensor([20, 9]),
        "query_start_loc": torch.tensor([0, 2, 3]),
        "layout": LAYOUT,
        "backend": "reference",
    }
    return paged_attention(**{**arguments, **changes})  # type: ignore[arg-type]


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device="meta")


def raw_rows(rows: int) -> dict:
    """Return raw rows of two sequences, all of them sinks."""
    return {"raw_key": torch.ones(2, rows, 2, 64), "raw_value": torch.ones(2, rows, 2, 32), "raw_sinks": rows}


def strided(*shape: int) -> torch.Tensor:
    return torch.ones(*shape[:-1], 2 * shape[-1])[..., ::2]


WRITE_ERRORS = [
    ({"key": torch.ones(TOKENS, 2, 64, dtype=torch.float64)}, TypeError, "key: expected one of torch.float16"),
    ({"key": torch.ones(TOKENS, 2, 64, dtype=torch.int8)}, TypeError, "key: expected one of torch.float16"),
    ({"key": torch.ones(TOKENS, 3, 64)}, ValueError, "key: expected shape (5, 2, 64), got (5, 3, 64)"),
    ({"key": torch.ones(TOKENS, 2, 32)}, ValueError, "key: expected shape (5, 2, 64), got (5, 2, 32)"),
    ({"key": torch.ones(4, 2, 64)}, ValueError, "key: expected shape (5, 2, 64), got (4, 2, 64)"),
    ({"key": strided(TOKENS, 2, 64)}, ValueError, "key: expected a contiguous last dimension"),
    ({"key": meta(TOKENS, 2, 64)}, ValueError, "key: expected device cpu, got meta"),
    ({"value": torch.ones(TOKENS, 2, 64)}, ValueError, "value: expected shape (5, 2, 32), got (5, 2, 64)"),
    ({"value": torch.ones(TOKENS, 64)}, ValueError, "value: expected shape (5, 2, 32), got (5, 64)"),
    (
        {"value": torch.ones(TOKENS, 2, 32).half()},
        TypeError,
        "value: expected the dtype of key, torch.float32, got torch.float16",
    ),
    ({"value": meta(TOKENS, 2, 32)}, ValueError, "value: expected device cpu, got meta"),
    (
        {"slot_mapping": torch.arange(TOKENS).float()},
        TypeError,
        "slot_mapping: expected one of torch.int32, torch.int64, got",
    ),
    (
        {"slot_mapping": torch.zeros(1, TOKENS, dtype=torch.int64)},
        ValueError,
        "slot_mapping: expected shape [num_tokens], got [1, 5]",
    ),
    ({"slot_mapping": torch.tensor(3)}, ValueError, "slot_mapping: expected shape [num_tokens], got []"),
    ({"slot_mapping": meta(TOKENS, dtype=torch.int64)}, ValueError, "slot_mapping: expected device cpu, got meta"),
    ({"slot_mapping": torch.tensor([0, 1, 64, 3, 4])}, ValueError, "slot_mapping: expected slots below 64, got 64"),
    ({"layout": KVCacheLayout.create("int4", num_kv_heads=2, head_size=64)}, ValueError, "kv_cache: expected shape"),
    ({"backend": "cuda"}, ValueError, "backend: expected 'auto' or one of triton, cpu, reference, got 'cuda'"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRITE_ERRORS, ids=[m for _, _, m in WRITE_ERRORS])
def test_bad_write_is_refused_and_writes_nothing(changes: dict, error: type, message: str):
    """Catches an argument that is checked after another tensor was written, or an error that names the wrong argument."""
    kv_cache = LAYOUT.allocate(BLOCKS)
    kv_cache.fill_(0x5A)
    with pytest.raises(error, match=re.escape(message)):
        write(kv_cache, **changes)
    assert (kv_cache == 0x5A).all()


READ_ERRORS = [
    ({"query": torch.ones(3, 4, 32)}, ValueError, "query: expected [num_tokens, a multiple of 2 heads, 64], got (3, 4, 32)"),
    ({"query": torch.ones(3, 5, 64)}, ValueError, "query: expected [num_tokens, a multiple of 2 heads, 64], got (3, 5, 64)"),
    ({"query": torch.ones(3, 0, 64)}, ValueError, "query: expected [num_tokens, a multiple of 2 heads, 64], got (3, 0, 64)"),
    ({"query": torch.ones(3, 256)}, ValueError, "query: expected [num_tokens, a multiple of 2 heads, 64], got (3, 256)"),
    ({"query": torch.ones(3, 4, 64).double()}, TypeError, "query: expected one of torch.float16"),
    ({"query": strided(3, 4, 64)}, ValueError, "query: expected a contiguous last dimension"),
    ({"query": torch.ones(4, 4, 64)}, ValueError, "query_start_loc: expected 0 rising to 4, got [0, 2, 3]"),
    ({"kv_cache": LAYOUT.allocate(BLOCKS).int()}, TypeError, "kv_cache: expected torch.uint8, got torch.int32"),
    ({"kv_cache": meta(*LAYOUT.shape(BLOCKS), dtype=torch.uint8)}, ValueError, "kv_cache: expected device cpu, got meta"),
    ({"kv_cache": LAYOUT.allocate(2)}, ValueError, "block_table: expected pages 0 to 1, got 0 to 2"),
    ({"block_table": torch.tensor([[0, 1], [-1, 3]])}, ValueError, "block_table: expected pages 0 to 3, got -1 to 1"),
    ({"block_table": torch.tensor([[0, 1]])}, ValueError, "block_table: expected shape [2, max_blocks], got [1, 2]"),
    ({"block_table": torch.tensor([0, 1])}, ValueError, "block_table: expected shape [2, max_blocks], got [2]"),
    ({"block_table": torch.tensor([[0.0, 1], [2, 3]])}, TypeError, "block_table: expected one of torch.int32, torch.int64"),
    ({"seq_lens": torch.tensor([33, 9])}, ValueError, "seq_lens: expected from the query length 2 to 32"),
    ({"seq_lens": torch.tensor([1, 9])}, ValueError, "seq_lens: expected from the query length 2 to 32"),
    ({"seq_lens": torch.tensor(9)}, ValueError, "seq_lens: expected shape [num_seqs], got []"),
    ({"seq_lens": torch.tensor([20.0, 9])}, TypeError, "seq_lens: expected one of torch.int32, torch.int64"),
    ({"seq_lens": meta(2, dtype=torch.int64)}, ValueError, "seq_lens: expected device cpu, got meta"),
    ({"query_start_loc": torch.tensor([0, 3])}, ValueError, "query_start_loc: expected shape [3], got [2]"),
    ({"query_start_loc": torch.tensor([1, 2, 3])}, ValueError, "query_start_loc: expected 0 rising to 3, got [1, 2, 3]"),
    ({"query_start_loc": torch.tensor([0, 4, 3])}, ValueError, "query_start_loc: expected 0 rising to 3, got [0, 4, 3]"),
    ({"key": torch.ones(3, 2, 64)}, ValueError, "value: expected key and value together, got one of them"),
    (
        {"key": torch.ones(3, 4, 64), "value": torch.ones(3, 2, 32)},
        ValueError,
        "key: expected shape (3, 2, 64), got (3, 4, 64)",
    ),
    (
        {"key": torch.ones(3, 2, 64), "value": torch.ones(3, 2, 64)},
        ValueError,
        "value: expected shape (3, 2, 32), got (3, 2, 64)",
    ),
    ({"key": meta(3, 2, 64), "value": torch.ones(3, 2, 32)}, ValueError, "key: expected device cpu, got meta"),
    ({"out": torch.empty(3, 4, 64)}, ValueError, "out: expected (3, 4, 32) torch.float32 on cpu, got (3, 4, 64)"),
    (
        {"out": torch.empty(3, 4, 32).half()},
        ValueError,
        "out: expected (3, 4, 32) torch.float32 on cpu, got (3, 4, 32) torch.float16",
    ),
    ({"out": strided(3, 4, 32)}, ValueError, "out: expected a contiguous last dimension"),
    (
        {"out": torch.empty(3, 4, 32), "output_scale": torch.ones(1)},
        ValueError,
        "out: expected (3, 4, 32) torch.float8_e4m3fn",
    ),
    ({"softmax_scale": 0.0}, ValueError, "softmax_scale: expected a positive finite number, got 0.0"),
    ({"softmax_scale": float("nan")}, ValueError, "softmax_scale: expected a positive finite number, got nan"),
    ({"sliding_window": -1}, ValueError, "sliding_window: expected 0 (none) or more, got -1"),
    ({"softcap": -5.0}, ValueError, "softcap: expected 0 (none) or a positive finite number, got -5.0"),
    ({"softcap": float("inf")}, ValueError, "softcap: expected 0 (none) or a positive finite number, got inf"),
    ({"chunk_lookback": -2}, ValueError, "chunk_lookback: expected -1 (none) or more, got -2"),
    (
        {"chunk_lookback": 0},
        ValueError,
        "sliding_window: expected at least chunk_lookback + 1 = 1 with chunked attention, got 0",
    ),
    ({"rswa_window": 4}, ValueError, "rswa_window: expected at least 1 together with rswa_prefix_lens, else 0, got 4"),
    (
        {"rswa_prefix_lens": torch.tensor([1, 1])},
        ValueError,
        "rswa_window: expected at least 1 together with rswa_prefix_lens",
    ),
    ({"rswa_prefix_lens": torch.tensor([1, 1]), "rswa_window": -1}, ValueError, "rswa_window: expected at least 1"),
    (
        {"rswa_prefix_lens": torch.tensor([1, 1]), "rswa_window": 4, "sliding_window": 8, "chunk_lookback": 0},
        ValueError,
        "rswa_window: expected no chunk_lookback beside it",
    ),
    (
        {"rswa_prefix_lens": torch.ones(2), "rswa_window": 4},
        TypeError,
        "rswa_prefix_lens: expected a tensor of int, got torch.float32",
    ),
    ({"raw_window": -1}, ValueError, "raw_window, raw_sinks: expected 0 (none) or more, got -1 and 0"),
    ({"raw_window": 4}, ValueError, "raw_key, raw_value: expected both together with a raw_window or raw_sinks"),
    ({"raw_key": torch.ones(2, 8, 2, 64)}, ValueError, "raw_key, raw_value: expected both together"),
    (
        {"raw_key": torch.ones(2, 8, 2, 64), "raw_value": torch.ones(2, 8, 2, 32)},
        ValueError,
        "raw_key, raw_value: expected both together with a raw_window or raw_sinks, got True, True, 0 and 0",
    ),
    ({**raw_rows(4), "raw_key": torch.ones(3, 4, 2, 64)}, ValueError, "raw_key: expected shape [2, N, H, D], got [3, 4"),
    ({**raw_rows(4), "raw_key": torch.ones(2, 4, 4, 64)}, ValueError, "raw_key: expected shape (2, 4, 2, 64), got (2, 4, 4"),
    (
        {**raw_rows(4), "raw_value": torch.ones(2, 5, 2, 32)},
        ValueError,
        "raw_value: expected shape (2, 4, 2, 32)",
    ),
    ({**raw_rows(4), "raw_value": strided(2, 4, 2, 32)}, ValueError, "raw_value: expected a contiguous last dimension"),
    ({**raw_rows(4), "raw_key": torch.ones(2, 4, 2, 64).double()}, TypeError, "raw_key: expected one of torch.float16"),
    ({**raw_rows(4), "raw_value": torch.ones(2, 4, 2, 32).half()}, TypeError, "raw_value: expected the dtype of raw_key"),
    ({**raw_rows(4), "raw_key": meta(2, 4, 2, 64)}, ValueError, "raw_key: expected device cpu, got meta"),
    (
        {**raw_rows(4), "raw_window": 4},
        ValueError,
        "raw_key: expected at least raw_sinks + 5 = 9 rows for queries of 2 tokens, got 4",
    ),
    (
        {**raw_rows(4), "raw_window": 2, "raw_sinks": 2},
        ValueError,
        "raw_key: expected at least raw_sinks + 3 = 5 rows for queries of 2 tokens, got 4",
    ),
    ({"alibi_sqrt": True}, ValueError, "alibi_sqrt: expected alibi_slopes with it, got None"),
    ({"mm_prefix_clamp": True}, ValueError, "mm_prefix_clamp: expected mm_prefix_ranges with it, got None"),
    ({"host_lengths": ([0, 1], [1])}, ValueError, "host_lengths: expected 3 starts and 2 lengths, got [2, 1]"),
    ({"causal": torch.tensor([True])}, ValueError, "causal: expected shape [2], got [1]"),
    ({"causal": torch.tensor([1, 0])}, TypeError, "causal: expected a tensor of bool, got torch.int64"),
    ({"alibi_slopes": torch.ones(2)}, ValueError, "alibi_slopes: expected shape [4], got [2]"),
    ({"sinks": torch.ones(4, dtype=torch.int32)}, TypeError, "sinks: expected a tensor of float, got torch.int32"),
    ({"sinks": meta(4)}, ValueError, "sinks: expected device cpu, got meta"),
    ({"qq_bias": torch.ones(2, 3)}, ValueError, "qq_bias: expected shape [N, N], got [2, 3]"),
    ({"qq_bias": torch.ones(1, 1)}, ValueError, "qq_bias: expected at least 2 rows, the longest query, got 1"),
    (
        {"mm_prefix_ranges": torch.ones(2, 3, dtype=torch.int32)},
        ValueError,
        "mm_prefix_ranges: expected shape [2, R, 2], got [2, 3]",
    ),
    ({"output_scale": torch.tensor(2.0)}, ValueError, "output_scale: expected shape [1], got []"),
    ({"backend": "flash"}, ValueError, "backend: expected 'auto' or one of triton, cpu, reference, got 'flash'"),
]


@pytest.mark.parametrize(("changes", "error", "message"), READ_ERRORS, ids=[m for _, _, m in READ_ERRORS])
def test_bad_read_is_refused(changes: dict, error: type, message: str):
    """Catches an argument that is read as it comes: a page of -1 wraps to the last, a small bias is an IndexError later."""
    with pytest.raises(error, match=re.escape(message)):
        read(**changes)


@pytest.mark.skipif(available_backends()["cpu"] is not None, reason=str(available_backends()["cpu"]))
@pytest.mark.parametrize(("changes", "error", "message"), READ_ERRORS, ids=[m for _, _, m in READ_ERRORS])
def test_bad_read_is_refused_where_one_call_checks_and_attends(changes: dict, error: type, message: str):
    """Catches a check that the compiled one leaves out, and an output that is written before the last check."""
    read(backend="cpu")  # the layout's caches are known from here on
    with pytest.raises(error, match=re.escape(message)):
        read(**{"backend": "cpu", **changes})
    plain = {
        "query": torch.ones(3, 4, 64), "kv_cache": LAYOUT.allocate(BLOCKS), "block_table": torch.tensor([[0, 1], [2, 3]]),
        "seq_lens": torch.tensor([20, 9]), "query_start_loc": torch.tensor([0, 2, 3]), "softmax_scale": 0.125,
        "out": torch.full((4 if "rising to 4" in message else 3, 4, 32), torch.nan),
    }  # fmt: skip
    windows = {
        n: x for n, x in changes.items() if n in ("raw_key", "raw_value", "raw_window", "raw_sinks", "sliding_window")
    }
    if changes.keys() - windows.keys() <= plain.keys():
        changed = {n: changes.get(n, x) for n, x in plain.items()}
        changed |= {"layout": LAYOUT, "max_query_len": None, "max_seq_len": None}
        changed["options"] = AttentionOptions(softmax_scale=changed.pop("softmax_scale"), **windows)
        assert not get_backend("cpu").attend_at_once(**changed)
        assert plain["out"].isnan().all()


def test_unknown_option_is_refused():
    """Catches options that are accepted and never read."""
    with pytest.raises(TypeError, match="windows"):
        read(windows=4)


def test_good_calls_pass():
    """Catches checks that are too strict: int32 and int64 indices, strided outer dimensions, no tokens, skipped slots."""
    kv_cache = LAYOUT.allocate(BLOCKS)
    write(kv_cache)
    write(kv_cache, slot_mapping=torch.tensor([-1, 63, -5, 0, 1], dtype=torch.int32))
    before = kv_cache.clone()
    write(kv_cache, slot_mapping=torch.full((TOKENS,), -1))
    write(kv_cache, key=torch.ones(0, 2, 64), value=torch.ones(0, 2, 32), slot_mapping=torch.arange(0))
    assert torch.equal(kv_cache, before)
    fused = torch.ones(3, 8, 64)
    assert read(query=fused[:, 2:6]).shape == (3, 4, 32)
    assert read(block_table=torch.tensor([[0, 1], [2, 99]])).shape == (3, 4, 32)  # the 99 is past the sequence
    empty = read(query=torch.ones(0, 4, 64), query_start_loc=torch.tensor([0, 0, 0], dtype=torch.int32))
    assert empty.shape == (0, 4, 32)


def test_default_device_of_the_process_does_not_matter():
    """Catches index tensors made on the default device instead of the arguments'."""
    kv_cache, query = LAYOUT.allocate(BLOCKS), torch.ones(3, 4, 64)
    arguments = {n: torch.tensor(v) for n, v in {"block_table": [[0, 1], [2, 3]], "seq_lens": [20, 9]}.items()}
    starts, slots, key, value = (
        torch.tensor([0, 2, 3]),
        torch.arange(TOKENS),
        torch.ones(TOKENS, 2, 64),
        torch.ones(TOKENS, 2, 32),
    )
    with torch.device("meta"):
        write(kv_cache, key=key, value=value, slot_mapping=slots)
        out = read(query=query, kv_cache=kv_cache, query_start_loc=starts, **arguments)
        codes, words = quantize(key)
        dequantize(codes, words)
    assert out.device.type == codes.device.type == "cpu"


def test_gradients_and_autocast_do_not_reach_the_operations():
    """Catches 16-bit products under autocast, and a graph that keeps every dequantized page alive."""
    kv_cache = LAYOUT.allocate(BLOCKS)
    key = torch.randn(TOKENS, 2, 64, requires_grad=True)
    write(kv_cache, key=key)
    query = torch.randn(3, 4, 64, requires_grad=True)
    plain = read(query=query, kv_cache=kv_cache)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(read(query=query, kv_cache=kv_cache), plain)
    assert not plain.requires_grad


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: quantize(torch.ones(3, 60)), ValueError, "x.shape[-1]: expected a multiple of 8 from 32 to 512, got 60"),
        (lambda: quantize(torch.tensor(1.0)), ValueError, "x.shape[-1]: expected"),
        (lambda: quantize(torch.ones(3, 64).double()), TypeError, "x: expected one of"),
        (lambda: quantize(torch.ones(3, 64), "int7"), ValueError, "format: expected one of int4"),
        (lambda: quantize(torch.ones(3, 64), role="query"), ValueError, "role: expected 'key' or 'value', got 'query'"),
        (lambda: dequantize(torch.zeros(3, 32), torch.zeros(3)), TypeError, "codes: expected one of torch.uint8"),
        (lambda: dequantize(codes(3, 32), torch.zeros(3)), TypeError, "words: expected one of torch.int32"),
        (lambda: dequantize(codes(3, 32), codes(2).int()), ValueError, "words: expected shape (3,), got (2,)"),
        (lambda: dequantize(codes(3, 10), codes(3).int()), ValueError, "codes: head size: expected a multiple of 8"),
        (lambda: gather(seq_len=65), ValueError, "seq_len: expected 0 to 64, the table's tokens, got 65"),
        (lambda: gather(seq_len=-1), ValueError, "seq_len: expected 0 to 64"),
        (lambda: gather(table=[0, 1, 2, -1]), ValueError, "block_table: expected pages 0 to 3, got -1 to 2"),
        (lambda: gather(table=[0, 1, 2, 4]), ValueError, "block_table: expected pages 0 to 3, got 0 to 4"),
        (lambda: gather(table=[[0, 1, 2, 3]]), ValueError, "block_table: expected shape [max_blocks], got [1, 4]"),
        (lambda: gather(table=[0.0, 1.0]), TypeError, "block_table: expected one of torch.int32"),
        (lambda: get_backend("none"), ValueError, "backend: expected 'auto' or one of"),
    ],
)
def test_other_operations_refuse_by_name(call, error: type, message: str):
    with pytest.raises(error, match=re.escape(message)):
        call()


def codes(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def gather(table: list | None = None, seq_len: int = 64) -> object:
    return gather_and_dequantize(LAYOUT.allocate(BLOCKS), torch.tensor(table or [0, 1, 2, 3]), seq_len, LAYOUT)


def test_a_named_backend_is_used_or_refused(monkeypatch: pytest.MonkeyPatch):
    """Catches a silent fallback: a backend that cannot serve the call is never replaced, and says why."""
    reference = get_backend("reference")
    assert select_backend("reference", LAYOUT, None, torch.device("cpu")) is reference
    monkeypatch.setattr(reference, "supports", lambda *_: "it is Sunday")
    with pytest.raises(NotImplementedError, match="backend 'reference' cannot serve this call: it is Sunday"):
        read()
    kv_cache = LAYOUT.allocate(BLOCKS)
    with pytest.raises(NotImplementedError, match="it is Sunday"):
        write(kv_cache)
    assert not kv_cache.any()


@pytest.mark.skipif(
    not all(find_spec(module) for module, _ in BACKENDS.values()), reason="a backend is not part of this tree"
)
def test_available_backends_gives_reasons():
    reasons = available_backends()
    assert reasons["reference"] is None
    assert all(reason is None or (isinstance(reason, str) and reason) for reason in reasons.values())
