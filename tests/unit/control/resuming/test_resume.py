"""The hosts that an elastic run is to have, and what counts as another work than the one that a run began with."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.mesh import Mesh
from hpctrain.common.run.plan import HostOptions, Plan, Slots
from hpctrain.control.resuming.resume import changed_work, chosen_hosts, given_hosts
from support.refusals import refused

NAMES = [f"n{number}" for number in range(1, 8)]


def plan(options: HostOptions, *, most: int | None = None, begun: int | None = None, **hosts: int) -> Plan:
    overrides = ["fault_tolerance=elastic", *([f"fault_tolerance.max_ranks={most}"] if most else [])]
    return Plan(
        recipe=load_recipe("digits", overrides),
        ranks=sum(hosts.values()),
        begun_ranks=begun,
        hosts=tuple(Slots(host=host, slots=slots) for host, slots in hosts.items()),
        host_options=options,
        threads_per_rank=1,
    )


@pytest.mark.slow
@given(
    st.dictionaries(st.sampled_from(NAMES), st.integers(1, 4)),
    st.dictionaries(st.sampled_from(NAMES), st.integers(1, 4)),
    st.none() | st.integers(1, 12),
    st.none() | st.integers(1, 5),
)
def test_what_is_chosen(given, now, most, nodes):
    run = plan(HostOptions(hostfile=Path("hosts.txt"), nodes=nodes), most=most, n1=1)
    chosen = chosen_hosts(run, given, now)
    assert chosen.keys() <= given.keys()
    assert all(0 < ranks <= given[name] for name, ranks in chosen.items())
    assert len(chosen) <= (nodes or len(given))
    fit = [*given.values()]
    if nodes is None:
        assert sum(chosen.values()) == (sum(fit) if most is None else min(most, sum(fit)))
    # Nobody makes room for a newcomer.
    if any(name not in now for name in chosen):
        assert all(chosen[name] >= min(given[name], now[name]) for name in now if name in given)
    # What it has then is what it is to have.
    assert chosen_hosts(run, given, chosen) == chosen


def test_a_list_of_hosts_does_not_grow_beyond_the_ranks_that_were_asked_for():
    options = HostOptions(hosts="n1:4,n2:4")
    run = plan(options, n1=4, n2=2)
    assert chosen_hosts(run, given_hosts(run), {"n1": 4, "n2": 2}) == {"n1": 4, "n2": 2}
    left = plan(options, begun=6, n1=4)
    assert chosen_hosts(left, given_hosts(left), {"n1": 4}) == {"n1": 4, "n2": 2}


def test_a_hostfile_is_read_as_it_is_now(tmp_path):
    file = tmp_path / "hosts.txt"
    file.write_text("n1\nn2\n")
    run = plan(HostOptions(hostfile=file), n1=3, n2=3)
    assert given_hosts(run) == {"n1": 3, "n2": 3}
    file.write_text("n1\nn2\nn3\n")
    assert given_hosts(run) == {"n1": 3, "n2": 3, "n3": 3}
    file.write_text("n1 slots=2\nn3\n")
    assert given_hosts(run) == {"n1": 2, "n3": 1}
    file.unlink()
    with refused("HT-file-unreadable", path=file):
        given_hosts(run)


def test_the_nodes_of_a_job():
    run = plan(HostOptions(), n1=2, n2=2)
    assert given_hosts(run, {"SLURM_JOB_NODELIST": "n[1-2,5]"}) == {"n1": 2, "n2": 2, "n5": 2}
    assert given_hosts(run, {}) == {"n1": 2, "n2": 2}


def a_plan() -> Plan:
    return Plan(recipe=load_recipe("digits"), framework="torch", ranks=2, threads_per_rank=1)


def test_a_batch_by_ranks_is_the_same_work_on_whatever_ranks() -> None:
    """A plan has the size for the ranks that the run was begun with; the recipe's name says the size of none."""
    recipe = load_recipe("digits", ["batch={per_rank: 24}"])
    plan = a_plan().model_copy(update={"recipe": recipe.at(3), "ranks": 2})
    assert changed_work(plan, recipe) == (plan, {})
    with refused("HT-run-other-settings", differences={"batch.size": (72, 70)}):
        changed_work(plan, load_recipe("digits", ["batch={per_rank: 35}"]))


def test_a_batch_by_ranks_is_the_same_work_under_whatever_mesh() -> None:
    recipe = load_recipe("digits", ["batch={per_rank: 24}"]).model_copy(update={"mesh": Mesh(tp=2)})
    plan = a_plan().model_copy(update={"recipe": recipe.at(6), "ranks": 6})
    assert changed_work(plan, recipe) == (plan, {})
    sharded = recipe.model_copy(update={"mesh": Mesh(dp_shard=2)})
    assert set(changed_work(plan, sharded, accept=True)[1]) == {"mesh.dp_shard", "mesh.tp"}
