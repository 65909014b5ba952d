"""Loss and accuracy on the test set."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np

from hpctrain.worker.adapters.data_ranks import data_place
from hpctrain.worker.comm import Communicator
from hpctrain.worker.data.samples import BROKEN, SampleSource
from hpctrain.worker.data.sampling import parts, share
from hpctrain.worker.train.trainer import Trainer


def evaluate(trainer: Trainer, comm: Communicator, test: SampleSource, size: int, epoch: int) -> tuple[float, float]:
    """Mean loss and accuracy on the test set, each sample of which is seen by one data-parallel rank. Collective.

    All ranks compute equally many parts, since a model that is divided over them needs all of them for each.

    Args:
        size: the largest number of samples to compute at once.
    """
    place = data_place(comm)
    own = share(np.arange(len(test)), place.rank, place.ranks)
    left, count = own.count, -(-len(test) // (place.ranks * size))
    sums = np.zeros(3)
    with contextlib.closing(test.stream(parts(own, count), epoch)) as stream:
        for part in stream:
            # A rank that has run out of samples computes repeated ones, which do not count.
            own_part = left > 0
            samples = part if own_part else replace(part, labels=np.full_like(part.labels, BROKEN))
            left -= len(part)
            loss_sum, correct = trainer.evaluate(samples)
            broken = np.count_nonzero(part.labels == BROKEN) / part.labels[0].size if own_part else 0.0
            sums += np.array([loss_sum, correct, broken])
    # The ranks of a tp group count the same samples; in a pp group the last counts them, times the number of stages.
    loss_sum, correct, broken = comm.allreduce(sums, "sum") / (comm.size // place.ranks)
    seen = len(test) - broken
    return float(loss_sum / seen), float(correct / seen)
