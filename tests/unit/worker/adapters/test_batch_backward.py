"""The gradients of a backward pass that begins at a loss which was added up over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import cross_entropy  # noqa: E402
from unit.worker.adapters.batch_ranks import on_ranks, threads_as_ranks  # noqa: E402

from hpctrain.worker.adapters.torch.batch import BatchTensor, Rows  # noqa: E402


def _hooked(loss: Any) -> None:
    loss.register_hook(lambda gradient: gradient * 2)
    loss.backward()


def _kept(loss: Any) -> None:
    loss.retain_grad()
    loss.backward()
    assert loss.grad == 1


def _twice(loss: Any) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize(
    "begin",
    [
        lambda loss: loss.backward(),
        lambda loss: torch.autograd.backward([loss]),
        _twice,
        lambda loss: loss.backward(torch.tensor(3.0)),
        lambda loss: torch.autograd.backward([loss, loss * 2]),
        _hooked,
        _kept,
    ],
)
@pytest.mark.parametrize(
    "loss", [lambda x: cross_entropy(x, torch.tensor([0, 2, -100, 1, 1])), lambda x: x.pow(2).mean()]
)
def test_the_gradient_of_a_loss_is_that_of_one_process(
    begin: Callable[[Any], None], loss: Callable[[Any], Any]
) -> None:
    whole = torch.linspace(-1, 1, 15).reshape(5, 3)
    alone = whole.clone().requires_grad_()
    begin(loss(alone))

    def body(ranks: Any) -> torch.Tensor:
        rows = Rows(ranks, (3, 2))
        x = BatchTensor(whole.narrow(0, rows.begin, rows.size).clone().requires_grad_(), rows)
        begin(loss(x))
        return x.grad.whole()

    with threads_as_ranks():
        for gradient in on_ranks(2, body):
            torch.testing.assert_close(gradient, alone.grad)
