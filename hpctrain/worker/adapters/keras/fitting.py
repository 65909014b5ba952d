"""``fit`` and ``evaluate`` of a distributed model, apart from their steps, and the callbacks that they need."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.guard import Guard
from hpctrain.worker.adapters.keras.distribution import Distribution, distribution_of
from hpctrain.worker.adapters.keras.metrics import compare_metrics, join_logs
from hpctrain.worker.adapters.keras.rank_batch import ContinueOrders, Part, batch_of, is_registered, is_sharded
from hpctrain.worker.adapters.keras.reduction import distributed_optimizers, reduction_of, synchronise
from hpctrain.worker.adapters.keras.sharding import compare_datasets
from hpctrain.worker.adapters.keras.variables import BUILD_HINT, broadcast, guard_of, is_built
from hpctrain.worker.adapters.recording import Recording, recording
from hpctrain.worker.comm import Communicator, current
from hpctrain.worker.comm.graph_errors import original_errors_raised
from hpctrain.worker.models.keras_batch_norm import average_statistics


class _OnRanks(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that needs the other ranks."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self._comm = comm


class Broadcast(_OnRanks):
    """Gives every rank the weights, the optimizer state and the first epoch that rank 0 begins training with.

    It comes after the user's callbacks, of which BackupAndRestore restores these on rank 0.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        distributed = distributed_optimizers(self.model)
        for optimizer in distributed:
            synchronise(self.model, optimizer)
        if not distributed:
            # Not every wrapper of an optimizer can list its variables. The guard compares the parameters later.
            broadcast(self._comm, self.model)
        self.model._initial_epoch = self._comm.broadcast_object(self.model._initial_epoch)


class JoinEpochs(_OnRanks):
    """Makes the statistics of batch normalisation and the logs of an epoch the means over the ranks.

    The metrics of a dataset of ``ht.shard`` are equal on all ranks already; those of other data are means from here on.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # What is saved or evaluated from here on is the same on every rank.
        average_statistics(self.model, self._comm)
        if logs:
            join_logs(self._comm, logs)


class RecordSteps(_OnRanks):
    """Records each batch as a step with its learning rate, and the joined metrics of an epoch."""

    _counted: Recording | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        own = recording()
        # Not count_params(), which fails for a model that is only called by its parts.
        parameters = sum(math.prod(weight.shape) for weight in self.model.weights)
        if own and own.begin_run(self._comm, "keras", self.model, parameters):
            self._counted = own

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._counted:
            optimizer = self.model.optimizer
            if reduction_of(optimizer) is None:
                # A GAN has optimizers of its own, and the one that compile makes is never used.
                optimizer = next(iter(distributed_optimizers(self.model)), optimizer)
            rate = None if optimizer is None else float(optimizer.learning_rate)
            self._counted.step_done(rate)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        values = {name: float(value) for name, value in (logs or {}).items() if np.ndim(value) == 0}
        if self._counted and values:
            # Quiet because fit prints the metrics itself.
            self._counted.log(values, quiet=True)


class GuardParameters(_OnRanks):
    """Stops the run if ranks hold different parameters, with any optimizer."""

    _guard: Guard

    def __init__(self, comm: Communicator, every: int) -> None:
        super().__init__(comm)
        self._every = every

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._guard = guard_of(self._comm, self.model, every=self._every)
        self._take_over(True)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._guard.step_done()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._take_over(False)
        # The ranks of a short run may have drifted apart since the check of the first step.
        self._guard.check()

    def _take_over(self, guarded: bool) -> None:
        """Its optimizers have a guard for loops without ``fit``; one of the two is enough."""
        if distribution := distribution_of(self.model):
            distribution.reduction.guarded = guarded


class StopTogether(_OnRanks):
    """Stops all ranks when a callback of one of them asks for it; otherwise they would wait for that rank.

    Args:
        each_batch: whether callbacks may ask after any batch, as TerminateOnNaN does.
    """

    def __init__(self, comm: Communicator, *, each_batch: bool) -> None:
        super().__init__(comm)
        self._each_batch = each_batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._each_batch:
            self._agree()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._agree()

    def _agree(self) -> None:
        stops = self._comm.allreduce(np.array([self.model.stop_training], dtype=np.int64), "max")
        self.model.stop_training = bool(stops[0])


def callbacks(*, guard_every: int = 100, comm: Communicator | None = None) -> list[keras.callbacks.Callback]:
    """The callbacks that ``fit`` needs on several ranks. Your own come after the metrics are joined, however listed.

    ``fit`` of a distributed model adds them by itself if none of them are among its callbacks. Callbacks that write
    files (ModelCheckpoint, BackupAndRestore, CSVLogger and TensorBoard) act on the first rank only, and what
    BackupAndRestore reads there reaches every rank.

    Parameters are the same on one rank and on several, to rounding. What a layer computes from the samples of a rank is
    not: BatchNormalization normalises over a rank's part of a batch (over all ranks with ``synchronized=True``), and
    Dropout draws its own mask on each rank. The moving statistics of batch normalisation become the mean over the ranks
    at the end of an epoch and before validation, so that every rank evaluates and saves one model.

    Args:
        guard_every: batches between two checks that all ranks hold equal parameters; the first batch is always checked.
        comm: the ranks; by default those that :func:`hpctrain.init` joined.
    """
    comm = comm or current()
    return [Broadcast(comm), JoinEpochs(comm), RecordSteps(comm), GuardParameters(comm, guard_every)]


# Callbacks that write files.
_WRITING = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
)


def patch_fit(model: keras.Model, distribution: Distribution) -> None:
    """Replace ``fit`` and ``evaluate`` of ``model`` by versions that work on several ranks and are unchanged on one."""
    fit, evaluate = model.fit, model.evaluate
    comm = distribution.comm

    def fit_on_ranks(*arguments: Any, **settings: Any) -> Any:
        given = _bound(fit, arguments, settings)
        sharded = _prepare_data(model, distribution, given)
        if comm.size > 1:
            given["callbacks"] = _for_ranks(given.get("callbacks"), comm)
        # With steps_per_epoch an epoch is not one pass over the data.
        passes = sharded and not given.get("steps_per_epoch")
        if passes and not isinstance(given.get("callbacks"), keras.callbacks.CallbackList):
            given["callbacks"] = [*_listed(given.get("callbacks")), ContinueOrders(comm, given["x"])]
        with _own_errors_raised(model):
            return fit(**given)

    def evaluate_on_ranks(*arguments: Any, **settings: Any) -> Any:
        given = _bound(evaluate, arguments, settings)
        if "_use_cached_eval_dataset" in given or is_sharded(given.get("x")):  # within fit, or of all ranks
            average_statistics(model, comm)
        with _own_errors_raised(model):
            return evaluate(**given)

    model.fit, model.evaluate = fit_on_ranks, evaluate_on_ranks


@contextmanager
def _own_errors_raised(model: keras.Model) -> Iterator[None]:
    """Raise the error that an exchange or the guard raised inside a graph, whose cause TensorFlow's own error hides."""
    try:
        with original_errors_raised():
            yield
    except HpctrainError:
        # TensorFlow keeps a graph whose tracing an error ended, and would run it in the next call.
        model.train_function = model.test_function = None
        raise


def _prepare_data(model: keras.Model, distribution: Distribution, given: dict[str, Any]) -> bool:
    """Check the data of ``fit``, given with its other arguments, and build the model from it.

    Returns:
        Whether ``ht.shard`` made the data.
    """
    if not is_sharded(given.get("x")):
        _warn_of_own_data(distribution, "trains", "an update")
        return False
    if given.get("validation_data") is not None and not is_sharded(given["validation_data"]):
        _warn_of_own_data(distribution, "validates", "a number in an epoch's logs")
    if distribution.comm.size > 1 and not is_registered(given["x"]):
        # What was done behind ht.shard, such as a shuffle without a seed, has to be the same on every rank too.
        compare_datasets(distribution.comm, given["x"])
    if given.get("class_weight"):
        given["x"] = _class_weighted(given["x"], given.pop("class_weight"))
    if distribution.comm.size > 1:
        _check_batch_size(model)
        compare_metrics(distribution.comm, model)
    if not is_built(model):
        _build(model, given["x"].element_spec)
    return True


def _check_batch_size(model: keras.Model) -> None:
    """Refuse a model whose input says how many samples a batch has: each rank computes a part of them."""
    fixed = [each.shape[0] for each in getattr(model, "inputs", ()) if each.shape[0] is not None]
    if fixed:
        raise HpctrainError(
            "HT-model-not-supported",
            "{model} takes batches of {count} samples, and each rank computes a part of a batch",
            "keras.Input without batch_size. A state that goes from batch to batch (stateful=True) needs one process",
            model=model.name,
            count=fixed[0],
        )


def _build(model: keras.Model, part: Any) -> None:
    """Create the weights now, so that all ranks start from rank 0's; Keras would create them in the first step."""
    try:
        model._symbolic_build(data_batch=batch_of(part))
    except Exception as error:
        # Losses and metrics are built as well, and a train_step of the user's own may use them another way.
        if not is_built(model):
            raise HpctrainError(
                "HT-model-not-built",
                "Keras cannot build {model} from the data: {reason}",
                BUILD_HINT,
                model=model.name,
                reason=str(error),
            ) from error


def _bound(function: Any, arguments: Sequence[Any], settings: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name; those of ``*args`` as Keras names them, and those of ``**kwargs`` among them."""
    signature = inspect.signature(function)
    if any(each.kind is each.VAR_POSITIONAL for each in signature.parameters.values()):
        of_keras = inspect.signature(getattr(keras.Model, function.__name__))
        given = dict(of_keras.bind_partial(None, *arguments).arguments)
        del given["self"]
        return dict(**given, **settings)
    given = dict(signature.bind(*arguments, **settings).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given.update(given.pop(name, {}))
    return given


def _warn_of_own_data(distribution: Distribution, use: str, result: str) -> None:
    if distribution.comm.size > 1 and not distribution.warned:
        distribution.comm.say(
            f"fit {use} on data that ht.shard did not make: every rank computes all that it is given, and {result} is "
            f"the mean over {distribution.comm.size} ranks"
        )
    distribution.warned = True


def _class_weighted(dataset: tf.data.Dataset, class_weight: dict[int, float]) -> tf.data.Dataset:
    """Apply the class weights here, because Keras would unpack a batch without the share."""
    from keras.src.trainers.data_adapters.tf_dataset_adapter import make_class_weight_map_fn

    weighted = make_class_weight_map_fn(class_weight)

    def part(whole: Any) -> Part:
        x, y, weight = weighted(*batch_of(whole))
        return Part(x, y, weight, whole.share)

    return dataset.map(part)


def _listed(given: Any) -> list[keras.callbacks.Callback]:
    return list(given) if isinstance(given, list | tuple) else [given] if given else []


def _for_ranks(given: Any, comm: Communicator) -> Any:
    """The callbacks that hpctrain needs, and of the user's own those that may act on this rank."""
    if isinstance(given, keras.callbacks.CallbackList):
        return given
    chosen = _listed(given)
    each_batch = any(comm.allgather_object(any(map(_acts_on_batches, chosen))))
    kept = [each for each in chosen if comm.rank == 0 or not isinstance(each, _WRITING)]
    if not any(isinstance(each, JoinEpochs) for each in chosen):
        kept = [*callbacks(comm=comm), *kept]
    kept.sort(key=_turn)
    return [*kept, StopTogether(comm, each_batch=each_batch)]


def _turn(callback: keras.callbacks.Callback) -> int:
    """The user's callbacks come after logs are joined, and before weights are broadcast and compared."""
    if isinstance(callback, JoinEpochs):
        return 0
    return 2 if isinstance(callback, Broadcast | GuardParameters) else 1


def _acts_on_batches(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback may stop the training after any batch."""
    if type(callback).__module__.startswith("hpctrain.") or isinstance(callback, _WRITING):
        return False
    return any(
        name in vars(callback) or getattr(type(callback), name) is not getattr(keras.callbacks.Callback, name)
        for name in ("on_batch_end", "on_train_batch_end", "on_train_batch_begin")
    )
