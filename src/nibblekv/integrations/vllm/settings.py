"""What a user may set about the plugin, from the environment or vLLM's `--additional-config`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from nibblekv.backends import BACKENDS
from nibblekv.formats import FORMATS

__all__ = ["DTYPES", "SUPPORTED", "Settings"]

# The `--kv-cache-dtype` values that become nibblekv's, and the formats that they store unless a setting says otherwise.
DTYPES = {
    "int4_per_token_head": "int4",
    "int8_per_token_head": "int8_per_token_head",
    "fp8_per_token_head": "fp8_per_token_head",
}
MAX_WINDOW = 1024
SUPPORTED = ("0.26.0", "0.32.0")

_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False, "": False}


@dataclass(frozen=True)
class Settings:
    """The plugin's settings. An additional-config entry wins over its environment variable.

    Attributes:
        format: what `int4_per_token_head` stores: a name in `FORMATS`, or two as `keys:values`.
            NIBBLEKV_FORMAT, {"nibblekv": {"format": ...}}.
        strict: attention reads stored bytes only, and each row is computed the same way in any batch, so that a result
            depends neither on how a prompt was cut into chunks nor on what else is in the batch.
            NIBBLEKV_STRICT, {"nibblekv": {"strict": true}}.
        backend: the nibblekv backend that serves the calls, or `auto`. NIBBLEKV_BACKEND, {"nibblekv": {"backend": ...}}.
        window: the last tokens before each query, its own included, that are read unquantized; 0: none.
            NIBBLEKV_WINDOW, {"nibblekv": {"window": 32}}.
        calibration: what keys and values are mapped by: `off`, a file of `nibblekv calibrate` or a model's folder that holds
            one, or `auto`, the file that was saved for the model, if any.
            NIBBLEKV_CALIBRATION, {"nibblekv": {"calibration": "..."}}.
        disabled: leave vLLM as it is. NIBBLEKV_DISABLE, {"nibblekv": {"disabled": true}}.
    """

    format: str = "int4"
    strict: bool = False
    backend: str = "auto"
    window: int = 0
    calibration: str = "off"
    disabled: bool = False

    @classmethod
    def from_environment(cls) -> Settings:
        """Read the NIBBLEKV_* variables.

        Raises:
            ValueError: names the variable, what was expected and what it holds.
        """
        return cls(
            format=_format("NIBBLEKV_FORMAT", os.environ.get("NIBBLEKV_FORMAT") or cls.format),
            strict=_flag("NIBBLEKV_STRICT", os.environ.get("NIBBLEKV_STRICT", "")),
            backend=_backend("NIBBLEKV_BACKEND", os.environ.get("NIBBLEKV_BACKEND") or cls.backend),
            window=_window("NIBBLEKV_WINDOW", os.environ.get("NIBBLEKV_WINDOW") or "0"),
            calibration=_calibration("NIBBLEKV_CALIBRATION", os.environ.get("NIBBLEKV_CALIBRATION", "")),
            disabled=_flag("NIBBLEKV_DISABLE", os.environ.get("NIBBLEKV_DISABLE", "")),
        )

    def updated(self, additional_config: Any) -> Settings:
        """Return the settings with the entries of vLLM's additional_config["nibblekv"] laid over them.

        Raises:
            ValueError: an entry is unknown or has a value that was not expected.
        """
        entries = additional_config.get("nibblekv", {}) if isinstance(additional_config, dict) else {}
        if not isinstance(entries, dict):
            raise ValueError(f"additional_config['nibblekv']: expected a dictionary, got {entries!r}")
        values = dict(self.__dict__)
        for key, value in entries.items():
            name = f"additional_config['nibblekv']['{key}']"
            if key not in values:
                raise ValueError(f"{name}: expected one of {', '.join(values)}")
            readers = {"format": _format, "backend": _backend, "window": _window, "calibration": _calibration}
            read = readers.get(key, _flag)
            values[key] = read(name, str(value))
        return Settings(**values)

    def formats(self, kv_cache_dtype: str) -> tuple[str, str]:
        """Return the formats of keys and values that a cache dtype of `DTYPES` stores."""
        chosen = self.format if kv_cache_dtype == "int4_per_token_head" else DTYPES[kv_cache_dtype]
        k_format, _, v_format = chosen.partition(":")
        return k_format, v_format or k_format


def _flag(name: str, value: str) -> bool:
    if value.lower() not in _FLAGS:
        raise ValueError(f"{name}: expected 1 or 0, got {value!r}")
    return _FLAGS[value.lower()]


def _window(name: str, value: str) -> int:
    if not value.isdecimal() or int(value) > MAX_WINDOW:
        raise ValueError(f"{name}: expected a number of tokens from 0 to {MAX_WINDOW}, got {value!r}")
    return int(value)


def _calibration(name: str, value: str) -> str:
    """Return `off`, `auto` or a path as it stands: a path is looked up when a model is built."""
    if value.lower() in _FLAGS:
        if _FLAGS[value.lower()]:
            raise ValueError(f"{name}: expected 'off', 'auto' or a path, got {value!r}")
        return "off"
    return "auto" if value.lower() == "auto" else value


def _backend(name: str, value: str) -> str:
    if value != "auto" and value not in BACKENDS:
        raise ValueError(f"{name}: expected 'auto' or one of {', '.join(BACKENDS)}, got {value!r}")
    return value


def _format(name: str, value: str) -> str:
    parts = value.split(":")
    if len(parts) > 2 or any(part not in FORMATS for part in parts):
        raise ValueError(f"{name}: expected one of {', '.join(FORMATS)}, or two as keys:values, got {value!r}")
    return value
