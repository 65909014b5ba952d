"""What launchers are told, against files that a person can read.

After a change that is meant: ``REGENERATE=1 python -m pytest tests/unit/control/topology/test_launch_files.py``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.common.cluster import launch_files
from hpctrain.common.cluster.node_map import Slot

GOLDEN = Path(__file__).parents[3] / "golden" / "launch_files"
SLOTS = (
    Slot(gpu=0, adapter="mlx5_0", cores=(0, 2), devices=("mlx5_0",)),
    Slot(gpu=1, adapter="mlx5_1", cores=(4, 6), devices=("mlx5_1",)),
    Slot(gpu=2, adapter="mlx5_10", cores=(1, 3), devices=("mlx5_10",)),
    Slot(gpu=3, adapter="mlx5_10", cores=(5, 7), devices=("mlx5_10",)),
)
HOSTS = [("gpu007", SLOTS), ("gpu002", SLOTS)]


def variables(values: dict[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in values.items())


TEXTS = {
    "open-mpi.hostfile": launch_files.open_mpi_hostfile(HOSTS),
    "hydra.hostfile": launch_files.hydra_hostfile(HOSTS),
    "slurm.hostfile": launch_files.slurm_hostfile(HOSTS),
    "network.env": variables(launch_files.network_variables(interface="ib0", rails=True)),
    "host.env": variables(launch_files.host_variables(SLOTS)),
    "slot.env": variables(launch_files.slot_variables(SLOTS[2])),
}


@pytest.mark.parametrize("name", TEXTS)
def test_golden(name: str) -> None:
    path = GOLDEN / name
    if os.environ.get("REGENERATE"):
        path.write_text(TEXTS[name])
    assert TEXTS[name] == path.read_text(), f"if the change is meant: REGENERATE=1 python -m pytest {__file__}"


def test_nothing_is_said_of_what_is_not_there() -> None:
    bare = Slot(gpu=None, adapter=None, cores=())
    assert launch_files.host_variables([bare]) == launch_files.slot_variables(bare) == {}
    assert launch_files.network_variables() == {}


def test_ports_of_devices() -> None:
    slot = Slot(gpu=None, adapter="mlx4_0", cores=(), devices=("mlx4_0:2", "mlx5_0"))
    assert launch_files.host_variables([slot]) == {"NCCL_IB_HCA": "=mlx4_0:2,mlx5_0"}
    assert launch_files.slot_variables(slot) == {"UCX_NET_DEVICES": "mlx4_0:2,mlx5_0:1"}
