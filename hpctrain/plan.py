"""The plan: everything that decides the numbers of one run and how its ranks are started.

The login half writes it to ``plan.json``; every rank reads it from there. The two halves share nothing else.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from hpctrain.recipes.schema import Framework, Recipe

BACKENDS = ("auto", "horovod", "single")


class Script(BaseModel):
    """A user's own training script."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path
    arguments: tuple[str, ...] = ()


class Slots(BaseModel):
    """The places for ranks on one host."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str
    slots: int = Field(ge=1)


class Plan(BaseModel):
    """One run. Exactly one of ``recipe`` and ``script`` is set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: Recipe | None = None
    script: Script | None = None
    framework: Framework | None = Field(None, description="None for a script: it chooses by itself")
    backend: str = "auto"
    ranks: int = Field(ge=1)
    hosts: tuple[Slots, ...]
    threads_per_rank: int = Field(ge=1)
    versions: dict[str, str] = Field(default_factory=dict, description="of the packages that decide the numbers")

    @property
    def title(self) -> str:
        """The recipe's name, or the script's file name."""
        if self.recipe:
            return self.recipe.name
        assert self.script is not None
        return self.script.path.name
