"""What of a sample is compared between ranks."""

from __future__ import annotations

import copy
import datetime
import decimal
import pathlib
import types
import uuid

import numpy as np
import pytest

from hpctrain.worker.adapters.same_data import Fingerprint, summarise

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("shape", [(), (3,), (100, 7)])
def test_the_same_numbers_of_another_type_differ(shape):
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    summaries = [summarise(torch.ones(shape, dtype=kind))[""] for kind in kinds]
    assert all(one.differs(other) == (a != b) for a, one in enumerate(summaries) for b, other in enumerate(summaries))


@pytest.mark.parametrize("kind", ["float32", "float64", "int64", "uint8"])
def test_a_tensor_looks_like_its_array(kind):
    array = np.arange(200).astype(kind)
    assert not summarise(torch.from_numpy(array))[""].differs(summarise(array)[""])


def images(count=64, seed=0):
    return list(np.random.default_rng(seed).integers(0, 256, (count, 16, 16, 3), np.uint8))


ORDERED = {
    "whole numbers": list(range(64)),
    "texts": [{"key": f"{number:03}"} for number in range(64)],
    "bytes": [b"%03d" % number for number in range(64)],
    "images": images(),
    "images of one colour": [np.full((16, 16, 3), number, np.uint8) for number in range(64)],
    "small arrays": list(np.random.default_rng(1).random((64, 4))),
    "large arrays": list(np.random.default_rng(2).standard_normal((64, 200)).astype(np.float32)),
    "temperatures": list(300 + np.random.default_rng(3).random((64, 200))),
    "complex numbers": list(np.random.default_rng(4).random((64, 200)) * 1j),
}


@pytest.mark.parametrize("samples", ORDERED.values(), ids=ORDERED)
def test_a_fingerprint_is_that_of_samples_in_one_order(samples):
    order = np.random.default_rng(5)
    assert not Fingerprint.of(samples).differs(Fingerprint.of([copy.deepcopy(each) for each in samples]))
    for _ in range(20):
        other = [samples[place] for place in order.permutation(64)]
        assert Fingerprint.of(samples).differs(Fingerprint.of(other))
    assert Fingerprint.of(samples[:63]).differs(Fingerprint.of(samples))


class Opaque:
    """An object of a user's class, which refers to itself, and holds what cannot be pickled."""

    def __init__(self, number):
        self.number, self.itself, self.read = number, self, (letter for letter in "abc")

    def __repr__(self):
        return f"opaque at {id(self)}"


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held


@pytest.mark.parametrize(
    "sample",
    [
        float,
        lambda number: torch.full((3,), number, dtype=torch.bfloat16),
        lambda number: np.full(300, number, np.float32),
        lambda number: {f"{number}", "all"},
        lambda number: np.array([number, "text"], dtype=object),
        lambda number: {"made of": Opaque(number)},
        lambda number: types.SimpleNamespace(inner=[Opaque(number)]),
        lambda number: Slotted(torch.full((3,), float(number))),
        lambda number: torch.eye(number + 2).to_sparse(),
        lambda number: torch.eye(3).mul(number + 1).to_sparse_csr(),
        lambda number: datetime.datetime(2026, 1, 1 + number),
        lambda number: decimal.Decimal(number) / 7,
        lambda number: uuid.UUID(int=number),
        lambda number: pathlib.Path(f"{number}.png"),
        lambda number: range(number),
        lambda number: frozenset(Opaque(number + more) for more in range(9)),
    ],
)
def test_parts_of_a_stream_that_is_divided_by_hand_differ(sample):
    parts = [[sample(number) for number in range(rank, 24, 3)] for rank in range(3)]
    looks = [Fingerprint.of(part) for part in parts]
    assert looks[0].differs(looks[1]) and looks[1].differs(looks[2])
    assert not any(look.differs(Fingerprint.of([sample(n) for n in range(r, 24, 3)])) for r, look in enumerate(looks))
    assert not any(Fingerprint.from_numbers(each.numbers()).differs(each) for each in looks)


def test_a_fingerprint_allows_for_two_decoders():
    noise = np.random.default_rng(6)
    for number in range(20):
        one = images(seed=number)
        other = [np.clip(each.astype(int) + noise.integers(-2, 3, each.shape), 0, 255).astype(np.uint8) for each in one]
        assert not Fingerprint.of(one).differs(Fingerprint.of(other))


def test_a_fingerprint_of_nothing_or_of_what_has_no_numbers():
    for samples in (
        [0.0] * 9,
        [np.zeros(300)] * 9,
        [float("nan"), float("inf")],
        [object()],
        [lambda: 0],
        [torch.float32],
        [iter([])],
        [None],
    ):
        assert not Fingerprint.of(samples).differs(Fingerprint.of(samples))
