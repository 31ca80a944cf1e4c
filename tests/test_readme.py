"""Every command and every Python block of the README is run, as it stands or in the reduced form that is written here.

- `nibblekv ...` runs in this process as it stands, but with a random model of a few thousand weights in place of a real one,
  short windows and contexts, and few repetitions (`SMALLER`). Commands of which no small form is listed, and those for a
  GPU, are parsed: the command and all of its options must exist.
- `vllm serve ...` is run whole in tests/vllm/test_server.py, which takes the line from the README. Here: the flag is served.
- `pip install ...` would change the environment: its name and extras must be those of pyproject.toml.
- `make ...` is run as `make --dry-run`.
"""

from __future__ import annotations

import functools
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("transformers")

from tiny_models import save_tiny_model
from typer.testing import CliRunner

import nibblekv
from nibblekv import benchmarking
from nibblekv.cli.app import app
from nibblekv.integrations.vllm.settings import DTYPES
from nibblekv.models import load_model

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PROGRAMS = ("nibblekv", "vllm", "pip", "make", "python")
# Further options of each command that make it short; a later option wins over the README's own.
SMALLER = {
    ("eval",): ["--windows", "1", "--window", "48", "--text", "austen"],
    ("generate",): ["--new-tokens", "2"],
    ("plan",): [],
    ("doctor",): [],
    ("bench", "attention"): [],
    ("bench", "generate"): ["--context", "48", "--new-tokens", "2", "--rounds", "1"],
}
ORDER = [
    "Install",
    "vLLM, in one line",
    "transformers, in three lines",
    "Results",
    "How it works",
    "What is supported",
    "Limits",
    "Cite",
    "Develop",
    "Licence",
]


def blocks() -> list[tuple[str, str]]:
    """Return (language, text) of the fenced blocks."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """Return the command lines of unlabelled blocks and of code spans, without their comments."""
    lines = [line.partition(" #")[0].strip() for language, text in blocks() if not language for line in text.splitlines()]
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.DOTALL | re.MULTILINE)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    spans = [span for span in spans if span.split()[0] in PROGRAMS and " " in span]
    return list(dict.fromkeys([line for line in lines if line] + spans))


def test_the_readme_is_in_the_order_of_a_newcomers_questions():
    assert re.findall(r"^## (.*)$", README, re.MULTILINE) == ORDER
    first = README.split("\n\n")[1]
    assert first.startswith("**")
    assert first.count(". ") == 0, "what it is, in one sentence"


def test_every_command_is_of_a_program_that_is_run_here():
    """Catches a command that nobody tries: a block without a language, or a span that is new."""
    assert commands()
    assert {command.split()[0] for command in commands()} <= set(PROGRAMS)
    assert {language for language, _ in blocks()} <= {"", "python", "bibtex"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("nibblekv ")])
def test_nibblekv_commands(command: str, tiny: str, monkeypatch: pytest.MonkeyPatch):
    """Catches an option, a format or a subcommand that the command line has lost."""
    arguments = shlex.split(command)[1:]
    words = tuple(arguments[: next((i for i, word in enumerate(arguments) if word.startswith("-")), len(arguments))])
    if words not in SMALLER or "cuda" in arguments:
        shown = CliRunner().invoke(app, [*words[:2], "--help"], terminal_width=200)
        assert shown.exit_code == 0, shown.output
        assert all(option in shown.output for option in arguments if option.startswith("--"))
        return
    if words == ("bench", "attention"):
        short = functools.partial(
            benchmarking.bench_attention_cpu, contexts=(64,), threads=(1,), prefill_tokens=32, repeats=1
        )
        monkeypatch.setattr(benchmarking, "bench_attention_cpu", short)
    if "--model" in arguments:
        arguments[arguments.index("--model") + 1] = tiny
    done = CliRunner().invoke(app, [*arguments, *SMALLER[words]])
    assert done.exit_code == 0, done.output + repr(done.exception)
    if "--formats" in arguments:
        for name in arguments[arguments.index("--formats") + 1].split(","):
            assert name in done.output


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("pip ")])
def test_pip_commands(command: str):
    """Catches an extra that is not there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    words = shlex.split(command)
    assert words[:2] == ["pip", "install"]
    for word in words[2:]:
        name, extras = re.fullmatch(r"([\w-]+)(?:\[([\w,]+)\])?", word).groups()
        assert name == project["name"]
        assert set((extras or "").split(",")) - {""} <= set(project["optional-dependencies"])


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("make ")])
def test_make_commands(command: str):
    """Catches a target that is not there."""
    words = shlex.split(command)
    done = subprocess.run([*words, "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_vllm_commands():
    """Catches a flag that the plugin does not serve; tests/vllm/test_server.py starts this very server."""
    (command,) = [c for c in commands() if c.startswith("vllm ")]
    words = shlex.split(command)
    assert words[:3] == ["vllm", "serve", "MODEL"]
    assert words[3:] == ["--kv-cache-dtype", "int4_per_token_head"]
    assert words[4] in DTYPES


@pytest.mark.parametrize("code", [text for language, text in blocks() if language == "python"])
def test_python_blocks(code: str, tiny: str):
    """Catches an import or an argument that has changed. `model` and `inputs` are those of a tiny model."""
    model, tokenizer = load_model(tiny, torch.float32)
    names = {"model": model, "inputs": {"input_ids": torch.tensor([tokenizer("the people of").input_ids])}}
    model.generation_config.max_new_tokens = 3
    exec(compile(code, "README.md", "exec"), names)
    assert names["cache"].get_seq_length() > 3


def test_the_citation_names_this_version():
    (entry,) = [text for language, text in blocks() if language == "bibtex"]
    assert f"version = {{{nibblekv.__version__}}}" in entry
