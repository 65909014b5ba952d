"""A curve has one name, wherever it is shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.run.events.kinds import LogEvent, StartEvent, StepEvent
from hpctrain.report.tracking.curves import Curves, curve_name
from support import needs


@pytest.mark.long
@needs.mlflow
@given(st.text(max_size=400) | st.text("./ab@:é", max_size=300))
def test_mlflow_takes_every_name(name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    _validate_metric_name(curve_name(name))


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("step/loss", "step/loss"),
        ("top-5 accuracy: all", "top-5 accuracy: all"),
        ("acc@5", "acc_5"),
        ("verlust/größe", "verlust/gr__e"),
        ("/loss", "_/loss"),
        ("a//b/../c", "a/_/b/_/c"),
        ("..a/..b", "__a/..b"),
        ("", "_"),
    ],
)
def test_a_name(name: str, shown: str) -> None:
    assert curve_name(name) == shown


def test_what_was_not_measured_has_no_value() -> None:
    step = StepEvent(
        epoch=1,
        iteration=3,
        loss=float("nan"),
        learning_rate=None,
        samples=None,
        seconds=0.0,
        communication_seconds=0.0,
    )
    point = Curves().point(step)
    assert point is not None
    assert point.values == {"step/seconds": 0.0}
    assert Curves().point(LogEvent(iteration=1, values={"loss": float("inf")})) is None
    assert Curves().point(StartEvent(attempt=1, iteration=0)) is None
