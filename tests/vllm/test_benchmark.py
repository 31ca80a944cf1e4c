"""The serving benchmark, on a load that says nothing of speed."""

from __future__ import annotations

import pytest
from conftest import ENVIRONMENT

from nibblekv.benchmarking_serve import bench_serve

SMALL = {"kv_cache_memory_bytes": 1 << 20, "gpu_memory_utilization": 0.3, "enforce_eager": True}


def test_rows_hold_the_figures_of_a_pool_bound_load(tiny_model, monkeypatch: pytest.MonkeyPatch):
    """Catches an engine process that does not start, and a load that leaves the pool half empty."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    (row,) = bench_serve(tiny_model, requests=None, context=100, new_tokens=48, contenders=("int4, nibblekv",), engine=SMALL)
    assert "error" not in row, row
    assert row["cache_tokens"] == (1 << 20) // (3 * 2 * (64 + 8) * 128) * 128
    assert row["requests"] == row["cache_tokens"] // 148
    assert all(row[name] > 0 for name in ("total_tok_s", "output_tok_s", "ttft_ms", "start_s", "process_s"))
    assert row["attention"].endswith("NibbleKVCPUImpl")


def test_an_engine_that_fails_leaves_its_last_words(tiny_model, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NIBBLEKV_FORMAT", "int3")
    (row,) = bench_serve(tiny_model, context=8, new_tokens=2, contenders=("int4, nibblekv",), engine=SMALL)
    assert "NIBBLEKV_FORMAT: expected one of int4" in row["error"]
