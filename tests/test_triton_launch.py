"""Repeating a call's launches on other tensors: what must follow the tensors, and which calls may not be repeated."""

from __future__ import annotations

import pytest
import torch

from nibblekv.layout import KVCacheLayout
from nibblekv.options import AttentionOptions

pytest.importorskip("triton")
launching = pytest.importorskip("nibblekv.backends.triton.launch")


class OnDevice:
    """Stands in for a CUDA tensor: the launcher asks for no more than this."""

    is_cpu, is_cuda, dtype, device = False, True, torch.float32, torch.device("cpu")

    def __init__(self, address):
        self.address = address

    def data_ptr(self):
        return self.address

    def get_device(self):
        return 0


class Compiled:
    """Stands in for a compiled kernel; notes what it is launched with."""

    function, packed_metadata = 7, (4, 1)

    def __init__(self, seen):
        self.seen = seen

    def __getitem__(self, grid):
        return lambda *arguments: self.seen.append((grid, *arguments))

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        assert (stream, function, metadata, launch_metadata, enter, leave) == (99, 7, (4, 1), None, None, None)
        self.seen.append(((x, y, z), *arguments))


class Kernel:
    """Stands in for a jitted function, whose first launch compiles."""

    def __init__(self):
        self.seen = []
        self.compilations = 0

    def __getitem__(self, grid):
        def compile_and_launch(*arguments, **options):
            self.compilations += 1
            self.seen.append((grid, *(a.data_ptr() if hasattr(a, "data_ptr") else a for a in arguments)))
            return Compiled(self.seen)

        return compile_and_launch


@pytest.fixture(autouse=True)
def _no_driver(monkeypatch):
    monkeypatch.setattr(launching, "_current", lambda: (lambda: 0, lambda device: 99))
    monkeypatch.setattr(launching, "_replays", {})
    monkeypatch.setattr(launching, "_compiled", {})


CONSTANT = OnDevice(0x9000)


def two_launches(kernel, inputs, buffers):
    def body():
        buffer = launching.scratch(40, torch.device("cpu"))
        buffers.append(buffer.data_ptr())
        tail = OnDevice(buffer.data_ptr() + 128)
        launching.launch(kernel, (3,), (inputs[0], None, buffer_like(buffer), tail), (5,), (0.5,), ("x",), num_warps=1)
        launching.launch(kernel, (2, 1), (tail, inputs[1], launching.persist(CONSTANT)), (), (8,), (), num_warps=2)

    return body


def buffer_like(buffer):
    return OnDevice(buffer.data_ptr())


def test_a_known_call_is_repeated_on_new_addresses(monkeypatch):
    """Catches addresses of the first call's tensors or scratch memory in a later call."""
    kernel, buffers = Kernel(), []
    made = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: made.append(empty(*a, **k)) or made[-1])
    for step in range(3):
        inputs = (OnDevice(0x1000 + 64 * step), OnDevice(0x2000 + 64 * step))
        launching.replay(("call",), inputs, None, two_launches(kernel, inputs, buffers))
        scratch = made[step].data_ptr()
        assert kernel.seen[2 * step :] == [
            ((3,) if step == 0 else (3, 1, 1), inputs[0].address, None, scratch, scratch + 128, 5, 0.5, "x"),
            ((2, 1) if step == 0 else (2, 1, 1), scratch + 128, inputs[1].address, 0x9000, 8),
        ]
    assert kernel.compilations == 2
    assert len(buffers) == 1  # the body ran once


def test_other_metadata_or_alignment_is_another_call():
    kernel, buffers = Kernel(), []
    for metadata, address in ((("a",), 0x1000), (("b",), 0x1000), (("a",), 0x1008)):
        inputs = (OnDevice(address), OnDevice(0x2000))
        launching.replay(metadata, inputs, None, two_launches(kernel, inputs, buffers))
    assert len(buffers) == 3


@pytest.mark.parametrize("why", ["unknown tensor", "ambiguous inputs"])
def test_a_call_on_unknown_memory_is_not_kept(why):
    """Catches a temporary copy whose address would be read again when it holds something else."""
    kernel, runs = Kernel(), []
    for _ in range(2):
        inputs = (OnDevice(0x1000), OnDevice(0x1000 if why == "ambiguous inputs" else 0x2000))

        def body(inputs=inputs):
            runs.append(1)
            used = inputs[1] if why == "ambiguous inputs" else OnDevice(0x3000)
            launching.launch(kernel, (1,), (inputs[0], used), (), (), (), num_warps=1)

        launching.replay(("call",), inputs, None, body)
    assert len(runs) == 2


def test_kinds_of_launches_are_forgotten_before_they_fill_the_memory(monkeypatch):
    """Catches a table that grows with every new stride or gain for as long as the process lives."""
    monkeypatch.setattr(launching, "_MOST_COMPILED", 3)
    kernel = Kernel()
    for scalar in (1, 2, 3, 4, 4, 1):
        launching.launch(kernel, (1,), (OnDevice(0x1000),), (scalar,), (), (), num_warps=1)
        assert len(launching._compiled) <= 3
    assert kernel.compilations == 5
    assert [arguments[-1] for arguments in kernel.seen] == [1, 2, 3, 4, 4, 1]


def test_profilers_see_every_launch(monkeypatch):
    kernel, buffers = Kernel(), []
    for hooks in ([], [print]):
        monkeypatch.setattr(launching._hooks.launch_enter_hook, "calls", hooks)
        inputs = (OnDevice(0x1000), OnDevice(0x2000))
        launching.replay(("call",), inputs, None, two_launches(kernel, inputs, buffers))
    assert len(buffers) == 2


def test_kernels_run_on_the_device_of_the_tensors(monkeypatch):
    """Catches launches on the current GPU for tensors of another: Triton asks the former for its stream."""
    backend = pytest.importorskip("nibblekv.backends.triton")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert backend._current(torch.device("cuda", 1)).idx == 1
    for device in (torch.device("cuda", 0), torch.device("cpu")):
        assert not isinstance(backend._current(device), torch.cuda.device)


@pytest.mark.parametrize("change", ["known", "hooks", "metadata"])
def test_a_call_is_repeated_only_if_it_is_known(change, monkeypatch):
    kernel, inputs = Kernel(), (OnDevice(0x1000), OnDevice(0x2000))
    assert not launching.repeat(("call",), inputs, torch.device("cpu"))
    launching.replay(("call",), inputs, None, two_launches(kernel, inputs, []))
    if change == "hooks":
        monkeypatch.setattr(launching._hooks.launch_enter_hook, "calls", [print])
    others = (OnDevice(0x4000), OnDevice(0x5000))
    repeated = launching.repeat(("call" if change != "metadata" else "other",), others, torch.device("cpu"))
    assert repeated == (change == "known")
    assert len(kernel.seen) == (4 if change == "known" else 2)
    assert not repeated or kernel.seen[2][1] == 0x4000


class OnGPU(torch.Tensor):
    """Says that it is on GPU 0."""

    def get_device(self):
        return 0


class OnOtherGPU(torch.Tensor):
    def get_device(self):
        return 1


LAYOUT = KVCacheLayout.create("int4", num_kv_heads=2, head_size=64)
OPTIONS = AttentionOptions(softmax_scale=0.125)


def call(**changes):
    tensors = {
        "query": torch.zeros(3, 4, 64), "kv_cache": LAYOUT.allocate(5), "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "seq_lens": torch.ones(2, dtype=torch.int32), "query_start_loc": torch.zeros(3, dtype=torch.int32),
        "out": torch.zeros(3, 4, 64),
    }  # fmt: skip
    tensors = {name: tensor.as_subclass(OnGPU) for name, tensor in tensors.items()}
    return {
        "layout": LAYOUT,
        "options": OPTIONS,
        "max_query_len": None,
        "max_seq_len": None,
        **tensors,
        **{name: value.as_subclass(OnGPU) if type(value) is torch.Tensor else value for name, value in changes.items()},
    }


UNLIKE = {
    "query dtype": {"query": torch.zeros(3, 4, 64, dtype=torch.float64)},
    "query heads": {"query": torch.zeros(3, 5, 64)},
    "query strides": {"query": torch.zeros(3, 64, 4).transpose(1, 2)},
    "cache dtype": {"kv_cache": LAYOUT.allocate(5).view(torch.int8)},
    "cache shape": {"kv_cache": torch.zeros(5, 2, 7, dtype=torch.uint8)},
    "cache strides": {"kv_cache": LAYOUT.allocate(10)[::2]},
    "table dtype": {"block_table": torch.zeros(2, 3)},
    "table sequences": {"block_table": torch.zeros(3, 3, dtype=torch.int32)},
    "table dimensions": {"block_table": torch.zeros(2, 3, 1, dtype=torch.int32)},
    "table strides": {"block_table": torch.zeros(2, 6, dtype=torch.int32)[:, ::2]},
    "lengths dtype": {"seq_lens": torch.ones(2)},
    "lengths shape": {"seq_lens": torch.ones(2, 1, dtype=torch.int32)},
    "lengths strides": {"seq_lens": torch.ones(4, dtype=torch.int32)[::2]},
    "starts dtype": {"query_start_loc": torch.zeros(3)},
    "starts shape": {"query_start_loc": torch.zeros(2, dtype=torch.int32)},
    "starts strides": {"query_start_loc": torch.zeros(6, dtype=torch.int32)[::2]},
    "out dtype": {"out": torch.zeros(3, 4, 64, dtype=torch.float16)},
    "out shape": {"out": torch.zeros(4, 4, 64)},
    "out strides": {"out": torch.zeros(3, 4, 128)[..., ::2]},
    "longest query": {"max_query_len": 2},
    "longest sequence": {"max_seq_len": 300, "block_table": torch.zeros(2, 30, dtype=torch.int32)},
    "scale": {"options": AttentionOptions(softmax_scale=0.5)},
    "option": {"options": AttentionOptions(softmax_scale=0.125, softcap=2.0)},
    "option's tensor": {"options": AttentionOptions(softmax_scale=0.125, sinks=torch.zeros(4).as_subclass(OnGPU))},
    "another GPU": {"seq_lens": torch.ones(2, dtype=torch.int32).as_subclass(OnOtherGPU)},
    "on the host": {"seq_lens": torch.ones(2, dtype=torch.int32).as_subclass(type("OnHost", (torch.Tensor,), {}))},
    "option on the host": {"options": AttentionOptions(softmax_scale=0.125, sinks=torch.zeros(4))},
    "host lengths": {"options": AttentionOptions(softmax_scale=0.125, host_lengths=([0, 1, 3], [1, 2]))},
}


@pytest.mark.parametrize("change", UNLIKE)
def test_what_checks_look_at_makes_another_call(change, monkeypatch):
    """Catches a call that is repeated unchecked because it resembles an earlier one in all but what is wrong with it."""
    backend = pytest.importorskip("nibblekv.backends.triton")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    known, seen = [], []

    def repeat(metadata, inputs, device):
        seen.append(metadata)
        return metadata in known

    monkeypatch.setattr(launching, "repeat", repeat)
    assert not backend.attend_at_once(**call())
    known += seen
    assert backend.attend_at_once(**call())
    assert backend.attend_at_once(**call(kv_cache=LAYOUT.allocate(9)))
    assert not backend.attend_at_once(**call(**UNLIKE[change]))


def test_a_ring_too_short_for_the_queries_is_checked_again(monkeypatch):
    backend = pytest.importorskip("nibblekv.backends.triton")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launching, "repeat", lambda *_: True)
    raw = {name: torch.zeros(2, 9, 2, 64).as_subclass(OnGPU) for name in ("raw_key", "raw_value")}
    options = AttentionOptions(softmax_scale=0.125, raw_window=8, raw_sinks=0, **raw)
    assert backend.attend_at_once(**call(options=options, max_query_len=2))
    assert not backend.attend_at_once(**call(options=options, max_query_len=3))
