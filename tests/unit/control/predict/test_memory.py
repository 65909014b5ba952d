"""Memory against PyTorch's own tracker of tensors, on tensors that have shapes and no memory."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.recipes.optimizers import Optimizer, Transition
from hpctrain.common.workloads.workload import load_workload
from hpctrain.control.predict.memory import CONTEXT_BYTES, MemorySettings, memory
from support import needs
from support.refusals import refused

SGD = Optimizer(name="sgd", learning_rate=0.1, momentum=0.9, weight_decay=1e-4)
ADAM = Optimizer(name="adam", learning_rate=0.1)
LARS = Optimizer(name="lars", learning_rate=0.1, momentum=0.9, weight_decay=0.01)
TRANSITION = Transition(center=10, period=5, rmsprop_rate=0.1)


def tracked(name: str, batch: int, settings: MemorySettings) -> int:
    """The peak of the second of two steps, as MemTracker sees it."""
    import torch
    from shipped_workloads import OTHERS, RESIDUAL
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.nn import functional as F

    with FakeTensorMode():
        model = (RESIDUAL | OTHERS)[name]()
        sample = load_workload(name).sample
        x = torch.zeros(batch, *sample.shape, dtype=torch.long if sample.dtype == "int64" else None)
        y = torch.zeros(x.shape if x.dtype == torch.long else batch, dtype=torch.long)
        optimizer = torch_optimizer(settings, model)
        tracker = MemTracker()
        tracker.track_external(model, optimizer, x, y)
        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=settings.precision == "bf16"):
                    out = model(x)
                loss = F.cross_entropy(out.float().flatten(0, -2), y.flatten())
                del out
                loss.backward()
                optimizer.step()
        return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def torch_optimizer(settings: MemorySettings, model: Any) -> Any:
    import torch

    from hpctrain.worker.train.torch_rules import make_optimizer

    if settings.optimizer == SGD:
        # Together, as on a GPU.
        return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4, foreach=True)
    if settings.optimizer == ADAM:
        return torch.optim.Adam(model.parameters(), foreach=True)
    return make_optimizer(settings.optimizer, model)


def check(name: str, batch: int, settings: MemorySettings, *, within: float) -> None:
    settings = MemorySettings(**{**vars(settings), "bucket_bytes": None})
    predicted = memory(load_workload(name), batch=batch, settings=settings)
    assert predicted.allocated == pytest.approx(tracked(name, batch, settings), rel=within), predicted


@pytest.mark.long
@needs.pytorch
@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=lambda each: each.name)
@pytest.mark.parametrize("batch", [2, 32, 256])
def test_a_transformer_takes_what_is_tracked(batch: int, optimizer: Optimizer) -> None:
    check("transformer", batch, MemorySettings(optimizer=optimizer), within=0.001)


@needs.pytorch
@pytest.mark.long
@pytest.mark.parametrize(
    ("batch", "optimizer"),
    [
        pytest.param(2, SGD, marks=pytest.mark.thorough, id="2-sgd"),
        pytest.param(16, ADAM, id="16-adam"),
        pytest.param(64, SGD, marks=pytest.mark.thorough, id="64-sgd"),
    ],
)
def test_resnet50_takes_what_is_tracked(batch: int, optimizer: Optimizer) -> None:
    check("resnet50", batch, MemorySettings(optimizer=optimizer), within=0.001)


@pytest.mark.long
@pytest.mark.slow
@needs.pytorch
@pytest.mark.parametrize(
    "settings",
    [
        {"name": "lamb"},
        {"name": "lamb", "bias_correction": False, "unadapted": ("bias",)},
        {"name": "lars"},
        {"name": "lars", "momentum": 0.9},
        {"name": "lars", "momentum": 0.9, "nesterov": True, "rate_in_momentum": True},
        {"name": "lars", "momentum": 0.9, "trust_denominator": "norm_of_sum"},
        {"name": "sgd", "momentum": 0.9, "rate_in_momentum": True},
        {"name": "sgd", "momentum": 0.9, "rate_in_momentum": True, "nesterov": True},
        {"name": "rmsprop_to_sgd", "transition": TRANSITION},
        {"name": "rmsprop_to_sgd", "momentum": 0.9, "transition": TRANSITION},
    ],
    ids=repr,
)
def test_rules_of_recipes_take_what_is_tracked(settings: dict[str, Any]) -> None:
    optimizer = Optimizer(learning_rate=0.1, weight_decay=0.01, **settings)
    # Weights and biases are updated apart, which the prediction does not count.
    check("digits_cnn", 2, MemorySettings(optimizer=optimizer), within=0.003)


@pytest.mark.long
@needs.pytorch
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("resnet18", MemorySettings(optimizer=SGD, precision="bf16")),
        ("transformer", MemorySettings(optimizer=SGD, precision="bf16")),
    ],
)
def test_other_ways_to_train_take_what_is_tracked(name: str, settings: MemorySettings) -> None:
    check(name, 32, settings, within=0.02)


@pytest.mark.long
@pytest.mark.slow
@needs.pytorch
@pytest.mark.parametrize(
    ("name", "batch", "settings"),
    [
        ("convnet", 128, MemorySettings(optimizer=SGD)),
        ("convnet", 128, MemorySettings(optimizer=SGD, in_place=False, parts=2)),
        ("transformer", 8, MemorySettings(optimizer=SGD, bucket_bytes=5e6, parts=2)),
        pytest.param(
            "transformer", 8, MemorySettings(optimizer=SGD, in_place=False, parts=3), marks=pytest.mark.thorough
        ),
    ],
)
def test_buckets_take_what_is_tracked(name: str, batch: int, settings: MemorySettings) -> None:
    """On real tensors, with the buckets of ``ht.distribute``."""
    import torch
    from shipped_workloads import OTHERS, cross_entropy
    from torch.distributed._tools.mem_tracker import MemTracker

    import hpctrain as ht
    from hpctrain.worker.comm.single import SingleCommunicator

    model, sample = OTHERS[name](), load_workload(name).sample
    comm = SingleCommunicator("test")
    # A single rank has no buckets.
    comm.size = 2
    engine, buffers = comm.torch(), []

    class Engine:
        in_place = settings.in_place

        def allocate(self, *arguments: Any) -> torch.Tensor:
            buffers.append(engine.allocate(*arguments))
            return buffers[-1]

        def __getattr__(self, key: str) -> Any:
            return getattr(engine, key)

    comm.torch = Engine  # type: ignore[method-assign,assignment]
    assert settings.bucket_bytes is not None
    optimizer = torch_optimizer(settings, model)
    ht.distribute(model, optimizer, comm=comm, bucket_mb=settings.bucket_bytes / 1e6)
    x = torch.zeros(batch, *sample.shape, dtype=getattr(torch, sample.dtype))
    y = torch.zeros(x.shape if x.dtype == torch.long else batch, dtype=torch.long)
    tracker = MemTracker()
    tracker.track_external(model, optimizer, x, y, *buffers)
    with tracker:
        for part in range(2 * settings.parts):
            tracker.reset_mod_stats()
            last = part % settings.parts == settings.parts - 1
            if part % settings.parts == 0:
                optimizer.zero_grad()
            with nullcontext() if last else ht.no_sync():
                cross_entropy(model, (x, y)).backward()
            if last:
                optimizer.step()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    found = memory(load_workload(name), batch=batch, settings=settings)
    assert found.allocated == pytest.approx(peak, rel=0.001), found


@pytest.mark.slow
@given(batch=st.integers(1, 500), more=st.integers(1, 100), size=st.sampled_from([64, 160, 224]))
def test_more_samples_take_more(batch: int, more: int, size: int) -> None:
    workload = load_workload("resnet18", image_size=size)
    settings = MemorySettings(optimizer=SGD, precision="bf16")
    less, greater = (memory(workload, batch=each, settings=settings) for each in (batch, batch + more))
    assert less.allocated < greater.allocated < less.allocated * (batch + more) / batch
    assert less.used == less.allocated + less.fragmentation + CONTEXT_BYTES


def test_parts_are_as_the_settings_say() -> None:
    workload = load_workload("resnet50")

    def held(batch: int = 64, optimizer: Optimizer = ADAM, **settings: Any) -> dict[str, float]:
        found = memory(workload, batch=batch, settings=MemorySettings(optimizer=optimizer, **settings))
        return dict(found.tensors)

    found, weights = held(), 4 * 25_557_032
    assert (found["parameters"], found["optimizer"]) == (weights, 2 * weights)
    assert found["inputs"] == 64 * 3 * 224 * 224 * 4
    # A flag for each of 161 parameters travels with the last bucket.
    # What is in no bucket is reduced in place.
    in_buckets = held(in_place=False)
    assert in_buckets["buckets"] == weights + 161 * 4
    assert in_buckets["gradients"] == 0
    assert 0 < found["buckets"] < weights / 2
    # Parts add their gradients up by themselves, and the last one's go into the buckets.
    assert held(in_place=False, parts=3)["gradients"] == weights
    assert held(precision="bf16")["activations"] < 0.55 * found["activations"]
    assert held(optimizer=LARS)["optimizer"] == weights
    assert held(optimizer=Optimizer(name="sgd", learning_rate=0.1))["optimizer"] == 0
    with refused("HT-option-bad-value", batch=0):
        held(batch=0)
