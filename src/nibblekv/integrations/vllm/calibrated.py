"""Calibrations in vLLM: found, compared with the checkpoint that the engine loads, cut to this process's layers and heads.

Knows vLLM's configuration, but imports nothing of vLLM.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nibblekv.calibration import FILE_NAME, Calibration, checkpoint_fingerprint, saved_path

__all__ = ["Checkpoint", "calibrate_layers", "file_digest", "find_file", "heads_of_rank", "load_file", "named_file"]


@dataclass(frozen=True)
class Checkpoint:
    """Where the weights of a model come from.

    Attributes:
        model: a folder or a hub's name; revision, download_dir: of the latter.
        num_layers: of the whole model.
        num_stages: pipeline stages that they are shared among.
    """

    model: str
    revision: str | None
    download_dir: str | None
    num_layers: int
    num_stages: int

    @classmethod
    def of(cls, config: Any) -> Checkpoint:
        """Return that of vLLM's configuration."""
        model, stages = config.model_config, config.parallel_config.pipeline_parallel_size
        layers = model.hf_text_config.num_hidden_layers
        return cls(model.model, model.revision, config.load_config.download_dir, layers, stages)

    def folder(self) -> Path | None:
        """Return the folder of the files; None while they are not on this machine."""
        if Path(self.model).exists():
            return Path(self.model)
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            found = snapshot_download(self.model, revision=self.revision, cache_dir=self.download_dir, local_files_only=True)
        except (LocalEntryNotFoundError, HFValidationError):
            return None
        return Path(found)

    def fingerprint(self) -> str:
        """Return the `nibblekv.calibration.fingerprint` of the model, from its files."""
        folder = self.folder()
        if folder is None:
            raise ValueError(f"calibration: expected the files of {self.model} on this machine, got none")
        return checkpoint_fingerprint(folder, self.num_layers)


def named_file(setting: str) -> Path:
    """Return the file that a `Settings.calibration` other than `off` and `auto` names."""
    path = Path(setting).expanduser()
    return path / FILE_NAME if path.is_dir() else path


def find_file(setting: str, checkpoint: Checkpoint) -> Path | None:
    """Return the file that a `Settings.calibration` other than `off` means for a model, None if there is none yet."""
    if setting != "auto":
        return named_file(setting)
    folder = checkpoint.folder()
    return None if folder is None else saved_path(folder, checkpoint.fingerprint)


def load_file(setting: str, checkpoint: Checkpoint, *, before_weights: bool = False) -> tuple[Path, Calibration] | None:
    """Return the file that a setting means and what it holds, None without one.

    Args:
        before_weights: the checkpoint may not have been fetched yet; the file is then compared with it later.

    Raises:
        ValueError: no such file, a broken one, or another model's.
    """
    try:
        path = find_file(setting, checkpoint)
        if path is None:
            return None
        compared = not before_weights or checkpoint.folder() is not None
        return path, Calibration.load(path, checkpoint.fingerprint() if compared else None)
    except (OSError, ValueError) as error:
        raise ValueError(f"NIBBLEKV_CALIBRATION: {str(error).removeprefix('calibration: ')}") from error


def file_digest(setting: str, checkpoint: Checkpoint) -> str | None:
    """Return 12 hex digits that name the file which a setting means, None without one."""
    path = find_file(setting, checkpoint)
    if path is None:
        return None
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError as error:
        raise ValueError(f"NIBBLEKV_CALIBRATION: expected a file that can be read, got {error}") from error


def heads_of_rank(num_kv_heads: int, of_rank: int, rank: int, num_ranks: int) -> slice | None:
    """Return which of a model's KV heads a tensor-parallel rank keeps; None if there is no way to have so many.

    Where there are fewer heads than ranks, vLLM gives the same head to as many ranks in turn.
    """
    if of_rank == num_kv_heads:
        return slice(0, num_kv_heads)
    if of_rank * num_ranks == num_kv_heads:
        return slice(rank * of_rank, (rank + 1) * of_rank)
    if of_rank == 1 and num_ranks % num_kv_heads == 0:
        head = rank // (num_ranks // num_kv_heads)
        return slice(head, head + 1)
    return None


def calibrate_layers(
    layers: list[tuple[int, Any]], found: tuple[Path, Calibration], *, rank: int, num_ranks: int, device: torch.device | str
) -> None:
    """Give each layer that stores nibblekv's pages its constants.

    Args:
        layers: (number among the model's layers that keep a cache, vLLM's attention layer).
        found: from `load_file`.
        rank, num_ranks: of this process, tensor parallel.

    Raises:
        ValueError: constants of other sizes, or key means for a model whose scores are bent.
    """
    path, calibration = found
    for number, layer in layers:
        impl, whole = layer.impl, calibration.layers[number]
        if not getattr(impl, "is_ours", False):
            continue
        num_kv_heads, head_size = impl.nibblekv_shape
        heads = heads_of_rank(len(whole.k_mean), num_kv_heads, rank, num_ranks)
        constants = whole if heads is None else whole.of_heads(heads)
        try:
            constants.check(num_kv_heads, head_size, getattr(layer, "head_size_v", head_size))
        except ValueError as error:
            message = str(error).removeprefix("calibration: ")
            raise ValueError(f"NIBBLEKV_CALIBRATION: {message} in layer {number} of {path}") from error
        if impl.nibblekv_options["softcap"] and constants.has_k_mean:
            raise ValueError(
                f"NIBBLEKV_CALIBRATION: expected no key means with softcap, which bends scores, got some in {path}"
            )
        constants = constants.to(device)
        # As buffers, they come back when vLLM wakes from a sleep that drops weights.
        for name, tensor in constants.prepare(batch_invariant=impl.nibblekv_strict).items():
            layer.register_buffer(f"nibblekv_{name.lstrip('_')}", tensor, persistent=False)
        impl.nibblekv_calibration = constants
