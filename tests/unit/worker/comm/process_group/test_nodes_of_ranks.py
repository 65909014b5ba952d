"""Each node gets each rank's data once, and its ranks share what travels."""

from __future__ import annotations

from hpctrain.worker.comm.process_group.staging import NodesOfRanks


def test_places_of_ranks_that_are_dealt_unevenly():
    places = NodesOfRanks(3, [0, 1, 0, 0, 1])
    assert places.nodes == [(0, 2, 3), (1, 4)]
    assert (places.size, places.node, places.here, places.index) == (5, 0, (0, 2, 3), 2)
    assert [places.node_of(rank) for rank in range(5)] == [0, 1, 0, 0, 1]
    # the first of a node deals with the first of another, the third of three with the first of two again
    assert [places.partner(rank, 1) for rank in (0, 2, 3)] == [1, 4, 1]
    assert [places.partner(rank, 0) for rank in (1, 4)] == [0, 2]
    assert places.holdings(range(5), 0) == [[0, 1], [2, 4], [3]]
    assert places.holdings(range(5), 1) == [[0, 1, 3], [2, 4]]
    assert places.most_held(range(5)) == 3
    assert places.most_held([4]) == 1
