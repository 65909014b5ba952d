"""What one training step of a network computes, moves, keeps and reduces, by layer; no framework is needed to read it.

``hpctrain.worker.tracing`` makes these from networks. Those of the recipes and of ``hpctrain bench step`` are shipped
beside this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hpctrain.common.bucket_groups import BUCKET_BYTES, BucketMember, group
from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.files.printable import dotted
from hpctrain.common.files.regular import read_text
from hpctrain.common.files.whole import write_whole

Count = Annotated[int, Field(ge=0)]
Kind = Literal["conv", "matmul", "other"]

_FLOAT_BYTES = 4
_SUFFIX = ".json"
_RESIDUAL = "resnet"
_SHIPPED = resources.files("hpctrain.common.workloads")


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Layer(_Frozen):
    """One operator of the forward pass with its part of the backward pass; those too small to count are with the one
    before.

    FLOPs (a multiply-add is 2) and elements are per sample where nothing else is said. A step with b samples moves
    ``b * elements + fixed_elements`` elements forward. Elements are of the type of the computation (4 bytes in
    float32); an int64 index counts as 2, a boolean as 1/4. What begins with ``backward_`` is of the backward pass.

    Attributes:
        name: module and operator, as ``layer1.0.conv1:convolution``.
        kind: what multiplies matrices on a GPU's matrix units: convolutions, and matrix products with attention.
        flops: of convolutions and matrix products alone.
        elements: read and written by all operators of the layer, each operator's inputs and outputs once.
        fused_elements: the same where chains of elementwise operators are one with the operator before them: a tensor
            within a chain is written only where something outside reads it, or the backward pass needs it.
        fixed_elements: moved whatever the batch: weights and their gradients, statistics.
        operators: their number, each at least one kernel.
        parameters: elements of each parameter whose gradient is complete after this layer's backward pass.
        places: the numbers of these parameters in the order of registration.
        saved_elements: floating point, kept for the backward pass from here on until after that of this layer; a tensor
            that several layers save is counted with the first.
        saved_bytes: bytes of other types (max pooling's indices), likewise.
        mixed_saved_bytes: what ``saved_elements`` take under bf16 autocast.
        narrow: under bf16 autocast its output has 2 bytes an element.
        transient_elements: floating point, in memory while the pass is here, without what is saved here or before, and
            without weights and inputs of the network; in the backward pass gradients of activations.
        fixed_transient_elements: those of the backward pass whatever the batch.
    """

    name: str
    kind: Kind = "other"
    flops: Count = 0
    backward_flops: Count = 0
    elements: Count = 0
    backward_elements: Count = 0
    fused_elements: Count = 0
    fused_backward_elements: Count = 0
    fixed_elements: Count = 0
    fixed_backward_elements: Count = 0
    operators: Count = 1
    backward_operators: Count = 0
    parameters: tuple[Count, ...] = ()
    places: tuple[Count, ...] = ()
    saved_elements: Count = 0
    saved_bytes: Count = 0
    mixed_saved_bytes: Count = 0
    narrow: bool = False
    transient_elements: Count = 0
    transient_backward_elements: Count = 0
    fixed_transient_elements: Count = 0


_FIXED = ("fixed_elements", "fixed_backward_elements", "fixed_transient_elements", "operators", "backward_operators")
_QUANTITIES = [key for key, field in Layer.model_fields.items() if field.annotation is int]
SCALED = [key for key in _QUANTITIES if key not in _FIXED]
"""The quantities of a layer that depend on the size of an image."""


class Sample(_Frozen):
    """Shape and type of one sample, without the dimension of the batch."""

    shape: tuple[Count, ...]
    dtype: str


class _Network(_Frozen):
    """A network by its layers.

    Attributes:
        sample: one input.
        layers: in forward order; gradients become ready in the reverse order.
        buffers: elements of running statistics and the like.
        outputs: elements per sample of what comes out.
        source: what traced it, with its version.
    """

    name: str
    sample: Sample
    layers: tuple[Layer, ...] = Field(min_length=1)
    buffers: Count
    outputs: Count
    source: str


class Workload(_Network):
    """One training step of a network."""

    @model_validator(mode="after")
    def _consistent(self) -> Workload:
        places = sorted(place for layer in self.layers for place in layer.places)
        if places != list(range(len(places))) or any(len(one.places) != len(one.parameters) for one in self.layers):
            raise ValueError("the places of the layers' parameters are not 0, 1, ... once each")
        return self

    @cached_property
    def parameters(self) -> int:
        """The number of elements of all parameters."""
        return sum(sum(layer.parameters) for layer in self.layers)

    @cached_property
    def registered(self) -> tuple[tuple[int, int], ...]:
        """Each parameter in the order of registration: its elements, and the index of its layer."""
        found = {
            place: (elements, index)
            for index, layer in enumerate(self.layers)
            for place, elements in zip(layer.places, layer.parameters, strict=True)
        }
        return tuple(found[place] for place in range(len(found)))

    @cached_property
    def columns(self) -> dict[str, list[float]]:
        """Each numeric quantity of the layers, in forward order."""
        return {key: [float(getattr(layer, key)) for layer in self.layers] for key in _QUANTITIES}

    def write(self, path: Path) -> None:
        """Write it where :func:`read_workload` reads it."""
        write_whole(path, (self.model_dump_json(exclude_defaults=True) + "\n").encode())


class ImageNetwork(_Network):
    """A shipped network for images of any size: each quantity as a sum over the sizes of its feature maps.

    Residual networks halve their feature maps, rounding up: a map of level k has ceil(size / 2^k)^2 pixels. Everything
    that is per sample is a sum of multiples of such areas, and of a constant. Its layers are without the quantities of
    :data:`SCALED`.

    Attributes:
        areas: for each layer, by quantity of :data:`SCALED`, (level, multiple); level -1 is the constant.
        per_class: how much each quantity of the last layers grows with each class.
        traced: the image size that the workload has where none is given.
    """

    areas: tuple[dict[str, tuple[tuple[int, int], ...]], ...]
    per_class: tuple[Layer, ...]
    traced: Count

    def at(self, image_size: int, classes: int | None = None) -> Workload:
        """The workload for images with so many pixels a side, and a last layer for so many classes."""
        if image_size < 32:
            raise HpctrainError(
                "HT-option-bad-value",
                "images of {image_size} pixels a side are too small for {name}",
                "at least 32",
                image_size=image_size,
                name=self.name,
            )
        layers = [
            layer.model_copy(
                update={
                    key: sum(multiple * area(image_size, level) for level, multiple in terms)
                    for key, terms in areas.items()
                }
            )
            for layer, areas in zip(self.layers, self.areas, strict=True)
        ]
        classes = self.outputs if classes is None else classes
        for index, growth in enumerate(self.per_class, len(layers) - len(self.per_class)):
            layers[index] = _grown(layers[index], growth, classes - self.outputs)
        return Workload(
            name=self.name,
            sample=Sample(shape=(*self.sample.shape[:-2], image_size, image_size), dtype=self.sample.dtype),
            layers=tuple(layers),
            buffers=self.buffers,
            outputs=classes,
            source=self.source,
        )


def area(image_size: int, level: int) -> int:
    """Pixels of a residual network's feature map after ``level`` halvings, each rounded up; 1 for level -1."""
    return 1 if level < 0 else (-(-image_size // 2**level)) ** 2


def _grown(layer: Layer, growth: Layer, classes: int) -> Layer:
    """A layer with so many classes more."""
    changes: dict[str, object] = {key: getattr(layer, key) + classes * getattr(growth, key) for key in _QUANTITIES}
    both = zip(layer.parameters, growth.parameters, strict=True)
    return layer.model_copy(update=changes | {"parameters": tuple(own + classes * more for own, more in both)})


def workload_names() -> list[str]:
    """The networks whose workloads are shipped."""
    return sorted(file.name.removesuffix(_SUFFIX) for file in _SHIPPED.iterdir() if file.name.endswith(_SUFFIX))


def load_workload(name: str, *, image_size: int | None = None, classes: int | None = None) -> Workload:
    """A shipped workload.

    Args:
        name: a network of a recipe or of ``hpctrain bench step``, such as ``transformer`` or ``convnet``.
        image_size: pixels a side, of residual networks; 224 by default.
        classes: outputs of a residual network's last layer; 1,000 by default.
    """
    names = workload_names()
    if name not in names:
        raise HpctrainError(
            "HT-choice-unknown", "there is no workload of a network {name!r}", nearest(name, names), name=name
        )
    text = (_SHIPPED / f"{name}{_SUFFIX}").read_text()
    if name.startswith(_RESIDUAL):
        network = ImageNetwork.model_validate_json(text)
        return network.at(image_size or network.traced, classes)
    found = Workload.model_validate_json(text)
    if image_size is not None and found.sample.shape[-2:] != (image_size, image_size):
        raise HpctrainError(
            "HT-workload-not-of-images",
            "the workload {name!r} is for samples of {sample}, not for images of {image_size} pixels a side",
            f"{', '.join(each for each in names if each.startswith(_RESIDUAL))} take any size",
            name=name,
            sample=" x ".join(map(str, found.sample.shape)) or "one number",
            image_size=image_size,
        )
    return found


# A thousand layers take some hundred thousand bytes.
_MOST_BYTES = 2**26


def read_workload(path: Path) -> Workload:
    """A workload that a trace wrote."""
    remedy = "trace the network again: hpctrain.trace(model, batch, loss).write(path)"
    text = read_text(path, "workload", remedy, limit=_MOST_BYTES)
    try:
        return Workload.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = dotted(first["loc"])
        problem = ": ".join(filter(None, [where, first["msg"]]))
        raise HpctrainError(
            "HT-workload-invalid", "{path} is not a workload: {problem}", remedy, path=path, key=where, problem=problem
        ) from error


@dataclass(frozen=True, kw_only=True)
class GradientBucket:
    """Gradients that are reduced together.

    Attributes:
        nbytes: the bytes of the buffer, with the flags that travel with the last one.
        launched: index of the layer after whose backward pass its reduction begins; buckets go strictly in order.
        in_place: one large gradient that lies where autograd put it, without a buffer.
        members: the parameters' numbers in the order of registration.
    """

    nbytes: int
    launched: int
    in_place: bool
    members: tuple[int, ...]


def buckets(
    workload: Workload, bucket_bytes: float = BUCKET_BYTES, *, in_place: bool, compressed: bool = False
) -> list[GradientBucket]:
    """The gradient buckets that ``ht.distribute`` makes for this network, in the order of their reductions.

    Args:
        bucket_bytes: a recipe's ``communication.bucket_mb`` times 10^6.
        in_place: the engine reduces in place, as NCCL, Gloo, Horovod and one process do, and `mpi` does not.
        compressed: gradients travel in a narrower type, or few of them.
    """
    members = [BucketMember(nbytes=elements * _FLOAT_BYTES) for elements, _ in workload.registered]
    found: list[GradientBucket] = []
    launched = len(workload.layers)
    for bucket in group(members, bucket_bytes, in_place=in_place, compressed=compressed):
        launched = min(launched, *(workload.registered[number][1] for number in bucket.members))
        nbytes = sum(members[number].nbytes for number in bucket.members) + bucket.flags * _FLOAT_BYTES
        found.append(GradientBucket(nbytes=nbytes, launched=launched, in_place=bucket.in_place, members=bucket.members))
    return found
