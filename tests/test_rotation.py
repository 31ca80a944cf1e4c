"""Rotations: orthonormal for every head size, equal to an independent construction, in full precision."""

from __future__ import annotations

import math

import pytest
import torch

from nibblekv.rotation import inverse_gain, rotate, rotation_factors, rotation_matrix, rotation_signs, unrotate

HEAD_SIZES = list(range(32, 513, 8))
# The generator that vLLM draws its signs from.
SEED = 0x9E3779B9


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_full_rotation_is_orthonormal_and_mixes_the_whole_head(head_size: int):
    """Case 4. Catches a wrong Paley or Hartley factor, and 16-wide blocks: no entry may exceed sqrt(2 / D), so that one
    outlier spreads over all D outputs (Hadamard: exactly sqrt(1 / D) everywhere)."""
    r = rotation_matrix("full", head_size)
    assert r.dtype == torch.float64
    torch.testing.assert_close(r @ r.T, torch.eye(head_size, dtype=torch.float64), rtol=0, atol=1e-12)
    assert r.abs().max() <= math.sqrt(2 / head_size) + 1e-15
    hadamard = rotation_factors("full", head_size)[1].abs().eq(1).all()
    assert hadamard == (head_size // (head_size & -head_size) not in {13, 23, 25, 29, 39, 43, 47, 59, 61})
    if hadamard:
        torch.testing.assert_close(r.abs(), torch.full_like(r, head_size**-0.5), rtol=1e-12, atol=0)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_block_rotation_equals_a_butterfly_and_has_its_stated_gain(head_size: int):
    """Catches another order of the Hadamard matrix or other blocks than the pages of vLLM have."""
    block = head_size & -head_size
    x = torch.randn(3, head_size, dtype=torch.float64, generator=torch.Generator().manual_seed(head_size))
    y = (x * rotation_signs("block", head_size)).reshape(3, -1, block).clone()
    half = 1
    while half < block:  # in-place butterflies: pairs (i, i + half) become (sum, difference)
        pairs = y.reshape(3, -1, block // (2 * half), 2, half)
        y = torch.stack((pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), -2)
        half *= 2
    r = rotation_matrix("block", head_size)
    torch.testing.assert_close(x @ r.T, y.reshape(3, head_size), rtol=0, atol=1e-11)
    torch.testing.assert_close(r @ r.T, block * torch.eye(head_size, dtype=torch.float64), rtol=0, atol=0)
    assert inverse_gain("block", head_size) == 1 / block
    assert inverse_gain("full", head_size) == inverse_gain("none", head_size) == 1


@pytest.mark.parametrize("head_size", [32, 64, 128, 256, 512, 80, 96, 112, 192, 384])
def test_signs_are_the_ones_that_vllm_draws(head_size: int):
    """Case 6. Catches a changed constant: each power-of-two block restarts the draw, as vLLM's does."""
    block = head_size & -head_size
    fair = torch.bernoulli(torch.full((block,), 0.5), generator=torch.Generator().manual_seed(SEED))
    assert torch.equal(rotation_signs("block", head_size), (2 * fair - 1).double().repeat(head_size // block))


def test_signs_of_the_full_rotation_are_one_draw_over_the_head():
    fair = torch.bernoulli(torch.full((512,), 0.5), generator=torch.Generator().manual_seed(SEED))
    for head_size in HEAD_SIZES:
        assert torch.equal(rotation_signs("full", head_size), (2 * fair - 1)[:head_size].double())


def test_no_rotation_is_the_identity():
    x = torch.randn(2, 40)
    assert torch.equal(rotate(x, "none"), x)
    assert torch.equal(unrotate(x, "none"), x)
    assert torch.equal(rotation_matrix("none", 40), torch.eye(40, dtype=torch.float64))
    assert torch.equal(rotation_signs("none", 40), torch.ones(40, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["none", "full", "block"])
@pytest.mark.parametrize("head_size", [32, 56, 96, 104, 128, 168, 512])
def test_factors_rebuild_the_matrix(kind: str, head_size: int):
    """Catches factors (what kernels build their butterflies from) that disagree with the matrix."""
    p, base, outer = rotation_factors(kind, head_size)
    sylvester = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(p)] for i in range(p)], dtype=torch.float64)
    if outer:
        mixing = torch.kron(sylvester, base) / (1 if kind == "none" else head_size**0.5)
        mixing = torch.eye(head_size, dtype=torch.float64) if kind == "none" else mixing
    else:
        mixing = torch.block_diag(*[sylvester] * (head_size // p))
    torch.testing.assert_close(
        mixing * rotation_signs(kind, head_size), rotation_matrix(kind, head_size), rtol=0, atol=1e-14
    )


@pytest.mark.parametrize("kind", ["full", "block"])
@pytest.mark.parametrize("head_size", [32, 80, 104, 128, 512])
@pytest.mark.parametrize("ambient", ["plain", "autocast", "tf32"])
def test_round_trip_keeps_float32_accuracy(kind: str, head_size: int, ambient: str):
    """Case 5. Catches a silent round trip through bfloat16 (3e-3) and TF32: 1e-6 relative to the row's norm is allowed."""
    x = torch.randn(17, head_size, generator=torch.Generator().manual_seed(3)) * torch.logspace(-6, 4, 17)[:, None]
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium" if ambient == "tf32" else "highest")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=ambient == "autocast"):
            y = rotate(x, kind)
            back = unrotate(y, kind)
    finally:
        torch.set_float32_matmul_precision(before)
    exact = x.double() @ rotation_matrix(kind, head_size).T
    assert y.dtype == back.dtype == torch.float32
    assert ((y - exact).norm(dim=-1) <= 1e-6 * exact.norm(dim=-1)).all()
    assert ((back - x).norm(dim=-1) <= 1e-6 * x.norm(dim=-1)).all()


@pytest.mark.parametrize("kind", ["none", "full", "block"])
def test_half_precision_rows_are_rotated_as_the_float32_that_they_are(kind: str):
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.randn(5, 96).to(dtype)
        assert torch.equal(rotate(x, kind), rotate(x.float(), kind))


def test_a_row_does_not_depend_on_its_batch():
    """Case 16. Catches a float32 matrix product, whose order of summation depends on the number of rows."""
    x = torch.randn(67, 128, generator=torch.Generator().manual_seed(5))
    together = rotate(x, "full")
    for size in (1, 2, 7):
        assert torch.equal(torch.cat([rotate(part, "full") for part in x.split(size)]), together)


def test_ambient_torch_state_does_not_reach_the_cached_matrices():
    """Catches matrices built on the default device of the first caller (`meta` while a model loads), in its default dtype,
    or as inference tensors that a later call with gradients cannot use."""
    rotation_matrix.cache_clear()
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"), torch.inference_mode():
            for kind in ("none", "full", "block"):
                for head_size in (72, 104, 120, 128):
                    matrix = rotation_matrix(kind, head_size)
                    assert (matrix.device.type, matrix.dtype) == ("cpu", torch.float64)
                    assert not matrix.is_inference()
                    assert rotation_signs(kind, head_size).device.type == "cpu"
                    assert rotation_factors(kind, head_size)[1].device.type == "cpu"
    finally:
        torch.set_default_dtype(default)
        rotation_matrix.cache_clear()
