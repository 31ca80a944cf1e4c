"""A short differential fuzz of every backend that serves CPU tensors, and proof that the fuzzer sees damage."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import fuzz as fuzz_file
import pytest
import torch
from batches import usable_backends
from fuzz import Machine, fuzz, run, shrink

from nibblekv.backends import reference

SECONDS = 10.0


@pytest.mark.parametrize("backend", usable_backends())
def test_random_calls_agree_with_a_dictionary_of_rows(backend: str):
    """Catches what no listed case holds; `make fuzz SECONDS=600` runs longer. The seed is in the message."""
    made, failure = fuzz(backend, SECONDS / len(usable_backends()), seed=20_000)
    assert failure is None, str(failure)
    assert made > 0


@pytest.mark.parametrize("damage", ["another row", "half a step", "ignored window", "0 * NaN"])
def test_the_fuzzer_finds(damage: str, monkeypatch: pytest.MonkeyPatch):
    """Catches a fuzzer that compares nothing: each kind of damage is found, and shrunk to a few calls."""
    break_backend(reference, damage, monkeypatch)
    _, finding = fuzz("reference", 60.0, seed=1)
    assert finding is not None
    assert len(finding.calls) <= 20
    assert run("reference", finding.seed, [])[0] is None


def break_backend(module: ModuleType, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write, mask, encode, attend = module.reshape_and_cache, module.visible_mask, module.encode_rows, module._attend

    def write_and_spoil(key, value, kv_cache, slot_mapping, layout):
        write(key, value, kv_cache, slot_mapping, layout)
        kv_cache[0, 0].flatten()[:1].bitwise_xor_(1)

    match damage:
        case "another row":
            monkeypatch.setattr(module, "reshape_and_cache", write_and_spoil)
        case "half a step":
            monkeypatch.setattr(
                module, "encode_rows", lambda y, *rest: encode(y + 0.02 * y.abs().amax(-1, keepdim=True), *rest)
            )
        case "ignored window":
            monkeypatch.setattr(
                module, "visible_mask", lambda q, k, b, o: mask(q, k, b, o) | ((k <= q[:, None]) & (o.sliding_window > 0))
            )
        case "0 * NaN":
            monkeypatch.setattr(
                module, "_attend", lambda q, k, v, *rest: attend(q, k, v + 0 * v.sum(0, keepdim=True), *rest)
            )


def test_processes_sum_up_and_one_that_dies_is_a_finding(tmp_path, monkeypatch):
    """Catches calls that are counted once for all processes, equal seeds, and a crash that passes for no finding."""
    rows = [{"backend": "reference", "calls": 7, "findings": []}, {"backend": "cpu", "calls": 1, "findings": ["one"]}]
    seeds = []

    class Process:
        def __init__(self, command):
            seeds.append(int(command[command.index("--seed") + 1]))
            assert command[command.index("--backend") + 1] == "both"
            if len(seeds) < 3:
                Path(command[command.index("--json") + 1]).write_text(json.dumps({"rows": rows}))

            self.code = 1 if len(seeds) < 3 else -11

        def wait(self):
            return self.code

    monkeypatch.setattr(fuzz_file.subprocess, "Popen", Process)
    *_, found = fuzz_file.fuzz_in_parallel(3, 1.0, 5, ["--backend", "both"])
    assert len(set(seeds)) == 3
    assert found[:2] == [
        {"backend": "reference", "calls": 14, "findings": []},
        {"backend": "cpu", "calls": 2, "findings": ["one", "one"]},
    ]
    assert found[2]["findings"][0]["failure"] == f"the process of seeds from {seeds[2]} ended with -11"


def test_a_summary_is_enough_to_run_its_findings_again(tmp_path, monkeypatch, capsys):
    """Catches a finding whose backend, seed or calls stay on the machine that found it."""
    summary = tmp_path / "fuzz.json"
    arguments = ["fuzz.py", "--backend", "reference", "--seconds", "30", "--seed", "1", "--json", str(summary)]
    monkeypatch.setattr("sys.argv", arguments)
    with monkeypatch.context() as patch:
        break_backend(reference, "another row", patch)
        assert fuzz_file.main() == 1
        (finding,) = json.loads(summary.read_text())["rows"][0]["findings"]
        assert finding["backend"] == "reference"
        assert finding["calls"]
        assert finding["failure"].strip().splitlines()[-1] in capsys.readouterr().out
        monkeypatch.setattr("sys.argv", ["fuzz.py", "--replay", str(summary)])
        assert fuzz_file.main() == 1
        again = capsys.readouterr().out
        assert f"seed {finding['seed']}" in again
        assert finding["failure"].strip().splitlines()[-1] in again
    assert fuzz_file.main() == 0


def test_a_run_that_is_cut_short_leaves_what_it_found(tmp_path, monkeypatch):
    """Catches a summary that is written at the end alone."""
    summary = tmp_path / "fuzz.json"

    def rows(*_):
        yield {"backend": "cpu", "calls": 3, "findings": ["one"]}
        raise KeyboardInterrupt

    monkeypatch.setattr(fuzz_file, "fuzz_backends", rows)
    monkeypatch.setattr("sys.argv", ["fuzz.py", "--json", str(summary)])
    with pytest.raises(KeyboardInterrupt):
        fuzz_file.main()
    assert json.loads(summary.read_text())["findings"] == 1


def test_machines_of_equal_seed_are_equal():
    """Catches a run that its printed seed does not reproduce."""
    calls = [("grow", 1), ("grow", 2), ("attend", 3), ("fork", 4), ("free", 5), ("crop", 6), ("refuse", 7)]
    first, second = Machine("reference", 5), Machine("reference", 5)
    for call, seed in calls:
        first.step(call, seed)
        second.step(call, seed)
    assert torch.equal(first.allocation, second.allocation)


def test_shrink_keeps_what_fails():
    """Catches a shrinker that returns a list which passes."""
    assert run("reference", 1, [("grow", 1), ("unknown", 2), ("grow", 3)])[0] is not None
    assert shrink("reference", 1, [("grow", 1), ("unknown", 2), ("grow", 3)]) == [("unknown", 2)]


def test_shrink_ends_in_time():
    """Catches a finding of interpreted kernels that is shrunk until the machine is taken away, and never told."""
    calls = [("grow", 1), ("unknown", 2), ("grow", 3)]
    assert shrink("reference", 1, calls, end=0.0) == calls
