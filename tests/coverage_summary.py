"""Sums up which lines of src/ the tests ran, from the data of one or more runs of them under coverage.

    python tests/coverage_summary.py build/coverage [--json FILE]

The Triton kernels, which their interpreter runs, and the vLLM plugin, whose tests have an environment of their own, are
counted with the rest and listed apart.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import coverage

from nibblekv.machine import write_report

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "nibblekv"
GROUPS = {"interpreted Triton kernels": "backends/triton/", "vLLM plugin": "integrations/vllm/", "everything else": ""}


def count(data: list[str]) -> list[dict[str, Any]]:
    """Return a row for every source file: its group, its lines, and those that no test ran, as numbers."""
    found = coverage.Coverage(data_file=None, config_file=str(ROOT / "pyproject.toml"))
    found.combine(data, keep=True)
    rows = []
    for file in sorted(found.get_data().measured_files()):
        name = Path(file).relative_to(SOURCE).as_posix()
        group = next(group for group, folder in GROUPS.items() if name.startswith(folder))
        _, lines, _, missed, _ = found.analysis2(file)
        rows.append({"file": name, "group": group, "lines": len(lines), "missed": missed})
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the sums of every group, and of all."""
    sums = []
    for name in [*GROUPS, "all"]:
        own = [row for row in rows if name in ("all", row["group"])]
        lines, missed = sum(row["lines"] for row in own), sum(len(row["missed"]) for row in own)
        sums.append(
            {"group": name, "lines": lines, "covered": lines - missed, "percent": round(100 - 100 * missed / lines, 1)}
        )
    return sums


def main() -> None:
    """Print the files with the most lines that no test ran, and the sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the data files")
    parser.add_argument("--few", default="", help="parameter sets of every test that were run (default: all)")
    parser.add_argument("--json", type=Path, default=None, help="write the sums and every file's row")
    arguments = parser.parse_args()
    rows = count([str(path) for path in sorted(arguments.folder.iterdir())])
    for row in sorted(rows, key=lambda row: -len(row["missed"])):
        if row["missed"]:
            print(f"{len(row['missed']):5} of {row['lines']:5} lines not run  {row['file']}")
    for row in summary(rows):
        print(f"{row['percent']:5.1f} % of {row['lines']:5} lines run  {row['group']}")
    counts = [{**row, "missed": len(row["missed"])} for row in rows]
    write_report(arguments.json, f"make coverage FEW={arguments.few}", counts, summary=summary(rows))


if __name__ == "__main__":
    main()
