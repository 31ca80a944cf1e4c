"""Compiles what a call of the Triton backend would launch, for a GPU that need not be there.

The host code runs on meta tensors under a driver that only names a target, and every launch ends after compilation.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from nibblekv.backends.triton import attention, rotation

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
}


@dataclass(frozen=True)
class Launch:
    """A kernel that was compiled in place of being launched."""

    name: str
    shared_bytes: int
    asm: dict[str, Any]

    def resources(self) -> dict[str, int]:
        """Registers (REG) and local memory, spills included (STACK, LOCAL), of an NVIDIA binary."""
        text = self._cuobjdump("--dump-resource-usage")
        return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}

    def longest_loop(self) -> list[str]:
        """SASS instructions of the longest loop of an NVIDIA binary."""
        found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", self._cuobjdump("--dump-sass"))
        code = [(int(address, 16), text) for address, text in found]
        loops = [
            [text for at, text in code if int(jump.group(1), 16) <= at <= address]
            for address, text in code
            if (jump := re.search(r"BRA.* (0x[0-9a-f]+)", text)) and int(jump.group(1), 16) < address
        ]
        return max(loops, key=len)

    def _cuobjdump(self, option: str) -> str:
        tool = triton.knobs.nvidia.cuobjdump.path
        path = Path(triton.knobs.cache.dir) / f"{self.name}-{id(self)}.cubin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.asm["cubin"])
        try:
            return subprocess.run([tool, option, str(path)], check=True, capture_output=True, text=True).stdout
        finally:
            path.unlink()


@contextmanager
def compiling_for(target: GPUTarget) -> Iterator[list[Launch]]:
    """Compile launches for a target; the list holds them in order."""
    launches: list[Launch] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        launches.append(Launch(kernel.metadata.name, kernel.metadata.shared, kernel.asm))
        return kernel

    driver = mock.Mock()
    driver.get_current_target.return_value = target
    driver.get_current_device.return_value = str(target)
    nvidia = target.backend == "cuda"
    attention._fixed_arguments.cache_clear()  # holds what depends on the target
    attention._prepare.cache_clear()
    with (
        mock.patch.object(triton.runtime.driver, "_active", driver),
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(rotation, "uses_nvidia_assembly", return_value=nvidia),
        mock.patch.object(rotation, "interpreting", return_value=False),
        mock.patch.object(attention, "multiprocessors", return_value=132),
    ):
        yield launches


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")
