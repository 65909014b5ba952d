"""Random computations with batches, on one to four ranks, against one process: values, gradients, gradients of these.

HPCTRAIN_BATCH_EXPRESSIONS=5000 pytest … tries so many; the suite a few.
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from unit.worker.adapters.batch_expressions import Expression  # noqa: E402
from unit.worker.adapters.batch_ranks import Operand, Outcome, difference, on_ranks, outcome, threads_as_ranks  # noqa: E402

from hpctrain.common.errors import HpctrainError  # noqa: E402

EXAMPLES = int(os.environ.get("HPCTRAIN_BATCH_EXPRESSIONS", "50"))
TOLERANCE = 1e-10


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
        except RuntimeError:
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
    try:
        found = on_ranks(
            expression.ranks,
            lambda ranks: outcome(expression, expression.operands, ranks, twice=theirs[1]),
        )
    except HpctrainError as error:  # what changes a view of gathered rows is refused by name
        assert error.code == "HT-batch-not-whole", f"{error}\n{expression}"
        return False
    for rank, ours in enumerate(found):
        told = difference(ours, theirs[0], TOLERANCE)
        assert not told, f"rank {rank}: {told}\n{expression}"
    return True


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(0, 10**9))
def test_ranks_compute_what_one_process_computes(seed: int) -> None:
    with threads_as_ranks():
        assume(check(seed))
