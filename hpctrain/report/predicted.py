"""The prediction of one run, as ``hpctrain predict … --json`` or the run directory has it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AllowInfNan, BaseModel, ConfigDict, Field, ValidationError, model_validator

from hpctrain.common.errors import HpctrainError, InvalidValueError
from hpctrain.common.files.disk import reading
from hpctrain.common.files.regular import read_regular
from hpctrain.common.run.directory import RunDirectory, model_error
from hpctrain.common.run.plan import Plan

# No figure of a run is larger, and no run that reaches something takes fewer epochs: what follows from both is finite.
_MOST, _FEWEST_EPOCHS = 1e30, 1e-3

_Figure = Annotated[float, Field(ge=0, le=_MOST), AllowInfNan(False)]


class Range(BaseModel):
    """A figure with its 80 % interval."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    value: _Figure
    low: _Figure
    high: _Figure

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if not self.low <= self.value <= self.high:
            raise InvalidValueError(
                "HT-prediction-value-outside-range",
                "{value:g} is not within its range, {low:g} to {high:g}",
                value=self.value,
                low=self.low,
                high=self.high,
            )
        return self

    def scaled(self, by: float) -> Range:
        """The figure and both ends of its interval, multiplied."""
        # More than a file may have is finite still.
        return Range.model_construct(value=self.value * by, low=self.low * by, high=self.high * by)


# A row takes about a kilobyte, and a file has one for each number of nodes.
_MOST_BYTES = 2**24


class PredictedRow(BaseModel):
    """The prediction for one number of nodes; None for figures of a run whose length is not known.

    Attributes:
        gpus: the number of ranks, each on a GPU or on cores.
        batch_per_gpu: the samples of one rank in a step.
        samples_per_s: the throughput of all ranks.
        communication_share: the share of a step's time, 0 to 1.
        epochs, minutes, kwh: what a run takes to its result.
    """

    model_config = ConfigDict(frozen=True, defer_build=True)

    nodes: Annotated[int, Field(ge=1)]
    gpus: Annotated[int, Field(ge=1)]
    batch_per_gpu: Annotated[float, Field(gt=0), AllowInfNan(False)]
    step_s: Range
    samples_per_s: Range
    communication_share: Range
    memory_bytes: Range
    epochs: Range | None = None
    minutes: Range | None = None
    kwh: Range | None = None

    def lasting(self, epochs: int) -> PredictedRow:
        """The row for a run of ``epochs``: reaching the result may take fewer than the recipe has."""
        if self.epochs is None or self.epochs.value < _FEWEST_EPOCHS:
            return self
        by = epochs / self.epochs.value
        return self.model_copy(
            update={
                "minutes": None if self.minutes is None else self.minutes.scaled(by),
                "kwh": None if self.kwh is None else self.kwh.scaled(by),
            }
        )


class _PredictionFile(BaseModel):
    recipe: str
    rows: Annotated[tuple[PredictedRow, ...], Field(min_length=1)]


def read_prediction(path: Path, plan: Plan) -> tuple[bytes, PredictedRow]:
    """The content of a file, and its prediction for a run.

    Raises:
        HpctrainError: it cannot be read, is no prediction, or is one of another training or other nodes.
    """
    with reading(path, _how(plan)):
        content = read_regular(path, _MOST_BYTES)
    try:
        file = _PredictionFile.model_validate_json(content)
    except ValidationError as error:
        raise model_error(error, path, _how(plan)) from error
    return content, _row_for(file, plan, path)


def own_prediction(directory: RunDirectory, plan: Plan) -> tuple[PredictedRow | None, str | None]:
    """The prediction in a run's directory, or why the one that is there cannot be used; neither where there is none."""
    if not directory.prediction.exists():
        return None, None
    try:
        return read_prediction(directory.prediction, plan)[1], None
    except HpctrainError as error:
        return None, f"{error.message}; {error.hint}"


def _row_for(file: _PredictionFile, plan: Plan, path: Path) -> PredictedRow:
    recipe = plan.recipe
    if recipe and recipe.name != file.recipe:
        raise _other(path, plan, file.recipe, recipe.name)
    rows = [row for row in file.rows if row.gpus == plan.ranks and (not plan.hosts or row.nodes == len(plan.hosts))]
    if not rows:
        known = ", ".join(f"{row.gpus} on {row.nodes}" for row in file.rows)
        nodes = f" on {len(plan.hosts)}" if plan.hosts else ""
        raise _other(path, plan, f"other ranks and nodes ({known})", f"{plan.ranks}{nodes}")
    row, samples = rows[0], rows[0].batch_per_gpu * rows[0].gpus
    if recipe and abs(samples - recipe.global_batch) >= 0.5:
        raise _other(path, plan, f"steps of {samples:g} samples", f"{recipe.global_batch}")
    return row.lasting(recipe.epochs) if recipe else row


def _other(path: Path, plan: Plan, predicted: str, recorded: str) -> HpctrainError:
    return HpctrainError(
        "HT-prediction-of-another-run",
        "{path} is a prediction of {predicted}, but the run has {recorded}",
        _how(plan),
        path=path,
        predicted=predicted,
        recorded=recorded,
    )


def _how(plan: Plan) -> str:
    nodes = len(plan.hosts) or 1
    of = plan.recipe.name if plan.recipe else "RECIPE"
    local = max(1, plan.ranks // nodes)
    return (
        f"make one: hpctrain predict {of} --gpu NAME --nodes {nodes} --gpus-per-node {local} --json > prediction.json, "
        "with the --set of the run"
    )
