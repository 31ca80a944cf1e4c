"""Times the GPU kernels beside their rivals and the roof of the same bytes, in one run.

Every figure is GPU time of one call: a CUDA graph holds one call per copy of the inputs, so that caches are cold, and the
median of replays is taken. A row whose error gate is red carries no speed-up.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import nibblekv
from nibblekv.formats import SCALE_WORD_BYTES
from nibblekv.layout import KVCacheLayout

__all__ = ["SHAPES", "Row", "Shape", "bench_attention_cuda", "graph_time", "write_json"]

ERROR_LIMIT = 1e-3
COPIES = 2
# Of our calls: its rounding (2^-12) stays below ERROR_LIMIT, bfloat16's would not. Rivals run in bfloat16.
DTYPE = torch.float16
ROOF_BYTES = 2 << 30


@dataclass(frozen=True)
class Shape:
    """One call: decode or prefill of `batch` sequences, or a write of `context` tokens."""

    name: str
    op: str
    batch: int
    context: int
    query_len: int = 1
    num_query_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16


SHAPES: tuple[Shape, ...] = (
    Shape("32 x 8,192", "decode", 32, 8192),
    Shape("1 x 131,072", "decode", 1, 131072),
    Shape("8 x 8,192", "decode", 8, 8192),
    Shape("128 x 2,048", "decode", 128, 2048),
    Shape("1 x 1,024", "decode", 1, 1024),
    Shape("32 x 8,192, q_len 4", "decode", 32, 8192, query_len=4),
    Shape("32 x 8,192, 64/8 heads", "decode", 32, 8192, num_query_heads=64),
    Shape("32 x 8,192, 32/32 heads", "decode", 32, 8192, num_kv_heads=32),
    Shape("32 x 8,192, 64/8 heads, D=64", "decode", 32, 8192, num_query_heads=64, head_size=64),
    Shape("32 x 8,192, 8/1 heads, D=256", "decode", 32, 8192, num_query_heads=8, num_kv_heads=1, head_size=256),
    Shape("8,192", "prefill", 1, 8192, query_len=8192),
    Shape("2,048 on 32,768", "prefill", 1, 32768, query_len=2048),
    Shape("64", "write", 1, 64),
    Shape("8,192", "write", 1, 8192),
)


@dataclass
class Row:
    """One measured line; times in microseconds, `gbps` over the bytes that the call must move."""

    op: str
    shape: str
    format: str
    backend: str
    time_us: float
    roof_us: float
    pct_roof: float
    gbps: float
    rel_err: float
    fa3_us: float | None = None
    vllm_int4_us: float | None = None
    speedup_fa3: float | None = field(default=None)


def graph_time(calls: Sequence[Callable[[], Any]], replays: int = 15) -> float:
    """Return the median GPU microseconds of one of the calls, replayed one after another in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def measure_roof() -> tuple[float, float]:
    """Return this card's (read, copy) rates in bytes per microsecond; a copy counts bytes read and written."""
    source = torch.empty(ROOF_BYTES // 4, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    read = ROOF_BYTES / graph_time([source.amax])
    return read, 2 * ROOF_BYTES / graph_time([lambda: target.copy_(source)])


def bench_attention_cuda(
    shapes: Sequence[Shape] = SHAPES,
    formats: Sequence[str] = ("int4",),
    pages: Sequence[str] = ("planar",),
    backend: str = "auto",
) -> list[Row]:
    """Time every shape and format; return one row each.

    Raises:
        RuntimeError: there is no CUDA GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("bench_attention_cuda: expected a CUDA GPU, found none")
    read, copy = measure_roof()
    rows = []
    for shape in shapes:
        for name in formats:
            for page in pages:
                torch.manual_seed(0)
                rows.append(
                    _bench_write(shape, name, page, copy, backend)
                    if shape.op == "write"
                    else _bench_read(shape, name, page, read, backend)
                )
                torch.cuda.empty_cache()
    return rows


def write_json(rows: Sequence[Row], path: str | Path) -> None:
    """Write rows with the card, driver, versions and command that made them."""
    properties = torch.cuda.get_device_properties(0)
    where = {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "driver": subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            check=False,
            capture_output=True,
            text=True,
        ).stdout.strip(),
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__,
        "nibblekv": nibblekv.__version__,
        "command": sys.argv,
    }
    Path(path).write_text(json.dumps({**where, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def _make(shape: Shape, layout: KVCacheLayout) -> dict[str, Any]:
    """Fill a cache by the library's own write, from rotated-domain-typical (normal) rows."""
    blocks = -(-shape.context // shape.block_size)
    total = shape.batch * blocks
    kv_cache = layout.allocate(total, "cuda")
    tokens = torch.arange(total * shape.block_size, device="cuda")
    for part in tokens.split(1 << 16):
        rows = torch.randn(2, part.numel(), shape.num_kv_heads, shape.head_size, dtype=DTYPE, device="cuda")
        nibblekv.reshape_and_cache(rows[0], rows[1], kv_cache, part, layout)
    num_queries = shape.batch * shape.query_len
    return {
        "query": torch.randn(num_queries, shape.num_query_heads, shape.head_size, dtype=DTYPE, device="cuda"),
        "kv_cache": kv_cache,
        "block_table": torch.randperm(total, device="cuda").to(torch.int32).view(shape.batch, blocks),
        "seq_lens": torch.full((shape.batch,), shape.context, dtype=torch.int32, device="cuda"),
        "query_start_loc": torch.arange(0, num_queries + 1, shape.query_len, dtype=torch.int32, device="cuda"),
    }


def _bench_read(shape: Shape, name: str, page: Any, read: float, backend: str) -> Row:
    layout = KVCacheLayout.create(
        name, num_kv_heads=shape.num_kv_heads, head_size=shape.head_size, block_size=shape.block_size, page=page
    )
    options: dict[str, Any] = {"max_query_len": shape.query_len, "max_seq_len": shape.context, "backend": backend}
    copies = [_make(shape, layout) for _ in range(COPIES if shape.op == "decode" else 1)]
    if shape.op == "prefill":
        size = (shape.batch * shape.query_len, shape.num_kv_heads, shape.head_size)
        options["key"], options["value"] = torch.randn(2, *size, dtype=DTYPE, device="cuda")
    outs = [torch.empty_like(copy["query"]) for copy in copies]

    def call(copy: dict[str, Any], out: torch.Tensor) -> Callable[[], Any]:
        return lambda: nibblekv.paged_attention(**copy, layout=layout, out=out, **options)

    calls = [call(copy, out) for copy, out in zip(copies, outs, strict=True)]
    time = graph_time(calls) if shape.op == "decode" or shape.query_len == shape.context else _stream_time(calls[0])
    moved = shape.batch * shape.context * layout.bytes_per_token
    rival = _fa3_time(shape)
    error = _error(shape, layout, copies[0], outs[0], options)
    return _row(shape, name, page, backend, time, moved, read, error, rival)


def _bench_write(shape: Shape, name: str, page: Any, copy: float, backend: str) -> Row:
    layout = KVCacheLayout.create(name, num_kv_heads=shape.num_kv_heads, head_size=shape.head_size, page=page)
    blocks = -(-shape.context // layout.block_size)
    inputs = []
    for _ in range(COPIES):
        rows = torch.randn(2, shape.context, shape.num_kv_heads, shape.head_size, dtype=DTYPE, device="cuda")
        slots = torch.randperm(blocks * layout.block_size, device="cuda")[: shape.context]
        inputs.append((rows[0], rows[1], layout.allocate(blocks, "cuda"), slots))

    def call(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> Callable[[], None]:
        return lambda: nibblekv.reshape_and_cache(key, value, kv_cache, slots, layout, backend=backend)

    calls = [call(*x) for x in inputs]
    time = graph_time(calls)
    expected = layout.allocate(blocks, "cuda")
    nibblekv.reshape_and_cache(inputs[0][0], inputs[0][1], expected, inputs[0][3], layout, backend="reference")
    differing = float((expected != inputs[0][2]).float().mean())
    moved = 2 * shape.context * shape.num_kv_heads * (2 * shape.head_size + layout.k_row_bytes + SCALE_WORD_BYTES)
    return _row(shape, name, page, backend, time, moved, copy, differing, None)


def _row(
    shape: Shape, name: str, page: str, backend: str, time: float, moved: int, rate: float, error: float, rival: float | None
) -> Row:
    roof = moved / rate
    row = Row(
        shape.op, shape.name, f"{name} ({page})", backend, time, roof, 100 * roof / time, moved / time / 1e3, error, rival
    )
    if rival is not None and error <= ERROR_LIMIT:
        row.speedup_fa3 = rival / time
    return row


def _stream_time(call: Callable[[], Any], repeats: int = 9) -> float:
    """Median microseconds between events around a call that reads lengths back and so cannot be captured."""
    call()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def _error(shape: Shape, layout: KVCacheLayout, copy: dict[str, Any], out: torch.Tensor, options: dict[str, Any]) -> float:
    """Relative error of the first sequence's first 64 queries against float64 attention over its own pages."""
    count = min(shape.query_len, 64)
    key, value = nibblekv.gather_and_dequantize(copy["kv_cache"], copy["block_table"][0], shape.context, layout)
    context = shape.context - shape.query_len
    if "key" in options:
        key = torch.cat((key[:context], options["key"].float()))
        value = torch.cat((value[:context], options["value"].float()))
    group = shape.num_query_heads // shape.num_kv_heads
    length = context + count
    key, value = (x[:length].double() for x in (key, value))
    query = copy["query"][:count].double().unflatten(1, (shape.num_kv_heads, group))
    exact = torch.empty(count, shape.num_kv_heads, group, shape.head_size, dtype=torch.float64, device="cuda")
    hidden = torch.arange(length, device="cuda")[None, :] > torch.arange(context, length, device="cuda")[:, None]
    for head in range(shape.num_kv_heads):
        scores = torch.einsum("qgd,kd->gqk", query[:, head], key[:, head]) * shape.head_size**-0.5
        exact[:, head] = torch.einsum("gqk,kd->qgd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value[:, head])
    got = out[:count].double().view_as(exact)
    return float((got - exact).norm() / exact.norm())


def _fa3_time(shape: Shape) -> float | None:
    """Time FlashAttention 3 of vLLM's build over 16-bit pages of the same shape, if vLLM is installed."""
    if importlib.util.find_spec("vllm") is None:
        return None
    flash = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    if not flash.FA3_AVAILABLE:
        return None
    blocks = -(-shape.context // shape.block_size)
    total = shape.batch * blocks
    calls = []
    for _ in range(COPIES):
        pages = torch.randn(
            2, total, shape.block_size, shape.num_kv_heads, shape.head_size, dtype=torch.bfloat16, device="cuda"
        )
        num_queries = shape.batch * shape.query_len
        query = torch.randn(num_queries, shape.num_query_heads, shape.head_size, dtype=torch.bfloat16, device="cuda")
        arguments = {
            "q": query,
            "k": pages[0],
            "v": pages[1],
            "out": torch.empty_like(query),
            "cu_seqlens_q": torch.arange(0, num_queries + 1, shape.query_len, dtype=torch.int32, device="cuda"),
            "max_seqlen_q": shape.query_len,
            "seqused_k": torch.full((shape.batch,), shape.context, dtype=torch.int32, device="cuda"),
            "max_seqlen_k": shape.context,
            "softmax_scale": shape.head_size**-0.5,
            "causal": True,
            "block_table": torch.randperm(total, device="cuda").to(torch.int32).view(shape.batch, blocks),
            "fa_version": 3,
        }
        calls.append(lambda arguments=arguments: flash.flash_attn_varlen_func(**arguments))
    return graph_time(calls)
