"""Records the steps of a Keras training on TensorFlow: its losses, gradients and variables."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hpctrain.common.run.step_records import Kept, projection
from hpctrain.worker.verify.recorder import Recorder


class KerasSteps:
    """Watches the optimizers and models of a script or recipe."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._generator = np.random.default_rng(0)

    def watch(self) -> None:
        """Begin to record."""
        self._watch_applying()
        self._watch_models()
        _leave_out_xla()

    def _watch_applying(self) -> None:
        optimizer = keras.src.optimizers.base_optimizer.BaseOptimizer
        apply = optimizer.apply

        @functools.wraps(apply)
        def recorded(own: Any, grads: Any, trainable_variables: Any = None) -> Any:
            variables = list(own._trainable_variables if trainable_variables is None else trainable_variables)
            gradients = list(grads)
            returned = apply(own, gradients, trainable_variables)
            # Within an optimizer, such as one that scales losses, only what it does in the end counts.
            if type(own).__name__ != "LossScaleOptimizer":
                self._note(own, gradients, variables)
            return returned

        optimizer.apply = recorded

    def _note(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        names = _names([v for _, v in pairs])
        dense = [tf.convert_to_tensor(g) for g, _ in pairs]

        def write(*values: Any) -> None:
            arrays = [value.numpy() for value in values]
            kinds = ["gradient"] * len(names) + ["parameter"] * len(names)
            kept = [_kept(kind, name, a) for kind, name, a in zip(kinds, names * 2, arrays, strict=True)]
            self._recorder.step(optimizer, kept)

        values = [*dense, *(tf.convert_to_tensor(v.value) for _, v in pairs)]
        if tf.inside_function():
            tf.py_function(write, values, [])
        else:
            write(*values)

    def _watch_models(self) -> None:
        call = keras.Layer.__call__
        recorder, running = self._recorder, [0]

        @functools.wraps(call)
        def called(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if running[0]:
                return call(layer, *args, **kwargs)
            running[0] += 1
            try:
                returned = call(layer, *args, **kwargs)
            finally:
                running[0] -= 1
            self._look_at(layer)
            if kwargs.get("training") and args:
                self._note_samples(args[0])
            return returned

        keras.Layer.__call__ = called
        # Where it is defined: a saved model whose class has a compile() of its own is loaded without an optimizer.
        trainer = next(each for each in keras.Model.__mro__ if "compile" in vars(each))
        compile_model = trainer.compile

        @functools.wraps(compile_model)
        def compiled(model: Any, *args: Any, **kwargs: Any) -> Any:
            returned = compile_model(model, *args, **kwargs)
            self._look_at(model)
            return returned

        trainer.compile = compiled
        recorder.save()

    def _look_at(self, layer: Any) -> None:
        """Note what a model consists of, and give its variables rounding errors."""
        if not isinstance(layer, keras.Layer) or not layer.built or layer in self._seen:
            return
        self._seen.add(layer)
        facts = self._recorder.facts
        for part in layer._flatten_layers():
            title = f"{part.name} ({type(part).__name__})"
            if isinstance(part, keras.layers.BatchNormalization) and not part.synchronized:
                facts.own_statistics.append(title)
            if getattr(part, "seed_generator", None) is not None and getattr(part, "rate", True):
                facts.random.append(title)
            self._recorder.computes_in(part.compute_dtype)
        if self._recorder.perturbs is None or tf.inside_function():
            return
        for variable in layer.trainable_variables:
            # A part may be called before the model that holds it.
            if not hasattr(variable, "_hpctrain_verified"):
                variable._hpctrain_verified = True
                noise = self._generator.uniform(-1, 1, variable.shape) * self._recorder.perturbs
                variable.assign((variable.numpy() * (1 + noise)).astype(variable.dtype))

    def _note_samples(self, value: Any) -> None:
        tensor = next((each for each in tf.nest.flatten(value) if tf.is_tensor(each) and each.shape.rank), None)
        if tensor is None or tensor.dtype == tf.string:
            return
        if tf.inside_function():
            tf.py_function(lambda rows: self._recorder.samples(rows.numpy()), [tensor], [])
        else:
            self._recorder.samples(tensor.numpy())


def _leave_out_xla() -> None:
    """Make functions that XLA would compile graphs of TensorFlow: XLA cannot call back into Python."""
    function = type(tf.function(lambda: None))
    make = function.__init__

    @functools.wraps(make)
    def made(own: Any, *args: Any, **kwargs: Any) -> None:
        make(own, *args, **{**kwargs, "jit_compile": None})

    function.__init__ = made


def _names(variables: Sequence[Any]) -> list[str]:
    """A name for each variable, the same in each process: its layers' names may count up over a process."""
    names: list[str] = []
    for variable in variables:
        title = str(getattr(variable, "path", None) or getattr(variable, "name", "variable"))
        names.append(title if title not in names else f"{title} ({len(names)})")
    return names


def _kept(kind: str, name: str, array: NDArray[Any]) -> Kept:
    norm, values = projection(array.reshape(-1), lambda part: part)
    return Kept(kind=kind, name=name, shape=array.shape, dtype=str(array.dtype), norm=norm, values=values)


def watch(recorder: Recorder) -> None:
    """Record what Keras trains, if it runs on TensorFlow."""
    if keras.backend.backend() == "tensorflow":
        KerasSteps(recorder).watch()
