"""Hooks of mkdocs: the README is the first page, and every public module has a page of its docstrings. Nothing is copied."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "nibblekv"
# Read as its caller does, from the first words on: the operations, what describes them, what stands on them.
GROUPS = {
    "Operations": ("nibblekv.ops", "nibblekv.cache", "nibblekv.torch_ops"),
    "Descriptions": ("nibblekv.formats", "nibblekv.layout", "nibblekv.options", "nibblekv.rotation"),
    "Engines": ("nibblekv.integrations.transformers", "nibblekv.integrations.vllm", "nibblekv.integrations.vllm.settings"),
    "Backends": ("nibblekv.backends", "nibblekv.backends.reference", "nibblekv.backends.cpu", "nibblekv.backends.triton"),
}
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}


def public_modules() -> list[str]:
    """Return the modules below the package that `GROUPS` does not name: one file each, without the command line."""
    names = [f"nibblekv.{path.stem}" for path in sorted(PACKAGE.glob("*.py")) if not path.stem.startswith("_")]
    grouped = {name for group in GROUPS.values() for name in group}
    return [name for name in names if name not in grouped]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lay out the navigation."""
    groups = GROUPS | {"Around them": tuple(public_modules())}
    reference = [
        {group: [{name.removeprefix("nibblekv."): f"api/{name}.md"} for name in names]} for group, names in groups.items()
    ]
    config.nav = [
        {"nibblekv": "index.md"},
        {"vLLM": "vllm.md"},
        {"The format": "format.md"},
        {"The design": "design.md"},
        *({path.stem.replace("_", " "): path.name} for path in sorted((ROOT / "docs").glob("*.md")) if listed(path)),
        {"API reference": reference},
        {"Contributing": "CONTRIBUTING.md"},
        {"Changelog": "CHANGELOG.md"},
    ]
    return config


def listed(path: Path) -> bool:
    """Say whether a page has no place of its own in the navigation."""
    return path.stem not in ("vllm", "format", "design")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here, and the files of the repository that they link to."""
    linked: set[str] = set()
    for source, target in PAGES.items():
        text = (ROOT / source).read_text()
        links = set(re.findall(r"\]\((?!https?:|#)([^)#]+)\)", text))
        for link in links:
            text = text.replace(f"]({link}", f"]({PAGES.get(link, link.removeprefix('docs/'))}")
        linked |= {link for link in links if not link.startswith("docs/") and link not in PAGES}
        files.append(File.generated(config, target, content=text))
    for link in sorted(linked):
        files.append(File.generated(config, link, abs_src_path=str(ROOT / link)))
    for group in (*GROUPS.values(), tuple(public_modules())):
        for name in group:
            files.append(File.generated(config, f"api/{name}.md", content=f"# {name}\n\n::: {name}\n"))
    return files
