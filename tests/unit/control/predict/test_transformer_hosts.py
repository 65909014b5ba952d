"""Predictions of language models on ranks that share the cores of hosts."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from hpctrain.common.recipes.load import load_recipe, mesh_overrides
from hpctrain.common.recipes.mesh import Mesh
from hpctrain.control.predict.calibration import Calibration, read_calibration
from hpctrain.control.predict.collectives import Ranks, allreduce
from hpctrain.control.predict.constants import constants
from hpctrain.control.predict.hardware import Hardware
from hpctrain.control.predict.network import stated_network
from hpctrain.control.predict.request import PredictionRequest, recipe_request
from hpctrain.control.predict.sweep import Sweep, SweepRow
from hpctrain.control.predict.transformers.cpu_hosts import Hosts, _swept_seconds
from hpctrain.control.predict.transformers.layout import Layout
from hpctrain.control.predict.transformers.network import parse
from hpctrain.control.predict.transformers.step import predict_step
from hpctrain.control.predict.values import drawn
from support.refusals import refused

SMALL = parse("layers=8,width=256,heads=4,vocabulary=2048,context=64")
NETWORK = stated_network(1, adapters=1, bytes_per_s=1e9)
TRUE = {"cpu.vector_flops": 2.5e11, "cpu.memory_bytes_per_s": 4e10, "cpu.kernel_s": 4e-6}


def known(**changed):
    return {**constants(), **{name: constants()[name].model_copy(update={"value": to}) for name, to in changed.items()}}


def sweep(**more):
    """What a machine with the constants of ``TRUE`` would measure on one rank."""
    found = {"model": "gpt", "device": "cpu", "ranks": 1, "cores": 2, "fixed_s": 0.0, "per_sample_s": 0.0, **more}
    rows = [SweepRow(batch=batch, median_s=1.0, spread=0.01) for batch in (2, 4, 8, 16)]
    made = Sweep(rows=tuple(rows), **found)
    values = drawn(known(**TRUE), count=0)
    timed = [row.model_copy(update={"median_s": float(_swept_seconds(made, row.batch, values)[0])}) for row in rows]
    return made.model_copy(update={"rows": tuple(timed)})


def hosts(local=2, *sweeps, engine="mpi"):
    return Hosts.of(Calibration(sweeps=sweeps), local=local, engine=engine, precision="float32")


def layout(samples=16, parts=1, **axes):
    mesh = Mesh(**axes).at(int(np.prod([*axes.values()])))
    return Layout(
        mesh=mesh,
        micro_batch=samples // mesh.data_ranks // parts,
        micro_batches=parts,
        zero=3 if mesh.sizes["dp_shard"] > 1 else 0,
        precision="float32",
        kernels="eager",
        divided_vocabulary=False,
    )


def terms(found, of):
    return predict_step(SMALL, of, found.system(NETWORK), software="hpctrain").terms


@pytest.mark.parametrize("local", [1, 2, 4])
def test_steps_of_one_rank_calibrate_another_network(local):
    measured, true = hosts(local, sweep()), replace(hosts(local, sweep()), values=drawn(known(**TRUE), count=0))
    of = layout(dp_replicate=local)
    said, wanted = (
        predict_step(SMALL, of, each.system(NETWORK), software="hpctrain").seconds for each in (measured, true)
    )
    assert said == pytest.approx(wanted, rel=0.03)
    assumed = predict_step(SMALL, of, hosts(local).system(NETWORK), software="hpctrain").seconds
    assert assumed > 1.5 * wanted


def test_ranks_share_what_a_host_computes():
    one, four = terms(hosts(1), layout(dp_replicate=1)), terms(hosts(4), layout(dp_replicate=4))
    # As many samples by four ranks, each at a fourth of the rate; the update is done by each of them.
    assert four["attention"] == pytest.approx(one["attention"])
    assert four["update"] == pytest.approx(4 * one["update"])
    # Ranks along tp each have the whole head.
    assert terms(hosts(4), layout(tp=4))["head"] > 3 * one["head"]


@pytest.mark.parametrize("engine", ["mpi", "gloo"])
def test_gradients_wait_for_their_whole_all_reduce(engine):
    found = hosts(2, engine=engine)
    ranks = Ranks(network=NETWORK, local=2, device="cpu", engine=engine)
    wanted = allreduce(4 * SMALL.parameters.total, ranks, found.values)[0]
    assert terms(found, layout(dp_replicate=2))["replicas"] == pytest.approx(wanted)


def test_groups_of_one_host_take_turns():
    two, four = terms(hosts(2), layout(samples=8, tp=2)), terms(hosts(4), layout(dp_replicate=2, tp=2))
    assert four["tensor"] == pytest.approx(2 * two["tensor"])


def test_what_starts_operators_adds_up():
    plain, sharded, tensor, copies, both = (
        terms(hosts(4), layout(samples, **axes))["matmul"]
        for samples, axes in (
            (16, {"dp_replicate": 4}),
            (16, {"dp_replicate": 2, "dp_shard": 2}),
            (8, {"tp": 2}),
            (16, {"dp_replicate": 2, "tp": 2}),
            (16, {"dp_shard": 2, "tp": 2}),
        )
    )
    assert plain < sharded < tensor < both
    assert both - tensor == pytest.approx(sharded - plain, rel=0.05)
    # FSDP2 reduces the gradients of copies of a divided model.
    assert copies == both


def test_a_pipeline_s_step_has_a_part_of_its_own():
    plain, alone, copies = (
        terms(hosts(4), layout(samples, parts=parts, **axes))
        for samples, parts, axes in (
            (16, 1, {"dp_replicate": 4}),
            (8, 2, {"pp": 2}),
            (16, 2, {"dp_replicate": 2, "pp": 2}),
        )
    )
    assert copies["matmul"] > alone["matmul"] == pytest.approx(plain["matmul"])
    assert copies["step"] == alone["step"] > plain["step"]


def test_the_order_of_meshes_is_that_of_their_processor_time():
    """Milliseconds of all ranks' processor time in a step of a GPT of 4 layers of width 128, 4 ranks over mpi."""
    measured = {
        "dp_replicate=4": 158,
        "pp=4": 272,
        "dp_replicate=2,pp=2": 278,
        "dp_shard=4": 286,
        "dp_replicate=2,dp_shard=2": 294,
        "dp_shard=2,pp=2": 295,
        "pp=2,tp=2": 515,
        "dp_replicate=2,tp=2": 591,
        "dp_shard=2,tp=2": 621,
        "tp=4": 632,
    }
    network = parse("layers=4,width=128,heads=4,vocabulary=2048,context=64")
    system = replace(hosts(4), values=drawn(known(**TRUE), count=0), cores=2, measured=1).system(NETWORK)
    said = []
    for mesh in measured:
        of = Layout.of_recipe(load_recipe("gpt2-124m", [*GPT, *mesh_overrides(mesh)]), 4)
        said.append(predict_step(network, of, system, software="hpctrain").seconds)
    pairs = [(one, two) for one, two in combinations(range(len(said)), 2)]
    right = sum(said[one] < said[two] for one, two in pairs)
    assert said[0] == min(said)
    assert right / len(pairs) > 0.9


@pytest.mark.parametrize(("cores", "waits"), [(4, 3.0), (2, 0.25), (1, 0.0)])
def test_stages_that_wait_leave_their_cores_to_others(cores, waits):
    found, of = replace(hosts(4), cores=cores), layout(parts=4, pp=4)
    step = terms(found, of)
    whole = sum(step[name] for name in ("matmul", "attention", "memory", "head")) / 4
    if cores == 4:
        assert step["bubble"] < waits * whole
        assert step["bubble"] > 0.7 * waits * whole
    else:
        assert step["bubble"] == pytest.approx(waits * whole)


GPT = [
    *("precision=float32", "model.layers=4", "model.width=128", "model.heads=4", "model.context=64"),
    *("model.vocabulary=2048", "batch.size=16", "batch.micro_batch=null", "data.path=/text"),
]


def request(*files, ranks=2, gpu="cpu", **more):
    return PredictionRequest(hardware=Hardware(gpu=gpu, gpus_per_node=ranks), nodes=[1], calibration=files, **more)


def written(path, *sweeps):
    path.write_text(json.dumps({"sweeps": [each.model_dump() for each in sweeps]}))
    return path


def test_a_recipe_on_the_cores_of_a_host(tmp_path):
    file = written(tmp_path / "sweep.json", sweep())
    assert read_calibration([file]).sweeps[0].cores == 2
    recipe = load_recipe("gpt2-124m", [*GPT, "mesh.dp_shard=-1"])
    assumed, found = recipe_request(recipe, request()), recipe_request(recipe, request(file))
    (row,), (guess,) = found.rows, assumed.rows
    assert row.step_s.low < row.step_s.value < row.step_s.high
    assert row.step_s.high / row.step_s.low < guess.step_s.high / guess.step_s.low
    assert (row.largest_batch, row.kwh, row.node_w) == (None, None, None)
    assert row.memory_bytes.value == pytest.approx(sum(row.memory_terms.values()))
    assert sum(row.step_terms.values()) == pytest.approx(row.step_s.value)
    assert len([text for text in assumed.warnings if "bench step" in text]) == 1
    assert not [text for text in found.warnings if "bench step" in text]
    assert found.constants["cpu.vector_flops"].kind == "measured"
    assert sum(cause.share for cause in found.causes) == pytest.approx(1)
    assert "compile: on" in recipe_request(load_recipe("gpt2-124m", [*GPT, "compile=on"]), request(file)).warnings[-1]


def test_what_hosts_are_not_predicted_with(tmp_path):
    recipe = load_recipe("gpt2-124m", GPT)
    for changed, key, value in (
        ({"model": "convnet"}, "found", "convnet"),
        ({"device": "h100-sxm"}, "found", "h100-sxm"),
        ({"precision": "bf16"}, "wanted", "float32"),
    ):
        file = written(tmp_path / f"{value}.json", sweep().model_copy(update=changed))
        with refused("HT-calibration-mismatch", **{key: value}):
            recipe_request(recipe, request(file))
    with refused("HT-option-not-usable-here", engine="horovod", gpu="cpu"):
        recipe_request(recipe, request(backend="horovod"))
    with refused("HT-option-not-usable-here", engine="mpi", gpu="h100-sxm"):
        recipe_request(recipe, request(gpu="h100-sxm", backend="mpi"))
    with refused("HT-option-not-usable-here"):
        recipe_request(recipe, request(written(tmp_path / "gpu.json", sweep()), gpu="h100-sxm"))
