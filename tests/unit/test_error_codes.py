"""The codes of errors: well formed, with the values that their sentences need, and remedies for their page."""

from __future__ import annotations

import ast
import copy
import json
import pickle
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from error_codes import hint, kinds

from hpctrain.common.checkpoints.manifest import OtherVersionError
from hpctrain.common.errors import HpctrainError, InvalidValueError, TransientError, joined
from hpctrain.worker.comm.base import RanksLostError
from support.refusals import codes

ROOT = Path(__file__).parents[2]

KINDS = kinds()
TREES = [ast.parse(path.read_text()) for path in (ROOT / "hpctrain").rglob("*.py")]
ROOTS = ("HpctrainError", "InvalidValueError")


def test_codes_are_lower_case_words_joined_by_hyphens():
    assert [kind for kind in KINDS if not re.fullmatch(r"HT(-[a-z0-9]+){2,8}", kind.code)] == []


def test_a_call_gives_the_values_that_its_sentence_needs():
    known = [kind for kind in KINDS if kind.sentence and kind.values is not None]
    # A value may be there for programs alone.
    assert [kind for kind in known if not kind.fields <= kind.values] == []
    assert [kind for kind in known if not all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in kind.fields)] == []


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("'choose --backend mpi'", "choose --backend mpi"),
        ("f'-np {len(self.hosts)} or {more + 1}, {AGAIN}'", "-np {hosts} or …, measure again"),
        ("AGAIN", "measure again"),
        ("nearest(name, names)", "valid: {choices}"),
        ("hint", ""),
        ("number", ""),
    ],
)
def test_a_remedy_is_shown_as_far_as_the_source_has_it(source, shown):
    constants = {"AGAIN": ast.Constant("measure again"), "number": ast.Constant(1)}
    assert hint(ast.parse(source, mode="eval").body, constants) == shown


def family() -> dict[str, ast.ClassDef]:
    """The classes of such errors, by name."""
    found = [each for tree in TREES for each in ast.walk(tree) if isinstance(each, ast.ClassDef)]
    names = set(ROOTS)
    while more := {each.name for each in found if {ast.unparse(base) for base in each.bases} & names} - names:
        names |= more
    return {each.name: each for each in found if each.name in names}


def test_each_error_is_made_with_a_code():
    classes = family()
    # One with a constructor of its own gives its code there.
    own = [
        each
        for name, each in classes.items()
        if name not in ROOTS and any(getattr(part, "name", "") == "__init__" for part in each.body)
    ]
    plain = set(classes) - {each.name for each in own}
    made = [*calls(TREES, plain), *calls(own, {"super().__init__"})]
    first = [ast.unparse(each.args[0]) for each in made]
    assert [each for each in first if not (each.startswith("'HT-") or each.endswith("code"))] == []
    assert len(own) > 1 and len(first) > 400


def calls(trees: Iterable[ast.AST], functions: set[str]) -> list[ast.Call]:
    found = [each for tree in trees for each in ast.walk(tree) if isinstance(each, ast.Call)]
    return [each for each in found if ast.unparse(each.func) in functions]


def error() -> TransientError:
    return TransientError(
        "HT-of-test", "{path}: {size:g} bytes of {{}}", "a hint", exit_code=1, path=Path("/a"), size=2.0
    )


def pickled(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_is_the_same(copied):
    made = copied(error())
    assert (type(made), str(made), made.record()) == (TransientError, str(error()), error().record())


@pytest.mark.parametrize("kind", [OtherVersionError, RanksLostError])
def test_one_with_its_own_constructor_is_pickled_too(kind):
    made = kind.from_record(error().record())
    assert (type(pickled(made)), pickled(made).record()) == (kind, error().record())


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_a_refused_value_is_copied_whole(copied):
    made = InvalidValueError("HT-of-test", "{size} bytes", size=2)
    again = copied(made)
    assert (type(again), str(again), again.at(line=3).record()) == (type(made), str(made), made.at(line=3).record())


def test_the_code_stands_apart_from_further_lines_and_from_commands():
    several = joined([HpctrainError("HT-of-test", "a"), HpctrainError("HT-of-other", "run: hpctrain doctor")], "")
    assert [*map(codes, str(several).splitlines())] == [["HT-file-faults"], []]
    assert str(several).endswith("run: hpctrain doctor")


def test_one_from_its_record_is_the_same():
    made = HpctrainError.from_record(json.loads(json.dumps(error().record())))
    assert (str(made), made.record()) == (str(error()), error().record())


def test_the_sentence_is_made_from_the_values():
    sentence = "error[HT-of-test]: /a: 2 bytes of {}"
    assert str(error()) == f"{sentence}\n  a hint"
    assert error().record()["values"] == {"path": "/a", "size": 2.0}


def test_another_hint_leaves_the_rest():
    other = error().but(before="on node1: ", hint="", exit_code=2)
    sentence = "error[HT-of-test]: on node1: /a: 2 bytes of {}"
    assert str(other) == sentence
    assert (other.exit_code, other.values, error().exit_code) == (2, error().values, 1)


def test_what_json_cannot_have_is_text_in_the_record():
    made = HpctrainError("HT-of-test", "{rate}", rate=float("nan"), paths=(Path("/a"), float("inf")), rank=np.int64(1))
    assert json.loads(json.dumps(made.record()))["values"] == {"rate": "NaN", "paths": ["/a", "Infinity"], "rank": 1}


def test_a_fault_that_several_have_is_told_once():
    key, value = (HpctrainError(f"HT-of-{name}", "a.yaml: {name}", name=name) for name in ("key", "value"))
    made = joined([key, joined([key, value], "", more=2)], "a hint")
    assert made.message.splitlines() == ["a.yaml: key", "a.yaml: value", "and 2 more faults"]
    assert [each["code"] for each in made.values["faults"]] == ["HT-of-key", "HT-of-value"]
    assert joined([key], "a hint").code == "HT-of-key"


def test_what_python_shows_of_an_error_is_its_text():
    copied = copy.copy(error())
    assert repr(copied) == repr(error()) == f"TransientError({str(error())!r})"
