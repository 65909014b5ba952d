"""The strategy of tf.distribute that a run was launched with, and refusals of what Keras 3 cannot do under one."""

from __future__ import annotations

import functools
from typing import Any

import keras
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
            "HT-backend-no-strategy",
            "backend {backend!r} has no strategy of tf.distribute, and under TensorFlow's default one "
            "each of {size} ranks would train alone",
            "choose --backend multi_worker or parameter_server; or leave the strategy out and use ht.distribute",
            backend=comm.backend,
            size=comm.size,
        )
    _watch_fit()
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
            "HT-backend-no-coordinator",
            "backend {backend!r} has no coordinator of workers",
            "choose --backend parameter_server",
            backend=comm.backend,
        )
    return found


def _watch_fit() -> None:
    """From now on, refuse ``fit`` of models that were made in the scope of a strategy over several processes."""
    for kind in keras.Model.__mro__:
        if "fit" in vars(kind) and not hasattr(vars(kind)["fit"], "watches"):
            kind.fit = _watched(vars(kind)["fit"])


def _watched(fit: Any) -> Any:
    @functools.wraps(fit)
    def watched(model: keras.Model, *arguments: Any, **settings: Any) -> Any:
        kind = type(model.distribute_strategy)
        if issubclass(kind, tf.distribute.MultiWorkerMirroredStrategy):
            raise HpctrainError(
                "HT-strategy-fit-broken",
                "fit of a model in the scope of {strategy} is broken in Keras 3, which "
                "cannot convert the values of several workers ('Attempt to convert a value (PerReplica')",
                "make the model outside the scope and give it to ht.distribute, whose fit this backend reduces; or "
                "write the loop around strategy.run",
                strategy="MultiWorkerMirroredStrategy",
            )
        if issubclass(kind, tf.distribute.ParameterServerStrategy):
            raise HpctrainError(
                "HT-strategy-fit-broken",
                "fit of a model in the scope of {strategy} does not work in Keras 3: it "
                "lacks the DatasetCreator with which workers made their data",
                "write the loop: ht.keras.coordinator().schedule(step, args=batch); or choose --backend multi_worker",
                strategy="ParameterServerStrategy",
            )
        return fit(model, *arguments, **settings)

    watched.watches = True  # type: ignore[attr-defined]
    return watched
