"""The section of a recipe that says when the ranks' trainings become one: in every step by default."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeGuard

from pydantic import Field, model_validator

from hpctrain.common.files.checked_yaml import Section
from hpctrain.common.recipes.bounds import Count, Fraction, NotNegative, Positive
from hpctrain.common.recipes.own_keys import require_own_keys

if TYPE_CHECKING:
    from hpctrain.common.recipes.schema import Recipe


class Outer(Section):
    """What is done with the mean over the ranks of how far their parameters moved (Douillard et al. 2023)."""

    optimizer: Literal["none", "nesterov"] = Field(
        "none", description="take the mean as it is, or as the gradient of an SGD with Nesterov's momentum (DiLoCo)"
    )
    learning_rate: Positive = Field(0.7, description="for nesterov; the paper's value")
    momentum: Fraction = Field(0.9, description="for nesterov; the paper's value")

    @model_validator(mode="after")
    def _own_keys(self) -> Outer:
        require_own_keys(self, self.optimizer, dict.fromkeys(("learning_rate", "momentum"), ("nesterov",)))
        return self

    def uses(self, key: str) -> bool:
        """Whether a key has a meaning for this optimizer."""
        return key == "optimizer" or self.optimizer == "nesterov"


class Sync(Section):
    """Ranks that make steps by themselves, each with its own gradients and its own optimizer state.

    local: after ``every`` steps, and at the end of each epoch, all ranks' parameters are averaged (Stich 2019, arXiv
    1805.09767); with ``after_epochs`` post-local SGD (Lin et al. 2020, arXiv 1808.07217), with ``outer`` DiLoCo
    (Douillard et al. 2023, arXiv 2311.08105). async: after ``every`` steps a rank exchanges with parameters that lie in
    MPI windows of all ranks, and nobody waits for anybody but at the end of an epoch.
    """

    mode: Literal["local", "async"] = "local"
    every: Count = Field(1, description="steps that a rank takes by itself in between")
    after_epochs: NotNegative = Field(0.0, description="for local: until then gradients are averaged in every step")
    outer: Outer = Outer.defaults()
    rule: Literal["downpour", "easgd"] = Field(
        "downpour",
        description="for async: the server adds the rank's change / ranks (Dean et al. 2012), or rank and server move "
        "towards each other (Zhang et al. 2015, arXiv 1412.6651)",
    )
    moving_rate: Fraction = Field(0.9, description="for easgd: the paper's beta; each moves by beta / ranks of the way")
    staleness: Count = Field(
        8,
        description="for async: a rank waits before a step while another computes one during which all ranks started "
        "this many steps each, on average",
    )

    @model_validator(mode="after")
    def _own_keys(self) -> Sync:
        require_own_keys(self, self.mode, _OF_MODE)
        if self.mode == "async":
            require_own_keys(self, self.rule, _OF_RULE)
        return self

    def uses(self, key: str) -> bool:
        """Whether a key has a meaning in this mode and with this rule."""
        return self.mode in _OF_MODE.get(key, (self.mode,)) and self.rule in _OF_RULE.get(key, (self.rule,))


_OF_MODE = {
    **dict.fromkeys(("after_epochs", "outer"), ("local",)),
    **dict.fromkeys(("rule", "staleness", "moving_rate"), ("async",)),
}
_OF_RULE = {"moving_rate": ("easgd",)}


def in_one_word(value: object) -> object:
    """``sync: async`` says it all in one word.

    Raises:
        ValueError: another word.
    """
    if isinstance(value, str) and value != "async":
        raise ValueError(f"input should be 'async', null or a section, not {value!r}")
    return {"mode": "async"} if value == "async" else value


def is_local(sync: Sync | None) -> TypeGuard[Sync]:
    """Whether ranks' parameters are averaged now and then."""
    return sync is not None and sync.mode == "local"


def clash(recipe: Recipe) -> str | None:
    """The setting of a recipe that its ``sync`` rules out, and why; None if there is none."""
    sync = recipe.sync
    if sync is None:
        return None
    alone = "sync lets each rank take steps by itself"
    if recipe.fault_tolerance.fault_tolerant:
        return f"{alone}, and what a dead rank has learnt in them is lost; fault_tolerance: stop resumes the run"
    if recipe.communication.compression != "none" and not (
        sync.after_epochs and recipe.communication.compression != "top_k"
    ):
        return f"{alone}, without gradients for communication.compression to narrow or to keep for later steps"
    if not recipe.mesh.replicates_only:
        return f"{alone}, and no rank of mesh {recipe.mesh} has the whole model; --mesh dp_replicate=-1"
    if recipe.averaging:
        return f"{alone}, and averaging follows parameters that are equal on all ranks after each of them"
    if recipe.precision == "fp16":
        return f"{alone}, and precision: fp16 scales the loss by what overflowed on any rank; bf16 does not"
    if recipe.numbers.non_finite == "skip":
        return f"{alone}, and numbers.non_finite: skip leaves a step out on all of them; stop and roll_back work"
    if recipe.model.batch_norm.span == "world":
        return f"{alone}, and model.batch_norm.span: world joins all ranks in each"
    if sync.mode == "async" and recipe.checkpoints.every_steps:
        return "sync: async brings the ranks together at the end of an epoch only; leave checkpoints.every_steps out"
    return None
