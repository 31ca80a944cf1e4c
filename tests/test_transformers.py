"""transformers models on packed pages: every family's layers, and every way that `generate` drives a cache.

The oracle is always the same model through transformers' own eager attention, over what the pages hold, dequantized.
"""

import copy
import importlib.util
import sys
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402
from transformers.masking_utils import eager_mask  # noqa: E402

from nibblekv import dequantize, quantize  # noqa: E402
from nibblekv.cache import CacheFullError, PagedKVCache  # noqa: E402
from nibblekv.integrations import transformers as integration  # noqa: E402
from nibblekv.integrations.transformers import attach, detach  # noqa: E402
from nibblekv.peers import cache_argument  # noqa: E402

BASE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}  # families whose head size follows from the hidden size
WINDOW = {"sliding_window": 16}
HYBRID = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral-window": ("MistralConfig", "MistralForCausalLM", WINDOW),
    "qwen2-bias": ("Qwen2Config", "Qwen2ForCausalLM", TWO_HEADS),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "qwen3-moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", EXPERTS),
    "mixtral-window": ("MixtralConfig", "MixtralForCausalLM", EXPERTS | WINDOW),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {}),
    "gemma2-softcap": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        HYBRID | {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 24},
    ),
    "gemma3-d256": ("Gemma3TextConfig", "Gemma3ForCausalLM", HYBRID | {"head_dim": 256, "query_pre_attn_scalar": 100}),
    "gemma3n-shared-keys": (
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "vocab_size_per_layer_input": 96,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    "phi3-d96": ("Phi3Config", "Phi3ForCausalLM", TWO_HEADS | {"hidden_size": 192, "head_dim": 96}),
    "gpt-oss-sinks": ("GptOssConfig", "GptOssForCausalLM", HYBRID | EXPERTS),
    "granite-multiplier": ("GraniteConfig", "GraniteForCausalLM", TWO_HEADS | {"attention_multiplier": 0.3}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", TWO_HEADS),
    "olmo3-hybrid": ("Olmo3Config", "Olmo3ForCausalLM", TWO_HEADS | HYBRID),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", TWO_HEADS),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", TWO_HEADS),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", TWO_HEADS),
    "phi": ("PhiConfig", "PhiForCausalLM", TWO_HEADS),
    "cohere": ("CohereConfig", "CohereForCausalLM", TWO_HEADS),
    "cohere2-hybrid": ("Cohere2Config", "Cohere2ForCausalLM", HYBRID),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", TWO_HEADS),
    "starcoder2-window": ("Starcoder2Config", "Starcoder2ForCausalLM", TWO_HEADS | WINDOW),
    "llama4-chunks": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        EXPERTS
        | {
            "attention_chunk_size": 16,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "intermediate_size_mlp": 64,
            "moe_layers": [],
        },
    ),
    "exaone4-hybrid": ("Exaone4Config", "Exaone4ForCausalLM", HYBRID),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {}),
}
LEFT_PADS = 11
PREFILL, CHUNK, DECODE = 37, 5, 3  # a second chunk and then single tokens: beyond the windows of 16


def build(family, seed=0, **overrides):
    config_name, model_name, options = FAMILIES[family]
    if not hasattr(transformers, config_name):
        pytest.skip(f"this transformers has no {config_name}")
    torch.manual_seed(seed)
    config = getattr(transformers, config_name)(**{**BASE, **options, **overrides})
    model = getattr(transformers, model_name)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # A freshly made bias or sink is zero and would hide that it is ignored.
            if name.endswith(("bias", "sinks")):
                parameter.normal_()
            elif any(part in name for part in ("q_proj", "k_proj", "qkv", "query_key_value", "c_attn")):
                parameter.mul_(8)  # else all scores are alike, and so are right and wrong attention
    return model


def prompt(batch, length, pads=0, seed=1):
    """Return input_ids and attention_mask, [batch, length]; the first sequence has `pads` pads on its left."""
    ids = torch.randint(2, BASE["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    ids[0, :pads], mask[0, :pads] = 0, 0
    return ids, mask


def attached(model, format="int8_per_token_head", **options):
    """Attach without a window or constants, so that the oracle need only know what pages hold."""
    return attach(model, format, **{"block_size": 16, "window": 0, "sinks": 0, "calibration": None, **options})


def forward(model, ids, mask, cache, first=0):
    """Run the columns of `ids` from `first` on."""
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)[:, first:]
    with torch.no_grad():
        return model(ids[:, first:], attention_mask=mask, position_ids=position_ids, past_key_values=cache).logits


def assert_near(got, want, limit=5e-3):
    """Two runs of a model on the same stored bytes: a rounding that falls the other way in one code is allowed, no more."""
    assert got.shape == want.shape
    assert (got - want).norm() <= limit * want.norm()


class DequantizedCache(DynamicCache):
    """What a packed cache must amount to: each key and value replaced by its stored form, kept as floats."""

    def __init__(self, format):
        super().__init__()
        self.format = format

    def update(self, key_states, value_states, *args, **kwargs):
        roles = {"key": key_states, "value": value_states}
        states = (dequantize(*quantize(x, self.format, role=role), self.format) for role, x in roles.items())
        return super().update(*states, *args, **kwargs)


def generate(model, ids, mask, cache, seed=0, **options):
    torch.manual_seed(seed)
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True, **options}
    return model.generate(ids, attention_mask=mask, past_key_values=cache, pad_token_id=0, **options)


def assert_generates_like_oracle(model, ids, mask, **options):
    """Generate on packed pages and on the dequantized oracle: the same tokens. Return the cache and what was generated."""
    format, backend = options.pop("format", "int8_per_token_head"), options.pop("backend", "auto")
    cache = attached(model, format, strict=True, backend=backend)
    packed = generate(model, ids, mask, cache, **options)
    detach(model)
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    oracle = generate(model, ids, mask, DequantizedCache(format), **options)
    model.set_attn_implementation(implementation)
    assert torch.equal(packed.sequences, oracle.sequences)
    # One rounding may swap two running beams that do not make it into the result.
    if options.get("num_beams", 1) == 1:
        assert_near(torch.stack(packed.logits), torch.stack(oracle.logits))
    attached(model, format)
    return cache, packed


@pytest.fixture(autouse=True)
def _no_rename_warnings():
    """transformers 5.24 renames `past_key_values` to `cache` and takes both."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


@pytest.fixture
def layer_errors(monkeypatch):
    """Check each attention call against the model's own eager attention over the dequantized pages; list the errors."""
    errors = []
    real_attention, real_mask = integration._attention, integration._mask

    def mask(**kwargs):
        described = real_mask(**kwargs)
        described.oracle = eager_mask(**kwargs)
        return described

    def attention(module, query, key, value, attention_mask, **kwargs):
        layer = key._nibblekv_layer
        out, weights = real_attention(module, query, key, value, attention_mask, **kwargs)
        cache, batch, columns = layer.cache, query.shape[0], attention_mask.oracle.shape[-1]
        real = attention_mask.expand(batch, columns)
        pages = []
        for part, raw in enumerate((key, value)):
            x = torch.full((batch, columns, raw.shape[1], raw.shape[3]), 7.0)
            for b, seq_id in enumerate(cache._seq_ids):
                x[b, real[b]] = cache.pages.gather(seq_id, layer.layer)[part]
            x = x.transpose(1, 2)
            if query.shape[2] > 1 and not cache.strict:
                x[:, :, columns - query.shape[2] :] = raw
            pages.append(x)
        eager = sys.modules[type(module).__module__].eager_attention_forward
        want, _ = eager(module, query, *pages, attention_mask.oracle, **kwargs)
        rows = real[:, columns - query.shape[2] :]
        assert out.shape == want.shape
        assert not out[~rows].any()
        errors.append(((out - want)[rows].norm() / want[rows].norm()).item())
        return out, weights

    monkeypatch.setattr(integration, "_attention", attention)
    monkeypatch.setattr(integration, "_mask", mask)
    return errors


@pytest.mark.parametrize(("backend", "strict"), [("reference", True), ("auto", True), ("auto", False)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_attends_to_its_pages(family, backend, strict, layer_errors):
    """Window, softcap, sinks, scaling, chunks, head sizes: each layer's output is the eager one over the same bytes."""
    model = build(family)
    cache = attached(model, "int4", strict=strict, backend=backend)
    ids, mask = prompt(2, PREFILL + CHUNK + DECODE, LEFT_PADS)
    ends = [PREFILL, PREFILL + CHUNK, *range(PREFILL + CHUNK + 1, PREFILL + CHUNK + DECODE + 1)]
    for first, end in zip([0, *ends], ends, strict=False):
        forward(model, ids[:, :end], mask[:, :end], cache, first)
    assert len(layer_errors) == model.config.num_hidden_layers * len(ends)
    assert max(layer_errors) <= 2e-4  # operands of the CPU kernels have 16 bits
    assert cache.lengths == mask.sum(1).tolist()
    assert cache.get_seq_length() == ids.shape[1]


@pytest.mark.parametrize("family", ["llama", "gemma3-d256", "gpt-oss-sinks"])
def test_int8_changes_the_model_little(family):
    """Against the unquantized model, end to end: a cache that lost a token or a head would not be this near."""
    model = build(family)
    ids, mask = prompt(2, 60, LEFT_PADS)
    want = forward(model, ids, mask, DynamicCache())[mask.bool()]
    cache = attached(model, strict=True)
    got = forward(model, ids, mask, cache)[mask.bool()]
    assert 0 < (got - want).norm() / want.norm() < 0.03


@pytest.mark.parametrize("family", ["llama", "gemma3-d256", "gpt-oss-sinks", "gemma3n-shared-keys"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "temperature": 2.0, "num_return_sequences": 2},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "do_sample": True},
        {"prefill_chunk_size": 7},
    ],
    ids=["greedy", "sampling", "beams", "sampled-beams", "chunked-prefill"],
)
def test_generate_is_the_oracle(family, options):
    """A left-padded batch through each decoding method, past the window of 16."""
    model = build(family)
    cache, packed = assert_generates_like_oracle(model, *prompt(2, 30, LEFT_PADS), **options)
    if options.get("num_beams", 1) == 1:
        rows = packed.sequences.shape[0] // 2
        assert cache.lengths == [30 - LEFT_PADS + 11] * rows + [30 + 11] * rows


def test_int4_greedy_is_the_oracle():
    """On the reference: other rounding lets some 4-bit code fall the other way, and random weights then answer otherwise."""
    assert_generates_like_oracle(build("llama"), *prompt(1, 40), format="int4", backend="reference")


def test_beams_share_pages():
    """Beams that come from one prompt by `batch_repeat_interleave` store it once."""
    model = build("llama")
    cache = attached(model, strict=True)
    ids, mask = prompt(1, 65)
    forward(model, ids[:, :64], mask[:, :64], cache)
    cache.batch_repeat_interleave(4)
    assert cache.batch_size == 4
    out = generate(model, ids, mask, cache, num_beams=4)
    assert cache.pages.num_blocks - cache.pages.num_free_blocks <= 4 + 4
    fresh = attached(model, strict=True)
    assert torch.equal(generate(model, ids, mask, fresh, num_beams=4).sequences, out.sequences)


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_a_padded_batch_is_its_sequences_alone(family):
    """Pads are not stored, so they cannot matter: the logits of a left-padded batch are those of solo runs."""
    model = build(family)
    ids, mask = prompt(3, 33, LEFT_PADS)
    together = generate(model, ids, mask, attached(model, "int4", strict=True))
    for row, first in enumerate((LEFT_PADS, 0, 0)):
        alone = generate(
            model, ids[row : row + 1, first:], mask[row : row + 1, first:], attached(model, "int4", strict=True)
        )
        assert torch.equal(together.sequences[row, 33:], alone.sequences[0, 33 - first :])
        for got, want in zip(together.logits, alone.logits, strict=True):
            assert_near(got[row], want[0])


def test_right_pads_are_not_stored():
    """A right-padded prefill, then a token for each sequence at its own position."""
    model = build("llama")
    ids, _ = prompt(2, 20)
    mask = torch.ones_like(ids)
    mask[0, 13:] = 0
    cache = attached(model, "int4", strict=True)
    logits = forward(model, ids, mask, cache)
    assert cache.lengths == [13, 20]
    ids, mask = torch.cat((ids, ids[:, :1]), 1), torch.cat((mask, mask[:, -1:] * 0 + 1), 1)
    following = forward(model, ids, mask, cache, 20)
    alone = attached(model, "int4", strict=True)
    first = torch.cat((ids[:1, :13], ids[:1, 20:]), 1)
    want = forward(model, first, torch.ones_like(first), alone)[0]
    assert_near(logits[0, :13], want[:13])
    assert_near(following[0, 0], want[13])


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3-d256"])
def test_strict_does_not_depend_on_chunks(family):
    """Teacher-forced in one forward, what generate wrote token by token: the same logits, as only stored bytes are read."""
    model = build(family)
    ids, mask = prompt(1, 40)
    out = generate(model, ids, mask, attached(model, "int4", strict=True))
    whole = out.sequences[:, :-1]
    logits = forward(model, whole, torch.ones_like(whole), attached(model, "int4", strict=True))
    assert_near(torch.stack(out.logits, 1), logits[:, 39:])


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
@pytest.mark.parametrize("how", ["assistant", "prompt-lookup"])
def test_assisted_generation_is_greedy(family, how):
    """Rejected drafts are cropped: what assisted generation writes is what greedy writes, and the cache holds as much."""
    model = build(family)
    ids, mask = prompt(1, 24)
    ids = torch.cat((ids, ids), 1)
    mask = torch.ones_like(ids)
    greedy_cache, cache = attached(model, strict=True), attached(model, strict=True)
    greedy = generate(model, ids, mask, greedy_cache, max_new_tokens=20)
    assistant = {"assistant_model": build("llama", seed=3)} if how == "assistant" else {"prompt_lookup_num_tokens": 4}
    assisted = generate(model, ids, mask, cache, max_new_tokens=20, **assistant)
    assert torch.equal(assisted.sequences, greedy.sequences)
    assert cache.lengths == greedy_cache.lengths == [48 + 19]
    for layer in range(2):
        pages = (c.pages.gather(c._seq_ids[0], layer) for c in (cache, greedy_cache))
        for got, want in zip(*pages, strict=True):
            torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


def test_a_cache_is_reused_over_turns():
    """The second turn reads the first one's pages: its logits are those of the whole conversation in one go."""
    model = build("gemma3-d256")
    cache = attached(model, strict=True)
    ids, mask = prompt(2, 30, LEFT_PADS)
    first = generate(model, ids, mask, cache)
    turn = torch.cat((first.sequences, prompt(2, 9, seed=5)[0]), 1)
    mask = torch.cat((mask, mask.new_ones(2, turn.shape[1] - 30)), 1)
    second = generate(model, turn, mask, cache)
    fresh = generate(model, turn, mask, attached(model, strict=True))
    assert torch.equal(second.sequences, fresh.sequences)
    assert_near(torch.stack(second.logits), torch.stack(fresh.logits))
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.lengths == []
    again = generate(model, turn[1:], mask[1:], cache)
    assert_near(torch.stack(again.logits)[:, 0], torch.stack(fresh.logits)[:, 1])


def test_crop_counts_columns_not_tokens():
    """Cropping into a padded chunk drops each sequence's own tokens, and the next forward gives the same logits."""
    model = build("llama")
    ids, _ = prompt(2, 20)
    mask = torch.ones_like(ids)
    mask[0, 15:] = 0
    cache = attached(model, strict=True)
    forward(model, ids, mask, cache)
    ids, mask = torch.cat((ids, ids[:, :4]), 1), torch.cat((mask, mask.new_ones(2, 4)), 1)
    want = forward(model, ids, mask, cache, 20)
    assert cache.lengths == [19, 24]
    cache.crop(-7)
    assert (cache.lengths, cache.get_seq_length()) == ([15, 17], 17)
    got = forward(model, ids, mask, cache, 17)[:, 3:]
    assert_near(got, want)
    cache.crop(9)
    assert (cache.lengths, cache.get_seq_length()) == ([9, 9], 9)
    cache.crop(0)
    assert cache.lengths == [9, 9]
    with pytest.raises(ValueError, match="crop: expected to drop at most 9 positions, got 10"):
        cache.crop(-10)


def test_select_and_repeat_follow_the_sequences():
    model = build("llama")
    cache = attached(model, strict=True)
    ids, mask = prompt(3, 21, LEFT_PADS)
    forward(model, ids[:, :20], mask[:, :20], cache)
    want = forward(model, ids, mask, copy.deepcopy(cache), 20)
    chosen = torch.tensor([2, 0, 0])
    cache.batch_select_indices(chosen)
    assert cache.lengths == [20, 20 - LEFT_PADS, 20 - LEFT_PADS]
    got = forward(model, ids[chosen], mask[chosen], cache, 20)
    torch.testing.assert_close(got, want[chosen], rtol=1e-4, atol=1e-4)
    cache.batch_select_indices(torch.tensor([False, True, False]))
    assert cache.lengths == [21 - LEFT_PADS]
    assert cache.batch_size == 1


def test_a_full_cache_says_so_and_goes_on():
    """The pool of 4 pages holds 64 tokens; a forward that does not fit changes nothing, in no layer."""
    model = build("llama")
    cache = attached(model, max_tokens=64, strict=True)
    ids, mask = prompt(1, 70)
    forward(model, ids[:, :60], mask[:, :60], cache)
    with pytest.raises(CacheFullError, match="the cache is full"):
        forward(model, ids, mask, cache, 60)
    assert (cache.lengths, cache.get_seq_length()) == ([60], 60)
    got = forward(model, ids[:, :64], mask[:, :64], cache, 60)
    want = forward(model, ids[:, :64], mask[:, :64], attached(model, strict=True))[:, 60:]
    assert_near(got, want)


def test_a_first_forward_that_failed_binds_no_batch_size():
    """Catches an empty cache that refuses every batch but the one that did not fit."""
    model = build("llama")
    cache = attached(model, max_tokens=128, strict=True)
    ids, mask = prompt(3, 60)
    with pytest.raises(CacheFullError, match="the cache is full"):
        forward(model, ids, mask, cache)
    assert (cache.lengths, cache.batch_size) == ([], -1)
    got = forward(model, ids[:2], mask[:2], cache)
    assert_near(got, forward(model, ids[:2], mask[:2], attached(model, strict=True)))


def test_autocast_gives_values_another_dtype_than_keys():
    """Catches a float32 model that autocast runs in bfloat16 refused: its rotated keys stay float32, its values do not."""
    model = build("llama")
    ids, mask = prompt(1, 40)
    cache = attached(model, window=8, sinks=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.cat([forward(model, ids[:, :39], mask[:, :39], cache), forward(model, ids, mask, cache, 39)], 1)
        detach(model)
        want = forward(model, ids, mask, DynamicCache())
    assert (got - want).norm() < 0.05 * want.norm()


def test_sinks_of_sixteen_bits_are_checked_once(monkeypatch):
    """Catches a copy of the sinks made for every call, which then is a new kind of call each time."""
    model = build("gpt-oss-sinks").bfloat16()
    cache = attached(model, window=8, sinks=4)
    ids, mask = prompt(1, 30)
    forward(model, ids[:, :20], mask[:, :20], cache)
    forward(model, ids[:, :21], mask[:, :21], cache, 20)
    with monkeypatch.context() as patch:
        patch.setattr("nibblekv.ops.paged_attention", None)
        before = forward(model, ids[:, :22], mask[:, :22], cache, 21)
    cache.crop(-1)
    with torch.no_grad():
        model.model.layers[0].self_attn.sinks += 20.0
    assert not torch.equal(forward(model, ids[:, :22], mask[:, :22], cache, 21), before)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_cache_of_inference_mode_works_outside(backend):
    """Catches tables, pages and a window that only inference mode may write to, and `generate` runs without it."""
    model = build("llama")
    options = {"backend": backend, "window": 8, "sinks": 4, "strict": True}
    cache, plain = attached(model, **options), attached(model, **options)
    ids, mask = prompt(1, 200)
    with torch.inference_mode():
        model(ids[:, :20], past_key_values=cache)
    got = forward(model, ids, mask, cache, 20)
    forward(model, ids[:, :20], mask[:, :20], plain)
    assert torch.equal(got, forward(model, ids, mask, plain, 20))
    with torch.inference_mode():
        cache.reorder_cache(torch.tensor([0, 0]))
        model(ids[:, :70].expand(2, -1), past_key_values=cache)
    assert cache.lengths == [270, 270]


def test_an_interrupted_forward_is_told_and_taken_back():
    """An exception between two layers leaves the first with tokens that the second lacks: no silent misalignment."""
    model = build("llama")
    cache = attached(model, strict=True)
    ids, mask = prompt(1, 30)
    forward(model, ids[:, :20], mask[:, :20], cache)

    def fail(*args):
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        forward(model, ids, mask, cache, 20)
    handle.remove()
    with pytest.raises(RuntimeError, match=r"layer 1: the previous forward was interrupted before it; .*cache.crop\(-10\)"):
        forward(model, ids, mask, cache, 20)
    with pytest.raises(RuntimeError, match="at least the 10 positions of the forward that was interrupted before layer 1"):
        cache.crop(-4)
    cache.crop(-10)
    got = forward(model, ids, mask, cache, 20)
    want = forward(model, ids, mask, attached(model, strict=True))[:, 20:]
    assert_near(got, want)


@pytest.mark.parametrize("pads", [0, 3])
def test_a_forward_that_fails_in_attention_leaves_the_cache_as_it_was(pads, monkeypatch):
    """Catches lengths, columns or padding of a forward that never came to its end: the next one would read its tokens."""
    model = build("llama")
    cache = attached(model, strict=True)
    ids, mask = prompt(2, 30, pads=pads)
    forward(model, ids[:, :20], mask[:, :20], cache)
    calls, attend = [], PagedKVCache.attend

    def fail_second(self, *args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError("full")
        return attend(self, *args, **kwargs)

    monkeypatch.setattr(PagedKVCache, "attend", fail_second)
    with pytest.raises(MemoryError):
        forward(model, ids, mask, cache, 20)
    assert cache.lengths == [20 - pads, 20]
    assert cache.get_seq_length() == 20
    got = forward(model, ids, mask, cache, 20)
    want = forward(model, ids, mask, attached(model, strict=True))[:, 20:]
    assert_near(got, want)


def test_detach_gives_the_model_back():
    model = build("llama")
    before = model.config._attn_implementation
    ids, mask = prompt(1, 12)
    want = forward(model, ids, mask, DynamicCache())
    attached(model)
    attached(model)
    assert model.config._attn_implementation == "nibblekv"
    detach(model)
    detach(model)
    assert model.config._attn_implementation == before
    torch.testing.assert_close(forward(model, ids, mask, DynamicCache()), want, rtol=0, atol=0)


def test_import_registers_nothing(monkeypatch):
    """Registration is attach's doing: executing the module leaves transformers as it was."""

    def fail(*args, **kwargs):
        raise AssertionError("registered on import")

    for interface in (transformers.AttentionInterface, transformers.masking_utils.AttentionMaskInterface):
        monkeypatch.setattr(interface, "register", fail)
    spec = importlib.util.spec_from_file_location("second_copy", integration.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "second_copy", module)
    spec.loader.exec_module(module)
    with pytest.raises(AssertionError, match="registered on import"):
        module.attach(build("llama"))


@pytest.mark.parametrize(
    ("config_name", "model_name", "options", "reason"),
    [
        ("T5Config", "T5ForConditionalGeneration", {"d_kv": 32, "d_ff": 64}, "encoder-decoder models have cross-attention"),
        ("BartConfig", "BartForConditionalGeneration", {"d_model": 64}, "encoder-decoder models have cross-attention"),
        (
            "DeepseekV3Config",
            "DeepseekV3ForCausalLM",
            {"kv_lora_rank": 16, "q_lora_rank": 16, "n_routed_experts": 2, "n_group": 1, "first_k_dense_replace": 2},
            r"latent attention \(MLA\) caches compressed vectors",
        ),
        ("MambaConfig", "MambaForCausalLM", {}, "layer 0 is '(linear_attention|mamba)'|keeps a state"),
        ("JambaConfig", "JambaForCausalLM", {}, "layer 0 is '(linear_attention|mamba)'|keeps a state"),
        ("FalconH1Config", "FalconH1ForCausalLM", {}, "layer 0 is 'hybrid'|keeps a state"),
        ("BloomConfig", "BloomForCausalLM", {"n_head": 2}, "does not use transformers' AttentionInterface"),
    ],
)
def test_what_cannot_work_is_refused_when_the_cache_is_built(config_name, model_name, options, reason):
    options = {**BASE, "head_dim": 32, **options}
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**options))
    before = model.config._attn_implementation
    with pytest.raises(NotImplementedError, match=f"{model_name} cannot use a packed cache: .*({reason})"):
        attach(model)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("family", FAMILIES)
def test_constants_are_derived_from_every_family(family):
    """Catches a family that does not run on token ids and positions alone, or whose layers that share keys count twice."""
    model = build(family)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        cache = attach(model)
    assert len(cache.calibration.layers) == len(cache.layers)
    forward(model, *prompt(2, 24, LEFT_PADS), cache)


def test_bad_arguments_are_named():
    model = build("llama")
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="format: expected one of int4"):
        attach(model, "int5")
    with pytest.raises(ValueError, match="max_tokens: expected at least 1 or None, got 0"):
        attach(model, max_tokens=0)
    with pytest.raises(TypeError, match="model: expected a transformers PreTrainedModel, got Linear"):
        attach(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="head_dim: expected a multiple of 8 from 32 to 512, got 16"):
        attach(build("llama", head_dim=16))
    assert model.config._attn_implementation == before


def test_the_cache_goes_by_the_name_that_this_release_has():
    """Catches a release whose new name for the argument our mask or cache does not see, and a warning from our own calls."""
    model = build("llama")
    ids, mask = prompt(1, 14)
    old = [forward(model, ids, mask, attached(model)), generate(model, ids, mask, attached(model)).sequences]
    named = [cache_argument(model, attached(model)) for _ in range(2)]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        logits = model(ids, attention_mask=mask, **named[0]).logits
        tokens = model.generate(ids, attention_mask=mask, pad_token_id=0, max_new_tokens=12, do_sample=False, **named[1])
    assert torch.equal(logits, old[0])
    assert torch.equal(tokens, old[1])
    assert [cache.lengths for given in named for cache in given.values()] == [[14], [25]]


def refused(error, message, call, lengths=(10,)):
    """Run `call(model, cache, ids, mask)` on a cache of ten tokens: refused with a sentence, the cache unharmed."""
    model = build("llama")
    cache = attached(model, strict=True)
    ids, mask = prompt(1, 14)
    forward(model, ids[:, :10], mask[:, :10], cache)
    with pytest.raises(error, match=message):
        call(model, cache, ids, mask)
    detach(model)
    attached(model)
    assert cache.lengths == list(lengths)
    got = forward(model, ids, mask, cache, 10)
    want = forward(model, ids, mask, attached(model, strict=True))[:, 10:]
    assert_near(got, want)


def test_a_user_mask_is_refused():
    def call(model, cache, ids, mask):
        model(ids[:, 10:], attention_mask=torch.ones(1, 1, 4, 14, dtype=torch.bool), past_key_values=cache)

    refused(
        NotImplementedError, r"attention_mask: expected None or a 2-D mask of pads, got one of shape \(1, 1, 4, 14\)", call
    )


def test_masking_stored_tokens_is_refused():
    def call(model, cache, ids, mask):
        hidden = mask.clone()
        hidden[0, 3] = 0
        forward(model, ids, hidden, cache, 10)

    refused(ValueError, r"attention_mask: expected \[10\] ones over the cached positions.* got \[9\]", call)


def test_a_mask_of_the_wrong_length_is_refused():
    def call(model, cache, ids, mask):
        hidden = mask.clone()
        hidden[0, 12] = 0
        model(ids[:, 10:], attention_mask=hidden[:, 3:], past_key_values=cache)

    refused(ValueError, r"attention_mask: expected shape \(1, 14\)", call)


def test_another_batch_size_is_refused():
    def call(model, cache, ids, mask):
        model(ids[:, 10:].repeat(2, 1), past_key_values=cache)

    refused(
        ValueError, r"input_ids: expected 1 sequences, as the cache holds, got 2; call cache.batch_repeat_interleave", call
    )


def test_a_forward_without_the_cache_is_refused():
    def call(model, cache, ids, mask):
        model(ids)

    refused(RuntimeError, r"LlamaAttention \(layer 0\): expected the keys and values that a nibblekv cache handed out", call)


def test_a_static_cache_is_refused():
    def call(model, cache, ids, mask):
        model.generate(ids, attention_mask=mask, max_new_tokens=2, cache_implementation="static", pad_token_id=0)

    message = "expected the keys and values that a nibblekv cache handed out|needs another pattern than causal"
    refused((RuntimeError, NotImplementedError), message, call)


def test_another_attention_implementation_is_told():
    """The user switches the model to eager with our cache still in use: the second layer says so."""
    model = build("llama")
    cache = attached(model, strict=True)
    ids, mask = prompt(1, 10)
    model.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match="layer 0: its keys went to another attention than nibblekv's"):
        forward(model, ids, mask, cache)
    attached(model)
    want = forward(model, ids, mask, attached(model, strict=True))
    assert_near(forward(model, ids, mask, cache), want)


def test_attention_weights_are_refused():
    def call(model, cache, ids, mask):
        model(ids[:, 10:], past_key_values=cache, output_attentions=True)

    refused((NotImplementedError, ValueError), "output_attentions", call)


def test_a_compiled_model_breaks_its_graph_at_the_pages():
    """Compiled, the model computes the same; asked for one whole graph, it refuses with our sentence."""
    model = build("llama", num_hidden_layers=1)
    ids, mask = prompt(1, 12)
    want = forward(model, ids, mask, attached(model, strict=True))
    torch._dynamo.config.cache_size_limit, limit = 4, torch._dynamo.config.cache_size_limit
    cache = attached(model, strict=True)
    compiled = torch.compile(model.model.layers[0], backend="eager")
    model.model.layers[0] = compiled
    got = [forward(model, ids[:, :end], mask[:, :end], cache, first) for first, end in ((0, 9), (9, 10), (10, 11), (11, 12))]
    assert_near(torch.cat(got, 1), want)
    model.model.layers[0] = torch.compile(compiled._orig_mod, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="packed cache runs eagerly"):
        forward(model, ids, mask, attached(model))
    torch._dynamo.config.cache_size_limit = limit


def test_export_and_offload_are_refused():
    cache = attached(build("llama"))
    assert not cache.is_compileable
    with pytest.raises(NotImplementedError, match="export"):
        cache.early_initialization(1, 2, 32, torch.float32, torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="offloading"):
        cache.layers[0].offload()


def test_dropout_and_gradients_are_refused():
    model = build("llama", attention_dropout=0.1)
    cache = attached(model)
    ids, _ = prompt(1, 8)
    with pytest.raises(NotImplementedError, match="dropout: expected 0"):
        model.train()(ids, past_key_values=cache)
    model.eval()
    loss = model(ids, past_key_values=cache).logits.sum()
    with pytest.raises(NotImplementedError, match="backward: a packed cache is for inference"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("k_format", "v_format"), [("int4", None), ("int8_per_token_head", "int4")])
def test_half_precision_models_and_mixed_formats(dtype, k_format, v_format):
    """The cache's size is what the formats say, and the logits stay near those of the model's own cache."""
    model = build("llama").to(dtype)
    ids, mask = prompt(2, 64, LEFT_PADS)
    want = forward(model, ids, mask, DynamicCache()).float()[mask.bool()]
    cache = attached(model, k_format, v_format=v_format, max_tokens=128)
    got = forward(model, ids, mask, cache).float()[mask.bool()]
    assert (got - want).norm() / want.norm() < 0.05
    k_bytes, v_bytes = (32 if name.startswith("int8") else 16 for name in (k_format, v_format or k_format))
    assert cache.nbytes == 2 * 128 * 2 * (k_bytes + v_bytes + 8)


# --- window and sinks ----------------------------------------------------------------------------------------------------

KEPT = {"window": 8, "sinks": 2}
# One layer: its keys do not depend on earlier attention, so no code is rounded the other way and the oracle is exact.
ONE_LAYER = {
    "llama": {"num_hidden_layers": 1},
    "mistral-window": {"num_hidden_layers": 1},
    "gemma3-d256": {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
}


def oracle_attention(format, pads, strict):
    """Return an eager attention over raw keys and values that reads them as a packed cache with KEPT does.

    pads: of each sequence on its left; a batch of more sequences repeats each.
    """

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        (batch, heads, length, _), columns = query.shape, key.shape[2]
        first = torch.tensor(pads).repeat_interleave(batch // len(pads))[:, None, None, None]
        k = torch.arange(columns).view(1, 1, 1, columns) - first
        q = torch.arange(columns - length, columns).view(1, 1, length, 1) - first
        raw = (k < KEPT["sinks"]) | (q - k < KEPT["window"])
        if length > 1 and not strict:
            raw = raw | (k >= columns - length - first)
        roles = {"key": key, "value": value}
        forms = [(x, dequantize(*quantize(x, format, role=role), format)) for role, x in roles.items()]
        (key, stored_key), (value, stored_value) = (
            [x.repeat_interleave(heads // x.shape[1], 1) for x in pair] for pair in forms
        )
        score = torch.where(raw, query @ key.transpose(2, 3), query @ stored_key.transpose(2, 3)) * scaling
        weight = torch.softmax(score + attention_mask[..., :columns], -1)
        out = (weight * raw) @ value + (weight * ~raw) @ stored_value
        return out.transpose(1, 2).contiguous(), None

    return attention


def assert_window_is_the_oracles(family, batch, pads, strict=True, **options):
    model = build(family, **ONE_LAYER[family])
    ids, mask = prompt(batch, 60, pads)
    if "prompt_lookup_num_tokens" in options:
        ids[:, 30:] = ids[:, :30]  # something to look up
    cache = attached(model, "int4", strict=strict, **KEPT)
    packed = generate(model, ids, mask, cache, max_new_tokens=20, **options)
    detach(model)
    lost = [pads] + [0] * (batch - 1)
    transformers.AttentionInterface.register("window_oracle", oracle_attention("int4", lost, strict))
    transformers.AttentionMaskInterface.register("window_oracle", eager_mask)
    model.set_attn_implementation("window_oracle")
    options.pop("prompt_lookup_num_tokens", None)
    oracle = generate(model, ids, mask, DynamicCache(), max_new_tokens=20, **options)
    assert torch.equal(packed.sequences, oracle.sequences)
    if options.get("num_beams", 1) == 1 and len(packed.logits) == len(oracle.logits):
        assert_near(torch.stack(packed.logits), torch.stack(oracle.logits), 1e-4)
    return cache


@pytest.mark.parametrize("family", ONE_LAYER)
@pytest.mark.parametrize(
    "options",
    [{}, {"strict": False}, {"num_beams": 3}, {"prefill_chunk_size": 7}, {"prefill_chunk_size": 45}],
    ids=["greedy", "raw-prompt", "beams", "chunks", "long-chunks"],
)
def test_window_and_sinks_are_read_raw(family, options):
    """A left-padded batch, far enough for the ring to turn over. Catches a key in the wrong form, of another position or
    another sequence, and pads that shift either."""
    cache = assert_window_is_the_oracles(family, 2, LEFT_PADS, **options)
    assert cache.lengths == [60 + 19 - LEFT_PADS] * (cache.batch_size // 2) + [60 + 19] * (cache.batch_size // 2)


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_window_survives_drafts_that_are_dropped(family):
    assert_window_is_the_oracles(family, 1, 0, prompt_lookup_num_tokens=10)


def test_window_is_not_the_plain_cache():
    """Catches tests of the window on a model that it does not change."""
    model = build("llama")
    ids, mask = prompt(1, 60)
    plain, near, raw = (
        forward(model, ids, mask, cache)
        for cache in (attached(model, "int4", strict=True), attached(model, "int4", strict=True, **KEPT), attached(model))
    )
    assert (near - plain).norm() > 0.02 * plain.norm()
    assert (near - raw).norm() < 0.8 * (plain - raw).norm()


def test_window_over_turns_selections_and_copies():
    """The second turn, of sequences selected, repeated, copied and cropped by a draft, reads what one long forward reads."""
    model = build("gemma3-d256")
    ids, mask = prompt(2, 70, LEFT_PADS)
    want = forward(model, ids, mask, attached(model, "int4", strict=True, **KEPT))
    cache = attached(model, "int4", strict=True, **KEPT)
    for first, end in ((0, 41), (41, 55), (55, 56)):
        forward(model, ids[:, :end], mask[:, :end], cache, first)
    chosen = torch.tensor([1, 0, 1])
    cache.batch_select_indices(chosen)
    cache = copy.deepcopy(cache)
    draft = torch.cat((ids[chosen, :56], prompt(3, 20, seed=7)[0]), 1)
    forward(model, draft, torch.cat((mask[chosen, :56], mask.new_ones(3, 20)), 1), cache, 56)
    cache.crop(-20)
    assert_near(forward(model, ids[chosen], mask[chosen], cache, 56), want[chosen, 56:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_window_of_any_dtype_is_counted_in_bytes(dtype):
    """Catches raw rows kept in another dtype than the model's, and bytes that no figure shows."""
    model = build("llama").to(dtype)
    ids, mask = prompt(2, 64, LEFT_PADS)
    want = forward(model, ids, mask, DynamicCache())[:, 60:]
    forms = ({}, {"window": 80, "sinks": 2})
    plain, cache = (attached(model, "int4", max_tokens=192, strict=True, **kept) for kept in forms)
    for first, end in ((0, 60), (60, 64)):
        _, got = (forward(model, ids[:, :end], mask[:, :end], c, first) for c in (plain, cache))
    assert_near(got.float(), want.float(), 0.02)  # the window holds everything
    assert cache.nbytes == plain.nbytes + 2 * 2 * (80 + 32 + 2) * 2 * (32 + 32) * dtype.itemsize
    with pytest.raises(ValueError, match="window, sinks: expected 0"):
        attach(model, window=-1)
    cache = attach(model)
    assert (cache.window, cache.sinks) == (32, 4)
