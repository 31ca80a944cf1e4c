"""The command line: every command on a tiny model, its JSON, and its errors."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("transformers")

from tiny_models import save_tiny_model
from typer.testing import CliRunner

import nibblekv
from nibblekv import benchmarking, benchmarking_cuda, cli
from nibblekv.cli import demo, doctor
from nibblekv.cli.app import app
from nibblekv.cli.common import format_bytes, parse_bytes
from nibblekv.models import load_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny")))


def invoke(*arguments: str, code: int = 0):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def read_rows(path: Path) -> list[dict]:
    record = json.loads(path.read_text())
    assert record["command"].startswith("nibblekv")
    assert record["machine"]["packages"]["torch"] == torch.__version__
    assert record["machine"]["cores"] >= 1
    return record["rows"]


def test_version():
    assert invoke("--version").output.strip() == nibblekv.__version__


def test_eval_writes_the_rows_that_it_prints(tiny, tmp_path):
    path = tmp_path / "new" / "eval.json"
    result = invoke(
        "eval", "--model", tiny, "--formats", "none,int4", "--windows", "2", "--window", "64", "--text", "austen",
        "--copy", "1", "--greedy", "2", "--json", str(path),
    )  # fmt: skip
    rows = read_rows(path)
    assert [row["format"] for row in rows] == ["none", "int4"]
    assert list(rows[1])[:10] == [
        "model", "format", "bits_per_value", "perplexity", "kl_mean", "kl_median", "kl_p99", "kl_p999", "top1", "tokens",
    ]  # fmt: skip
    assert f"{rows[1]['kl_mean']:.5f}" in result.output
    assert {"copy_correct", "greedy_agreement"} <= set(rows[1])
    assert list(path.parent.iterdir()) == [path]


def test_calibrate_writes_a_file_that_eval_uses(tmp_path):
    folder = save_tiny_model(tmp_path / "model")
    path = folder / "nibblekv/calibration.safetensors"
    result = invoke("calibrate", str(folder), "--windows", "4", "--window", "64")
    assert str(path) in result.output
    assert "2 layers, 256 tokens of austen, bible, at positions 0 to 4,095" in result.output
    options = ["--windows", "1", "--window", "64", "--text", "austen", "--json", str(tmp_path / "eval.json")]
    invoke("eval", "--model", str(folder), "--formats", "int4,int4+calib", *options)
    plain, calibrated = read_rows(tmp_path / "eval.json")
    assert plain["kl_mean"] != calibrated["kl_mean"]
    before = path.read_bytes()
    result = invoke("calibrate", str(folder), "--windows", "4", "--window", "64", "-o", str(tmp_path / "c.safetensors"))
    assert f"attach(model, calibration='{tmp_path}/c.safetensors')" in result.output
    assert "finds it" not in result.output
    assert "error: positions: expected" in invoke("calibrate", str(folder), "--positions", "9999", code=1).output
    assert path.read_bytes() == before
    path.write_bytes(before[:-5])
    for command in (["eval", "--formats", "int4+calib", *options], ["generate", "the people", "--formats", "int4+calib"]):
        assert "whole safetensors file" in invoke(*command, "--model", str(folder)).output


def test_generate_prints_texts_side_by_side(tiny, tmp_path):
    path = tmp_path / "generate.json"
    result = invoke("generate", "the people", "--model", tiny, "--new-tokens", "4", "--json", str(path))
    rows = read_rows(path)
    assert [row["format"] for row in rows] == ["none", "int4"]
    assert rows[0]["text"] in result.output
    result = invoke("generate", "the people", "--model", tiny, "--temperature", "-1", code=1)
    assert "error: temperature: expected 0 (greedy) or more" in result.output


def test_bench_generate(tiny, tmp_path):
    path = tmp_path / "bench.json"
    invoke(
        "bench", "generate", "--model", tiny, "--context", "64", "--new-tokens", "2", "--rounds", "1", "--json", str(path)
    )  # fmt: skip
    rows = read_rows(path)
    assert rows[1]["memory_ratio"] > 2
    assert rows[1]["tokens_per_second"] > 0


def test_plan_takes_numbers_or_a_model(tiny, tmp_path):
    path = tmp_path / "plan.json"
    numbers = ("--layers", "32", "--kv-heads", "8", "--head-size", "128")
    invoke("plan", "--memory", "1GiB", *numbers, "--json", str(path))
    assert [row["tokens"] for row in read_rows(path)] == [8192, 30832]
    invoke("plan", "--memory", "1GiB", "--model", tiny, "--formats", "int4", "--json", str(path))
    assert read_rows(path)[0]["bytes_per_token"] == 2 * 2 * 2 * (16 + 4)
    sliding = ("--sliding-layers", "32", "--sliding-window", "64")
    invoke("plan", "--memory", "1GiB", *numbers, *sliding, "--json", str(path))
    assert read_rows(path)[0]["tokens"] is None


def test_doctor_says_what_works_and_why_not(tmp_path, monkeypatch):
    monkeypatch.setattr(nibblekv, "available_backends", lambda: {"reference": None, "other": "no such device"})
    plugin = doctor.vllm_status() | {"active": True, "reason": None, "window": 32, "calibration": "/models/c.safetensors"}
    monkeypatch.setattr(doctor, "vllm_status", lambda: plugin)
    path = tmp_path / "doctor.json"
    result = invoke("doctor", "--json", str(path))
    rows = {row["name"]: row for row in read_rows(path)}
    assert rows["reference"]["ok"]
    assert (rows["other"]["ok"], rows["other"]["detail"]) == (False, "no such device")
    assert rows["torch"]["detail"] == torch.__version__
    assert "no such device" in result.output
    assert "; the last 32 tokens unquantized; calibration /models/c.safetensors; " in rows["vllm"]["detail"]


def test_bench_attention_prints_the_rows_of_the_benchmark(tmp_path, monkeypatch):
    row = {"op": "decode", "shape": "1x8", "format": "int4", "backend": "cpu", "baseline": "sdpa"}
    row |= {"time_us": 2.0, "baseline_us": 9.0, "ratio": 4.5}

    def bench(formats, progress):
        assert formats == ["int4", "int8_per_token_head"]
        progress("decode")
        return [row]

    monkeypatch.setattr(benchmarking, "bench_attention_cpu", bench)
    path = tmp_path / "attention.json"
    assert "4.50" in invoke("bench", "attention", "--formats", "int4,int8_per_token_head", "--json", str(path)).output
    assert read_rows(path) == [row]


def test_bench_attention_cuda_selects_shapes_saves_as_it_goes_and_resumes(tmp_path, monkeypatch):
    """Catches a run whose rows are lost when a time limit cuts it off, and one that measures again what it has."""
    path, plot = tmp_path / "attention.json", tmp_path / "attention.svg"
    rows = [
        {"op": "decode", "shape": name, "format": "int4 (planar)", "time_us": 80.0} for name in ("8 x 8,192", "1 x 1,024")
    ]
    rows[0] |= {"fa3_us": 240.0, "roof_us": 60.0, "ratio_to_fa3": 3.0, "ratio_to_roof": 0.75}
    calls = []

    def bench(formats, shapes, done, progress, save):
        calls.append((formats, [f"{shape.op} {shape.name}" for shape in shapes], list(done)))
        save(rows[: len(calls)])
        if len(calls) == 1:
            raise RuntimeError("cut off")
        return rows

    monkeypatch.setattr(benchmarking_cuda, "bench_attention_cuda", bench)
    monkeypatch.setattr(benchmarking_cuda, "missing_rivals", lambda: ["FlashAttention 3: not measured: no such module"])
    command = ("bench", "attention", "--device", "cuda", "--shapes", "decode (8|1) x .,[0-9]{3}$", "--json", str(path))
    output = invoke(*command, code=1).output
    assert "cut off" in output
    assert "FlashAttention 3: not measured: no such module\n" in output
    assert read_rows(path) == rows[:1]
    more = ("--plot", str(plot)) if importlib.util.find_spec("matplotlib") else ()
    assert "3.00" in invoke(*command, "--resume", *more).output
    assert read_rows(path) == rows
    assert calls == [(["int4"], ["decode 8 x 8,192", "decode 1 x 1,024"], done) for done in ([], rows[:1])]
    assert not more or "80.0 (75% of the roof)" in plot.read_text()


def test_kernels_that_are_not_there_are_named_and_the_others_timed(monkeypatch):
    """Catches columns that stay empty without a word, and one missing package that costs the other's figures."""
    shape = benchmarking_cuda.SHAPES[0]
    flash = types.SimpleNamespace(FA3_AVAILABLE=False)
    monkeypatch.setattr(benchmarking_cuda, "_vllm_time", lambda shape, bits: float(bits))
    monkeypatch.setattr(benchmarking_cuda, "_fa3_time", lambda shape: 16.0)
    monkeypatch.setitem(sys.modules, benchmarking_cuda._VLLM, types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, benchmarking_cuda._FA3, flash)
    assert benchmarking_cuda.missing_rivals() == ["FlashAttention 3: not measured: this build of vLLM does not have it"]
    assert list(benchmarking_cuda._rival_times(shape).values()) == [None, 4.0, 8.0]
    flash.FA3_AVAILABLE = True
    assert benchmarking_cuda.missing_rivals() == []
    assert list(benchmarking_cuda._rival_times(shape).values()) == [16.0, 4.0, 8.0]
    monkeypatch.setitem(sys.modules, benchmarking_cuda._VLLM, None)  # what an import that failed leaves
    (sentence,) = benchmarking_cuda.missing_rivals()
    assert sentence.startswith("vLLM's own kernels: not measured: import of vllm.v1.attention.ops")
    assert list(benchmarking_cuda._rival_times(shape).values()) == [16.0, None, None]


def test_the_demo_tells_its_whole_story(tiny, tmp_path, monkeypatch):
    """Catches a step that fails after the first minute of a newcomer's time."""
    loaded = load_model(tiny, torch.float32)
    monkeypatch.setattr(demo, "load_model", lambda *_: loaded)
    monkeypatch.setattr(demo, "BENCH_CONTEXT", 64)
    monkeypatch.setattr(demo, "EVAL_WINDOW", 64)
    path = tmp_path / "demo.json"
    output = invoke("demo", "--new-tokens", "4", "--prompt", "the people", "--json", str(path)).output
    for heading in ("Memory", "Speed", "Accuracy", "bytes/token", "tokens/s", "KL mean", "top-1", "cache at 8,192 tokens"):
        assert heading in output
    plain, packed = read_rows(path)
    assert (plain["format"], packed["format"]) == ("none", "int4")
    assert plain["kl_mean"] == 0 < packed["kl_mean"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("eval", "--formats", "int5"), "format: expected one of int4"),
        (("eval", "--formats", ","), "expected a comma-separated list"),
        (("eval", "--dtype", "int8"), "dtype: expected auto or one of"),
        (("eval", "--device", "gpu"), "device: expected cpu, or a GPU of this machine such as cuda, got gpu: "),
        (
            ("generate", "hi", "--device", "cuda:99"),
            "device: expected cpu, or a GPU of this machine such as cuda, got cuda:99: ",
        ),
        (("eval", "--text", "/no/such/text"), "text: expected one of"),
        (("generate", "hi", "--model", "/no/such/model"), "no such file or folder: /no/such/model"),
        (("plan", "--memory", "lots", "--layers", "1", "--kv-heads", "1", "--head-size", "64"), "memory: expected a size"),
        (("plan", "--memory", "1GiB"), "layers: expected at least 1"),
        (("plan", "--memory", "1GiB", "--model", "x", "--layers", "2"), "expected --model or explicit numbers, got both"),
        (("bench", "attention", "--device", "tpu"), "device: expected cpu or cuda, got 'tpu'"),
        (
            ("bench", "attention", "--device", "cuda", "--shapes", "nothing"),
            "shapes: expected a pattern that matches one of",
        ),
        (("bench", "attention", "--plot", "x.svg"), "shapes, resume, plot: expected only with --device cuda"),
    ],
    ids=["format", "list", "dtype", "name", "gpu", "text", "model", "memory", "numbers", "both", "device", "shapes", "plot"],
)
def test_errors_are_one_sentence(arguments, message):
    """Catches tracebacks, and exit code 0 after an error."""
    result = invoke(*arguments, code=1)
    assert message in result.output
    assert result.output.startswith("error: ")
    assert result.output.count("\n") == 1


def test_a_missing_command_line_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=r"the command line needs typer: pip install 'nibblekv\[cli\]'"):
        cli.main()


def test_sizes_are_read_and_written():
    assert [parse_bytes(text) for text in ("24GiB", "80GB", "512M", "1.5k", "7")] == [
        24 * 2**30, 80 * 10**9, 512 * 10**6, 1500, 7,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="memory: expected a size such as 24GiB"):
        parse_bytes("inf")
    assert [format_bytes(size) for size in (10, 2048, 3 * 2**30)] == ["10 B", "2 KiB", "3 GiB"]


def test_bench_serve_prints_figures_and_failures(tmp_path, monkeypatch):
    """Catches options that do not reach the benchmark, and a failed engine that hides the others' figures."""
    path, seen = tmp_path / "serve.json", {}
    figures = {
        "requests": 3,
        "cache_tokens": 4096,
        "prefill_tok_s": 5.0,
        "decode_tok_s": 6.0,
        "total_tok_s": 7.0,
        "ttft_ms": 8.0,
    }
    rows = [{"contender": "int4, nibblekv", **figures}, {"contender": "int4, vLLM", "error": "no GPU"}]
    monkeypatch.setattr(
        "nibblekv.cli.bench.bench_serve",
        lambda model, **options: seen.update(options, model=model) or options["done"](rows) or rows,
    )
    output = invoke(
        "bench", "serve", "-m", "folder", "--requests", "0", "--engine", '{"seed": 1}', "--json", str(path)
    ).output
    assert "4,096" in output
    assert "int4, vLLM failed: no GPU" in output
    assert (seen["model"], seen["requests"], seen["context"], seen["engine"]) == ("folder", None, 8000, {"seed": 1})
    assert [row["contender"] for row in json.loads(path.read_text())["rows"]] == ["int4, nibblekv", "int4, vLLM"]
