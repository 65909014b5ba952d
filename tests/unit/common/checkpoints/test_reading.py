"""What ranks of another number read, in every type; any damage is found."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from hpctrain.common.checkpoints.find import newest_whole, verify
from hpctrain.common.checkpoints.layout import share_name, shares
from hpctrain.common.checkpoints.manifest import read_manifest
from hpctrain.common.checkpoints.read import read_state
from hpctrain.common.checkpoints.share import CheckpointShare, blocks_of_memory, write_through
from hpctrain.common.errors import HpctrainError
from support.refusals import refused
from support.written_checkpoints import progress_of, write_checkpoint

EQUAL = {f"model.{i}": np.random.default_rng(i).normal(size=(i + 1, 3)).astype(np.float32) for i in range(9)}


def own(rank: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng((1, rank))
    return {
        "random.numpy": rng.integers(0, 2**32, 628),
        "statistics.mean": rng.normal(size=5).astype(np.float32),
        "statistics.half": rng.normal(size=5).astype(ml_dtypes.bfloat16),
        "statistics.batches": np.array(rank + 40),
        "moments.0.momentum": rng.normal(size=(2, 3)).astype(np.float32),
    }


def saved(folder: Path, ranks: int) -> Path:
    parts = shares(((name, value.nbytes) for name, value in EQUAL.items()), ranks)
    written = [
        {name: EQUAL[name] for name in parts[rank]} | {f"{name}.{rank}": value for name, value in own(rank).items()}
        for rank in range(ranks)
    ]
    return write_checkpoint(folder, progress_of(7, ranks=ranks), *written)


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_of_another_number(tmp_path: Path, before: int, ranks: int) -> None:
    path = saved(tmp_path, before)
    for rank in range(ranks):
        manifest, state = read_state(path, rank, ranks)
        expected = EQUAL | own(rank % before)
        if ranks != before:
            for name in ("statistics.mean", "statistics.half", "moments.0.momentum"):
                values = [own(each)[name].astype(np.float64) for each in range(before)]
                expected[name] = (sum(values) / before).astype(own(0)[name].dtype)
            expected["statistics.batches"] = np.array(40)
        assert manifest.progress.ranks == before
        assert {name: (v.dtype, v.shape, v.tobytes()) for name, v in state.items()} == {
            name: (v.dtype, v.shape, v.tobytes()) for name, v in expected.items()
        }


def test_statistics_of_other_shapes_are_a_message(tmp_path: Path) -> None:
    each = ({f"statistics.mean.{rank}": np.ones(rank + 1)} for rank in range(2))
    path = write_checkpoint(tmp_path, progress_of(7, ranks=2), *each)
    _, state = read_state(path, 0, 1)
    with refused("HT-checkpoint-damaged", "'statistics.mean' differ", where=path):
        state["statistics.mean"]


TYPES = [np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
TYPES += [np.float16, np.float32, np.float64, ml_dtypes.bfloat16]
TENSORS = st.dictionaries(
    st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12).filter(lambda n: n != "__metadata__"),
    st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 4), max_size=3).map(tuple)),
    max_size=8,
)


@given(TENSORS, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_a_share_is_what_another_library_reads(wanted: dict, random) -> None:
    tensors = {
        name: np.frombuffer(random.randbytes(int(np.prod(shape)) * np.dtype(kind).itemsize), np.uint8)
        for name, (kind, shape) in wanted.items()
    }
    typed = {
        # A truth value has no other bits than these.
        name: (bits % 2 if kind is np.bool_ else bits).view(kind).reshape(shape)
        for (name, bits), (kind, shape) in zip(tensors.items(), wanted.values(), strict=True)
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "share"
        share = CheckpointShare()
        for _ in range(2):
            share.prepare(typed)
            share.fill(typed)
        record = share.write(file)
        content = file.read_bytes()
        assert (record.bytes, record.xxh128) == (len(content), xxhash.xxh128_hexdigest(content))
        with safe_open(file, framework="np") as opened:
            assert set(opened.keys()) == typed.keys()
            for name, value in typed.items():
                read = opened.get_tensor(name)
                assert (read.dtype, read.shape, read.tobytes()) == (value.dtype, value.shape, value.tobytes())


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 10**9), max_size=40), st.integers(1, 9), st.randoms())
def test_shares_are_balanced_and_the_same_whoever_reckons(sizes: dict[str, int], ranks: int, random) -> None:
    found = shares(sizes.items(), ranks)
    assert sorted(name for names in found for name in names) == sorted(sizes)
    loads = [sum(sizes[name] for name in names) for names in found]
    for names, load in zip(found, loads, strict=True):
        assert load - min((sizes[name] for name in names), default=0) <= min(loads)
    assert shares(random.sample(sorted(sizes.items()), len(sizes)), ranks) == found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("whole"), 2)


def damaged(whole: Path, folder: str, file: str, content: bytes) -> Path:
    path = Path(folder) / whole.name
    path.mkdir()
    for each in whole.iterdir():
        (path / each.name).write_bytes(content if each.name == file else each.read_bytes())
    return path


def assert_found(path: Path) -> None:
    assert verify(path)
    newest = newest_whole(path.parent)
    assert (newest.iteration, len(newest.damaged)) == (0, 1)
    with contextlib.suppress(HpctrainError):
        dict(read_state(path, 0, 2)[1])


FILES = ["state.json", "state.sha256", share_name(0, 2), share_name(1, 2)]


@pytest.mark.parametrize("file", FILES)
def test_each_flipped_byte_of_heads_and_tails_is_found(whole: Path, file: str) -> None:
    content = (whole / file).read_bytes()
    for place in {*range(16), *range(16, len(content), len(content) // 8), *range(len(content) - 16, len(content))}:
        other = bytes([*content[:place], content[place] ^ 1, *content[place + 1 :]])
        with tempfile.TemporaryDirectory() as folder:
            assert_found(damaged(whole, folder, file, other))


def with_manifest(path: Path, content: bytes) -> None:
    (path / "state.json").write_bytes(content)
    (path / "state.sha256").write_text(f"{hashlib.sha256(content).hexdigest()}  state.json\n")


HOSTILE = ["../x", "/etc/passwd", "a\0b", "rank-0-of-3.safetensors"]


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: repr(name[:20]))
def test_names_that_are_no_share_are_refused(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path, 2)
    manifest = json.loads((path / "state.json").read_text())
    manifest["files"] = {share_name(0, 2): manifest["files"][share_name(0, 2)], name: {"bytes": 0, "xxh128": "0" * 32}}
    with_manifest(path, json.dumps(manifest).encode())
    with refused("HT-checkpoint-damaged", "not those of 2 ranks"):
        read_manifest(path)
    with refused("HT-checkpoint-damaged", "not those of 2 ranks"):
        read_state(path, 0, 2)
    assert verify(path)


def entry(dtype: str, shape: list[int], *offsets: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HEADERS = {
    "behind the end": {"model.a": entry("F32", [4], 0, 16), "model.b": entry("F32", [4], 16, 32)},
    "less than the file": {"model.a": entry("F32", [3], 0, 12)},
    "one array twice": {"model.a": entry("F32", [4], 0, 16), "model.b": entry("F32", [4], 0, 16)},
    "more than its type": {"model.a": entry("F16", [4], 0, 16)},
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_header_that_is_not_the_files_is_damage_whatever_the_hashes_say(tmp_path: Path, header: object) -> None:
    path = write_checkpoint(tmp_path, progress_of(7), {"model.a": np.arange(4, dtype=np.float32)})
    assert not verify(path)
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(16)
    (path / share_name(0, 1)).write_bytes(content)
    manifest = json.loads((path / "state.json").read_text())
    manifest["files"][share_name(0, 1)] = {"bytes": len(content), "xxh128": xxhash.xxh3_128_hexdigest(content)}
    with_manifest(path, json.dumps(manifest).encode())
    assert_found(path)
    with pytest.raises(HpctrainError):
        read_state(path, 0, 1)


def test_more_ranks_than_there_can_be_cost_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    manifest = json.loads((path / "state.json").read_text())
    manifest["progress"]["ranks"] = 10**18
    with_manifest(path, json.dumps(manifest).encode())
    with refused("HT-checkpoint-damaged", f"not those of {10**18} ranks"):
        read_manifest(path)


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 1_000_001])
@pytest.mark.parametrize("refused_from", [None, 0, 1], ids=["direct", "refused", "refused on the way"])
def test_what_is_written_is_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, refused_from: int | None
) -> None:
    """Also where a file system does not take blocks from memory, or no more of them."""
    content = blocks_of_memory(nbytes)
    content[:] = np.random.default_rng(nbytes).integers(0, 256, nbytes)
    write, calls = os.write, itertools.count()

    def refusing(descriptor: int, part: memoryview) -> int:
        direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        if direct and refused_from is not None and next(calls) >= refused_from:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, part[:8192])

    monkeypatch.setattr(os, "write", refusing)
    with (tmp_path / "file").open("xb", buffering=0) as file:
        write_through(file.fileno(), content.data)
    assert (tmp_path / "file").read_bytes() == content.tobytes()


class Slow(dict[str, np.ndarray]):
    """Looking up its last one takes long, or fails."""

    fails = False

    def __getitem__(self, name: str) -> np.ndarray:
        if name == list(self)[-1]:
            time.sleep(0.2)
            if self.fails:
                raise MemoryError(name)
        return super().__getitem__(name)


@pytest.mark.slow
def test_writing_goes_on_beside_the_copying_and_ends_with_it(tmp_path: Path) -> None:
    tensors = Slow({name: np.random.default_rng(0).normal(size=(3 << 20)) for name in "ab"})
    share = CheckpointShare()
    with ThreadPoolExecutor(1) as pool:
        for turn in range(2):
            tensors["b"] = tensors["a"] + turn
            share.prepare(tensors)
            written = pool.submit(share.write, tmp_path / str(turn))
            share.fill(tensors)
            record = written.result(10)
            assert xxhash.xxh128_hexdigest((tmp_path / str(turn)).read_bytes()) == record.xxh128
            with safe_open(tmp_path / str(turn), framework="np") as opened:
                assert opened.get_tensor("b").tobytes() == tensors["b"].tobytes()
        tensors.fails = True
        share.prepare(tensors)
        written = pool.submit(share.write, tmp_path / "failed")
        with pytest.raises(MemoryError):
            share.fill(tensors)
        with pytest.raises(RuntimeError, match="was not made"):
            written.result(10)
