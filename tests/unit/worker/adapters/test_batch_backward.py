"""What a backward pass sends that begins at a loss which was added up over the ranks, and which gradients it gives."""

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
    ("begin", "sums"),
    [
        (lambda loss: loss.backward(), 0),
        (lambda loss: torch.autograd.backward([loss]), 0),
        (_twice, 0),
        (lambda loss: loss.backward(torch.tensor(3.0)), 1),
        (lambda loss: (loss * 2).backward(), 1),
        (lambda loss: torch.autograd.backward([loss, loss * 2]), 1),
        (_hooked, 1),
        (_kept, 1),
    ],
)
@pytest.mark.parametrize(
    "loss", [lambda x: cross_entropy(x, torch.tensor([0, 2, -100, 1, 1])), lambda x: x.pow(2).mean()]
)
def test_the_gradient_of_a_loss_is_added_up_where_it_may_differ(
    begin: Callable[[Any], None], sums: int, loss: Callable[[Any], Any]
) -> None:
    whole = torch.linspace(-1, 1, 15).reshape(5, 3)
    alone = whole.clone().requires_grad_()
    begin(loss(alone))

    def body(ranks: Any) -> tuple[torch.Tensor, int]:
        rows, names = Rows(ranks, (3, 2)), []
        x = BatchTensor(whole.narrow(0, rows.begin, rows.size).clone().requires_grad_(), rows)
        value, add_up = loss(x), ranks.sum
        ranks.sum = lambda own, name: (names.append(name), add_up(own, name))[1]
        begin(value)
        return x.grad.whole(), len(names)

    with threads_as_ranks():
        for gradient, sent in on_ranks(2, body):
            assert sent == sums
            torch.testing.assert_close(gradient, alone.grad)
