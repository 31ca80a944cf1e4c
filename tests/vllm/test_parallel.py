"""A model split over two processes, on CPU: each stores the pages of its own KV heads."""

from __future__ import annotations

import pytest
from conftest import ENVIRONMENT

from nibblekv.benchmarking_serve import bench_ranks


def test_two_ranks_store_half_the_heads_each_and_say_the_same(tiny_model, monkeypatch: pytest.MonkeyPatch):
    """Catches a plugin that is not active in vLLM's worker processes, and heads of the wrong rank."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # more ranks than groups of cores
    engine = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 20, "gpu_memory_utilization": 0.3}
    one, two = bench_ranks(2, tiny_model, prompts=3, context=100, engine=engine)
    assert "error" not in one, one
    assert "error" not in two, two
    assert one["attention"] == two["attention"] == "nibblekv.integrations.vllm.cpu.NibbleKVCPUImpl"
    assert two["tokens_ratio"] > 1.9
    assert two["first_token_error"] < 1e-4
    assert two["second_token_error"] < 1e-2
