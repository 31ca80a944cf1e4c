"""The documents: code that runs, tables and constants that equal the source's."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

from nibblekv import FORMATS
from nibblekv.formats import SCALE_FLOOR
from nibblekv.rotation import rotation_factors, rotation_signs

ROOT = Path(__file__).parent.parent
FORMAT = (ROOT / "docs" / "format.md").read_text()


def test_worked_example_of_the_format_runs():
    """Catches a normative text that the code has left: the example computes every byte by hand and compares."""
    blocks = re.findall(r"```python\n(.*?)```", FORMAT, re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], "docs/format.md", "exec"), {})


def test_format_table_equals_the_source():
    rows = re.findall(
        r"^\| `(\w+)` \| (\d+) \| `(\w+)` \| `(\w+)` \| `(\w+)` \| (\w+) \| ([\d.]+) \|$", FORMAT, re.MULTILINE
    )
    assert rows == [
        (f.name, str(f.version), f.code, f.word, f.rotation, f.page, f"{f.bits_per_value(128):.2f}")
        for f in FORMATS.values()
    ]
    assert SCALE_FLOOR == 2.0**-100


def test_sign_constant_equals_the_source():
    high, low = re.search(r"0x([0-9a-f]{64})\n\s+([0-9a-f]{64})\n", FORMAT).groups()
    constant = int(high + low, 16)
    signs = torch.tensor([1.0 if constant >> d & 1 else -1.0 for d in range(512)], dtype=torch.float64)
    assert torch.equal(signs, rotation_signs("full", 512))
    shown = re.search(r"first 32 signs are `([+-]{32})`", FORMAT).group(1)
    assert shown == "".join("+" if s > 0 else "-" for s in signs[:32])


@pytest.mark.parametrize("rule", ["Sylvester", "Paley I", "Paley II", "Hartley"])
def test_rotation_rules_equal_the_source(rule: str):
    """Catches a table of head sizes that disagrees with the matrices that are built."""
    (cell,) = re.findall(rf"^\| {rule} \| (.*) \|$", FORMAT, re.MULTILINE)
    listed = {int(part.split(":")[0]): part.partition(":")[2] for part in cell.split(";")}
    for odd, sizes in listed.items():
        for head_size in [int(s) for s in sizes.split(",")] if sizes else [8 * odd]:
            assert head_size % odd == 0
            order = rotation_factors("full", head_size)[1].shape[0]
            assert order == {"Sylvester": 1, "Hartley": odd}.get(rule, 4 * odd)
    found = set()
    for odd in range(1, 64, 2):
        prime = [all(q % k for k in range(2, q)) and q > 1 for q in (4 * odd - 1, 2 * odd - 1)]
        found |= (
            {odd}
            if rule == ("Sylvester" if odd == 1 else ["Paley I", "Paley II", "Hartley"][[*prime, True].index(True)])
            else set()
        )
    assert set(listed) == found


def test_support_matrix_of_the_readme_is_the_generated_one():
    """Catches a claim that a backend's `supports` does not make: `python docs/support_matrix.py` writes the matrix anew."""
    readme = (ROOT / "README.md").read_text()
    assert runpy.run_path(str(ROOT / "docs" / "support_matrix.py"))["updated"](readme) == readme


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "docs/design.md", "docs/format.md", "docs/reports/README.md"]
)
def test_local_links_lead_somewhere(page: str):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", text):
        assert ((ROOT / page).parent / target).exists(), target


def test_design_page_names_every_module():
    """Catches a new module that the next owner finds no word about."""
    design = (ROOT / "docs" / "design.md").read_text()
    package = ROOT / "src" / "nibblekv"
    for path in package.iterdir():
        if path.name.startswith("__") or (path.suffix != ".py" and not (path / "__init__.py").exists()):
            continue
        assert f"`{path.name}`" in design or f"`{path.name}/" in design, path.name
