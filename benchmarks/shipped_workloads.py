"""``python benchmarks/shipped_workloads.py [NAME …]``: traces the networks whose workloads are shipped.

Writes ``hpctrain/common/workloads/NAME.json``, by default of all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

import hpctrain
from hpctrain.common.files.whole import write_whole
from hpctrain.common.recipes.families import IMAGENET_CLASSES
from hpctrain.common.workloads.workload import SCALED, ImageNetwork, Layer, Workload, area
from hpctrain.worker.bench.workloads import convnet
from hpctrain.worker.bench.workloads import workload as benchmark
from hpctrain.worker.models.torch_digits import digits_cnn
from hpctrain.worker.models.torch_resnet import resnet18, resnet50, resnet101
from hpctrain.worker.models.torch_transformer import small_encoder
from hpctrain.worker.tracing.network_trace import trace

RESIDUAL: dict[str, Callable[..., torch.nn.Module]] = {
    "resnet18": resnet18,
    "resnet50": resnet50,
    "resnet101": resnet101,
}
OTHERS: dict[str, Callable[[], torch.nn.Module]] = {
    "digits_cnn": digits_cnn,
    "transformer": small_encoder,
    "convnet": convnet,
}
_FOLDER = Path(hpctrain.__file__).parent / "common" / "workloads"
_BENCHMARKS = {"digits_cnn": "digits"}
# Other sizes give the same layers.
_SAMPLES, _IMAGE = 2, 224


def cross_entropy(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The mean over all labels of a batch."""
    return torch.nn.functional.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def residual(name: str, model: torch.nn.Module, size: int) -> Workload:
    """The step of a residual network on square images of ``size`` pixels a side."""
    batch = torch.empty(_SAMPLES, 3, size, size), torch.zeros(_SAMPLES, dtype=torch.long)
    return trace(model, batch, cross_entropy, name=name)


def other(name: str) -> Workload:
    """The step of a network with samples of one size, those of ``hpctrain bench step``."""
    made = benchmark(_BENCHMARKS.get(name, name), batch=_SAMPLES, image_size=_IMAGE, rank=0)
    # In the weights' memory layout: a CPU's convolutions would add conversions, which a trace should not count.
    return trace(OTHERS[name](), (made.x.contiguous(), made.y), cross_entropy, name=name)


def write(name: str, folder: Path) -> None:
    """Write one network's file."""
    path = folder / f"{name}.json"
    if name in OTHERS:
        other(name).write(path)
        return
    model = RESIDUAL[name]()
    narrower = residual(name, RESIDUAL[name](IMAGENET_CLASSES - 1), _IMAGE)
    network = image_network(lambda size: residual(name, model, size), narrower, traced=_IMAGE)
    write_whole(path, (network.model_dump_json(exclude_defaults=True) + "\n").encode())


# How often an image's side is halved, at most 5 times in these networks; -1 stands for the constant.
_LEVELS = (-1, 0, 1, 2, 3, 4, 5)
# Areas at these sizes are linearly independent; there are two sizes more than unknowns, which check the solution.
SIZES = (37, 50, 67, 97, 129, 163, 200, 224, 250)


def image_network(trace: Callable[[int], Workload], narrower: Workload, *, traced: int) -> ImageNetwork:
    """The network at any size, from its workloads at :data:`SIZES`.

    Args:
        trace: gives the workload for images with a side of so many pixels.
        narrower: at the default size, with one class less.
        traced: the default size, one of :data:`SIZES`.
    """
    found = [trace(size) for size in SIZES]
    base = found[SIZES.index(traced)]
    plain = {key: Layer.model_fields[key].default for key in SCALED}
    return ImageNetwork(
        name=base.name,
        sample=base.sample,
        layers=tuple(layer.model_copy(update=plain) for layer in base.layers),
        areas=tuple(_terms([each.layers[index] for each in found]) for index in range(len(base.layers))),
        per_class=_per_class(base, narrower),
        buffers=base.buffers,
        outputs=base.outputs,
        source=base.source,
        traced=traced,
    )


def _per_class(whole: Workload, narrower: Workload) -> tuple[Layer, ...]:
    """How the last layers grow with each class; every quantity of them is a constant and a multiple of the classes."""
    numbers = [key for key, field in Layer.model_fields.items() if field.annotation is int]
    found: list[Layer] = []
    for one, other in zip(whole.layers, narrower.layers, strict=True):
        if one == other:
            assert not found
            continue
        both = zip(one.parameters, other.parameters, strict=True)
        growth = {key: getattr(one, key) - getattr(other, key) for key in numbers}
        found.append(Layer(name=one.name, **growth, parameters=tuple(more - fewer for more, fewer in both)))
    return tuple(found)


def _terms(at_sizes: Sequence[Layer]) -> dict[str, tuple[tuple[int, int], ...]]:
    found = {}
    for key in SCALED:
        if terms := _solve([getattr(layer, key) for layer in at_sizes], f"{at_sizes[0].name}: {key}"):
            found[key] = terms
    return found


def _solve(values: Sequence[int], what: str) -> tuple[tuple[int, int], ...]:
    areas = np.array([[area(size, level) for level in _LEVELS] for size in SIZES], dtype=float)
    solution, *_ = np.linalg.lstsq(areas, np.array(values, dtype=float), rcond=None)
    terms = tuple((level, round(each)) for level, each in zip(_LEVELS, solution, strict=True) if round(each))
    for size, value in zip(SIZES, values, strict=True):
        got = sum(multiple * area(size, level) for level, multiple in terms)
        if got != value:
            raise ValueError(f"{what} is {value} for images of {size} pixels, and a sum of areas gives {got}")
    return terms


if __name__ == "__main__":
    for each in sys.argv[1:] or [*RESIDUAL, *OTHERS]:
        write(each, _FOLDER)
