"""The bytes of the training state that a rank holds at each ZeRO stage."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.common.recipes.mesh_traffic import aligned, bytes_text
from hpctrain.common.run.plan import Plan
from hpctrain.control.planning.mesh import parameters
from hpctrain.control.predict.zero import Stage, StateBytes, all_stages, bytes_of_parameter

_DIVIDES: Mapping[Stage, str] = {
    0: "nothing divided",
    1: "ZeRO 1: the optimizer's state",
    2: "ZeRO 2: gradients too",
    3: "ZeRO 3: parameters too",
}


def state_bytes(plan: Plan) -> Mapping[Stage, StateBytes]:
    """The state of a rank by stage; empty where no state is divided, and for scripts, whose network is not known."""
    sizes = plan.mesh.sizes
    if plan.recipe is None or sizes["dp_shard"] == 1:
        return {}
    own = parameters(plan.recipe) / (sizes["pp"] * sizes["tp"])
    return all_stages(own, bytes_of_parameter(plan.recipe.optimizer), sizes["dp_shard"] * sizes["cp"])


def state_lines(plan: Plan) -> list[str]:
    """:func:`state_bytes` as the lines of a table; a star marks the plan's stage."""
    found = state_bytes(plan)
    if not found:
        return []
    assert plan.recipe is not None
    rows = [
        (
            f"{'*' if stage == plan.recipe.sharding.zero else ' '} {_DIVIDES[stage]}",
            *map(bytes_text, (each.parameters, each.gradients, each.optimizer, each.total)),
        )
        for stage, each in found.items()
    ]
    return [*aligned([("", "parameters", "gradients", "optimizer", "together"), *rows])]
