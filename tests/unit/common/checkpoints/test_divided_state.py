"""State that is divided over ranks: saved by any layout, read by any other."""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from hpctrain.common.checkpoints.find import newest_whole, verify
from hpctrain.common.checkpoints.layout import checkpoint_path, share_name
from hpctrain.common.checkpoints.pieces import Box, Piece, Place
from hpctrain.common.checkpoints.read import SavedState, piece_of, read_state, shape_of
from hpctrain.common.run.events import EventWriter
from hpctrain.worker.train.checkpoint_saving import Checkpoints
from hpctrain.worker.train.state import LazyState
from support.divided_arrays import Held, held_by, part, pieces
from support.refusals import refused
from support.thread_ranks import ThreadCommunicator, on_ranks
from support.written_checkpoints import guard_over, progress_of, write_checkpoint

TYPES = [np.float32, np.float64, ml_dtypes.bfloat16, np.int64, np.bool_]


class Training:
    """What a trainer with divided state gives."""

    def __init__(self, comm: ThreadCommunicator, arrays: dict[str, np.ndarray], held: Held) -> None:
        self.guard = guard_over(0)
        self.before_update = lambda: None
        self.rank, self.arrays, self.held = comm.rank, arrays, held
        self.restored: SavedState

    def state(self) -> LazyState:
        whole = {"steps": np.array(7), "random.numpy": np.array([self.rank])}
        return LazyState(whole, pieces=pieces(self.arrays, self.held[self.rank]))

    def restore(self, state: SavedState) -> None:
        self.restored = state


def save(folder: Path, arrays: dict[str, np.ndarray], held: Held) -> Path:
    def work(comm: ThreadCommunicator) -> None:
        with Checkpoints(folder, comm, EventWriter(None)) as checkpoints:
            checkpoints.save(progress_of(3, ranks=comm.size), Training(comm, arrays, held))
            checkpoints.wait()

    on_ranks(len(held), work)
    return checkpoint_path(folder, 3)


def restored(folder: Path, rank: int, ranks: int) -> SavedState:
    return read_state(checkpoint_path(folder, 3), rank, ranks)[1]


def bits(array: np.ndarray) -> tuple[Any, ...]:
    return array.dtype, array.shape, array.tobytes()


@pytest.mark.long
@given(
    shapes=st.lists(
        st.tuples(st.lists(st.integers(1, 7), max_size=3).map(tuple), st.sampled_from(TYPES)), min_size=1, max_size=4
    ),
    before=st.integers(1, 4),
    now=st.integers(1, 4),
    random=st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=40)
def test_any_layout_reads_what_any_layout_wrote(shapes: list, before: int, now: int, random: Random) -> None:
    rng = np.random.default_rng(random.randrange(2**32))
    arrays = {f"model.{i}.w": rng.integers(-9, 9, shape).astype(kind) for i, (shape, kind) in enumerate(shapes)}
    with tempfile.TemporaryDirectory() as name:
        path = save(Path(name), arrays, held_by(arrays, before, random))
        assert verify(path) == []
        for rank, held in enumerate(held_by(arrays, now, random)):
            state = restored(Path(name), rank, now)
            assert set(state) == {*arrays, "steps", "random.numpy"}
            assert state["steps"] == 7 and state["random.numpy"].tolist() == [rank % before]
            for name_, array in arrays.items():
                assert state.shapes[name_] == array.shape
                assert bits(state[name_]) == bits(array)
                for box in held[name_]:
                    assert bits(state.piece(name_, box)) == bits(part(array, box))


ARRAY = np.arange(24, dtype=np.float32).reshape(4, 6)
HALVES = [{"model.w": [Box((2 * rank, 0), (2, 6))]} for rank in range(2)]


def test_replicas_write_an_element_once(tmp_path: Path) -> None:
    """Two columns by two rows, each with a replica; a name that ends as a key does, and an array that is one rank's."""
    arrays = {"model.w": ARRAY, "model.w[0:2 of 4]": ARRAY[0], "model.stage": ARRAY[1]}
    held: Held = [
        {
            "model.w": [Box((2 * (rank % 2), 3 * (rank // 2 % 2)), (2, 3))],
            "model.w[0:2 of 4]": [Box.whole((6,))],
            "model.stage": [Box.whole((6,))] if rank == 5 else [],
        }
        for rank in range(8)
    ]
    path = save(tmp_path, arrays, held)
    files = [load_file(path / share_name(rank, 8)) for rank in range(8)]
    keys = [key for file in files for key in file if not key.startswith("random.")]
    assert sorted(keys) == sorted(
        [
            "model.stage",
            *(f"model.w[{row}:{row + 2},{column}:{column + 3} of 4,6]" for row in (0, 2) for column in (0, 3)),
            "model.w[0:2 of 4][0:6 of 6]",
            "steps",
        ]
    )
    assert "model.stage" in files[5]
    # 24 bytes each of what can be elsewhere.
    assert max(sum(value.nbytes for key, value in file.items() if "random" not in key) for file in files) == 24
    state = restored(tmp_path, 0, 1)
    assert all(bits(state[name]) == bits(array) for name, array in arrays.items())


def test_the_ranks_agree_again_when_one_of_them_holds_something_else(tmp_path: Path) -> None:
    exchanged: list[int] = []

    def work(comm: ThreadCommunicator) -> None:
        training = Training(comm, {"model.w": ARRAY}, HALVES)
        with Checkpoints(tmp_path, comm, EventWriter(None)) as checkpoints:
            gather = comm.allgather_object

            def counted(value: Any) -> list[Any]:
                if isinstance(value, dict):
                    exchanged.append(comm.rank)
                return gather(value)

            comm.allgather_object = counted  # type: ignore[method-assign]
            for step, arrays in enumerate([{"model.w": ARRAY}, {"model.w": ARRAY + 1}, {"model.w": ARRAY, "m": ARRAY}]):
                training.arrays = arrays
                more = [Box.whole(ARRAY.shape)] if comm.rank == 1 else []
                training.held = [{**each, "m": more} for each in HALVES]
                checkpoints.save(progress_of(step + 1, ranks=2), training)
                checkpoints.wait()

    on_ranks(2, work)
    assert sorted(exchanged) == [0, 0, 1, 1]
    last = read_state(checkpoint_path(tmp_path, 3), 0, 1)[1]
    assert bits(last["m"]) == bits(last["model.w"]) == bits(ARRAY)


def test_ranks_that_lack_elements_save_nothing(tmp_path: Path) -> None:
    held: Held = [HALVES[0], {"model.w": [Box((3, 0), (1, 6))]}]
    with refused(
        "HT-checkpoint-damaged",
        name="model.w",
        shape=[4, 6],
        part=[[2, 0], [1, 6]],
        times=0,
        pieces="[0:2, 0:6] in rank 0, [3:4, 0:6] in rank 1",
    ):
        save(tmp_path, {"model.w": ARRAY}, held)
    assert newest_whole(tmp_path).iteration == 0


def key(begin: int, end: int, shape: str = "4,6") -> str:
    return f"model.w[{begin}:{end},0:6 of {shape}]"


WHOLE = ({key(0, 2): ARRAY[:2]}, {key(2, 4): ARRAY[2:]})


@pytest.mark.parametrize(
    "shares, words, ranks",
    [
        (({key(0, 2): ARRAY[:2]}, {}), "[2:4, 0:6] is there 0 times", [0]),
        ((WHOLE[0], {key(2, 3): ARRAY[2:3]}), "[3:4, 0:6] is there 0 times", [0, 1]),
        ((WHOLE[0], {key(1, 4): ARRAY[1:]}), "", [0, 1]),
        ((WHOLE[0], {**WHOLE[1], key(0, 2): ARRAY[:2]}), "[0:2, 0:6] is there 2 times", [0, 1]),
        ((WHOLE[0], {key(2, 4): ARRAY[3:]}), "", [1]),
        ((WHOLE[0], {key(2, 4): ARRAY[2:].astype(np.float64)}), "is of type F64, and of F32", [0, 1]),
        ((WHOLE[0], {key(2, 4, "5,6"): ARRAY[2:]}), "has shape [5, 6], and [4, 6]", [0, 1]),
        (({"model.w": ARRAY}, WHOLE[1]), "", [0, 1]),
    ],
    ids=["missing", "shorter", "overlapping", "twice", "cut", "another type", "another shape", "whole and a part"],
)
def test_pieces_that_do_not_fit_are_named(
    tmp_path: Path, shares: tuple[Any, ...], words: str, ranks: list[int]
) -> None:
    """By the reader, and by whoever looks for damage, although each file is what was written."""
    path = write_checkpoint(tmp_path, progress_of(3, ranks=2), *shares)
    with refused("HT-checkpoint-damaged", words) as caught:
        read_state(path, 0, 1)
    assert "model.w" in str(caught.value.values)
    assert [rank for rank in (0, 1) if share_name(rank, 2) in str(caught.value.record()["values"])] == ranks
    found = newest_whole(tmp_path)
    assert found.iteration == 0 and len(found.damaged) == 1
    assert verify(path) and verify(path, hashes=False) == []


def test_what_is_asked_for_has_to_be_there(tmp_path: Path) -> None:
    state = restored(write_checkpoint(tmp_path, progress_of(3, ranks=2), *WHOLE).parent, 0, 1)
    with pytest.raises(KeyError):
        state.piece("model.v", Box((0,), (1,)))
    for box in (Box((3, 0), (2, 6)), Box((0,), (2,)), Box((0, 6), (1, 1))):
        with pytest.raises(ValueError):
            state.piece("model.w", box)
    assert state.piece("model.w", Box((1, 1), (0, 2))).shape == (0, 2)
    assert state.piece("model.w", Box((1, 1), (2, 2))).tolist() == ARRAY[1:3, 1:3].tolist()


def test_a_stage_that_had_no_statistics_takes_their_mean(tmp_path: Path) -> None:
    """Two stages of a pipeline, on ranks 0 and 1, of which a rank has another one now; or both."""
    shares = [{f"statistics.{name}.{rank}": np.array([float(rank)])} for rank, name in enumerate("ab")]
    path = write_checkpoint(tmp_path, progress_of(3, ranks=2), *shares)
    for rank, ranks in ((0, 2), (1, 2), (0, 1)):
        state = read_state(path, rank, ranks)[1]
        assert (state["statistics.a"].tolist(), state["statistics.b"].tolist()) == ([0.0], [1.0])


def test_a_place_without_elements_needs_nobody(tmp_path: Path) -> None:
    """As of a rank that has no row of a small parameter."""
    nothing = Piece(shape=(4, 6), box=Box((4, 0), (0, 6)), nbytes=0, array=lambda: ARRAY[4:])
    assert Place("w", nothing.shape, nothing.box).key == "w[4:4,0:6 of 4,6]"
    held: Held = [{"model.w": [Box.whole((4, 6))]}, {"model.w": [Box((4, 0), (0, 6))]}]
    save(tmp_path, {"model.w": ARRAY}, held)
    assert bits(restored(tmp_path, 1, 3)["model.w"]) == bits(ARRAY)


@pytest.mark.parametrize("shape", [(), (4, 6)])
def test_a_part_of_what_is_in_memory_is_that_of_what_is_saved(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """As a rank gets a state that another one hands it."""
    whole = np.arange(24, dtype=np.float32)[: int(np.prod(shape))].reshape(shape)
    path = write_checkpoint(tmp_path, progress_of(3), {"model.w": whole})
    box = Box((1, 2), (2, 3)) if shape else Box((), ())
    for state in ({"model.w": whole}, read_state(path, 0, 1)[1]):
        assert shape_of(state, "model.w") == shape
        found = piece_of(state, "model.w", box)
        assert isinstance(found, np.ndarray) and bits(found) == bits(part(whole, box))
