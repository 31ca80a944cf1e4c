"""Calibration: the same attention from mapped keys and values, files that are whole or refused, and better answers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from nibblekv import KVCacheLayout
from nibblekv.cache import PagedKVCache
from nibblekv.calibration import (
    UNCOUNTED_TOKENS,
    Calibration,
    LayerCalibration,
    _error_cost,
    _key_map,
    _Statistics,
    calibrate,
    checkpoint_fingerprint,
    derive_calibration,
    find_calibration,
    fingerprint,
    save_path,
)  # fmt: skip

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from tiny_models import save_tiny_model  # noqa: E402

from nibblekv.evaluation import evaluate, load_text, text_windows  # noqa: E402
from nibblekv.integrations.transformers import attach, detach  # noqa: E402
from nibblekv.models import load_model  # noqa: E402
from nibblekv.peers import cache_argument  # noqa: E402

HEADS, QUERY_HEADS, SIZE, SIZE_V = 2, 6, 64, 40
LENGTHS = (23, 37)


def random_layer(seed: int = 0, heads: int = HEADS, size: int = SIZE, size_v: int = SIZE_V) -> LayerCalibration:
    generator = torch.Generator().manual_seed(seed)
    k_mean, noise = (3 * torch.randn(heads, size, generator=generator) for _ in range(2))
    turn = torch.linalg.qr(torch.randn(heads, size, size, generator=generator))[0]
    return LayerCalibration(
        k_mean, torch.exp(0.3 * noise)[..., None] * turn, 2 * torch.randn(heads, size_v, generator=generator)
    )


def attention_oracle(query, keys, values, sinks=None, slopes=None):
    """Attend plain queries to plain keys and values of each sequence, float64; return (out, lse)."""
    outs, lses, begin = [], [], 0
    for key, value in zip(keys, values, strict=True):
        length = key.shape[0]
        q = query[begin : begin + length].double().unflatten(1, (HEADS, -1))
        score = torch.einsum("qhgd,khd->hgqk", q, key.double()) * SIZE**-0.5
        distance = torch.arange(length)[None] - torch.arange(length)[:, None]
        if slopes is not None:
            score = score + slopes.double().view(HEADS, -1, 1, 1) * distance
        score = score.masked_fill(distance > 0, -torch.inf)
        if sinks is not None:
            score = torch.cat((score, sinks.double().view(HEADS, -1, 1, 1).expand(-1, -1, length, 1)), -1)
        lses.append(score.logsumexp(-1).permute(2, 0, 1).flatten(1))
        weight = score.softmax(-1)[..., :length]
        outs.append(torch.einsum("hgqk,khd->qhgd", weight, value.double()).flatten(1, 2))
        begin += length
    return torch.cat(outs), torch.cat(lses)


def filled_cache(layer, format="int4", dtype=torch.float32, **options):
    """Return a cache with two sequences, the step that wrote them, and the tokens: query, key, value."""
    layout = KVCacheLayout.create(format, num_kv_heads=HEADS, head_size=SIZE, head_size_v=SIZE_V, block_size=16)
    cache = PagedKVCache(layout, calibrations=[layer], raw_dtype=dtype, **options)
    generator = torch.Generator().manual_seed(1)
    total = sum(LENGTHS)
    query, key, value = (
        torch.randn(total, heads, size, generator=generator).to(dtype)
        for heads, size in ((QUERY_HEADS, SIZE), (HEADS, SIZE), (HEADS, SIZE_V))
    )
    key, value = (key + 3).to(dtype), (value - 2).to(dtype)
    return cache, cache.append(cache.add_sequences(2), key, value, LENGTHS), query, key, value


@pytest.mark.parametrize("options", [{}, {"sinks": True}, {"slopes": True}], ids=["plain", "sinks", "alibi"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_attention_is_that_of_the_restored_keys_and_values(options, backend):
    """Catches a constant that reaches the softmax, the output or the log-sum-exp: the oracle reads the same pages."""
    cache, step, query, _, _ = filled_cache(random_layer(), backend=backend)
    generator = torch.Generator().manual_seed(2)
    sinks = 9 * torch.randn(QUERY_HEADS, generator=generator) if "sinks" in options else None
    slopes = torch.rand(QUERY_HEADS, generator=generator) if "slopes" in options else None
    stored = [cache.gather(seq_id) for seq_id in cache.seq_ids]
    expected, expected_lse = attention_oracle(query, *zip(*stored, strict=True), sinks, slopes)
    asked = {"sinks": sinks, "alibi_slopes": slopes}
    limit = 1e-5 if backend == "reference" else 1e-3
    for repeat in range(2):  # the second call skips the checks
        out = cache.attend(step, query, **asked)
        assert (out - expected).norm() <= limit * expected.norm(), repeat
    poisoned = torch.full_like(out, torch.nan)
    out, lse = cache.attend(step, query, out=poisoned, return_lse=True, **asked)
    assert out is poisoned
    assert (out - expected).norm() <= limit * expected.norm()
    assert (lse - expected_lse).abs().max() <= 100 * limit


def test_what_is_kept_unquantized_shares_the_constant():
    """Catches raw rows that were not mapped: scores of pages and window would differ by q.k_mean."""
    for window, sinks in ((5, 3), (64, 0)):
        cache, step, query, key, value = filled_cache(random_layer(), "int8_per_token_head", window=window, sinks=sinks)
        expected, _ = attention_oracle(query, key.split(LENGTHS), value.split(LENGTHS))
        out = cache.attend(step, query, key=key, value=value, strict=True)
        assert (out - expected).norm() <= (1e-5 if window == 64 else 0.03) * expected.norm()
        raw = cache.attend(step, query, key=key, value=value)
        assert (raw - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 512])
def test_a_row_is_mapped_to_the_same_bits_whatever_is_beside_it(dtype, size):
    """Catches matrix products that sum in another order for another number of rows."""
    layer = random_layer(size=size)
    generator = torch.Generator().manual_seed(5)
    spread = torch.exp(2 * torch.randn(size, generator=generator))
    query, key = ((torch.randn(301, heads, size, generator=generator) * spread).to(dtype) for heads in (QUERY_HEADS, HEADS))
    value = torch.randn(301, HEADS, SIZE_V, generator=generator).to(dtype)
    key[7] = 0
    key[9, 0, 3], query[11, 1, 2] = torch.nan, torch.inf

    def mapped(rows: slice) -> torch.Tensor:
        stored = layer.stored(key[rows], value[rows], batch_invariant=True)
        return torch.cat([x.flatten(1) for x in (layer.asked(query[rows], batch_invariant=True), *stored)], 1)

    whole = mapped(slice(None))
    for begin, end in ((0, 1), (6, 8), (100, 117), (7, 300)):
        torch.testing.assert_close(mapped(slice(begin, end)), whole[begin:end], rtol=0, atol=0, equal_nan=True)
    good = torch.arange(20, 301)
    exact = torch.linalg.solve(layer.k_map.double().mT, query[good].double().unflatten(1, (HEADS, -1)).mT).mT.flatten(1, 2)
    for found in (layer.asked(query[good]), layer.asked(query[good], batch_invariant=True)):
        error = (found.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
        assert error.max() < (1e-5 if dtype == torch.float32 else 4e-3)
    assert layer.stored(key[9:10], value[9:10], batch_invariant=True)[0].isnan().any(-1).tolist() == [[True, False]]
    assert layer.asked(query[11:12], batch_invariant=True)[0, 1].isnan().all()


def test_attention_with_sinks_is_batch_invariant():
    """Catches a share of the sinks that is summed up in another order for another batch."""
    cache, step, query, _, _ = filled_cache(random_layer(), backend="cpu")
    sinks = torch.linspace(-3, 9, QUERY_HEADS)
    whole, lse = cache.attend(step, query, sinks=sinks, batch_invariant=True, return_lse=True)
    for i, (begin, end) in enumerate(((0, LENGTHS[0]), (LENGTHS[0], sum(LENGTHS)))):
        alone = cache.view([cache.seq_ids[i]], end - begin)
        out, alone_lse = cache.attend(alone, query[begin:end], sinks=sinks, batch_invariant=True, return_lse=True)
        assert torch.equal(out, whole[begin:end])
        assert torch.equal(alone_lse, lse[begin:end])
    plain = cache.attend(step, query, sinks=sinks)
    assert (plain - whole).norm() <= 1e-4 * plain.norm()


def test_a_calibration_for_the_keys_makes_them_easier_to_store():
    """Catches a mean that is added instead of taken away, and a map used the wrong way round."""
    errors = []
    generator = torch.Generator().manual_seed(3)
    spread = torch.exp(torch.randn(HEADS, SIZE, generator=generator))
    mean, v_mean = 20 * torch.randn(HEADS, SIZE, generator=generator), 20 * torch.ones(HEADS, SIZE_V)
    for layer in (None, LayerCalibration(mean, torch.diag_embed(spread**-0.5), v_mean)):
        cache, step, query, key, value = filled_cache(None)
        cache.calibrations[0] = layer
        key, value, query = key * spread + mean, value + v_mean, query
        cache.write(step, key, value)
        expected, _ = attention_oracle(query, key.split(LENGTHS), value.split(LENGTHS))
        errors.append(float((cache.attend(step, query) - expected).norm() / (expected - 18).norm()))
    assert errors[1] < 0.2 * errors[0]


def test_sixteen_bit_tensors_keep_their_dtype():
    cache, step, query, key, value = filled_cache(random_layer(), "int8_per_token_head", torch.bfloat16, window=4)
    expected, _ = attention_oracle(query, key.split(LENGTHS), value.split(LENGTHS))
    out = cache.attend(step, query, key=key, value=value)
    assert out.dtype == torch.bfloat16
    assert (out - expected).norm() <= 0.01 * expected.norm()


def test_an_eight_bit_output_is_scaled_after_the_mean_is_added():
    cache, step, query, _, _ = filled_cache(random_layer())
    expected, scale = cache.attend(step, query), torch.tensor([0.25])
    out = torch.zeros(expected.shape, dtype=torch.float8_e4m3fn)
    assert cache.attend(step, query, out=out, output_scale=scale) is out
    for found in (out, cache.attend(step, query, output_scale=scale)):
        assert (found.float() * scale - expected).norm() <= 0.03 * expected.norm()


def test_a_bent_score_sees_key_means_and_refuses_them():
    layer = random_layer()
    cache, step, query, _, _ = filled_cache(layer)
    with pytest.raises(ValueError, match=r"softcap: expected 0 with a calibration that has key means, got 30"):
        cache.attend(step, query, softcap=30.0)
    without = dataclasses.replace(layer, k_mean=torch.zeros_like(layer.k_mean))
    cache, step, query, _, _ = filled_cache(without, "int8_per_token_head")
    plain, plain_step, *_ = filled_cache(None, "int8_per_token_head")
    out, expected = cache.attend(step, query, softcap=2.0), plain.attend(plain_step, query, softcap=2.0)
    assert (out - expected).norm() <= 0.03 * expected.norm()


def test_a_layer_of_another_size_is_refused():
    layer = random_layer(heads=HEADS + 1)
    with pytest.raises(ValueError, match=r"calibration: expected k_mean of shape \(2, 64\), got \(3, 64\)"):
        filled_cache(layer)


def tiny_calibration(model="0123456789abcdef") -> Calibration:
    return Calibration(tuple(random_layer(seed) for seed in range(3)), model, 4096, "a text")


def test_a_file_gives_back_what_was_saved(tmp_path: Path):
    saved = tiny_calibration()
    saved.save(tmp_path / "new folder" / "c.safetensors")
    assert [path.name for path in (tmp_path / "new folder").iterdir()] == ["c.safetensors"]
    found = Calibration.load(tmp_path / "new folder" / "c.safetensors", saved.model)
    assert (found.model, found.positions, found.source) == (saved.model, 4096, "a text")
    assert len(found.layers) == 3
    for a, b in zip(found.layers, saved.layers, strict=True):
        assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("k_mean", "k_map", "v_mean"))


def spoil(name: str, value):
    """Return an edit that replaces a tensor, or drops it."""

    def edit(tensors, metadata):
        tensors.pop(name)
        if value is not None:
            tensors[name] = value

    return edit


def with_number(name: str, number: float):
    def edit(tensors, metadata):
        tensors[name][1, 7] = number

    return edit


HOSTILE = {
    "nan": (with_number("k_mean.1", torch.nan), "finite numbers in k_mean.1"),
    "infinity": (with_number("v_mean.2", torch.inf), "finite numbers in v_mean.2"),
    "singular map": (with_number("k_map.0", 0.0), "k_map.0 and its inverse below 65536, got up to"),
    "zero map": (spoil("k_map.2", torch.zeros(HEADS, SIZE, SIZE)), "k_map.2 and its inverse below 65536, got up to 0 and"),
    "huge map": (with_number("k_map.0", 1e30), "k_map.0 and its inverse below"),
    "tiny map": (spoil("k_map.0", 1e-6 * torch.eye(SIZE).repeat(HEADS, 1, 1)), "k_map.0 and its inverse below"),
    "nan map": (with_number("k_map.1", torch.nan), "finite numbers in k_map.1"),
    "missing": (spoil("k_mean.1", None), "k_mean, k_map, v_mean of every layer"),
    "shape": (spoil("k_map.1", torch.eye(SIZE + 1).repeat(HEADS, 1, 1)), "k_map of shape"),
    "not square": (spoil("k_map.1", torch.ones(HEADS, SIZE, SIZE + 1)), "k_map of shape"),
    "scales": (spoil("k_map.1", torch.ones(HEADS, SIZE)), r"k_map.1 of \[num_kv_heads, head_size, head_size\] float32"),
    "heads": (spoil("v_mean.1", torch.ones(HEADS + 1, SIZE_V)), "v_mean of shape"),
    "dimensions": (spoil("k_mean.1", torch.ones(HEADS * SIZE)), r"k_mean.1 of \[num_kv_heads, head_size\] float32"),
    "empty": (spoil("k_mean.1", torch.ones(0, SIZE)), r"k_mean.1 of \[num_kv_heads, head_size\] float32"),
    "dtype": (spoil("k_mean.1", torch.ones(HEADS, SIZE, dtype=torch.int64)), "k_mean.1 of .* float32"),
    "no metadata": (lambda tensors, metadata: metadata.clear(), "a file that `nibblekv calibrate` wrote"),
    "older": (
        lambda tensors, metadata: metadata.update(version="1"),
        r"version 2 \(run `nibblekv calibrate` again\), got 1",
    ),
    "newer": (lambda tensors, metadata: metadata.update(version="3"), "version 2 .*, got 3"),
    "positions": (lambda tensors, metadata: metadata.update(positions="-1"), "model, positions and source"),
    "no model": (lambda tensors, metadata: metadata.pop("model"), "model, positions and source"),
    "other model": (lambda tensors, metadata: metadata.update(model="f" * 16), "the calibration of this model"),
    "no tensors": (lambda tensors, metadata: tensors.clear(), "of every layer, got 0 tensors"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_broken_file_is_refused_in_one_sentence(tmp_path: Path, case: str):
    """Catches a file that is half believed: NaN, zero scales or another model's vectors would spoil every answer."""
    path = tmp_path / "c.safetensors"
    tiny_calibration().save(path)
    edit, message = HOSTILE[case]
    metadata = {
        "format": "nibblekv-calibration",
        "version": "2",
        "model": "0123456789abcdef",
        "positions": "9",
        "source": "t",
    }
    tensors = load_file(path)
    edit(tensors, metadata)
    save_file(tensors, path, metadata)
    with pytest.raises(ValueError, match=message) as caught:
        Calibration.load(path, "0123456789abcdef")
    assert "\n" not in str(caught.value)


def test_files_that_are_no_safetensors_are_refused(tmp_path: Path):
    path = tmp_path / "c.safetensors"
    tiny_calibration().save(path)
    whole = path.read_bytes()
    for broken in (b"", whole[:4], whole[:-1], whole[: len(whole) // 2], b"\xff" * 64, whole + b"more", b"{}" * 40):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match="expected a whole safetensors file"):
            Calibration.load(path)
    with pytest.raises(FileNotFoundError, match="calibration: no such file"):
        Calibration.load(tmp_path)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "c.safetensors"
    path.write_text("old")
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        tiny_calibration().save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]
    assert path.read_text() == "old"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    return *load_model(str(folder), torch.float32), folder


@pytest.fixture(scope="module")
def windows(tiny) -> torch.Tensor:
    return text_windows(tiny[1], [load_text("bible")], 6, 96)


@pytest.fixture(scope="module")
def found(tiny, windows) -> Calibration:
    return calibrate(tiny[0], windows, source="bible")


def test_the_fingerprint_is_of_the_weights_not_of_their_dtype(tiny):
    model, _, folder = tiny
    rounded, _ = load_model(str(folder), torch.bfloat16)
    assert fingerprint(rounded) == fingerprint(rounded.float()) == fingerprint(model)
    other = load_model(str(folder), torch.float32)[0]
    with torch.no_grad():
        other.model.norm.weight[0] += 0.1
    assert fingerprint(other) != fingerprint(model)


def test_models_whose_norms_have_no_weights_differ_all_the_same():
    """Catches one name for all of them, so that a calibration is taken for another model's."""
    config = transformers.OlmoConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    first, second = (transformers.OlmoForCausalLM(config) for _ in range(2))
    assert fingerprint(first) != fingerprint(second)
    with pytest.raises(NotImplementedError, match="calibration: expected loaded weights"):
        fingerprint(first.to("meta"))


def test_a_checkpoint_has_the_fingerprint_of_its_model(tiny, tmp_path):
    """Catches an engine that refuses a model's own file: its checkpoint is in pieces, holds weights twice, layers that
    predict drafts, or the calibration itself.
    """
    model, _, _ = tiny
    expected = fingerprint(model)
    pieces, whole = tmp_path / "pieces", tmp_path / "whole"
    model.save_pretrained(pieces, max_shard_size="100KB")
    assert len(list(pieces.glob("model-*.safetensors"))) > 2
    save_file({"norm.weight": torch.ones(3)}, pieces / "not-in-the-index.safetensors")
    model.save_pretrained(whole)
    path = save_path(transformers.AutoModelForCausalLM.from_pretrained(whole))
    tiny_calibration(expected).save(path)
    assert path.parent.parent == whole, "engines read every safetensors file of the folder itself as weights"
    weights = load_file(whole / "model.safetensors")
    drafts = {"model.layers.2.input_layernorm.weight": torch.ones(8), "mtp.norm.weight": torch.ones(8)}
    save_file(weights | drafts, whole / "model.safetensors")
    save_file(weights, whole / "consolidated.safetensors")
    for folder in (pieces, whole):
        assert checkpoint_fingerprint(folder, 2) == expected
    assert checkpoint_fingerprint(whole, 3) != expected
    weights["model.norm.weight"][0] += 0.1
    save_file(weights, whole / "model.safetensors")
    assert checkpoint_fingerprint(whole, 2) != expected
    (whole / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match=r"calibration: expected a whole checkpoint in .*whole, got"):
        checkpoint_fingerprint(whole, 2)
    with pytest.raises(ValueError, match="calibration: expected safetensors files to tell the model by, got none in"):
        checkpoint_fingerprint(tmp_path, 2)


def test_a_checkpoint_without_norm_weights_is_told_by_its_embeddings(tmp_path):
    config = transformers.OlmoConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.OlmoForCausalLM(config)
    model.save_pretrained(tmp_path)
    assert checkpoint_fingerprint(tmp_path, 1) == fingerprint(model)


def test_a_model_made_in_memory_has_no_folder(tmp_path, monkeypatch):
    """Catches the working directory taken for the folder of a model that has none."""
    monkeypatch.setenv("NIBBLEKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    tiny_calibration().save("nibblekv/calibration.safetensors")
    model = biased_qwen2()
    assert model.config._name_or_path == ""
    assert find_calibration(model) is None
    assert save_path(model) == tmp_path / "cache/calibrations" / f"{fingerprint(model)}.safetensors"


def test_statistics_are_those_of_the_models_keys_and_values(tiny, windows):
    """Catches keys taken before their rotary embedding, first tokens that are counted, and positions that do not spread."""
    model, _, _ = tiny
    one = calibrate(model, windows[:1], source="", positions=windows.shape[1])
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(windows[:1], **cache_argument(model, cache))
    assert len(one.layers) == len(cache.layers) == 2
    for layer, kept in zip(one.layers, cache.layers, strict=True):
        key, value = kept.keys[0, :, UNCOUNTED_TOKENS:], kept.values[0, :, UNCOUNTED_TOKENS:]
        torch.testing.assert_close(layer.k_mean, key.mean(1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(layer.v_mean, value.mean(1), rtol=1e-4, atol=1e-4)
    spread = calibrate(model, windows, source="")
    assert spread.positions == 4096
    fast, slow = spread.layers[1].k_mean[:, 4], spread.layers[1].k_mean[:, 15]  # a turn in 60 tokens, and in 35,000
    assert fast.abs().max() < slow.abs().max()


def test_the_map_makes_keys_and_queries_alike():
    """Catches a map that is transposed, or undone the wrong way: the moments that both have then differ or have corners."""
    generator = torch.Generator().manual_seed(4)
    keys, queries = (torch.randn(2, 24, 24, generator=generator, dtype=torch.float64) for _ in range(2))
    keys, queries = keys @ keys.mT, 7 * queries @ queries.mT
    k_map = _key_map(keys, queries)
    inverse = torch.linalg.inv(k_map)
    of_keys, of_queries = k_map @ keys @ k_map.mT, inverse.mT @ queries @ inverse
    diagonal = of_keys.diagonal(dim1=1, dim2=2)
    for moments in (of_keys, of_queries):
        moments = moments / moments.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None]
        # But for the floor that is added to both.
        expected = torch.diag_embed(diagonal / diagonal.mean(-1, keepdim=True))
        assert (moments - expected).abs().max() < 0.05 * expected.max()
    assert bool((diagonal[:, :8] > diagonal[:, -8:]).all())
    torch.testing.assert_close(diagonal.mean(-1), keys.diagonal(dim1=1, dim2=2).mean(-1), rtol=0.03, atol=0)


def test_errors_cost_what_they_change_in_the_output():
    """Catches costs of keys that a window keeps or no query sees, and costs other than those that a small error has."""
    generator = torch.Generator().manual_seed(5)
    tokens = 60
    query, key, value = (torch.randn(n, tokens, 8, generator=generator, dtype=torch.float64) for n in (3, 1, 1))
    for window in (0, 40):
        cost = _error_cost(query, key, value, {"sliding_window": window, "softmax_scale": 0.5})
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        visible = (distance >= 0) & (distance < (window or tokens))
        score = (query @ key.mT * 0.5).masked_fill(~visible, -torch.inf)
        step = 1e-5 * torch.eye(tokens, dtype=torch.float64)
        moved = (
            torch.stack([(score + error).softmax(-1) @ value for error in step], 2) - (score.softmax(-1) @ value)[:, :, None]
        )
        expected = (moved / 1e-5).square().sum(-1) * (visible & (distance >= 32))
        expected[..., :UNCOUNTED_TOKENS] = 0
        torch.testing.assert_close(cost, expected, rtol=1e-3, atol=1e-8)
        assert float(cost.amax()) > 1e-3


def test_a_large_constant_does_not_drown_the_statistics():
    """Catches sums in float32: what is left of such keys without their mean is then rounding, or less than nothing."""
    generator = torch.Generator().manual_seed(6)
    query, key, value = (torch.randn(300, n, 16, generator=generator) for n in (4, 2, 2))
    maps = []
    for constant in (0, 4096):
        statistics = _Statistics()
        for part in range(0, 300, 100):
            # Constant channels of keys that no query asks for: the scores, and so the costs, stay as they are.
            key[..., :4], query[..., :4] = constant, 0
            rows = (x[part : part + 100] for x in (query, key, value))
            statistics.add(*rows, {"sliding_window": 0, "softmax_scale": 0.5})
        layer = statistics.constants()
        maps.append(layer.k_map.mT @ layer.k_map)  # directions of equal energy may come in another order
    torch.testing.assert_close(maps[1], maps[0], rtol=1e-3, atol=1e-3 * float(maps[0].abs().max()))


def test_impossible_positions_are_refused(tiny, windows):
    model, _, _ = tiny
    for positions in (95, 4097):
        with pytest.raises(ValueError, match=rf"positions: expected from 96, a window, to 4096, .* got {positions}"):
            calibrate(model, windows, source="", positions=positions)
    with pytest.raises(ValueError, match="windows: expected more than 8 tokens each, got 8"):
        calibrate(model, windows[:, :8], source="")
    assert model.config._attn_implementation != "nibblekv"


def test_channels_that_are_always_zero_give_finite_scales(tiny, windows):
    """Catches 0 / 0: Gemma has channels in which queries and keys are exactly zero."""
    model = load_model(str(tiny[2]), torch.float32)[0]
    with torch.no_grad():
        for layer in model.model.layers:
            for matrix in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                matrix.weight.view(-1, 2, 16, 128)[:, :, 5] = 0
    for layer in calibrate(model, windows[:2], source="").layers:
        for matrix in (layer.k_map, torch.linalg.inv(layer.k_map)):
            assert bool(torch.isfinite(matrix).all())
            assert float(matrix.abs().max()) < 1e3


def logits(model, ids, cuts=(), **options):
    """Return the logits of ids [1, n] from a cache that takes them in chunks."""
    cache = attach(model, **{"block_size": 16, "strict": True, "window": 0, "sinks": 0, **options})
    with torch.no_grad():
        parts = [model(part, **cache_argument(model, cache)).logits for part in ids.tensor_split(list(cuts), 1)]
    detach(model)
    return torch.cat(parts, 1)


def test_answers_do_not_depend_on_how_a_prompt_is_cut(tiny, windows, found):
    """Catches a chunk or a decoded token that is mapped differently from a prompt."""
    model, _, _ = tiny
    ids = windows[:1, :80]
    for options in ({}, {"window": 8, "sinks": 3}):
        whole = logits(model, ids, calibration=found, **options)
        cut = logits(model, ids, cuts=(50, 76, 77, 78), calibration=found, **options)
        assert (whole - cut).norm() <= 5e-3 * whole.norm()


def test_attach_finds_a_saved_calibration_unless_told_otherwise(tiny, windows, found, tmp_path, monkeypatch):
    """Catches a file that is saved and ignored, or read where the caller asked for none."""
    monkeypatch.setenv("NIBBLEKV_CACHE", str(tmp_path / "cache"))
    folder = save_tiny_model(tmp_path / "model")
    model, _ = load_model(str(folder), torch.float32)
    assert find_calibration(model) is None
    assert attach(model).calibration.source == "random tokens"
    for path in (
        folder / "nibblekv/calibration.safetensors",
        tmp_path / "cache/calibrations" / f"{found.model}.safetensors",
    ):
        found.save(path)
        assert find_calibration(model) == path
        for given in ("auto", path, str(path), found):
            cache = attach(model, calibration=given)
            assert torch.equal(cache.calibration.layers[1].k_map, found.layers[1].k_map)
        assert attach(model, calibration=None).calibration is None
        path.unlink()
    with pytest.raises(ValueError, match=r"calibration: expected 2 layers, as the model caches, got 3"):
        attach(model, calibration=tiny_calibration(found.model))
    found.save(tmp_path / "other.safetensors")
    with torch.no_grad():
        model.model.norm.weight[0] += 0.1
    with pytest.raises(ValueError, match=r"calibration: expected the calibration of this model"):
        attach(model, calibration=tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"calibration: expected that of this model"):
        attach(model, calibration=found)
    detach(model)


def test_a_model_in_the_cache_directory_takes_no_more_files(tmp_path, monkeypatch):
    """Catches a calibration that makes a fetched model incomplete: its folder is checked for unknown files."""
    model, _ = load_model(str(save_tiny_model(tmp_path / "models" / "fetched")), torch.float32)
    assert save_path(model) == tmp_path / "models" / "fetched" / "nibblekv/calibration.safetensors"
    monkeypatch.setenv("NIBBLEKV_CACHE", str(tmp_path))
    assert save_path(model) == tmp_path / "calibrations" / f"{fingerprint(model)}.safetensors"


def test_eval_takes_the_saved_calibration_where_the_format_asks_for_it(tiny, windows, found, tmp_path, monkeypatch):
    monkeypatch.setenv("NIBBLEKV_CACHE", str(tmp_path))
    model, _, _ = tiny
    (missing,) = evaluate(model, ["int4+calib"], windows[:1], model_name="tiny")
    assert "nibblekv calibrate" in missing["note"]
    found.save(tmp_path / "calibrations" / f"{found.model}.safetensors")
    formats = ["int4", "int4+calib", "int4+w8s4+calib", "int4+derived"]
    rows = evaluate(model, formats, windows[:1], model_name="tiny")
    assert len({row["kl_mean"] for row in rows}) == 4
    assert rows[2]["kl_mean"] < rows[1]["kl_mean"]
    assert all(row["bits_per_value"] == rows[0]["bits_per_value"] for row in rows)


def biased_qwen2(norm: float = 3000.0):
    """Return a random model of Qwen2's shape whose first layer's keys have a bias, where real ones have theirs: in the
    slowest of the rotary frequencies. Large embeddings make its answers depend on more than rounding.
    """
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=256, hidden_size=256, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(8)
        slow = torch.randn(2, 2, 32)
        slow[..., :28] = 0
        bias = norm * slow / slow.norm(dim=(1, 2), keepdim=True)
        model.model.layers[0].self_attn.k_proj.bias.copy_(bias.flatten())
    return model


def test_keys_with_a_large_bias_keep_their_answers():
    """Catches a cache that breaks Qwen2: four bits of such a key are spent on a constant."""
    model = biased_qwen2()
    ids = torch.randint(0, 256, (2, 160))
    found = calibrate(model, torch.randint(0, 256, (16, 64)), source="random tokens")
    with torch.no_grad():
        expected = model(ids).logits.argmax(-1)

    def agreement(format, **options):
        guess = torch.cat([logits(model, row[None], format=format, **options) for row in ids]).argmax(-1)
        return float((guess == expected).double().mean())

    assert agreement("int4_per_token_head", calibration=None) < 0.6
    assert agreement("int4", calibration=found) >= 0.95
    assert agreement("int4", calibration=found, window=32, sinks=4) >= 0.98
    assert agreement("int4", calibration=None, window=32, sinks=4) < 0.85
    assert agreement("int4", window=32, sinks=4) >= 0.95


def test_constants_are_derived_once_from_the_weights_alone():
    """Catches a draw from the user's random numbers, constants that differ from run to run, or that outlive their weights,
    and an `attach` that runs the model again, or for longer than a prompt takes.
    """
    model, same = biased_qwen2(), biased_qwen2()
    tokens = []
    for each in (model, same):
        each.model.register_forward_pre_hook(lambda module, args: tokens.append(args[0].numel()))
    state = torch.get_rng_state()
    with torch.inference_mode():
        first = attach(model).calibration
    assert sum(tokens) == 2048
    assert torch.equal(torch.get_rng_state(), state)
    assert attach(model, "int3", v_format="int8_per_token_head").calibration is first
    assert derive_calibration(model) is first
    assert sum(tokens) == 2048
    assert first.positions == model.config.max_position_embeddings
    found = derive_calibration(same)
    for a, b in zip(first.layers, found.layers, strict=True):
        assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("k_mean", "k_map", "v_mean"))
        assert not a.k_map.is_inference()
    with torch.no_grad():
        same.model.norm.weight[0] += 1
    assert derive_calibration(same) is not found


def test_nothing_is_derived_where_it_is_not_wanted():
    """Catches a model that is run although its user asked for none, named an impossible format, or keeps eight bits."""
    model = biased_qwen2()
    model.model.register_forward_pre_hook(lambda *_: pytest.fail("the model was run"))
    for options in ({"calibration": None}, {"format": "int8_per_token_head"}, {"format": "fp8_per_token_head"}):
        assert attach(model, **options).calibration is None
    with pytest.raises(ValueError, match="max_tokens: expected"):
        attach(model, max_tokens=0)
    detach(model)


def test_a_model_of_few_positions_is_calibrated_at_those():
    model = biased_qwen2()
    model.config.max_position_embeddings = 40
    assert attach(model).calibration.positions == 40
    detach(model)


def needs_images(model) -> str:
    model.model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(TypeError("pixel_values: missing")))
    return "the model does not run on random tokens: pixel_values: missing"


def overflows(model) -> str:
    model.model.layers[1].self_attn.v_proj.bias.data[3] = torch.inf
    return "expected finite statistics on random tokens, got others in layer 1"


@pytest.mark.parametrize("spoil_model", [needs_images, overflows])
def test_a_model_without_constants_is_attached_all_the_same(spoil_model):
    """Catches an `attach` that fails, or takes constants that spoil every answer, where plain keys would have done."""
    model = biased_qwen2()
    with pytest.warns(UserWarning, match=f"calibration: none, .*{spoil_model(model)}"):
        cache = attach(model)
    assert cache.calibration is None
    assert model.config._attn_implementation == "nibblekv"
    detach(model)
    assert model.config._attn_implementation != "nibblekv"
