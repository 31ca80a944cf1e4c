"""Calibrations in both attention implementations, without an engine: what is mapped, what is refused, who gets what."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_attention import (  # noqa: F401
    HEAD_SIZE,
    IMPLS,
    KV_HEADS,
    LAYER,
    SINKS,
    SLOPES,
    WINDOW,
    Compilation,
    error,
    make_impl,
    make_step,
    no_engine,
    run_step,
    with_window,
)

from nibblekv import AttentionOptions
from nibblekv.calibration import Calibration, LayerCalibration
from nibblekv.integrations.vllm import attention, calibrated, transfer


def constants(heads: int = KV_HEADS, seed: int = 0, size: int = HEAD_SIZE) -> LayerCalibration:
    """Return constants with large means and a map that is neither symmetric nor orthogonal."""
    generator = torch.Generator().manual_seed(seed)
    k_mean = 4 * torch.randn(heads, size, generator=generator)
    turn = torch.linalg.qr(torch.randn(heads, size, size, generator=generator))[0]
    gains = torch.exp(0.5 * torch.randn(heads, size, 1, generator=generator))
    return LayerCalibration(k_mean, gains * turn, 2 * torch.randn(heads, size, generator=generator))


def calibrated_impl(kind: str, layer: LayerCalibration, **arguments: Any) -> Any:
    """Return a layer's implementation with constants, as if its weights had been loaded."""
    impl = make_impl(kind, **arguments)
    impl.nibblekv_calibration = layer
    return impl


def biased_step(layer: LayerCalibration, **fields: Any) -> Any:
    """Return a step whose keys and values have the constants as their means."""
    step = make_step(**fields)
    step.key, step.value = step.key + layer.k_mean, step.value + layer.v_mean
    step.history = [(key + layer.k_mean, value + layer.v_mean) for key, value in step.history]
    return step


def raw_rows(step: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each sequence's keys and values as the model made them."""
    starts = step.metadata.query_start_loc.tolist()
    return [
        (torch.cat((key, step.key[begin:end])), torch.cat((value, step.value[begin:end])))
        for (key, value), begin, end in zip(step.history, starts, starts[1:], strict=False)
    ]


@pytest.mark.parametrize("kind", list(IMPLS))
@pytest.mark.parametrize("strict", ["0", "1"], ids=["raw prompts", "strict"])
@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ({}, {}),
        ({"sliding_window": 20}, {"sliding_window": 20}),
        ({"alibi_slopes": SLOPES}, {"alibi_slopes": torch.tensor(SLOPES)}),
        ({"sinks": SINKS.bfloat16()}, {"sinks": SINKS}),
    ],
    ids=["plain", "sliding window", "ALiBi", "sinks"],
)
def test_outputs_are_attention_over_the_restored_rows(kind, strict, arguments, options, monkeypatch):
    """Catches a constant that reaches an output or a sink's share, and a call's own keys beside mapped ones."""
    monkeypatch.setenv("NIBBLEKV_STRICT", strict)
    layer = constants()
    step = biased_step(layer)
    output, expected = run_step(calibrated_impl(kind, layer, **arguments), step, LAYER, raw=strict == "0")
    every_row = AttentionOptions(HEAD_SIZE**-0.5, raw_window=1024, **options)
    assert error(output, expected(AttentionOptions(HEAD_SIZE**-0.5, **options))) < 1e-3
    assert 1e-3 < error(output, expected(every_row, raw_rows(step))) < 0.1


def test_a_constant_in_the_keys_drowns_a_plain_cache_and_no_calibrated_one():
    """Catches a calibration that changes nothing: four bits of such a key are spent on its constant."""
    layer = constants()
    layer = LayerCalibration(100 * layer.k_mean, torch.eye(HEAD_SIZE).repeat(KV_HEADS, 1, 1), layer.v_mean)
    step = biased_step(layer)
    exact = AttentionOptions(HEAD_SIZE**-0.5, raw_window=1024)
    errors = []
    for constants_of_run in (None, layer):
        step.metadata.nibblekv_split = None
        output, expected = run_step(calibrated_impl("cpu", constants_of_run), step, LAYER, raw=False)
        errors.append(error(output, expected(exact, raw_rows(step))))
    assert errors[0] > 0.2
    assert errors[1] < 0.1


@pytest.mark.parametrize("kind", list(IMPLS))
@pytest.mark.parametrize("strict", ["0", "1"], ids=["raw prompts", "strict"])
@pytest.mark.parametrize("shared", [False, True], ids=["own cache", "another layer's"])
def test_the_window_shares_the_constants(kind, strict, shared, monkeypatch):
    """Catches plain rows in the window, whose scores would differ by q.k_mean, and a sharing layer without constants."""
    monkeypatch.setenv("NIBBLEKV_WINDOW", str(WINDOW))
    monkeypatch.setenv("NIBBLEKV_STRICT", strict)
    layer = constants()
    step, writer = biased_step(layer), calibrated_impl(kind, layer)
    impl = calibrated_impl(kind, layer, kv_sharing_target_layer_name="layer") if shared else writer
    plain, step.history = step.history, [layer.stored(key, value) for key, value in step.history]
    context = with_window(writer, step, writer.longest_decode)
    step.history = plain
    monkeypatch.setattr(attention, "get_forward_context", lambda: SimpleNamespace(**context))
    if shared:
        run_step(writer, step, SimpleNamespace(head_size_v=HEAD_SIZE, layer_name="layer"), raw=strict == "0")
    vllm_layer = SimpleNamespace(head_size_v=HEAD_SIZE, layer_name="other" if shared else "layer")
    output, expected = run_step(impl, step, vllm_layer, raw=strict == "0" and not shared)
    options = AttentionOptions(HEAD_SIZE**-0.5, raw_window=WINDOW)
    assert error(output, expected(options, raw_rows(step))) < 1e-3


def test_an_eight_bit_output_is_cast_after_the_mean_is_added():
    layer = constants()
    step = biased_step(layer, nibblekv_split=None)
    impl = calibrated_impl("triton", layer)
    scale = torch.tensor(0.05)
    expected, _ = run_step(impl, step, LAYER, raw=False)
    forward = impl.forward

    def forward_in_eight_bits(vllm_layer, query, key, value, cache, metadata, output):
        eight = torch.zeros(output.shape, dtype=torch.float8_e4m3fn)
        forward(vllm_layer, query, key, value, cache, metadata, eight, scale)
        output[:-2] = eight[:-2].float() * scale

    impl.forward = forward_in_eight_bits
    output, _ = run_step(impl, step, LAYER, raw=False)
    assert error(output, expected.double()) < 0.05


def test_the_profiling_run_sees_what_the_map_allocates(monkeypatch):
    from nibblekv.backends.triton.prefill import WORKSPACE_BYTES

    seen: list[int] = []
    query, empty = torch.zeros(8, 4, HEAD_SIZE), torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, **how: seen.append(size) or empty(0))
    for strict, each in (("0", 12), ("1", 32)):
        monkeypatch.setenv("NIBBLEKV_STRICT", strict)
        calibrated_impl("triton", constants()).nibblekv_reserve(query)
        assert seen[-1] == WORKSPACE_BYTES + 4 * 8 * 4 + each * query.numel()


@pytest.mark.parametrize(
    ("of_model", "of_rank", "num_ranks", "expected"),
    [
        (8, 8, 1, [(0, 8)]),
        (8, 2, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (2, 1, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (3, 3, 2, [(0, 3), (0, 3)]),
        (8, 3, 2, [None, None]),
        (3, 1, 2, [None, None]),
    ],
)
def test_each_rank_takes_the_constants_of_its_heads(of_model, of_rank, num_ranks, expected):
    """Catches heads of another rank: vLLM repeats heads in turn where there are fewer than ranks."""
    found = [calibrated.heads_of_rank(of_model, of_rank, rank, num_ranks) for rank in range(num_ranks)]
    assert [None if heads is None else (heads.start, heads.stop) for heads in found] == expected


class Layer(torch.nn.Module):
    """The part of vLLM's attention layer that says whose cache it keeps."""

    def __init__(self, name: str, impl: Any, target: str | None = None) -> None:
        super().__init__()
        self.layer_name, self.impl, self.kv_sharing_target_layer_name = name, impl, target
        self.attn_type, self.head_size_v = "decoder", HEAD_SIZE


def save_model(folder: Path, number: float = 1.0) -> Path:
    """Write a checkpoint that is enough to tell a model by."""
    folder.mkdir(exist_ok=True)
    save_file({"model.norm.weight": torch.full((8,), number)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that makes the configuration of a model of 3 layers vLLM's current one, and returns its layers."""
    monkeypatch.setenv("NIBBLEKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(attention, "get_tensor_model_parallel_rank", lambda: 1)
    monkeypatch.setattr(attention, "get_tensor_model_parallel_world_size", lambda: 2)
    for name in ("_last_dtype", "_last_compilation"):
        monkeypatch.setattr(attention, name, None)
    kept = []

    def start(calibration: str | Path, stages: int = 1) -> dict[str, Any]:
        compilation = Compilation({})
        config = SimpleNamespace(
            additional_config={"nibblekv": {"calibration": str(calibration)}},
            cache_config=SimpleNamespace(cache_dtype="int4_per_token_head", block_size=16),
            compilation_config=compilation,
            model_config=SimpleNamespace(
                model=str(save_model(tmp_path / "model")),
                revision=None,
                hf_text_config=SimpleNamespace(num_hidden_layers=3),
            ),
            load_config=SimpleNamespace(download_dir=None),
            parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        )
        kept.append(compilation)
        monkeypatch.setattr(attention, "get_current_vllm_config_or_none", lambda: config)
        return compilation.static_forward_context

    return start


def save_calibration(path: Path, num_layers: int = 3, heads: int = 2 * KV_HEADS, model: Path | None = None) -> Calibration:
    """Write constants of a model whose checkpoint lies in a folder, by default that which `engine` loads."""
    name = calibrated.checkpoint_fingerprint(model or path.parents[1], 3)
    found = Calibration(tuple(constants(heads, seed) for seed in range(num_layers)), name, 64, "a text")
    found.save(path)
    return found


def load_weights(layers: dict[str, Any]) -> None:
    for layer in list(layers.values()):
        layer.impl.process_weights_after_loading(torch.float32)


@pytest.mark.parametrize("stages", [1, 2])
def test_layers_get_their_own_constants_and_sharing_ones_their_targets(engine, tmp_path, stages):
    """Catches layers that are counted wrongly (skipped, sharing, of a draft), heads of another rank, a forgotten stage."""
    layers = engine("auto", stages)
    found = save_calibration(tmp_path / "model/nibblekv/calibration.safetensors")
    names = ["model.layers.0.attn", "model.layers.1.attn", "model.layers.2.attn"][stages - 1 :]
    for name in names:
        skipped = name == "model.layers.1.attn"
        layers[name] = Layer(name, make_impl("triton", dtype="auto" if skipped else "int4_per_token_head"))
    last = names[-1]
    layers["sharing"] = Layer("sharing", make_impl("triton", kv_sharing_target_layer_name=last), last)
    load_weights(layers)
    for number, whole in list(enumerate(found.layers))[stages - 1 :]:
        layer = layers[f"model.layers.{number}.attn"]
        if number == 1:
            assert not layer.impl.is_ours
            continue
        own = layer.impl.nibblekv_calibration
        assert torch.equal(own.k_mean, whole.k_mean[KV_HEADS:])
        assert torch.equal(own.k_map, whole.k_map[KV_HEADS:])
        # They are read where vLLM finds a model's buffers, and are no weights of it.
        assert any(buffer is own.k_mean for buffer in layer.buffers())
        assert not layer.state_dict()
    assert layers["sharing"].impl.nibblekv_calibration is layers[last].impl.nibblekv_calibration
    before = layers[last].impl.nibblekv_calibration
    layers["draft"] = Layer("draft", make_impl("triton"))
    layers["shares"] = Layer("shares", make_impl("triton", kv_sharing_target_layer_name=last), last)
    load_weights(layers)
    assert layers["draft"].impl.nibblekv_calibration is None
    assert layers["shares"].impl.nibblekv_calibration is layers[last].impl.nibblekv_calibration is before


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("missing", "no such file: .*/model/nibblekv/calibration.safetensors"),
        ("broken", "expected a whole safetensors file, got"),
        ("other model", "expected the calibration of this model"),
        ("layers", "expected 3 layers, as the model caches, got 4 in"),
        ("heads", r"expected k_mean of shape \(2, 64\), got \(3, 64\) in layer 0 of"),
        ("softcap", "expected no key means with softcap"),
        ("no weights", "expected safetensors files to tell the model by, got none"),
    ],
)
def test_a_calibration_that_cannot_be_used_stops_the_engine(engine, tmp_path, case, message):
    """Catches a file that is found unfit while requests are served, or is left out without a word."""
    folder = tmp_path / "model"
    layers = engine(folder)
    path = folder / "nibblekv/calibration.safetensors"
    if case != "missing":
        other = save_model(tmp_path / "other", 2.0) if case == "other model" else None
        save_calibration(path, 4 if case == "layers" else 3, 3 if case == "heads" else 2 * KV_HEADS, other)
    if case == "broken":
        path.write_bytes(path.read_bytes()[:-9])
    if case == "no weights":
        (folder / "model.safetensors").rename(folder / "model.bin")

    def build() -> None:
        for i in range(3):
            layers[str(i)] = Layer(str(i), make_impl("cpu", logits_soft_cap=5.0 if case == "softcap" else None))

    if case in ("layers", "heads", "softcap"):
        build()
    with pytest.raises(ValueError, match=f"NIBBLEKV_CALIBRATION: {message}") as caught:
        load_weights(layers) if layers else build()
    assert "\n" not in str(caught.value)


def test_a_model_that_is_not_on_this_machine_yet_is_compared_when_it_is(engine, tmp_path, monkeypatch):
    """Catches a hub's model whose wrong calibration is taken because there were no files to compare it with at first."""
    folder = tmp_path / "model"
    path = tmp_path / "c.safetensors"
    layers = engine(path)
    save_calibration(path, model=save_model(tmp_path / "other", 2.0))
    with monkeypatch.context() as away:
        away.setattr(calibrated.Checkpoint, "folder", lambda self: None)
        layers["0"] = Layer("0", make_impl("cpu"))
    assert folder.is_dir()
    with pytest.raises(ValueError, match="NIBBLEKV_CALIBRATION: expected the calibration of this model"):
        load_weights(layers)


def test_a_hub_name_that_is_not_in_the_cache_has_no_folder(tmp_path):
    checkpoint = calibrated.Checkpoint("someone/a-model", None, str(tmp_path), 3, 1)
    assert checkpoint.folder() is None
    with pytest.raises(ValueError, match="calibration: expected the files of someone/a-model on this machine, got none"):
        checkpoint.fingerprint()
    snapshot = tmp_path / "models--someone--a-model/snapshots/0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--someone--a-model/refs").mkdir()
    (tmp_path / "models--someone--a-model/refs/main").write_text("0123")
    assert checkpoint.folder() == snapshot


def test_auto_without_a_file_says_so_and_runs(engine, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(attention.logger, "warning_once", lambda message, *values: said.append(message))
    layers = engine("auto")
    for name in ("0", "1", "2"):
        layers[name] = Layer(name, make_impl("cpu"))
    load_weights(layers)
    assert all(layer.impl.nibblekv_calibration is None for layer in layers.values())
    # Once: each search reads the checkpoint.
    assert said == ["NIBBLEKV_CALIBRATION=auto: no calibration was saved for this model, so it runs without."]


def test_pages_of_another_calibration_have_another_name(engine, tmp_path):
    """Catches an engine that reads pages mapped by other constants, or plain ones, as its own."""
    names = set()
    for i, setting in enumerate(("off", tmp_path / "a.safetensors", tmp_path / "b.safetensors")):
        engine(setting)
        if setting != "off":
            save_calibration(setting, num_layers=2 + i, model=tmp_path / "model")
        for fmt in ("int4", "int4_per_token_head"):
            config = attention.get_current_vllm_config_or_none()
            config.additional_config["nibblekv"]["format"] = fmt
            names.add(transfer.pages_name(config))
    assert len(names) == 6
    assert {None, "nibblekv-int4.v1-int4.v1-planar16"} < names
    assert sum(name is not None and "-calib." in name for name in names) == 4
    config.additional_config["nibblekv"]["calibration"] = str(tmp_path / "none")
    with pytest.raises(ValueError, match="NIBBLEKV_CALIBRATION: expected a file that can be read, got"):
        transfer.pages_name(config)
