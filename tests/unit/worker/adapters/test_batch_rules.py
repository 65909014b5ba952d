"""Each rule of the table against the same function of one process, on two divisions of the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from unit.worker.adapters.batch_cases import OPERANDS, Case, cases_of, name_of  # noqa: E402
from unit.worker.adapters.batch_ranks import Operand, difference, on_ranks, outcome, threads_as_ranks  # noqa: E402

from hpctrain.worker.adapters.torch.batch import elementwise  # noqa: E402
from hpctrain.worker.adapters.torch.batch.reductions import autocast_widens_sums  # noqa: E402
from hpctrain.worker.adapters.torch.batch.tensor import rules  # noqa: E402
from hpctrain.worker.adapters.torch.refusals import SINCE_2_13  # noqa: E402

pytestmark = pytest.mark.slow
# A function of elements is the same in each of PyTorch's modules, and a few show how their operands are divided.
_OF_ELEMENTS = (elementwise.elementwise, elementwise.in_place, elementwise.metadata)
_FEW = ("add", "where", "clamp", "mul_")
FUNCTIONS = list({name_of(func) if rules[func] in _OF_ELEMENTS else func: func for func in rules}.values())
# The sizes of the ranks' shares: uneven, empty, along the first dimension and along another.
DIVISIONS = {"uneven": ((3, 2), 0), "empty": ((0, 4, 1), 0), "second": ((2, 3), 1)}


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    with threads_as_ranks():
        yield


def _operands(case: Case, division: str) -> list[Operand]:
    sizes, dim = DIVISIONS[division]
    return [OPERANDS[name](sizes, dim) for name in case.operands]


def _compare(func: Callable[..., Any], case: Case, division: str) -> int:
    """How often a rule gave the result, by itself; -1 where one process gives an error.

    Raises:
        AssertionError: the ranks compute something else than one process.
    """
    operands = _operands(case, division)

    if any(each.dim >= each.whole.dim() and each.sizes is not None for each in operands):
        return 0

    def body(*values: Any) -> Any:
        return case.call(func, *values)

    try:
        theirs, twice = outcome(body, operands), True
    except Exception:
        try:
            theirs, twice = outcome(body, operands, twice=False), False
        except Exception:
            with pytest.raises(Exception):  # noqa: B017
                on_ranks(len(DIVISIONS[division][0]), lambda ranks: outcome(body, operands, ranks, twice=False))
            return -1
    used = []
    rule = rules.get(func, lambda *_: NotImplemented)

    def counted(*arguments: Any) -> Any:
        result = rule(*arguments)
        used.append(result is not NotImplemented)
        return result

    with mock.patch.dict(rules, {func: counted}):
        found = on_ranks(len(DIVISIONS[division][0]), lambda ranks: outcome(body, operands, ranks, twice=twice))
    for rank, ours in enumerate(found):
        told = difference(ours, theirs, 1e-10)
        assert not told, f"{name_of(func)} of {case}, {division}, rank {rank}: {told}"
    return sum(used)


@pytest.mark.parametrize(
    "func",
    FUNCTIONS,
    ids=lambda func: (
        f"{func.__objclass__.__name__}.{func.__name__}" if hasattr(func, "__objclass__") else name_of(func)
    ),
)
def test_a_rule_gives_what_one_process_computes(func: Callable[..., Any]) -> None:
    if name_of(func) in ("cuda", "pin_memory", "record_stream") and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    if func is torch.autograd.backward and not SINCE_2_13:
        pytest.skip("it calls no __torch_function__ there, and dispatch_backward() replaces it")
    wrong, used = [], 0
    divisions = ("uneven",) if rules[func] in _OF_ELEMENTS and name_of(func) not in _FEW else DIVISIONS
    for case in cases_of(func):
        for division in divisions:
            try:
                used += max(_compare(func, case, division), 0)
            except BaseException as error:
                wrong.append(f"{case} {division}: {type(error).__name__} {str(error)[:600]}")
    assert not wrong, "\n".join(wrong)
    # PyTorch before 2.13 has no derivative of it.
    unused = not SINCE_2_13 and name_of(func).endswith("nextafter")
    assert used or unused, "no case in which the rule has a result: it needs one in batch_cases.py"


# What PyTorch computes in another type within autocast, of scores and of classes or as many values.
_WITHIN_AUTOCAST: dict[str, Callable[[Any, Any, Any], Any]] = {
    **{
        f"cross_entropy {reduction}": lambda x, classes, _, reduction=reduction: torch.nn.functional.cross_entropy(
            x, classes, reduction=reduction
        )
        for reduction in ("none", "mean", "sum")
    },
    "label smoothing": lambda x, classes, _: torch.nn.functional.cross_entropy(x, classes, label_smoothing=0.1),
    "nll_loss": lambda x, classes, _: torch.nn.functional.nll_loss(x.log_softmax(1), classes),
    "mse_loss": lambda x, _, y: torch.nn.functional.mse_loss(x, y),
    "l1_loss": lambda x, _, y: torch.nn.functional.l1_loss(x, y, reduction="sum"),
    "bce": lambda x, _, y: torch.nn.functional.binary_cross_entropy_with_logits(x, y),
    "sum": lambda x, *_: x.sum(),
    "mean": lambda x, *_: x.mean(0),
    "norm": lambda x, *_: x.norm(dim=1),
    "product": lambda x, *_: x @ torch.ones(5, 3, dtype=x.dtype),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", _WITHIN_AUTOCAST)
def test_within_autocast_the_type_is_that_of_one_process(name, dtype):
    generator = torch.Generator().manual_seed(0)
    x, y = (Operand(torch.randn(7, 5, generator=generator).to(dtype), (4, 3)) for _ in range(2))
    classes = Operand(torch.randint(5, (7,), generator=generator), (4, 3))

    def body(*values):
        with torch.autocast("cpu", dtype):
            found = _WITHIN_AUTOCAST[name](*values)
        return found.whole() if hasattr(found, "whole") else found

    theirs = body(*(each.leaf(None) for each in (x, classes, y)))
    for found in on_ranks(2, lambda ranks: body(*(each.leaf(ranks) for each in (x, classes, y)))):
        assert found.dtype == theirs.dtype
        torch.testing.assert_close(found, theirs)


def test_on_a_gpu_autocast_adds_up_in_float32(monkeypatch):
    x = mock.Mock(is_cuda=True, dtype=torch.float16)
    assert not autocast_widens_sums(x)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    assert autocast_widens_sums(x)
    assert not autocast_widens_sums(mock.Mock(is_cuda=False, dtype=torch.float16))
    assert not autocast_widens_sums(mock.Mock(is_cuda=True, dtype=torch.float64))


def test_memory_is_that_of_a_ranks_rows():
    """A stream's copy or kernel uses them, and not a gathered whole."""
    rows = Operand(torch.arange(5.0), (3, 2))

    def body(ranks):
        batch = rows.leaf(ranks)
        pinned = rules[torch.Tensor.pin_memory](lambda own: own + 1, (batch,), {})
        used = rules[torch.Tensor.record_stream](lambda own, stream: (own, stream), (batch, "stream"), {})
        return used[0] is batch.local, used[1], pinned.local.tolist()

    assert on_ranks(2, body) == [(True, "stream", [1, 2, 3]), (True, "stream", [4, 5])]
