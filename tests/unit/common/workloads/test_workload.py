"""Workloads as they are shipped and read: their sums against figures from elsewhere, their buckets against ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.common.workloads.workload import buckets, load_workload, read_workload, workload_names
from support import needs
from support.refusals import refused

# GMAC of a forward pass at 224 pixels as torchvision states them (`_ops` of its weights,
# https://docs.pytorch.org/vision/stable/models.html), and parameters.
TORCHVISION = {
    "resnet18": (1.814, 11_689_512),
    "resnet50": (4.089, 25_557_032),
    "resnet101": (7.801, 44_549_160),
}


@pytest.mark.parametrize("name", TORCHVISION)
def test_residual_networks_have_the_published_size(name: str) -> None:
    gmac, parameters = TORCHVISION[name]
    workload = load_workload(name)
    flops = sum(workload.columns["flops"])
    assert flops / 2e9 == pytest.approx(gmac, abs=0.0005)
    assert workload.parameters == parameters
    assert workload.outputs == 1000
    # Each product is there twice more, but for the gradient of the images.
    first = workload.layers[0]
    assert first.kind == "conv"
    assert sum(workload.columns["backward_flops"]) == 2 * flops - first.flops


def test_a_convolution_is_counted_as_by_hand() -> None:
    layer = load_workload("resnet50").layers[0]
    images, maps, weights = 3 * 224**2, 64 * 112**2, 64 * 3 * 7 * 7
    assert layer.flops == 2 * maps * 3 * 7 * 7
    assert layer.elements == images + maps
    assert layer.backward_elements == images + maps
    assert layer.fixed_elements == pytest.approx(weights, rel=0.02)
    assert layer.parameters == (weights,)
    norm, relu = load_workload("resnet50").layers[1:3]
    assert (norm.elements, relu.elements, relu.backward_elements) == (2 * maps, 2 * maps, 3 * maps)
    # Normalised values are never written, as ReLU takes them at once, which needs its result alone.
    assert norm.fused_elements + relu.fused_elements == 2 * maps
    assert (norm.saved_elements, relu.saved_elements) == (maps, maps)
    assert norm.mixed_saved_bytes == 2 * maps


@pytest.mark.parametrize("name", workload_names())
def test_parts_fit_together(name: str) -> None:
    workload = load_workload(name)
    assert sum(elements for elements, _ in workload.registered) == workload.parameters
    for layer in workload.layers:
        assert layer.fused_elements <= layer.elements
        assert layer.fused_backward_elements <= layer.backward_elements
        assert layer.kind != "other" or not layer.flops
    saved = sum(layer.saved_elements for layer in workload.layers)
    assert 2 * saved <= sum(layer.mixed_saved_bytes for layer in workload.layers)


def test_feature_maps_are_rounded_up() -> None:
    """At 176 pixels the last stage has 6 x 6 pixels, not 5.5 x 5.5."""
    layers = {size: load_workload("resnet50", image_size=size).layers for size in (176, 192, 224)}
    assert [each[-4].elements for each in layers.values()] == [2048 * (side**2 + 1) for side in (6, 6, 7)]
    assert load_workload("resnet50", image_size=160).sample.shape == (3, 160, 160)


@needs.pytorch
def test_the_last_layer_has_as_many_classes_as_are_asked_for() -> None:
    from shipped_workloads import RESIDUAL, residual

    for classes in (4, 1003):
        traced = residual("resnet18", RESIDUAL["resnet18"](classes), 64)
        ours = load_workload("resnet18", image_size=64, classes=classes)
        assert (ours.layers, ours.outputs, ours.buffers) == (traced.layers, classes, traced.buffers)
        assert ours.parameters == traced.parameters


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with refused("HT-choice-unknown", name="resnet5") as caught:
        load_workload("resnet5")
    assert "'resnet50'" in caught.value.hint
    with refused("HT-workload-not-of-images", sample="64", image_size=160) as caught:
        load_workload("transformer", image_size=160)
    assert "resnet101, resnet18, resnet50" in caught.value.hint
    with refused("HT-option-bad-value", image_size=31):
        load_workload("resnet18", image_size=31)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    workload = load_workload("transformer")
    workload.write(path)
    assert read_workload(path) == workload


@pytest.mark.parametrize(
    ("damage", "code", "key"),
    [
        (lambda text: text[: len(text) // 2], "HT-workload-invalid", ""),
        (lambda text: "[]", "HT-workload-invalid", ""),
        (lambda text: json.dumps({"name": "x"}), "HT-workload-invalid", "sample"),
        (lambda text: text.replace('"flops":1', '"flops":-1', 1), "HT-workload-invalid", "layers.8.flops"),
        (lambda text: text.replace('"places":[0', '"places":[7', 1), "HT-workload-invalid", ""),
    ],
)
def test_a_wrong_file_is_told(damage: object, code: str, key: str | None, tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    load_workload("transformer").write(path)
    path.write_text(damage(path.read_text()))  # type: ignore[operator]
    with refused(code, path=path, **({} if key is None else {"key": key})):
        read_workload(path)
    with refused("HT-file-unreadable", kind="workload", path=tmp_path / "none.json"):
        read_workload(tmp_path / "none.json")


def test_a_workload_is_read_without_numpy() -> None:
    program = (
        "import sys; import hpctrain.control.predict.memory; from hpctrain.common.workloads import workload; "
        "workload.load_workload('resnet50'); "
        "assert not {'numpy', 'torch'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@needs.pytorch
@pytest.mark.parametrize("name", ["resnet50", "transformer", "digits_cnn"])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(("megabytes", "compressed"), [(25.0, False), (1.0, False), (200.0, True)])
def test_buckets_are_those_of_the_ranks(name: str, in_place: bool, megabytes: float, compressed: bool) -> None:
    import torch
    from shipped_workloads import OTHERS, RESIDUAL

    from hpctrain.worker.adapters.torch.buckets import LargeGradient, make_buckets

    class Engine:
        def __init__(self) -> None:
            self.in_place = in_place

        def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(numel, dtype=dtype, device=device)

    with torch.device("meta"):
        model = (RESIDUAL | OTHERS)[name]()
        wire = torch.float16 if compressed else None
        made, _ = make_buckets(
            list(model.named_parameters()),
            Engine(),  # type: ignore[arg-type]
            name="g",
            bucket_bytes=megabytes * 1e6,
            wire=wire,
        )
    found = buckets(load_workload(name), megabytes * 1e6, in_place=in_place, compressed=compressed)
    numbers = {key: number for number, (key, _) in enumerate(model.named_parameters())}
    assert [each.members for each in found] == [tuple(numbers[slot.name] for slot in each.slots) for each in made]
    assert [each.in_place for each in found] == [isinstance(each, LargeGradient) for each in made]
    own = [
        each.slots[0].parameter.nbytes if isinstance(each, LargeGradient) else each._reduced.nbytes  # type: ignore[attr-defined]
        for each in made
    ]
    assert [each.nbytes for each in found] == own
    launched = [each.launched for each in found]
    assert launched == sorted(launched, reverse=True)
    assert launched[-1] == 0
