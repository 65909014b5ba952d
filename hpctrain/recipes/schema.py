"""The schema of a recipe: what to train, with every number that decides the result."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from hpctrain.checked_yaml import Section

Framework = Literal["torch", "keras"]

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]


class Model(Section):
    """The network."""

    name: Literal["digits_cnn"]


class Data(Section):
    """The samples."""

    name: Literal["digits"]
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2


class Batch(Section):
    """How the samples of one step are counted."""

    size: Count = Field(description="samples of one step over all ranks (the papers' kn)")
    micro_batches: Count = Field(1, description="parts into which each rank cuts its share to save memory")
    drop_last: bool = Field(False, description="leave out the last, smaller batch of an epoch")


class Optimizer(Section):
    """The update rule."""

    name: Literal["sgd", "adam", "adamw"]
    learning_rate: Positive
    momentum: Fraction = 0.0
    nesterov: bool = False
    weight_decay: NotNegative = 0.0
    clip_norm: Positive | None = Field(None, description="bound of the gradient's norm over all parameters")

    @model_validator(mode="after")
    def _consistent(self) -> Optimizer:
        if self.name != "sgd" and (self.momentum or self.nesterov):
            raise ValueError(f"momentum and nesterov belong to sgd, not to {self.name}")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs momentum above 0")
        if self.name == "adam" and self.weight_decay:
            raise ValueError("weight_decay belongs to sgd and adamw: frameworks disagree on what it is for adam")
        return self


class Schedule(Section):
    """The learning rate over the run."""

    name: Literal["constant", "cosine", "step"] = "constant"
    base_batch: Count | None = Field(
        None,
        description="linear scaling: the rate is learning_rate x batch.size / base_batch (Goyal et al. 2017)",
    )
    warmup_epochs: NotNegative = Field(
        0,
        description="epochs over which the rate climbs, step by step, from learning_rate to the scaled rate",
    )
    milestones: tuple[Positive, ...] = Field((), description="epochs at which 'step' multiplies the rate by gamma")
    gamma: Positive = 0.1

    @model_validator(mode="after")
    def _consistent(self) -> Schedule:
        if (self.name == "step") != bool(self.milestones):
            raise ValueError("schedule 'step' needs milestones, and only it has them")
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError("milestones must rise")
        if self.milestones and self.milestones[0] <= self.warmup_epochs:
            raise ValueError("milestones must come after the warm-up")
        if self.warmup_epochs and self.base_batch is None:
            raise ValueError(
                "warmup_epochs needs base_batch: it climbs from learning_rate to the rate that is scaled by it"
            )
        return self


class Communication(Section):
    """How gradients travel."""

    bucket_mb: Positive = Field(25.0, description="size of a gradient bucket in MB (10^6 bytes)")
    compression: Literal["none", "fp16", "bf16"] = Field("none", description="type of the gradients on the wire")


class Guard(Section):
    """How often ranks prove that their parameters are equal."""

    every: Count = Field(100, description="steps between two checks; the first step is always checked")


class FaultTolerance(Section):
    """What becomes of the run when a rank dies."""

    lost_rank: Literal["stop", "shrink"] = Field(
        "stop",
        description="end resumably, or, from the first step on, go on with the ranks that are left (backend mpi, "
        "Open MPI 5)",
    )
    batch: Literal["keep", "shrink"] = Field(
        "keep",
        description="keep the global batch by larger shares, or shrink it with the ranks and the rate with it",
    )
    min_ranks: Count = Field(1, description="with fewer left the run saves its state and ends resumably")

    @property
    def heals(self) -> bool:
        """Whether the ranks go on without one that died, from the first step on."""
        return self.lost_rank == "shrink"

    @model_validator(mode="after")
    def _consistent(self) -> FaultTolerance:
        if not self.heals and (self.batch == "shrink" or self.min_ranks > 1):
            key = "batch: shrink" if self.batch == "shrink" else f"min_ranks: {self.min_ranks}"
            raise ValueError(
                f"{key} needs lost_rank: shrink; with lost_rank: stop the run ends with its first dead rank"
            )
        return self


class Reported(Section):
    """The result that the source states."""

    metric: str
    value: float
    remark: str = ""


class Recipe(Section):
    """One training, complete. Values that the file leaves out have the defaults given here."""

    name: str
    source: str
    reported: Reported
    model: Model
    data: Data
    batch: Batch
    optimizer: Optimizer
    schedule: Schedule = Schedule()
    epochs: Count
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    communication: Communication = Communication()
    guard: Guard = Guard()
    fault_tolerance: FaultTolerance = FaultTolerance()

    @field_validator("fault_tolerance", mode="before")
    @classmethod
    def _one_word(cls, value: object) -> object:
        """``fault_tolerance: shrink`` says it all in one word."""
        return {"lost_rank": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if self.schedule.warmup_epochs > self.epochs:
            raise ValueError(
                f"schedule.warmup_epochs ({self.schedule.warmup_epochs:g}) is longer than the run "
                f"(epochs: {self.epochs}); --set schedule.warmup_epochs=0 does without"
            )
        if self.schedule.milestones and self.schedule.milestones[-1] >= self.epochs:
            raise ValueError(
                f"schedule.milestones ({self.schedule.milestones[-1]:g}) are not all within the run "
                f"(epochs: {self.epochs}); for example --set 'schedule.milestones=[{self.epochs / 2:g}]'"
            )
        return self
