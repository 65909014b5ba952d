"""Ends a pipeline's step that hangs with an error that names the rank, stage and action at fault.

Each rank notes the actions of its schedule in memory. A thread beside it announces an action that lasts in the store in
which the ranks met, and withdraws it later. At the limit a rank follows the announcements from stage to stage, to one
that computes or has announced nothing: its process is stopped.

Gloo's groups and hpctrain's own keep the limit in the waiting call. NCCL's calls return at once, and it is the GPU that
waits: there the thread asks CUDA which action the GPU has reached, and ends a rank that no error has ended.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.stopping import RESUMABLE
from hpctrain.common.settings import TIMEOUT, TIMEOUT_HINT
from hpctrain.worker.comm import Communicator
from hpctrain.worker.comm.stall_reports import reports
from hpctrain.worker.comm.timeout import is_late

# A shorter action costs no message.
_ANNOUNCE_SECONDS = 1.0
_LOOK_SECONDS = 0.25
# The thread ends a rank so much later than the error of the call itself would have.
_MARGIN_SECONDS = 5.0
# A rank keeps the store, and may be the one that hangs.
_STORE_SECONDS = 2.0
# In place of one stage: an action of all stages together.
EVERY = -1


@dataclass(frozen=True, kw_only=True)
class Action:
    """One action of a schedule.

    Attributes:
        what: for example "forward of micro-batch 3"; empty after the last one.
        peer: the stage that it waits for, or ``EVERY``; None while it computes.
        owed: what that stage does to end the wait.
    """

    stage: int
    what: str
    peer: int | None = None
    owed: str = ""


def receives(stage: int, what: str, peer: int) -> Action:
    """A stage receives ``what``, such as "activations of micro-batch 3", from another one."""
    return Action(
        stage=stage, what=f"receives {what} from stage {peer}", peer=peer, owed=f"sends {what} to stage {stage}"
    )


def sends(stage: int, what: str, peer: int) -> Action:
    """A stage sends ``what`` to another one, and may have to wait until that one takes it."""
    return Action(
        stage=stage, what=f"sends {what} to stage {peer}", peer=peer, owed=f"receives {what} from stage {stage}"
    )


class StepWatch:
    """Watches the steps of one pipeline. Making it is collective.

    Args:
        ranks: the ranks of the run that this pipeline's stages are on, in the order of pp.
        rank_of: gives a stage's rank within pp.
        on_gpu: whether the actions are done when the GPU has done them.

    Attributes:
        over: whether a step hung.
    """

    def __init__(
        self, comm: Communicator, ranks: Sequence[int], rank_of: Callable[[int], int], *, on_gpu: bool
    ) -> None:
        self._comm, self._ranks, self._rank_of, self._on_gpu = comm, ranks, rank_of, on_gpu
        self._hosts: list[str] = comm.allgather_object(comm.host)
        self._limit = TIMEOUT.read()
        # The actions that may not have ended yet, in their order, with what CUDA reports when one has begun.
        self._actions: deque[tuple[Action, torch.cuda.Event | None]] = deque()
        self._since = 0.0
        self._announced: Action | None = None
        self.over = False
        # Both threads take actions that have ended.
        self._taking = threading.Lock()
        ended = threading.Event()
        device = torch.cuda.current_device() if on_gpu else None
        arguments = (weakref.ref(self), ended, device)
        thread = threading.Thread(target=_watch, args=arguments, name="hpctrain-pipeline", daemon=True)
        thread.start()
        # Also at the interpreter's exit, where the thread must not be inside the store.
        weakref.finalize(self, _end, thread, ended)

    def note(self, action: Action) -> None:
        """Note that this rank begins an action, and has ended or started those before it."""
        event = None
        if self._on_gpu:
            event = torch.cuda.Event()
            event.record()
            if not self._actions:
                self._since = time.monotonic()
            self._actions.append((action, event))
        else:
            self._since = time.monotonic()
            self._actions = deque([(action, None)])

    @contextlib.contextmanager
    def step(self, stage: int, what: str = "begins the step with the other stages") -> Iterator[None]:
        """Watch what this rank does together with the other stages, from its first stage on.

        Raises:
            HpctrainError: an action waited for longer than the limit.
        """
        try:
            self.together(stage, what)
            yield
            self.note(Action(stage=stage, what=""))
        except BaseException as error:
            # A script may catch any error and go on, and this rank is then in no action.
            if not (is_late(error) and (late := self._error())):
                self._actions = deque()
                raise
            # What is announced stays, for the others, which fail at nearly the same time.
            self.over = True
            raise late from error

    def together(self, stage: int, what: str) -> None:
        """Note something that all ranks do together."""
        self.note(Action(stage=stage, what=what, peer=EVERY))

    def _error(self) -> HpctrainError | None:
        """The error for the current action; None where the step has ended, or what hangs is not in this pipeline."""
        own = self._current()
        found = own and self._blamed(own)
        if not (own and found):
            return None
        rank, blamed = found
        waited = time.monotonic() - self._since
        return HpctrainError(
            "HT-pipeline-step-hangs",
            "{who} waited {seconds:.0f} s in a step of its pipeline, where stage {waiting_stage} {waiting}; what did "
            "not end is on rank {rank} on {host}, in stage {stage}: {action}",
            f"look in logs/ for what that rank did last; {TIMEOUT_HINT}",
            exit_code=RESUMABLE,
            who=f"rank {self._comm.rank} on {self._comm.host}",
            seconds=waited,
            waiting_stage=own.stage,
            waiting=own.what,
            rank=rank,
            host=self._hosts[rank],
            stage=blamed.stage,
            action=blamed.what,
        )

    def _blamed(self, own: Action) -> tuple[int, Action] | None:
        """The rank that the others wait for, and the action in which it is, or that it owes if it announced none."""
        announced: dict[int, Action] = {}
        reader = threading.Thread(target=self._read_into, args=(announced,), daemon=True)
        reader.start()
        reader.join(_STORE_SECONDS)
        announced[self._comm.rank] = own
        rank, action, seen = self._comm.rank, own, {self._comm.rank}
        while action.peer is not None:
            stage, owed = action.peer, action.owed
            if stage == EVERY:
                owed = action.what
                alike = {rank for rank, each in announced.items() if each.what == owed}
                # The first stage of each rank has the rank's number within pp.
                stage = next((each for each, rank in enumerate(self._ranks) if rank not in alike), EVERY)
                if stage == EVERY:
                    return None
            rank = self._ranks[self._rank_of(stage)]
            if rank not in announced or rank in seen:
                return rank, announced.get(rank, Action(stage=stage, what=owed))
            action = announced[rank]
            seen.add(rank)
        return rank, action

    def _current(self) -> Action | None:
        """The action that this rank is in; None between two steps."""
        with self._taking:
            actions = self._actions
            while len(actions) > 1 and (event := actions[1][1]) is not None and event.query():
                actions.popleft()
                self._since = time.monotonic()
            return actions[0][0] if actions and actions[0][0].what else None

    # In the thread.

    def look(self) -> None:
        """Announce an action that lasts, withdraw one that has ended, and end a rank that waits for too long."""
        action, waited = self._current(), time.monotonic() - self._since
        if self._announced not in (None, action):
            self._announced = None
            _store().set(str(self._comm.rank), "")
        if action is None:
            return
        if self._announced is None and waited > _ANNOUNCE_SECONDS:
            self._announced = action
            _store().set(str(self._comm.rank), json.dumps(asdict(action)))
        if action.peer is not None and waited > self._limit + _MARGIN_SECONDS and (error := self._error()):
            if reports.give_up:
                reports.give_up(error)
            print(f"hpctrain: {error}", file=sys.stderr, flush=True)
            self._comm.abort(error.exit_code)

    def _read_into(self, announced: dict[int, Action]) -> None:
        # The rank that keeps the store may be gone, and so may the group.
        with contextlib.suppress(RuntimeError, ValueError):
            store = _store()
            for rank in self._ranks:
                key = str(rank)
                if rank != self._comm.rank and store.check([key]) and (text := store.get(key)):
                    announced[rank] = Action(**json.loads(text))


def _store() -> Any:
    """Where ranks announce actions. Nobody keeps it: rank 0's port is open as long as a reference to it exists.

    Raises:
        ValueError: the default group was destroyed.
    """
    store = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore("hpctrain.pipeline", store)  # type: ignore[attr-defined]


def _watch(watch: weakref.ref[StepWatch], ended: threading.Event, device: int | None) -> None:
    if device is not None:
        # A new thread's is GPU 0, on which asking for an event would take memory for every rank.
        torch.cuda.set_device(device)
    while dist.is_initialized() and (found := watch()) and not found.over:
        # The rank that keeps the store may be gone; and no error may leave the later steps unwatched.
        with contextlib.suppress(Exception):
            found.look()
        del found
        if ended.wait(_LOOK_SECONDS):
            return


def _end(thread: threading.Thread, ended: threading.Event) -> None:
    ended.set()
    # The thread itself may hold the last reference to what it watches.
    if thread is not threading.current_thread():
        thread.join(_STORE_SECONDS)
