"""The interface of a framework's trainer, for the training loop and the recovery from faults; and what it trains."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.checkpoints.layout import MOMENTS
from hpctrain.common.cluster.gpu_models import matmul_flops
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.events.kinds import RunEvent
from hpctrain.common.run.value_types import Moment
from hpctrain.worker.comm import Communicator
from hpctrain.worker.data.samples import Samples
from hpctrain.worker.train.local_steps import OuterStep
from hpctrain.worker.train.state import Stateful

# The first factor of losses in fp16; halved when a gradient overflows, doubled after 2000 steps in which none does.
INITIAL_SCALE = 2.0**16

Timeline = Sequence[Moment]

# What there is to undo: the number of updates before a step, and the values that it has changed since; here nothing.
NOTHING: tuple[int, Any] = (-1, {})


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """A step that a rank has begun and not recorded.

    Attributes:
        samples: the size of the global batch.
        own: how many of them are this rank's.
        begin: when the step began, by ``time.perf_counter``.
        order: the checksum of the global batch's sample indices (see hpctrain.common.run.events).
    """

    samples: int
    own: int
    ranks: int
    learning_rate: float
    begin: float
    order: int = 0


@dataclass(frozen=True, kw_only=True)
class RecipeLoss:
    """A recipe's loss in training.

    Labels are smoothed as PyTorch does it: ``smoothing`` of a label is spread over all classes, its own included.
    """

    name: str
    smoothing: float
    threshold: float | None

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        """The loss that a recipe asks for."""
        return cls(name=recipe.loss, smoothing=recipe.label_smoothing, threshold=recipe.target_threshold)


class Average(Protocol):
    """An average of a model's parameters and statistics."""

    def take(self) -> None:
        """Copy the average into the model."""


class Trainer(Stateful):
    """A model and its optimizer, made to use the communicator by a framework's adapter.

    No network draws random numbers in a step: what is drawn for samples follows from the recipe's seed. So a state has
    no generators.

    Attributes:
        framework: ``torch`` or ``keras``.
        parameters: how many numbers are trained.
        bucket_mb: the size at which a gradient bucket is closed, in MB (10^6 bytes); None where there are no buckets.
        gpu: the driver's name of the GPU that the rank computes on; None if it computes on cores.
        compiled: whether the first step compiles the network, and so takes much longer than later ones.
        communication_seconds: how long the last step waited for reductions after its last gradient; None where that
            is not measured.
        timeline: the last step's reductions (see hpctrain.common.run.events); empty where they are not measured.
        updates: the number of steps whose update is done, whether or not :meth:`step` returned; an update is done as a
            whole or not at all. Set it after restoring a state.
        loss: what :meth:`step` returned, or would have returned, for the last of these steps.
        faulty: whether that step's reduced gradients were not finite, unless only because the loss scale was too large.
        own_finite: whether this rank's own loss was finite then, and its own gradients where they are still known.
        alone: with a recipe's ``sync``, whether steps use only this rank's gradients and update only its parameters,
            until its ``outer`` step.
        outer: replaces the parameters by what the recipe's ``sync`` makes of their mean; None without local steps.
        meanwhile: PyTorch's calls it in each step on a GPU, when that has all of the step but the update to compute,
            and before its results are waited for.
    """

    framework: str
    parameters: int
    bucket_mb: float | None = None
    gpu: str | None
    compiled: bool
    alone = False
    updates = 0
    loss = 0.0
    faulty = False
    own_finite = True
    _averaging_seconds = 0.0
    _average: Average | None = None
    outer: OuterStep | None = None
    _before = NOTHING

    def __init__(self, recipe: Recipe, comm: Communicator) -> None:
        self._comm = comm
        self.before_update: Callable[[], None] = _pass
        self.meanwhile: Callable[[], None] = _pass
        self._remembers = recipe.fault_tolerance.fault_tolerant or recipe.numbers.non_finite == "skip"
        # The optimizer's state is equal on all ranks unless each makes steps by itself.
        self._moments = MOMENTS if recipe.sync else "optimizer."

    @property
    @abstractmethod
    def communication_seconds(self) -> float | None: ...

    @property
    @abstractmethod
    def timeline(self) -> Timeline: ...

    @abstractmethod
    def step(
        self,
        parts: Iterable[Samples],
        count: int,
        scale: float,
        learning_rate: float,
        sgd_share: float,
        average: float | None = None,
    ) -> float:
        """Update by the gradient of the returned loss, averaged over the ranks.

        A broken sample adds nothing to loss and gradient, and the others do not make up for it: with b of n samples
        broken, they are (n - b) / n of the mean over the others. Batch normalisation sees the image that replaces it,
        and its running statistics move once, towards the plain mean of the parts. All ranks leave out an update whose
        reduced gradient is not finite, which one rank's loss that is not finite causes; it counts in ``updates``.

        Args:
            parts: this rank's micro-batches, ``count`` on every rank, none of them empty, each valid until the next is
                asked for. Only the sum of their gradients is reduced.
            scale: the factor of the sum of the samples' losses.
            sgd_share: SGD's share of this step, for an optimizer with a transition.
            average: how far the average moves to the parameters after the update, 0 to 1, where the recipe has one.
                None leaves it unchanged, as does an update that is left out.

        Returns:
            ``scale`` x the sum of the losses of all samples in ``parts`` that are not broken, before the update.
        """

    def place(self, samples: Samples) -> Samples:
        """The samples, with their images on the way to where they are computed on if that is a GPU."""
        return samples

    @abstractmethod
    def vector(self) -> NDArray[np.float32]:
        """A copy of all trained parameters, in the same order on all ranks."""

    @abstractmethod
    def set_vector(self, vector: NDArray[np.float32]) -> None:
        """Replace all trained parameters, in the order of :meth:`vector`."""

    @abstractmethod
    def mean_vector(self) -> NDArray[np.float32]:
        """The mean of :meth:`vector` over the ranks, valid until the next one. It is communication. Collective."""

    def rebuild(self) -> None:
        """After :meth:`Communicator.recover`: discard a step that failed, and use the new ranks."""
        self.guard.restart()
        if self._before[0] == self.updates:
            self.undo_forward()

    @abstractmethod
    def undo_forward(self) -> None:
        """Undo what the last step changed although its update was left out: statistics of batch normalisation.

        Only for a recipe that skips such steps.
        """

    @abstractmethod
    def not_finite_gradients(self) -> Sequence[str]:
        """The parameters whose reduced gradients in the last step, whose update was left out, were not finite."""

    @abstractmethod
    def average_statistics(self) -> None:
        """Replace batch normalisation's running statistics by their mean over the ranks. Collective."""

    def take_average(self) -> None:
        """Copy the average into the model, if the recipe has one."""
        if self._average:
            self._average.take()

    @abstractmethod
    def evaluate(self, samples: Samples) -> tuple[float, float]:
        """The sum of the losses, and the number of correctly classified samples among those that are not broken.

        A sample with several labels counts by the part of them that is correct. Both use the average of the
        parameters, where the recipe has one.
        """


def run_event(recipe: Recipe, comm: Communicator, trainer: Trainer, iterations_per_epoch: int) -> RunEvent:
    """The event of a run. Collective."""
    event = RunEvent(
        recipe=recipe.name,
        framework=trainer.framework,
        backend=comm.backend,
        ranks=comm.size,
        hosts=tuple(sorted(set(comm.allgather_object(comm.host)))),
        epochs=recipe.epochs,
        iterations_per_epoch=iterations_per_epoch,
        parameters=trainer.parameters,
        bucket_mb=trainer.bucket_mb,
        decode=recipe.data.decode if recipe.data.name == "imagenet" else None,
    )
    if recipe.data.name != "text":
        return event
    tokens = recipe.model.context
    peak = matmul_flops(trainer.gpu, recipe.precision)
    text = {"tokens": tokens, "flops": tokens * recipe.model.flops_per_token, "peak_flops": peak}
    return event.model_copy(update=text)


def _pass() -> None: ...
