"""The import arrows of docs/design.md, and a package that does nothing on import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import nibblekv

PACKAGE = Path(nibblekv.__file__).parent
# What the modules below the operations may import, beside the standard library.
ALLOWED = {
    "rotation": {"torch"},
    "formats": {"torch", "nibblekv.rotation"},
    "layout": {"torch", "nibblekv.formats"},
    "options": {"torch"},
    "backends": {"torch", "nibblekv.layout", "nibblekv.options"},
    "backends.reference": {
        "torch", "nibblekv.formats", "nibblekv.layout", "nibblekv.options", "nibblekv.rotation",
    },
    "ops": {
        "torch", "nibblekv.backends", "nibblekv.backends.reference", "nibblekv.formats", "nibblekv.layout",
        "nibblekv.options", "nibblekv.rotation",
    },
}  # fmt: skip


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    """Return the modules that a file imports; of a name imported from a package, the submodule where it is one."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            submodules = {a.name for a in node.names if is_module(f"{module}.{a.name}")}
            found.update(f"{module}.{name}" for name in submodules)
            if submodules != {a.name for a in node.names}:
                found.add(module)
    return {name for name in found if name.split(".")[0] not in sys.stdlib_module_names}


def is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


ABOVE = ("nibblekv.integrations", "nibblekv.cli")
MODULES = {module_name(path): path for path in PACKAGE.rglob("*.py")}


@pytest.mark.parametrize("module", list(ALLOWED))
def test_base_modules_import_only_what_the_design_allows(module: str):
    """Catches a format that knows a backend, a layout that knows an engine."""
    assert imports(MODULES[module]) <= ALLOWED[module]


def backend_of(module: str) -> str | None:
    parts = module.removeprefix("nibblekv.").split(".")
    return parts[1] if parts[0] == "backends" and len(parts) > 1 else None


def test_backends_never_import_one_another():
    """Catches a backend that falls back to, or borrows from, another."""
    for module, path in MODULES.items():
        own = backend_of(module)
        if own is not None:
            others = {backend_of(name) for name in imports(path) if name.startswith("nibblekv.")} - {own, None}
            assert not others, f"{module} imports {others}"
            above = {"nibblekv.ops", "nibblekv.cache", "nibblekv.integrations", "nibblekv.cli"}
            assert not {n for n in imports(path) if ".".join(n.split(".")[:2]) in above}, f"{module} imports upwards"


def test_nothing_below_imports_integrations_or_the_command_line():
    """Catches a core that needs an engine."""
    for module, path in MODULES.items():
        if module.split(".")[0] not in ("integrations", "cli"):
            above = {n for n in imports(path, top_level_only=True) if n.startswith(ABOVE)}
            assert not above, f"{module} imports {above}"


def test_engines_are_imported_by_their_integration_alone():
    """Catches a second file that must follow vLLM's or transformers' releases."""
    for engine, home in (("vllm", "integrations.vllm"), ("transformers", "integrations.transformers")):
        for module, path in MODULES.items():
            if module.startswith(("backends", "integrations")) or module in ALLOWED:
                users = {n for n in imports(path) if n.split(".")[0] == engine}
                assert not users or module.startswith(home), f"{module} imports {engine}"


def test_import_has_no_side_effects():
    """Catches an import that loads an optional dependency, touches CUDA or patches torch."""
    code = """
import sys, torch
before, functions = set(sys.modules), dict(vars(torch.nn.functional))
threads = torch.get_num_threads()
import nibblekv
new = {name.split('.')[0] for name in set(sys.modules) - before}
heavy = new & {'triton', 'transformers', 'numba', 'llvmlite', 'vllm', 'matplotlib', 'pandas', 'typer', 'rich', 'safetensors'}
assert not heavy, heavy
assert not torch.cuda.is_initialized()
assert functions == dict(vars(torch.nn.functional))
assert threads == torch.get_num_threads()
print('clean')
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "clean", done.stderr


def test_public_names_exist_and_are_documented():
    for name in nibblekv.__all__:
        assert name == "FORMATS" or getattr(nibblekv, name).__doc__, name
