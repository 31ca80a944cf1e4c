"""Repeating a call's launches on other tensors: what must follow the tensors, and which calls may not be repeated."""

from __future__ import annotations

import pytest
import torch

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
