"""The table of docs/cases.md names tests that exist; and the cases that no other file holds."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import torch
from batches import Batch, usable_backends
from hypothesis import given, settings
from hypothesis import strategies as st

from nibblekv import FORMATS, KVCacheLayout, reshape_and_cache
from nibblekv.backends import get_backend

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "cases.md").read_text().partition("## Broken once")[0]
ROWS = re.findall(r"^\| (\d+) \| (.+?) \| (.+) \|$", PAGE, re.MULTILINE)
NUM_CASES = 30


def test_every_case_has_its_line():
    assert [int(number) for number, _, _ in ROWS] == list(range(1, NUM_CASES + 1))


@pytest.mark.parametrize(("number", "tests"), [(number, tests) for number, _, tests in ROWS])
def test_named_tests_exist(number: str, tests: str):
    """Catches a case whose test was renamed or deleted."""
    names = re.findall(r"`([^`]+)`", tests)
    assert names
    for name in names:
        file, _, function = name.partition("::")
        tree = ast.parse((TESTS / file).read_text())
        assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, name


@pytest.mark.parametrize("backend", usable_backends())
@settings(deadline=None, max_examples=25, derandomize=True)
@given(data=st.data())
def test_large_float16_tensors_give_finite_attention(backend: str, data: st.DataObject):
    """Case 2. Catches a sum of head_size times a value that is held in float16, in the query, the rows or the output.

    What a format makes of 4e4 may itself be beyond the largest float16, 65504: an output must be finite where float32 is
    below 6.4e4.
    """
    layout = KVCacheLayout.create(
        data.draw(st.sampled_from(list(FORMATS))),
        num_kv_heads=data.draw(st.integers(1, 2)),
        head_size=data.draw(st.sampled_from([32, 64, 80, 128, 256])),
    )
    if get_backend(backend).supports(layout, None, torch.device("cpu")) is not None:
        pytest.skip(f"{backend} does not serve {layout.k_format.name}")
    length = data.draw(st.integers(1, 40))
    batch = Batch.make(layout, [length], [min(length, 2)], layout.num_kv_heads * 2, dtype=torch.float16)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    signs = torch.randn(length, layout.num_kv_heads, layout.head_size, generator=generator).sign()
    pattern = {"alike": torch.ones_like(signs), "random": signs, "one row": signs[:1].expand_as(signs)}
    value = (pattern[data.draw(st.sampled_from(list(pattern)))] * 4e4).to(torch.float16)
    key = (pattern[data.draw(st.sampled_from(list(pattern)))] * data.draw(st.sampled_from([1.0, 6e4]))).to(torch.float16)
    position = torch.arange(length)
    slots = batch.block_table[0].long()[position // layout.block_size] * layout.block_size + position % layout.block_size
    reshape_and_cache(key, value, batch.kv_cache, slots, layout, backend=backend)
    batch.query = (batch.query.sign() * data.draw(st.sampled_from([1.0, 6e4]))).contiguous()
    scale = data.draw(st.sampled_from([1e-9, 1e-3]))
    out = batch.attend(backend, softmax_scale=scale)
    batch.query = batch.query.float()
    held = batch.attend("reference", softmax_scale=scale).abs() < 6.4e4
    assert held.double().mean() > 0.7
    assert out[held].isfinite().all()
    assert out[held].abs().max() > 100


def test_committed_decode_figures_are_faster_than_sixteen_bits():
    """Case 30. Catches figures of a slower build committed as results: every decode row beats raw 16- or 32-bit tensors."""
    record = json.loads((TESTS.parent / "benchmarks" / "results" / "cpu-attention.json").read_text())
    ratios = [row["ratio"] for row in record["rows"] if row["op"] == "decode"]
    assert ratios
    assert all(ratio is not None and ratio > 1 for ratio in ratios)
