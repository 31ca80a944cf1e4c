"""The command `nibblekv`: thin commands, one file each, over the package's functions."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; say in one sentence what to install if its packages are missing."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        sys.exit(f"error: the command line needs {error.name}: pip install 'nibblekv[cli]'")
    from nibblekv.cli.app import app

    app(prog_name="nibblekv")
