"""The custom ops: registered correctly, and no graph break under torch.compile."""

from __future__ import annotations

import pytest
import torch

import nibblekv
from nibblekv import KVCacheLayout, torch_ops

BACKEND = "reference"
LAYOUTS = {
    "planar": KVCacheLayout.create("int4", num_kv_heads=2, head_size=32),
    "mixed": KVCacheLayout.create("int8_per_token_head", v_format="int4", num_kv_heads=2, head_size=64, head_size_v=32),
    "nhd": KVCacheLayout.create("int4_per_token_head", num_kv_heads=1, head_size=80, block_size=48, block_order="NHD"),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_key_stands_for_the_layout(layout: KVCacheLayout) -> None:
    """A field that the key forgets would silently become its default on the other side."""
    assert torch_ops.layout_from_key(torch_ops.layout_key(layout)) == layout


def test_key_of_other_length_is_refused() -> None:
    with pytest.raises(ValueError, match="eight parts"):
        torch_ops.layout_from_key("int4,int4")


def _call(layout: KVCacheLayout) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    key = torch.randn(20, layout.num_kv_heads, layout.head_size)
    value = torch.randn(20, layout.num_kv_heads, layout.head_size_v)
    query = torch.randn(3, 2 * layout.num_kv_heads, layout.head_size)
    return key, value, query, layout.allocate(3), torch.arange(20) + 5


def test_compiled_step_has_no_graph_break_and_equals_eager() -> None:
    layout = LAYOUTS["planar"]
    name = torch_ops.layout_key(layout)
    key, value, query, kv_cache, slots = _call(layout)
    table, lens, starts = torch.tensor([[0, 1, 2]]), torch.tensor([20]), torch.tensor([0, 3])

    def step(kv_cache: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        torch.ops.nibblekv.reshape_and_cache(key, value, kv_cache, slots, name, BACKEND)
        return (
            torch_ops.paged_attention(query * 2, kv_cache, table, lens, starts, name, sliding_window=11, backend=BACKEND) + 1
        )

    expected_cache = layout.allocate(3)
    nibblekv.reshape_and_cache(key, value, expected_cache, slots, layout, backend=BACKEND)
    expected = (
        nibblekv.paged_attention(query * 2, expected_cache, table, lens, starts, layout, sliding_window=11, backend=BACKEND)
        + 1
    )
    out = torch.compile(step, fullgraph=True, backend="aot_eager")(kv_cache, query)
    assert torch.equal(kv_cache, expected_cache)
    torch.testing.assert_close(out, expected)


def test_out_variant_writes_out_and_lse() -> None:
    layout = LAYOUTS["mixed"]
    key, value, query, kv_cache, slots = _call(layout)
    nibblekv.reshape_and_cache(key, value, kv_cache, slots, layout, backend=BACKEND)
    where = (torch.tensor([[0, 1, 2]]), torch.tensor([20]), torch.tensor([0, 3]))
    out, lse = torch.full((3, 4, 32), torch.nan), torch.full((3, 4), torch.nan)
    torch.ops.nibblekv.paged_attention_out(
        out, lse, query, kv_cache, *where, torch_ops.layout_key(layout), softcap=3.0, backend=BACKEND
    )
    expected, expected_lse = nibblekv.paged_attention(
        query, kv_cache, *where, layout, softcap=3.0, return_lse=True, backend=BACKEND
    )
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_schema_says_what_is_mutated() -> None:
    """A wrong schema lets a compiler move a read before the write."""
    layout = LAYOUTS["planar"]
    key, value, _, kv_cache, slots = _call(layout)
    torch.library.opcheck(
        torch.ops.nibblekv.reshape_and_cache.default,
        (key, value, kv_cache, slots, torch_ops.layout_key(layout), BACKEND),
        test_utils=("test_schema", "test_faketensor"),
    )
