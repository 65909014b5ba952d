"""Connected components of graphs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpctrain.control.topology.fabric import Ints


def components(nodes: int, source: Ints, target: Ints) -> Ints:
    """The connected component of each node, numbered from 0 in the order of their lowest nodes.

    Args:
        source, target: the ends of each edge, in either direction.
    """
    label = np.arange(nodes)
    one, other = np.concatenate([source, target]), np.concatenate([target, source])
    while True:
        smaller = label.copy()
        np.minimum.at(smaller, other, label[one])
        # A node also takes the label of its label's node, which halves long chains.
        smaller = smaller[smaller]
        if np.array_equal(smaller, label):
            return np.unique(label, return_inverse=True)[1].astype(np.int32)
        label = smaller


def articulation_points(nodes: int, source: Ints, target: Ints) -> NDArray[np.bool_]:
    """For each node, whether removing it disconnects some of its neighbours from others.

    Args:
        source, target: the ends of each edge; each edge occurs once.

    Source: Hopcroft and Tarjan, "Efficient algorithms for graph manipulation", Communications of the ACM 16 (1973).
    """
    beside: list[list[int]] = [[] for _ in range(nodes)]
    for one, other in zip(source.tolist(), target.tolist(), strict=True):
        beside[one].append(other)
        beside[other].append(one)
    found = [0] * nodes  # in which order, from 1
    earliest = [0] * nodes  # found of what is reached from below the node without passing it
    cut_off = np.zeros(nodes, np.int32)  # subtrees that reach nothing found before the node
    for root in range(nodes):
        if found[root]:
            continue
        found[root] = earliest[root] = 1
        count = 1
        path = [(root, iter(beside[root]))]
        while path:
            node, rest = path[-1]
            for other in rest:
                if not found[other]:
                    count += 1
                    found[other] = earliest[other] = count
                    path.append((other, iter(beside[other])))
                    break
                earliest[node] = min(earliest[node], found[other])
            else:
                path.pop()
                if path:
                    above = path[-1][0]
                    earliest[above] = min(earliest[above], earliest[node])
                    cut_off[above] += earliest[node] >= found[above]
        # The root has no node above it, so its first subtree does not count.
        cut_off[root] -= 1
    return cut_off > 0
