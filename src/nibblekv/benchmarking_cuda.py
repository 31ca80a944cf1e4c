"""Times the GPU kernels beside their rivals and the roof of the same bytes, in one run.

Every time is GPU time of one call: a CUDA graph holds one call per copy of the inputs, so that caches are cold, and the
median of replays is taken. A row whose error gate is red carries no ratios.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import nibblekv
from nibblekv.backends import reference, select_backend
from nibblekv.cache import raw_row_count
from nibblekv.formats import SCALE_WORD_BYTES, get_format
from nibblekv.layout import KVCacheLayout
from nibblekv.options import AttentionOptions
from nibblekv.plan import split_window

__all__ = [
    "SHAPES", "Shape", "bench_attention_cuda", "count_kernels", "graph_time", "host_time", "missing_rivals", "plot_attention"
]  # fmt: skip

ERROR_LIMIT = 1e-3
# Inputs rotate among so many copies that their pages fill this many bytes, over twice the L2 cache; at most MAX_COPIES.
COLD_BYTES, MIN_COPIES, MAX_COPIES = 160 << 20, 2, 64
# Of our timed calls: its rounding (2^-12) stays below ERROR_LIMIT, bfloat16's nearly reaches it. Rivals run in bfloat16.
DTYPE = torch.float16
ROOF_BYTES = 2 << 30
# Segments of a sequence that vLLM's kernels use.
VLLM_SEGMENTS = 16
# Calls of a CUDA graph, at least.
GRAPH_CALLS = 8
# Calls between two waits of `host_time`: fewer than fill the queue of launches.
BURST = 25
# Of the error rows. float32 queries take the portable kernels where 16-bit ones take those of the GPU's own.
QUERY_SCALES = (1.0, 4.0)
QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
RIVALS = ("fa3_us", "vllm_int4_us", "vllm_int8_us")
_FA3 = "vllm.vllm_flash_attn.flash_attn_interface"
_VLLM = "vllm.v1.attention.ops.triton_unified_attention"


@dataclass(frozen=True)
class Shape:
    """One call: decode or prefill of `batch` sequences, a write of `context` tokens, or the errors of a decode."""

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
    Shape("64", "write", 1, 64),
    Shape("8,192", "write", 1, 8192),
    Shape("8,192", "prefill", 1, 8192, query_len=8192),
    Shape("2,048 on 32,768", "prefill", 1, 32768, query_len=2048),
    Shape("1 x 1,024", "error", 1, 1024),
    Shape("1 x 32,768", "error", 1, 32768),
    Shape("1 x 262,144", "error", 1, 262144),
)


def graph_time(calls: Sequence[Callable[[], Any]], replays: int = 15) -> float:
    """Return the median GPU microseconds of one of the calls, replayed one after another in a CUDA graph.

    Few calls are repeated in the graph: between two graphs the device rests for up to 10 us.
    """
    calls = list(calls) * -(-GRAPH_CALLS // len(calls))
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
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()  # keeps the device busy while the host launches the one that counts: else its launch would count too
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def host_time(call: Callable[[], Any], bursts: int = 41) -> float:
    """Return the median host microseconds of an eager call that nothing waits for."""
    times = []
    for _ in range(bursts + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(BURST):
            call()
        times.append((time.perf_counter() - begin) * 1e6 / BURST)
    torch.cuda.synchronize()
    return statistics.median(times[1:])


def count_kernels(call: Callable[[], Any]) -> int:
    """Return how many kernels, copies and fills a call launches: the nodes of a CUDA graph of it."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    count = ctypes.c_size_t()
    driver = ctypes.CDLL("libcuda.so.1")
    if driver.cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count)):
        raise RuntimeError("cuGraphGetNodes failed")
    return count.value


def bench_attention_cuda(
    formats: Iterable[str] = ("int4",),
    *,
    shapes: Iterable[Shape] = SHAPES,
    backend: str = "auto",
    done: Iterable[dict[str, Any]] = (),
    progress: Callable[[str], None] = lambda line: None,
    save: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Time every shape and format, in the format's own pages; `int4` in interleaved pages too.

    Args:
        formats: names in `FORMATS`; reads with a raw window and sinks where a suffix (`int4+w32s4`) says so.
        shapes: see `SHAPES`.
        backend: see `select_backend`.
        done: rows of an earlier run, returned with the new ones; their shapes are not run again.
        progress: called with a line before each measurement.
        save: called with all rows so far after every shape, so that a run that is cut off keeps them.

    Returns:
        Rows of op, shape, format, backend, time_us, roof_us (bytes that the call must move at this card's measured rate;
        None for prefill, which arithmetic bounds), gbps, fa3_us, vllm_int4_us, vllm_int8_us (None where `missing_rivals`
        says why), rel_err (reads: against float64 over the same pages; writes: the part of bytes that differ from the
        reference's), kernels (launches of one call), host_us (of an eager call), ratio_to_fa3 (fa3_us / time_us) and
        ratio_to_roof (roof_us / time_us), both None where rel_err is above `ERROR_LIMIT`. Rows of op `error` have rel_err
        (of a float32 output), out_err (of one in the queries' dtype), dtype and query_scale, and no times.

    Raises:
        NotImplementedError: there is no CUDA GPU.
    """
    if not torch.cuda.is_available():
        raise NotImplementedError("device: expected a CUDA GPU, found none")
    read, copy = _measure_roof()
    rate: float | None
    caches = [(name, get_format(split_window(name)[0]).page) for name in formats]
    caches += [("int4", "interleaved")] if ("int4", "planar") in caches else []
    rows = list(done)
    known = {(row["op"], row["shape"], row["format"]) for row in rows}
    for shape in shapes:
        missing = [x for x in caches if (shape.op, shape.name, _label(*x)) not in known]
        missing = [(name, page) for name, page in missing if shape.op != "write" or "+" not in name]
        if not missing:
            continue
        progress(f"{shape.op} {shape.name}, others' kernels")
        rivals = _rival_times(shape)
        for name, page in missing:
            progress(f"{shape.op} {shape.name} {name}")
            torch.manual_seed(0)
            torch.cuda.empty_cache()
            format, window, sinks = split_window(name)
            layout = KVCacheLayout.create(
                format, num_kv_heads=shape.num_kv_heads, head_size=shape.head_size, block_size=shape.block_size, page=page
            )
            common = {"op": shape.op, "shape": shape.name, "format": _label(name, page), "backend": backend}
            if shape.op == "error":
                rows += [common | row for row in _errors(shape, layout, backend, window, sinks)]
                continue
            if shape.op == "write":
                row, rate = _bench_write(shape, layout, backend), copy
            else:
                row, rate = _bench_read(shape, layout, backend, window, sinks), read if shape.op == "decode" else None
            rows.append(common | _finish(row, rate, rivals))
        save(rows)
        torch.cuda.empty_cache()
    return rows


def _label(name: str, page: str) -> str:
    return f"{name} ({page})"


def _finish(row: dict[str, Any], rate: float | None, rivals: dict[str, float | None]) -> dict[str, Any]:
    """Add what follows from a row's own figures; moved becomes roof_us and gbps."""
    moved, time_us, good = row.pop("moved"), row["time_us"], row["rel_err"] <= ERROR_LIMIT
    roof, fa3 = None if rate is None else moved / rate, rivals["fa3_us"]
    return {
        "time_us": time_us,
        "roof_us": roof,
        "gbps": moved / time_us / 1e3,
        **rivals,
        **row,
        "ratio_to_fa3": fa3 / time_us if fa3 is not None and good else None,
        "ratio_to_roof": roof / time_us if roof is not None and good else None,
    }


def _measure_roof() -> tuple[float, float]:
    """Return this card's (read, copy) rates in bytes per microsecond; a copy counts bytes read and written."""
    source = torch.empty(ROOF_BYTES // 4, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    read = ROOF_BYTES / graph_time([source.amax])
    return read, 2 * ROOF_BYTES / graph_time([lambda: target.copy_(source)])


def _num_copies(page_bytes: int) -> int:
    return max(MIN_COPIES, min(MAX_COPIES, -(-COLD_BYTES // page_bytes)))


def _make(shape: Shape, layout: KVCacheLayout, window: int, sinks: int) -> dict[str, Any]:
    """Fill a cache by the library's own write, from rotated-domain-typical (normal) rows; the raw ones are others."""
    blocks = -(-shape.context // shape.block_size)
    total = shape.batch * blocks
    kv_cache = layout.allocate(total, "cuda")
    tokens = torch.arange(total * shape.block_size, device="cuda")
    for part in tokens.split(1 << 16):
        rows = torch.randn(2, part.numel(), shape.num_kv_heads, shape.head_size, dtype=DTYPE, device="cuda")
        nibblekv.reshape_and_cache(rows[0], rows[1], kv_cache, part, layout)
    num_queries = shape.batch * shape.query_len
    raw: dict[str, Any] = {}
    if window or sinks:
        size = (shape.batch, raw_row_count(window, sinks), shape.num_kv_heads, shape.head_size)
        raw = {name: torch.randn(size, dtype=DTYPE, device="cuda") for name in ("raw_key", "raw_value")}
        raw |= {"raw_window": window, "raw_sinks": sinks}
    return {
        **raw,
        "query": torch.randn(num_queries, shape.num_query_heads, shape.head_size, dtype=DTYPE, device="cuda"),
        "kv_cache": kv_cache,
        "block_table": torch.randperm(total, device="cuda").to(torch.int32).view(shape.batch, blocks),
        "seq_lens": torch.full((shape.batch,), shape.context, dtype=torch.int32, device="cuda"),
        "query_start_loc": torch.arange(0, num_queries + 1, shape.query_len, dtype=torch.int32, device="cuda"),
    }


def _bench_read(shape: Shape, layout: KVCacheLayout, backend: str, window: int, sinks: int) -> dict[str, Any]:
    options: dict[str, Any] = {"max_query_len": shape.query_len, "max_seq_len": shape.context, "backend": backend}
    moved = shape.batch * shape.context * layout.bytes_per_token
    if window or sinks:  # the newest query's
        moved += shape.batch * (window + sinks) * (4 * shape.num_kv_heads * shape.head_size - layout.bytes_per_token)
    copies = [_make(shape, layout, window, sinks) for _ in range(_num_copies(moved) if shape.op == "decode" else 1)]
    if shape.op == "prefill":
        size = (shape.batch * shape.query_len, shape.num_kv_heads, shape.head_size)
        options["key"], options["value"] = torch.randn(2, *size, dtype=DTYPE, device="cuda")
        options["host_lengths"] = (range(0, size[0] + 1, shape.query_len), [shape.context] * shape.batch)
    outs = [torch.full_like(copy["query"], torch.nan) for copy in copies]

    def call(copy: dict[str, Any], out: torch.Tensor) -> Callable[[], Any]:
        return lambda: nibblekv.paged_attention(**copy, layout=layout, out=out, **options)

    calls = [call(copy, out) for copy, out in zip(copies, outs, strict=True)]
    row = {"moved": moved, **_times(calls)}
    row["rel_err"] = _error(shape, layout, copies[0], outs[0], options)
    return row


def _bench_write(shape: Shape, layout: KVCacheLayout, backend: str) -> dict[str, Any]:
    blocks = -(-shape.context // layout.block_size)
    moved = shape.context * shape.num_kv_heads * (4 * shape.head_size + layout.slot_bytes)
    inputs = []
    for _ in range(_num_copies(moved)):
        rows = torch.randn(2, shape.context, shape.num_kv_heads, shape.head_size, dtype=DTYPE, device="cuda")
        slots = torch.randperm(blocks * layout.block_size, device="cuda")[: shape.context]
        inputs.append((rows[0], rows[1], layout.allocate(blocks, "cuda"), slots))

    def call(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> Callable[[], None]:
        return lambda: nibblekv.reshape_and_cache(key, value, kv_cache, slots, layout, backend=backend)

    row = {"moved": moved, **_times([call(*x) for x in inputs])}
    expected = layout.allocate(blocks, "cuda")
    nibblekv.reshape_and_cache(inputs[0][0], inputs[0][1], expected, inputs[0][3], layout, backend="reference")
    row["rel_err"] = float((expected != inputs[0][2]).float().mean())
    return row


def _times(calls: Sequence[Callable[[], Any]]) -> dict[str, Any]:
    time_us = graph_time(calls)
    return {"time_us": time_us, "kernels": count_kernels(calls[0]), "host_us": host_time(calls[0])}


def _errors(shape: Shape, layout: KVCacheLayout, backend: str, window: int, sinks: int) -> list[dict[str, Any]]:
    copy = _make(shape, layout, window, sinks)
    unit = copy["query"].float()
    rows = []
    for dtype in QUERY_DTYPES:
        for scale in QUERY_SCALES:
            copy["query"] = (unit * scale).to(dtype)
            copy |= {name: copy[name].to(dtype) for name in ("raw_key", "raw_value") if name in copy}
            # The public call returns the queries' dtype; a backend itself takes any, so its own error can be told apart.
            own = torch.full(copy["query"].shape, torch.nan, device="cuda")
            raw = {name: value for name, value in copy.items() if name.startswith("raw_")}
            options = AttentionOptions(shape.head_size**-0.5, **raw)
            pages = {name: value for name, value in copy.items() if name not in raw}
            select_backend(backend, layout, options, own.device).paged_attention(
                **pages, layout=layout, options=options, out=own, lse=None, key=None, value=None,
                max_query_len=shape.query_len, max_seq_len=shape.context,
            )  # fmt: skip
            out = torch.full_like(copy["query"], torch.nan)
            nibblekv.paged_attention(
                **copy, layout=layout, out=out, backend=backend, max_query_len=shape.query_len, max_seq_len=shape.context
            )
            name = str(dtype).removeprefix("torch.")
            errors = {"rel_err": _error(shape, layout, copy, own, {}), "out_err": _error(shape, layout, copy, out, {})}
            rows.append({"dtype": name, "query_scale": scale, **errors})
    return rows


def _error(shape: Shape, layout: KVCacheLayout, copy: dict[str, Any], out: torch.Tensor, options: dict[str, Any]) -> float:
    """Return the relative error of the first sequence's first 64 queries against float64 attention over its own pages."""
    count = min(shape.query_len, 64)
    key, value = nibblekv.gather_and_dequantize(copy["kv_cache"], copy["block_table"][0], shape.context, layout)
    context = shape.context - shape.query_len
    if "key" in options:
        key = torch.cat((key[:context], options["key"].float()))
        value = torch.cat((value[:context], options["value"].float()))
    group = shape.num_query_heads // shape.num_kv_heads
    length = context + count
    position = torch.arange(length, device="cuda")
    raw = torch.zeros(count, length, dtype=torch.bool, device="cuda")
    raw_key, raw_value = key, value
    if "raw_key" in copy:
        described = AttentionOptions(1.0, **{name: copy[name] for name in copy if name.startswith("raw_")})
        raw = reference.raw_mask(position[context:], position, described)
        places = reference.raw_rows(torch.arange(shape.context, device="cuda"), described)
        raw_key, raw_value = (copy[name][0, places].float() for name in ("raw_key", "raw_value"))
        if "key" in options:
            raw_key = torch.cat((raw_key[:context], options["key"].float()))
            raw_value = torch.cat((raw_value[:context], options["value"].float()))
    raw_key, raw_value = (x[:length].double() for x in (raw_key, raw_value))
    key, value = (x[:length].double() for x in (key, value))
    query = copy["query"][:count].double().unflatten(1, (shape.num_kv_heads, group))
    exact = torch.empty(count, shape.num_kv_heads, group, shape.head_size, dtype=torch.float64, device="cuda")
    hidden = torch.arange(length, device="cuda")[None, :] > torch.arange(context, length, device="cuda")[:, None]
    for head in range(shape.num_kv_heads):
        scores, raw_scores = (torch.einsum("qgd,kd->gqk", query[:, head], x[:, head]) for x in (key, raw_key))
        scores = torch.where(raw, raw_scores, scores) * shape.head_size**-0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        exact[:, head] = torch.einsum("gqk,kd->qgd", weights * ~raw, value[:, head])
        exact[:, head] += torch.einsum("gqk,kd->qgd", weights * raw, raw_value[:, head])
    got = out[:count].double().view_as(exact)
    return float((got - exact).norm() / exact.norm())


def missing_rivals() -> list[str]:
    """Return a sentence for each of others' kernels that this machine cannot time, with the reason."""
    return [f"{name}: not measured: {reason}" for name, (_, reason) in _rivals_without().items()]


def _rivals_without() -> dict[str, tuple[tuple[str, ...], str]]:
    """Return name -> (columns, reason) of others' kernels that cannot be imported."""
    found: dict[str, tuple[tuple[str, ...], str]] = {}
    for name, columns, module in (("FlashAttention 3", RIVALS[:1], _FA3), ("vLLM's own kernels", RIVALS[1:], _VLLM)):
        try:
            imported = importlib.import_module(module)
        except ImportError as error:
            found[name] = columns, str(error)
        else:
            if module == _FA3 and not imported.FA3_AVAILABLE:
                found[name] = columns, "this build of vLLM does not have it"
    return found


def _rival_times(shape: Shape) -> dict[str, float | None]:
    """Time others' attention over pages of the same shape; None where it is missing, or for another operation."""
    times: dict[str, float | None] = dict.fromkeys(RIVALS)
    if shape.op in ("write", "error"):
        return times
    missing = {column for columns, _ in _rivals_without().values() for column in columns}
    if "fa3_us" not in missing:
        times["fa3_us"] = _fa3_time(shape)
    for bits in (4, 8):
        if f"vllm_int{bits}_us" not in missing:
            times[f"vllm_int{bits}_us"] = _vllm_time(shape, bits)
    torch.cuda.empty_cache()
    return times


def _fa3_time(shape: Shape) -> float:
    """Time FlashAttention 3 of vLLM's build over 16-bit pages of the same shape."""
    flash = importlib.import_module(_FA3)
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


def _vllm_time(shape: Shape, bits: int) -> float:
    """Time vLLM's own attention over its 4- or 8-bit per-token-head format, on random pages of the same shape."""
    kernel = importlib.import_module(_VLLM).unified_attention
    mode = getattr(importlib.import_module("vllm.v1.kv_cache_interface").KVQuantMode, f"INT{bits}_PER_TOKEN_HEAD")
    blocks, half = -(-shape.context // shape.block_size), shape.head_size * bits // 8 + SCALE_WORD_BYTES
    total, num_queries = shape.batch * blocks, shape.batch * shape.query_len
    size = (total, shape.block_size, shape.num_kv_heads, 2 * half)
    heads, threshold = shape.num_query_heads, 128 // shape.num_kv_heads
    calls = []
    for _ in range(_num_copies(torch.Size(size).numel())):
        pages = torch.randint(0, 256, size, dtype=torch.uint8, device="cuda")
        words = pages.view(torch.float32)
        rows = pages if bits == 4 else pages.view(torch.int8)
        scales = [words[..., half // 4 - 1], words[..., -1]]
        for scale in scales:
            scale.fill_(0.05)
        query = torch.randn(num_queries, heads, shape.head_size, dtype=torch.bfloat16, device="cuda")
        arguments = {
            "q": query,
            "k": rows[..., :half],
            "v": rows[..., half:],
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
    return graph_time(calls, replays=3)


def plot_attention(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Draw the time of every timed row beside FlashAttention 3 and the roof, with the part of the roof reached.

    Args:
        rows: of `bench_attention_cuda`.
        path: of the picture; its suffix says the type.

    Raises:
        ImportError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("plot: expected matplotlib, which is not installed (pip install 'nibblekv[plots]')")
    importlib.import_module("matplotlib").use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    timed = [row for row in rows if row.get("time_us") is not None]
    series = (
        ("time_us", "nibblekv", "#2b6cb0"),
        ("fa3_us", "FlashAttention 3, 16 bits", "#a0aec0"),
        ("roof_us", "roof", "#38a169"),
    )
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.55 * len(timed)), layout="constrained")
    for n, (key, label, color) in enumerate(series):
        shown = [(i, row) for i, row in enumerate(timed) if row.get(key) is not None]
        places = [i + 0.27 * (n - 1) for i, _ in shown]
        axes.barh(places, [row[key] for _, row in shown], 0.25, label=label, color=color)
        for place, (_, row) in zip(places, shown, strict=True):
            part = row.get("ratio_to_roof") if key == "time_us" else None
            axes.text(
                row[key],
                place,
                f" {row[key]:,.1f}" + (f" ({part:.0%} of the roof)" if part else ""),
                va="center",
                fontsize=7,
            )
    axes.set_yticks(range(len(timed)), [f"{row['op']} {row['shape']}\n{row['format']}" for row in timed], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.2)
    axes.set_xlabel("microseconds of one call (logarithmic)")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
