"""What the training loop, and the recovery from faults, ask of a framework's side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hpctrain.data.samples import Samples
from hpctrain.train.checkpoint import Stateful

# What losses in fp16 are multiplied by at first; halved where a gradient overflows, doubled after 2000 steps without.
INITIAL_SCALE = 2.0**16

Timeline = Sequence[tuple[float, str, int]]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step that a rank has begun and not noted.

    Attributes:
        samples: of the global batch.
        own: how many of them are this rank's.
        ranks: how many take part.
        learning_rate: of this step.
        begin: ``time.perf_counter`` of its begin.
    """

    samples: int
    own: int
    ranks: int
    learning_rate: float
    begin: float


class Trainer(Stateful, Protocol):
    """A model and its optimizer, made to use the communicator by a framework's adapter.

    Attributes:
        framework: ``torch`` or ``keras``.
        parameters: how many numbers are trained.
        communication_seconds: how long the last step waited for reductions after its last gradient.
        timeline: the last step's reductions (see hpctrain.events); empty where they are not measured.
        updates: steps whose update is done, whether or not :meth:`step` returned: it is done as a whole or not at all.
            Whoever restores a state says of how many.
        loss: what :meth:`step` returned, or would have returned, for the last of them.
    """

    framework: str
    parameters: int
    updates: int
    loss: float

    @property
    def communication_seconds(self) -> float: ...

    @property
    def timeline(self) -> Timeline: ...

    def step(self, parts: Iterable[Samples], count: int, scale: float, learning_rate: float, sgd_share: float) -> float:
        """One update by the mean over the ranks of the gradient of the returned loss.

        A broken sample has no part in loss and gradient, which are not made larger for it: with b of n samples broken
        they are (n - b) / n of the mean over the others. Batch normalisation sees what stands in its place, and its
        running statistics move once, towards the plain mean of the parts. In fp16 all ranks alike leave out an update
        whose gradient is not finite; it counts in ``updates``.

        Args:
            parts: this rank's micro-batches, none of them empty, each good until the next is asked for, as many as on
                every other rank. Only the sum of their gradients is reduced.
            count: of the parts.
            scale: what the sum of the samples' losses is multiplied by.
            learning_rate: of this step.
            sgd_share: of this step, for an optimizer with a transition.

        Returns:
            ``scale`` x the sum of the losses of all samples in ``parts`` that are not broken, before the update.
        """

    def rebuild(self) -> None:
        """After :meth:`Communicator.recover`: forget a step that failed, and use the new ranks."""

    def average_statistics(self) -> None:
        """Make the statistics that batch normalisation validates with the mean over the ranks. Collective."""

    def evaluate(self, samples: Samples) -> tuple[float, int]:
        """The sum of the losses, and how many samples are classified rightly, of those that are not broken."""
