"""The kinds of events, with the unit and the valid values of each key.

A kind is defined here and nowhere else: its class, and its place in the union :data:`KnownEvent`. Beside that it needs
whoever emits it and whoever shows it. A field without a default is in every line of its kind; the others are in those
lines whose writer knows them. Keys that a kind does not have are passed over, but for an epoch's.
"""

from __future__ import annotations

import time
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hpctrain.common.run.value_types import Count, HostEnergy, Number, Outcome, Rate, Seconds, Text, ratio


class BaseEvent(BaseModel):
    """The fields that all kinds share."""

    # Built when the first event is made or read: most commands import this module and never do.
    model_config = ConfigDict(frozen=True, defer_build=True)

    time: Seconds = Field(default_factory=time.time, description="when it happened, in seconds since the epoch")
    event: str = Field(description="the kind")

    def last_step_needed(self, done: int) -> int:
        """The iteration that a checkpoint must have reached for this event to count after a resume, where the last
        step recorded ahead of it is ``done``; 0 for what stays true whatever is done again.
        """
        return 0

    def record(self) -> dict[str, Any]:
        """The event's keys and values as in its line: those that its writer gave, with null for None."""
        given = self.model_fields_set
        # Every step comes here, and pydantic's own iteration takes twice as long.
        values = {key: value for key, value in vars(self).items() if key in given}
        return {"time": self.time, "event": self.event, **values, **(self.model_extra or {})}


class _OfStep(BaseEvent):
    """An event that is lost together with its step."""

    iteration: Count = Field(description="the step, counted from 1 over all epochs")

    def last_step_needed(self, done: int) -> int:
        return self.iteration


class AfterStepEvent(BaseEvent):
    """An event that is lost unless a later step was saved: a checkpoint is written before what follows its step."""

    def last_step_needed(self, done: int) -> int:
        return done + 1


class StartEvent(BaseEvent):
    """An attempt begins. Written by its launcher."""

    event: Literal["start"] = "start"
    attempt: Count = Field(description="1 for the first")
    iteration: Count = Field(description="of the checkpoint that it resumes from, 0 for none")
    restart: Count = Field(
        default=0,
        description="its number among the restarts without progress that a launcher made by itself, 0 if it is not one",
    )
    job: Text | None = Field(default=None, description="its number in Slurm")
    launcher: Text | None = Field(default=None, description="what starts the ranks")
    hosts: tuple[Text, ...] | None = Field(default=None, description="in the order of the ranks")
    host: Text | None = Field(default=None, description="of the launcher; null where none of hpctrain's is running")
    pid: Count | None = Field(default=None, description="of the launcher; null where none of hpctrain's is running")
    script: str | None = Field(
        default=None, description="SHA-256 of the script; null for a recipe, and where the launcher cannot read it"
    )


class DamagedEvent(BaseEvent):
    """An attempt skips a damaged checkpoint. Written before the attempt's start."""

    event: Literal["damaged"] = "damaged"
    path: Text = Field(description="its name in checkpoints/ until then")
    fault: Text = Field(description="what is wrong with it")
    kept_as: Text = Field(description="the name that it has from now on")


class ChangedEvent(BaseEvent):
    """The recipe or script differs from that of the last attempt. Written before the attempt's start."""

    event: Literal["changed"] = "changed"
    differences: dict[str, tuple[Any, Any]] = Field(description="the old and the new value, by dotted key")


class RunEvent(BaseEvent):
    """What is trained. For a script, recipe, epochs and iterations_per_epoch are null."""

    event: Literal["run"] = "run"
    recipe: Text | None = Field(description="its name")
    framework: Text | None = Field(description="torch or keras")
    backend: Text = Field(description="of the communication")
    ranks: Count = Field(description="how many")
    hosts: tuple[Text, ...] | None = Field(default=None, description="sorted, each once")
    epochs: Count | None = Field(description="how many are planned")
    iterations_per_epoch: Count | None = Field(description="steps, with the number of ranks at the beginning")
    parameters: Count | None = Field(description="how many; of a script, those of its first model")
    bucket_mb: Rate | None = Field(
        default=None, description="at which a gradient bucket is closed, in MB (10^6 bytes); null without buckets"
    )
    tokens: Count | None = Field(default=None, description="of a sample of text")
    flops: Count | None = Field(
        default=None,
        description="floating-point operations that the model needs for a sample of text, forward and backward "
        "(Chowdhery et al. 2022, arXiv 2204.02311, appendix B)",
    )
    peak_flops: Rate | None = Field(
        default=None,
        description="operations per second that the data sheet of a rank's GPU states for the precision; else null",
    )

    def speeds(self, samples_per_s: float | None) -> dict[str, float]:
        """The throughput in tokens and the model FLOPs utilisation where they are known, by the keys of an epoch."""
        if samples_per_s is None or self.tokens is None:
            return {}
        speeds = {"tokens_per_s": samples_per_s * self.tokens}
        peak = None if self.peak_flops is None else self.peak_flops * self.ranks
        done = None if self.flops is None else samples_per_s * self.flops
        if (utilisation := ratio(done, peak)) is not None:
            speeds["flops_utilisation"] = utilisation
        return speeds


class StepEvent(_OfStep):
    """A step is done. For a script only iteration, learning_rate and seconds are known."""

    event: Literal["step"] = "step"
    epoch: Count | None = Field(description="from 1")
    loss: Number = Field(
        description="the mean over the samples of all ranks; where ranks make steps by themselves, of the writing rank"
    )
    learning_rate: Number = Field(
        description="of this step; of a script, its optimizer's for the first group of parameters"
    )
    samples: Count | None = Field(description="of all ranks")
    first: Count | None = Field(default=None, description="where the samples begin in the epoch's order")
    order: Count | None = Field(
        default=None,
        description="CRC-32 of the samples' numbers as little-endian 64-bit integers; of a sample that comes again "
        "in the epoch, the bits above the lowest 40 say which time it is, from 0",
    )
    seconds: Seconds = Field(description="how long it took; of a script, since the step before")
    communication_seconds: Seconds | None = Field(description="of these, waiting for reductions on the writing rank")
    data_seconds: Seconds | None = Field(default=None, description="of these, waiting for samples on the writing rank")
    gathered_bytes: Count | None = Field(
        default=None, description="rows of whole batches that the writing rank gathered for a script's functions"
    )


class LogEvent(AfterStepEvent):
    """Values that a script logged."""

    event: Literal["log"] = "log"
    iteration: Count = Field(description="of the step that it is about; a script may count by itself")
    values: dict[str, Number] = Field(description="by name")


class NonFiniteEvent(_OfStep):
    """The update of a step was left out: its loss or its reduced gradients were not finite."""

    event: Literal["non_finite"] = "non_finite"
    epoch: Count = Field(description="from 1")
    rule: Literal["stop", "skip"] = Field(description="what was done")
    ranks: tuple[Count, ...] = Field(
        description="whose own loss was not finite, or whose gradients were not, where these are still known"
    )


_SPEEDS = ("samples_per_s", "tokens_per_s", "flops_utilisation")


class EpochEvent(AfterStepEvent):
    """An epoch is done and evaluated. Further keys are other measurements of the model, all of them numbers."""

    model_config = ConfigDict(extra="allow", defer_build=True)
    __pydantic_extra__: dict[str, Number]

    event: Literal["epoch"] = "epoch"
    epoch: Count = Field(description="from 1")
    seconds: Seconds | None = Field(default=None, description="in its steps")
    samples_per_s: Number = Field(description="of all ranks")
    train_loss: Number = Field(description="the mean over those steps whose loss is finite")
    test_loss: Number = Field(default=None, description="the mean over the test samples")
    test_accuracy: Number = Field(description="0 to 1; of text, of the next tokens")
    tokens_per_s: Number = Field(default=None, description="of all ranks, where samples are text")
    flops_utilisation: Number = Field(
        default=None, description="model FLOPs utilisation, 0 to 1, where operations and the GPUs' peak are known"
    )

    @property
    def metrics(self) -> dict[str, float | None]:
        """The measurements of the model, by name."""
        others = {"time", "event", "epoch", "seconds", *_SPEEDS}
        return {name: value for name, value in self.record().items() if name not in others}

    @property
    def speeds(self) -> dict[str, float | None]:
        """What was measured of the throughput, by name."""
        return {name: value for name, value in self.record().items() if name in _SPEEDS}


class CheckpointEvent(_OfStep):
    """A checkpoint is on disk. Written after the step in which this was noticed."""

    event: Literal["checkpoint"] = "checkpoint"
    epoch: Count | None = Field(default=None, description="from 1")
    seconds: Seconds | None = Field(default=None, description="until it was on disk")
    blocked_seconds: Seconds | None = Field(default=None, description="that training waited, on the writing rank")
    bytes: Count | None = Field(default=None, description="of all ranks' shares")
    path: Text | None = Field(default=None, description="its name in checkpoints/")
    interval_seconds: Seconds | None = Field(default=None, description="until the next, where the run chooses that")
    mtbf_seconds: Seconds | None = Field(default=None, description="between failures, from which that follows")


class EnergyEvent(BaseEvent):
    """What the hosts have drawn so far in this attempt, by their own counters.

    Energy of steps that are lost and done again was drawn all the same, so that it counts after a resume too.
    """

    event: Literal["energy"] = "energy"
    iteration: Count = Field(description="the last step")
    hosts: dict[str, HostEnergy] = Field(description="by name; of a script only rank 0's host")

    def record(self) -> dict[str, Any]:
        return {**super().record(), "hosts": {host: own.model_dump() for host, own in self.hosts.items()}}


class StoppedEvent(BaseEvent):
    """The ranks stopped in good order. Written after the checkpoint of the stop; by a script's rank 0 at its end."""

    event: Literal["stopped"] = "stopped"
    iteration: Count = Field(description="the last step")
    reason: Text = Field(description="the signal, or why the ranks stopped by themselves")

    @property
    def text(self) -> str:
        """The event in words. Not every script has steps that are recorded."""
        return f"stopped after step {self.iteration}: {self.reason}" if self.iteration else f"stopped: {self.reason}"


class ContinuedEvent(BaseEvent):
    """A script goes on from a state that it has loaded. Written by its rank 0 ahead of the attempt's first step."""

    event: Literal["continued"] = "continued"
    iteration: Count = Field(description="the last step before the state that the script has loaded; 0 for none")


class StallEvent(BaseEvent):
    """Ranks wait for another one. Written by the lowest rank that waits, once per wait."""

    event: Literal["stall"] = "stall"
    rank: Count = Field(description="that is waited for, as the attempt began")
    host: Text = Field(description="of that rank")
    iteration: Count | None = Field(default=None, description="the step in progress")
    waiting_for: Text = Field(description="what the others wait in")
    seconds: Seconds = Field(description="that the others have waited")
    state: Text = Field(default="", description='of its process, in words; "" where it could not be seen')


class SlowRankEvent(_OfStep):
    """A rank, or its host's link, takes longer than the others in each step. Written by rank 0, once while it lasts."""

    event: Literal["slow_rank"] = "slow_rank"
    rank: Count = Field(description="its number in the communicator")
    host: Text = Field(description="of that rank")
    cause: Literal["computing", "samples", "link"] = Field(description="what of it takes longer")
    seconds: Seconds = Field(description="of a step, without the longest tenth of them; of a link, of 256 KiB over it")
    usual: Seconds = Field(description="the same of the median rank or host")

    @property
    def text(self) -> str:
        """The event in words."""
        taken = "a message over its link" if self.cause == "link" else f"a step for its {self.cause}"
        return (
            f"rank {self.rank} ({self.host}) is slower than the others since about step {self.iteration}: "
            f"{self.seconds:.3g} s {taken}, where the median is {self.usual:.3g} s"
        )


class FaultEvent(BaseEvent):
    """A fault ended the attempt. Written by its launcher."""

    event: Literal["fault"] = "fault"
    rank: Count | None = Field(description="null where it is not known")
    host: Text | None = Field(description="null where it is not known")
    message: Text = Field(description="what happened, in a sentence")
    code: str = Field(default="", description="the name of this kind of error, of those in docs/reference/errors.md")


class ExcludedEvent(BaseEvent):
    """A node failed, and jobs of the run leave it out for a day. Written by a job, outside of the run's attempts."""

    event: Literal["excluded"] = "excluded"
    host: Text = Field(description="the node")
    message: Text = Field(description="how it failed")


class RecoveredFaultEvent(FaultEvent):
    """A rank died and the others went on without it. Written by them; any key of its own identifies it."""

    rank: Count | None = Field(description="as the attempt began")
    iteration: Count = Field(description="the step in progress")
    recovery_seconds: Seconds = Field(description="until the others went on")
    samples_affected: Count = Field(
        description="whose loss is missing in that step's; given with the first of those that died at once"
    )
    ranks: Count = Field(description="that are left")


class EndEvent(BaseEvent):
    """The run ended."""

    event: Literal["end"] = "end"
    status: Outcome = Field(description="what the run is then")
    seconds: Seconds | None = Field(default=None, description="of a run that is done, in all its attempts")


class OtherEvent(BaseEvent):
    """A kind that this version does not know, with its keys as they are in the file."""

    model_config = ConfigDict(extra="allow", defer_build=True)

    event: str


KnownEvent = (
    StartEvent
    | DamagedEvent
    | ChangedEvent
    | RunEvent
    | StepEvent
    | LogEvent
    | NonFiniteEvent
    | EpochEvent
    | CheckpointEvent
    | EnergyEvent
    | StoppedEvent
    | ContinuedEvent
    | StallEvent
    | SlowRankEvent
    | FaultEvent
    | RecoveredFaultEvent
    | ExcludedEvent
    | EndEvent
)
Event = KnownEvent | OtherEvent
