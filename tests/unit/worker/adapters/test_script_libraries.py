"""What a script that knows torchrun finds: its variables, and the run's own default group."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hpctrain.common.run.plan import Plan, Script, Slots
from hpctrain.worker.adapters import script_libraries
from hpctrain.worker.adapters.script_libraries import script_variables
from hpctrain.worker.comm import forks
from support import needs
from support.refusals import refused

pytestmark = pytest.mark.slow

# Each in a Python of its own: a hook on imports stays.
PROGRAM = """
import importlib.util, json, os, sys
from hpctrain.worker.adapters.script_libraries import serve_torchrun_scripts
from hpctrain.common.run.plan import Plan

serve_torchrun_scripts(Plan.model_validate_json(sys.argv[1]), 2, 20001)
found = {name: os.environ.get(name) for name in sys.argv[2:]}
# The search for a module is not its import.
assert importlib.util.find_spec("torch") and "torch" not in sys.modules
import torch.distributed as dist
from torch.distributed.distributed_c10d import init_process_group
assert init_process_group is dist.init_process_group
print(json.dumps([found, init_process_group.__module__, hasattr(init_process_group, "__wrapped__")]))
"""


def plan(backend: str, script: str = "script.py") -> Plan:
    """Two ranks on the first host, one on the second."""
    return Plan(
        script=Script(path=Path(script), arguments=()),
        backend=backend,
        ranks=1 if backend == "single" else 3,
        hosts=(Slots(host="n1", slots=1),)
        if backend == "single"
        else (Slots(host="n1", slots=2), Slots(host="n2", slots=1)),
        threads_per_rank=1,
    )


@pytest.mark.parametrize(("rank", "place"), [(0, ("0", "2", "0")), (1, ("1", "2", "0")), (2, ("0", "1", "1"))])
def test_torchruns_variables_follow_the_plan(rank: int, place: tuple[str, str, str]) -> None:
    found = script_variables(plan("mpi"), rank, 20001)
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"]) == (str(rank), "3", "n1")
    assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"], found["GROUP_RANK"]) == place
    assert (found["PL_TRAINER_DEVICES"], found["PL_TRAINER_NUM_NODES"]) == (place[1], "2")
    assert (found["ROLE_RANK"], found["ROLE_WORLD_SIZE"], found["GROUP_WORLD_SIZE"]) == (str(rank), "3", "2")
    # torchrun counts its own restarts, of which there are none.
    assert (found["TORCHELASTIC_RESTART_COUNT"], found["TORCHELASTIC_MAX_RESTARTS"]) == ("0", "0")


def run(plan: Plan, *names: str, **variables: str) -> list[object]:
    environment = {name: value for name, value in os.environ.items() if name not in names} | variables
    command = [sys.executable, "-c", PROGRAM, plan.model_dump_json(), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    found: list[object] = json.loads(done.stdout)
    return found


@needs.pytorch
@pytest.mark.parametrize(("backend", "meshes"), [("mpi", True), ("horovod", False)])
@pytest.mark.long
def test_every_script_gets_them(backend: str, meshes: bool) -> None:
    names = ("RANK", "MASTER_PORT", "PL_TRAINER_DEVICES", "ACCELERATE_USE_CPU")
    found, module, wrapped = run(plan(backend), *names, PL_TRAINER_DEVICES="7")
    # What the user sets stays.
    on_cpu = "true" if meshes else None
    assert found == {"RANK": "2", "MASTER_PORT": "20001", "PL_TRAINER_DEVICES": "7", "ACCELERATE_USE_CPU": on_cpu}
    assert (module, wrapped) == ("torch.distributed.distributed_c10d", True)


@needs.pytorch
def test_a_fork_makes_a_group_of_its_own_if_it_says_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from hpctrain.worker.adapters.torch import default_group

    monkeypatch.setattr(forks._process, "forked", True)
    monkeypatch.setattr("hpctrain.worker.comm.rank_run.run.comm", None)
    monkeypatch.setattr(default_group._script, "joined", False)
    made: list[tuple[int, int]] = []

    def original(backend: str, init_method: str | None = None, *, world_size: int = -1, rank: int = -1) -> None:
        made.append((rank, world_size))

    default_group.init_process_group(original, "gloo", rank=1, world_size=2)
    assert made == [(1, 2)]
    with refused("HT-call-in-child-process"):
        default_group.init_process_group(original, "gloo")


def test_lightning_takes_from_the_run_what_a_script_leaves_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI passes the defaults by name, for which Lightning reads no variable."""

    class Connector:
        def __init__(self, devices: object = "auto", num_nodes: int = 1, accelerator: object = "auto") -> None:
            self.found = devices, num_nodes, accelerator

    module = ModuleType("lightning")
    module._AcceleratorConnector = Connector
    script_libraries._give_devices("_AcceleratorConnector", module)
    for name, value in {"DEVICES": "4", "NUM_NODES": "2", "ACCELERATOR": "cpu"}.items():
        monkeypatch.setenv(f"PL_TRAINER_{name}", value)
    assert Connector(devices="auto", num_nodes=1, accelerator="auto").found == (4, 2, "cpu")
    assert Connector(1, accelerator="gpu").found == (1, 2, "gpu")
