"""What whole batches refuse: changes that would be lost, and functions that PyTorch does not hand on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from unit.worker.adapters.batch_ranks import on_ranks, threads_as_ranks  # noqa: E402

from hpctrain.worker.adapters.torch.batch import BatchTensor, Rows  # noqa: E402
from support.refusals import refused  # noqa: E402


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    with threads_as_ranks():
        yield


def _on_rows(body: Callable[[Any], Any]) -> list[Any]:
    """What each of two ranks gives for a batch of five rows."""
    whole = torch.arange(15.0).reshape(5, 3)
    return on_ranks(
        2,
        lambda ranks: body(
            BatchTensor(whole[slice(3) if ranks.rank == 0 else slice(3, 5)].clone(), Rows(ranks, (3, 2)))
        ),
    )


def _used_after(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def body(x: Any) -> Any:
        change(x)
        return x.sum()

    return body


@pytest.mark.parametrize(
    ("change", "function"),
    [
        (lambda x: x.index_add_(0, torch.tensor([0]), torch.ones(1, 3)), "index_add_"),
        (lambda x: torch.add(x[:2, 0], 1.0, out=x[1:3, 0]), "add"),
        (lambda x: torch.nn.functional.alpha_dropout(x, 0.5, True, inplace=True), "alpha_dropout"),
        (lambda x: torch._foreach_add_([x, x], 1.0), "_foreach_add_"),
        (_used_after(lambda x: x[0].zero_()), "a change of what indexing returned"),
        (_used_after(lambda x: x[0][1:].add_(1)), "a change of what indexing returned"),
        (_used_after(lambda x: next(iter(x)).mul_(2)), "a change of what unbind returned"),
        (_used_after(lambda x: x.diagonal().fill_(1)), "a change of what diagonal returned"),
    ],
)
def test_a_change_that_would_be_lost_is_an_error(change: Callable[[Any], Any], function: str) -> None:
    with refused("HT-batch-not-whole", function=function):
        _on_rows(change)


def test_a_change_of_a_batch_that_a_view_would_show_is_an_error() -> None:
    def body(x: Any) -> Any:
        seen = x[0]
        x.add_(1)
        return seen

    with refused("HT-batch-not-whole", function="indexing"):
        _on_rows(body)


def test_what_is_computed_from_gathered_rows_may_be_changed() -> None:
    def body(x: Any) -> float:
        x[0].sum()
        x.add_(0)
        rows = [x[number] for number in range(len(x))]
        (rows[0] * 1).zero_()
        x.sort(0).values.zero_()
        x.whole().zero_()
        return float(x.sum())

    assert _on_rows(body) == [105.0, 105.0]


def test_views_of_a_batch_in_inference_mode() -> None:
    def body(x: Any) -> float:
        with torch.inference_mode():
            return float((x * 2)[4, 1:].sum())

    assert _on_rows(body) == [54.0, 54.0]


def test_a_function_that_is_not_handed_on_is_an_error() -> None:
    def body(x: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return x + 1

    with refused("HT-batch-not-whole", function="aten.add.Tensor"):
        _on_rows(body)
