"""Pieces of arrays: their keys, whether they make whole arrays, and which rank writes which."""

from __future__ import annotations

import json
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.checkpoints.layout import shares, writers
from hpctrain.common.checkpoints.pieces import Box, Place, check_cover
from hpctrain.common.errors import HpctrainError
from support.divided_arrays import cut
from support.refusals import check, refused

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
# Many end as the keys of pieces do.
NAMES = st.one_of(
    st.text(max_size=8),
    st.builds(lambda a, b: a + b, st.text(max_size=3), st.text(st.sampled_from("[]0123:, of"), max_size=12)),
    st.sampled_from(
        ["w[0:1 of 2]", "w[0:2 of 2]", "[ of ]", "w[ of ]", "w[0:1,0:2 of 1,2][0:1 of 1]", "a\n[0:1 of 1]"]
    ),
)


@st.composite
def places(draw: st.DrawFn) -> Place:
    shape = draw(SHAPES)
    begins = [draw(st.integers(0, size)) for size in shape]
    lengths = [draw(st.integers(0, size - begin)) for begin, size in zip(begins, shape, strict=True)]
    box = draw(st.sampled_from([Box(tuple(begins), tuple(lengths)), Box.whole(shape)]))
    return Place(draw(NAMES), shape, box)


@given(places())
def test_a_key_says_all_of_a_place(place: Place) -> None:
    assert Place.of(json.loads(json.dumps(place.key)), place.box.lengths) == place


@pytest.mark.parametrize(
    "key, lengths", [("w[0:2 of 4]", (3,)), ("w[0:2,0:1 of 4,1]", (2,)), ("w[3:5 of 4]", (2,)), ("w[2:1 of 4]", (0,))]
)
def test_a_piece_that_is_not_what_its_key_says(key: str, lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        Place.of(key, lengths)


def counts(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    """How often each element is there: the reference."""
    found = np.zeros(shape, int)
    for box in boxes:
        found[tuple(slice(b, b + n) for b, n in zip(box.offsets, box.lengths, strict=True))] += 1
    return found


@given(st.lists(st.integers(1, 6), max_size=3).map(tuple), st.randoms(use_true_random=False), st.data())
def test_only_what_covers_each_element_once_is_accepted(shape: tuple[int, ...], random: Random, data) -> None:
    boxes = cut(Box.whole(shape), random, 8)
    change = data.draw(st.sampled_from(["none", "one is missing", "one is longer", "one is twice there", "any boxes"]))
    chosen = random.randrange(len(boxes))
    if change == "one is missing":
        boxes.pop(chosen)
    elif change == "one is longer":
        box = boxes[chosen]
        ends = [random.randint(end, size) for end, size in zip(box.ends, shape, strict=True)]
        boxes[chosen] = Box(box.offsets, tuple(e - b for e, b in zip(ends, box.offsets, strict=True)))
    elif change == "one is twice there":
        boxes.append(boxes[chosen])
    elif change == "any boxes":
        boxes = [random.choice(cut(Box.whole(shape), random, 8)) for _ in range(3)]
    random.shuffle(boxes)
    found = counts(shape, boxes)
    given_ = [(Place("w", shape, box), f"file {number}") for number, box in enumerate(boxes)]
    if (found == 1).all():
        check_cover(given_)
        return
    if not boxes:
        # Of which nobody knows.
        return
    with pytest.raises(HpctrainError) as raised:
        check_cover(given_)
    values = raised.value.values
    check(raised.value, "HT-checkpoint-damaged", name="w", shape=list(shape))
    times = found[tuple(slice(b, b + n) for b, n in zip(values["part"].offsets, values["part"].lengths, strict=True))]
    assert times.size and (times == values["times"]).all() and values["times"] != 1
    assert values["pieces"].count("file ") == min(values["times"] or len(boxes), 4)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 15)), max_size=30))
def test_each_piece_has_one_writer_that_holds_it(drawn: list[tuple[int, int]]) -> None:
    """Holders as the bits of a number, of four ranks."""
    held: list[dict[Place, int]] = [{} for _ in range(4)]
    for number, (nbytes, holders) in enumerate(drawn):
        place = Place(f"w{number}", (nbytes,), Box.whole((nbytes,)))
        for rank in range(4):
            if holders >> rank & 1:
                held[rank][place] = nbytes
    written = writers(held)
    assert sorted(place for places in written for place in places) == sorted(
        {place for places in held for place in places}
    )
    assert all(place in held[rank] for rank, places in enumerate(written) for place in places)


@pytest.mark.parametrize("replicate, shard", [(2, 2), (4, 1), (1, 4), (3, 4), (8, 2)])
def test_replicas_share_the_writing(replicate: int, shard: int) -> None:
    """As in hybrid sharding: each element is written once, and each rank writes about as much."""
    sizes = np.random.default_rng(0).integers(1, 4000, 60)
    held: list[dict[Place, int]] = []
    for rank in range(replicate * shard):
        begin = rank % shard
        held.append(
            {
                Place(f"w{number}", (size * shard, 3), Box((size * begin, 0), (size, 3))): 12 * int(size)
                for number, size in enumerate(sizes)
            }
        )
    loads = [sum(12 * place.box.lengths[0] for place in places) for places in writers(held)]
    assert sum(loads) == 12 * sizes.sum() * shard
    assert max(loads) - min(loads) <= 12 * sizes.max()


def test_whole_arrays_go_to_those_that_write_few_pieces() -> None:
    assert shares([("a", 5), ("b", 5)], 3, [100, 3, 7]) == [[], ["a"], ["b"]]


def test_a_grid_of_any_order_is_accepted_and_too_fine_a_one_is_refused() -> None:
    grid = [Box((2 * row, 3 * column, deep), (2, 3, 1)) for row in range(60) for column in range(60) for deep in (0, 1)]
    check_cover((Place("w", (120, 180, 2), box), "a file") for box in grid)
    with refused("HT-checkpoint-damaged", times=2):
        check_cover((Place("w", (120, 180, 2), box), "a file") for box in [*grid, Box((1, 1, 0), (2, 1, 1))])
    spiral = [Box((0, 0), (2, 1)), Box((0, 1), (1, 2)), Box((1, 2), (2, 1)), Box((2, 0), (1, 2)), Box((1, 1), (1, 1))]
    check_cover((Place("w", (3, 3), box), "a file") for box in spiral)
    stairs = [Box((2 * step, 2 * step), (3, 3)) for step in range(2000)]
    with refused("HT-checkpoint-damaged", "'w' has 2000 pieces"):
        check_cover((Place("w", (4001, 4001), box), "a file") for box in stairs)
