"""Both attention implementations, without an engine, on CPU tensors: every option that a layer or a batch may carry."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from oracle import attend
from vllm.v1.attention.backend import AttentionCGSupport

from nibblekv import AttentionOptions, gather_and_dequantize
from nibblekv.integrations.vllm import attention, mla, recent
from nibblekv.integrations.vllm.cpu import NibbleKVCPUImpl
from nibblekv.integrations.vllm.cuda import (
    NibbleKVTritonBackend,
    NibbleKVTritonImpl,
    NibbleKVTritonMetadataBuilder,
)

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, NUM_BLOCKS = 4, 2, 64, 16, 16
SEQ_LENS, QUERY_LENS = [19, 64, 40, 33], [1, 3, 23, 33]
INT4 = "int4_per_token_head"
IMPLS = {"cpu": NibbleKVCPUImpl, "triton": NibbleKVTritonImpl}


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch):
    """Give vLLM's constructors the little configuration that they read, and the plugin a clean environment."""
    from vllm.v1.attention.backends import cpu_attn

    for name in ("FORMAT", "STRICT", "BACKEND", "WINDOW", "CALIBRATION", "DISABLE"):
        monkeypatch.delenv(f"NIBBLEKV_{name}", raising=False)
    monkeypatch.setattr(attention, "_last_settings", None)
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))
    monkeypatch.setattr(cpu_attn, "get_current_vllm_config", lambda: config)


def make_impl(kind: str, dtype: str = INT4, head_size: int = HEAD_SIZE, **arguments: Any) -> Any:
    """Build a layer's implementation as vLLM does."""
    defaults = {"alibi_slopes": None, "sliding_window": None}
    return IMPLS[kind](HEADS, head_size, head_size**-0.5, KV_HEADS, kv_cache_dtype=dtype, **defaults | arguments)


@dataclass
class Step:
    """One step of four requests: two that decode (one with drafts), one later chunk of a prompt, one whole prompt."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    history: list[tuple[torch.Tensor, torch.Tensor]]
    metadata: SimpleNamespace
    slots: list[torch.Tensor]


def make_step(**fields: Any) -> Step:
    """Return random inputs and the metadata that a builder would make of them."""
    generator = torch.Generator().manual_seed(3)

    def rows(n: int, heads: int) -> torch.Tensor:
        return torch.randn(n, heads, HEAD_SIZE, generator=generator)

    blocks, table, slots, used = torch.randperm(NUM_BLOCKS, generator=generator), torch.zeros(4, 5, dtype=torch.int32), [], 0
    for b, length in enumerate(SEQ_LENS):
        count = -(-length // BLOCK_SIZE)
        table[b, :count] = blocks[used : used + count]
        used += count
        position = torch.arange(length)
        slots.append(table[b][position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE)
    starts = torch.tensor([0, *torch.tensor(QUERY_LENS).cumsum(0).tolist()], dtype=torch.int32)
    common = SimpleNamespace(
        max_query_len=max(QUERY_LENS),
        max_seq_len=max(SEQ_LENS),
        num_reqs=4,
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens_cpu_upper_bound=torch.tensor(SEQ_LENS),
        is_prefilling=torch.tensor([False, False, True, True]),
    )
    metadata = {
        "num_actual_tokens": sum(QUERY_LENS),
        "max_query_len": max(QUERY_LENS),
        "max_seq_len": max(SEQ_LENS),
        "query_start_loc": starts,
        "seq_lens": torch.tensor(SEQ_LENS, dtype=torch.int32),
        "block_table": table,
        "causal": True,
        "mm_prefix_range_tensor": None,
        "rswa_prefix_lens": None,
        "rswa_window": None,
        "nibblekv_split": attention.split_prefills(common, 8),
    }
    n = sum(QUERY_LENS)
    history = [(rows(a - b, KV_HEADS), rows(a - b, KV_HEADS)) for a, b in zip(SEQ_LENS, QUERY_LENS, strict=True)]
    return Step(rows(n, HEADS), rows(n, KV_HEADS), rows(n, KV_HEADS), history, SimpleNamespace(**metadata | fields), slots)


def padded_cache(impl: Any, slot_bytes: int) -> torch.Tensor:
    """Return poisoned pages as vLLM may lay them out: a block stride with padding, and an offset."""
    tile = KV_HEADS * BLOCK_SIZE * slot_bytes
    memory = torch.full((NUM_BLOCKS * (tile + 64) + 32,), 0xFF, dtype=torch.uint8)
    shape, strides = (NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, slot_bytes), (tile + 64, tile // KV_HEADS, slot_bytes, 1)
    return memory.as_strided(shape, strides, 32)


def run_step(impl: Any, step: Step, layer: Any, raw: bool = True, padding: int = 0) -> tuple[torch.Tensor, Any]:
    """Write the history and the step's tokens, attend, and return (output, attend by the oracle given options).

    padding: bytes by which vLLM's rows are longer than the format's.
    """
    slot_bytes = HEAD_SIZE + 8 if impl.nibblekv_dtype.startswith("int4") else 2 * HEAD_SIZE + 8
    cache = padded_cache(impl, slot_bytes + padding)
    starts = step.metadata.query_start_loc.tolist()
    new_slots = []
    for b, (key, value) in enumerate(step.history):
        if len(key):
            impl.do_kv_cache_update(layer, key, value, cache, step.slots[b][: len(key)])
        new_slots.append(step.slots[b][len(key) :])
    # vLLM pads: two rows beyond the slots, and a slot of -1.
    slots = torch.cat([*new_slots, torch.tensor([-1])])
    beyond = torch.full((2, KV_HEADS, HEAD_SIZE), torch.nan)
    impl.do_kv_cache_update(layer, torch.cat((step.key, beyond)), torch.cat((step.value, beyond)), cache, slots)
    output = torch.full((sum(QUERY_LENS) + 2, HEADS, HEAD_SIZE), torch.nan)
    query = torch.cat((step.query, torch.full((2, HEADS, HEAD_SIZE), torch.nan)))
    impl.forward(layer, query, torch.cat((step.key, beyond)), torch.cat((step.value, beyond)), cache, step.metadata, output)
    assert output[-2:].isnan().all()

    layout = impl.nibblekv_layout(layer, cache)
    stored, pages = [], impl.nibblekv_pages(cache, layout)
    for b, length in enumerate(SEQ_LENS):
        rows = gather_and_dequantize(pages, step.metadata.block_table[b], length, layout)
        if impl.nibblekv_calibration is not None:
            rows = impl.nibblekv_calibration.restored(*rows)
        key, value = (r.double() for r in rows)
        if raw and QUERY_LENS[b] > 8:
            key = torch.cat((key[: -QUERY_LENS[b]], step.key[starts[b] : starts[b + 1]].double()))
            value = torch.cat((value[: -QUERY_LENS[b]], step.value[starts[b] : starts[b + 1]].double()))
        stored.append((key, value))
    return output[:-2], lambda options, unquantized=None: attend(step.query, stored, starts, options, unquantized)[0]


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b).norm() / b.norm())


LAYER = SimpleNamespace(head_size_v=HEAD_SIZE)
SLOPES, SINKS = [0.5, 0.25, 0.125, 0.0625], torch.tensor([0.5, -1.0, 2.0, 0.0])


@pytest.mark.parametrize("kind", list(IMPLS))
@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ({}, {}),
        ({"sliding_window": 20}, {"sliding_window": 20}),
        ({"logits_soft_cap": 5.0}, {"softcap": 5.0}),
        ({"alibi_slopes": SLOPES}, {"alibi_slopes": torch.tensor(SLOPES)}),
        ({"sinks": SINKS.bfloat16()}, {"sinks": SINKS}),
    ],
    ids=["plain", "sliding window", "softcap", "ALiBi", "sinks"],
)
def test_layer_options_reach_the_operations(kind, arguments, options):
    """Catches an option that a layer is built with and attention then ignores."""
    output, expected = run_step(make_impl(kind, **arguments), make_step(), LAYER)
    assert error(output, expected(AttentionOptions(HEAD_SIZE**-0.5, **options))) < 1e-3


@pytest.mark.parametrize("kind", list(IMPLS))
@pytest.mark.parametrize("dtype", ["int8_per_token_head", "fp8_per_token_head"])
def test_eight_bit_caches(kind, dtype):
    output, expected = run_step(make_impl(kind, dtype), make_step(), LAYER)
    assert error(output, expected(AttentionOptions(HEAD_SIZE**-0.5))) < 1e-3


def test_chunked_and_square_root_options_of_the_triton_backend():
    """Catches `chunk_lookback` that is accepted and ignored."""
    output, expected = run_step(make_impl("triton", sliding_window=24, chunk_lookback=1), make_step(), LAYER)
    assert error(output, expected(AttentionOptions(HEAD_SIZE**-0.5, sliding_window=24, chunk_lookback=1))) < 1e-3
    output, expected = run_step(make_impl("triton", alibi_slopes=SLOPES, use_alibi_sqrt=True), make_step(), LAYER)
    slopes = torch.tensor(SLOPES)
    assert error(output, expected(AttentionOptions(HEAD_SIZE**-0.5, alibi_slopes=slopes, alibi_sqrt=True))) < 1e-3


@pytest.mark.parametrize("kind", list(IMPLS))
def test_batch_options_are_cut_where_the_prefills_begin(kind):
    """Catches per-sequence flags that are given to the wrong sequences when a batch is served in two calls."""
    causal = torch.tensor([True, False, True, False])
    output, expected = run_step(make_impl(kind), make_step(causal=causal), LAYER)
    assert error(output, expected(AttentionOptions(HEAD_SIZE**-0.5, causal=causal))) < 1e-3
    ranges = torch.tensor([[[0, 0]], [[60, 63]], [[10, 30]], [[3, 9]]], dtype=torch.int32)
    step = make_step(mm_prefix_range_tensor=ranges)
    layer = SimpleNamespace(head_size_v=HEAD_SIZE, mm_prefix_clamp_sliding_window=True)
    output, expected = run_step(make_impl(kind, sliding_window=12), step, layer)
    options = AttentionOptions(HEAD_SIZE**-0.5, sliding_window=12, mm_prefix_ranges=ranges, mm_prefix_clamp=True)
    assert error(output, expected(options)) < 1e-3


@pytest.mark.parametrize("split", [True, False])
def test_lengths_reach_the_kernels_as_integers(split, monkeypatch):
    """Catches a length of NumPy's, as of chunked local attention, which Triton refuses as a kernel's argument."""
    seen: list[type] = []

    def call(*arguments: Any, max_query_len: int, **options: Any) -> None:
        seen.append(type(max_query_len))

    monkeypatch.setattr(attention, "paged_attention", call)
    step = make_step(max_query_len=np.int64(max(QUERY_LENS)), **{} if split else {"nibblekv_split": None})
    output, cache = torch.empty_like(step.query), padded_cache(None, HEAD_SIZE + 8)
    make_impl("triton").forward(LAYER, step.query, step.key, step.value, cache, step.metadata, output)
    assert seen == [int] * (1 + split)


def test_prefix_and_window_of_the_triton_backend():
    """Catches R-SWA arguments that are dropped."""
    prefix = torch.tensor([2, 5, 3, 4], dtype=torch.int32)
    output, expected = run_step(make_impl("triton"), make_step(rswa_prefix_lens=prefix, rswa_window=9), LAYER)
    assert error(output, expected(AttentionOptions(HEAD_SIZE**-0.5, rswa_prefix_lens=prefix, rswa_window=9))) < 1e-3


@pytest.mark.parametrize("kind", list(IMPLS))
def test_strict_mode_captured_graphs_and_shared_caches_read_stored_bytes_only(kind, monkeypatch):
    """Catches raw keys where only the cache may be read: a sharing layer's own keys are not those of the cache."""
    options = AttentionOptions(HEAD_SIZE**-0.5)
    shared = make_impl(kind, kv_sharing_target_layer_name="model.layers.0")
    output, expected = run_step(shared, make_step(), LAYER, raw=False)
    assert error(output, expected(options)) < 1e-3
    output, expected = run_step(make_impl(kind), make_step(nibblekv_split=None), LAYER, raw=False)
    assert error(output, expected(options)) < 1e-3
    monkeypatch.setenv("NIBBLEKV_STRICT", "1")
    output, expected = run_step(make_impl(kind), make_step(), LAYER, raw=False)
    assert error(output, expected(options)) < 1e-3
    monkeypatch.setenv("NIBBLEKV_STRICT", "0")
    monkeypatch.setattr(attention, "envs", SimpleNamespace(VLLM_BATCH_INVARIANT=True))
    output, expected = run_step(make_impl(kind), make_step(), LAYER, raw=False)
    assert error(output, expected(options)) < 1e-3
    monkeypatch.setattr(attention, "envs", SimpleNamespace(VLLM_BATCH_INVARIANT=False))
    output, _ = run_step(make_impl(kind), make_step(), LAYER)
    assert error(output, expected(options)) > 1e-2


@pytest.mark.parametrize("kind", list(IMPLS))
def test_a_layer_that_reads_first_sees_what_another_wrote(kind):
    """Catches a first touch that writes: a sharing layer wiped the scales of the cache that it was given."""
    writer, reader = make_impl(kind), make_impl(kind, kv_sharing_target_layer_name="model.layers.0")
    step = make_step(nibblekv_split=None)
    cache = padded_cache(writer, HEAD_SIZE + 8)
    for b, (key, value) in enumerate(step.history):
        new = slice(step.metadata.query_start_loc[b], step.metadata.query_start_loc[b + 1])
        rows = torch.cat((key, step.key[new])), torch.cat((value, step.value[new]))
        writer.do_kv_cache_update(LAYER, *rows, cache, step.slots[b])
    before, outputs = cache.clone(), []
    for impl in (reader, writer):
        outputs.append(torch.full((sum(QUERY_LENS), HEADS, HEAD_SIZE), torch.nan))
        impl.forward(LAYER, step.query, None, None, cache, step.metadata, outputs[-1])
    assert torch.equal(cache, before)
    assert torch.equal(outputs[0], outputs[1])
    assert outputs[0].isfinite().all()


@pytest.mark.parametrize("kind", list(IMPLS))
def test_the_profiling_run_gives_zeros(kind):
    output = torch.full((3, HEADS, HEAD_SIZE), torch.nan)
    make_impl(kind).forward(LAYER, output, output, output, torch.empty(0), None, output)
    assert torch.equal(output, torch.zeros_like(output))


def test_the_profiling_run_sees_what_a_prefill_allocates(monkeypatch):
    """Catches memory that vLLM gives to the cache and a long prompt then needs."""
    from nibblekv.backends.triton.prefill import WORKSPACE_BYTES

    seen: list[int] = []
    impl, query = make_impl("triton"), torch.zeros(8, HEADS, HEAD_SIZE)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, **how: seen.append(size) or empty(0))
    impl.nibblekv_reserve(query)
    assert seen == [WORKSPACE_BYTES + 4 * 8 * HEADS]


@pytest.mark.parametrize("kind", list(IMPLS))
def test_layers_that_cannot_store_these_pages_are_refused_when_they_are_built(kind):
    """Catches a refusal that would come with the first request."""
    with pytest.raises(NotImplementedError, match="cross-attention"):
        make_impl(kind, attn_type="encoder_decoder")
    with pytest.raises(ValueError, match="head_size: expected a multiple of 8 from 32 to 512, got 576"):
        make_impl(kind, head_size=576)


@pytest.mark.parametrize("name", ["NibbleKVCPUMLABackend", "NibbleKVAMXMLABackend"])
def test_latent_attention_on_cpu_is_refused_when_it_is_built(name):
    """Catches MLA layers, which vLLM on CPU would let write their own bytes under this dtype."""
    impl = getattr(mla, name).get_impl_cls()
    with pytest.raises(NotImplementedError, match="latent"):
        impl(4, 576, 1.0, 1, None, None, "int4_per_token_head", None, "decoder", None)


@pytest.mark.parametrize("kind", list(IMPLS))
def test_encoder_layers_and_other_dtypes_are_left_to_vllm(kind):
    assert not make_impl(kind, attn_type="encoder_only").is_ours
    assert not make_impl(kind, dtype="auto").is_ours


def test_a_switched_off_plugin_refuses_what_vllm_on_cpu_would_garble(monkeypatch):
    monkeypatch.setenv("NIBBLEKV_DISABLE", "1")
    with pytest.raises(ValueError, match="expected 'auto' on CPU where nibblekv is switched off"):
        make_impl("cpu")
    assert not make_impl("triton").is_ours


def test_head_sizes_are_refused_by_the_selector_with_a_reason():
    arguments = (None, False, False, False, False, None)
    assert "576" in NibbleKVTritonBackend.supports_combination(576, torch.bfloat16, "int4_per_token_head", *arguments)
    assert NibbleKVTritonBackend.supports_combination(576, torch.bfloat16, "auto", *arguments) is None
    assert NibbleKVTritonBackend.supports_combination(96, torch.bfloat16, "int4_per_token_head", *arguments) is None


def common_of(query_lens: list[int], seq_lens: list[int], is_prefilling: list[bool] | None) -> SimpleNamespace:
    """Return the part of vLLM's metadata that finds the prefills."""
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    return SimpleNamespace(
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        num_reqs=len(query_lens),
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens_cpu_upper_bound=torch.tensor(seq_lens),
        is_prefilling=None if is_prefilling is None else torch.tensor(is_prefilling),
    )


def test_a_batch_without_prefills_is_not_split():
    common = common_of([1, 8], [5, 10], [False, True])
    assert attention.split_prefills(common, 8) is None
    common.max_query_len = 9  # a bound
    assert attention.split_prefills(common, 8) is None
    split = attention.split_prefills(common, 7)
    assert (split.num_decodes, split.num_decode_tokens, split.max_decode_len, split.num_tokens) == (1, 1, 1, 9)
    assert split.query_start_loc.tolist() == [0, 8]


def test_lengths_are_taken_from_the_host_only_where_they_are_exact():
    """Catches lengths that assume every draft accepted: attention would read pages that were never written."""
    split = attention.split_prefills(common_of([1, 20, 30], [7, 50, 30], [False, True, True]), 8)
    assert split.host_lengths == ([0, 20, 50], [50, 30])
    assert attention.split_prefills(common_of([1, 20, 30], [7, 50, 30], [False, False, True]), 8).host_lengths is None
    assert attention.split_prefills(common_of([1, 20, 30], [7, 50, 30], None), 8).host_lengths is None


def test_lengths_that_a_drafter_left_behind_are_not_taken():
    """Catches a draft model's first step after a prompt, whose stored prefix would come out a token short."""
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.spec_decode.utils import extend_all_queries_by_N

    fields = vars(common_of([20, 30], [50, 30], [True, True]))
    tensors = {"block_table_tensor": torch.zeros(2, 4), "slot_mapping": torch.zeros(50), "seq_lens": torch.tensor([50, 30])}
    common = CommonAttentionMetadata(**fields, **tensors, num_actual_tokens=50)
    assert attention.split_prefills(common, 8).host_lengths == ([0, 20, 50], [50, 30])
    extended = extend_all_queries_by_N(common, 1, torch.arange(3), torch.zeros(52))
    split = attention.split_prefills(extended, 8)
    assert split.query_start_loc.tolist() == [0, 21, 52]
    assert split.host_lengths in (None, ([0, 21, 52], [51, 31]))


def test_rows_that_pad_a_step_are_not_taken_for_a_prompt():
    """Catches a padded batch whose last prompt seems to have no stored tokens before it."""
    step = make_step()
    step.metadata.num_actual_tokens += 2
    output, expected = run_step(make_impl("triton"), step, LAYER)
    assert error(output, expected(AttentionOptions(HEAD_SIZE**-0.5))) < 1e-3


def test_graphs_are_captured_for_batches_of_one_query_length_only():
    """Catches a graph of one-token requests that is replayed for longer ones: its launches have rows for one token."""
    spec = SimpleNamespace(kv_quant_mode=SimpleNamespace(name="INT4_PER_TOKEN_HEAD"))
    support = NibbleKVTritonMetadataBuilder.get_cudagraph_support
    assert support(None, spec) is AttentionCGSupport.UNIFORM_BATCH
    assert support(None, SimpleNamespace(kv_quant_mode=SimpleNamespace(name="NONE"))) is AttentionCGSupport.ALWAYS


@dataclass
class Compilation:
    """The part of vLLM's configuration that knows the layers; may be referred to weakly."""

    static_forward_context: dict[str, Any]


def test_a_draft_model_of_another_dtype_leaves_the_order_of_pages_as_it_is(monkeypatch):
    """Catches pages whose heads are apart: vLLM asks for the order outside its context, when the draft was built last."""
    compilation = Compilation({"target": SimpleNamespace(kv_cache_dtype=INT4)})
    config = SimpleNamespace(
        additional_config={}, cache_config=SimpleNamespace(cache_dtype="auto"), compilation_config=compilation
    )
    for name in ("_last_dtype", "_last_compilation"):
        monkeypatch.setattr(attention, name, None)
    monkeypatch.setattr(attention, "get_current_vllm_config_or_none", lambda: config)
    assert attention.model_is_ours()
    monkeypatch.setattr(attention, "get_current_vllm_config_or_none", lambda: None)
    assert attention.model_is_ours()
    compilation.static_forward_context["target"].kv_cache_dtype = "auto"
    assert not attention.model_is_ours()


@pytest.mark.parametrize("kind", list(IMPLS))
@pytest.mark.parametrize("fmt", ["int4", "int4_per_token_head"])
def test_rows_longer_than_the_format(kind, fmt, monkeypatch):
    """Catches padding that is read as data: models of several head sizes have it in their larger layers."""
    monkeypatch.setenv("NIBBLEKV_FORMAT", fmt)
    output, expected = run_step(make_impl(kind), make_step(), LAYER, padding=16)
    assert error(output, expected(AttentionOptions(HEAD_SIZE**-0.5))) < 1e-3


@pytest.mark.parametrize("kv_heads", [(1, 1), (16, 4)], ids=["equal heads", "16 and 4 heads"])
def test_layers_of_two_head_sizes_share_the_pool_without_waste(kv_heads, monkeypatch):
    """Catches pages of sliding layers (head size 256) that are padded to those of full layers (512)."""
    from vllm.v1.core.kv_cache_utils import unify_kv_cache_spec_page_size
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, SlidingWindowSpec

    common = {"block_size": 16, "dtype": torch.uint8, "kv_quant_mode": KVQuantMode.INT4_PER_TOKEN_HEAD}
    specs = {
        "sliding": SlidingWindowSpec(num_kv_heads=kv_heads[0], head_size=256, sliding_window=512, **common),
        "full": FullAttentionSpec(num_kv_heads=kv_heads[1], head_size=512, **common),
    }
    layers = {name: SimpleNamespace(head_size=s.head_size, kv_cache_dtype=INT4) for name, s in specs.items()}
    compilation = SimpleNamespace(static_forward_context=layers)
    monkeypatch.setattr(attention, "_last_compilation", lambda: compilation)
    specs = {name: NibbleKVTritonBackend.customize_spec(spec) for name, spec in specs.items()}
    for name, spec in unify_kv_cache_spec_page_size(specs).items():
        assert spec.page_size_padded is None
        needed = spec.block_size * spec.num_kv_heads * (spec.head_size + 8)
        assert needed <= spec.page_size_bytes <= 1.02 * needed, name
    del layers["sliding"]
    alone = NibbleKVTritonBackend.customize_spec(FullAttentionSpec(num_kv_heads=1, head_size=512, **common))
    assert alone.page_size_bytes == 16 * 520


WINDOW = 10


def with_window(impl: Any, step: Step, longest_decode: int) -> dict[str, Any]:
    """Return vLLM's context of a step: a companion, whose pages of 4 tokens hold the history, and its metadata."""
    size, blocks = 4, sum(-(-length // 4) for length in SEQ_LENS)
    layer = SimpleNamespace(head_size=HEAD_SIZE)
    companion = recent.RecentLayer(layer, WINDOW, longest_decode, torch.float32, {})
    # vLLM pads pages, and what no request wrote may be anything.
    page = KV_HEADS * size * 2 * HEAD_SIZE
    memory = torch.full(((blocks + 1) * (page + 16),), torch.nan)
    strides = (page + 16, size * 2 * HEAD_SIZE, 2 * HEAD_SIZE, 1)
    companion.kv_cache = memory.as_strided((blocks + 1, KV_HEADS, size, 2 * HEAD_SIZE), strides).view(torch.uint8)
    order, table, used = 1 + torch.randperm(blocks), torch.zeros(4, 20, dtype=torch.int32), 0
    slots = []
    for b, (length, new) in enumerate(zip(SEQ_LENS, QUERY_LENS, strict=True)):
        count = -(-length // size)
        table[b, :count] = order[used : used + count]
        used += count
        position = torch.arange(length)
        places = table[b][position // size].long() * size + position % size
        slots.append(places[length - new :])
        kept = torch.arange(max(0, length - new - WINDOW + 1), length - new)
        for i, rows in enumerate(step.history[b]):
            content = slice(i * HEAD_SIZE, (i + 1) * HEAD_SIZE)
            companion.pages[places[kept] // size, places[kept] % size, :, content] = rows[kept]
        gone = (length - new - WINDOW + 1) // size  # blocks of tokens that left the window
        table[b, : max(gone, 0)] = 0
    scheduler = SimpleNamespace(max_num_batched_tokens=sum(QUERY_LENS) + 3, max_num_seqs=5)
    compilation = SimpleNamespace(static_forward_context={"layer.recent": companion})
    builder = recent.RecentMetadataBuilder(
        SimpleNamespace(block_size=size),
        ["layer.recent"],
        SimpleNamespace(scheduler_config=scheduler, compilation_config=compilation),
        torch.device("cpu"),
    )
    common = SimpleNamespace(
        num_reqs=4,
        num_actual_tokens=sum(QUERY_LENS) + 1,
        seq_lens=step.metadata.seq_lens,
        block_table_tensor=table,
        slot_mapping=torch.cat([*slots, torch.tensor([-1])]),
    )
    metadata = {"layer.recent": builder.build(0, common)}
    return {"attn_metadata": metadata, "no_compile_layers": {"layer.recent": companion}}


@pytest.mark.parametrize("kind", list(IMPLS))
@pytest.mark.parametrize("strict", [False, True], ids=["raw prompts", "strict"])
@pytest.mark.parametrize("shared", [False, True], ids=["own cache", "another layer's"])
def test_a_window_is_read_from_companion_pages(kind, strict, shared, monkeypatch):
    """Catches a ring row of the wrong position, freed or padded places that are read, raw keys of a sharing layer."""
    monkeypatch.setenv("NIBBLEKV_WINDOW", str(WINDOW))
    monkeypatch.setenv("NIBBLEKV_STRICT", "1" if strict else "0")
    step, writer = make_step(), make_impl(kind)
    impl = make_impl(kind, kv_sharing_target_layer_name="layer") if shared else writer
    context = with_window(writer, step, writer.longest_decode)
    monkeypatch.setattr(attention, "get_forward_context", lambda: SimpleNamespace(**context))
    layer = SimpleNamespace(head_size_v=HEAD_SIZE, layer_name="other" if shared else "layer")
    if shared:  # its target ran before it
        writer_layer = SimpleNamespace(head_size_v=HEAD_SIZE, layer_name="layer")
        run_step(writer, step, writer_layer, raw=not strict)
    output, expected = run_step(impl, step, layer, raw=not (strict or shared))
    starts = step.metadata.query_start_loc.tolist()
    unquantized = [
        (torch.cat((key, step.key[begin:end])), torch.cat((value, step.value[begin:end])))
        for (key, value), begin, end in zip(step.history, starts, starts[1:], strict=False)
    ]
    options = AttentionOptions(HEAD_SIZE**-0.5, raw_window=WINDOW)
    assert error(output, expected(options, unquantized)) < 1e-3
    assert error(output, expected(options)) > 1e-2


WINDOW_CONFIG = {
    "scheduler_config": {"disable_hybrid_kv_cache_manager": False, "max_num_seqs": 8},
    "cache_config": {"kv_cache_dtype_skip_layers": [], "cache_dtype": INT4},
    "parallel_config": {"decode_context_parallel_size": 1},
    "model_config": {"is_hybrid": False, "attention_chunk_size": None, "dtype": torch.bfloat16},
    "speculative_config": None,
    "kv_transfer_config": None,
    "additional_config": {"nibblekv": {"window": 32}},
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scheduler_config": {"disable_hybrid_kv_cache_manager": True}}, "hybrid KV cache manager"),
        ({"kv_transfer_config": "any"}, "no --kv-transfer-config"),
        ({"cache_config": {"kv_cache_dtype_skip_layers": ["1"], "cache_dtype": INT4}}, "no --kv-cache-dtype-skip-layers"),
        ({"speculative_config": {"method": "eagle", "num_speculative_tokens": 4}}, "no draft model"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 16}}, "at most 15 draft tokens"),
        ({"parallel_config": {"decode_context_parallel_size": 2}}, "no decode context parallelism"),
        ({"model_config": {"is_hybrid": True, "attention_chunk_size": None}}, "no Mamba layers"),
        ({"model_config": {"is_hybrid": False, "attention_chunk_size": 8192}}, "no chunked local attention"),
    ],
)
def test_a_window_that_cannot_be_kept_is_refused_when_the_model_is_built(changed, message, monkeypatch):
    """Catches a window whose tokens would be lost, or kept for ever, while requests are served."""

    def use(entries: dict[str, Any]) -> None:
        fields = {name: SimpleNamespace(**value) if isinstance(value, dict) else value for name, value in entries.items()}
        config = SimpleNamespace(**fields | {"additional_config": entries["additional_config"]})
        config.compilation_config = Compilation({})
        monkeypatch.setattr(attention, "get_current_vllm_config_or_none", lambda: config)

    for name in ("_last_dtype", "_last_compilation"):
        monkeypatch.setattr(attention, name, None)
    use(WINDOW_CONFIG)
    assert make_impl("triton").nibblekv_settings.window == 32
    use(WINDOW_CONFIG | changed)
    with pytest.raises(NotImplementedError, match=f"NIBBLEKV_WINDOW: expected .*{message}"):
        make_impl("triton")
    use(WINDOW_CONFIG | changed | {"additional_config": {}})
    make_impl("triton")


@pytest.mark.parametrize(
    ("fmt", "dtype", "tokens"), [("int4", 2, 4), ("int4", 4, 2), ("int2", 2, 2), ("int8_per_token_head", 2, 8)]
)
def test_companions_have_pages_of_the_packed_ones_size(fmt, dtype, tokens, monkeypatch):
    """Catches layers of two page sizes, for which vLLM pads the pool, and blocks that do not divide the packed ones."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

    monkeypatch.setenv("NIBBLEKV_FORMAT", fmt)
    common = {"dtype": torch.uint8, "kv_quant_mode": KVQuantMode.INT4_PER_TOKEN_HEAD, "head_size": HEAD_SIZE}
    packed = FullAttentionSpec(block_size=16, num_kv_heads=KV_HEADS, **common)
    layer = SimpleNamespace(get_attn_backend=lambda: NibbleKVTritonBackend, get_kv_cache_spec=lambda config: packed)
    layers: dict[str, Any] = {}
    companion = recent.RecentLayer(layer, 32, 16, torch.float32 if dtype == 4 else torch.bfloat16, layers)
    layers["0.recent"] = companion
    spec = companion.get_kv_cache_spec(None)
    backend = companion.get_attn_backend()
    assert spec.block_size == tokens
    assert backend.customize_spec(spec) == spec
    assert backend.get_name() == "TRITON_ATTN"
    assert spec.unpadded_page_size_bytes == tokens * KV_HEADS * 2 * HEAD_SIZE * dtype
    own = NibbleKVTritonBackend.customize_spec(packed)
    assert spec.page_size_bytes == own.page_size_bytes
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: SimpleNamespace(is_block_outermost=False)),
        speculative_config=None,
    )
    groups = get_kv_cache_groups(config, {"0": own, "0.recent": spec})
    assert [(group.layer_names, group.kv_cache_spec) for group in groups] == [(["0"], own), (["0.recent"], spec)]


def test_a_graph_reads_the_unquantized_pages_of_the_step_that_it_is_replayed_for():
    """Catches metadata in new memory, where a captured graph would go on reading the pages of another request."""
    scheduler = SimpleNamespace(max_num_batched_tokens=8, max_num_seqs=4)
    layers = {"0.recent": SimpleNamespace(ring=9)}
    config = SimpleNamespace(scheduler_config=scheduler, compilation_config=SimpleNamespace(static_forward_context=layers))
    builder = recent.RecentMetadataBuilder(SimpleNamespace(block_size=4), list(layers), config, torch.device("cpu"))

    def build(seq_lens: list[int], first_page: int, slots: list[int]) -> Any:
        table = first_page + torch.arange(24, dtype=torch.int32).view(2, 12)
        fields = {"num_reqs": 2, "num_actual_tokens": len(slots), "slot_mapping": torch.tensor(slots)}
        return builder.build(0, SimpleNamespace(**fields, seq_lens=torch.tensor(seq_lens), block_table_tensor=table))

    captured = build([1, 1], 0, [0, 0])
    build([17, 41], 100, [407, -1])
    # Nine tokens lie in at most three pages; block b is page b % 3 of the ring.
    assert captured.stored.tolist() == [[103, 104, 102], [121, 122, 120]]
    assert [index.tolist() for index in captured.written] == [[101, 0], [3, 0]]
