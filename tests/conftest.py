"""Settings of the whole suite."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest):
    """Run small tensors on one thread: idle OpenMP threads that spin cost four times the work itself on two busy cores."""
    threads = torch.get_num_threads()
    if request.node.get_closest_marker("models") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
