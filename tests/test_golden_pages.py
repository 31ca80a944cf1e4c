"""Pages written by the first release of each format and version must decode for ever."""

from __future__ import annotations

import json
import math

import pytest
import torch
from golden_pages import BLOCKS, FOLDER, WRITTEN, golden_file, write_pages

from nibblekv import FORMATS, KVCacheLayout, gather_and_dequantize

FILES = sorted(FOLDER.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=[p.stem for p in FILES])
def test_golden_pages_decode_to_what_they_did(path):
    """Catches any change of bits, signs, matrices or page arrangement that kept its version number."""
    golden = json.loads(path.read_text())
    assert golden["version"] == FORMATS[golden["format"]].version
    layout = KVCacheLayout.create(
        golden["format"],
        num_kv_heads=1,
        head_size=golden["head_size"],
        head_size_v=golden["head_size_v"],
        page=golden["page"],
    )
    kv_cache = torch.tensor([list(bytes.fromhex(page)) for page in golden["pages"]], dtype=torch.uint8)
    kv_cache = kv_cache.view(layout.shape(BLOCKS))
    key, value = gather_and_dequantize(kv_cache, torch.arange(BLOCKS), BLOCKS * layout.block_size, layout)
    for slot, rows in golden["slots"].items():
        for read, expected in ((key[int(slot), 0], rows["key"]), (value[int(slot), 0], rows["value"])):
            tolerance = 1e-6 * max(map(abs, expected))
            assert all(
                math.isclose(a, b, rel_tol=0, abs_tol=tolerance) for a, b in zip(read.tolist(), expected, strict=True)
            )
    assert any(golden["slots"]["19"]["key"])
    assert not key[WRITTEN:].any()
    if path == golden_file(layout.k_format):  # and today's encoder still writes these bytes
        assert torch.equal(write_pages(layout), kv_cache)


def test_every_format_has_a_golden_file():
    """Catches a new format or version without one: `python tests/golden_pages.py FORMAT` writes it."""
    assert set(FILES) >= {golden_file(f) for f in FORMATS.values()}


def test_golden_files_stay_small():
    assert all(path.stat().st_size < 16_000 for path in FILES)
