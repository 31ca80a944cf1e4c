"""`nibblekv calibrate`: the constants that make a model's keys and values easier to quantize."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from nibblekv import calibration, evaluation
from nibblekv.cli.common import MODEL_HELP, DeviceOption, console, format_bytes, parse_dtype, progress_bar
from nibblekv.models import load_model

# Excerpts of books that are part of the package, so that the result depends on the model alone.
TEXTS = ("austen", "bible")


def calibrate(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    text: Annotated[
        list[str] | None, typer.Option("--text", help=f"{', '.join(evaluation.TEXTS)} or a file; may be repeated.")
    ] = None,
    windows: Annotated[int, typer.Option(help="Windows of text, shared among the texts.")] = 32,
    window: Annotated[int, typer.Option(help="Tokens of a window.")] = 256,
    positions: Annotated[int, typer.Option(help="Positions to spread the windows over; 0: all that the model has.")] = 0,
    dtype: Annotated[str, typer.Option(help="Of the model: auto, float32, bfloat16 or float16.")] = "auto",
    device: DeviceOption = "cpu",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file; default: beside the model.")] = None,
) -> None:
    """Calibrate a model's cache once; attach finds the file from then on, and vLLM takes it.

    Takes the means of keys and values and a map of each head's keys from a built-in text, and writes them to a safetensors
    file beside the model, or into the cache directory where there is no folder to write to.
    """
    sources = text or list(TEXTS)
    torch_dtype = parse_dtype(dtype)
    contents = [evaluation.load_text(name) for name in sources]
    begin = time.perf_counter()
    with progress_bar() as progress:
        loaded, tokenizer = load_model(model, torch_dtype, progress, device)
        found = calibration.calibrate(
            loaded,
            evaluation.text_windows(tokenizer, contents, windows, window),
            source=", ".join(sources),
            positions=positions or None,
            progress=progress,
        )
    path = output or calibration.save_path(loaded)
    found.save(path)
    use = f"attach(model, calibration={str(path)!r}) takes it"
    if path == calibration.find_calibration(loaded):
        use = "attach(model) finds it, nibblekv eval as int4+w32s4+calib"
    console.print(
        f"{model}: {len(found.layers)} layers, {windows * window:,} tokens of {found.source}, at positions 0 to "
        f"{found.positions - 1:,}, in {time.perf_counter() - begin:.0f} s\n"
        f"{path}: {format_bytes(path.stat().st_size)}; {use}, vLLM with NIBBLEKV_CALIBRATION={path}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
