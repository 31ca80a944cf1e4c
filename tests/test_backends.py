"""How a backend is chosen: a named one is never replaced, one that `auto` passes over is named in a warning."""

from __future__ import annotations

import warnings

import pytest
import torch

from nibblekv import KVCacheLayout
from nibblekv.backends import _warn_once, available_backends, get_backend, reference, select_backend

LAYOUT = KVCacheLayout.create("int4", num_kv_heads=1, head_size=64)
CPU = torch.device("cpu")


def test_auto_names_the_backend_that_it_passes_over_once(monkeypatch):
    """Catches a slow fallback that nobody is told about."""
    _warn_once.cache_clear()
    monkeypatch.setattr(get_backend("cpu"), "unavailable_reason", lambda: "no compiler was there")
    with pytest.warns(UserWarning, match=r"'cpu'.*no compiler was there"):
        assert select_backend("auto", LAYOUT, None, CPU) is reference
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select_backend("auto", LAYOUT, None, CPU) is reference
    _warn_once.cache_clear()


def test_a_named_backend_is_used_or_refused(monkeypatch):
    """Catches an explicit choice that quietly becomes another."""
    assert select_backend("reference", LAYOUT, None, CPU) is reference
    monkeypatch.setattr(get_backend("cpu"), "unavailable_reason", lambda: "no compiler was there")
    with pytest.raises(NotImplementedError, match="no compiler was there"):
        select_backend("cpu", LAYOUT, None, CPU)
    with pytest.raises(ValueError, match="expected 'auto' or one of triton, cpu, reference, got 'cdna'"):
        get_backend("cdna")


def test_every_backend_says_whether_it_can_run():
    """Catches a table row without a module, and a reason that is no sentence."""
    reasons = available_backends()
    assert list(reasons) == ["triton", "cpu", "reference"]
    assert reasons["reference"] is None
    assert all(reason is None or len(reason.split()) > 3 for reason in reasons.values())
