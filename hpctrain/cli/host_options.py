"""Options about hosts that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HostList = Annotated[
    str | None,
    typer.Option("--hosts", "-H", metavar="LIST", help="The hosts: gpu[001-032],gpu040, or with slots: n1:8,n2:8."),
]
HostFile = Annotated[
    Path | None, typer.Option("--hostfile", metavar="FILE", help="Hostfile of Open MPI, Hydra or Slurm.")
]
FabricFile = Annotated[
    Path | None,
    typer.Option("--fabric", metavar="FILE", help="Fabric file for the order of the hosts, as for `topology show`."),
]
Routes = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Forwarding tables: a folder of ibroute's output, or dump_lfts's.")
]
NodeFile = Annotated[
    str | None,
    typer.Option(
        "--node",
        metavar="FILE|live",
        help="GPUs, adapters and cores of each host: from nvidia-smi topo -m, lstopo --of xml, NCCL, or this machine.",
    ),
]
Interface = Annotated[
    str | None, typer.Option(metavar="NAME", help="Network interface for connections that are not InfiniBand.")
]
