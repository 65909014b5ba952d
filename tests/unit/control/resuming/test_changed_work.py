"""What counts as another work than the one that a run began with."""

from __future__ import annotations

import json
from pathlib import Path

from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.mesh import Mesh
from hpctrain.common.run.plan import Plan, Script
from hpctrain.control.resuming.attempts import Attempt, changed_script, script_sha256
from hpctrain.control.resuming.resume import changed_work
from support.refusals import refused


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


def test_a_script_that_has_changed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("one")
    plan = Plan(script=Script(path=script), ranks=1, hosts=(), threads_per_rank=1)
    start = Attempt().start(plan, "none")
    assert json.loads(start.model_dump_json())["script"] == script_sha256(plan)
    assert changed_script([start], script_sha256(plan)) is None
    script.write_text("two")
    assert changed_script([start], script_sha256(plan)) == (start.script, script_sha256(plan))
    script.unlink()
    assert script_sha256(plan) is None
    assert changed_script([start], None) is None
