from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hpctrain.common.run.step_records import SUMS, RankFacts, StepFiles, projection, read_ranks
from support.refusals import refused
from support.step_records import step

# Around the number of elements that are kept as they are, and around the parts in which others are read.
sizes = pytest.mark.parametrize("size", [0, 1, 7, SUMS, SUMS + 1, 5000, 2**20, 2**20 + 3, 2**21 + 1])


def _tensor(seed: int, size: int) -> NDArray[np.float64]:
    generator = np.random.default_rng(seed)
    # As gradients are: some elements are much larger than others.
    return generator.standard_normal(size) * np.exp(generator.standard_normal(size))


def _projected(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return projection(values, lambda part: part)[1]


@sizes
def test_the_projection_is_linear(size: int) -> None:
    a, b = -3.7, 0.2
    one, other = _tensor(0, size), _tensor(1, size)
    expected = a * _projected(one) + b * _projected(other)
    np.testing.assert_allclose(_projected(a * one + b * other), expected, rtol=0, atol=1e-9 * (1 + size) ** 0.5)


@sizes
@pytest.mark.parametrize("seed", range(3))
def test_it_has_the_norm_of_a_difference(size: int, seed: int) -> None:
    """Within ten percent: its standard deviation is about three."""
    one, other = _tensor(seed, size), _tensor(seed + 1, size)
    norm = float(np.linalg.norm(one - other))
    assert np.linalg.norm(_projected(one) - _projected(other)) == pytest.approx(norm, rel=0.12)
    assert projection(one, lambda part: part)[0] == pytest.approx(float(np.linalg.norm(one)))


def test_steps_are_read_as_they_were_written(tmp_path: Path) -> None:
    files = StepFiles(tmp_path, 1)
    files.begin()
    whole = step({"w": np.ones((2, 3))}, {"w": np.zeros((2, 3)), "large": _tensor(0, 5000)}, samples=[1.0, 2.0])
    facts = RankFacts(random=["0 (Dropout)"], complete=True)
    files.add(whole)
    files.write(facts)
    (no_facts, no_steps), (read, (found,)) = read_ranks(tmp_path, 2)
    assert (no_facts, no_steps, read) == (RankFacts(), [], facts)
    assert list(found.samples) == [1.0, 2.0]
    for one, other in zip(whole.kept, found.kept, strict=True):
        assert (one.key, one.shape, one.norm, one.whole) == (other.key, other.shape, other.norm, other.whole)
        np.testing.assert_array_equal(one.values, other.values)


@pytest.mark.parametrize(
    ("name", "content"),
    [("facts.json", b"[]"), ("facts.json", b"{"), ("facts.json", b'{"other": 1}'), ("step-00000", b"no record")],
)
def test_what_is_no_record_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    files = StepFiles(tmp_path, 0)
    files.begin()
    files.write(RankFacts())
    (tmp_path / "steps" / "rank-0" / name).write_bytes(content)
    with refused("HT-verify-records-unreadable"):
        files.read()
