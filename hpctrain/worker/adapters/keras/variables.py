"""The variables of a model and its optimizer across ranks: equal at the start, and proven equal later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.guard import Checksums, Guard
from hpctrain.worker.adapters.same_data import compare_models
from hpctrain.worker.comm import Communicator

if TYPE_CHECKING:
    import keras


BUILD_HINT = "build the model before ht.distribute: call it with a batch, model(batch), or give it a keras.Input layer"

_SETTINGS = (
    *("learning_rate", "weight_decay", "momentum", "beta_1", "beta_2", "rho", "epsilon", "ema_momentum"),
    *("clipnorm", "global_clipnorm", "clipvalue"),
)

# The integer type that a checksum reads a variable's bits as, by the element size in bytes.
_WORDS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int32}


def broadcast(comm: Communicator, model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None) -> None:
    """Broadcast rank 0's weights and optimizer state to every rank; builds the optimizer if needed.

    Seed generators of layers get a seed of each rank's own, unless the ranks' seeds differ already: dropout draws
    another mask on each rank.
    """
    if not is_built(model):
        if comm.size == 1:
            # There is nobody to differ from, and Keras builds it in its first step.
            return
        raise HpctrainError(
            "HT-model-not-built", "the model has no weights yet that every rank could start from", BUILD_HINT
        )
    variables = model.weights + (_state(model, optimizer) if optimizer else [])
    compare_models(comm, "variable", [f"{v.path} {tuple(v.shape)} {v.dtype}" for v in variables])
    comm.tensorflow().broadcast([v.value for v in variables], name="hpctrain.broadcast")
    _part_seeds(comm, model)


def _part_seeds(comm: Communicator, model: keras.Model) -> None:
    """Give the model's layers a different seed on each rank. Rank 0 keeps its own."""
    states = [variable for variable in model.variables if variable.path.endswith("seed_generator_state")]
    if comm.size == 1 or not states:
        return
    everyone = comm.allgather_object([np.asarray(state.numpy()).tolist() for state in states])
    for number, state in enumerate(states):
        values = [tuple(own[number]) for own in everyone]
        if comm.rank and len(set(values)) < comm.size:
            _, *counter = values[0]
            seed = np.random.SeedSequence([*values[0], number, comm.rank]).generate_state(1)[0] >> 1
            state.assign(np.array([seed, *counter], state.dtype))


def is_built(model: keras.Model) -> bool:
    """Whether all weights exist.

    ``model.built`` does not tell: it stays False for a model that is only called by its parts, as a GAN is, and
    ``model.build`` sets it for a subclassed model whose layers are not built.
    """
    layers = list(model._flatten_layers(include_self=False))
    if not (model.built or (layers and model.weights)):
        return False
    return all(layer.built or not _makes_weights(layer) for layer in layers)


def _makes_weights(layer: keras.layers.Layer) -> bool:
    import keras

    return type(layer).build is not keras.layers.Layer.build


def inner_of(optimizer: keras.optimizers.Optimizer | None) -> Any:
    """The optimizer that a LossScaleOptimizer wraps; any other optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _state(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The optimizer's variables, except the sums over this rank's own micro-batches."""
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    local = {id(variable) for variable in getattr(inner_of(optimizer), "_accumulated_gradients", ())}
    return [variable for variable in optimizer.variables if id(variable) not in local]


def checksums(variables: Sequence[keras.Variable]) -> tf.Tensor:
    """One 64-bit integer per variable: the wrapping sum of its bits as words. One flipped bit changes it."""
    return tf.stack([_checksum(tf.convert_to_tensor(variable.value)) for variable in variables])


def guard_of(comm: Communicator, model: keras.Model, *, every: int) -> Guard:
    """A guard over the trainable variables; batch normalisation's statistics differ between ranks by design."""
    variables = model.trainable_variables

    def numbers() -> Checksums:
        return np.asarray(checksums(variables).numpy(), dtype=np.int64)

    def not_finite() -> str:
        return next((each.path for each in variables if not tf.reduce_all(tf.math.is_finite(each.value))), "")

    names = [variable.path for variable in variables]
    guard = Guard(comm, names, numbers, every=every, not_finite=not_finite)
    guard.settings = lambda: _settings(getattr(model, "optimizer", None))
    return guard


def _settings(optimizer: keras.optimizers.Optimizer | None) -> dict[str, object]:
    """The numbers of the optimizer that the model was compiled with."""
    inner = inner_of(optimizer)
    found = {name: getattr(inner, name, None) for name in _SETTINGS}
    return {
        f"{name} of {type(inner).__name__}": float(np.asarray(value))
        for name, value in found.items()
        if value is not None
    }


def _checksum(value: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(tf.bitcast(value, _WORDS[value.dtype.size]), tf.int64))


def all_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Whether every element of all tensors is finite."""
    # A finite sum of squares proves all numbers finite. Squares of large finite numbers may overflow: check each then.
    squares = tf.add_n([tf.cast(tf.nn.l2_loss(tensor), tf.float32) for tensor in tensors])
    return tf.cond(
        tf.math.is_finite(squares),
        lambda: tf.constant(True),
        lambda: tf.reduce_all([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors]),
    )
