"""Expects errors of hpctrain by their codes and values, so that a sentence can be worded better in one place."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from hpctrain.common.errors import HpctrainError

_CODE = re.compile(r"\[(HT-[a-z0-9-]+)\]")


@contextlib.contextmanager
def refused(code: str, /, *words: str, **values: object) -> Iterator[pytest.ExceptionInfo[HpctrainError]]:
    """Expect an error of this code with at least these words and values; it may be one of several faults of a file."""
    with pytest.raises(HpctrainError) as caught:
        yield caught
    check(caught.value, code, **values)
    assert [word for word in words if word not in caught.value.message] == [], caught.value.message


@contextlib.contextmanager
def invalid(kind: str) -> Iterator[pytest.ExceptionInfo[ValidationError]]:
    """Expect that a model refuses a value: the code of a validator's error, or pydantic's own type of error."""
    with pytest.raises(ValidationError) as caught:
        yield caught
    faults = caught.value.errors()
    found = [getattr(each.get("ctx", {}).get("error"), "code", each["type"]) for each in faults]
    assert kind in found, str(caught.value)


def check(error: HpctrainError | Mapping[str, Any], code: str, /, **values: object) -> None:
    """Check the code of an error, or of its record, and some of its values as JSON has them."""
    record = error.record() if isinstance(error, HpctrainError) else error
    found = [record, *record["values"].get("faults", ())]
    assert code in [each["code"] for each in found], record
    wanted = HpctrainError(code, "", **values).record()["values"]
    alike = [{name: each["values"].get(name) for name in wanted} for each in found if each["code"] == code]
    assert wanted in alike, record


def codes(text: str) -> list[str]:
    """The codes that a printed text has, in their order."""
    return _CODE.findall(text)
