"""A short soak; `make soak MINUTES=60` runs a long one."""

from __future__ import annotations

import os

import pytest
from conftest import environment
from soak import soak

MINUTES = float(os.environ.get("NIBBLEKV_SOAK_MINUTES", "0.5"))


@pytest.mark.soak
def test_mixed_requests_give_their_solo_answers_and_leave_nothing(tiny_model):
    """Case 24. Catches stale bytes in a block that was shared, evicted or preempted, and blocks that nobody gives back."""
    figures = soak(tiny_model, MINUTES, seed=1, environment=environment())
    assert figures["finished"] + figures["cancelled"] == figures["requests"]
    assert figures["finished"] > 20
    assert figures["prefix_cache_hits"] > 0
    assert figures["mib_last"] < figures["mib_settled"] + 64
