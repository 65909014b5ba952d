"""The interface of a framework's trainer, for the training loop and the recovery from faults; and what it trains."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.checkpoints.layout import MOMENTS
from hpctrain.common.cluster.gpu_models import matmul_flops
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.events.kinds import RunEvent
from hpctrain.worker.comm import Communicator
from hpctrain.worker.data.samples import Samples
from hpctrain.worker.train.local_steps import OuterStep
from hpctrain.worker.train.state import Stateful

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


class Trainer(Stateful):
    """A model and its optimizer, made to use the communicator by a framework's adapter.

    No network draws random numbers in a step: what is drawn for samples follows from the recipe's seed. So a state has
    no generators.

    Attributes:
        framework: ``torch`` or ``keras``.
        parameters: how many numbers are trained.
        bucket_mb: the size at which a gradient bucket is closed, in MB (10^6 bytes); None where there are no buckets.
        gpu: the driver's name of the GPU that the rank computes on; None if it computes on cores.
        communication_seconds: how long the last step waited for reductions after its last gradient; None where that
            is not measured.
        updates: the number of steps whose update is done, whether or not :meth:`step` returned; an update is done as a
            whole or not at all. Set it after restoring a state.
        loss: what :meth:`step` returned, or would have returned, for the last of these steps.
        faulty: whether that step's reduced gradients were not finite, unless only because the loss scale was too large.
        own_finite: whether this rank's own loss was finite then, and its own gradients where they are still known.
        alone: with a recipe's ``sync``, whether steps use only this rank's gradients and update only its parameters,
            until its ``outer`` step.
        average_weight: how far the average moves to the parameters after the next update, 0 to 1, where the recipe has
            one. None leaves it unchanged, as does an update that is left out.
        outer: replaces the parameters by what the recipe's ``sync`` makes of their mean; None without local steps.
        meanwhile: PyTorch's calls it in each step on a GPU, when that has the step to compute, or all of it but the
            update, and before its results are waited for.
    """

    framework: str
    parameters: int
    bucket_mb: float | None = None
    gpu: str | None
    alone = False
    updates = 0
    loss = 0.0
    faulty = False
    own_finite = True
    _averaging_seconds = 0.0
    average_weight: float | None = None
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

    @abstractmethod
    def step(self, parts: Iterable[Samples], count: int, scale: float, learning_rate: float, sgd_share: float) -> float:
        """Update by the gradient of the returned loss, averaged over the ranks.

        A sample without a label adds nothing to loss and gradient. The running statistics of batch normalisation move
        once, towards the plain mean of the parts. All ranks leave out an update whose
        reduced gradient is not finite, which one rank's loss that is not finite causes; it counts in ``updates``.

        Args:
            parts: this rank's micro-batches, ``count`` on every rank, none of them empty, each valid until the next is
                asked for. Only the sum of their gradients is reduced.
            scale: the factor of the sum of the samples' losses.
            sgd_share: SGD's share of this step, for an optimizer with a transition.

        Returns:
            ``scale`` x the sum of the losses of all samples in ``parts`` that have a label, before the update.
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
    def average_statistics(self) -> None:
        """Replace batch normalisation's running statistics by their mean over the ranks. Collective."""

    def take_average(self) -> None:
        """Copy the average into the model, if the recipe has one."""

    @abstractmethod
    def evaluate(self, samples: Samples) -> tuple[float, float]:
        """The sum of the losses, and the number of correctly classified samples among those that have a label.

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
    )
    if recipe.data.name != "text":
        return event
    tokens = recipe.model.context
    peak = matmul_flops(trainer.gpu, recipe.precision)
    text = {"tokens": tokens, "flops": tokens * recipe.model.flops_per_token, "peak_flops": peak}
    return event.model_copy(update=text)


def _pass() -> None: ...
