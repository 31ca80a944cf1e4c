"""The table of commands."""

from __future__ import annotations

import typer

import nibblekv
from nibblekv.cli import bench, calibrate, demo, doctor, evaluate, generate, plan, report
from nibblekv.cli.common import HELP_SETTINGS, user_errors

__all__ = ["app"]

app = typer.Typer(
    help="A 4-bit KV cache that is exact, fast and drop-in.", no_args_is_help=True, pretty_exceptions_enable=False,
    context_settings=HELP_SETTINGS, add_completion=False,
)  # fmt: skip
app.command("demo")(user_errors(demo.demo))
app.command("generate")(user_errors(generate.generate))
app.command("eval")(user_errors(evaluate.evaluate_formats))
app.command("calibrate")(user_errors(calibrate.calibrate))
app.command("report")(user_errors(report.report))
app.command("plan")(user_errors(plan.plan))
app.command("doctor")(user_errors(doctor.doctor))
app.add_typer(bench.app, name="bench")


@app.callback(invoke_without_command=True)
def options(version: bool = typer.Option(False, "--version", help="Print the version and stop.")) -> None:
    if version:
        print(nibblekv.__version__)
        raise typer.Exit()
