"""``hpctrain bench memory``, and ``bench step --mesh``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from hpctrain.cli.bench_options import ModelOption, Ranks, TimedSteps, print_tables
from hpctrain.cli.host_options import NamedHosts
from hpctrain.cli.option_groups import with_groups
from hpctrain.cli.tables import AsJson
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.utf8 import json_text
from hpctrain.report.say import answer

MeshesOption = Annotated[
    list[str] | None,
    typer.Option(metavar="AXIS=RANKS,…", help="Time a step under this mesh, such as dp_shard=2,tp=2; repeatable."),
]


class DividedModel(StrEnum):
    """The networks of ``bench memory``."""

    transformer = "transformer"
    gpt = "gpt"


@with_groups
def memory(
    ranks: Ranks = None,
    *,
    hosts: NamedHosts,
    model: Annotated[
        DividedModel, typer.Option(help="Network of 10 or 11 million parameters; gpt also with tp.")
    ] = DividedModel.gpt,
    batch: Annotated[int, typer.Option(min=1, help="Rows of 64 tokens for each rank.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Measure the memory that a rank uses for parameters, gradients and AdamW's state, and the rest of its peak: as a
    replica, with each ZeRO stage, with recomputation and with tp, next to what the formula gives.
    """
    from hpctrain.common.run.plan import HostOptions
    from hpctrain.control.planning.mesh import SHARDING
    from hpctrain.control.programs.bench import measure
    from hpctrain.report.benchmarks import memory_rows, memory_table

    options = HostOptions(**hosts.given())
    measured = measure("memory", ranks, model, str(batch), hosts=options, environment=SHARDING)
    rows = memory_rows(measured["variants"])
    if as_json:
        about = {name: measured[name] for name in ("ranks", "hosts", "gpu", "load")}
        answer(json_text({"model": model, "batch": batch, "rows": rows, **about}))
        return
    title = f"MB of {model} on each of {measured['ranks']} ranks, {batch} rows of 64 tokens for each"
    # A load of 0, because other processes do not change the ranks' memory.
    print_tables(memory_table(rows, title), left_out={}, load=0.0)


def mesh_step(meshes: list[str], steps: TimedSteps, *, as_json: bool) -> None:
    """Time a step under each mesh.

    Raises:
        HpctrainError: a mesh is invalid, does not fit the ranks, or divides what cannot be divided in this network.
    """
    from hpctrain.common.recipes.mesh import parse_mesh
    from hpctrain.control.planning.mesh import SHARDING
    from hpctrain.control.programs.bench import measure
    from hpctrain.report.benchmarks import mesh_rows, mesh_table

    model, samples, rounds = steps.model, steps.samples, steps.rounds
    for mesh in map(parse_mesh, meshes):
        if steps.ranks:
            mesh.at(steps.ranks)
        if model != ModelOption.gpt and (mesh.tp, mesh.pp) != (1, 1):
            raise HpctrainError(
                "HT-mesh-model-only-shards",
                "--mesh {option}: {model} can only be divided by dp_shard",
                "add --model gpt",
                option=mesh.option,
                model=model,
            )
    arguments = (model, str(rounds), str(samples), str(steps.image_size or 64), *meshes)
    measured = measure("mesh_step", steps.ranks, *arguments, hosts=steps.hosts, environment=SHARDING)
    rows = mesh_rows(measured["seconds"], samples * measured["ranks"], measured["tokens_each"])
    if as_json:
        about = {name: measured[name] for name in ("oversubscribed", "ranks", "hosts", "load")}
        answer(json_text({"model": model, "batch": samples, "rounds": rounds, "rows": rows, **about}))
        return
    title = f"one step of {model} on {measured['ranks']} ranks, {samples} samples for each, {rounds} rounds"
    table = mesh_table(rows, title + (", oversubscribed" if measured["oversubscribed"] else ""))
    print_tables(table, left_out={}, load=measured["load"])
