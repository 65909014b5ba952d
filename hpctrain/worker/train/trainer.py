"""The interface of a framework's trainer, for the training loop and the recovery from faults."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.common.run.events.kinds import Moment
from hpctrain.worker.data.samples import Samples
from hpctrain.worker.train.state import Stateful

# What losses in fp16 are multiplied by at first; halved where a gradient overflows, doubled after 2000 steps without.
INITIAL_SCALE = 2.0**16

Timeline = Sequence[Moment]


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """A step that a rank has begun and not recorded.

    Attributes:
        samples: of the global batch.
        own: how many of them are this rank's.
        ranks: how many take part.
        learning_rate: of this step.
        begin: ``time.perf_counter`` of its begin.
        order: checksum of the global batch's sample indices (see hpctrain.common.run.events).
    """

    samples: int
    own: int
    ranks: int
    learning_rate: float
    begin: float
    order: int = 0


@dataclass(frozen=True, kw_only=True)
class GradientNumbers:
    """Statistics of one parameter's reduced gradient in the last step.

    Attributes:
        name: of the parameter.
        nan, inf: how many of the gradient's elements are.
        norm: the 2-norm of the parameter itself.
    """

    name: str
    nan: int
    inf: int
    norm: float


class Trainer(Stateful, Protocol):
    """A model and its optimizer, made to use the communicator by a framework's adapter.

    Attributes:
        framework: ``torch`` or ``keras``.
        parameters: how many numbers are trained.
        bucket_mb: at what size a gradient bucket is closed, in MB (10^6 bytes); None where there are no buckets.
        gpu: what the driver calls the GPU that the rank computes on; None for cores.
        communication_seconds: how long the last step waited for reductions after its last gradient; None where that
            is not measured.
        timeline: the last step's reductions (see hpctrain.common.run.events); empty where they are not measured.
        updates: steps whose update is done, whether or not :meth:`step` returned: it is done as a whole or not at all.
            Whoever restores a state says of how many.
        loss: what :meth:`step` returned, or would have returned, for the last of them.
        faulty: whether that one's reduced gradients were not finite, for another reason than that loss scaling tried
            a factor too large.
        own_finite: whether this rank's own loss was finite then, and its own gradients where they are still known.
        alone: whether steps are by this rank's own gradients and update its parameters alone, until
            :meth:`average_parameters`. Where the recipe has ``sync``.
    """

    framework: str
    parameters: int
    bucket_mb: float | None
    gpu: str | None
    alone: bool
    updates: int
    loss: float
    faulty: bool
    own_finite: bool

    @property
    def communication_seconds(self) -> float | None: ...

    @property
    def timeline(self) -> Timeline: ...

    def step(
        self,
        parts: Iterable[Samples],
        count: int,
        scale: float,
        learning_rate: float,
        sgd_share: float,
        average: float | None = None,
    ) -> float:
        """One update by the mean over the ranks of the gradient of the returned loss.

        A broken sample has no part in loss and gradient, which are not made larger for it: with b of n samples broken
        they are (n - b) / n of the mean over the others. Batch normalisation sees what stands in its place, and its
        running statistics move once, towards the plain mean of the parts. All ranks alike leave out an update whose
        reduced gradient is not finite, as it is where any rank's loss is not; it counts in ``updates``.

        Args:
            parts: this rank's micro-batches, none of them empty, each good until the next is asked for, as many as on
                every other rank. Only the sum of their gradients is reduced.
            count: of the parts.
            scale: what the sum of the samples' losses is multiplied by.
            learning_rate: of this step.
            sgd_share: of this step, for an optimizer with a transition.
            average: how far the average moves to the parameters after the update, where the recipe has one; None
                leaves it, as an update that is left out does.

        Returns:
            ``scale`` x the sum of the losses of all samples in ``parts`` that are not broken, before the update.
        """

    def average_parameters(self) -> None:
        """Replace parameters by what the recipe's ``sync`` makes of their mean over the ranks. Collective."""

    def vector(self) -> NDArray[np.float32]:
        """A copy of what is trained, in one order on all ranks."""

    def set_vector(self, vector: NDArray[np.float32]) -> None:
        """Replace what is trained."""

    def rebuild(self) -> None:
        """After :meth:`Communicator.recover`: discard a step that failed, and use the new ranks."""

    def undo_forward(self) -> None:
        """Undo what the last step changed although its update was left out: statistics and random states.

        Where the recipe has such steps skipped.
        """

    def gradient_numbers(self) -> Sequence[GradientNumbers]:
        """Statistics of the last step's reduced gradients, if they were not clipped; equal on all ranks."""

    def average_statistics(self) -> None:
        """Replace batch normalisation's running statistics by their mean over the ranks. Collective."""

    def take_average(self) -> None:
        """Copy the average into the model, if the recipe has one."""

    def evaluate(self, samples: Samples) -> tuple[float, float]:
        """The sum of the losses, and the number of correctly classified samples among those that are not broken.

        Of a sample with several labels its part of them counts. Both by the average of the parameters, where the
        recipe has one.
        """
