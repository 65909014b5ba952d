"""Which rank is blamed, from the records and from what real launchers print."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpctrain.common.cluster.machine import GroupMemory
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.stopping import RESUMABLE
from hpctrain.control.supervision.failure import Failure, find_failure, with_memory, with_recordings
from support.golden import check_text
from support.report.written_runs import recipe_plan
from support.script_runs import script_run

OPEN_MPI = """\
--------------------------------------------------------------------------
prterun noticed that process rank 1 with PID 8399 on node n2 exited on
signal {signal} (Killed).
--------------------------------------------------------------------------
"""
OPEN_MPI_4 = """\
mpirun noticed that process rank 1 with PID 0 on node n2 exited on signal {signal} (Killed).
"""
# Of rank 0, after rank 1 was killed on another host.
CLOSED = """\
[n1:00000] *** An error occurred in Socket closed
[n1:00000] *** MPI_ERRORS_ARE_FATAL (processes in this communicator will now abort,
--------------------------------------------------------------------------
prterun has exited due to process rank 0 with PID 0 on node n1 calling
"abort". This may have caused other processes in the application to be
--------------------------------------------------------------------------
"""
INTEL = """\
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   RANK 1 PID 1001 RUNNING AT n2
=   KILLED BY SIGNAL: {signal} (Killed)
"""

# A task that calls MPI_Abort, and one that is killed, whose end the other notices first.
SRUN = """\
srun: Job step aborted: Waiting up to 5 seconds for job step to finish.
slurmstepd-n1: error: *** STEP 3.0 ON n1 CANCELLED AT 2026-11-28T13:50:18 ***
srun: error: n1: task 0: Exited with exit code {status}
srun: launch/slurm: _step_signal: Terminating StepId=3.0
srun: error: n2: task 1: {name}
"""


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return script_run(tmp_path)


def record(directory: RunDirectory, rank: int, status: str, error: str = "", **more: Any) -> None:
    values = {"rank": rank, "host": f"n{rank + 1}", "pid": 1000 + rank, "started": 1.0, "status": status, **more}
    if error:
        values["error"] = {"type": "ValueError", "message": error}
    directory.rank(rank).write_text(json.dumps(values))


def failure_of(directory: RunDirectory, ranks: int, **ended: Any) -> Failure:
    """What :func:`find_failure` finds, where that is a failure."""
    failure = find_failure(directory, ranks, **ended)
    assert failure is not None
    return failure


def test_wrong_use_that_a_rank_found_is_told_apart(directory: RunDirectory) -> None:
    wrong_use = {"type": "HpctrainError", "message": "no such data"}
    for error, exit_code, told in ((wrong_use, 2, 2), (wrong_use, 1, 1), ({"type": "SystemExit", "message": ""}, 2, 1)):
        record(directory, 0, "failed", ended=2.0, exit_code=exit_code)
        values = json.loads(directory.rank(0).read_text())
        directory.rank(0).write_text(json.dumps({**values, "error": error}))
        failure = failure_of(directory, 1, output="", exit_status=exit_code)
        assert failure.exit_code == told


def test_done_is_what_every_rank_says(directory: RunDirectory) -> None:
    record(directory, 0, "done")
    record(directory, 1, "done")
    assert find_failure(directory, 2, output="", exit_status=0) is None
    noise = "noise at exit"
    assert find_failure(directory, 2, output=noise, exit_status=1) is None


@pytest.mark.parametrize("ranks", [2, 3])
def test_exit_status_0_is_not_believed(directory: RunDirectory, ranks: int) -> None:
    """mpirun exits 0 when a whole node is lost; then a record says 'running', or was never written."""
    record(directory, 0, "done")
    record(directory, 1, "running")
    failure = failure_of(directory, ranks, output="", exit_status=0)
    assert "rank 1" in failure.message


def test_the_first_rank_that_failed_is_the_cause(directory: RunDirectory) -> None:
    record(directory, 0, "failed", "a consequence", ended=20.0)
    record(directory, 1, "failed", "the cause", ended=10.0)
    directory.log(1).write_text("".join(f"line {number}\n" for number in range(50)))
    failure = failure_of(directory, 2, output="", exit_status=1)
    assert (failure.code, failure.rank, failure.host) == ("HT-rank-exception", 1, "n2")
    assert failure.message.endswith("the cause")
    assert failure.lines == tuple(f"line {number}" for number in range(30, 50))
    assert f"{directory.log(1)}:\n    {failure.lines[0]}\n" in str(failure)
    assert failure.without_log_of(shown=0) == f"error[{failure.code}]: {failure}"
    short = failure.without_log_of(shown=1)
    assert short.startswith(f"error[{failure.code}]: {failure.message}\n") and short.endswith(f" {directory.log(1)}")


@pytest.mark.parametrize("text", [OPEN_MPI, OPEN_MPI_4, INTEL])
def test_a_killed_rank_goes_before_the_ranks_that_missed_it(directory: RunDirectory, text: str) -> None:
    record(directory, 0, "failed", "lost the others", ended=5.0)
    record(directory, 1, "running")
    failure = failure_of(directory, 2, output=text.format(signal=9), exit_status=137)
    assert (failure.code, failure.rank, failure.host) == ("HT-rank-killed", 1, "n2")
    assert "(SIGKILL), " in failure.message
    crash = failure_of(directory, 2, output=text.format(signal=11), exit_status=139)
    assert (crash.code, crash.rank) == ("HT-rank-killed", 1) and crash.message.endswith(" 11 (SIGSEGV)")


def test_a_rank_whose_connection_another_ones_death_closed_is_not_to_blame(directory: RunDirectory) -> None:
    record(directory, 0, "running")
    record(directory, 1, "running")
    for output, dead, rank in ((CLOSED, 0, 1), (CLOSED, None, 1), (CLOSED, 1, 1), ("", 0, 0)):
        found = failure_of(directory, 2, output=output, exit_status=14, first_dead=dead)
        assert (found.code, found.rank, found.host) == ("HT-rank-died", rank, f"n{rank + 1}")
    record(directory, 2, "running")
    found = failure_of(directory, 3, output=CLOSED, exit_status=14, first_dead=0)
    assert (found.code, found.rank, found.host, found.exit_code) == ("HT-rank-died", None, None, RESUMABLE)
    memory = GroupMemory(limit=32 * 10**9, peak=None, kills=1)
    assert with_memory(found, "n3", None, memory).code == "HT-rank-out-of-memory"


def test_a_rank_for_which_memory_ran_out_is_named(directory: RunDirectory) -> None:
    record(directory, 0, "failed", "lost the others", ended=5.0)
    record(directory, 1, "running")
    by_srun = failure_of(directory, 2, output=SRUN.format(status=1, name="Out Of Memory"), exit_status=1)
    assert (by_srun.code, by_srun.rank, by_srun.exit_code) == ("HT-rank-out-of-memory", 1, RESUMABLE)

    def memory(kills: int) -> GroupMemory:
        return GroupMemory(limit=32 * 10**9, peak=31 * 10**9, kills=kills)

    killed = failure_of(directory, 2, output=OPEN_MPI.format(signal=9), exit_status=137)
    for host, before, after, code, counted in (
        ("n2", None, memory(1), "HT-rank-out-of-memory", "a process"),
        ("n2", memory(1), memory(3), "HT-rank-out-of-memory", "2 processes"),
        ("n2", memory(1), memory(1), "HT-rank-killed", ""),
        ("n2", memory(1), None, "HT-rank-killed", ""),
        ("n1", None, memory(1), "HT-rank-killed", "on n1 the kernel killed a process"),
    ):
        found = with_memory(killed, host, before, after)
        assert (found.code, found.rank, found.exit_code) == (code, 1, RESUMABLE)
        assert counted in str(found) and ("31 GB" in str(found)) == bool(counted)


def test_dumps_of_collectives_are_told_with_their_reader(directory: RunDirectory) -> None:
    record(directory, 0, "failed", "the watchdog's time is over")
    failure = failure_of(directory, 1, output="", exit_status=1)
    assert with_recordings(failure, directory) == failure
    directory.flight_recorder.with_name(f"{directory.flight_recorder.name}0").touch()
    found = with_recordings(replace(failure, hint="use less"), directory)
    assert found.hint.splitlines()[0] == "use less" and "torchfrtrace --allow" in found.hint
    # Of the next attempt there is none yet.
    directory.begin_attempt(recipe_plan())
    assert with_recordings(failure, directory) == failure


def test_what_srun_kills_behind_an_error_is_not_the_cause(directory: RunDirectory) -> None:
    for error, first, killed_first, cause in (
        ("mine", None, False, ("HT-rank-exception", 0, 1)),
        ("mine", None, True, ("HT-rank-killed", 1, RESUMABLE)),
        ("", None, False, ("HT-rank-killed", 1, RESUMABLE)),
        ("mine", 1, False, ("HT-rank-died", 1, RESUMABLE)),
    ):
        record(directory, 0, "failed" if error else "running", error, ended=5.0, exit_code=1)
        record(directory, 1, "running")
        lines = SRUN.format(status=1 if error else 14, name="Killed").splitlines()
        output = "\n".join(lines[::-1] if killed_first else lines)
        failure = failure_of(directory, 2, output=output, exit_status=1, first_dead=first)
        assert (failure.code, failure.rank, failure.exit_code) == cause
    record(directory, 0, "failed", "mine", ended=5.0, exit_code=1)
    crash = failure_of(directory, 2, output=SRUN.format(status=14, name="Segmentation fault"), exit_status=139)
    assert (crash.code, crash.rank) == ("HT-rank-killed", 1) and crash.message.endswith(" 11 (SIGSEGV)")


@pytest.mark.parametrize(
    ("error", "silent", "cause"),
    [
        ("Read error [127.0.0.1]:31404: Connection reset by peer", 1, ("HT-rank-exception", 0, RESUMABLE)),
        ("Connection closed by peer [127.0.0.1]:1", 2, ("HT-rank-exception", 0, RESUMABLE)),
        ("NCCL error: Duplicate GPU detected", 1, ("HT-rank-exception", 0, 1)),
        ("Connection reset by peer", 0, ("HT-rank-exception", 0, 1)),
        ("CUDA error: uncorrectable ECC error encountered", 0, ("HT-host-gpu-broken", 0, RESUMABLE)),
    ],
)
def test_a_connection_to_another_rank_that_was_lost(
    directory: RunDirectory, error: str, silent: int, cause: tuple[str, int, int]
) -> None:
    """The rank that noticed ended the run before the launcher saw that the other one was killed."""
    record(directory, 0, "failed", error, ended=5.0, exit_code=1)
    for rank in range(1, 3):
        record(directory, rank, "running" if rank <= silent else "done")
    failure = failure_of(directory, 3, output="", exit_status=1)
    assert (failure.code, failure.rank, failure.exit_code) == cause


def test_the_launchers_own_sigterm_is_no_cause(directory: RunDirectory) -> None:
    record(directory, 0, "failed", "the cause", ended=5.0)
    record(directory, 1, "running")
    failure = failure_of(directory, 2, output=OPEN_MPI.format(signal=15), exit_status=1)
    assert (failure.code, failure.rank, failure.host) == ("HT-rank-exception", 0, "n1")


@pytest.mark.parametrize("first_dead", [None, 0, 1])
@pytest.mark.parametrize(
    "words",
    [
        "MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n  Proc: [[64094,1],1]\n  Errorcode: {}\n\0",
        "MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\nwith errorcode {}.\n",
        "Abort({0}) on node 1: application called MPI_Abort(MPI_COMM_WORLD, {0}) - process 1\n",
    ],
)
def test_a_rank_that_aborts_the_run_is_the_cause(directory: RunDirectory, words: str, first_dead: int | None) -> None:
    """The traceback that it has printed is in its log."""
    for rank in (0, 1):
        record(directory, rank, "running")
    directory.log(1).write_text("ValueError: boom\n")
    for code, status in ((0, 1), (4, 4)):
        failure = failure_of(directory, 2, output=words.format(code), exit_status=code, first_dead=first_dead)
        if first_dead == 0:
            assert (failure.code, failure.rank) == ("HT-rank-died", 0)
        else:
            assert (failure.code, failure.rank, failure.exit_code) == ("HT-rank-exit", 1, status)
            assert failure.lines == ("ValueError: boom",) and f"error code {code}" in failure.message


def test_a_single_process_that_was_killed(directory: RunDirectory) -> None:
    record(directory, 0, "running")
    failure = failure_of(directory, 1, output="", exit_status=-11)
    assert (failure.code, failure.rank, failure.host) == ("HT-rank-killed", 0, "n1")


def test_a_launcher_that_starts_nothing_is_quoted(directory: RunDirectory) -> None:
    failure = failure_of(directory, 2, output="\nno such host: n7\n", exit_status=3)
    assert (failure.code, failure.rank, failure.log) == ("HT-rank-silent", None, None)
    check_text("failure-silent", str(failure))


def test_a_log_is_quoted_from_where_the_attempt_began(directory: RunDirectory) -> None:
    before = "Traceback of the attempt before\n"
    for count in (1, 30):
        lines = [f"line {number}" for number in range(count)]
        directory.log(0).write_text(before + "".join(f"{line}\n" for line in lines))
        record(directory, 0, "failed", "ValueError", log_begin=len(before))
        assert failure_of(directory, 1, output="", exit_status=1).lines == tuple(lines[-20:])


def test_a_start_of_open_mpi_that_failed_by_chance_is_told_apart(directory: RunDirectory) -> None:
    output = "----\nThe PMIx server's listener thread failed to start. We cannot\ncontinue.\n----\n"
    failure = find_failure(directory, 2, output=output, exit_status=213)
    assert failure and failure.passing
    record(directory, 0, "running")
    failure = find_failure(directory, 2, output=output, exit_status=213)
    assert failure and not failure.passing


NO_DAEMON = """\
A daemon failed to report back after being spawned. This could
be due to several factors, including inability to find the
daemon executable.

  Local host:    n1
  Remote host:   n2

  Daemon exit status: 255
"""


def test_a_host_that_went_while_mpirun_started_there_is_named_and_passes(directory: RunDirectory) -> None:
    failure = find_failure(directory, 2, output=NO_DAEMON, exit_status=255)
    assert failure and failure.passing
    assert (failure.code, failure.host) == ("HT-host-no-daemon", "n2")
    record(directory, 0, "running")
    failure = find_failure(directory, 2, output=NO_DAEMON, exit_status=255)
    assert failure and not failure.passing


def test_a_rank_that_was_seen_dead_goes_before_its_consequences(directory: RunDirectory) -> None:
    record(directory, 0, "failed", "a consequence", ended=5.0)
    record(directory, 1, "running")
    for output in ("", OPEN_MPI.format(signal=15)):
        failure = failure_of(directory, 2, output=output, exit_status=1, first_dead=1)
        assert (failure.code, failure.rank, failure.host) == ("HT-rank-died", 1, "n2")


LOST_DAEMON = """\
PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-n1-1@0,0] on node n1
  Remote daemon: [prterun-n1-1@0,1] on node n2
"""


def test_ranks_whose_loss_the_others_survived(directory: RunDirectory) -> None:
    """What mpirun says of the rank that was killed is then no cause, and neither is its exit status."""
    killed = OPEN_MPI.format(signal=9)
    record(directory, 0, "done")
    record(directory, 1, "lost")
    assert find_failure(directory, 2, output=killed, exit_status=137, fault_tolerant=True) is None
    record(directory, 0, "running")
    failure = failure_of(directory, 2, output=killed, exit_status=137, fault_tolerant=True)
    assert failure.code == "HT-rank-silent" and {"0", "n1"} <= {*failure.message.split()}
    record(directory, 0, "failed", "boom", ended=5.0, exit_code=1)
    failure = failure_of(directory, 2, output=killed, exit_status=137, fault_tolerant=True)
    assert (failure.code, failure.rank, failure.exit_code) == ("HT-rank-exception", 0, 1)


def test_a_rank_that_died_when_all_was_done(directory: RunDirectory) -> None:
    """Nobody was left to notice. If the first rank died so, its last work may not be done."""
    record(directory, 0, "done")
    record(directory, 1, "running")
    assert find_failure(directory, 2, output="", exit_status=137, fault_tolerant=True) is None
    assert find_failure(directory, 2, output="", exit_status=137) is not None
    record(directory, 0, "running")
    record(directory, 1, "done")
    assert find_failure(directory, 2, output="", exit_status=137, fault_tolerant=True) is not None
    record(directory, 0, "lost")
    record(directory, 1, "lost")
    assert find_failure(directory, 2, output="", exit_status=137, fault_tolerant=True) is not None


def test_too_few_ranks_are_a_stop(directory: RunDirectory) -> None:
    record(directory, 0, "resumable")
    record(directory, 1, "lost")
    reason = "1 rank left of 2"
    directory.events.write_text(f'{{"time": 1, "event": "stopped", "iteration": 7, "reason": "{reason}"}}\n')
    failure = failure_of(directory, 2, output=OPEN_MPI.format(signal=9), exit_status=137, fault_tolerant=True)
    assert (failure.code, failure.status, failure.stopped) == ("HT-run-stopped", "resumable", True)
    assert failure.message.endswith(f": {reason}")


def test_a_rank_that_gave_up_makes_the_run_resumable(directory: RunDirectory) -> None:
    record(directory, 0, "failed", ended=5.0, exit_code=4)
    values = json.loads(directory.rank(0).read_text())
    error = {"type": "RanksLostError", "message": "rank 1 died"}
    directory.rank(0).write_text(json.dumps({**values, "error": error}))
    record(directory, 1, "running")
    failure = failure_of(directory, 2, output=OPEN_MPI.format(signal=9), exit_status=137, fault_tolerant=True)
    assert (failure.code, failure.rank, failure.status) == ("HT-rank-exception", 0, "resumable")
    assert "RanksLostError: " in failure.message


@pytest.mark.parametrize("fault_tolerant", [False, True])
def test_a_lost_host_is_the_cause_of_all_else(directory: RunDirectory, fault_tolerant: bool) -> None:
    record(directory, 0, "failed", "a consequence", ended=5.0)
    record(directory, 1, "lost" if fault_tolerant else "running")
    output = OPEN_MPI.format(signal=9) + LOST_DAEMON
    failure = failure_of(directory, 2, output=output, exit_status=0, fault_tolerant=fault_tolerant)
    assert (failure.lost_hosts, failure.status) == (("n2",), "resumable")
    # The others saved their state at the launcher's SIGTERM.
    record(directory, 0, "resumable")
    failure = failure_of(directory, 2, output=output, exit_status=0, fault_tolerant=fault_tolerant)
    assert (failure.lost_hosts, failure.stopped) == (("n2",), False)
