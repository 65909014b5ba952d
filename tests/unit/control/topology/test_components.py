"""What hangs together, against networkx."""

from __future__ import annotations

import random

import networkx as nx
import numpy as np
import pytest

from hpctrain.control.topology.fabric import components
from hpctrain.control.topology.levels import articulation_points


def test_a_chain_and_a_ring() -> None:
    chain = np.array([0, 1, 2]), np.array([1, 2, 3])
    assert articulation_points(5, *chain).tolist() == [False, True, True, False, False]
    ring = np.array([0, 1, 2, 3]), np.array([1, 2, 3, 0])
    assert not articulation_points(5, *ring).any()


@pytest.mark.parametrize("seed", range(200))
def test_random_graphs(seed: int) -> None:
    chance = random.Random(seed)
    nodes = chance.randint(1, 30)
    graph = nx.gnm_random_graph(nodes, chance.randint(0, 2 * nodes), seed=seed)
    source, target = (np.array([edge[end] for edge in graph.edges], np.int32) for end in (0, 1))
    assert np.flatnonzero(articulation_points(nodes, source, target)).tolist() == sorted(nx.articulation_points(graph))
    label = components(nodes, source, target)
    assert {frozenset(np.flatnonzero(label == each).tolist()) for each in set(label.tolist())} == {
        frozenset(each) for each in nx.connected_components(graph)
    }
