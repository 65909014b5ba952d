"""A request for a training: what was given of its options, and its plan while the hosts are not known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.families import Framework
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.run.plan import Container, HostOptions, Script, Start, Stop
from hpctrain.common.run.request import TrainingRequest, unplaced_plan

SCRIPT = TrainingRequest(work=Script(path=Path("train.py")), ranks=2)
RECIPE = replace(SCRIPT, work=load_recipe("digits"))


def test_changes_are_the_options_that_were_given_even_with_the_default_value() -> None:
    assert SCRIPT.changes == {"host_options": {}, "start": {}, "stop": {}}
    asked = replace(SCRIPT, start=Start(launcher="auto"), stop=Stop(restarts=2), host_options=HostOptions(nodes=3))
    assert asked.changes == {
        "host_options": {"nodes": 3},
        "start": {"launcher": "auto"},
        "stop": {"restarts": 2},
    }


def test_the_plan_keeps_what_was_asked_for() -> None:
    asked = replace(SCRIPT, start=Start(python="python3"), stop=Stop(seconds=5), host_options=HostOptions(nodes=3))
    plan = unplaced_plan(asked, frozenset({"torch"}))
    assert (plan.start, plan.stop, plan.host_options) == (asked.start, asked.stop, asked.host_options)
    assert (plan.ranks, plan.backend, plan.asked_backend, plan.hosts) == (2, "auto", "auto", ())
    assert unplaced_plan(replace(asked, backend="gloo"), frozenset({"torch"})).asked_backend == "gloo"


def test_a_framework_is_the_installed_one_and_in_a_container_any() -> None:
    none = frozenset[Framework]()
    assert unplaced_plan(RECIPE, frozenset({"keras"})).framework == "keras"
    with pytest.raises(HpctrainError):
        unplaced_plan(RECIPE, none)
    inside = replace(RECIPE, start=Start(container=Container(runtime="apptainer", image="docker://a")))
    assert unplaced_plan(inside, none).framework == "torch"


@pytest.mark.parametrize("impossible", [{"ranks": 0}, {"backend": "nothing"}, {"framework": "torch"}])
def test_what_no_hosts_make_possible(impossible: dict[str, object]) -> None:
    with pytest.raises(HpctrainError):
        unplaced_plan(replace(SCRIPT, **impossible), frozenset({"torch"}))  # type: ignore[arg-type]
