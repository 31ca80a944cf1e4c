"""Settings of the whole suite."""

from __future__ import annotations

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --few."""
    text = "run N parameter sets of every test, spread over its list: other sets rarely run other lines (make coverage)"
    parser.addoption("--few", type=int, default=None, metavar="N", help=text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect all but --few parameter sets of every test."""
    few = config.getoption("--few")
    if few is None:
        return
    sets: dict[str, list[pytest.Item]] = {}
    for item in items:
        sets.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {id(own[i * len(own) // min(few, len(own))]) for own in sets.values() for i in range(min(few, len(own)))}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest):
    """Run small tensors on one thread: idle OpenMP threads that spin cost four times the work itself on two busy cores."""
    threads = torch.get_num_threads()
    if request.node.get_closest_marker("models") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
