"""What a script does with Keras, it does while its steps are recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.common.run.directory import RunDirectory
from hpctrain.worker.verify.recorder import Recorder

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")


@pytest.fixture(autouse=True)
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpctrain.worker.verify.keras_steps import watch

    # What is replaced is put back, and no signal gets another handler.
    monkeypatch.setattr("signal.signal", lambda *_: None)
    trainer = next(each for each in keras.Model.__mro__ if "compile" in vars(each))
    optimizer = keras.src.optimizers.base_optimizer.BaseOptimizer
    changed = ((type(tf.function(lambda: None)), "__init__"), (trainer, "compile"), (keras.Layer, "__call__"))
    for owner, name in (*changed, (optimizer, "apply")):
        monkeypatch.setattr(owner, name, vars(owner)[name])
    settings = {"steps": 5, "perturb": None}
    watch(Recorder(RunDirectory(tmp_path), 0, 1, settings))


def test_a_function_for_xla_may_call_python() -> None:
    twice = tf.function(lambda x: tf.py_function(lambda y: 2 * y, [x], tf.float32), jit_compile=True)
    assert float(twice(tf.constant(2.0))) == 4


def test_a_saved_model_is_loaded_with_its_optimizer(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    model.save(tmp_path / "saved.keras")
    loaded = keras.models.load_model(tmp_path / "saved.keras", safe_mode=True)
    assert isinstance(loaded.optimizer, keras.optimizers.Adam)
