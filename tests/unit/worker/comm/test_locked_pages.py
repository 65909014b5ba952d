"""Memory whose pages are locked for a GPU; what CUDA does is another one's part here."""

from __future__ import annotations

import mmap

import pytest

from support.refusals import refused

pytest.importorskip("torch")
pytest.importorskip("mpi4py.MPI", reason="needs an MPI library", exc_type=(ImportError, RuntimeError))

import torch
from mpi4py import MPI

from hpctrain.worker.comm.mpi import MpiCommunicator
from hpctrain.worker.comm.shared.torch_engine import MpiTorchEngine


class Cuda:
    """Locks pages as CUDA does: each once. Refuses where it is told to."""

    def __init__(self) -> None:
        self.pages: dict[int, range] = {}
        self.full = False

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        pages = range(address // mmap.PAGESIZE, (address + size - 1) // mmap.PAGESIZE + 1)
        if any(page in other for other in self.pages.values() for page in pages):
            return 712
        if self.full:
            return 2
        self.pages[address] = pages
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.pages.pop(address, None) else 713


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    def check(code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA's error {code}")

    cuda = Cuda()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    return cuda


def test_a_rank_alone_on_its_node_locks_each_page_once(cuda: Cuda) -> None:
    """Its memory is malloc's with Open MPI, so that small buffers would lie on one page."""
    comm = MpiCommunicator(MPI.COMM_SELF, "a test")
    engine = comm.torch()
    assert isinstance(engine, MpiTorchEngine)
    for number, size in enumerate([3, 100, 5000, 70_000] * 8):
        buffer = OnGpu(torch.full((size,), float(number)))
        engine.allreduce(buffer, f"b{number}").wait()
        assert buffer.sum() == number * size
    assert len(cuda.pages) == 32
    cuda.full = True
    with refused("HT-memory-not-available", bytes=40):
        engine.allreduce(OnGpu(torch.zeros(10)), "more")
    comm.shutdown()
    assert cuda.pages == {}


class OnGpu(torch.Tensor):
    """A tensor in the CPU's memory that says it is on a GPU."""

    is_cuda = True
