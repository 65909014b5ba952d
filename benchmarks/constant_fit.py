"""Fits constants of predictions to measurements. Read by predictions.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpctrain.control.predict.values import DRAWS, Constant, Values, drawn
from hpctrain.control.topology.fabric import Floats

_ITERATIONS = 8
_MOVE = 1e-4
# The most that one iteration changes the logarithm of a constant.
_FARTHEST = 1.0

Model = Callable[[Values], Sequence[Floats]]
"""Computes what each measurement should have been, (columns,) each."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The distribution of constants after a fit to measurements.

    Attributes:
        mean: of the logarithm of what each is multiplied with, (names,).
        covariance: the covariance of these logarithms, (names, names).
        residual: logarithm of each measurement over what the fitted model says, (measurements,).
    """

    names: tuple[str, ...]
    mean: Floats
    covariance: Floats
    residual: Floats

    def columns(self, count: int) -> dict[str, Floats]:
        """The mean, and ``count`` draws."""
        normal = np.random.default_rng([0, len(self.names)]).standard_normal((len(self.names), count))
        # Not Cholesky's decomposition, which fails for a constant without any variance left.
        values, vectors = np.linalg.eigh(self.covariance)
        spread = vectors * np.sqrt(np.maximum(values, 0))
        logs = self.mean[:, None] + np.hstack([np.zeros((len(self.names), 1)), spread @ normal])
        return dict(zip(self.names, logs, strict=True))


def fit(model: Model, measured: Floats, errors: Floats, constants: Mapping[str, Constant], names: Sequence[str]) -> Fit:
    """Fit the named constants: what is measured replaces what is assumed.

    Every constant's logarithm has a normal distribution with its spread; a measured step time is what the model says of
    it with a normal error of its logarithm. The constants that are most likely after the measurements, and what is left
    of their spread, follow by Gauss and Newton's method (Tarantola 2005, Inverse Problem Theory, section 3.4.4).

    Args:
        measured: the measurements, such as seconds, (measurements,).
        errors: the standard deviation of each one's logarithm, (measurements,).
        names: constants with a spread that the model depends on.
    """
    prior = np.array([constants[name].spread for name in names])
    at = np.zeros(len(names))
    for _ in range(_ITERATIONS):
        said, slopes = _linearised(model, constants, names, at)
        weighted = slopes / errors[:, None]
        precision = weighted.T @ weighted + np.diag(prior**-2.0)
        # The gradient: towards the measurements, and back towards the prior.
        pull = weighted.T @ ((np.log(measured) - said) / errors) - at / prior**2
        move = np.linalg.solve(precision, pull)
        at = at + move * min(1.0, _FARTHEST / max(np.abs(move).max(), 1e-12))
    said, slopes = _linearised(model, constants, names, at)
    weighted = slopes / errors[:, None]
    covariance: Floats = np.linalg.inv(weighted.T @ weighted + np.diag(prior**-2.0)).astype(np.float64)
    return Fit(names=tuple(names), mean=at, covariance=covariance, residual=np.log(measured) - said)


def _linearised(
    model: Model, constants: Mapping[str, Constant], names: Sequence[str], at: Floats
) -> tuple[Floats, Floats]:
    """The logarithms of what the model says, and their slopes, (measurements, names)."""
    said = np.log(np.stack([*model(perturbed(constants, names, at, _MOVE))]))
    return said[:, 0], (said[:, 1:] - said[:, :1]) / _MOVE


def perturbed(constants: Mapping[str, Constant], names: Sequence[str], at: Floats, by: float) -> Values:
    """Column 0 with the named constants multiplied by exp(``at``), and one column for each with it moved further."""
    shifts = np.tile(at[:, None], len(names) + 1)
    shifts[np.arange(len(names)), np.arange(1, len(names) + 1)] += by
    return Values(constants=constants, columns=len(names) + 1, logs=dict(zip(names, shifts, strict=True)))


def drawn_after(constants: Mapping[str, Constant], found: Fit) -> Values:
    """The constants' draws, where those that were fitted have what is left of their spread."""
    values = drawn(constants)
    return replace(values, logs={**values.logs, **found.columns(DRAWS)})
