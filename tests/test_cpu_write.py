"""The CPU kernels' write against the format's own encoder, on every instruction set of the machine."""

from __future__ import annotations

import pytest
import torch
from batches import POISON
from test_cpu_attention import instruction_set  # noqa: F401  (a fixture)

from nibblekv import FORMATS, KVCacheLayout, reshape_and_cache
from nibblekv.backends import cpu
from nibblekv.formats import decode_rows, unpack_codes, unpack_scale_word
from nibblekv.rotation import rotate, rotation_matrix

pytestmark = [
    pytest.mark.skipif(cpu.unavailable_reason() is not None, reason=str(cpu.unavailable_reason())),
    pytest.mark.usefixtures("instruction_set"),
]


def write(
    layout: KVCacheLayout, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, pages: int, backend: str = "cpu"
) -> torch.Tensor:
    kv_cache = layout.allocate(pages)
    kv_cache.fill_(POISON)
    reshape_and_cache(key, value, kv_cache, slots, layout, backend=backend)
    return kv_cache


def rows_of(layout: KVCacheLayout, kv_cache: torch.Tensor, slots: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    views = layout.views(kv_cache)
    page, slot = slots // layout.block_size, slots % layout.block_size
    sides = ((views.key_cache, views.k_scale_cache), (views.value_cache, views.v_scale_cache))
    return [(codes[page, slot], words[page, slot]) for codes, words in sides]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_size", [32, 40, 64, 80, 96, 128, 200, 256, 504, 512])
@pytest.mark.parametrize("format", list(FORMATS))
def test_equals_the_reference(format: str, head_size: int, dtype: torch.dtype):
    """Where nothing is rotated the bytes are equal; else a code may differ by one where sums were taken in another order."""
    layout = KVCacheLayout.create(format, num_kv_heads=3, head_size=head_size)
    gen = torch.Generator().manual_seed(head_size)
    key, value = ((torch.randn(29, 3, head_size, generator=gen) * 3).to(dtype) for _ in range(2))
    slots = torch.randperm(48, generator=gen)[:29]
    mine, theirs = (write(layout, key, value, slots, 3, backend) for backend in ("cpu", "reference"))
    untouched = torch.ones(48, dtype=torch.bool)
    untouched[slots] = False
    for (codes, words), (codes_r, words_r), (codes_x, words_x) in zip(
        rows_of(layout, mine, slots), rows_of(layout, theirs, slots),
        rows_of(layout, mine, untouched.nonzero().flatten()), strict=True,
    ):  # fmt: skip
        assert (codes_x == POISON).all()
        assert (words_x == -1).all()
        if layout.k_format.rotation == "none":
            assert torch.equal(codes, codes_r)
            assert torch.equal(words, words_r)
            continue
        steps = (unpack_codes(codes, layout.k_format) - unpack_codes(codes_r, layout.k_format)).abs()
        assert steps.max() <= 1
        assert (steps > 0).float().mean() < 5e-3
        same = (codes == codes_r).all(-1)  # a key's word depends on its codes
        scale, bias = unpack_scale_word(words[same], layout.k_format)
        scale_r, bias_r = unpack_scale_word(words_r[same], layout.k_format)
        torch.testing.assert_close(scale, scale_r, rtol=2**-7, atol=0)
        torch.testing.assert_close(bias, bias_r, rtol=2**-7, atol=1e-6)
        assert (words != words_r)[same].float().mean() < 0.05 or layout.k_format.word != "scale_min"
        assert codes.float().std() > 10  # not a constant


@pytest.mark.parametrize("head_size", [40, 64, 96, 128, 504])
@pytest.mark.parametrize("channel", [None, 0, 1, 39])
def test_half_a_step_from_the_rotated_row(head_size: int, channel: int | None):
    """Case 1: |R x - R x_hat| <= scale / 2, wherever an outlier stands. Catches a clamp, a wrong sign or a wrong factor."""
    layout = KVCacheLayout.create("int4", num_kv_heads=1, head_size=head_size)
    x = torch.randn(64, 1, head_size, generator=torch.Generator().manual_seed(1))
    if channel is not None:
        x[..., channel] += 141.0
    (_, (codes, words)) = rows_of(layout, write(layout, x, x, torch.arange(64), 4), torch.arange(64))
    rotated = x.double() @ rotation_matrix("full", head_size).T
    error = (decode_rows(codes, words, layout.k_format) - rotated).abs()
    scale, _ = unpack_scale_word(words, layout.k_format)
    assert (error <= scale[..., None] * 0.5 + 1e-4).all()
    assert (scale < (rotated.max() - rotated.min()) / 8).all()


@pytest.mark.parametrize("format", list(FORMATS))
def test_special_rows(format: str):
    """Cases 2 and 3: rows of zeros, constants, one value, the largest float16, subnormals, NaN and Inf, all in one call."""
    layout = KVCacheLayout.create(format, num_kv_heads=1, head_size=64)
    fmt = layout.k_format
    rows = torch.zeros(9, 1, 64)
    rows[1] = 3.0
    rows[2, 0, 0] = 3.0
    rows[3] = 65504.0
    rows[4] = 1e-40
    rows[5, 0, 9] = torch.nan
    rows[6, 0, 63] = -torch.inf
    rows[7] = -rotate(torch.ones(64), fmt.rotation)
    rows[8] = 3e38
    slots = torch.arange(9)
    mine, theirs = (rows_of(layout, write(layout, rows, rows, slots, 1, b), slots)[0] for b in ("cpu", "reference"))
    decoded, expected = (decode_rows(*side, fmt)[:, 0] for side in (mine, theirs))
    assert torch.equal(decoded.isnan().all(-1), expected.isnan().all(-1))
    assert decoded[5:7].isnan().all()
    assert decoded[:5].isfinite().all()
    good = ~expected.isnan().any(-1)
    scale, _ = unpack_scale_word(theirs[1][:, 0], fmt)
    assert ((decoded - expected).abs() <= scale[:, None] * 1.01 + 1e-30)[good].all()
    torch.testing.assert_close(decoded[7], rotate(rows[7], fmt.rotation)[0], rtol=0.07, atol=float(scale[7]))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_negative_slots_are_skipped(index: torch.dtype):
    layout = KVCacheLayout.create("int4", num_kv_heads=2, head_size=64)
    rows = torch.randn(4, 2, 64)
    slots = torch.tensor([3, -1, 7, -5], dtype=index)
    expected = write(layout, rows[[0, 2]], rows[[0, 2]], slots[[0, 2]], 1)
    assert torch.equal(write(layout, rows, rows, slots, 1), expected)
    assert not (expected == POISON).all()


@pytest.mark.parametrize("page", ["planar", "interleaved"])
def test_strided_rows_and_caches(page: str):
    """Case 18. Catches addresses computed from shapes, and a byte written outside a row."""
    layout = KVCacheLayout.create("int4", num_kv_heads=2, head_size=40, head_size_v=64, page=page, block_size=16)
    gen = torch.Generator().manual_seed(0)
    key, value = torch.randn(30, 2, 40, generator=gen), torch.randn(30, 2, 64, generator=gen)
    slots = torch.randperm(48, generator=gen)[:30]
    expected = write(layout, key, value, slots, 3)
    fused = torch.full((30, 6, 72), torch.nan)
    fused[:, 1:3, 8:48], fused[:, 3:5, :64] = key, value
    room = torch.full((40_000,), 7, dtype=torch.uint8)
    strides = torch.empty(3, 3, *expected.shape[2:]).stride()
    kv_cache = room.as_strided(expected.shape, strides, storage_offset=12).fill_(POISON)
    reshape_and_cache(
        fused[:, 1:3, 8:48], fused[:, 3:5, :64], kv_cache, slots.repeat_interleave(3)[::3], layout, backend="cpu"
    )  # fmt: skip
    assert torch.equal(kv_cache, expected)
    kv_cache.fill_(7)
    assert (room == 7).all()


def test_threads_write_the_same_bytes():
    """Catches rows at the border between two threads' shares that are lost or written twice."""
    layout = KVCacheLayout.create("int4_per_token_head", num_kv_heads=3, head_size=64)
    rows = torch.randn(101, 3, 64)
    slots = torch.randperm(112)[:101]
    expected = write(layout, rows, rows, slots, 7)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(write(layout, rows, rows, slots, 7), expected)
