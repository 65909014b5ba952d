"""Objects of all ranks over MPI, on a communicator of one."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from hpctrain.worker.comm import mpi_collectives


class FakeComm:
    """Two ranks that send the same, as MPI would carry it."""

    size = 2

    def __init__(self) -> None:
        self.messages: list[int] = []

    def Iallgather(self, own: np.ndarray, everyone: np.ndarray) -> None:
        everyone[:] = own[0]

    def Iallgatherv(self, own: memoryview, received: list[object]) -> None:
        joined, lengths, starts, _ = received
        self.messages.append(len(joined))
        for start, length in zip(starts, lengths, strict=True):
            assert length == len(own)
            joined[start : start + length] = own

    def Ibcast(self, piece: np.ndarray, root: int) -> None:
        self.messages.append(len(piece))
        piece[:] = root


@pytest.mark.parametrize("most", [64, 10**6])
def test_messages_are_cut_where_mpi_could_not_count_their_bytes(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    pytest.importorskip("mpi4py.MPI", reason="needs an MPI library", exc_type=(ImportError, RuntimeError))
    monkeypatch.setattr(mpi_collectives, "_MESSAGE_BYTES", most)
    comm, value = FakeComm(), {"a": list(range(500)), "b": "text"}
    timeout = SimpleNamespace(finish=lambda start, what: start())
    assert mpi_collectives.allgather(comm, timeout, value, "test") == [value, value]
    assert max(comm.messages) <= most
    assert (len(comm.messages) > 1) == (most == 64)
