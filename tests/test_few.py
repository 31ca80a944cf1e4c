"""The option --few, by which a run under coverage takes a part of the suite."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace


def test_few_keeps_every_test_and_spreads_its_sets():
    """Catches a test that is left out whole, and sets that are all taken from the start of a list."""
    names = ["a.py::one", *[f"a.py::many[{i}]" for i in range(10)], "b.py::many[x]", "b.py::many[y]"]
    items, left_out = [SimpleNamespace(nodeid=name) for name in names], []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    config = SimpleNamespace(getoption=lambda name: {"--few": 3}[name], hook=hook)
    runpy.run_path(str(Path(__file__).with_name("conftest.py")))["pytest_collection_modifyitems"](config, items)
    kept = [item.nodeid for item in items]
    assert kept == ["a.py::one", "a.py::many[0]", "a.py::many[3]", "a.py::many[6]", "b.py::many[x]", "b.py::many[y]"]
    assert len(left_out) == 7
