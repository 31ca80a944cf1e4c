"""Pages that leave an engine: read by another process token for token, and not by one that stores other bytes."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_engine import INT4, ROOMY, STRICT, tiny

from nibblekv.integrations.vllm import transfer

# Of the scenario's eight prompts: vLLM's connector finds none of 16 tokens and none of 81, a multiple of 16 and one more.
FOUND = 6


def shared(folder: Path) -> dict[str, Any]:
    """Return engine settings of vLLM's connector to a shared folder."""
    extra = {"shared_storage_path": str(folder)}
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return INT4 | ROOMY | {"block_size": 16, "kv_transfer_config": connector}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that the engines of this module share."""
    return tmp_path_factory.mktemp("pages")


def test_pages_of_another_process_give_the_same_bits(run_scenario, tiny_model, folder):
    """Catches pages that are cut, reordered or rescaled on their way through a folder."""
    written = run_scenario("pressure", tiny(tiny_model, **shared(folder)), STRICT, runs=["alone"])
    assert "External Cache Hit" not in written.log
    (pages,) = folder.iterdir()
    assert pages.name == "nibblekv-int4.v1-int4.v1-planar16"
    # A further entry keeps the two runs apart for `run_scenario`.
    read = run_scenario("pressure", tiny(tiny_model, **shared(folder)), STRICT, runs=["alone"], reads=True)
    assert len(re.findall(r"Inject KV cache of \d+ tokens", read.log)) == FOUND
    assert read.result["alone"] == written.result["alone"]


def test_a_peer_that_stores_other_bytes_reads_none_of_them(run_scenario, tiny_model, folder):
    """Catches pages of one format that are taken for another's: the tokens, the model and the dtype's name are the same."""
    settings = STRICT | {"NIBBLEKV_FORMAT": "int8_per_token_head:int4"}
    run = run_scenario("pressure", tiny(tiny_model, **shared(folder)), settings, runs=["alone"])
    assert "External Cache Hit" not in run.log
    assert "holds pages of nibblekv-int4.v1-int4.v1-planar16, which this engine does not read" in run.log
    assert sorted(path.name for path in folder.iterdir()) == [
        "nibblekv-int4.v1-int4.v1-planar16",
        "nibblekv-int8_per_token_head.v1-int4.v1-planar16",
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM offloads to memory from GPUs only")
def test_pages_come_back_from_memory(run_scenario, tiny_model):
    """Catches offloaded pages that are copied in part, or with another layer's scales."""
    extra = {"cpu_bytes_to_use": 64 << 20}
    connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    engine = tiny(tiny_model, **INT4, block_size=16, num_gpu_blocks_override=21, kv_transfer_config=connector)
    run = run_scenario("offload", engine, {"NIBBLEKV_STRICT": "1"}).result
    hits = [run[when]["vllm:external_prefix_cache_hits"] for when in ("before", "after")]
    assert hits[1] - hits[0] >= 16
    (((first, first_logs),),), (((again, again_logs),),) = run["first"], run["again"]
    assert again == first
    assert torch.allclose(torch.tensor(again_logs), torch.tensor(first_logs), atol=1e-2)


@dataclasses.dataclass
class Config:
    """The part of vLLM's configuration that names pages."""

    dtype: str = "int4_per_token_head"
    connector: str = "NixlConnector"
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    block_size: int = 16
    nibblekv: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache_config = SimpleNamespace(cache_dtype=self.dtype, block_size=self.block_size)
        self.kv_transfer_config = SimpleNamespace(kv_connector=self.connector, kv_connector_extra_config=self.extra)
        self.additional_config = {"nibblekv": self.nibblekv}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch):
    for name in ("FORMAT", "STRICT", "BACKEND", "CALIBRATION", "DISABLE"):
        monkeypatch.delenv(f"NIBBLEKV_{name}", raising=False)


def test_the_name_says_what_a_page_holds():
    """Catches a name that is equal for unequal bytes, and one for the bytes that vLLM writes itself."""
    assert transfer.pages_name(Config()) == "nibblekv-int4.v1-int4.v1-planar16"
    assert transfer.pages_name(Config(block_size=32)) == "nibblekv-int4.v1-int4.v1-planar32"
    mixed = {"format": "int8_per_token_head:int4_per_token_head"}
    assert (
        transfer.pages_name(Config(nibblekv=mixed)) == "nibblekv-int8_per_token_head.v1-int4_per_token_head.v1-interleaved"
    )
    for same_as_vllm in (
        Config(nibblekv={"format": "int4_per_token_head"}),
        Config("int8_per_token_head"),
        Config("auto"),
        Config(nibblekv={"disabled": True}),
    ):
        assert transfer.pages_name(same_as_vllm) is None


def test_folders_are_kept_apart_wherever_a_configuration_names_them():
    tiers = [{"type": "fs", "root_dir": "/pages"}]
    config = Config(connector="OffloadingConnector", extra={"cpu_bytes_to_use": 1, "secondary_tiers": tiers})
    apart = transfer._apart(config, "name")
    assert apart.kv_transfer_config.kv_connector_extra_config == {
        "cpu_bytes_to_use": 1,
        "secondary_tiers": [{"type": "fs", "root_dir": "/pages/name"}],
    }
    assert transfer._apart(apart, "name").kv_transfer_config.kv_connector_extra_config["secondary_tiers"][0]["root_dir"] == (
        "/pages/name"
    )
    assert tiers == [{"type": "fs", "root_dir": "/pages"}]
    extra = {"secondary_tiers": [{"type": "obj"}, {"type": "obj", "prefix": "a"}]}
    stores = transfer._apart(Config(connector="OffloadingConnector", extra=extra), "name").kv_transfer_config
    assert stores.kv_connector_extra_config["secondary_tiers"] == [
        {"type": "obj", "prefix": "name"},
        {"type": "obj", "prefix": "a/name"},
    ]
    for private in (
        Config(connector="SimpleCPUOffloadConnector", extra={"disk_path": "/file"}),
        Config(connector="ExampleHiddenStatesConnector", extra={"shared_storage_path": "/states"}),
    ):
        assert transfer._apart(private, "name").kv_transfer_config.kv_connector_extra_config == private.extra
    default = transfer._apart(Config(connector="ExampleConnector"), "name")
    assert default.kv_transfer_config.kv_connector_extra_config == {"shared_storage_path": "/tmp/name"}


def test_peers_that_talk_to_each_other_compare_the_name(monkeypatch):
    """Catches two engines of the same dtype and different formats that pass NIXL's check before a transfer."""
    worker = SimpleNamespace(
        compute_nixl_compatibility_hash=lambda config, backend, transfer_mode: f"{transfer_mode} {backend}"
    )
    monkeypatch.setattr(transfer.importlib, "import_module", lambda name: worker)
    for _ in range(2):
        transfer._apart(Config(), "unused")
    compute = worker.compute_nixl_compatibility_hash
    assert compute(Config(), "TRITON_ATTN", transfer_mode="pull") == "pull TRITON_ATTN nibblekv-int4.v1-int4.v1-planar16"
    assert compute(Config("auto"), "TRITON_ATTN", transfer_mode="pull") == "pull TRITON_ATTN"


def test_connectors_inside_another_are_kept_apart_as_if_alone(monkeypatch):
    """Catches pages of another format behind vLLM's connector of several, which makes the others without its factory."""
    compared: list[bool] = []
    said: list[str] = []
    monkeypatch.setattr(transfer, "_name_in_nixl_hash", lambda: compared.append(True))
    monkeypatch.setattr(transfer.logger, "warning_once", lambda message, *values: said.append(message % values))
    names = ("NixlConnector", "ExampleConnector", "MooncakeConnector")
    children = [{"kv_connector": name, "kv_role": "kv_both"} for name in names]
    apart = transfer._apart(Config(connector="MultiConnector", extra={"connectors": children}), "name").kv_transfer_config
    entries = [child["kv_connector_extra_config"] for child in apart.kv_connector_extra_config["connectors"]]
    assert entries == [{}, {"shared_storage_path": "/tmp/name"}, {}]
    assert compared == [True]
    assert [message.partition(" ")[0] for message in said] == ["MooncakeConnector"]


def test_the_function_that_is_taken_for_the_check_is_the_one_that_vllm_calls():
    """Catches a release that moves it or passes the backend's name elsewhere; the package nixl is not needed for that."""
    source = Path(importlib.util.find_spec(transfer._NIXL_WORKER).origin).read_text()
    call = source[source.index("self.compat_hash = compute_nixl_compatibility_hash(") :][:200]
    assert call.split("(", 1)[1].split()[0] == "self.vllm_config,"
    assert call.split("(", 1)[1].split()[1] in ("backend_name,", "self.backend_name,")


def test_a_connector_that_compares_nothing_gets_a_sentence(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(transfer.logger, "warning_once", lambda message, *values: said.append(message % values))
    transfer._apart(Config(connector="MooncakeConnector"), "name")
    assert said == [
        "MooncakeConnector does not compare what its peers store: give each the same NIBBLEKV_FORMAT, "
        "NIBBLEKV_CALIBRATION and version of nibblekv, here name."
    ]
    transfer._apart(Config(connector="OffloadingConnector", extra={"secondary_tiers": [{"type": "p2p"}]}), "name")
    assert said[1].startswith("The tier 'p2p' does not compare")
    for spec in ("CPUOffloadingSpec", "TieringOffloadingSpec"):
        transfer._apart(Config(connector="OffloadingConnector", extra={"spec_name": spec}), "name")
    assert len(said) == 2
    foreign = {"spec_name": "PeerSpec", "spec_module_path": "somewhere.else", "root_dir": "/pages"}
    apart = transfer._apart(Config(connector="OffloadingConnector", extra=foreign), "name").kv_transfer_config
    assert said[2].startswith("The offloading spec 'PeerSpec' does not compare")
    assert apart.kv_connector_extra_config == foreign | {"root_dir": "/pages/name"}


def test_the_specs_taken_for_local_are_those_that_vllm_registers():
    """Catches a release whose offloading goes through a spec that nobody looked at."""
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    assert set(OffloadingSpecFactory._registry) <= transfer._LOCAL_SPECS
