"""Runs engines in processes of their own, each configuration once, and makes the tiny model that most of them serve."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nibblekv.benchmarking_serve import TINY, write_random_llama

_spec = importlib.util.find_spec("vllm")
# This folder can pass for a namespace package of the same name; only an installed vLLM has an origin.
collect_ignore_glob = ["test_*.py"] if _spec is None or _spec.origin is None else []

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CONFIGURE_LOGGING": "1",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@dataclass
class Run:
    """Result and log of one engine process."""

    result: dict[str, Any]
    log: str


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment without settings of the plugin, with those of the tests and `variables`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("NIBBLEKV_", "VLLM_"))}
    kept = {name: os.environ[name] for name in ("NIBBLEKV_CACHE",) if name in os.environ}
    return inherited | kept | ENVIRONMENT | variables


@pytest.fixture(scope="session")
def run_scenario(tmp_path_factory: pytest.TempPathFactory):
    """Return run(name, engine settings, environment, **further entries) -> Run; equal calls share one process."""
    finished: dict[str, Run] = {}

    def run(scenario: str, engine: dict[str, Any], variables: dict[str, str] | None = None, **entries: Any) -> Run:
        config = {"engine": engine, **entries}
        key = json.dumps([scenario, config, variables], sort_keys=True)
        if key not in finished:
            folder = tmp_path_factory.mktemp(scenario)
            (folder / "config.json").write_text(json.dumps(config))
            script = Path(__file__).with_name("scenarios.py")
            files = [str(folder / "config.json"), str(folder / "result.json")]
            process = subprocess.run(
                [sys.executable, str(script), scenario, *files],
                env=environment(**(variables or {})),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=300,
                check=False,
            )
            if process.returncode:
                raise RuntimeError(f"{scenario} {config} failed:\n{process.stdout[-6000:]}")
            finished[key] = Run(json.loads((folder / "result.json").read_text()), process.stdout)
        return finished[key]

    return run


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Return the folder of a real model, fetched on first use."""
    from nibblekv.models import fetch_demo_model

    return str(fetch_demo_model("smollm2"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of the tiny model."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    return str(folder)


@pytest.fixture(scope="session")
def biased_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a random Qwen2 whose first layer's keys have a large bias, and of its calibration."""
    import torch
    import transformers

    from nibblekv.calibration import derive_calibration, save_path

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=512, hidden_size=256, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(8)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif "proj.weight" in name:
                parameter.mul_(3)
        slow = torch.randn(2, 2, 32)
        slow[..., :28] = 0  # as in real ones, in the slowest of the rotary frequencies
        model.model.layers[0].self_attn.k_proj.bias.copy_((900 * slow / slow.norm(dim=(1, 2), keepdim=True)).flatten())
    folder = tmp_path_factory.mktemp("biased")
    model.save_pretrained(folder)
    model = transformers.Qwen2ForCausalLM.from_pretrained(folder)
    derive_calibration(model).save(save_path(model))
    return str(folder)


def save_tiny_model(folder: Path) -> None:
    """Save a random Llama of 3 layers whose attention is far from uniform."""
    vocabulary = TINY["vocab_size"]
    write_random_llama(folder, TINY, logit_std=3.4)
    words = {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(vocabulary)}, "unk_token": "w0"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": words}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    special = {"bos_token": "w1", "eos_token": "w2", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}))
