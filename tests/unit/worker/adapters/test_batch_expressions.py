"""Random computations with batches, on one to four ranks, against one process: values, gradients, gradients of these.

Each is made of calls of batch_cases.py, in which results of earlier calls take the place of operands.
HPCTRAIN_BATCH_EXPRESSIONS=5000 pytest … tries so many; the suite a few.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.utils._pytree import tree_leaves  # noqa: E402
from unit.worker.adapters.batch_cases import COMPOSED, OPERANDS, Case, cases_of  # noqa: E402
from unit.worker.adapters.batch_ranks import Operand, Outcome, difference, on_ranks, outcome, threads_as_ranks  # noqa: E402

from hpctrain.common.errors import HpctrainError  # noqa: E402
from hpctrain.worker.adapters.torch.batch import derivatives, elementwise  # noqa: E402
from hpctrain.worker.adapters.torch.batch.tensor import rules  # noqa: E402

EXAMPLES = int(os.environ.get("HPCTRAIN_BATCH_EXPRESSIONS", "50"))
TOLERANCE = 1e-10
_LARGEST = 2000
# What needs a leaf, or gives something else than values.
_ALONE = (
    *(derivatives.backward, derivatives.torch_backward, derivatives.grad, elementwise.requires_grad),
    *(elementwise.retain_grad, elementwise.register_hook, elementwise.set_data, elementwise.metadata, elementwise.data),
    *(elementwise.deepcopy, elementwise.new),
)
# By rule, as there are many functions of each element; their rule counts several times.
_RULES = [rule for rule in dict.fromkeys(rules.values()) if rule not in _ALONE] + 5 * [elementwise.elementwise]
_GROUPS = [[func for func in rules if rules[func] is rule] for rule in _RULES]


class Expression:
    """A computation that can be made again with other tensors of the same shapes.

    Attributes:
        ranks: the number of ranks.
        operands: what it starts from.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.ranks = rng.randint(1, 4)
        self._total, self._dim = rng.choice([0, 1, 2, 3, 4, 5, 5, 5, 7]), rng.choice([0, 0, 0, 1])
        self._sizes = self._division()
        self._names: list[str] = []
        self.operands: list[Operand] = []
        # Of each step: the call, what it is called with, and which tensor of its result counts.
        self._steps: list[tuple[Any, Case, list[Any], int]] = []
        self._results: list[torch.Tensor] = []
        for _ in range(rng.randint(2, 6)):
            self._extend()

    def __call__(self, *leaves: Any) -> list[Any]:
        found: list[Any] = []
        results: list[Any] = []
        for func, case, places, which in self._steps:
            found.append(case.call(func, *(self._value(place, leaves, results) for place in places)))
            results.append(_tensors(found[-1])[which])
        return found

    def __str__(self) -> str:
        pairs = zip(self._names, self.operands, strict=True)
        operands = [f"{name}: {each.sizes}, dimension {each.dim}" for name, each in pairs]
        steps = [f"{number}: {func} {case} of {places}" for number, (func, case, places, _) in enumerate(self._steps)]
        return "\n".join([f"{self.ranks} ranks", *operands, *steps])

    def _value(self, place: int | str, leaves: Any, results: list[Any]) -> Any:
        return results[place] if isinstance(place, int) else leaves[self._names.index(place)]

    def _division(self) -> tuple[int, ...]:
        cuts = sorted(self._rng.randint(0, self._total) for _ in range(self.ranks - 1))
        return tuple(end - begin for begin, end in zip([0, *cuts], [*cuts, self._total], strict=True))

    def _place(self, name: str) -> int | str:
        """An earlier result, or an operand, most of which are divided alike."""
        if self._results and self._rng.random() < 0.6:
            return self._rng.choice([len(self._results) - 1, self._rng.randrange(len(self._results))])
        if name not in self._names:
            operand = OPERANDS[name](self._sizes if self._rng.random() < 0.8 else self._division(), self._dim)
            if operand.sizes is not None and operand.dim >= operand.whole.dim():
                raise ValueError("no dimension for the rows")
            self._names.append(name)
            self.operands.append(operand)
        return name

    def _extend(self) -> None:
        for _ in range(20):
            func = self._rng.choice(self._rng.choice(_GROUPS)) if self._rng.random() < 0.8 else None
            case = self._rng.choice(COMPOSED if func is None else cases_of(func))
            with torch.random.fork_rng(devices=[]):
                try:
                    places = [self._place(name) for name in case.operands]
                    wholes = [each.whole for each in self.operands]
                    values = [self._value(place, wholes, self._results).clone() for place in places]
                    tensors = _tensors(case.call(func, *values))
                except Exception:
                    continue
            which = self._rng.randrange(len(tensors)) if tensors else 0
            if not tensors or not _is_usual(tensors[which]):
                continue
            self._steps.append((func, case, places, which))
            self._results.append(tensors[which].detach())
            return


def _tensors(value: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]


def _is_usual(value: torch.Tensor) -> bool:
    if value.numel() > _LARGEST or value.dim() > 5 or value.dtype in (torch.float16, torch.bfloat16):
        return False
    numbers = value.is_floating_point() or value.is_complex()
    return not numbers or bool((value.isfinite() & (value.abs() < 1e4)).all())


def _moved(operand: Operand) -> Operand:
    """The same but for rounding."""
    if not operand.whole.is_floating_point():
        return operand
    whole = operand.whole * (1 + 1e-14 * torch.cos(torch.arange(operand.whole.numel())).reshape(operand.whole.shape))
    return Operand(whole, operand.sizes, operand.dim, operand.gradient, operand.reduced)


def _one_process(expression: Expression) -> tuple[Outcome, bool] | None:
    """What one process computes; None where rounding decides it."""
    for twice in (True, False):
        try:
            found = outcome(expression, expression.operands, twice=twice)
            moved = outcome(expression, [_moved(each) for each in expression.operands], twice=twice)
        except (RuntimeError, TypeError):
            continue
        numbers = [each for _, each in found if each is not None and each.is_floating_point()]
        if any(each.numel() and float(each.abs().nan_to_num(0).max()) > 1e8 for each in numbers):
            return None
        return None if difference(moved, found, TOLERANCE / 50) else (found, twice)
    return None


def check(seed: int) -> bool:
    """Whether an expression says anything.

    Raises:
        AssertionError: the ranks compute something else.
    """
    expression = Expression(random.Random(seed))
    theirs = _one_process(expression)
    if theirs is None:
        return False
    wanted, twice = theirs
    try:
        found = _on_ranks(expression, twice=twice)
    except HpctrainError as error:  # what changes a view of gathered rows is refused by name
        assert error.code == "HT-batch-not-whole", f"{error}\n{expression}"
        return False
    except IndexError:
        # PyTorch does not look at the dimensions that it is given for tensors without elements.
        if all(each.numel() for each in expression._results):
            raise
        return False
    except (RuntimeError, AssertionError):
        # PyTorch lacks some second derivatives of tensors without elements, such as a rank's rows of a small batch:
        # those of embeddings, of cdist, and of views that were overwritten.
        if not twice or not any(0 in (each.sizes or ()) for each in expression.operands):
            raise
        wanted, found = outcome(expression, expression.operands, twice=False), _on_ranks(expression, twice=False)
    for rank, ours in enumerate(found):
        told = difference(ours, wanted, TOLERANCE)
        assert not told, f"rank {rank}: {told}\n{expression}"
    return True


def _on_ranks(expression: Expression, *, twice: bool) -> list[Outcome]:
    return on_ranks(expression.ranks, lambda ranks: outcome(expression, expression.operands, ranks, twice=twice))


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(0, 10**9))
def test_ranks_compute_what_one_process_computes(seed: int) -> None:
    with threads_as_ranks():
        assume(check(seed))
