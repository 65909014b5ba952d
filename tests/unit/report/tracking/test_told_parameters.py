"""What trackers are told of a run, and what nobody is told."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from hpctrain.common.run.plan import Script
from hpctrain.report.tracking.curves import parameters, texts
from hpctrain.report.tracking.mlflow_run import _shown
from hpctrain.report.tracking.sending import _described
from support.report.written_runs import recipe_plan


def test_a_recipes_values_that_take_effect() -> None:
    told = texts(parameters(recipe_plan()))
    assert told["recipe"] == "digits"
    assert told["optimizer.learning_rate"] == "0.025"
    assert told["schedule.name"] == "cosine"
    assert told["versions.torch"] == "2.13.0"
    # Keys of other networks, what says nothing of the training, and what has no value.
    assert not {"model.heads", "images.size", "source", "name", "tracking", "mixing"} & told.keys()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--lr", "0.1"), "--lr 0.1"),
        (("--token", "geheim", "--lr", "1"), "--token … --lr 1"),
        (("--api-key=geheim", "x"), "--api-key=… x"),
        (("--data", "s3://user:geheim@host/x"), "--data s3://…@host/x"),
        (("--password", "--lr", "1"), "--password --lr 1"),
        (("--monkey", "1"), "--monkey 1"),
    ],
)
def test_a_scripts_arguments_without_secrets(arguments: tuple[str, ...], told: str) -> None:
    plan = recipe_plan(recipe=None, script=Script(path=Path("train.py"), arguments=arguments), framework=None)
    found = parameters(plan)
    assert found["script"] == "train.py"
    assert found["arguments"].replace("'", "") == told


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("http://host:5000", "http://host:5000"),
        ("https://user:geheim@host/path?token=geheim", "https://host"),
        ("https://geheim@host:5000/#geheim", "https://host:5000"),
        ("sqlite:///a.db?key=geheim", ""),
        ("mssql+pyodbc:///?odbc_connect=geheim", ""),
    ],
)
def test_what_is_shown_of_an_address(address: str, shown: str) -> None:
    assert _shown(address) == shown


def test_no_message_quotes_a_library() -> None:
    assert _described(RuntimeError("no answer from http://anna:geheim@host")) == "RuntimeError"
    assert _described(OSError(errno.ENOSPC, "No space left on device")) == "No space left on device"
