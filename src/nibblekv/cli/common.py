"""What the commands share: options, tables, progress bars, JSON files, errors in one sentence."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from nibblekv.formats import FORMATS
from nibblekv.machine import write_report
from nibblekv.models import DEMO_MODELS

# Tables need room where no terminal says how wide it is.
console = Console(width=None if sys.stdout.isatty() else 200)
errors = Console(stderr=True)

HELP_SETTINGS = {"help_option_names": ["-h", "--help"]}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Key of a row -> (heading, how to write a value).
Columns = dict[str, tuple[str, Callable[[Any], str]]]

JsonOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the rows, with the machine, to FILE.")
]
MODEL_HELP = f"One of {', '.join(DEMO_MODELS)}, a model folder, a .gguf file or a hub name."
ModelOption = Annotated[str, typer.Option("--model", "-m", help=MODEL_HELP)]
DeviceOption = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1 ...")]
OWN_FORMATS_HELP = f"Comma-separated: none, {', '.join(FORMATS)}, two as K/V, int4+w32s4 (window, sinks; +calib, +derived)."
FORMATS_HELP = OWN_FORMATS_HELP.removesuffix(".") + ", hf-quanto, hf-hqq."


def user_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Print what went wrong in one sentence and exit with 1, where the cause is the input or the machine."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        # What torch and transformers have to say about their own insides is not for the user of a command.
        warnings.filterwarnings("ignore")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        try:
            command(*args, **kwargs)
        except (ImportError, MemoryError, NotImplementedError, OSError, RuntimeError, TypeError, ValueError) as error:
            if os.environ.get("NIBBLEKV_TRACEBACK"):
                raise
            errors.print(
                f"error: {' '.join(str(error).split())}", style="red", markup=False, highlight=False, soft_wrap=True
            )
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            errors.print("interrupted")
            raise typer.Exit(130) from None

    return wrapper


def split_list(text: str) -> list[str]:
    """Split a comma-separated option; refuse an empty one."""
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise ValueError(f"expected a comma-separated list, got {text!r}")
    return items


def parse_dtype(name: str) -> torch.dtype | str:
    """Return the dtype of a name, or `auto`."""
    if name != "auto" and name not in DTYPES:
        raise ValueError(f"dtype: expected auto or one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES.get(name, name)


def parse_object(name: str, text: str) -> dict[str, Any]:
    """Read a JSON object from an option of that name."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{name}: expected a JSON object, got {text!r}")
    return value


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Yield progress(stage, done, total), shown on stderr while the block runs; bytes are shown as MB."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    ) as bar:
        task = bar.add_task("starting", total=None)

        def update(stage: str, done: int, total: int) -> None:
            if stage == "download":
                stage, done, total = "download (MB)", done // 1_000_000, total // 1_000_000
            # A stage that cannot be divided shows a moving bar.
            bar.update(task, description=stage, completed=done, total=total if total > 1 else None)

        yield update


def print_table(title: str, rows: Sequence[dict[str, Any]], columns: Columns) -> None:
    """Print rows as a table; a row with a `note` has it printed below.

    Args:
        columns: key -> (heading, how to write a value); keys that no row has are left out.
    """
    table = Table(title=title, title_justify="left")
    shown = {key: column for key, column in columns.items() if any(key in row for row in rows)}
    for i, (heading, _) in enumerate(shown.values()):
        table.add_column(heading, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*(write(row[key]) if row.get(key) is not None else "-" for key, (_, write) in shown.items()))
    console.print(table)
    for row in rows:
        if "note" in row:
            console.print(f"{row['format']}: {row['note']}", markup=False, highlight=False, soft_wrap=True)


def write_json(path: Path | None, rows: Sequence[dict[str, Any]], **more: Any) -> None:
    """Write rows, the command line and the machine to a file, whole or not at all; nothing if path is None."""
    write_report(path, shlex.join(["nibblekv", *sys.argv[1:]]), rows, **more)


def format_bytes(size: float) -> str:
    """Write bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def parse_bytes(text: str) -> int:
    """Read `80GB`, `24GiB`, `512M` or a number of bytes."""
    units = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
    plain = text.strip().lower().removesuffix("b")
    number = plain.rstrip("kmgti")
    unit = plain[len(number) :]
    try:
        return int(float(number) * units[unit])
    except (KeyError, OverflowError, ValueError) as error:
        raise ValueError(f"memory: expected a size such as 24GiB or 80GB, got {text!r}") from error
