"""Pages of `int4_per_token_head` are vLLM's: each implementation reads what the other wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import environment


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the comparisons of interop.py, made in a process whose triton is the interpreter."""
    result = tmp_path_factory.mktemp("interop") / "result.json"
    script = Path(__file__).with_name("interop.py")
    done = subprocess.run(
        [sys.executable, str(script), str(result)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(result.read_text())


def test_both_write_the_same_bytes(cases):
    """Catches another nibble order, sign vector, zero point or word. Rows of round values may round the other way."""
    for case in cases:
        assert case["bytes_written"] > 10_000
        assert case["bytes_differing"] < 0.005 * case["bytes_written"], case
        assert case["rows_error"] < 5e-3, case


def test_each_reads_the_pages_of_the_other(cases):
    """Catches a zero point, a scale or a rotation that means something else to vLLM's kernel."""
    assert {(case["head_size"], case["block_order"]) for case in cases} == {(64, "HND"), (128, "NHD"), (96, "HND")}
    for case in cases:
        assert case["norm"] > 10
        assert case["vllm_reads_ours"] < 1e-3, case
        assert case["we_read_theirs"] < 1e-3, case
