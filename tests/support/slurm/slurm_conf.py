"""The files of a Slurm whose nodes are all on this machine, or each on a host of its own."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from support.ports import free_port

# Neighbours on the fabric are not neighbours by name: sorted names cross the core three times, the tree's order once.
INTERLEAVED = "SwitchName=s1 Nodes=n1,n3\nSwitchName=s2 Nodes=n2,n4\nSwitchName=core Switches=s1,s2\n"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the cluster looks like.

    What no setting makes quicker, measured on 22.05: time limits count in whole minutes (``--time=0:20`` is one), and
    are looked at every 30 s, so a job ends up to 30 s late and ``--signal=…@N`` comes N to N + 30 s before the limit.

    Attributes:
        nodes: their names.
        addresses: of each node that is a host of its own; empty where all are this machine. The first has slurmctld.
        cpus: that each node claims, however many the machine has.
        gpus: that each node claims; the devices after them are /dev/null.
        topology: text of topology.conf.
        tracking: of the processes of a step: ``pgid``, or ``cgroup`` as on clusters. By the first, a signal to a batch
            job goes to all that its script runs in the foreground or background; by the second, to the script alone.
        kill_seconds: between a job's SIGTERM and its SIGKILL.
    """

    nodes: tuple[str, ...] = ("n1", "n2", "n3", "n4")
    addresses: tuple[str, ...] = ()
    cpus: int = 2
    gpus: int = 2
    topology: str = INTERLEAVED
    tracking: str = "pgid"
    kill_seconds: int = 3


# That a job of the default partition may ask for.
MAX_MINUTES = 60
# After which a requeued job may start again (measured 6 s for 5). Slurm takes the life of a credential for it, so it is
# also how long a busy machine may take to start a step.
_REQUEUE_SECONDS = 5
# Of silence, after which a node counts as lost and its jobs are requeued.
_LOST_SECONDS = 15
# Between the signal that announces a preemption and the preemption (measured 13 s for 5).
_GRACE_SECONDS = 2
# That any part of Slurm has for an answer. A node that is gone is missed only after some of them.
_ANSWER_SECONDS = 10


def write(settings: Settings, folder: Path) -> None:
    """All that munged, slurmctld and the slurmd need, in a folder that only this user can enter."""
    for name in ("state", *(f"{kind}-{node}" for node in settings.nodes for kind in ("spool", "tmp")), "tmp"):
        (folder / name).mkdir()
    gpus = [folder / f"gpu{number}" for number in range(settings.gpus)]
    for gpu in gpus:
        # slurmd wants a device.
        gpu.symlink_to("/dev/null")
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    nodes = ",".join(settings.nodes)
    (folder / "gres.conf").write_text("".join(f"NodeName={nodes} Name=gpu File={gpu}\n" for gpu in gpus))
    if settings.tracking == "cgroup":
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    (folder / "topology.conf").write_text(settings.topology)
    (folder / "slurm.conf").write_text(_slurm_conf(settings, folder))


def _places(settings: Settings) -> tuple[str, list[str]]:
    """Where slurmctld is, and each node."""
    if settings.addresses:
        return f"SlurmctldHost={settings.nodes[0]}({settings.addresses[0]})", [
            f"NodeAddr={address}" for address in settings.addresses
        ]
    host = socket.gethostname().partition(".")[0]
    control, *ports = (free_port() for _ in range(1 + len(settings.nodes)))
    controller = f"SlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={control}"
    # All of them listen where nobody else comes.
    controller += "\nCommunicationParameters=NoCtldInAddrAny,NoInAddrAny"
    return controller, [f"NodeHostname={host} NodeAddr=127.0.0.1 Port={port}" for port in ports]


def _slurm_conf(settings: Settings, folder: Path) -> str:
    controller, places = _places(settings)
    nodes = "".join(
        f"NodeName={node} {place} CPUs={settings.cpus} RealMemory=4000 Gres=gpu:{settings.gpus} State=UNKNOWN\n"
        for node, place in zip(settings.nodes, places, strict=True)
    )
    return f"""\
ClusterName=local
{controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={_REQUEUE_SECONDS}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
# Without one for each node, the PMIx servers of two nodes collide.
TmpFS={folder}/tmp-%n
ProctrackType=proctrack/{settings.tracking}
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
TopologyPlugin=topology/tree
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
KillWait={settings.kill_seconds}
MessageTimeout={_ANSWER_SECONDS}
SlurmdTimeout={_LOST_SECONDS}
ReturnToService=2
# Ended jobs are looked up by the tests, and there is no database.
MinJobAge=86400
{nodes}\
PartitionName=batch Nodes=ALL Default=YES MaxTime={MAX_MINUTES} GraceTime={_GRACE_SECONDS}\
 PriorityTier=1 State=UP
PartitionName=short Nodes=ALL MaxTime=5 PriorityTier=10 PreemptMode=OFF State=UP
"""
