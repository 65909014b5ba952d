"""The environment variables ``HPCTRAIN_…``: what each is for, its default, and how it is read.

No other module names or reads one by itself. ``docs/reference/commands.md`` lists those that are meant for users.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from hpctrain.common.errors import HpctrainError

PREFIX = "HPCTRAIN_"
_Value = TypeVar("_Value")
_LONGEST_SECONDS = 3600
# Eleven days. Timers of Python end in an OverflowError where there is no limit.
_LONGEST_WAIT = 10**6
_WAIT = f"a number of seconds above 0, at most {_LONGEST_WAIT}"
_FLAG = {"1": True, "0": False}


@dataclass(frozen=True, kw_only=True)
class Setting(Generic[_Value]):
    """One environment variable.

    Attributes:
        valid: the values that it takes, as an error and the documentation name them.
        parse: makes the value of a text; None for a text that is not valid.
        default: the value where the variable is not set. Where the default is None, an empty text counts as not set.
        set_by: ``user``; ``hpctrain`` for one that scripts may read; ``internal`` for one that is not documented.
    """

    name: str
    valid: str
    parse: Callable[[str], _Value | None]
    default: _Value
    purpose: str
    set_by: str = "user"

    def read(self, environment: Mapping[str, str] = os.environ) -> _Value:
        """The value in an environment."""
        text = environment.get(self.name)
        if text is None or (text == "" and self.default is None):
            return self.default
        value = self.parse(text)
        if value is None:
            raise HpctrainError(
                "HT-variable-invalid",
                "{name}={value!r} is not {valid}",
                f"unset {self.name}",
                name=self.name,
                value=text,
                valid=self.valid,
            )
        return value


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 < seconds <= _LONGEST_WAIT else None


def _whole(least: int, most: float = math.inf) -> Callable[[str], int | None]:
    def parse(text: str) -> int | None:
        digits = text.isascii() and text.isdigit() and len(text) < 10
        return int(text) if digits and least <= int(text) <= most else None

    return parse


def _internal(name: str, valid: str, purpose: str) -> Setting[str | None]:
    """A text that hpctrain passes to processes of its own."""
    return Setting(name=name, valid=valid, parse=str, default=None, purpose=purpose, set_by="internal")


TIMEOUT = Setting(
    name="HPCTRAIN_TIMEOUT",
    valid=_WAIT,
    parse=_seconds,
    default=600.0,
    purpose="How long a rank waits for the others before it gives up.",
)
STALL = Setting(
    name="HPCTRAIN_STALL",
    valid=_WAIT,
    parse=_seconds,
    default=60.0,
    purpose="How long a rank waits before it names the ranks that it waits for; at most half of `HPCTRAIN_TIMEOUT`.",
)
HOST_TIMEOUT = Setting(
    name="HPCTRAIN_HOST_TIMEOUT",
    valid=f"a whole number of seconds from 5 to {_LONGEST_SECONDS}",
    parse=_whole(5, _LONGEST_SECONDS),
    default=45,
    purpose="How long a host may be silent before it is lost.",
)
PARAMETER_SERVERS = Setting(
    name="HPCTRAIN_PARAMETER_SERVERS",
    valid="a number of ranks above 0",
    parse=_whole(1),
    default=1,
    purpose="How many ranks of the backend `parameter_server` keep the parameters.",
)
BACKEND = Setting(
    name="HPCTRAIN_BACKEND",
    valid="a value of `--backend`",
    parse=str,
    default="auto",
    purpose="The backend of `ht.init()` where mpirun, srun or torchrun start a script; `hpctrain run` sets it itself.",
)
BACKEND_REASON = _internal(
    "HPCTRAIN_BACKEND_REASON", "a text", "Why the planner chose the backend, which rank 0 prints."
)
MESH = Setting[str | None](
    name="HPCTRAIN_MESH",
    valid="a value of `--mesh`",
    parse=str,
    default=None,
    purpose="The mesh of the run's ranks; unset where all of them only replicate.",
    set_by="hpctrain",
)
SHARE_GPUS = Setting[bool | None](
    name="HPCTRAIN_SHARE_GPUS",
    valid="1 or 0",
    parse=_FLAG.get,
    default=None,
    purpose="Whether ranks of one host share its GPUs over NCCL, to try things out; `--share-gpus` sets it itself.",
)
RANKS_ALONE = Setting(
    name="HPCTRAIN_RANKS_ALONE",
    valid="1 or 0",
    parse=_FLAG.get,
    default=False,
    purpose="1: each rank of a script is meant to train by itself, or the script joins them in a way of its own, such "
    "as its own sockets, so that the run ends as done.",
)
NOT_FINITE = Setting(
    name="HPCTRAIN_NOT_FINITE",
    valid="1 or 0",
    parse=_FLAG.get,
    default=False,
    purpose="1: a script may end with parameters that are NaN or infinite, and its run as done.",
)
VERIFY = Setting[bool | None](
    name="HPCTRAIN_VERIFY",
    valid="1 or 0",
    parse=_FLAG.get,
    default=None,
    purpose="1 while `hpctrain verify` runs a script for a few steps, which may then leave its own files unwritten.",
    set_by="hpctrain",
)
VERIFY_STEPS = _internal("HPCTRAIN_VERIFY_STEPS", "JSON", "What `hpctrain verify` has the ranks record.")
REPLICAS = Setting[int | None](
    name="HPCTRAIN_REPLICAS",
    valid="a number of replicas above 0",
    parse=_whole(1),
    default=None,
    purpose="How many replicas the process of the backend `mirrored` has; unset: one for each GPU.",
    set_by="internal",
)
POD = _internal("HPCTRAIN_POD", "the name of a run", "The run whose manifest made this pod of Kubernetes.")
POD_CPUS = Setting[int | None](
    name="HPCTRAIN_POD_CPUS",
    valid="a number of processors above 0",
    parse=_whole(1),
    default=None,
    purpose="The processors that a pod's manifest asks for: a limit on their time, which affinity does not show.",
    set_by="internal",
)
JOB = _internal("HPCTRAIN_JOB", "a number", "The job of PBS or Grid Engine whose script started this process.")
COLUMNS = Setting[int | None](
    name="HPCTRAIN_COLUMNS",
    valid="a number of columns above 0",
    parse=_whole(1),
    default=None,
    purpose="The width of the terminal that shows rank 0's output as it comes.",
    set_by="internal",
)
STDIN = _internal("HPCTRAIN_STDIN", "HOST:FILE", "The standard input of hpctrain run, which is rank 0's too.")
# The adapted CMake files of Horovod read the last three: see hpctrain/control/horovod/adapt.py.
FINGERPRINT = _internal("HPCTRAIN_FINGERPRINT", "JSON", "What a Horovod is built for, which the built package records.")
MPI_PREFIX = _internal(
    "HPCTRAIN_MPI_PREFIX", "a folder", "The prefix of an MPI that is a Python package, for a build of Horovod."
)
RPATH = _internal(
    "HPCTRAIN_RPATH", "folders, separated by semicolons", "Where a built Horovod looks for its libraries."
)

# Said wherever a wait reaches its limit.
TIMEOUT_HINT = f"{TIMEOUT.name}=SECONDS sets the limit"


def stall_seconds() -> float:
    """How long a rank waits before it names the ranks that it waits for.

    At most half of the time after which it gives up, so that it can then say for whom it waited.
    """
    return min(STALL.read(), TIMEOUT.read() / 2)
