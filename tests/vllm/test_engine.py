"""vLLM's real engine on CPU with nibblekv's cache: which class serves, what it holds, what it computes, under pressure."""

from __future__ import annotations

import re
from typing import Any

import pytest

INT4 = {"kv_cache_dtype": "int4_per_token_head"}
STRICT = {"NIBBLEKV_STRICT": "1", "NIBBLEKV_BACKEND": "cpu"}
IMPL = "nibblekv.integrations.vllm.cpu.NibbleKVCPUImpl"
TRITON_IMPL = "nibblekv.integrations.vllm.cuda.NibbleKVTritonImpl"


def tiny(folder: str, **engine: Any) -> dict[str, Any]:
    """Return engine settings of the tiny model."""
    return {"model": folder, "dtype": "float32", "max_model_len": 256, **engine}


def chat_settings(folder: str, dtype: str) -> dict[str, Any]:
    """Return engine settings of the real model."""
    return {
        "model": folder,
        "kv_cache_dtype": dtype,
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 128 << 20,
        "block_size": 32,
    }


@pytest.mark.models
def test_real_model_answers_from_four_bits_in_less_than_two_sevenths_of_the_space(run_scenario, smollm2):
    """Catches a plugin that is not active (vLLM then fills 4-bit bytes with something else), and wrong cache sizes."""
    ours = run_scenario("chat", chat_settings(smollm2, "int4_per_token_head"))
    stock = run_scenario("chat", chat_settings(smollm2, "auto"), {"NIBBLEKV_DISABLE": "1"})
    assert ours.result["impl"] == IMPL
    assert stock.result["impl"].startswith("vllm.")
    assert "Paris" in stock.result["answer"]
    assert "Paris" in ours.result["answer"]
    assert ours.result["tokens"] >= 3.5 * stock.result["tokens"]
    said = [int(re.search(r"KV cache size: ([\d,]+) tokens", run.log)[1].replace(",", "")) for run in (ours, stock)]
    assert said[0] >= 3.5 * said[1]
    assert "nibblekv stores the KV cache" in ours.log


@pytest.mark.parametrize(
    ("fmt", "strict", "triton_backend", "slot_bytes"),
    [
        ("int4", "0", False, 72),
        ("int4", "1", True, 72),
        ("int4_per_token_head", "1", False, 72),
        ("int8_per_token_head:int4", "0", True, 104),
        ("int4:int3", "1", False, 64),
    ],
)
def test_layer_outputs_are_attention_over_the_stored_rows(run_scenario, tiny_model, fmt, strict, triton_backend, slot_bytes):
    """Catches wrong slots, tables, batch splits, and rows left unwritten, at every layer and step of a mixed batch.

    With `triton_backend` the engine runs the classes that serve a GPU: their hooks, metadata and calls, on CPU tensors.
    """
    run = run_scenario(
        "numerics",
        tiny(tiny_model, **INT4, block_size=16, max_num_batched_tokens=64),
        {"NIBBLEKV_FORMAT": fmt, "NIBBLEKV_STRICT": strict},
        triton_backend=triton_backend,
    )
    assert run.result["impl"] == (TRITON_IMPL if triton_backend else IMPL)
    assert run.result["cache_shape"][1:] == [2, 16, slot_bytes]
    assert run.result["least_norm"] > 0.1
    assert max(run.result["errors"]) < 1e-3, max(run.result["errors"])


def test_an_eight_bit_cache_is_ours_too(run_scenario, tiny_model):
    """Catches a cache of another torch dtype than uint8 that is viewed wrongly."""
    run = run_scenario("numerics", tiny(tiny_model, kv_cache_dtype="int8_per_token_head", block_size=32), STRICT)
    assert run.result["impl"] == IMPL
    assert run.result["cache_shape"][1:] == [2, 32, 2 * 64 + 8]
    assert max(run.result["errors"]) < 1e-3


def test_layers_named_to_be_skipped_are_left_to_vllm(run_scenario, tiny_model):
    """Catches one builder or one page size for layers of two kinds, and a skipped layer that is quantized all the same."""
    settings = tiny(tiny_model, **INT4, block_size=32, kv_cache_dtype_skip_layers=["1"])
    run = run_scenario("numerics", settings, STRICT)
    assert run.result["ours"] == [True, False, True]
    assert max(run.result["errors"]) < 1e-3


# 8 requests of 29 to 143 tokens with 16 more each; the tight pool holds 320 tokens.
TIGHT = {"block_size": 16, "num_gpu_blocks_override": 21, "max_num_batched_tokens": 64, "enable_chunked_prefill": True}
ROOMY = {"block_size": 128, "max_num_batched_tokens": 2048, "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def alone(run_scenario, tiny_model) -> dict[str, Any]:
    """Return every request's tokens and log-probabilities when nothing else runs and each prompt is one chunk."""
    return run_scenario("pressure", tiny(tiny_model, **INT4, **ROOMY), STRICT, runs=["alone", "beams"]).result


@pytest.mark.parametrize("prefix_caching", [False, True], ids=["no prefix cache", "prefix cache"])
def test_a_pool_driven_to_preemption_changes_no_bit(run_scenario, tiny_model, alone, prefix_caching):
    """Catches stale or shared bytes: a block is filled with 0xFF when it is freed, and requests are evicted and redone."""
    run = run_scenario(
        "pressure",
        tiny(tiny_model, **INT4, **TIGHT, enable_prefix_caching=prefix_caching),
        STRICT,
        runs=["together", "together", "2", "sampled", "beams"],
        poison=True,
    ).result
    assert run["vllm:num_preemptions"] >= 2
    assert run["freed_blocks"] > 20
    assert (run["vllm:prefix_cache_hits"] > 0) == prefix_caching
    assert run["together"] == alone["alone"]
    assert run["2"] == alone["alone"][:2]
    assert run["sampled"] == [sample * 4 for sample in alone["alone"][:2]]
    assert run["beams"] == alone["beams"]


def test_requests_differ_from_one_another(alone):
    """Keeps the comparison above honest: a model that says one thing to everybody would pass it."""
    tokens = {tuple(samples[0][0]) for samples in alone["alone"]}
    assert len(tokens) == len(alone["alone"])
    assert len({tuple(beam) for beam in alone["beams"][0]}) == 3


# A window of 32 tokens, which pages of 4 unquantized tokens hold beside those of 16 packed ones.
WINDOW = {**STRICT, "NIBBLEKV_WINDOW": "32"}
HALF = {**INT4, "dtype": "float16"}
WINDOW_TIGHT = {**TIGHT, "num_gpu_blocks_override": 34, "max_num_batched_tokens": 32}


@pytest.mark.parametrize("strict", ["0", "1"])
def test_a_window_is_read_unquantized_and_all_before_it_as_stored(run_scenario, tiny_model, strict):
    """Catches, at every layer and step of a mixed batch, a token on the wrong side of the window or of another request."""
    run = run_scenario(
        "numerics",
        tiny(tiny_model, **INT4, block_size=16, max_num_batched_tokens=64),
        {"NIBBLEKV_STRICT": strict, "NIBBLEKV_WINDOW": "20"},
        triton_backend=strict == "1",
    )
    assert run.result["impl"] == (TRITON_IMPL if strict == "1" else IMPL)
    assert run.result["least_norm"] > 0.1
    assert max(run.result["errors"]) < 1e-3, max(run.result["errors"])


@pytest.fixture(scope="module")
def alone_with_window(run_scenario, tiny_model) -> dict[str, Any]:
    """Return every request's answer with a window when nothing else runs and each prompt is one chunk."""
    settings = tiny(tiny_model, **{**ROOMY, **HALF})
    return run_scenario("pressure", settings, WINDOW, runs=["alone", "beams"]).result


def test_a_window_is_right_under_preemption_and_prefix_caching(run_scenario, tiny_model, alone_with_window):
    """Catches a window that depends on other requests: stale, shared or lost unquantized blocks, 0xFF where they were."""
    run = run_scenario(
        "pressure",
        tiny(tiny_model, **{**WINDOW_TIGHT, **HALF}),
        WINDOW,
        runs=["together", "together", "2", "sampled", "beams"],
        poison=True,
    )
    result, alone = run.result, alone_with_window
    assert result["vllm:num_preemptions"] >= 2
    assert result["freed_blocks"] > 100
    assert result["vllm:prefix_cache_hits"] > 0
    assert result["together"] == alone["alone"]
    assert result["2"] == alone["alone"][:2]
    assert result["sampled"] == [sample * 4 for sample in alone["alone"][:2]]
    assert result["beams"] == alone["beams"]
    # A request of 256 tokens takes 16 blocks, and 17 for the newest 31 + 32 (a step's) unquantized ones.
    said = re.search(r"KV cache size: ([\d,]+) tokens", run.log)
    assert int(said[1].replace(",", "")) == 34 * 256 // 33
    assert "the last 32 tokens unquantized" in run.log


def test_a_calibration_repairs_what_a_large_key_bias_breaks(run_scenario, biased_model):
    """Catches keys, values, queries or outputs that are mapped on one side only, at every layer and step of a mixed batch;
    in vLLM's own layout of heads, with the file that transformers' keys gave.
    """
    settings = tiny(biased_model, **INT4, block_size=16, max_num_batched_tokens=64, skip_tokenizer_init=True)
    run = run_scenario("numerics", settings, {"NIBBLEKV_CALIBRATION": "auto"}, triton_backend=True)
    assert run.result["impl"] == TRITON_IMPL
    assert run.result["least_norm"] > 0.1
    assert max(run.result["errors"]) < 1e-3, max(run.result["errors"])
    assert max(run.result["raw_errors"]) < 0.15, max(run.result["raw_errors"])
    assert f"nibblekv maps keys and values by {biased_model}/nibblekv/calibration.safetensors" in run.log
    assert "taken from random tokens" in run.log


def test_a_calibration_is_strict_under_preemption_and_prefix_caching(run_scenario, biased_model):
    """Catches a map whose matrix products round differently by the number of rows, and plain rows in the window."""
    calibrated = {**WINDOW, "NIBBLEKV_CALIBRATION": biased_model}
    common = {**HALF, "skip_tokenizer_init": True}
    alone = run_scenario("pressure", tiny(biased_model, **{**ROOMY, **common}), calibrated, runs=["alone"]).result
    tight = tiny(biased_model, **{**WINDOW_TIGHT, **common, "max_model_len": 160, "num_gpu_blocks_override": 28})
    result = run_scenario("pressure", tight, calibrated, runs=["together", "together", "sampled"], poison=True).result
    assert result["vllm:num_preemptions"] >= 2
    assert result["vllm:prefix_cache_hits"] > 0
    assert result["together"] == alone["alone"]
    assert result["sampled"] == [sample * 4 for sample in alone["alone"][:2]]
    assert len({tuple(samples[0][0]) for samples in alone["alone"]}) == len(alone["alone"])
