from __future__ import annotations

import pytest


def test_a_function_for_xla_may_call_python(monkeypatch: pytest.MonkeyPatch) -> None:
    tf = pytest.importorskip("tensorflow")
    from hpctrain.worker.verify.keras_steps import leave_out_xla

    function = type(tf.function(lambda: None))
    monkeypatch.setattr(function, "__init__", function.__init__)
    leave_out_xla()
    twice = tf.function(lambda x: tf.py_function(lambda y: 2 * y, [x], tf.float32), jit_compile=True)
    assert float(twice(tf.constant(2.0))) == 4
