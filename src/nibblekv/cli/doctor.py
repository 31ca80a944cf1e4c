"""`nibblekv doctor`: what is installed, and what works here."""

from __future__ import annotations

from typing import Any

import nibblekv
from nibblekv import machine
from nibblekv.cli.common import JsonOption, console, write_json
from nibblekv.integrations.vllm import vllm_status
from nibblekv.models import DEMO_MODELS, cache_directory


def doctor(json_file: JsonOption = None) -> None:
    """Say what is installed, which backends work here, and why the others do not."""
    found = machine.machine()
    rows: list[dict[str, Any]] = []

    def report(kind: str, name: str, good: bool, detail: str) -> None:
        rows.append({"kind": kind, "name": name, "ok": good, "detail": detail})
        mark = "[green]ok[/green]" if good else "[yellow]--[/yellow]"
        console.print(f"{mark} {kind:9} {name:15} ", end="")
        console.print(detail, markup=False, highlight=False, soft_wrap=True)

    report("package", "nibblekv", True, nibblekv.__version__)
    for name, version in machine.versions().items():
        report("package", name, version is not None, version or "not installed")
    features = ", ".join(found["cpu_features"]) or "none of those that the kernels use"
    report("hardware", "CPU", True, f"{found['cpu']}, {found['cores']} cores, {found['threads']} threads: {features}")
    report("hardware", "GPU", bool(found["gpus"]), ", ".join(found["gpus"]) or "none that torch can use")
    for name, reason in nibblekv.available_backends().items():
        report("backend", name, reason is None, reason or "works here")
    plugin = vllm_status()
    served = "; ".join(f"{dtype}: {f['k_format']} keys, {f['v_format']} values" for dtype, f in plugin["dtypes"].items())
    classes = ", ".join(f"{path.rpartition('.')[2]} for {name}" for name, path in plugin["backends"].items())
    version = f"{plugin['distribution']} {plugin['version']}"
    window = f"; the last {plugin['window']} tokens unquantized" if plugin["window"] else ""
    calibration = "" if plugin["calibration"] == "off" else f"; calibration {plugin['calibration']}"
    report("plugin", "vllm", plugin["active"], plugin["reason"] or f"{version}; {served}{window}{calibration}; {classes}")
    for name, model in DEMO_MODELS.items():
        cached = any((cache_directory() / "models").glob(f"{name}-*"))
        report("model", name, cached, f"{model.summary}{'' if cached else '; fetched on first use'}")
    write_json(json_file, rows)
