"""Each node gets each rank's data once, and its ranks share what travels."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.worker.comm.process_group.staging import NodesOfRanks

HOMES = st.lists(st.integers(0, 3), min_size=1, max_size=12).map(
    lambda nodes: [nodes.index(node) for node in nodes]  # the first rank of each rank's node
)


def test_places_of_ranks_that_are_dealt_unevenly():
    places = NodesOfRanks.of(3, [0, 1, 0, 0, 1])
    assert places.nodes == ((0, 2, 3), (1, 4))
    assert (places.size, places.node, places.here, places.index) == (5, 0, (0, 2, 3), 2)
    assert [places.node_of(rank) for rank in range(5)] == [0, 1, 0, 0, 1]
    # the first of a node deals with the first of another, the third of three with the first of two again
    assert [places.partner(rank, 1) for rank in (0, 2, 3)] == [1, 4, 1]
    assert [places.partner(rank, 0) for rank in (1, 4)] == [0, 2]
    assert places.holdings(range(5), 0) == [[0, 1], [2, 4], [3]]
    assert places.holdings(range(5), 1) == [[0, 1, 3], [2, 4]]
    assert places.most_held(range(5)) == 3
    assert places.most_held([4]) == 1


@given(HOMES)
def test_every_node_holds_every_rank_once(homes):
    for rank in range(len(homes)):
        places = NodesOfRanks.of(rank, homes)
        assert sorted(sum(places.nodes, ())) == list(range(len(homes)))
        assert places.here[places.index] == rank == places.partner(rank, places.node)
        for node, members in enumerate(places.nodes):
            held = places.holdings(range(len(homes)), node)
            assert sorted(sum(held, [])) == list(range(len(homes)))
            assert [member in ranks for member, ranks in zip(members, held, strict=True)] == [True] * len(members)
            # who holds a rank's data is whom that rank sends to
            for member, ranks in zip(members, held, strict=True):
                assert all(places.partner(other, node) == member for other in ranks)
