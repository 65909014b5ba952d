"""The mesh: what -1 becomes, what does not fit, and where each rank is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.recipes.load import mesh_overrides
from hpctrain.common.recipes.mesh import AXES, Mesh, parse_mesh
from support.refusals import invalid, refused


@pytest.mark.parametrize(
    ("given", "ranks", "found"),
    [
        (Mesh(), 4, {"dp_replicate": 4}),
        (Mesh(dp_shard=-1), 4, {"dp_shard": 4}),
        (Mesh(dp_shard=2, tp=2), 8, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
        (Mesh(dp_replicate=1, dp_shard=-1, tp=2), 8, {"dp_shard": 4, "tp": 2}),
        (Mesh(dp_replicate=2, pp=2, tp=2), 8, {"dp_replicate": 2, "pp": 2, "tp": 2}),
    ],
)
def test_one_axis_takes_what_the_others_leave(given: Mesh, ranks: int, found: dict[str, int]):
    assert {axis: size for axis, size in given.at(ranks).sizes.items() if size > 1} == found


def test_a_mesh_that_does_not_fit_is_answered_with_the_product():
    with refused("HT-ranks-not-divisible", mesh="dp_shard 2 x tp 3", product=6, problem="does not divide 8 ranks"):
        Mesh(dp_shard=2, tp=3).at(8)
    with refused("HT-ranks-not-divisible", mesh="dp_replicate 2 x dp_shard 2", product=4, problem="is not 8 ranks"):
        Mesh(dp_replicate=2, dp_shard=2).at(8)


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        ({"tp": 0}, "HT-keys-not-together"),
        ({"tp": -1, "pp": -1}, "HT-keys-not-together"),
        ({"dp_shard": -2}, "greater_than_equal"),
    ],
)
def test_what_no_ranks_could_make_is_refused(sizes: dict[str, int], kind: str):
    with invalid(kind):
        Mesh(**sizes)


@given(st.lists(st.integers(1, 4), min_size=5, max_size=5))
def test_ranks_are_laid_with_the_last_axis_innermost(sizes: list[int]):
    mesh = Mesh(**dict(zip(AXES, sizes, strict=True)))
    ranks = int(np.prod(sizes))
    for rank in range(ranks):
        assert tuple(mesh.coordinates(rank).values()) == tuple(np.unravel_index(rank, sizes))


@given(st.lists(st.integers(1, 4), min_size=5, max_size=5))
def test_a_mesh_is_read_back_from_its_option(sizes: list[int]):
    mesh = Mesh(**dict(zip(AXES, sizes, strict=True)))
    assert parse_mesh(mesh.option) == mesh
    assert parse_mesh(mesh.option).at(int(np.prod(sizes))).sizes == dict(zip(AXES, sizes, strict=True))


def test_the_option_has_what_was_given_and_no_more():
    assert parse_mesh("tp=2,dp_shard=-1") == Mesh(dp_shard=-1, tp=2)
    assert Mesh(tp=1, dp_shard=2).option == "dp_shard=2,tp=1"
    assert mesh_overrides("tp=1,dp_shard=2") == ["mesh.dp_shard=2", "mesh.tp=1"]
    assert mesh_overrides(None) == []


@pytest.mark.parametrize(
    ("text", "code", "values"),
    [
        ("", "HT-mesh-not-valid", {}),
        ("dp_shard", "HT-mesh-not-valid", {"text": "dp_shard", "part": "dp_shard"}),
        ("tp=two", "HT-mesh-not-valid", {"text": "tp=two", "part": "tp=two"}),
        ("tp=٢", "HT-mesh-not-valid", {"text": "tp=٢", "part": "tp=٢"}),
        ("tp=2, pp=2", "HT-file-unknown-key", {"key": " pp"}),
        ("dp_shards=2", "HT-file-unknown-key", {"key": "dp_shards"}),
        ("tp=2,tp=4", "HT-mesh-not-valid", {"part": "tp=4"}),
        ("tp=-2", "HT-file-value", {"key": "tp", "value": "-2"}),
        ("tp=0", "HT-keys-not-together", {"key": "the mesh"}),
    ],
)
def test_a_text_that_is_no_mesh(text: str, code: str, values: dict[str, object]):
    with refused(code, **values) as caught:
        parse_mesh(text)
    assert f"--mesh {text}" in caught.value.message
