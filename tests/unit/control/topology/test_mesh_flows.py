"""What the axes of a mesh send, against numbers worked out by hand and messages counted one by one."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.common.recipes.mesh import AXES, Axis, Mesh, Pipeline, Sharding
from hpctrain.common.recipes.mesh_traffic import MeshModel, MeshWork
from hpctrain.control.topology.mesh_flows import groups, mesh_flows, stage_ranks
from support import needs

MODEL = MeshModel(
    parameters=4800,
    layers=6,
    width=8,
    sequence=10,
    samples=4,
    parameter_bytes=2,
    gradient_bytes=4,
    activation_bytes=2,
)
# Bytes of a rank's activations between two layers, where nothing divides them.
ACTIVATIONS = 4 * 10 * 8 * 2

sizes_lists = st.lists(st.integers(1, 3), min_size=5, max_size=5).filter(lambda sizes: math.prod(sizes) <= 24)


def mesh_of(**sizes: int) -> Mesh:
    return Mesh(**{"dp_replicate": 1, **sizes}).at(math.prod(sizes.values()))


def sent(sharding: Sharding | None = None, **sizes: int) -> dict[Axis, float]:
    work = MeshWork(mesh=mesh_of(**sizes), model=MODEL, sharding=sharding or Sharding())
    return {axis: flows.sent for axis, flows in mesh_flows(work).items()}


@given(sizes_lists)
def test_every_rank_is_in_one_group_along_each_axis(sizes: list[int]):
    mesh = Mesh(**dict(zip(AXES, sizes, strict=True)))
    for axis in AXES:
        found = groups(mesh, (axis,))
        assert sorted(found.ravel().tolist()) == list(range(math.prod(sizes)))
        for group in found.tolist():
            places = [mesh.coordinates(rank) for rank in group]
            assert [place.pop(axis) for place in places] == list(range(mesh.sizes[axis]))
            assert all(place == places[0] for place in places)


@pytest.mark.parametrize(
    ("sizes", "by_hand"),
    [
        # Gathered twice in 2 bytes and scattered in 4, three quarters of it each time.
        ({"dp_shard": 4}, {"dp_shard": 0.75 * 4800 * (2 + 2 + 4)}),
        # Each shard of a half is summed over 3 ranks: 2 x 2/3 of it.
        ({"dp_replicate": 3, "dp_shard": 2}, {"dp_shard": 0.5 * 4800 * 8, "dp_replicate": 2 * 2 / 3 * 2400 * 4}),
        # Four all-reduces a layer; each sends the whole once to one of two ranks.
        ({"tp": 2}, {"tp": 6 * 4 * ACTIVATIONS}),
        # Each rank has a half of the layers and of each layer's parameters.
        ({"tp": 2, "dp_replicate": 2}, {"tp": 6 * 4 * ACTIVATIONS, "dp_replicate": 2400 * 4}),
        # The middle stage sends activations forward and gradients back.
        ({"pp": 3}, {"pp": 2 * ACTIVATIONS}),
        # A pipeline gathers once; a rank has a third of the parameters.
        ({"pp": 3, "dp_shard": 2}, {"pp": 2 * ACTIVATIONS, "dp_shard": 0.5 * 1600 * (2 + 4)}),
        # Keys and values of half of the tokens: to the other rank, again for the backward pass, and the gradients there
        # and back. Parameters are divided over both ranks as well.
        ({"cp": 2}, {"cp": 6 * (1 + 1 + 2) * ACTIVATIONS, "dp_shard": 0.5 * 4800 * 8}),
    ],
)
def test_what_a_rank_sends(sizes: dict[str, int], by_hand: dict[Axis, float]):
    assert sent(**sizes) == pytest.approx(by_hand)


def test_what_stages_of_zero_and_recomputation_send():
    assert sent(Sharding(zero=2), dp_shard=4) == pytest.approx({"dp_shard": 0.75 * 4800 * (2 + 4)})
    # Three parts gather for themselves, and their sum is reduced once.
    work = MeshWork(mesh=mesh_of(dp_shard=4), model=replace(MODEL, parts=3))
    assert mesh_flows(work)["dp_shard"].sent == 0.75 * 4800 * (3 * 2 * 2 + 4)
    # The forward pass, and what it sends, once more.
    assert sent(Sharding(recompute=True), tp=2)["tp"] == 1.5 * sent(tp=2)["tp"]
    assert sent(Sharding(recompute=True), cp=2)["cp"] == 6 * (1 + 1 + 1 + 2) * ACTIVATIONS


def test_stages_that_go_round():
    assert stage_ranks("1f1b", 3) == [0, 1, 2]
    assert stage_ranks("interleaved_1f1b", 3) == [0, 1, 2, 0, 1, 2]
    # Forward 0>1>2>0>1>2, and back: rank 2 sends once forward, to 0, and twice back.
    flows = mesh_flows(MeshWork(mesh=mesh_of(pp=3), model=MODEL, pipeline=Pipeline(schedule="interleaved_1f1b")))["pp"]
    found = Counter(zip(flows.source.tolist(), flows.target.tolist(), strict=True))
    assert found == {(0, 1): 2, (1, 2): 2, (2, 0): 1, (1, 0): 2, (2, 1): 2, (0, 2): 1}


@needs.pytorch
def test_stages_are_where_pytorch_has_them():
    from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

    for ranks in (2, 3, 4):
        theirs = generate_stage_to_rank_mapping(ranks, 2 * ranks, "loop")
        assert stage_ranks("interleaved_1f1b", ranks) == list(theirs.values())


def ring(members: list[int], buffer: float, rounds: int) -> Counter[tuple[int, int]]:
    """The bytes of a ring's messages: each of n - 1 steps a round sends one n-th."""
    found: Counter[tuple[int, int]] = Counter()
    for _ in range(rounds * (len(members) - 1)):
        for place, rank in enumerate(members):
            found[rank, members[(place + 1) % len(members)]] += buffer / len(members)
    return found


def groups_by_hand(mesh: Mesh, *axes: Axis) -> list[list[int]]:
    """Ranks that are alike in all other axes, in their order."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(mesh.sizes.values())):
        place = mesh.coordinates(rank)
        found.setdefault(tuple(at for axis, at in place.items() if axis not in axes), []).append(rank)
    return list(found.values())


def summed(messages: Iterable[Counter[tuple[int, int]]]) -> dict[tuple[int, int], float]:
    found: Counter[tuple[int, int]] = Counter()
    for each in messages:
        found.update(each)
    return {pair: nbytes for pair, nbytes in found.items() if nbytes}


@settings(max_examples=50)
@given(sizes_lists, st.sampled_from([1, 2, 3]))
def test_messages_counted_one_by_one(sizes: list[int], zero: int):
    mesh = Mesh(**dict(zip(AXES, sizes, strict=True)))
    _, shard, pp, cp, tp = sizes
    own, tokens, gathers = 4800 / tp / pp, ACTIVATIONS / cp, 2 if zero == 3 and pp == 1 else 1
    wanted = {
        "dp_replicate": summed(ring(group, own / shard / cp * 4, 2) for group in groups_by_hand(mesh, "dp_replicate")),
        "dp_shard": summed(
            ring(group, own * 2, gathers) + ring(group, own * 4, 1) for group in groups_by_hand(mesh, "dp_shard", "cp")
        ),
        "pp": summed(
            Counter({(one, other): tokens, (other, one): tokens})
            for group in groups_by_hand(mesh, "pp")
            for one, other in itertools.pairwise(group)
        ),
        "tp": summed(ring(group, tokens, 4 * 2 * 6 // pp) for group in groups_by_hand(mesh, "tp")),
    }
    flows = mesh_flows(MeshWork(mesh=mesh, model=MODEL, sharding=Sharding(zero=zero)))
    for axis in ("dp_replicate", "dp_shard", "pp", "tp"):
        found: dict[tuple[int, int], float] = {}
        if each := flows.get(axis):
            pairs = zip(each.source.tolist(), each.target.tolist(), strict=True)
            found = dict(zip(pairs, each.nbytes.tolist(), strict=True))
        assert found == pytest.approx(wanted[axis])


def test_without_a_model_neighbours_are_counted():
    flows = mesh_flows(MeshWork(mesh=mesh_of(dp_shard=2, pp=2, tp=2), model=None))
    assert {axis: float(np.sum(each.nbytes)) for axis, each in flows.items()} == {"dp_shard": 8, "pp": 8, "tp": 8}
