"""Training scripts composed at random, each by its seed.

Every choice is drawn by the seed and its own name, so that a further one leaves the others of a seed as they are.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the ranks divide the training: the sizes of a mesh, none for replicas without one."""

    sizes: tuple[tuple[str, int], ...] = ()
    zero: int = 3
    schedule: str = ""

    def __str__(self) -> str:
        parts = [f"{axis}={size}" for axis, size in self.sizes] or ["replicas"]
        parts += [f"zero={self.zero}"] if self.size("dp_shard") != 1 else []
        return ",".join([*parts, *filter(None, [self.schedule])])

    def size(self, axis: str) -> int:
        return dict(self.sizes).get(axis, 1)


def _meshes(*zeros: int, **sizes: int) -> list[Layout]:
    return [Layout(sizes=tuple(sizes.items()), zero=zero) for zero in zeros or (3,)]


SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv")


def _pipelines(**sizes: int) -> list[Layout]:
    return [Layout(sizes=tuple(sizes.items()), schedule=name) for name in SCHEDULES]


_SHARDED = _meshes(1, 2, 3, dp_shard=-1)
LAYOUTS: dict[int, list[list[Layout]]] = {
    1: [[Layout()], _SHARDED],
    2: [[Layout()], _SHARDED, _SHARDED, _meshes(tp=2), _pipelines(pp=2)],
    3: [[Layout()], _SHARDED],
    4: [
        *([Layout()], _SHARDED, _meshes(1, 2, 3, dp_replicate=2, dp_shard=2)),
        *(_meshes(2, 3, tp=2, dp_shard=2) + _meshes(tp=2, dp_replicate=2),),
        *(_pipelines(pp=2, dp_shard=2), _pipelines(pp=2, dp_replicate=2)),
    ],
}
DIVISIONS = {
    "even": (24, 12, False),
    "uneven": (21, 7, False),
    "short last": (18, 8, False),
    "one in the last": (17, 8, False),
    "drop_last": (17, 7, True),
}
"""Samples, batch size and drop_last. 12 divides evenly over 1 to 4 ranks."""

OPTIMIZERS = (
    *("sgd", "momentum", "nesterov", "adam", "adamw", "adagrad", "rmsprop"),
    *("lbfgs", "closure", "several", "groups"),
)
CHOICES: dict[str, tuple[Any, ...]] = {
    "ranks": (1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4),
    "backend": ("mpi", "gloo"),
    "units": (True, True, False),
    "micro_batches": (2, 2, 4),
    "network": ("mlp", "convnet", "transformer"),
    "frozen": (False, False, True),
    "recompute": ("", "", "reentrant", "not reentrant", "plan"),
    "output": ("tensor", "dict", "tuple", "dataclass"),
    "loss_inside": (False, False, True),
    "calls": ("one", "one", "two", "parts"),
    "loss": ("mean", "mean", "mean", "mean", "masked", "sum", "weights"),
    "counted": (True, True, False),
    "loss_form": ("function", "module"),
    "optimizer": OPTIMIZERS,
    "clip": ("", "", "norm", "value"),
    "accumulate": (1, 1, 2, 3),
    "schedule": ("", "step", "cosine", "plateau"),
    "division": tuple(DIVISIONS),
    "shuffled": (True, False),
    "lengths": (False, True),
    "evaluate": (False, True),
    "test_samples": (12, 12, 11),
    "average": ("", "", "", "before", "after"),
    "compiled": ("", "", "", "", "before", "after"),
}


@dataclass(frozen=True, kw_only=True)
class Composition:
    """One training script and the ranks that it runs on."""

    seed: int
    layout: Layout
    ranks: int
    backend: str
    units: bool
    micro_batches: int
    network: str
    frozen: bool
    recompute: str
    output: str
    loss_inside: bool
    calls: str
    loss: str
    counted: bool
    loss_form: str
    optimizer: str
    clip: str
    accumulate: int
    schedule: str
    division: str
    shuffled: bool
    lengths: bool
    evaluate: bool
    test_samples: int
    average: str
    compiled: str

    def __str__(self) -> str:
        said = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("seed", "ranks", "backend", "layout")
        }
        if not self.layout.schedule:
            del said["micro_batches"]
        if not self.evaluate:
            del said["test_samples"]
        words = [f"{name}={value}" for name, value in said.items() if value is not False and value != ""]
        return f"{self.ranks} x {self.backend}, {self.layout}: {' '.join(words)}"


def drawn(seed: int, *, hub: bool = False) -> Composition:
    """The composition of a seed, such as one process can run.

    Args:
        hub: its network is one of Hugging Face's.
    """
    chosen = {name: _random(seed, name).choice(choices) for name, choices in CHOICES.items()}
    layout = _random(seed, "layout").choice(_random(seed, "kind").choice(LAYOUTS[chosen["ranks"]]))
    if hub:
        layout = layout if layout.size("tp") == layout.size("pp") == 1 else Layout()
        chosen |= {"network": "llama", "calls": "one", "recompute": ""}
        if chosen["optimizer"] == "lbfgs":
            # Its line searches make much of rounding errors, and parts of Llama compute in float32 always.
            chosen["optimizer"] = "closure"
    chosen |= _ruled_out(chosen, layout)
    if not _compiles(chosen, layout):
        chosen["compiled"] = ""
    return Composition(seed=seed, layout=layout, **chosen)


def _random(seed: int, name: str) -> random.Random:
    return random.Random(f"{seed} {name}")


def _ruled_out(chosen: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """What has to differ from the choices, because they contradict each other."""
    other: dict[str, Any] = {}
    if layout.size("pp") > 1:
        # Its stages take and return one tensor.
        other |= {"network": "transformer", "output": "tensor", "loss_inside": False, "calls": "one", "average": ""}
        other |= {"optimizer": "adamw"} if chosen["optimizer"] in ("lbfgs", "closure") else {}
        other |= {"recompute": ""} if chosen["recompute"] == "reentrant" else {}
        # As its pages say: a pipeline is told what its loss is divided by. It refuses a sum.
        other["counted"] = chosen["loss"] != "sum"
    elif layout.size("tp") > 1 and chosen["network"] == "convnet":
        other["network"] = "mlp"
    if chosen["calls"] == "parts":
        other |= {"output": "tensor", "loss_inside": False}
    if chosen["recompute"] == "plan" and not layout.sizes:
        other["recompute"] = ""
    if chosen["recompute"] == "reentrant" and chosen["frozen"]:
        # Nothing that goes in requires a gradient.
        other["recompute"] = "not reentrant"
    if chosen["optimizer"] in ("lbfgs", "closure"):
        other |= {"accumulate": 1, "clip": ""}
    if chosen["schedule"] == "plateau":
        other["evaluate"] = True
    if chosen["loss"] == "mean":
        other["counted"] = False
    if {**chosen, **other}["network"] not in ("transformer", "llama"):
        other["lengths"] = False
    return other


def _compiles(chosen: dict[str, Any], layout: Layout) -> bool:
    """Whether PyTorch 2.13 can compile a call of the whole model."""
    if layout.size("tp") > 1 and (chosen["recompute"] or chosen["lengths"]):
        return False
    return layout.size("pp") == 1 and chosen["calls"] != "parts" and chosen["recompute"] != "reentrant"
