"""What vLLM's own tests of its per-token-head caches ask of its kernels, asked of our implementations, on tighter bounds.

There: scales and round trips of the write, padding that is skipped, attention over a quantized cache; 0.1 absolute error.
"""

from __future__ import annotations

import pytest
import torch
from test_attention import IMPLS, LAYER, error, make_impl, make_step, no_engine, padded_cache, run_step  # noqa: F401

from nibblekv import AttentionOptions
from nibblekv.formats import decode_rows, get_format, unpack_scale_word
from nibblekv.rotation import rotate

HEAD_SIZE, BLOCK_SIZE, POISON = 64, 16, 0xFF
# Largest value of a code, and the error of a stored value as a share of its scale and of itself.
LIMITS = {
    "int4_per_token_head": (15, 0.51, 0.0),
    "int8_per_token_head": (127, 0.501, 0.0),
    "fp8_per_token_head": (448, 2.0**-9, 2.0**-4),
}


@pytest.fixture(params=LIMITS)
def dtype(request, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a dtype, stored as the bytes that vLLM writes under its name."""
    monkeypatch.setenv("NIBBLEKV_FORMAT", "int4_per_token_head")
    return request.param


def write(impl, tokens: int, slots: torch.Tensor, scale: float = 1.0):
    """Write random bfloat16 rows into a poisoned cache; return (key, value, cache)."""
    generator = torch.Generator().manual_seed(0)
    key, value = ((torch.randn(tokens, 2, HEAD_SIZE, generator=generator) * scale).to(torch.bfloat16) for _ in range(2))
    slot_bytes = (HEAD_SIZE if impl.nibblekv_dtype.startswith("int4") else 2 * HEAD_SIZE) + 8
    cache = padded_cache(impl, slot_bytes)
    impl.do_kv_cache_update(LAYER, key, value, cache, slots)
    return key, value, cache


@pytest.mark.parametrize("kind", list(IMPLS))
@pytest.mark.parametrize("tokens", [1, 7, 42])
@pytest.mark.parametrize("scale", [0.5, 100.0])
def test_scales_and_round_trip_of_a_write(kind, dtype, tokens, scale):
    """Catches wrong scales, swapped heads or slots, and rows that are off by more than their own step."""
    slots = torch.randperm(16 * BLOCK_SIZE, generator=torch.Generator().manual_seed(tokens))[:tokens]
    impl = make_impl(kind, dtype)
    key, value, cache = write(impl, tokens, slots, scale)
    views = impl.nibblekv_layout(LAYER, cache).views(cache)
    fmt, (code_max, of_scale, of_value) = get_format(dtype), LIMITS[dtype]
    block, row = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    for rows, codes, words in (
        (key, views.key_cache, views.k_scale_cache),
        (value, views.value_cache, views.v_scale_cache),
    ):
        scales, _ = unpack_scale_word(words[block, row], fmt)
        stored = decode_rows(codes[block, row], words[block, row], fmt).double()
        exact = rows.double()
        if fmt.rotation != "none":
            exact = rotate(rows.float(), fmt.rotation).double()
            span = exact.amax(-1).clamp(min=0) - exact.amin(-1).clamp(max=0)
        else:
            span = exact.abs().amax(-1)
        assert torch.allclose(scales.double(), span / code_max, rtol=1e-4)
        assert ((stored - exact).abs() <= of_scale * scales[..., None].double() + of_value * exact.abs()).all()


@pytest.mark.parametrize("kind", list(IMPLS))
def test_padding_is_skipped_and_nothing_else_is_touched(kind, dtype):
    """Catches a write of slot -1, which lands in the last row of the cache, and a write beside its row."""
    impl = make_impl(kind, dtype)
    _, _, cache = write(impl, 4, torch.tensor([0, -1, 1, -1]))
    written = (cache != POISON).any(-1)
    assert written[0, :, :2].all()
    assert int(written.sum()) == 2 * 2


@pytest.mark.parametrize("kind", list(IMPLS))
def test_attention_over_the_stored_rows(kind, dtype):
    """Catches scales that are applied to the wrong row; vLLM's bound of 0.5 lets an output of zeros pass."""
    output, expected = run_step(make_impl(kind, dtype), make_step(), LAYER)
    reference = expected(AttentionOptions(HEAD_SIZE**-0.5))
    assert error(torch.zeros_like(output), reference) > 0.9
    assert error(output, reference) < 1e-3
