"""Ranks of a pipeline meet each other before its first step, and none waits for one that waits for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.refusals import refused

pytest.importorskip("torch")

import torch

from hpctrain.common.recipes.mesh import Mesh
from hpctrain.worker.adapters.torch.parallel import sharding
from hpctrain.worker.adapters.torch.parallel.schedules import meetings
from hpctrain.worker.adapters.torch.parallel.sharding import device_mesh
from hpctrain.worker.comm.single import SingleCommunicator

RANKS = 8


def met(pairs: list[tuple[int, int]]) -> set[tuple[int, int]]:
    """The pairs that meet, where each rank waits until the next one that it is to meet comes too."""
    waiting = [meetings(pairs, rank) for rank in range(RANKS)]
    found = set()
    while ready := [each[0] for each in waiting if each and waiting[each[0][0]][:1] == waiting[each[0][1]][:1]]:
        found.add(ready[0])
        for rank in ready[0]:
            waiting[rank].pop(0)
    return found


@given(st.lists(st.tuples(st.integers(0, RANKS - 1), st.integers(0, RANKS - 1))))
def test_all_pairs_meet(pairs):
    assert met(pairs) == {(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}


def test_a_pytorch_without_todays_divided_tensors_is_refused_before_any_rank_waits(monkeypatch):
    monkeypatch.setattr(sharding, "SINCE_2_13", False)
    with refused("HT-torch-version-unfit", version=torch.__version__):
        device_mesh(SingleCommunicator("test"), Mesh())
