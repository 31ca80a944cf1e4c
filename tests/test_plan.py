"""Plans against counts by hand and against the caches themselves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nibblekv import FORMATS, KVCacheLayout
from nibblekv.plan import (
    AttentionLayer,
    attention_layers,
    bits_per_value,
    bytes_per_token,
    cache_bytes,
    plan_rows,
    split_window,
    tokens_that_fit,
)

LLAMA_8B = [AttentionLayer(8, 128, 128)] * 32
HYBRID = [AttentionLayer(1, 256, 256)] * 3 + [AttentionLayer(1, 256, 256, 512)] * 15


def config(**settings) -> SimpleNamespace:
    """Stand in for a transformers config of a text model."""
    made = SimpleNamespace(model_type="test", num_hidden_layers=4, num_attention_heads=8, hidden_size=512, **settings)
    made.get_text_config = lambda decoder: made
    return made


def test_bytes_of_a_token_by_hand():
    """Catches scale words that are forgotten, and K and V that are mixed up."""
    layer = AttentionLayer(num_kv_heads=3, head_size=64, head_size_v=128)
    assert bytes_per_token(layer, "none") == 3 * (64 + 128) * 2
    assert bytes_per_token(layer, "float32") == 3 * (64 + 128) * 4
    assert bytes_per_token(layer, "int4") == 3 * (32 + 4 + 64 + 4)
    assert bytes_per_token(layer, "int8_per_token_head/int4") == 3 * (64 + 4 + 64 + 4)
    assert bits_per_value([AttentionLayer(1, 64, 64)], "int4") == 4.5
    assert bits_per_value(LLAMA_8B, "int4") == 4.25


@pytest.mark.parametrize("format", FORMATS)
def test_a_plan_counts_what_pages_take(format):
    layout = KVCacheLayout.create(format, num_kv_heads=8, head_size=128)
    pages = layout.allocate(7)
    assert cache_bytes(LLAMA_8B[:1], format, 6 * 16 + 1) == pages.numel()


@pytest.mark.parametrize("layers", [LLAMA_8B, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("format", ["none", "int4"])
@pytest.mark.parametrize("memory", [0, 10**6, 123_456_789])
def test_one_page_more_does_not_fit(layers, format, memory):
    """Catches an off-by-one page and a window that is counted at every token."""
    tokens = tokens_that_fit(layers, format, memory)
    assert tokens is not None
    assert cache_bytes(layers, format, tokens) <= memory < cache_bytes(layers, format, tokens + 16)


def test_sliding_layers_stop_growing():
    sliding = [AttentionLayer(1, 256, 256, 512)]
    assert cache_bytes(sliding, "int4", 600) == cache_bytes(sliding, "int4", 10**6) == 33 * 16 * 264
    assert cache_bytes(sliding, "int4", 100) == 7 * 16 * 264
    assert tokens_that_fit(sliding, "int4", 10**6) is None
    assert tokens_that_fit(sliding, "int4", 16 * 264) == 16


def test_rows_compare_with_16_bits():
    plain, packed = plan_rows(LLAMA_8B, ["none", "int4"], 2**30, 8192)
    assert (plain["bytes_per_token"], packed["bytes_per_token"]) == (131_072, 34_816)
    assert (plain["ratio_to_16_bit"], packed["ratio_to_16_bit"]) == (1, 131_072 / 34_816)
    assert (plain["tokens"], plain["sequences"]) == (8192, 1)
    assert packed["bytes_per_sequence"] == 34_816 * 8192
    assert packed["sequences"] == 3


def test_layers_are_read_from_a_config():
    assert attention_layers(config()) == [AttentionLayer(8, 64, 64)] * 4
    assert attention_layers(config(num_key_value_heads=2, head_dim=128)) == [AttentionLayer(2, 128, 128)] * 4
    assert attention_layers(config(sliding_window=64)) == [AttentionLayer(8, 64, 64, 64)] * 4
    assert attention_layers(config(sliding_window=64, use_sliding_window=False)) == [AttentionLayer(8, 64, 64)] * 4
    mixed = config(sliding_window=64, layer_types=["linear_attention", "sliding_attention", "full_attention", "x"])
    assert attention_layers(mixed) == [AttentionLayer(8, 64, 64, 64), AttentionLayer(8, 64, 64)]
    assert len(attention_layers(config(num_kv_shared_layers=3))) == 1


def test_what_has_no_keys_and_values_is_refused():
    with pytest.raises(NotImplementedError, match="latent attention"):
        attention_layers(config(kv_lora_rank=512))
    with pytest.raises(ValueError, match="at least one layer"):
        plan_rows([], ["none"], 1, 1)
    with pytest.raises(ValueError, match="context: expected at least 1 token, got 0"):
        plan_rows(LLAMA_8B, ["none"], 1, 0)
    for size in (0, 24):
        with pytest.raises(ValueError, match=f"block_size: expected a positive multiple of 16, got {size}"):
            plan_rows(LLAMA_8B, ["none"], 1, 1, size)
    with pytest.raises(ValueError, match="memory: expected 0 bytes or more, got -1"):
        tokens_that_fit(LLAMA_8B, "none", -1)
    with pytest.raises(ValueError, match="format: expected one of"):
        bytes_per_token(LLAMA_8B[0], "int4/int5")


def test_transformers_configs_are_understood():
    transformers = pytest.importorskip("transformers")
    gemma = transformers.Gemma3TextConfig(num_hidden_layers=6, num_key_value_heads=1, head_dim=256, sliding_window=512)
    layers = attention_layers(gemma)
    assert [layer.sliding_window for layer in layers] == [512] * 5 + [0]
    assert layers[0].head_size == 256
    layers = attention_layers(transformers.FalconH1Config(num_hidden_layers=3, num_key_value_heads=2, head_dim=64))
    assert layers == [AttentionLayer(2, 64, 64)] * 3


def test_layers_of_different_heads_are_read_one_by_one():
    """Catches a config whose full layers have larger heads than its sliding ones (Gemma 4) read as one size, or refused."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip("this transformers has no Gemma 4")
    gemma = transformers.Gemma4TextConfig(num_hidden_layers=12, num_key_value_heads=1, num_kv_shared_layers=6)
    layers = attention_layers(gemma)
    assert layers == [AttentionLayer(1, 256, 256, gemma.sliding_window)] * 5 + [AttentionLayer(1, 512, 512)]


def test_window_and_sinks_cost_a_sequence_and_not_a_token():
    """Catches bytes that a plan forgets: 32 + 32 of margin + 4 tokens in 16 bit in every layer, sliding or not."""
    assert split_window("int8_per_token_head/int4+w32s4") == ("int8_per_token_head/int4", 32, 4)
    assert split_window("int4+w32s4+derived") == split_window("int4+w32s4+calib") == ("int4", 32, 4)
    assert split_window("int4+w8")[1:] == (8, 0)
    assert split_window("int4+s8")[1:] == (0, 8)
    assert bytes_per_token(LLAMA_8B[0], "int4+w32s4") == bytes_per_token(LLAMA_8B[0], "int4")
    raw = cache_bytes(HYBRID, "int4+w32s4", 1000) - cache_bytes(HYBRID, "int4", 1000)
    assert raw == 18 * (32 + 32 + 4) * 2 * 256 * 2
    assert cache_bytes(HYBRID, "int4+s4", 1000) - cache_bytes(HYBRID, "int4", 1000) == 18 * 4 * 2 * 256 * 2
    assert tokens_that_fit(HYBRID, "int4+w32s4", raw - 1) == 0
    fits = tokens_that_fit(HYBRID, "int4+w32s4", 10**8)
    assert cache_bytes(HYBRID, "int4+w32s4", fits) <= 10**8 < cache_bytes(HYBRID, "int4+w32s4", fits + 16)
    for name in ("int4+", "int4+32", "int4+s4w32", "int4+w32+s4", "+w3x"):
        with pytest.raises(ValueError, match="format: expected a suffix such as"):
            split_window(name)
