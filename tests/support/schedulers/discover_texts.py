"""What Slurm prints of a cluster with GPUs, in the form of 22.05 and 24.05."""

from __future__ import annotations

CONFIG = """\
Configuration data as of 2026-11-21T08:27:07
AccountingStorageBackupHost = (null)
ClusterName             = alpine
JobRequeue              = 1
MpiDefault              = none
SLURM_VERSION           = 22.05.8
SelectType              = select/cons_tres
SelectTypeParameters    = CR_CORE_MEMORY
SlurmctldHost[0]        = ctl(10.0.0.1)
TopologyPlugin          = topology/tree

Cgroup Support Configuration:
ConstrainCores          = yes

Slurmctld(primary) at ctl is UP
"""

MPI = """\
MPI plugin types are...
\tpmix
\tnone
\tcray_shasta
\tpmi2
specific pmix plugin versions available: pmix_v3,pmix_v4
"""


def partition(name: str, **changed: str) -> str:
    keys = {
        "PartitionName": name,
        "AllowGroups": "ALL",
        "AllowAccounts": "ALL",
        "Default": "NO",
        "DefaultTime": "NONE",
        "MaxNodes": "UNLIMITED",
        "MaxTime": "1-00:00:00",
        "Nodes": "g[001-032]",
        "OverSubscribe": "NO",
        "State": "UP",
        "TotalNodes": "32",
        "JobDefaults": "DefCpuPerGPU=16,DefMemPerGPU=120000",
        "TRES": "cpu=4096,mem=16000M,node=32,billing=8",
    } | changed
    return " ".join(f"{key}={value}" for key, value in keys.items()) + "\n"


GPU = partition("gpu", Default="YES")
A100 = "gpu|idle|20|128|2|32|512000|gpu:a100:4(S:0-1)\n"
