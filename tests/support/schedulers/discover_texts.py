"""What scontrol prints of a cluster with GPUs, in the form of 22.05 and 24.05."""

from __future__ import annotations

CONFIG = """\
Configuration data as of 2026-11-21T08:27:07
AccountingStorageBackupHost = (null)
ClusterName             = alpine
SLURM_VERSION           = 22.05.8
SelectType              = select/cons_tres
SelectTypeParameters    = CR_CORE_MEMORY
SlurmctldHost[0]        = ctl(10.0.0.1)

Cgroup Support Configuration:
ConstrainCores          = yes

Slurmctld(primary) at ctl is UP
"""


def partition(name: str, **changed: str) -> str:
    keys = {
        "PartitionName": name,
        "AllowAccounts": "ALL",
        "Default": "NO",
        "DefaultTime": "NONE",
        "MaxNodes": "UNLIMITED",
        "MaxTime": "1-00:00:00",
        "OverSubscribe": "NO",
        "State": "UP",
        "TotalNodes": "32",
        "JobDefaults": "DefCpuPerGPU=16,DefMemPerGPU=120000",
    } | changed
    return " ".join(f"{key}={value}" for key, value in keys.items()) + "\n"


def node(number: int = 1, **changed: str) -> str:
    """Equal nodes, a line each."""
    keys = {
        "Arch": "x86_64",
        "CoresPerSocket": "32",
        "CPUAlloc": "0",
        "CPUEfctv": changed.get("CPUTot", "128"),
        "CPUTot": "128",
        "Gres": "gpu:a100:4(S:0-1)",
        "OS": "Linux 6.1.0 #1 SMP Debian",
        "RealMemory": "512000",
        "Sockets": "2",
        "State": "IDLE",
        "ThreadsPerCore": "2",
        "Partitions": "gpu",
        "Comment": "it = b=c",
    } | changed
    text = " ".join(f"{key}={value}" for key, value in keys.items())
    return "".join(f"NodeName=g{index} {text}\n" for index in range(number))


GPU = partition("gpu", Default="YES")
A100 = node(20)
