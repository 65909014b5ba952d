"""Distributes a Keras 3 model with an optimizer, and the steps of its ``fit`` and ``evaluate``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hpctrain.common.errors import HpctrainError
from hpctrain.common.stderr import tell
from hpctrain.worker.adapters.keras.distribution import Distribution, distribution_of, register
from hpctrain.worker.adapters.keras.fitting import patch_fit
from hpctrain.worker.adapters.keras.metrics import (
    patch_compute_loss,
    patch_metrics,
    whole_batch_logs,
    whole_batch_losses,
)
from hpctrain.worker.adapters.keras.rank_batch import batch_of, is_part
from hpctrain.worker.adapters.keras.reduction import (
    GradientReduction,
    make_distributed,
    reduction_of,
    synchronise,
    watch_tapes,
)
from hpctrain.worker.adapters.keras.variables import inner_of, is_built
from hpctrain.worker.adapters.keras.whole_batch import total
from hpctrain.worker.comm import Communicator, current
from hpctrain.worker.comm.engines import Compression, wire_of

Step = Callable[[Any], Any]


def patch_steps(model: keras.Model, distribution: Distribution) -> None:
    """Make ``fit`` and ``evaluate`` apply the shares of ``ht.shard``.

    A ``train_step`` of the user's own gets what the user's dataset held. The share weights the gradients where the
    tapes make them: loss and metrics are those of this rank's own samples, so that their sums over the ranks are those
    of the global batch.
    """
    patch_compute_loss(model, distribution)
    train, test, predict = model.train_step, model.test_step, model.predict_step

    def train_step(data: Any) -> Any:
        return _run(model, distribution, train, data) if is_part(data) else train(data)

    def test_step(data: Any) -> Any:
        return _run(model, distribution, test, data) if is_part(data) else test(data)

    def predict_step(data: Any) -> Any:
        if is_part(data):
            raise HpctrainError(
                "HT-argument-not-valid",
                "predict of a sharded dataset would give this rank's samples alone",
                "give predict the dataset that ht.shard was given",
            )
        return predict(data)

    model.train_step, model.test_step, model.predict_step = train_step, test_step, predict_step


def _is_own(model: keras.Model, step: Step) -> bool:
    """Whether what a step returns is the user's own."""
    made = (step, model.compute_metrics, model.get_metrics_result)
    return not all(each.__module__.startswith("keras.") for each in made)


def _run(model: keras.Model, distribution: Distribution, step: Step, data: Any) -> Any:
    batch = batch_of(data)
    with distribution.computing(data.share), whole_batch_losses(distribution):
        patch_metrics(model, distribution)
        patch_batch_norms(model, distribution)
        logs = step(batch)
        return whole_batch_logs(distribution, logs) if _is_own(model, step) and distribution.comm.size > 1 else logs


def patch_batch_norms(model: keras.Model, distribution: Distribution) -> None:
    """Make every synchronized batch normalisation of ``model`` use mean and variance over all ranks' samples.

    Keras asks TensorFlow's distribution strategy for the other replicas, and finds none.
    """
    if distribution.comm.size == 1:
        return
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized and "_moments" not in vars(layer):
            layer._moments = functools.partial(_moments, layer, distribution)


def _moments(
    layer: keras.layers.BatchNormalization, distribution: Distribution, inputs: tf.Tensor, mask: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance of each channel over all samples of a global batch, each with the same weight.

    In a loop without ``fit``, a rank without a sample of its own computes another rank's, which counts as well.
    """
    axes, channels = layer._reduction_axes, tf.shape(inputs)[layer.axis]
    if mask is None:
        count = tf.cast(tf.size(inputs) // channels, tf.float64)
        mean, variance = (tf.cast(each, tf.float64) for each in tf.nn.moments(inputs, axes))
        first, second, spare = count * mean, count * (variance + tf.square(mean)), 0.0
    else:
        known = tf.broadcast_to(tf.cast(mask[..., None], tf.float64), tf.shape(inputs))
        wide = tf.cast(inputs, tf.float64) * known
        count = tf.reduce_sum(known) / tf.cast(channels, tf.float64)
        first, second = tf.reduce_sum(wide, axes), tf.reduce_sum(tf.square(wide), axes)
        spare = keras.config.epsilon()  # as Keras divides masked sums
    sums = _over_ranks(distribution, tf.concat([first, second, count[None]], axis=0))
    first, second, count = sums[:channels], sums[channels:-1], sums[-1]
    mean = first / (count + spare)
    variance = (second - 2 * mean * first + count * tf.square(mean)) / (count + spare)
    return tf.cast(mean, inputs.dtype), tf.cast(tf.maximum(variance, 0), inputs.dtype)


def _over_ranks(distribution: Distribution, own: tf.Tensor) -> tf.Tensor:
    comm, share = distribution.comm, distribution.share

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def summed(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        if share is None:
            return total(comm, tensor), lambda upstream: total(comm, upstream)

        def backward(upstream: tf.Tensor) -> tf.Tensor:
            # The optimizer multiplies the result by this rank's share, but the upstream gradient is every rank's.
            return tf.math.divide_no_nan(total(comm, upstream * share), share)

        return total(comm, tensor * tf.cast(share > 0, tf.float64)), backward

    return summed(own)


TYPES = {"fp16": tf.float16, "bf16": tf.bfloat16}


def distribute(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    *,
    comm: Communicator | None = None,
    compression: Compression = "none",
    guard_every: int = 100,
) -> tuple[keras.Model, keras.optimizers.Optimizer]:
    """Let all ranks train one model: tapes give the gradients of whole batches for its variables.

    Give it every optimizer whose state is to be broadcast, compared and saved: both of a GAN. An update by this one of
    a copy of the model, or of a model around it, is refused.

    On datasets from :func:`shard`, ``fit`` trains as one process does on the whole batches. On other data (arrays, a
    generator, a rank's own dataset) every rank computes everything that it is given, and an update is the mean over the
    ranks, as in DistributedDataParallel; an epoch of the same arrays on every rank passes over them once per rank.
    Losses of Keras are those of the global batch, in ``compile`` and where a ``train_step`` calls them. A
    ``compute_loss`` and functions and classes of the user's own, for losses and metrics, get the samples of all ranks.
    What else a ``train_step`` computes must be a mean over samples, or come from :func:`hpctrain.mean_loss`, or from
    tensors of :func:`whole`.

    The model and optimizer returned are the ones passed in. The optimizer stays an instance of its class, saves as that
    class and keeps its state. A model that is already built gets rank 0's weights, and the optimizer rank 0's state, at
    once; one that is built later gets them from ``callbacks()`` when ``fit`` begins.

    Args:
        model: the same on every rank.
        optimizer: any optimizer of Keras 3, a LossScaleOptimizer included.
        comm: the ranks; by default those that :func:`hpctrain.init` joined.
        compression: the gradients' type on the wire. fp16 overflows where the sum over the ranks is above 65504, so a
            mean above 65504 / ranks can; bf16 rounds. The backend mpi compresses only between nodes, and sums in
            float32 within a node; Horovod 0.28.1 carries bf16 as float32.
        guard_every: updates between two checks that all ranks hold equal parameters, in a loop without ``fit``.

    Raises:
        HpctrainError: a Keras backend other than TensorFlow, an optimizer that is not from Keras 3 or is already
            distributed, an unknown compression, or ranks with different models.
    """
    _check(optimizer)
    comm = comm or current()
    _check_scope(model, comm)
    wire = wire_of(compression, TYPES)
    distribution = _distributed(model, comm, guard_every)
    comm = distribution.comm
    distribution.reduction.wire = wire
    make_distributed(inner_of(optimizer), distribution.reduction)
    patch_batch_norms(model, distribution)
    distribution.optimizers.append(optimizer)
    # Functions that were traced before lack the reduction.
    model.train_function = model.test_function = model.predict_function = None
    if is_built(model):
        synchronise(model, optimizer)
    return model, optimizer


def _distributed(model: keras.Model, comm: Communicator, guard_every: int) -> Distribution:
    """The state that a model's optimizers share; the first of them creates it."""
    known = distribution_of(model)
    if known and known.comm is comm:
        return known
    distribution = Distribution(comm)
    distribution.reduction = GradientReduction(distribution, model, guard_every)
    register(model, distribution)
    patch_steps(model, distribution)
    patch_fit(model, distribution)
    if comm.backend != "single":
        _compile_without_xla(model, comm)
    if comm.size > 1:
        watch_tapes()
    return distribution


def _check(optimizer: Any) -> None:
    if keras.backend.backend() != "tensorflow":
        raise HpctrainError(
            "HT-keras-wrong-backend",
            "Keras runs on {backend}, and hpctrain reduces Keras gradients on TensorFlow only",
            "set KERAS_BACKEND=tensorflow before keras is imported",
            backend=keras.backend.backend(),
        )
    kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise HpctrainError(
            "HT-argument-not-valid",
            "{kind} is not an optimizer of Keras 3",
            "use one of keras.optimizers",
            kind=kind,
        )
    if reduction_of(optimizer):
        raise HpctrainError(
            "HT-optimizer-distributed-twice",
            "this {kind} was already given to ht.distribute",
            "make an optimizer for each model",
            kind=kind,
        )


def _check_scope(model: keras.Model, comm: Communicator) -> None:
    """Refuse a model whose strategy adds its gradients up, which would happen twice."""
    if comm.strategy is None:
        return
    # Raises for a backend that works through its strategy's scope alone.
    comm.tensorflow()
    if model.distribute_strategy is comm.strategy:
        raise HpctrainError(
            "HT-model-not-supported",
            "{model} was made in the scope of {strategy}, where Keras adds the gradients up by itself",
            "make it outside the scope for ht.distribute; or leave ht.distribute out, and write the loop around "
            "strategy.run",
            model=model.name,
            strategy=type(comm.strategy).__name__,
        )


def _compile_without_xla(model: keras.Model, comm: Communicator) -> None:
    """A reduction over ranks has no XLA kernel; ``compile`` asks this attribute."""
    model.supports_jit = False
    if model.compiled:
        model.jit_compile = False
    if comm.rank == 0 and tf.config.list_physical_devices("GPU"):
        tell(f"hpctrain: jit_compile is off: the reduction of backend {comm.backend!r} has no XLA kernel")
