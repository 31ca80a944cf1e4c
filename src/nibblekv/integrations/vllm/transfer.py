"""Pages that leave an engine, for a disk, a store or another engine: a reader must store the same bytes.

vLLM's connectors name pages by model, tokens and cache dtype, and `int4_per_token_head` may stand for several formats. So a
connector that keeps pages in a folder or an object store gets a folder of its own for each format, version and calibration,
and NIXL, whose peers compare a hash before they exchange pages and refuse one another where it differs, gets them in that
hash.
"""

from __future__ import annotations

import copy
import functools
import importlib
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.logger import init_logger

from nibblekv.formats import get_format
from nibblekv.integrations.vllm.calibrated import Checkpoint, file_digest
from nibblekv.integrations.vllm.settings import DTYPES, Settings

__all__ = ["name_pages", "pages_name"]

logger = init_logger("vllm.nibblekv")

_NIXL_WORKER = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker"
# Entries of a connector's configuration that name a folder of pages which others may read, and a connector's default.
_FOLDERS = ("shared_storage_path", "root_dir")
_DEFAULT_FOLDER = {"ExampleConnector": {"shared_storage_path": "/tmp"}}
# Connectors that keep pages in such folders, or nowhere beyond the engine's life; the same for what serves
# `OffloadingConnector` and for the tiers behind that.
_LOCAL = {"ExampleConnector", "OffloadingConnector", "SimpleCPUOffloadConnector", "DecodeBenchConnector"}
_LOCAL_SPECS = {"CPUOffloadingSpec", "TieringOffloadingSpec"}
_LOCAL_TIERS = {"example", "fs"}


def pages_name(config: Any) -> str | None:
    """Return a name of what an engine's pages hold: formats, versions, arrangement, a calibration's file. None for vLLM's
    own bytes.
    """
    cache = config.cache_config
    settings = Settings.from_environment().updated(config.additional_config)
    if settings.disabled or cache.cache_dtype not in DTYPES:
        return None
    formats = [get_format(name) for name in settings.formats(cache.cache_dtype)]
    calibration = None if settings.calibration == "off" else file_digest(settings.calibration, Checkpoint.of(config))
    if calibration is None and all(fmt.name == cache.cache_dtype for fmt in formats):
        return None
    planar = any(fmt.page == "planar" for fmt in formats)
    page = f"planar{cache.block_size}" if planar else "interleaved"
    mapped = () if calibration is None else (f"calib.{calibration}",)
    return "-".join(("nibblekv", *(f"{fmt.name}.v{fmt.version}" for fmt in formats), page, *mapped))


def name_pages() -> None:
    """Have vLLM's factory of connectors keep our pages apart from others. Idempotent."""
    create = KVConnectorFactory.create_connector
    if getattr(create, "names_pages", False):
        return

    @functools.wraps(create)
    def create_connector(config: Any, role: Any, kv_cache_config: Any) -> Any:
        name = pages_name(config)
        return create(config if name is None else _apart(config, name), role, kv_cache_config)

    create_connector.names_pages = True  # type: ignore[attr-defined]
    KVConnectorFactory.create_connector = create_connector


def _apart(config: Any, name: str) -> Any:
    """Return vLLM's configuration with folders of pages replaced by subfolders of that name; prepare NIXL's hash."""
    transfer = copy.copy(config.kv_transfer_config)
    transfer.kv_connector_extra_config = _placed(transfer.kv_connector, transfer.kv_connector_extra_config, name)
    config = copy.copy(config)
    config.kv_transfer_config = transfer
    return config


def _placed(connector: str, entries: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the entries of a connector's configuration, and of the connectors in it, with folders of that name."""
    if connector == "ExampleHiddenStatesConnector":  # it keeps no pages
        return entries
    if connector == "MultiConnector":  # it makes the others without vLLM's factory
        return entries | {"connectors": [_placed_child(child, name) for child in entries.get("connectors", [])]}
    if connector.startswith("Nixl"):
        _name_in_nixl_hash()
    elif connector not in _LOCAL:
        _warn(connector, name)
    spec = entries.get("spec_name")  # of a module of the user's, or one that another plugin has registered
    if connector == "OffloadingConnector" and spec is not None and spec not in _LOCAL_SPECS:
        _warn(f"The offloading spec {spec!r}", name)
    entries = _in_subfolders(_DEFAULT_FOLDER.get(connector, {}) | entries, name)
    if "secondary_tiers" in entries:
        entries["secondary_tiers"] = [_placed_tier(tier, name) for tier in entries["secondary_tiers"]]
    return entries


def _placed_child(child: dict[str, Any], name: str) -> dict[str, Any]:
    entries = child.get("kv_connector_extra_config", {})
    return child | {"kv_connector_extra_config": _placed(child["kv_connector"], entries, name)}


def _placed_tier(tier: dict[str, Any], name: str) -> dict[str, Any]:
    kind = tier.get("type")
    if kind == "obj":  # an object store, whose keys begin with this
        prefix = tier.get("prefix", "")
        return tier if Path(prefix).name == name else tier | {"prefix": str(Path(prefix) / name)}
    if kind not in _LOCAL_TIERS:
        _warn(f"The tier {kind!r}", name)
    return tier


def _in_subfolders(entries: Any, name: str) -> Any:
    if isinstance(entries, list):
        return [_in_subfolders(entry, name) for entry in entries]
    if not isinstance(entries, dict):
        return entries
    return {
        key: _subfolder(value, name) if key in _FOLDERS and isinstance(value, str) else _in_subfolders(value, name)
        for key, value in entries.items()
    }


def _warn(connector: str, name: str) -> None:
    logger.warning_once(
        "%s does not compare what its peers store: give each the same NIBBLEKV_FORMAT, NIBBLEKV_CALIBRATION and version of "
        "nibblekv, here %s.",
        connector,
        name,
    )


def _subfolder(folder: str, name: str) -> str:
    """Return folder/name, the folder itself if it has that name; say what else the folder holds."""
    path = Path(folder)
    if path.name == name:
        return folder
    others = sorted(other.name for other in path.glob("nibblekv-*") if other.name != name) if folder else []
    if others:
        logger.warning_once(
            "%s holds pages of %s, which this engine does not read: it stores %s.", folder, ", ".join(others), name
        )
    return str(path / name)


def _name_in_nixl_hash() -> None:
    worker: Any = importlib.import_module(_NIXL_WORKER)
    compute = worker.compute_nixl_compatibility_hash
    if getattr(compute, "names_pages", False):
        return

    @functools.wraps(compute)
    def compute_with_name(vllm_config: Any, attn_backend_name: str, *arguments: Any, **named: Any) -> str:
        name = pages_name(vllm_config)
        backend = attn_backend_name if name is None else f"{attn_backend_name} {name}"
        return str(compute(vllm_config, backend, *arguments, **named))

    compute_with_name.names_pages = True  # type: ignore[attr-defined]
    worker.compute_nixl_compatibility_hash = compute_with_name
