"""A step that changes nothing is told of, and no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hpctrain.worker.adapters.torch.liveness import watch_first_steps
from hpctrain.worker.comm.single import SingleCommunicator


class _Told(SingleCommunicator):
    def __init__(self) -> None:
        super().__init__("alone")
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


class _OfOthers(torch.optim.SGD):
    """Keeps a list of its own, which is no longer that of the model."""

    def step(self, closure: object = None) -> None:
        own = self.__dict__.setdefault(
            "own", [p.detach().clone() for group in self.param_groups for p in group["params"]]
        )
        for each in own:
            each.add_(1)


@pytest.fixture
def comm() -> Iterator[_Told]:
    yield _Told()


def _steps(
    comm: _Told, make: type[torch.optim.Optimizer], model: torch.nn.Module, x: torch.Tensor, *rates: float
) -> int:
    """How often something was said in steps with these learning rates."""
    optimizer = make(model.parameters(), lr=1.0)
    watch_first_steps(comm, [optimizer])
    watch_first_steps(comm, [optimizer])
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    assert not optimizer._optimizer_step_pre_hooks or rates == (0.0,)
    return len(comm.said)


def test_what_learns_is_not_told_of(comm: _Told) -> None:
    assert _steps(comm, torch.optim.SGD, torch.nn.Linear(3, 2), torch.randn(4, 3), 0.1, 0.1) == 0


def test_a_rate_of_zero_comes_first(comm: _Told) -> None:
    assert _steps(comm, torch.optim.Adam, torch.nn.Linear(3, 2), torch.randn(4, 3), 0.0, 0.0, 0.1) == 0


def test_what_updates_others_is_told_of_once(comm: _Told) -> None:
    assert _steps(comm, _OfOthers, torch.nn.Linear(3, 2), torch.randn(4, 3), 0.0, 0.1, 0.1) == 1


def test_one_row_of_a_large_embedding(comm: _Told) -> None:
    model = torch.nn.Embedding(5000, 7, sparse=True)
    assert _steps(comm, torch.optim.SGD, model, torch.tensor([4321]), 1e-6) == 0


def test_gradients_of_zero_and_infinity(comm: _Told) -> None:
    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = _OfOthers(model.parameters(), lr=0.1)
    watch_first_steps(comm, [optimizer])
    for value in (0.0, float("inf"), float("nan")):
        model.weight.grad = torch.full_like(model.weight, value)
        optimizer.step()
    assert comm.said == []


def test_a_closure_and_complex_numbers(comm: _Told) -> None:
    weight = torch.nn.Parameter(torch.tensor([1 + 1j, 2 - 1j]))
    optimizer = torch.optim.LBFGS([weight])
    watch_first_steps(comm, [optimizer])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.abs().square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert comm.said == []
