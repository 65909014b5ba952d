"""Meshes of recipes and scripts over hosts."""

from __future__ import annotations

from pathlib import Path

from hpctrain.common.cluster.machine import Machine
from hpctrain.common.recipes.families import FAMILIES
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.mesh import Mesh
from hpctrain.common.recipes.mesh_traffic import MeshModel
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.plan import Plan, Script
from hpctrain.common.run.request import TrainingRequest
from hpctrain.common.workloads.workload import load_workload
from hpctrain.control.planning.mesh_plan import mesh_lines, mesh_model, mesh_work, parameters
from hpctrain.control.planning.place_hosts import KnownFabric, PlacedHosts, place_hosts
from hpctrain.control.planning.planner import make_plan
from hpctrain.control.topology.build import build_fabric
from hpctrain.control.topology.readers import slurm
from support.golden import check_text

TREE = "SwitchName=core Switches=s[1-2]\nSwitchName=s1 Nodes=n[1,3]\nSwitchName=s2 Nodes=n[2,4]\n"
FABRIC = build_fabric(slurm.read(TREE, "topology.conf"))
NAMES = ("n1", "n2", "n3", "n4")
MACHINE = Machine(host="login", cores=8, frameworks=frozenset({"torch"}), versions={})
SCRIPT = Script(path=Path("/home/me/train.py"), mesh=Mesh(tp=2, dp_shard=-1))


def placed(work: Recipe | Script, ranks: int = 8) -> PlacedHosts:
    return place_hosts(dict.fromkeys(NAMES), ranks, KnownFabric(FABRIC, "topology.conf"), work=mesh_work(work, ranks))


def digits(*overrides: str) -> Recipe:
    return load_recipe("digits", overrides)


def test_the_parameters_are_those_of_the_traced_networks() -> None:
    for name in (name for family in FAMILIES if not family.predicts_tokens for name in family.networks):
        assert parameters(digits(f"model.name={name}")) == load_workload(name).parameters


def test_a_gpt() -> None:
    recipe = load_recipe("gpt2-124m", ["data.path=tokens"])
    model = mesh_model(recipe, Mesh(dp_shard=4, tp=2).at(8))
    assert model == MeshModel(
        parameters=124_373_760,
        layers=12,
        width=768,
        sequence=1024,
        # 480 over four ranks, twelve at once.
        samples=120,
        parts=10,
        parameter_bytes=2,
        activation_bytes=2,
    )


def test_ranks_that_replicate_are_placed_as_ever() -> None:
    assert mesh_work(digits(), 8) is None
    hosts = placed(digits())
    assert hosts.traffic is None
    assert mesh_lines(make_plan(TrainingRequest(work=digits()), MACHINE, hosts)) == []


def test_what_travels_narrow_and_how_many_samples() -> None:
    mesh = Mesh(dp_shard=2, tp=2).at(8)
    model = mesh_model(digits("precision=bf16"), mesh)
    assert (model.parameter_bytes, model.gradient_bytes, model.activation_bytes) == (2, 4, 2)
    # 64 a step over four data-parallel ranks.
    assert model.samples == 16
    assert mesh_model(digits("batch.size=null", "batch.per_rank=8"), mesh).samples == 8
    assert mesh_model(digits(), mesh).parameter_bytes == 4


def test_hosts_are_ordered_by_the_loudest_axis() -> None:
    # One rank a host: copies send less than shards, so the shards of a copy are on one leaf.
    hosts = placed(digits("mesh.dp_shard=2"), 4)
    names = [host.host for host in hosts.slots]
    assert {frozenset(names[:2]), frozenset(names[2:])} == {frozenset(("n1", "n3")), frozenset(("n2", "n4"))}
    assert hosts.traffic is not None and hosts.order is not None
    assert [sum(axis.levels[2:]) > 0 for axis in hosts.traffic.laid.axes] == [True, False]
    assert hosts.order.crossings == 2


def test_the_traffic_is_in_the_plan() -> None:
    plan = make_plan(TrainingRequest(work=digits("mesh.dp_shard=-1")), MACHINE, placed(digits("mesh.dp_shard=-1")))
    check_text("plan-mesh-of-recipe", "\n".join(mesh_lines(plan)))
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_of_a_script_neighbours_are_counted() -> None:
    plan = make_plan(TrainingRequest(work=SCRIPT), MACHINE, placed(SCRIPT))
    lines = mesh_lines(plan)
    check_text("plan-mesh-of-script", "\n".join(lines))
    # Two pairs of ranks on each host, and a ring over the hosts for each of its ranks.
    assert lines[2].split() == ["dp_shard", "4", "1", "-", "4", "4"]
    assert lines[3].split() == ["tp", "2", "1", "8", "-", "-"]
