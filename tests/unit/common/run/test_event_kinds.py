"""Every kind of event: what its lines look like, that what is written is read, and that nothing else is."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.printable import json_text
from hpctrain.common.run.events import Event, EventWriter, line_of, parse_event, read_events
from hpctrain.common.run.events.kinds import (
    BaseEvent,
    ChangedEvent,
    EnergyEvent,
    EpochEvent,
    FaultEvent,
    HostEnergy,
    KnownEvent,
)
from support.refusals import refused

# The strategies know nothing of pydantic's strictness, which narrows no value that they make.
pytestmark = pytest.mark.filterwarnings("ignore:Ignoring unsupported")


KINDS: list[type[BaseEvent]] = sorted(get_args(KnownEvent), key=lambda kind: kind.__name__)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=5,
)


def values_of(kind: type[BaseModel], name: str) -> st.SearchStrategy[Any]:
    if (kind, name) == (EnergyEvent, "hosts"):
        own = {each: values_of(HostEnergy, each) for each in HostEnergy.model_fields}
        return st.dictionaries(st.text(), st.builds(HostEnergy, **own), max_size=3)
    if (kind, name) == (ChangedEvent, "differences"):
        return st.dictionaries(st.text(), st.tuples(JSON, JSON), max_size=3)
    return st.from_type(get_type_hints(kind, include_extras=True)[name])


@st.composite
def an_event(draw: st.DrawFn) -> Event:
    """Any event that can be: with all keys that its kind must have and some of the others."""
    kind = draw(st.sampled_from(KINDS))
    optional = [name for name, field in kind.model_fields.items() if not field.is_required() and name != "event"]
    given = set(draw(st.lists(st.sampled_from(optional), unique=True)))
    required = {name for name, field in kind.model_fields.items() if field.is_required()}
    values = {name: draw(values_of(kind, name)) for name in sorted(given | required)}
    if kind is EpochEvent:
        others = st.text().filter(lambda name: name not in EpochEvent.model_fields)
        values |= draw(st.dictionaries(others, st.floats() | st.none(), max_size=2))
    try:
        return kind(**values)
    except ValidationError as error:
        # The strategies do not know that some numbers must be finite.
        assume(any(each["type"] != "finite_number" for each in error.errors()))
        raise


@pytest.mark.slow
@given(event=an_event())
def test_what_is_written_is_read(event: Event) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        with EventWriter(path) as writer:
            writer.emit(event)
        assert list(read_events(path)) == [event]
        # Also which keys are there, and not only their values.
        assert line_of(next(read_events(path))) == path.read_bytes()


@given(event=an_event(), data=st.data())
def test_a_line_with_another_value_is_an_event_or_names_the_key(event: Event, data: st.DataObject) -> None:
    # Written as null where they are no finite numbers.
    record = json.loads(json_text(event.record()))
    key = data.draw(st.sampled_from(sorted(record.keys() - {"event"})))
    if data.draw(st.booleans()):
        record[key] = data.draw(JSON)
    else:
        del record[key]
    try:
        read = parse_event(json.dumps(record).encode(), "events.jsonl:7")
    except HpctrainError as error:
        name = key if key.isprintable() else repr(key)
        assert error.values["where"] == "events.jsonl:7" and name in error.message
    else:
        assert parse_event(line_of(read), "again") == read


@pytest.mark.parametrize(
    ("line", "keys"),
    [
        (
            '{"time": 1, "event": "changed", "differences": {"fatal fault": [1]}}',
            ["differences.fatal fault.1"],
        ),
        (
            '{"time": 1, "event": "log", "iteration": 1, "values": {"recovered fault": "x"}}',
            ["values.recovered fault"],
        ),
        (
            '{"time": 1, "event": "fault", "recovery_seconds": "x", "rank": null, "host": null, "message": 7}',
            ["iteration", "message", "ranks", "recovery_seconds", "samples_affected"],
        ),
        (
            '{"time": 1, "event": "fault", "iteration": 3, "samples_affected": 8, "ranks": 3, "rank": 1, "host": "n1", '
            '"message": "died"}',
            ["recovery_seconds"],
        ),
        ('{"time": "x", "event": "later"}', ["time"]),
    ],
)
def test_all_that_is_wrong_is_named_with_its_place_in_the_event(line: str, keys: list[str]) -> None:
    with refused("HT-event-invalid", where="events.jsonl:7") as caught:
        parse_event(line.encode(), "events.jsonl:7")
    assert sorted(caught.value.values["keys"]) == keys
    assert all(key in caught.value.values["problem"] for key in keys)


# One of each kind, as its writer leaves it: programs and users read these.
LINES = [
    '{"time": 1767225600.5, "event": "start", "attempt": 2, "iteration": 46, "restart": 1, "job": "812", '
    '"launcher": "mpirun", "hosts": ["n1", "n2"], "host": "login1", "pid": 4711}',
    '{"time": 1767225599.0, "event": "damaged", "path": "step-00000069", "fault": "rank-1-of-2 is cut short", '
    '"kept_as": "damaged-step-00000069"}',
    '{"time": 1767225599.5, "event": "changed", "differences": {"epochs": [20, 30], "data.path": [null, "/shards"]}}',
    '{"time": 1767225601.0, "event": "run", "recipe": "digits", "framework": "torch", "backend": "mpi", "ranks": 2, '
    '"hosts": ["n1", "n2"], "epochs": 20, "iterations_per_epoch": 23, "parameters": 12345, "bucket_mb": 25.0}',
    '{"time": 1767225601.0, "event": "run", "recipe": null, "framework": "keras", "backend": "gloo", "ranks": 1, '
    '"epochs": null, "iterations_per_epoch": null, "parameters": 7}',
    '{"time": 1767225602.0, "event": "step", "iteration": 47, "epoch": 3, "loss": 0.25, "learning_rate": 0.1, '
    '"samples": 64, "first": 0, "order": 3735928559, "seconds": 0.5, "communication_seconds": 0.125, '
    '"data_seconds": 0.0}',
    '{"time": 1767225602.0, "event": "step", "iteration": 1, "epoch": null, "loss": null, "learning_rate": 0.1, '
    '"samples": null, "seconds": 0.5, "communication_seconds": null}',
    '{"time": 1767225603.0, "event": "log", "iteration": 500, "values": {"loss": 0.5, "test/accuracy": null}}',
    '{"time": 1767225604.0, "event": "non_finite", "iteration": 48, "epoch": 3, "rule": "skip", "ranks": [1]}',
    '{"time": 1767225606.0, "event": "epoch", "epoch": 3, "seconds": 11.5, "samples_per_s": 128.0, "train_loss": 0.5, '
    '"test_loss": null, "test_accuracy": 0.875, "test_top5": 1.0}',
    '{"time": 1767225607.0, "event": "checkpoint", "iteration": 69, "epoch": 3, "seconds": 1.5, '
    '"blocked_seconds": 0.25, "bytes": 1048576, "path": "step-00000069"}',
    '{"time": 1767225607.0, "event": "checkpoint", "iteration": 70, "seconds": 1.5, "blocked_seconds": 0.5, '
    '"interval_seconds": 60.0, "mtbf_seconds": 3600.0}',
    '{"time": 1767225607.5, "event": "energy", "iteration": 69, "hosts": {"n1": {"began": 1767225600.0, '
    '"seconds": 7.5, "joules": {"gpu": 5250.0, "cpu": 900.5}, "missing": ["no right to read the DRAM\'s"]}}}',
    '{"time": 1767225608.0, "event": "stopped", "iteration": 70, "reason": "SIGUSR2"}',
    '{"time": 1767225608.0, "event": "continued", "iteration": 70}',
    '{"time": 1767225609.0, "event": "stall", "rank": 3, "host": "n2", "iteration": 71, "waiting_for": "a reduction", '
    '"seconds": 61.5, "state": "stopped"}',
    '{"time": 1767225609.5, "event": "slow_rank", "iteration": 71, "rank": 3, "host": "n2", "cause": "samples", '
    '"seconds": 0.4, "usual": 0.1}',
    '{"time": 1767225610.0, "event": "fault", "rank": null, "host": "n2", "message": "host n2 was lost"}',
    '{"time": 1767225610.0, "event": "fault", "rank": 3, "host": "n2", "message": "rank 3 on n2 died", '
    '"iteration": 71, "recovery_seconds": 0.5, "samples_affected": 8, "ranks": 3}',
    '{"time": 1767225610.5, "event": "excluded", "host": "n2", "message": "host n2 was lost"}',
    '{"time": 1767225611.0, "event": "end", "status": "done", "seconds": 240.5}',
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: json.loads(line)["event"])
def test_the_form_of_each_kind(line: str) -> None:
    assert line_of(parse_event(line.encode(), "line")).decode() == line + "\n"


def test_each_kind_has_its_form_above() -> None:
    assert {type(parse_event(line.encode(), "line")) for line in LINES} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_kind_is_explained(kind: type[BaseEvent]) -> None:
    assert kind.__doc__ and kind.__doc__ != BaseEvent.__doc__
    assert [name for name, field in kind.model_fields.items() if name != "event" and not field.description] == []


def test_text_of_programs_may_be_no_unicode() -> None:
    """Names of files come from the operating system as they are, with lone surrogates in Python."""
    line = line_of(FaultEvent(rank=None, host=None, message="cannot read sh\udce4rds"))
    event = parse_event(line, "line")
    assert isinstance(event, FaultEvent) and event.message == "cannot read sh\\udce4rds"
    # Strict readers of JSON refuse the escape of a lone surrogate.
    assert from_json(line)["message"] == event.message
