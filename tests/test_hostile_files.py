"""Files that are not what they seem: refused in one sentence, with nothing executed and nothing overwritten.

Models (folders, GGUF files, the cache of converted ones), configs for `plan`, JSON for the command line. Each test fails
if the refusal is taken out, because what it feeds is otherwise loaded, or ends in a traceback.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

import gguf
import numpy as np
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model
from typer.testing import CliRunner

from nibblekv import models
from nibblekv.cli.app import app
from nibblekv.models import load_config, load_model

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model folder with nothing wrong."""
    return save_tiny_model(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """Return a copy of it to spoil."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NIBBLEKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def whole_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a llama of one layer in 40 KB."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    size, vocabulary = 32, 40
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(size)
    writer.add_feed_forward_length(size)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(size)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(chr(97 + i % 26) * (1 + i // 26) for i in range(vocabulary - 3))])
    writer.add_token_scores([-float(i) for i in range(vocabulary)])
    writer.add_token_types([2, 3, 3] + [1] * (vocabulary - 3))
    generator = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocabulary, size), "output": (vocabulary, size)}
    shapes |= {"output_norm": (size,), "blk.0.attn_norm": (size,), "blk.0.ffn_norm": (size,)}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        shapes[f"blk.0.{name}"] = (size, size)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", generator.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def snapshot(*folders: Path) -> dict[str, str]:
    """Return the digest of every file below the folders."""
    files = [file for top in folders for file in top.rglob("*") if file.is_file()]
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def sentence(*arguments: str) -> str:
    """Return what the command line says of an error: one line, exit code 1."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 1, result.output + repr(result.exception)
    assert result.output.startswith("error: ")
    assert result.output.count("\n") == 1, result.output
    return result.output


def truncate(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


def empty(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"")


def huge_header(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"\xff" * 8 + b"{}")


def other_shapes(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    name = "model.layers.1.self_attn.v_proj.weight"
    weights[name] = weights[name][:-32].clone()
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def layer_too_few(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=3)


def other_model(folder: Path) -> None:
    edit_config(folder, model_type="gpt2", architectures=["GPT2LMHeadModel"])


def no_json(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe{")


def no_object(folder: Path) -> None:
    (folder / "config.json").write_text("[1, 2]")


def broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


SPOILT = {
    truncate: "expected files that transformers can read",
    empty: "expected files that transformers can read",
    huge_header: "expected files that transformers can read",
    other_shapes: "expected weights of its config's shapes, .*first of them model.layers.1.self_attn.v_proj.weight",
    layer_too_few: "expected weights for all of it, .*9 are not, the first of them model.layers.2",
    other_model: "expected weights for all of it",
    no_json: "not a valid JSON file",
    no_object: "expected files that transformers can read",
    broken_tokenizer: "expected files that transformers can read",
}


@pytest.mark.parametrize(("spoil", "message"), SPOILT.items(), ids=[spoil.__name__ for spoil in SPOILT])
def test_a_spoilt_folder_is_refused(folder, spoil, message):
    """Catches a traceback of a library below, and weights drawn at random where the file has none: a silent wrong model."""
    spoil(folder)
    before = snapshot(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as raised:
        load_model(str(folder))
    assert "\n" not in str(raised.value)
    assert snapshot(folder) == before
    assert "error: model: expected" in sentence("eval", "--model", str(folder), "--windows", "1", "--window", "16")


class Payload:
    """Unpickled, it leaves a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("harmless", [True, False], ids=["tensors", "payload"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", WEIGHTS], ids=["as pickle", "as safetensors"])
def test_pickles_are_refused(folder, tmp_path, harmless, name):
    """Catches weights that are read by unpickling, whatever the file is called and whatever torch allows today."""
    weights: dict[str, object] = dict(load_file(folder / WEIGHTS))
    if not harmless:
        weights["payload"] = Payload(tmp_path / "executed")
    (folder / WEIGHTS).unlink()
    torch.save(weights, folder / name)
    with pytest.raises((ValueError, FileNotFoundError), match="model: expected"):
        load_model(str(folder))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("what", ["model", "config", "tokenizer"])
def test_code_beside_a_model_is_not_run_and_not_asked_about(folder, tmp_path, what, monkeypatch):
    """Catches transformers' question whether to run it, which waits for an answer where there is a terminal."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'executed')!r})\n")
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    if what == "tokenizer":
        path = folder / "tokenizer_config.json"
        entries = {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}, "tokenizer_class": "Own"}
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    else:
        edit_config(folder, model_type="own", auto_map=classes)
    with pytest.raises(ValueError, match="custom code"):
        (load_config if what == "config" else load_model)(str(folder))
    assert not (tmp_path / "executed").exists()


CONFIGS = [
    {"num_hidden_layers": -1},
    {"num_hidden_layers": "many"},
    {"num_hidden_layers": None},
    {"num_attention_heads": 0},
    {"num_key_value_heads": -2},
    {"head_dim": 1 << 40},
    {"head_dim": 7},
    {"head_dim": "wide"},
    {"hidden_size": -128, "head_dim": None},
    {"layer_types": [1, 2]},
    {"layer_types": "all"},
    {"model_type": 7},
    {"model_type": "unheard of"},
]


@pytest.mark.parametrize("changes", CONFIGS, ids=str)
def test_a_plan_from_an_impossible_config_is_refused(folder, changes):
    """Catches numbers that are computed with before anybody looks at them."""
    edit_config(folder, **changes)
    assert "expected" in sentence("plan", "--memory", "1GiB", "--model", str(folder))


@pytest.mark.parametrize("text", ["{", "[1]", "7", '{"a": NaN}x', "{1: 2}"])
def test_engine_arguments_that_are_no_json_object_are_refused(text):
    assert "engine: expected a JSON object" in sentence("bench", "serve", "--engine", text)


def test_a_text_that_is_not_text_is_refused(tmp_path, whole):
    path = tmp_path / "text"
    path.write_bytes(b"\xff\xfe\x00\x01" * 100)
    assert "text: expected UTF-8" in sentence("eval", "--model", str(whole), "--text", str(path))


# --- GGUF, and what is kept of it


def test_a_whole_gguf_is_converted_once_and_kept(whole_gguf, cache):
    """Keeps the refusals below honest: the file that they spoil loads."""
    model, tokenizer = load_model(str(whole_gguf))
    assert model.config.num_hidden_layers == 1
    assert tokenizer("ab").input_ids
    (kept,) = (cache / "converted").iterdir()
    assert {"config.json", "sha256.json", WEIGHTS} <= {file.name for file in kept.iterdir()}


def spoilt_ggufs(content: bytes) -> dict[str, bytes]:
    """Return versions of a GGUF file: cut, of huge counts, of another kind, with random bytes in its head."""
    counts = {
        "version": content[:4] + (99).to_bytes(4, "little") + content[8:],
        "tensor count": content[:8] + (1 << 60).to_bytes(8, "little") + content[16:],
        "field count": content[:16] + (1 << 60).to_bytes(8, "little") + content[24:],
        "string length": content[:24] + (1 << 62).to_bytes(8, "little") + content[32:],
        "one layer more": content.replace(b"block_count\x04\0\0\0\1", b"block_count\x04\0\0\0\2"),
        "other width": content.replace(b"embedding_length\x04\0\0\0 ", b"embedding_length\x04\0\0\0@"),
        "architecture": content.replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0llamb"),
        "pickle": b"\x80\x04" + content[2:],
    }
    assert all(len(other) == len(content) and other != content for other in counts.values())
    cuts = {f"cut at {n}": content[:n] for n in (0, 3, 30, 500, 1500, 2500, len(content) - 20000, len(content) - 8)}
    return counts | cuts


def test_a_spoilt_gguf_is_refused_and_leaves_nothing(whole_gguf, cache, tmp_path):
    """Catches a model of random weights, a traceback of the reader, and a half-converted folder in the cache."""
    for name, content in spoilt_ggufs(whole_gguf.read_bytes()).items():
        path = tmp_path / "spoilt.gguf"
        path.write_bytes(content)
        with pytest.raises(ValueError, match="model: expected") as raised:
            load_model(str(path))
        assert "\n" not in str(raised.value), name
        assert path.read_bytes() == content
        assert not list((cache / "converted").iterdir()), name


def test_random_bytes_in_a_gguf_raise_nothing_but_a_refusal(whole_gguf, cache, tmp_path):
    """Catches an exception of the reader that nobody translates. A change that still makes a model is no error."""
    content, generator = whole_gguf.read_bytes(), random.Random(1)
    head = content.index(b"tokenizer.ggml.tokens")
    for i in range(12):
        spoilt = bytearray(content)
        for _ in range(generator.choice([1, 3])):
            spoilt[generator.randrange(4, head)] = generator.randrange(256)
        path = tmp_path / f"spoilt{i}.gguf"
        path.write_bytes(spoilt)
        with contextlib.suppress(ValueError):
            load_model(str(path))


CHANGES = {
    "a flipped bit": lambda folder: flip(folder / WEIGHTS),
    "a cut file": lambda folder: truncate(folder),
    "a missing file": lambda folder: (folder / "config.json").unlink(),
    "another config": lambda folder: edit_config(folder, rms_norm_eps=1.0),
    "code beside it": lambda folder: (folder / "own.py").write_text(""),
    "no checksums": lambda folder: (folder / "sha256.json").unlink(),
    "broken checksums": lambda folder: (folder / "sha256.json").write_text("{"),
    "a list of checksums": lambda folder: (folder / "sha256.json").write_text("[]"),
}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def converted(whole_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache that holds the converted file."""
    folder = tmp_path_factory.mktemp("converted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NIBBLEKV_CACHE", str(folder))
        load_model(str(whole_gguf))
    return folder


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_cached_model_that_changed_is_refused_and_left_alone(converted, whole_gguf, cache, change):
    """Catches a cache that is trusted for its name: a bit flipped on disk changed every later answer."""
    shutil.copytree(converted, cache)
    (kept,) = (cache / "converted").iterdir()
    load_model(str(whole_gguf))
    change(kept)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=r"model: expected .* delete .* and it is made again"):
        load_model(str(whole_gguf))
    assert snapshot(cache) == before
    shutil.rmtree(kept)
    load_model(str(whole_gguf))


def test_demo_models_in_the_cache_are_checked_too(cache, monkeypatch):
    record = models.DEMO_MODELS["smollm2"]
    folder = cache / "models" / f"smollm2-{record.sha256[:12]}-checked"
    folder.mkdir(parents=True)
    (folder / WEIGHTS).write_bytes(b"not these")
    (folder / "sha256.json").write_text(json.dumps({WEIGHTS: "0" * 64}))
    monkeypatch.setattr(models.subprocess, "Popen", None)
    with pytest.raises(ValueError, match=r"model\.safetensors: expected sha256 0000"):
        models.fetch_demo_model("smollm2")
    assert (folder / WEIGHTS).read_bytes() == b"not these"
