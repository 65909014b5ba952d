"""What each axis of a transformer's mesh gets of a fabric's links, against closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fat_tree import fat_tree

from hpctrain.common.recipes.mesh import Mesh
from hpctrain.control.predict.network import Hardware
from hpctrain.control.predict.prediction import Node
from hpctrain.control.predict.prediction_request import PredictionRequest, predict, predict_request
from hpctrain.control.predict.transformers.language_prediction import AxisShares
from hpctrain.control.predict.transformers.language_training import LanguageTraining
from hpctrain.control.predict.transformers.layout import Layout
from hpctrain.control.predict.transformers.model_sizes import named

NODE = Node(gpu="h100-sxm", local=8, engine="nccl")


def hardware(tmp_path, *, up, hosts=4, down=2, rails=1):
    """Leaves with two hosts each and ``up`` cables to spines."""
    file = tmp_path / f"{hosts}-{down}-{up}-{rails}.txt"
    file.write_text(fat_tree(hosts=hosts, rails=rails, leaf_down=down, leaf_up=up))
    return Hardware(gpu="h100-sxm", gpus_per_node=8, fabric=file)


def llama(mesh, **more):
    settings = {"batch": 256}
    return LanguageTraining(name="llama3-8b", network=named("llama3-8b"), settings=settings, mesh=mesh, **more)


def row(tmp_path, mesh, hosts=4, **more):
    (network,), _ = hardware(tmp_path, hosts=max(4, hosts), **more).networks([hosts])
    return predict(llama(mesh), NODE, [network]).rows[0]


def shares(tmp_path, layout, hosts=4, **more):
    (network,), _ = hardware(tmp_path, hosts=max(4, hosts), **more).networks([hosts])
    return AxisShares(named("llama3-8b"), 8192, network, 8).of(layout)


def test_two_nodes_below_a_leaf_have_their_adapters_and_pairs_over_uplinks_what_these_leave(tmp_path):
    below = row(tmp_path, Mesh(dp_shard=16), hosts=2, up=1)
    assert below.layout["network_shares"] == {"dp_shard": 1}
    wide, narrow = (row(tmp_path, Mesh(dp_shard=16, dp_replicate=2), up=up) for up in (2, 1))
    # The shards of each copy are on the two hosts of a leaf, and copies send over the uplinks of both leaves: two hosts
    # share one cable of their rail.
    assert wide.layout["network_shares"] == {"dp_replicate": 1, "dp_shard": 1}
    assert narrow.layout["network_shares"] == {"dp_replicate": 0.5, "dp_shard": 1}
    assert narrow.step_terms["sharding"] == pytest.approx(wide.step_terms["sharding"])
    assert narrow.step_terms["replicas"] > 1.3 * wide.step_terms["replicas"]
    # All that a stated network without shared links takes.
    stated = Hardware(gpu="h100-sxm", gpus_per_node=8, adapters=1, link_bytes_per_s=50e9)
    plain = predict_request(llama(Mesh(dp_shard=16, dp_replicate=2)), PredictionRequest(hardware=stated, nodes=[4]))
    assert plain.rows[0].step_s.value == pytest.approx(wide.step_s.value)
    assert "network_shares" not in plain.rows[0].layout


def test_traffic_that_takes_twice_as_long_on_half_the_links(tmp_path):
    layout = Layout(mesh=Mesh(dp_replicate=4, dp_shard=8).at(32))
    # Each rank sends to the same one of the next host, in a ring over both leaves: one of two hosts' flows crosses.
    assert shares(tmp_path, layout, up=1) == {"dp_replicate": 1}
    # With an adapter for each GPU, every rail has leaves of its own.
    assert shares(tmp_path, layout, up=1, rails=8) == {"dp_replicate": 1}


def test_axes_within_nodes_have_no_share(tmp_path):
    layout = Layout(mesh=Mesh(dp_shard=4, tp=8).at(32), sequence_parallel=True)
    assert [*shares(tmp_path, layout, up=1)] == ["dp_shard"]
    stages = Layout(mesh=Mesh(pp=4, tp=8).at(32), micro_batches=4, zero=0)
    assert shares(tmp_path, stages, up=1) == {"pp": 1}
    # Two pipelines of two stages: what sends more is below one leaf, which the micro-batches decide.
    both = Layout(mesh=Mesh(dp_replicate=2, pp=2, tp=8).at(32), micro_batches=4, zero=0)
    assert shares(tmp_path, both, up=1) == {"pp": 0.5, "dp_replicate": 1}
    assert shares(tmp_path, replace(both, micro_batches=256), up=1) == {"pp": 1, "dp_replicate": 0.5}


def test_a_search_over_a_fabric_counts_its_links(tmp_path):
    (network,), _ = hardware(tmp_path, hosts=8, up=1, down=4).networks([8])
    found = predict(llama(None), NODE, [network]).candidates
    for each in found[:3]:
        mesh = Mesh(**{axis: each.layout[axis] for axis in ("dp_replicate", "dp_shard", "pp", "cp", "tp")})
        assert each.layout["network_shares"] == pytest.approx(
            shares(
                tmp_path,
                Layout(
                    mesh=mesh.at(64),
                    micro_batches=64,
                    schedule=each.layout.get("schedule", "1f1b"),
                    virtual_stages=each.layout.get("virtual_stages", 1),
                    zero=each.layout["zero"],
                ),
                hosts=8,
                up=1,
                down=4,
            )
        )
