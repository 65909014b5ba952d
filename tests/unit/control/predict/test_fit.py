from __future__ import annotations

import numpy as np
import pytest
from constant_fit import fit

from hpctrain.control.predict.values import Constant


def constant(value, spread):
    return Constant(value=value, unit="", spread=spread, kind="assumed", source="a test")


def test_one_constant_is_between_what_is_measured_and_what_was_assumed():
    # Conjugate normal distributions: precisions add.
    constants = {"rate": constant(2.0, 0.3)}
    found = fit(lambda values: [values["rate"]], np.array([3.0]), np.array([0.1]), constants, ["rate"])
    weight = 0.1**-2 / (0.1**-2 + 0.3**-2)
    assert found.mean[0] == pytest.approx(weight * np.log(1.5), rel=1e-4)
    assert found.covariance[0, 0] == pytest.approx(1 / (0.1**-2 + 0.3**-2), rel=1e-4)
    assert found.residual[0] == pytest.approx((1 - weight) * np.log(1.5), rel=1e-3)


def test_a_line_through_exact_points_is_found():
    constants = {"a": constant(1.0, 2.0), "c": constant(1.0, 2.0)}
    batches = np.array([1.0, 4.0, 16.0])
    found = fit(
        lambda values: [values["a"] + values["c"] * batch for batch in batches],
        5 + 0.5 * batches,
        np.full(3, 1e-4),
        constants,
        ["a", "c"],
    )
    assert np.exp(found.mean) == pytest.approx([5, 0.5], rel=1e-3)


def test_draws_have_the_covariance_that_is_left():
    constants = {"a": constant(1.0, 0.5), "b": constant(1.0, 0.5)}
    found = fit(lambda values: [values["a"] * values["b"]], np.array([1.0]), np.array([0.01]), constants, ["a", "b"])
    drawn = found.columns(20_000)
    logs = np.stack([drawn["a"], drawn["b"]])
    assert logs[:, 0] == pytest.approx([0, 0], abs=1e-6)
    # Their product is known, each of them is not.
    assert logs.sum(axis=0)[1:].std() == pytest.approx(0.01, rel=0.05)
    assert logs[0, 1:].std() == pytest.approx(0.5 / 2**0.5, rel=0.05)
