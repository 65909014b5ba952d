"""Runs one rank: redirects its output, keeps its record, does its work, and reports its end.

Each rank keeps its own log and record, so that nothing depends on how a launcher treats output and exit statuses.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import functools
import io
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import psutil

from hpctrain.common.cluster.launcher import SRUN_NONE, detect
from hpctrain.common.cluster.machine import host_memory
from hpctrain.common.errors import HpctrainError
from hpctrain.common.extras import missing_extra
from hpctrain.common.files.disk import disk_error
from hpctrain.common.files.regular import private
from hpctrain.common.run import stopping
from hpctrain.common.run.directory import RunDirectory, port_of, read_model
from hpctrain.common.run.events import EventWriter
from hpctrain.common.run.events.kinds import SlowRankEvent, StallEvent
from hpctrain.common.run.plan import Plan, Script
from hpctrain.common.run.records import RankRecord, hold, is_own_record, write_record
from hpctrain.common.settings import COLUMNS, STDIN
from hpctrain.common.stderr import tell
from hpctrain.worker import comm
from hpctrain.worker.adapters import recording
from hpctrain.worker.adapters.script_libraries import (
    join_without_mpi,
    keep_loader_workers,
    save_whole_files,
    serve_tensorflow_scripts,
    serve_torchrun_scripts,
)
from hpctrain.worker.comm import forks
from hpctrain.worker.comm.graph_errors import original_error
from hpctrain.worker.comm.rank_run import end_job
from hpctrain.worker.comm.stalls import reports
from hpctrain.worker.train import program_end
from hpctrain.worker.train.place import bind_rank
from hpctrain.worker.train.program_end import (
    Ending,
    describe,
    exit_status,
    finish,
    limited,
    record_fields,
    show,
    was_interrupted,
)
from hpctrain.worker.train.script_variables import keep_dumps, set_variables
from hpctrain.worker.verify.recorder import record_steps

_ENDED_AFTER_STOP = (
    "hpctrain: ht.should_stop() returned True, and the script ended with status 0, so the run counts as done; "
    "end it with sys.exit(ht.RESUMABLE) so that it can be resumed"
)


def run_rank(path: Path) -> int:
    """Do this rank's part of the run in ``path`` and keep ``ranks/rank-N.json``.

    Returns:
        0, or the exit status of a run of one rank that failed. If a run of several ranks fails, this ends the whole job
        and does not return. Only its record says that a rank was stopped in good order, since launchers take any other
        exit status than 0 for a failure and end ranks that still write their records.
    """
    launcher = detect()
    rank = launcher.rank if launcher else 0
    # A script may change its working directory.
    directory = RunDirectory(path.absolute())
    # For as long as this process lives.
    hold(directory)
    stopping.this_process.watch(directory.stop)
    forks.watch()
    terminal, log_begin = _redirect_output(directory.log(rank))
    _take_input(rank)
    faulthandler.enable()
    if rank == 0 and (columns := COLUMNS.read()):
        # The launcher passes this log on to a terminal as it grows, so that progress bars can draw over themselves.
        for name, value in {"COLUMNS": str(columns), "TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1"}.items():
            os.environ.setdefault(name, value)
    record = RankRecord(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        started=psutil.Process().create_time(),
        status="running",
        listens=stopping.this_process.listens(),
        log_begin=log_begin,
        memory=host_memory(),
    )
    write_record(directory, record)
    stopping.this_process.announce(lambda: _update(directory, record, listens=True))
    _report_stalls(directory, record)

    def conclude(ending: Ending | None) -> int:
        program_end.end()
        try:
            _update(directory, record, **record_fields(ending))
        except HpctrainError as error:
            # On a full disk only the launcher's stream is left.
            text = f"rank {rank} on {record.host}: {(ending.error if ending else error).message}; {error}\n"
            os.write(terminal, text.encode(errors="backslashreplace"))
            if ending is None or ending.resumable:
                ending = describe(error)
        if ending is None or ending.resumable:
            return 0
        if launcher and launcher.size > 1:
            with limited(functools.partial(end_job, ending.exit_code)):
                finish()
            end_job(ending.exit_code)
        return ending.exit_code

    return conclude(_attempt(directory, rank, lambda: _update(directory, record, joined=True), conclude))


def _update(directory: RunDirectory, record: RankRecord, **update: Any) -> None:
    """Change this rank's record, also on disk unless the file belongs to another attempt by now.

    Raises:
        HpctrainError: the disk is full.
    """
    for name, value in update.items():
        setattr(record, name, value)
    if is_own_record(directory, record.rank):
        write_record(directory, record)


def _redirect_output(log: Path) -> tuple[int, int]:
    """Send stdout and stderr to ``log``, including the output of C++ libraries.

    Returns:
        A copy of the old stderr, and the length of the log so far in bytes.
    """
    terminal = os.dup(2)
    try:
        file = private(str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        raise disk_error(error, log) from error
    os.dup2(file, 1)
    os.dup2(file, 2)
    length = os.fstat(file).st_size
    os.close(file)
    return terminal, length


def _take_input(rank: int) -> None:
    """Read what ``hpctrain run`` was given to read, in rank 0 on its host; elsewhere there is nothing to read.

    mpirun would pass on the text, and some of its versions not the end of it, for which a script then waits for ever.
    """
    host, _, path = (STDIN.read() or "").partition(":")
    try:
        if rank > 0 or host != socket.gethostname():
            raise OSError
        file = os.open(path, os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        file = os.open(os.devnull, os.O_RDONLY)
    os.dup2(file, 0)
    os.close(file)


def _report_stalls(directory: RunDirectory, record: RankRecord) -> None:
    """Record reports of stalled ranks as events; when the last time limit is over, record the error and end the job."""

    def note(event: StallEvent | SlowRankEvent) -> None:
        if not is_own_record(directory, record.rank):
            return
        # Opened here, because rank 0, which holds the file open, may itself have stalled.
        with EventWriter(directory.events, alone=False) as events:
            events.emit(event)

    def give_up(error: HpctrainError) -> None:
        with contextlib.suppress(OSError, ValueError):
            tell(f"hpctrain: {error}")
        with contextlib.suppress(HpctrainError):
            _update(directory, record, **record_fields(describe(error)))
        end_job(error.exit_code)

    reports.record, reports.slow, reports.give_up = note, note, give_up


def _attempt(
    directory: RunDirectory, rank: int, joined: Callable[[], None], conclude: Callable[[Ending | None], int]
) -> Ending | None:
    """Do the work; an error is printed to the log and returned.

    Args:
        joined: is called when all ranks have met.
        conclude: is called where a script ends this process by itself, and returns its exit status.
    """
    script = None
    try:
        plan = read_model(directory.plan, Plan)
        bind_rank(plan, rank)
        record_steps(plan, directory, rank)
        if plan.start.launcher == SRUN_NONE and plan.needs_launcher:
            join_without_mpi(plan, rank, port_of(directory.path))
        keep_dumps(directory)
        script = plan.script
        if script:
            if rank == 0:
                recording.begin(directory.events)
            try:
                comm.watch()
                serve_torchrun_scripts(plan, rank, port_of(directory.path))
                serve_tensorflow_scripts(plan)
                set_variables(directory, rank)
                keep_loader_workers()
                if plan.processes > 1:
                    save_whole_files()
                program_end.begin(script, directory.stop, plan.ranks)
                with _exit_in_good_order(lambda: conclude(_end_script(rank, plan, conclude))):
                    _run_script(script)
            finally:
                recording.end()
            _check_script(rank, plan.processes)
        else:
            from hpctrain.worker.train.recipe import train_recipe

            train_recipe(plan, directory, joined)
            comm.make_last_checks()
    except BaseException as raised:
        return _ending_by(raised, script, conclude)
    return None


def _ending_by(raised: BaseException, script: Script | None, conclude: Callable[[Ending | None], int]) -> Ending | None:
    """What an exception makes of this rank; an error is printed to the log."""
    if isinstance(raised, SystemExit):
        left = exit_status(raised)
        return _recorded(left and _after_interrupt(left), script)
    error = original_error(raised)
    if script is None and isinstance(error, ModuleNotFoundError):
        error = missing_extra(error) or error
    ending = _after_interrupt(describe(error))
    with limited(lambda: conclude(ending)):
        show(error)
    return _recorded(ending, script)


def _after_interrupt(ending: Ending) -> Ending:
    """The ending, which Ctrl-C makes a stop, whatever a script raises then: Lightning ends with status 1.

    Other ranks may be saving their state, and no error of the work ends the run.
    """
    return replace(ending, exit_code=stopping.RESUMABLE, resumable=True) if was_interrupted() else ending


def _recorded(ending: Ending | None, script: Script | None) -> Ending | None:
    """The ending, after a script's stop was recorded."""
    if script and ending and ending.resumable:
        try:
            recording.stopped(stopping.this_process.asked(look=True) or "asked")
        except HpctrainError as fault:
            return describe(fault)
    return ending


@contextlib.contextmanager
def _exit_in_good_order(conclude: Callable[[], int]) -> Iterator[None]:
    """Let ``os._exit(0)`` of a script conclude its rank's work first; scripts end so where threads would hang.

    Outside of the main thread it may come at any moment of the training, and another status says that something is
    wrong. Both stay what they are without this: an end without a word.
    """
    rank, leave = os.getpid(), os._exit

    def exiting(status: int) -> NoReturn:
        on_main = threading.current_thread() is threading.main_thread()
        # A fork of this rank has no work of the rank's to conclude, and an exit handler comes after it.
        if status == 0 and on_main and os.getpid() == rank and os._exit is exiting:
            os._exit = leave
            status = conclude()
            comm.leave_now()
        leave(status)

    os._exit = exiting
    try:
        yield
    finally:
        os._exit = leave


def _end_script(rank: int, plan: Plan, conclude: Callable[[Ending | None], int]) -> Ending | None:
    """End a script at the line that it is at; an error is printed to the log and returned."""
    try:
        recording.end()
        _check_script(rank, plan.processes)
    except BaseException as raised:
        return _ending_by(raised, plan.script, conclude)
    return None


def _check_script(rank: int, ranks: int) -> None:
    """Check now what can still fail a script's run: exit handlers come too late for the record. Collective."""
    if was_interrupted():
        # The ranks have ended at different places.
        return
    comm.make_last_checks()
    comm.require_distributed(ranks)
    if rank == 0 and stopping.this_process.agreed():
        tell(_ENDED_AFTER_STOP)


def _run_script(script: Script) -> None:
    """Run a user's script as Python itself does: as ``__main__``, its folder first on the path.

    Returns only in the rank: a process that the script has forked ends here.
    """
    sys.argv = [script.name or str(script.file), *script.arguments]
    if script.copied:
        sys.path[:] = map(script.copied.entry, sys.path)
        if searched := os.environ.get("PYTHONPATH"):
            # For processes that the script starts.
            os.environ["PYTHONPATH"] = os.pathsep.join(map(script.copied.entry, searched.split(os.pathsep)))
    sys.path.insert(0, str(script.file.parent))
    try:
        _execute(script.file)
    except BaseException as raised:
        if forks.is_fork():
            _leave_fork(raised)
        # An exit with status 0 is a good end, after which the last checks still come.
        if not isinstance(raised, SystemExit) or raised.code not in (None, 0):
            raise
    if forks.is_fork():
        _leave_fork(None)


def _execute(path: Path) -> None:
    """Execute a file as the module ``__main__``, which stays that to the end of this process."""
    main = ModuleType("__main__")
    main.__file__ = str(path)
    main.__dict__.update(__annotations__={}, __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = main
    with io.open_code(str(path)) as file:
        code = compile(file.read(), str(path), "exec", dont_inherit=True)
    exec(code, main.__dict__)  # noqa: S102 - the user's own program


def _leave_fork(error: BaseException | None) -> None:
    with contextlib.suppress(OSError, ValueError):
        if isinstance(error, SystemExit) and not isinstance(error.code, int | None):
            tell(error.code)
        elif error and not isinstance(error, SystemExit):
            show(error)
    forks.leave(forks.exit_status(error))
