"""All-reduce as steps of simultaneous flows, and its time as limited by the most loaded links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.control.topology.fabric import Ints
from hpctrain.control.topology.routes import Routes


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Flows that run at the same time; the next phase begins when all have arrived.

    Attributes:
        source, target: adapters' nodes, one pair per flow.
        share: the fraction of the reduced buffer that each flow carries.
        repeats: the number of consecutive equal steps.
    """

    source: Ints
    target: Ints
    share: float
    repeats: int = 1


def rail_rings(adapters: Ints) -> list[Phase]:
    """One ring per rail over the same order of hosts; each rail reduces an equal part of the buffer.

    A ring is a reduce-scatter, then an all-gather, each n - 1 steps of one n-th (Patarasuk and Yuan, 2009).

    Args:
        adapters: nodes, of shape (hosts, rails).
    """
    hosts, rails = adapters.shape
    if hosts < 2:
        return []
    following = np.roll(adapters, -1, axis=0)
    return [Phase(source=adapters.ravel(), target=following.ravel(), share=1 / hosts / rails, repeats=2 * (hosts - 1))]


def double_tree(adapters: Ints) -> list[Phase]:
    """Two binary trees per rail over the same order of hosts, each of which reduces one half to its root and broadcasts
    it again (Sanders, Speck and Traeff, 2009, https://doi.org/10.1016/j.parco.2009.09.001).

    The halves are sent in many pieces, so that all edges are busy in both directions at once: one phase has them all. A
    host with children in one tree has none in the other, or one if the number of hosts is odd. The trees are those of
    NCCL (ncclGetBtree and ncclGetDtree, https://github.com/NVIDIA/nccl/blob/master/src/graph/trees.cc).

    Args:
        adapters: nodes, of shape (hosts, rails).
    """
    hosts, rails = adapters.shape
    if hosts < 2:
        return []
    edges = [parents(hosts), second_parents(hosts)]
    child = np.concatenate([adapters[parent >= 0] for parent in edges]).ravel()
    above = np.concatenate([adapters[parent[parent >= 0]] for parent in edges]).ravel()
    return [
        Phase(source=np.concatenate([child, above]), target=np.concatenate([above, child]), share=1 / 2 / rails),
    ]


def parents(hosts: int) -> Ints:
    """The parent of each host in an in-order binary tree whose leaves are the odd hosts; -1 for its root, host 0."""
    host = np.arange(hosts, dtype=np.int32)
    lowest = host & -host
    over = (host ^ lowest) | (lowest << 1)
    parent: Ints = np.where(over < hosts, over, host ^ lowest).astype(np.int32)
    parent[0] = -1
    return parent


def second_parents(hosts: int) -> Ints:
    """The parents in the second tree, in which leaves of the first have children: it is mirrored, or shifted by one."""
    first = parents(hosts)
    if hosts % 2 == 0:
        mirrored: Ints = np.where(first[::-1] >= 0, hosts - 1 - first[::-1], -1).astype(np.int32)
        return mirrored
    shifted = np.roll(first, 1)
    moved: Ints = np.where(shifted >= 0, (shifted + 1) % hosts, -1).astype(np.int32)
    return moved


def predict_allreduce(routes: Routes, steps: Sequence[Phase], size: float, latency: float = 0.0) -> float:
    """Seconds of an all-reduce of ``size`` bytes: for each step the latency, and the bytes on its slowest link.

    Exact where the flows of a step carry the same and share links fairly.

    Args:
        steps: from ``rail_rings`` or ``double_tree``.
        latency: seconds that each step adds.

    Raises:
        HpctrainError: two adapters have no route.
    """
    seconds = 0.0
    for step in steps:
        loads = routes.loads(step.source, step.target)
        slowest = float((loads / routes.fabric.bandwidth).max(initial=0.0))
        seconds += step.repeats * (latency + size * step.share * slowest)
    return seconds
