"""Jobs of a Slurm of four nodes on this machine that lose a node, or are put back in the queue at a bad moment."""

from __future__ import annotations

import json
from collections.abc import Sequence

from fault_campaign.cases import NotHereError, Scene, kind
from fault_campaign.faulted_run import Training
from fault_campaign.oracle import Event, Promise
from support.launching import AS_ROOT
from support.slurm.local_slurm import LocalSlurm, obstacle

# A core a rank, as on the machine of the run without a fault: threads decide the last bits.
_SIZE = ("--nodes", "2", "--tasks-per-node", "1", "--cpus-per-task", "1", "--gpus-per-node", "0", "--time", "10")


def cluster(scene: Scene) -> LocalSlurm:
    """One for all cases; each leaves it idle.

    Raises:
        NotHereError: what it needs is missing.
    """
    if reason := obstacle():
        raise NotHereError(reason)
    slurm: LocalSlurm = scene.library.kept("slurm", LocalSlurm)

    def clear() -> None:
        slurm.run("scancel", "--user=root", "--full")
        slurm.wait_idle()

    scene.place.undone.callback(clear)
    return slurm


def _submit(scene: Scene, slurm: LocalSlurm) -> Training:
    """A job that trains, and a command that waits for its end; the job is slow to write its checkpoints."""
    work, backend = scene.setting.work, scene.setting.backend
    return scene.begin_as(
        "submit",
        *(*work, "--cluster", "auto", *_SIZE, "--framework", scene.setting.framework, "--backend", backend, "--wait"),
        injected=[{"what": "slow_writing", "seconds": 0.3}],
        **AS_ROOT,
        **slurm.environment,
    )


def _job(scene: Scene) -> str:
    return str(json.loads(scene.place.directory.submission.read_text())["jobs"][0])


def _begun_again(events: Sequence[Event]) -> list[str]:
    starts = [event for event in events if event["event"] == "start"]
    return [] if len(starts) > 1 else ["it did not begin again"]


@kind("a node of Slurm dies", tm=1, th=1, km=1)
def lose_node(scene: Scene) -> Promise:
    slurm = cluster(scene)
    training = _submit(scene, slurm)
    training.wait_for_step(*scene.moment())
    hosts = [host["host"] for host in json.loads(scene.place.directory.plan.read_text())["hosts"]]
    lost = scene.draw.choice(hosts)
    scene.place.undone.callback(slurm.start_slurmd, lost)
    slurm.lose_node(lost)
    slurm.run("scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=lost")
    return Promise(codes=(0,), check=_begun_again)


@kind("requeued while a checkpoint is written", tm=1, th=1, km=1)
def requeue_writing(scene: Scene) -> Promise:
    slurm = cluster(scene)
    training = _submit(scene, slurm)
    training.wait_for_step(scene.draw.choice((15, 40, 60)))
    training.wait_for_writing(scene.draw.uniform(0, 0.4))
    slurm.run("scontrol", "requeue", _job(scene))
    return Promise(codes=(0,), check=_begun_again)
