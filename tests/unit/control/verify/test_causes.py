from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hpctrain.common.run.step_records import RankFacts, StepRecord
from hpctrain.control.verify.causes import as_ddp, cause
from hpctrain.control.verify.differences import compare
from support.step_records import step

W = np.linspace(-1, 1, 9)
ONE = [step({"w": W, "b": [1.0]}, {"w": 2 * W, "b": [2.0]}, samples=[1.0, 2.0])]


def _cause(*ranks: Sequence[StepRecord], one: list[StepRecord] = ONE, **facts: Any) -> str:
    known = RankFacts(**facts)
    return cause(
        compare(one, one, [list(each) for each in ranks]), (known, one), [(known, list(each)) for each in ranks]
    )


def _rank(by: float = 1, parameter: float = 2, bias: float = 1, **rest: list[float]) -> list[StepRecord]:
    samples = rest.get("samples", [])
    return [step({"w": by * W, "b": [by * bias]}, {"w": parameter * W, "b": [parameter * bias]}, samples=samples)]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((ONE, []), "different numbers of updates: 1, 0"),
        ((_rank(samples=[1.0]), _rank(samples=[5.0])), "other samples"),
        ((_rank(2, 3), _rank(2, 3)), "2 times those of one process, on 2 ranks"),
        ((_rank(0.5, 3, samples=[5.0]), _rank(0.5, 3, samples=[6.0])), "0.5 times those of one process"),
        ((_rank(1.3, 3, samples=[5.0]), _rank(1.3, 3, samples=[6.0])), "other samples"),
        ((_rank(1.3, 3), _rank(1.3, 3)), "ht.mean_loss"),
        ((_rank(1, 3), _rank(1, 3)), "the optimizer, its learning rate"),
        ((_rank(1, 3), _rank(2, 4)), "each rank trains by itself"),
        ((_rank(1, 3, samples=[1.0]), _rank(2, 4, samples=[5.0])), "each rank trains by itself"),
        ((_rank(1, 3), _rank(1, 4)), "w, b differ between ranks"),
    ],
)
def test_the_evidence_tells_the_cause(ranks: tuple[list[StepRecord], ...], words: str) -> None:
    assert words in _cause(*ranks)


def test_ranks_that_average_gradients_of_samples_of_their_own_are_as_ddp() -> None:
    def rank(own: float, sample: float, by: float) -> tuple[RankFacts, list[StepRecord]]:
        return RankFacts(), [step({"w": by * W}, {"w": 2 * W}, own={"w": own * W}, samples=[sample])]

    for by in (2.0, 1.0):  # clipped
        ranks = [rank(1, 5.0, by), rank(3, 6.0, by)]
        assert "the means of what the ranks computed" in as_ddp(compare(ONE, ONE, [steps for _, steps in ranks]), ranks)
    ranks = [rank(1, 5.0, 4.0), rank(3, 6.0, 4.0)]
    found = compare(ONE, ONE, [steps for _, steps in ranks])
    assert not as_ddp(found, ranks)
    whole = [(RankFacts(batches=True), rank(own, 5.0, 2.0)[1]) for own in (1, 3)]
    assert not as_ddp(compare(ONE, ONE, [steps for _, steps in whole]), whole)


def test_numbers_that_are_not_finite_are_equal_to_nothing() -> None:
    one = [step({"w": W}, {"w": math.nan * W, "b": [1.0]})]
    assert compare(one, one, [one, one]).different == []
    assert "no finite numbers, in w:" in _cause(one, one, one=one)
