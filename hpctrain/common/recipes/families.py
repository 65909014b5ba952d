"""The families of networks, one entry each: all that other modules know of one.

``hpctrain.worker.models.FRAMEWORK_MODULE`` has the networks of a family under their names, and ``GPT``. A new family is
an entry here, those modules, and its own keys in a recipe's model section.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hpctrain.common.recipes.mesh import Axis

Framework = Literal["torch", "keras"]
ModelName = Literal["digits_cnn", "resnet18", "resnet50", "resnet101", "gpt"]

IMAGENET_CLASSES = 1000
"""The classes that are assumed where neither a recipe nor its data say how many there are."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """One network.

    Attributes:
        parameters: how many it has with the usual classes of its data; 0 where a recipe's keys decide.
        per_class: the parameters of one class more; 0 where the classes are fixed.
        block: the class of its repeated modules in PyTorch, whose parameters a mesh gathers together, which are
            recomputed as one and compiled once; empty where it has none.
    """

    parameters: int = 0
    per_class: int = 0
    block: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """Networks of one kind.

    Attributes:
        data: the data sets that they train on, by their names in recipes.
        frameworks: those that there is a network for.
        axes: those of a mesh along which they can be divided besides dp_replicate and dp_shard; with ``pp`` they have
            blocks.
        normalises: whether they compute statistics over the images of a batch.
        smoke: the model's keys in a small run. Every size divides by two, and two pipeline stages have two blocks each.
    """

    module: str
    networks: Mapping[str, Network]
    data: tuple[str, ...]
    frameworks: tuple[Framework, ...] = ("torch", "keras")
    axes: tuple[Axis, ...] = ()
    normalises: bool = False
    smoke: Mapping[str, int] = field(default_factory=dict)

    @property
    def predicts_tokens(self) -> bool:
        """Whether it is a transformer, whose sizes a recipe says and whose loss is that of the next token."""
        return self.data == ("text",)


FAMILIES = (
    ModelFamily(module="digits", networks={"digits_cnn": Network(parameters=89_930)}, data=("digits", "imagenet")),
    ModelFamily(
        module="resnet",
        networks={
            "resnet18": Network(parameters=11_689_512, per_class=513, block="Basic"),
            "resnet50": Network(parameters=25_557_032, per_class=2_049, block="Bottleneck"),
            "resnet101": Network(parameters=44_549_160, per_class=2_049, block="Bottleneck"),
        },
        data=("digits", "imagenet"),
        normalises=True,
    ),
    ModelFamily(
        module="gpt",
        networks={"gpt": Network(block="Block")},
        data=("text",),
        frameworks=("torch",),
        axes=("pp", "tp"),
        smoke={"layers": 4, "heads": 4, "width": 64, "context": 64},
    ),
)


def family_of(name: str) -> ModelFamily:
    """The family of a network, by the network's name."""
    return next(family for family in FAMILIES if name in family.networks)


def network(name: str) -> Network:
    """A network by its name."""
    return family_of(name).networks[name]


def names(*, normalising: bool) -> str:
    """The networks with or without batch normalisation, separated by spaces."""
    return " ".join(name for family in FAMILIES if family.normalises == normalising for name in family.networks)
