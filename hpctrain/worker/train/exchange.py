"""How a rank's parameters and the parameter server's are brought together."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.recipes.sync import Sync

Vector = NDArray[np.float32]


class Server(Protocol):
    """What :class:`hpctrain.worker.comm.parameter_server.ParameterServer` is to a rule."""

    def add(self, change: Vector) -> Vector:
        """Add to the server's vector; returns what it was just before."""

    def push(self, change: Vector) -> None:
        """Add to the server's vector."""

    def read(self) -> Vector:
        """The server's vector."""


class Rule(Protocol):
    """One rank's side of an asynchronous training.

    Attributes:
        bytes: how many an exchange sends and receives.
    """

    bytes: int

    def exchange(self, own: Vector) -> Vector:
        """Exchange a rank's parameters ``own`` with the server; returns those with which it continues."""


class Downpour:
    """The server adds what a rank's steps changed (Dean et al. 2012, Large Scale Distributed Deep Networks, 4.1).

    The paper sends gradients, with which the server makes plain updates; with SGD that is the same. The learning rate
    is meant for the recipe's batch, of which a rank's is one part in ``ranks``, so its change counts ``1 / ranks``: if
    all ranks exchange at the same time, the result is the mean of their parameters.

    Args:
        begun: the parameters that both the server and the rank have.
    """

    def __init__(self, server: Server, begun: Vector, ranks: int) -> None:
        self._server = server
        self._got = begun
        self._share = np.float32(1 / ranks)
        self.bytes = 2 * begun.nbytes

    def exchange(self, own: Vector) -> Vector:
        change = (own - self._got) * self._share
        self._got = self._server.add(change) + change
        return self._got


class Elastic:
    """Rank and server move towards each other (Zhang, Choromanska and LeCun 2015, arXiv 1412.6651, algorithm 1).

    Args:
        begun: the parameters that both the server and the rank have.
        rate: alpha, the part of the distance that each moves: the paper's beta / ranks.
    """

    def __init__(self, server: Server, begun: Vector, rate: float) -> None:
        self._server = server
        self._rate = np.float32(rate)
        self.bytes = 2 * begun.nbytes

    def exchange(self, own: Vector) -> Vector:
        move = (own - self._server.read()) * self._rate
        self._server.push(move)
        return own - move


def rule_of(sync: Sync, server: Server, begun: Vector, ranks: int) -> Rule:
    """The recipe's rule."""
    if sync.rule == "easgd":
        return Elastic(server, begun, sync.moving_rate / ranks)
    return Downpour(server, begun, ranks)
