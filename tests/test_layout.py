"""Pages: bytes, shapes and zero-copy views for any strides, padding, offset and order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from batches import CANARY, NORMAL_ERROR, place, usable_backends
from hypothesis import given, settings
from hypothesis import strategies as st

from nibblekv import FORMATS, KVCacheLayout, gather_and_dequantize, paged_attention, reshape_and_cache
from nibblekv.layout import HUGE_PAGE

ARRANGEMENTS = [("planar", "HND"), ("interleaved", "HND"), ("interleaved", "NHD")]


@st.composite
def layouts(draw: st.DrawFn) -> KVCacheLayout:
    page, order = draw(st.sampled_from(ARRANGEMENTS))
    return KVCacheLayout.create(
        draw(st.sampled_from(list(FORMATS))),
        v_format=draw(st.sampled_from([None, *FORMATS])),
        num_kv_heads=draw(st.integers(1, 4)),
        head_size=8 * draw(st.integers(4, 20)),
        head_size_v=draw(st.sampled_from([None, 32, 40, 96])),
        block_size=draw(st.sampled_from([16, 32, 48])),
        page=page,
        block_order=order,
    )


@st.composite
def placed_caches(draw: st.DrawFn) -> tuple[KVCacheLayout, torch.Tensor, torch.Tensor]:
    """Draw a layout, an allocation full of canaries, and a cache in it: padded, offset, permuted."""
    layout = draw(layouts())
    blocks = draw(st.integers(1, 4))
    pads = {name: 4 * draw(st.integers(0, 5)) for name in ("offset", "pad_row", "pad_head", "pad_block")}
    allocation, kv_cache = place(layout, blocks, **pads)
    if layout.page == "planar" and draw(st.booleans()):  # a tile may also come as rows
        kv_cache = kv_cache.unflatten(-1, (layout.block_size, layout.slot_bytes))
    return layout, allocation, kv_cache


@pytest.mark.parametrize(
    ("format", "head_size", "slot_bytes"),
    [
        ("int4", 128, 136),
        ("int4", 96, 104),
        ("int4_per_token_head", 64, 72),
        ("int8_per_token_head", 128, 264),
        ("int3", 128, 104),
        ("int3", 40, 38),
        ("int2", 128, 72),
        ("int2", 40, 28),
    ],
)
def test_bytes_of_a_page(format: str, head_size: int, slot_bytes: int):
    """Case 20. Catches a row counted as head_size bytes: 4-bit rows are head_size / 2, and each has a 4-byte word."""
    layout = KVCacheLayout.create(format, num_kv_heads=8, head_size=head_size, block_size=32)
    assert layout.slot_bytes == slot_bytes
    assert layout.bytes_per_token == 8 * slot_bytes
    assert layout.page_bytes == 32 * 8 * slot_bytes == layout.allocate(1).nbytes


def test_mixed_formats_and_head_sizes_add_up():
    """Catches a layout that takes the value's row from the key's format or head size."""
    layout = KVCacheLayout.create("int8_per_token_head", v_format="int4", num_kv_heads=2, head_size=192, head_size_v=128)
    assert (layout.k_row_bytes, layout.v_row_bytes, layout.slot_bytes) == (192, 64, 264)
    assert layout.page == "planar"
    assert KVCacheLayout.create("int8_per_token_head", num_kv_heads=2, head_size=192).page == "interleaved"


@settings(deadline=None, max_examples=60, derandomize=True)
@given(layout=layouts())
def test_planar_rows_are_packed_and_interleaved_ones_padded_to_words(layout: KVCacheLayout):
    """Case 22. Catches scale words between rows: each planar row starts at a multiple of its own size in the tile.

    Interleaved rows are as long, but for the bytes that align a scale word behind codes of 2 or 3 bits.
    """
    other = KVCacheLayout.create(
        layout.k_format,
        v_format=layout.v_format,
        num_kv_heads=layout.num_kv_heads,
        head_size=layout.head_size,
        head_size_v=layout.head_size_v,
        block_size=layout.block_size,
        page="planar",
    )
    padding = sum(-n % 4 for n in (layout.k_row_bytes, layout.v_row_bytes)) * (layout.page == "interleaved")
    assert layout.slot_bytes == other.slot_bytes + padding
    # What is not bound to vLLM's arrangement is planar unless somebody asks for the other.
    default = KVCacheLayout.create(layout.k_format, v_format=layout.v_format, num_kv_heads=1, head_size=layout.head_size)
    free = not all(fmt.name.endswith("_per_token_head") for fmt in (layout.k_format, layout.v_format))
    assert (default.page == "planar") == free
    assert other.page_bytes % 16 == 0
    views = other.views(other.allocate(2))
    for view, row in ((views.key_cache, other.k_row_bytes), (views.value_cache, other.v_row_bytes)):
        assert (view.stride(1), view.stride(3)) == (row, 1)
        assert other.num_kv_heads == 1 or view.stride(2) == other.tile_bytes
        assert (view.storage_offset() % 16, other.tile_bytes % 16) == (0, 0)
    assert views.k_scale_cache.storage_offset() * 4 % 16 == 0


@settings(deadline=None, max_examples=60, derandomize=True)
@given(placed=placed_caches())
def test_views_cover_every_byte_of_a_page_once_and_nothing_else(placed: tuple):
    """Cases 18 and 19. Catches views computed from shapes: wrong on padded, NHD or offset caches, or overlapping."""
    layout, allocation, kv_cache = placed
    views = layout.views(kv_cache)
    blocks = kv_cache.shape[0]
    per_row = (blocks, layout.block_size, layout.num_kv_heads)
    assert views.key_cache.shape == (*per_row, layout.k_row_bytes)
    assert views.value_cache.shape == (*per_row, layout.v_row_bytes)
    assert views.k_scale_cache.shape == views.v_scale_cache.shape == per_row
    assert views.k_scale_cache.dtype == torch.int32
    owned = torch.zeros_like(allocation)
    for view in (views.key_cache, views.value_cache, views.k_scale_cache, views.v_scale_cache):
        assert view.untyped_storage().data_ptr() == allocation.untyped_storage().data_ptr()
        size = view.element_size()
        index = torch.zeros(view.shape, dtype=torch.long) + view.storage_offset()
        for dim, (n, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
            index = index + (torch.arange(n) * stride).view(-1, *[1] * (view.dim() - dim - 1))
        for byte in range(size):
            owned.index_add_(0, index.flatten() * size + byte, torch.ones(index.numel(), dtype=torch.uint8))
    assert owned.max() == 1
    padding = sum(-n % 4 for n in (layout.k_row_bytes, layout.v_row_bytes)) * (layout.page == "interleaved")
    assert owned.sum() == blocks * layout.num_kv_heads * layout.block_size * (layout.slot_bytes - padding)
    expected = torch.zeros_like(allocation)
    expected.as_strided(kv_cache.shape, kv_cache.stride(), kv_cache.storage_offset()).fill_(1)
    assert torch.equal(owned, expected) if not padding else (owned <= expected).all()


@settings(deadline=None, max_examples=40, derandomize=True)
@given(placed=placed_caches(), seed=st.integers(0, 2**20))
def test_written_rows_read_back_and_canaries_stay(placed: tuple, seed: int):
    """Case 18. Catches a write through wrong strides: it breaks a canary between pages or another token's row."""
    layout, allocation, kv_cache = placed
    gen = torch.Generator().manual_seed(seed)
    slots = torch.randperm(kv_cache.shape[0] * layout.block_size, generator=gen)[:20]
    slots[::5] = -1
    key = torch.randn(len(slots), layout.num_kv_heads, layout.head_size, generator=gen)
    value = torch.randn(len(slots), layout.num_kv_heads, layout.head_size_v, generator=gen)
    inside = torch.zeros_like(allocation)
    inside.as_strided(kv_cache.shape, kv_cache.stride(), kv_cache.storage_offset()).fill_(1)
    reshape_and_cache(key, value, kv_cache, slots, layout, backend="reference")
    assert (allocation[inside == 0] == CANARY).all()
    # the same rows in a cache of the plainest strides hold the same bytes
    plain = layout.allocate(kv_cache.shape[0])
    plain.fill_(CANARY)
    reshape_and_cache(key, value, plain, slots, layout, backend="reference")
    assert torch.equal(plain, kv_cache.reshape(plain.shape))
    table = torch.arange(kv_cache.shape[0])
    k, v = gather_and_dequantize(kv_cache, table, kv_cache.shape[0] * layout.block_size, layout)
    written = slots >= 0
    for read, raw, fmt in ((k, key, layout.k_format), (v, value, layout.v_format)):
        error = (read[slots[written]] - raw[written]).norm() / raw[written].norm()
        assert error < NORMAL_ERROR[fmt.bits][1]


@pytest.mark.parametrize(("page", "order"), ARRANGEMENTS)
@pytest.mark.parametrize("format", list(FORMATS))
def test_a_second_layer_on_the_same_cache_reads_what_the_first_wrote(format: str, page: str, order: str):
    """Case 17. Catches a first-touch fill of scales: A writes, B is made on the same cache, A's rows are still there."""
    spec = {"num_kv_heads": 2, "head_size": 64, "page": page, "block_order": order}
    first = KVCacheLayout.create(format, **spec)
    kv_cache = first.allocate(3)
    key, value = torch.randn(20, 2, 64), torch.randn(20, 2, 64)
    reshape_and_cache(key, value, kv_cache, torch.arange(20), first, backend="reference")
    before = kv_cache.clone()
    second = KVCacheLayout.create(format, **spec)
    second.views(kv_cache)
    k, v = gather_and_dequantize(kv_cache, torch.arange(3), 48, second)
    table, lengths, starts = torch.arange(3)[None], torch.tensor([20]), torch.tensor([0, 2])
    for backend in usable_backends():
        paged_attention(torch.randn(2, 4, 64), kv_cache, table, lengths, starts, second, backend=backend)
    assert torch.equal(kv_cache, before)
    worst = NORMAL_ERROR[first.k_format.bits][1]
    assert (k[:20] - key).norm() / key.norm() < worst
    assert (v[:20] - value).norm() / value.norm() < worst
    assert not k[20:].any()
    assert not v[20:].any()
    for backend in usable_backends():  # nor does the second layer's first write touch another row
        kv_cache.copy_(before)
        reshape_and_cache(key[:1], value[:1], kv_cache, torch.tensor([30]), second, backend=backend)
        for rows, expected in zip(gather_and_dequantize(kv_cache, torch.arange(3), 48, second), (k, v), strict=True):
            assert rows[30].any()
            rows[30] = 0
            assert torch.equal(rows, expected)


@pytest.mark.parametrize("backend", usable_backends())
def test_layers_of_one_allocation_do_not_collide(backend: str):
    """Case 19. Catches scales addressed from the start of the allocation instead of the layer's own pages."""
    layout = KVCacheLayout.create("int4", num_kv_heads=2, head_size=64)
    allocation = torch.zeros(4, 3, *layout.shape(1)[1:], dtype=torch.uint8)  # [blocks, layers, ...], layers interleaved
    rows = [(torch.randn(50, 2, 64), torch.randn(50, 2, 64)) for _ in range(3)]
    for layer, (key, value) in enumerate(rows):
        reshape_and_cache(key, value, allocation[:, layer], torch.arange(50), layout, backend=backend)
    for layer, (key, value) in enumerate(rows):
        call = (allocation[:, layer], torch.arange(4)[None], torch.tensor([50]), torch.tensor([0, 1]), layout)
        query = 4 * key[20, :, :][None]  # sees itself, and little else
        assert (paged_attention(query, *call, backend=backend) - value[20]).norm() < 0.3 * value[20].norm()
        k, v = gather_and_dequantize(allocation[:, layer], torch.arange(4), 50, layout)
        assert (k - key).norm() / key.norm() < 0.15
        assert (v - value).norm() / value.norm() < 0.15


@pytest.mark.parametrize(("page", "order"), ARRANGEMENTS)
def test_allocation_is_zeroed_contiguous_and_in_the_physical_order(page: str, order: str):
    layout = KVCacheLayout.create(num_kv_heads=3, head_size=32, page=page, block_order=order)
    kv_cache = layout.allocate(2)
    assert kv_cache.shape == layout.shape(2)
    assert not kv_cache.any()
    physical = kv_cache.transpose(1, 2) if order == "NHD" else kv_cache
    assert physical.is_contiguous()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "int5"}, r"format: expected one of int4, .*got 'int5'"),
        ({"v_format": "q4"}, r"format: expected one of .*got 'q4'"),
        ({"head_size": 24}, r"head_size: expected a multiple of 8 from 32 to 512, got 24"),
        ({"head_size": 60}, r"head_size: .*got 60"),
        ({"head_size": 520}, r"head_size: .*got 520"),
        ({"head_size_v": 100}, r"head_size_v: .*got 100"),
        ({"num_kv_heads": 0}, r"num_kv_heads: expected at least 1, got 0"),
        ({"block_size": 0}, r"block_size: expected a positive multiple of 16, got 0"),
        ({"block_size": 24}, r"block_size: .*got 24"),
        ({"page": "flat"}, r"page: expected 'planar' or 'interleaved', got 'flat'"),
        ({"block_order": "HDN"}, r"block_order: expected 'HND' or 'NHD', got 'HDN'"),
        ({"page": "planar", "block_order": "NHD"}, r"block_order: expected 'HND' for planar pages, got 'NHD'"),
    ],
)
def test_layout_refuses_by_name(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        KVCacheLayout.create(**{"format": "int4", "num_kv_heads": 2, "head_size": 64, **changes})


def test_allocate_refuses_no_blocks():
    with pytest.raises(ValueError, match="num_blocks: expected at least 1, got 0"):
        KVCacheLayout.create(num_kv_heads=1, head_size=64).allocate(0)


@pytest.mark.parametrize("page", ["planar", "interleaved"])
def test_check_refuses_caches_that_cannot_be_viewed(page: str):
    """Catches a cache that would be copied or misread: wrong dtype, shape, byte stride, odd stride or odd offset."""
    layout = KVCacheLayout.create(num_kv_heads=2, head_size=64, page=page)
    good = layout.allocate(3)
    layout.check(good)
    layout.check(good[:0])
    with pytest.raises(TypeError, match=r"kv_cache: expected torch.uint8, got torch.int8"):
        layout.check(good.view(torch.int8))
    for wrong in (good[0], good[:, :1], good[..., :-4], torch.zeros((), dtype=torch.uint8), good[None]):
        with pytest.raises(ValueError, match="kv_cache: expected shape"):
            layout.check(wrong)
    room = torch.zeros(4 * good.numel() + 8, dtype=torch.uint8)
    strides = good.stride()
    with pytest.raises(ValueError, match="bytes of a row to be contiguous"):
        layout.check(room.as_strided(good.shape, (*(2 * s for s in strides[:-1]), 2)))
    if page == "planar":  # rows with gaps are no tile
        rows = (3, 2, layout.block_size, layout.slot_bytes)
        with pytest.raises(ValueError, match="kv_cache: expected shape"):
            layout.check(room.as_strided(rows, (2 * strides[0], 2 * strides[1], layout.slot_bytes + 4, 1)))
    with pytest.raises(ValueError, match="multiples of 4 bytes"):
        layout.check(room.as_strided(good.shape, (strides[0] + 2, *strides[1:])))
    with pytest.raises(ValueError, match="offset 6"):
        layout.check(room.as_strided(good.shape, strides, 6))


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no huge pages to ask for"
)
def test_a_large_cache_of_the_host_asks_for_huge_pages():
    """Catches an address or a length that the system refuses: the hint is then lost without a word."""
    layout = KVCacheLayout.create("int4", num_kv_heads=8, head_size=128)
    cache = layout.allocate(-(-3 * HUGE_PAGE // layout.page_bytes))
    assert not cache.any()
    middle, inside = cache.data_ptr() + cache.numel() // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if (fields := line.split())[0].count("-") == 1 and not fields[0].endswith(":"):
            begin, end = (int(x, 16) for x in fields[0].split("-"))
            inside = begin <= middle < end
        elif inside and fields[0] == "VmFlags:":
            assert "hg" in fields
            return
    raise AssertionError("no mapping holds the cache")
