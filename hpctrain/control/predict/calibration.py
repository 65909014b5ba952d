"""Measurements that replace a prediction's assumptions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.regular import read_text
from hpctrain.common.workloads.workload import load_workload
from hpctrain.control.predict.compute import CPU, Device, compute
from hpctrain.control.predict.constants import Constant
from hpctrain.control.predict.measurements import Curve, LoadedRow, ReducedRow, Sweep, bench_curves
from hpctrain.control.predict.values import DRAWS, Values, drawn, perturbed
from hpctrain.control.topology.fabric import Floats

_HOW = "hpctrain bench step --sweep --json > sweep.json; hpctrain bench allreduce --json > curves.json"
# The least standard deviation of the logarithm of a measured step time.
_LEAST_ERROR = 0.01
# A constant counts as measured if its spread shrinks below this share.
_NARROWED = 0.7
_DEVICE_FIELDS = ("pace", "memory_bytes_per_s", "vector_flops", "conv32_flops", "half_flops")
_MOST_BYTES = 2**26
_EFFICIENCIES = ("memory_efficiency", "matmul_efficiency", "conv_efficiency")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Step times of one node, measured all-reduces, and the rate of the input pipeline.

    Attributes:
        sweeps: step times over several batch sizes.
        loaded: samples per second that a rank's input pipeline makes, by its workers.
    """

    sweeps: tuple[Sweep, ...] = ()
    curves: tuple[Curve, ...] = ()
    loaded: Mapping[int, float] = field(default_factory=dict)

    def require_fits(self, network: str, device: str, precision: str) -> None:
        """Refuse measurements of something else.

        Args:
            network: that ``bench step`` measured.

        Raises:
            HpctrainError: a sweep of another network, device or precision.
        """
        for sweep in self.sweeps:
            for what, found, wanted in (
                ("network", sweep.model, network),
                ("device", sweep.device, device),
                ("precision", sweep.precision, precision),
            ):
                if found != wanted:
                    raise HpctrainError(
                        "HT-calibration-mismatch",
                        "--calibration: steps were measured with the {kind} {found}, but {wanted} is to be predicted",
                        f"leave the file out; or hpctrain bench step --sweep --json measures {wanted}, where its "
                        "--model or --precision has that",
                        kind=what,
                        found=found,
                        wanted=wanted,
                    )

    def values(self, constants: Mapping[str, Constant]) -> Values:
        """The constants in many draws, after those of the roofline were fitted to the sweeps.

        Those that the measurements narrowed are measured, with the spread that is left.
        """
        if not self.sweeps:
            return drawn(constants)
        rows = [(sweep, row) for sweep in self.sweeps for row in sweep.rows]
        names = _fitted_names(self.sweeps[0].device, constants)
        found = fit(
            lambda values: [_modelled_seconds(sweep, row.batch, values) for sweep, row in rows],
            np.array([row.median_s for _, row in rows]),
            np.array([max(row.spread, _LEAST_ERROR) for _, row in rows]),
            constants,
            names,
        )
        after = dict(constants)
        source = f"bench step --sweep of {', '.join(dict.fromkeys(sweep.model for sweep in self.sweeps))}"
        left = np.sqrt(np.diag(found.covariance))
        for name, mean, spread in zip(names, found.mean, left, strict=True):
            if spread < _NARROWED * constants[name].spread:
                value = constants[name].value * float(np.exp(mean))
                change = {"value": value, "spread": float(spread), "kind": "measured", "source": source}
                after[name] = constants[name].model_copy(update=change)
        # The part of the measured times that the roofline does not explain stays uncertain.
        off = float(np.sqrt(np.mean(found.residual**2)))
        after["step_residual"] = constants["step_residual"].model_copy(
            update={"spread": max(off, _LEAST_ERROR), "kind": "measured", "source": source}
        )

        # The constants' values have moved to their means.
        moved = {name: np.log(after[name].value / constants[name].value) for name in names}
        return drawn(after, fitted={name: logs - moved[name] for name, logs in found.columns(DRAWS).items()})


def _modelled_seconds(sweep: Sweep, batch: float, values: Values) -> Floats:
    workload = load_workload(sweep.model, image_size=sweep.image_size)
    if sweep.device == CPU:
        device = Device(name=CPU, ranks=sweep.ranks, precision=sweep.precision)
    else:
        device = Device(name=sweep.device, precision=sweep.precision, software="eager")
    return compute(workload, batch, device, values).total


def _fitted_names(device: str, constants: Mapping[str, Constant]) -> list[str]:
    gaps = ["cpu.kernel_s"] if device == CPU else ["kernel_s", "torch.operator_s", "torch.eager"]
    names = [f"{device}.{field}" for field in _DEVICE_FIELDS] + [*_EFFICIENCIES, *gaps]
    return [name for name in names if constants[name].spread]


_Read = TypeVar("_Read", bound=BaseModel)


def read_calibration(paths: Sequence[Path]) -> Calibration:
    """The measurements of several files: of ``bench step --sweep``, ``bench allreduce`` and ``bench loader``.

    Raises:
        HpctrainError: a file that cannot be read, is cut off, or is none of these.
    """
    sweeps: list[Sweep] = []
    curves: list[Curve] = []
    loaded: dict[int, float] = {}
    for path in paths:
        content = _json(read_text(path, "calibration", _HOW, limit=_MOST_BYTES), path)
        rows = content.get("rows")
        if "sweeps" in content:
            sweeps += _checked(Sweep, content["sweeps"], path)
        elif _rows_have(rows, "engine"):
            curves += _curves(_checked(ReducedRow, rows, path), path)
        elif _rows_have(rows, "workers"):
            measured = _checked(LoadedRow, rows, path)
            loaded |= {row.workers: row.samples_per_s for row in measured if row.variant == "hpctrain"}
        else:
            raise _not_valid("neither sweeps nor measured all-reduces", path)
    return Calibration(sweeps=tuple(sweeps), curves=tuple(curves), loaded=loaded)


def _rows_have(rows: object, key: str) -> bool:
    return isinstance(rows, list) and bool(rows) and all(isinstance(row, dict) and key in row for row in rows)


def _json(text: str, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HpctrainError(
            "HT-file-not-json", "{path}: not a complete JSON file: {problem}", _HOW, path=path, problem=str(error)
        ) from error
    return found if isinstance(found, dict) else {}


def _checked(kind: type[_Read], rows: object, path: Path) -> list[_Read]:
    if not isinstance(rows, list) or not rows:
        raise _not_valid("no sweeps", path)
    try:
        return [kind.model_validate_json(json.dumps(row)) for row in rows]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _not_valid(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", path) from error


def _curves(rows: Sequence[ReducedRow], path: Path) -> list[Curve]:
    if any(row.ranks % row.hosts for row in rows):
        raise _not_valid("ranks that cannot be divided equally among their hosts", path)
    found = bench_curves(rows, str(path))
    if not found:
        raise _not_valid("only rows of the engine 'copy', which moves nothing between ranks", path)
    return found


def _not_valid(problem: str, path: Path) -> HpctrainError:
    return HpctrainError(
        "HT-calibration-not-valid",
        "{path} is not a whole calibration: {problem}",
        _HOW,
        path=path,
        problem=problem,
    )


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
        """The mean, and ``count`` draws: what :func:`hpctrain.control.predict.values.drawn` takes as fitted."""
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
