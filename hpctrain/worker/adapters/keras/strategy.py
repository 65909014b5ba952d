"""The strategy of tf.distribute that a run was launched with."""

from __future__ import annotations

import tensorflow as tf

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm import Communicator, current


def strategy(*, comm: Communicator | None = None) -> tf.distribute.Strategy:
    """The strategy of ``--backend mirrored``, ``multi_worker`` or ``parameter_server``, in place of one of your own.

    hpctrain starts its processes and tells each where the others are. Create model, optimizer and metrics in its
    scope::

        ht.init()
        strategy = ht.keras.strategy()
        with strategy.scope():
            model = make_model()
            model.compile(optimizer, loss)
        model.fit(dataset)  # mirrored; a loop of your own around strategy.run under the others

    Keras 3 takes batches that the replicas of ``mirrored`` divide evenly. Under ``parameter_server`` only rank 0 runs
    the script, and ``ht.keras.coordinator()`` schedules its steps. A single-process run without a strategy gets
    TensorFlow's default one, whose scope changes nothing.

    Args:
        comm: the ranks; by default those that :func:`hpctrain.init` joined.

    Raises:
        HpctrainError: several ranks with a backend other than these.
    """
    comm = comm or current()
    if comm.strategy is None and comm.size > 1:
        raise HpctrainError(
            "HT-backend-unfit",
            "backend {backend!r} has no strategy of tf.distribute, and under TensorFlow's default one "
            "each of {size} ranks would train alone",
            "choose --backend multi_worker or parameter_server; or leave the strategy out and use ht.distribute",
            backend=comm.backend,
            size=comm.size,
        )
    comm.distributed = True
    return tf.distribute.get_strategy() if comm.strategy is None else comm.strategy


def coordinator(*, comm: Communicator | None = None) -> tf.distribute.coordinator.ClusterCoordinator:
    """The coordinator of ``--backend parameter_server``, in place of one of your own.

    Args:
        comm: the ranks; by default those that :func:`hpctrain.init` joined.

    Raises:
        HpctrainError: another backend.
    """
    comm = comm or current()
    found = getattr(comm, "coordinator", None)
    if found is None:
        raise HpctrainError(
            "HT-backend-unfit",
            "backend {backend!r} has no coordinator of workers",
            "choose --backend parameter_server",
            backend=comm.backend,
        )
    return found
