"""Times the GPU kernels beside their rivals and the roof of the same bytes, in one run.

Every figure is GPU time of one call: a CUDA graph holds one call per copy of the inputs, so that caches are cold, and the
median of replays is taken. A row whose error gate is red carries no speed-up.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import nibblekv
from nibblekv.formats import SCALE_WORD_BYTES, get_format
from nibblekv.layout import KVCacheLayout

__all__ = ["SHAPES", "Shape", "bench_attention_cuda", "graph_time"]

ERROR_LIMIT = 1e-3
# Inputs rotate among so many copies that their pages fill this many bytes, over twice the L2 cache; at most MAX_COPIES.
COLD_BYTES, MIN_COPIES, MAX_COPIES = 160 << 20, 2, 64
# Of our calls: its rounding (2^-12) stays below ERROR_LIMIT, bfloat16's would not. Rivals run in bfloat16.
DTYPE = torch.float16
ROOF_BYTES = 2 << 30
# Segments of a sequence that vLLM's kernels use.
VLLM_SEGMENTS = 16


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


def graph_time(calls: Sequence[Callable[[], Any]], replays: int = 15) -> float:
    """Return the median GPU microseconds of one of the calls, replayed one after another in a CUDA graph."""
    torch.cuda.synchronize()  # the inputs are made on another stream
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


def bench_attention_cuda(
    formats: Iterable[str] = ("int4",),
    *,
    shapes: Iterable[Shape] = SHAPES,
    backend: str = "auto",
    progress: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Time every shape and format, in the format's own pages; `int4` in interleaved pages too.

    Args:
        formats: names in `FORMATS`.
        shapes: see `SHAPES`.
        backend: see `select_backend`.
        progress: called with a line before each measurement.

    Returns:
        Rows of op, shape, format, backend, time_us, roof_us (bytes that the call must move at this card's measured rate;
        None for prefill, which arithmetic bounds), pct_roof, gbps, rel_err (reads: against float64 over the same pages;
        writes: the part of bytes that differ from the reference's), fa3_us, vllm_int4_us (None where vLLM is not
        installed) and ratio (fa3_us / time_us; None where rel_err is above `ERROR_LIMIT`).

    Raises:
        NotImplementedError: there is no CUDA GPU.
    """
    if not torch.cuda.is_available():
        raise NotImplementedError("device: expected a CUDA GPU, found none")
    read, copy = _measure_roof()
    caches = [(name, get_format(name).page) for name in formats]
    caches += [("int4", "interleaved")] if ("int4", "planar") in caches else []
    rows = []
    for shape in shapes:
        fa3, vllm_int4 = (None, None) if shape.op == "write" else (_fa3_time(shape), _vllm_int4_time(shape))
        torch.cuda.empty_cache()
        for name, page in caches:
            progress(f"{shape.op} {shape.name} {name}")
            torch.manual_seed(0)
            row = (
                _bench_write(shape, name, page, copy, backend)
                if shape.op == "write"
                else _bench_read(shape, name, page, read, backend)
            )
            ratio = fa3 / row["time_us"] if fa3 is not None and row["rel_err"] <= ERROR_LIMIT else None
            rows.append({**row, "backend": backend, "fa3_us": fa3, "vllm_int4_us": vllm_int4, "ratio": ratio})
            torch.cuda.empty_cache()
    return rows


def _measure_roof() -> tuple[float, float]:
    """Return this card's (read, copy) rates in bytes per microsecond; a copy counts bytes read and written."""
    source = torch.empty(ROOF_BYTES // 4, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    read = ROOF_BYTES / graph_time([source.amax])
    return read, 2 * ROOF_BYTES / graph_time([lambda: target.copy_(source)])


def _num_copies(page_bytes: int) -> int:
    return max(MIN_COPIES, min(MAX_COPIES, -(-COLD_BYTES // page_bytes)))


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


def _bench_read(shape: Shape, name: str, page: Any, read: float, backend: str) -> dict[str, Any]:
    layout = KVCacheLayout.create(
        name, num_kv_heads=shape.num_kv_heads, head_size=shape.head_size, block_size=shape.block_size, page=page
    )
    options: dict[str, Any] = {"max_query_len": shape.query_len, "max_seq_len": shape.context, "backend": backend}
    moved = shape.batch * shape.context * layout.bytes_per_token
    copies = [_make(shape, layout) for _ in range(_num_copies(moved) if shape.op == "decode" else 1)]
    if shape.op == "prefill":
        size = (shape.batch * shape.query_len, shape.num_kv_heads, shape.head_size)
        options["key"], options["value"] = torch.randn(2, *size, dtype=DTYPE, device="cuda")
        options["host_lengths"] = (range(0, size[0] + 1, shape.query_len), [shape.context] * shape.batch)
    outs = [torch.full_like(copy["query"], torch.nan) for copy in copies]

    def call(copy: dict[str, Any], out: torch.Tensor) -> Callable[[], Any]:
        return lambda: nibblekv.paged_attention(**copy, layout=layout, out=out, **options)

    calls = [call(copy, out) for copy, out in zip(copies, outs, strict=True)]
    row = _row(shape, name, page, graph_time(calls), moved, None if shape.op == "prefill" else read)
    row["rel_err"] = _error(shape, layout, copies[0], outs[0], options)
    return row


def _bench_write(shape: Shape, name: str, page: Any, copy: float, backend: str) -> dict[str, Any]:
    layout = KVCacheLayout.create(name, num_kv_heads=shape.num_kv_heads, head_size=shape.head_size, page=page)
    blocks = -(-shape.context // layout.block_size)
    moved = 2 * shape.context * shape.num_kv_heads * (2 * shape.head_size + layout.k_row_bytes + SCALE_WORD_BYTES)
    inputs = []
    for _ in range(_num_copies(moved)):
        rows = torch.randn(2, shape.context, shape.num_kv_heads, shape.head_size, dtype=DTYPE, device="cuda")
        slots = torch.randperm(blocks * layout.block_size, device="cuda")[: shape.context]
        inputs.append((rows[0], rows[1], layout.allocate(blocks, "cuda"), slots))

    def call(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> Callable[[], None]:
        return lambda: nibblekv.reshape_and_cache(key, value, kv_cache, slots, layout, backend=backend)

    row = _row(shape, name, page, graph_time([call(*x) for x in inputs]), moved, copy)
    expected = layout.allocate(blocks, "cuda")
    nibblekv.reshape_and_cache(inputs[0][0], inputs[0][1], expected, inputs[0][3], layout, backend="reference")
    row["rel_err"] = float((expected != inputs[0][2]).float().mean())
    return row


def _row(shape: Shape, name: str, page: str, time: float, moved: int, rate: float | None) -> dict[str, Any]:
    roof = None if rate is None else moved / rate
    return {
        "op": shape.op,
        "shape": shape.name,
        "format": f"{name} ({page})",
        "time_us": time,
        "roof_us": roof,
        "pct_roof": None if roof is None else 100 * roof / time,
        "gbps": moved / time / 1e3,
    }


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
    moved = 4 * shape.batch * shape.context * shape.num_kv_heads * shape.head_size
    for _ in range(_num_copies(moved)):
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
        calls.append(functools.partial(flash.flash_attn_varlen_func, **arguments))
    return graph_time(calls)


def _vllm_int4_time(shape: Shape) -> float | None:
    """Time vLLM's own int4_per_token_head attention on random pages of the same shape, if vLLM is installed."""
    if importlib.util.find_spec("vllm") is None:
        return None
    kernel = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention").unified_attention
    mode = importlib.import_module("vllm.v1.kv_cache_interface").KVQuantMode.INT4_PER_TOKEN_HEAD
    blocks, half = -(-shape.context // shape.block_size), shape.head_size // 2 + SCALE_WORD_BYTES
    total, num_queries = shape.batch * blocks, shape.batch * shape.query_len
    size = (total, shape.block_size, shape.num_kv_heads, 2 * half)
    heads, threshold = shape.num_query_heads, 128 // shape.num_kv_heads
    calls = []
    for _ in range(_num_copies(torch.Size(size).numel())):
        pages = torch.randint(0, 256, size, dtype=torch.uint8, device="cuda")
        words = pages.view(torch.float32)
        scales = [words[..., half // 4 - 1], words[..., -1]]
        for scale in scales:
            scale.fill_(0.05)
        query = torch.randn(num_queries, heads, shape.head_size, dtype=torch.bfloat16, device="cuda")
        arguments = {
            "q": query,
            "k": pages[..., :half],
            "v": pages[..., half:],
            "out": torch.empty_like(query),
            "cu_seqlens_q": torch.arange(0, num_queries + 1, shape.query_len, dtype=torch.int32, device="cuda"),
            "max_seqlen_q": shape.query_len,
            "seqused_k": torch.full((shape.batch,), shape.context, dtype=torch.int32, device="cuda"),
            "max_seqlen_k": shape.context,
            "softmax_scale": shape.head_size**-0.5,
            "causal": True,
            "window_size": (-1, -1),
            "block_table": torch.randperm(total, device="cuda").to(torch.int32).view(shape.batch, blocks),
            "softcap": 0,
            "q_descale": None,
            "k_descale": None,
            "v_descale": None,
            "seq_threshold_3D": threshold,
            "num_par_softmax_segments": VLLM_SEGMENTS,
            "softmax_segm_output": torch.empty(threshold, heads, VLLM_SEGMENTS, shape.head_size, device="cuda"),
            "softmax_segm_max": torch.empty(threshold, heads, VLLM_SEGMENTS, device="cuda"),
            "softmax_segm_expsum": torch.empty(threshold, heads, VLLM_SEGMENTS, device="cuda"),
            "kv_quant_mode": mode,
            "k_scale_cache": scales[0],
            "v_scale_cache": scales[1],
        }
        calls.append(functools.partial(kernel, **arguments))
    return graph_time(calls, replays=5)
