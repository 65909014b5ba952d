"""The section of a recipe that says when the ranks' trainings become one: in every step by default."""

from __future__ import annotations

from typing import Annotated, Literal, TypeGuard

from pydantic import Field

from hpctrain.common.recipes.keys import CheckedSection, Count, Fraction, NotNegative, Of, Positive

_LOCAL, _ASYNC = Of("mode", "local"), Of("mode", "async")
_NESTEROV = Of("optimizer", "nesterov")


class Outer(CheckedSection):
    """What is done with the mean over the ranks of how far their parameters moved (Douillard et al. 2023)."""

    optimizer: Literal["none", "nesterov"] = Field(
        "none", description="take the mean as it is, or as the gradient of an SGD with Nesterov's momentum (DiLoCo)"
    )
    learning_rate: Annotated[Positive, _NESTEROV] = Field(0.7, description="the paper's value")
    momentum: Annotated[Fraction, _NESTEROV] = Field(0.9, description="the paper's value")


class Sync(CheckedSection):
    """Ranks that make steps by themselves, each with its own gradients and its own optimizer state.

    local: after ``every`` steps, and at the end of each epoch, all ranks' parameters are averaged (Stich 2019, arXiv
    1805.09767); with ``after_epochs`` post-local SGD (Lin et al. 2020, arXiv 1808.07217), with ``outer`` DiLoCo
    (Douillard et al. 2023, arXiv 2311.08105). async: after ``every`` steps a rank exchanges with parameters that lie in
    MPI windows of all ranks, and nobody waits for anybody but at the end of an epoch.
    """

    mode: Literal["local", "async"] = Field(
        "local", description="steps of its own between averages, or no waiting for other ranks"
    )
    every: Count = Field(1, description="steps that a rank takes by itself in between")
    after_epochs: Annotated[NotNegative, _LOCAL] = Field(
        0.0, description="until then gradients are averaged in every step"
    )
    outer: Annotated[Outer, _LOCAL] = Outer.defaults()
    rule: Annotated[Literal["downpour", "easgd"], _ASYNC] = Field(
        "downpour",
        description="the server adds the rank's change / ranks (Dean et al. 2012), or rank and server move "
        "towards each other (Zhang et al. 2015, arXiv 1412.6651)",
    )
    moving_rate: Annotated[Fraction, _ASYNC, Of("rule", "easgd")] = Field(
        0.9, description="the paper's beta; each moves by beta / ranks of the way"
    )
    staleness: Annotated[Count, _ASYNC] = Field(
        8,
        description="a rank waits before a step while another computes one during which all ranks started "
        "this many steps each, on average",
    )


def is_local(sync: Sync | None) -> TypeGuard[Sync]:
    """Whether ranks' parameters are averaged now and then."""
    return sync is not None and sync.mode == "local"
