"""What each rank of a program does one after the other, by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hpctrain as ht
from hpctrain.common.errors import HpctrainError
from hpctrain.worker.comm.base import Communicator


class Named(dict[str, Callable[..., Any]]):
    """Functions by their names; as a decorator it takes in one more."""

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self[function.__name__] = function
        return function


def refusal(action: Callable[[], object]) -> dict[str, Any] | None:
    """The record of the error of ``action``, None without one."""
    try:
        action()
    except HpctrainError as error:
        return error.record()
    return None


def refused(action: Callable[[], object], code: str, /, **values: object) -> dict[str, Any]:
    """The record of the error of ``action``, which has this code and at least these values."""
    found = refusal(action)
    assert found is not None, f"nothing was refused; wanted {code}"
    assert found["code"] == code and values.items() <= found["values"].items(), found
    return found


def run(situations: Mapping[str, Callable[..., Any]], begin: Callable[[Communicator], None]) -> None:
    """``python PROGRAM BACKEND OUT [NAME …]`` writes OUT-RANK.json: what each returned, or the record of its refusal.

    Args:
        situations: get the communicator.
        begin: gets it before each of them.
    """
    backend, out, *names = sys.argv[1:]
    comm = ht.init(backend)
    found = {}
    for name in names or situations:
        begin(comm)
        print(name, file=sys.stderr)
        try:
            found[name] = situations[name](comm)
        except HpctrainError as error:
            found[name] = error.record()
    Path(f"{out}-{comm.rank}.json").write_text(json.dumps(found))
    ht.shutdown()
