"""Traces against what is shipped, PyTorch's own counter on a real step, and sums by hand."""

from __future__ import annotations

from typing import Any

import pytest

import hpctrain as ht
from hpctrain.common.workloads.workload import load_workload
from support import needs
from support.refusals import refused

pytestmark = needs.pytorch


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits_cnn", "transformer", "convnet"])
def test_what_ships_is_what_a_trace_finds(name: str) -> None:
    from shipped_workloads import other

    assert other(name) == load_workload(name), "python benchmarks/shipped_workloads.py writes it anew"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        # Two sizes that it was not solved from.
        ("resnet18", (160, 175)),
        pytest.param("resnet50", (224, 176), marks=pytest.mark.slow),
        pytest.param("resnet101", (192,), marks=pytest.mark.thorough),
    ],
)
def test_residual_networks_ship_as_a_trace_finds_them_at_any_size(name: str, sizes: tuple[int, ...]) -> None:
    from shipped_workloads import RESIDUAL, residual

    model = RESIDUAL[name]()
    for size in sizes:
        traced = residual(name, model, size)
        assert traced == load_workload(name, image_size=size), "python benchmarks/shipped_workloads.py writes it anew"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "transformer"])
def test_flops_are_those_of_a_real_step(name: str) -> None:
    """Attention by matrix products, as PyTorch's counter leaves out a CPU's kernel of it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from hpctrain.worker.bench.workloads import workload as benchmark

    made = benchmark(name, batch=3, image_size=32, rank=0)
    model = made.build()
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            loss = made.loss(model)
        with FlopCounterMode(display=False) as backward:
            loss.backward()  # type: ignore[no-untyped-call]
        traced = ht.trace(model, (made.x, made.y), cross_entropy)
    assert 3 * sum(traced.columns["flops"]) == forward.get_total_flops()
    assert 3 * sum(traced.columns["backward_flops"]) == backward.get_total_flops()
    shipped = load_workload({"digits": "digits_cnn"}.get(name, name))
    assert sum(shipped.columns["flops"]) == sum(traced.columns["flops"])


def cross_entropy(model: Any, batch: Any) -> Any:
    from shipped_workloads import cross_entropy as own

    return own(model, batch)


def test_a_small_network_is_counted_as_by_hand() -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2, bias=False))
    before = [each.clone() for each in model.parameters()]
    found = ht.trace(model, torch.rand(4, 6), lambda model, batch: model(batch).square().sum(), name="small")
    first, relu, second, *_ = found.layers
    assert [(each.kind, each.flops, each.backward_flops) for each in (first, relu, second)] == [
        ("matmul", 60, 60),
        ("other", 0, 0),
        ("matmul", 20, 40),
    ]
    assert (first.parameters, first.places, second.parameters, second.places) == ((30, 5), (0, 1), (10,), (2,))
    assert (first.elements, first.fixed_elements) == (6 + 5, 35)
    assert (relu.elements, relu.fused_elements, relu.saved_elements) == (10, 5, 5)
    # What went in is there anyway, and what ReLU made is kept by it.
    assert (first.saved_elements, second.saved_elements) == (0, 0)
    assert (found.name, found.parameters, found.outputs, found.sample.shape) == ("small", 45, 2, (6,))
    assert all(torch.equal(*both) for both in zip(before, model.parameters(), strict=True))
    assert all(each.grad is None for each in model.parameters())


def test_what_autocast_keeps_is_what_a_graph_keeps() -> None:
    """A CPU's autocast, with float32 where PyTorch's list for GPUs has it."""
    import torch
    from torch.nn import functional as F
    from torch.overrides import TorchFunctionMode

    class AsOnGpus(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function in (F.layer_norm, F.softmax, F.interpolate):
                args = [each.float() if isinstance(each, torch.Tensor) else each for each in args]
            return function(*args, **(kwargs or {}))

    linear = torch.nn.Linear
    model = torch.nn.Sequential(
        linear(6, 8), torch.nn.LayerNorm(8), linear(8, 8), torch.nn.GELU(), linear(8, 8), torch.nn.Softmax(-1)
    )
    model.extend([linear(8, 8), torch.nn.Upsample(scale_factor=2), torch.nn.Tanh(), linear(16, 2)])

    def kept(samples: int) -> int:
        found: dict[int, Any] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        with torch.autocast("cpu", torch.bfloat16), AsOnGpus(), hooks:
            model(torch.rand(samples, 3, 6)).sum()
        return sum(each.nbytes() for each in found.values())

    traced = ht.trace(model, torch.rand(4, 3, 6), lambda model, batch: model(batch).sum())
    assert sum(each.mixed_saved_bytes for each in traced.layers) == (kept(8) - kept(4)) / 4


def test_unused_frozen_and_shared_parameters_have_their_places() -> None:
    import torch

    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = torch.nn.Parameter(torch.zeros(7))
            self.shared = torch.nn.Linear(3, 3, bias=False)
            self.frozen = torch.nn.Linear(3, 3).requires_grad_(False)
            self.last = torch.nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.last(self.shared(self.frozen(self.shared(x))))
            return out

    found = ht.trace(Odd(), [torch.rand(2, 3)], lambda model, batch: model(batch[0]).mean())
    elements = [each for each, _ in found.registered]
    layers = [layer for _, layer in found.registered]
    assert elements == [7, 9, 6, 2]
    # Complete with the first use, and what has no gradient at the end.
    assert layers[:2] == [0, 0]
    assert layers[2] == layers[3] > 0
    assert found.buffers == 12


def test_what_cannot_be_traced_is_told() -> None:
    import torch

    class Choosing(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum().item() > 0 else x

    def mean(model: Any, batch: Any) -> Any:
        return model(batch).mean()

    batch = torch.rand(2, 3)
    with refused("HT-trace-not-possible", model="Choosing"):
        ht.trace(Choosing(3, 3), batch, mean)
    with refused("HT-trace-not-possible", model="Linear"):
        ht.trace(torch.nn.Linear(2, 4), batch[:, :2], lambda model, batch: (model(batch) @ model(batch).T).mean())
    with refused("HT-trace-not-possible") as empty:
        ht.trace(torch.nn.Linear(3, 3), "batch", mean)
    assert "no tensor with samples" in empty.value.message
    with refused("HT-trace-not-possible", name="Linear"):
        ht.trace(torch.nn.Linear(3, 3).requires_grad_(False), batch.requires_grad_(), mean)
    with refused("HT-only-in-pytorch"):
        ht.trace(object(), batch, mean)  # type: ignore[type-var]


@pytest.mark.slow
def test_recurrent_layers_are_counted() -> None:
    """Of four gates of an LSTM (Hochreiter and Schmidhuber 1997), each a product with the input and with the state."""
    import torch

    model = torch.nn.LSTM(32, 64, batch_first=True)
    found = ht.trace(model, torch.rand(2, 20, 32), lambda model, batch: model(batch)[0].sum())
    assert sum(found.columns["flops"]) == 20 * 4 * 2 * (32 * 64 + 64 * 64)
