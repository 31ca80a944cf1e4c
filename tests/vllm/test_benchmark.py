"""The serving benchmark, on a load that says nothing of speed."""

from __future__ import annotations

import pytest
import torch
from conftest import ENVIRONMENT

from nibblekv.benchmarking_serve import bench_quality, bench_serve

SMALL = {"kv_cache_memory_bytes": 1 << 20, "gpu_memory_utilization": 0.3, "enforce_eager": True}


def test_rows_hold_the_figures_of_a_pool_bound_load(tiny_model, monkeypatch: pytest.MonkeyPatch):
    """Catches an engine process that does not start, and a load that leaves the pool half empty."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    (row,) = bench_serve(tiny_model, requests=None, context=100, new_tokens=48, contenders=("int4, nibblekv",), engine=SMALL)
    assert "error" not in row, row
    assert row["cache_tokens"] == (1 << 20) // (3 * 2 * (64 + 8) * 128) * 128
    assert row["requests"] == (row["cache_tokens"] // 128 - 1) // 2  # 148 tokens take two blocks; one is vLLM's
    assert all(row[name] > 0 for name in ("total_tok_s", "output_tok_s", "ttft_ms", "start_s", "process_s"))
    assert row["attention"].endswith("NibbleKVCPUImpl")


def test_an_engine_that_fails_leaves_its_last_words(tiny_model, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NIBBLEKV_STRICT", "maybe")
    (row,) = bench_serve(tiny_model, context=8, new_tokens=2, contenders=("int4, nibblekv",), engine=SMALL)
    assert "NIBBLEKV_STRICT: expected 1 or 0, got 'maybe'" in row["error"]


def test_the_divergence_of_what_is_served(tiny_model, monkeypatch: pytest.MonkeyPatch):
    """Catches requests that do not follow the text, and a divergence between rows of different requests (then near 1)."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    windows = torch.randint(10, 500, (3, 96), generator=torch.Generator().manual_seed(2)).tolist()
    engine = SMALL | {"dtype": "float32", "kv_cache_memory_bytes": 8 << 20}
    seen: list[int] = []
    rows = bench_quality(
        tiny_model,
        windows,
        contenders=("int8, nibblekv",),
        expected={"int8_per_token_head": 0.5},
        engine=engine,
        done=lambda rows: seen.append(len(rows)),
    )
    assert seen == [1, 2]
    reference, ours = rows
    assert reference["tokens"] == ours["tokens"] == 3 * 71
    assert reference["attention"].endswith("CPUAttentionBackendImpl")
    assert ours["attention"].endswith("NibbleKVCPUImpl")
    assert 0 < ours["kl_mean"] < 0.01
    assert (ours["eval_kl_mean"], "eval_kl_mean" in reference) == (0.5, False)
    assert abs(ours["perplexity"] / reference["perplexity"] - 1) < 0.05
