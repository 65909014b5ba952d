"""Shards in object storage: a server of S3 on this machine, with faults, and the node's cache of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hpctrain.cli.main import main
from hpctrain.common import extras
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.objects import Objects
from hpctrain.common.files.whole import temporary
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.shards.cache import ShardFiles, cache_folder, fetch_manifest
from hpctrain.common.shards.image_shards import Shards, open_shards
from hpctrain.common.shards.manifest import MOST_MANIFEST_BYTES, read_manifest
from hpctrain.common.shards.text.prepare import Preparation, prepare_text
from hpctrain.common.shards.text.token_shards import TokenShards
from hpctrain.worker.bench.loader_rates import photographs, write_folders, write_shards
from hpctrain.worker.data import open_sources
from support.refusals import check, codes, refused
from support.small_disks import small_disk_at

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from support.s3_server import S3Server

# Seconds for all that takes time beside a limit, the start of a worker too, where others have the cores.
_SPARE = 30
# A shard each, and an index a split.
_SHARDS, _OBJECTS = 16, 18
Epoch = list[tuple[str, str]]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """29 photographs to train on in 15 shards, two for validation in another."""
    folder = tmp_path_factory.mktemp("objects")
    write_folders(folder / "files", photographs(29))
    write_shards(folder / "shards", folder / "files", 2)
    return folder / "shards"


@pytest.fixture(scope="module")
def running(disk: Path) -> Iterator[S3Server]:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    from support.s3_server import s3_server

    with s3_server() as server:
        server.put(disk)
        yield server


@pytest.fixture
def server(running: S3Server, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The server without a fault, with its address in the environment, and an empty cache."""
    for name, value in (running.environment | {"HPCTRAIN_CACHE": str(tmp_path / "cache")}).items():
        monkeypatch.setenv(name, value)
    running.forget()
    yield running
    running.forget()
    for name in ("train-000003.tar", "manifest.json"):
        running.put_object(name, (disk / name).read_bytes())


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> float:
    """Silence of a second is too long, and all attempts end within this many seconds."""
    monkeypatch.setenv("HPCTRAIN_OBJECT_TIMEOUT", "1")
    monkeypatch.setenv("HPCTRAIN_TIMEOUT", "9")
    return 3.0


def recipe(path: Path | str, workers: int = 0) -> Recipe:
    digits = load_recipe("digits")
    return digits.model_copy(
        update={
            "data": digits.data.model_copy(update={"name": "imagenet", "workers": workers, "path": str(path)}),
            "model": digits.model.model_copy(update={"name": "resnet18"}),
            "images": digits.images.model_copy(update={"size": 32, "test_size": 32, "test_resize": 40}),
        }
    )


def epochs(path: Path | str, numbers: Sequence[int], workers: int = 0) -> Epoch:
    """Hashes of all that a rank alone is given in these epochs, and in validation, by the house's loader."""
    made: Epoch = []
    train, test = open_sources(recipe(path, workers))
    with contextlib.closing(train), contextlib.closing(test):
        for number in numbers:
            order = np.random.default_rng(number).permutation(len(train))
            for samples in train.stream(np.array_split(order, 4), number):
                made.append(tuple(hashlib.sha256(array).hexdigest() for array in (samples.images, samples.labels)))  # type: ignore[arg-type]
        for samples in test.stream([np.arange(len(test))], 0):
            made.append(tuple(hashlib.sha256(array).hexdigest() for array in (samples.images, samples.labels)))  # type: ignore[arg-type]
    return made


def unfinished(cache: Path) -> list[str]:
    return [path.name for path in cache.rglob("*.part")]


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.thorough), 2])
@pytest.mark.long
def test_an_epoch_from_the_server_equals_one_from_disk(
    server: S3Server, disk: Path, tmp_path: Path, workers: int
) -> None:
    assert epochs(server.url, [0], workers) == epochs(disk, [0])
    assert len(server.gets) == _OBJECTS + 1 and set(server.gets.values()) == {1}
    assert server.requests == _OBJECTS + 1
    server.forget()
    # Of another run on this node: all but the manifest, which says whether it is still the same set.
    assert epochs(server.url, [1, 2], workers) == epochs(disk, [1, 2])
    assert server.gets == {"manifest.json": 1}
    assert not unfinished(tmp_path)


@pytest.mark.parametrize(
    "kind",
    ["503", pytest.param("cut", marks=pytest.mark.thorough), pytest.param("changed", marks=pytest.mark.thorough)],
)
def test_an_epoch_with_every_tenth_request_failing(server: S3Server, disk: Path, kind: str) -> None:
    server.fault = lambda name, number: kind if number % 10 == 0 else None
    assert epochs(server.url, [0]) == epochs(disk, [0])
    assert server.failed == 2
    # One layer of attempts: a fault costs one request more.
    assert server.requests == _OBJECTS + 1 + server.failed


_RANK = """
import sys
sys.path[:0] = sys.argv[1:3]
import numpy as np
from test_objects import recipe
from hpctrain.worker.data import open_sources
import hashlib
train, _ = open_sources(recipe(sys.argv[3], 1))
rank = int(sys.argv[4])
order = np.random.default_rng(0).permutation(len(train))
for samples in train.stream(np.array_split(order, 8)[rank::2], 0):
    print(hashlib.sha256(samples.images).hexdigest())
train.close()
"""


@pytest.mark.long
def test_two_ranks_of_a_node_fetch_each_object_once(server: S3Server, disk: Path, tmp_path: Path) -> None:
    """Both begin at once, each with half of every batch, so that both want the same shards."""
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[3])]

    def halves(place: str) -> list[list[str]]:
        commands = [[sys.executable, "-c", _RANK, *folders, place, str(rank)] for rank in range(2)]
        ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        try:
            return [rank.communicate(timeout=120)[0].split() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()

    made = halves(server.url)
    assert made == halves(str(disk))
    assert [len(half) for half in made] == [4, 4]
    shards = {name: count for name, count in server.gets.items() if name.endswith((".tar", ".npy"))}
    # The validation's shard was not wanted.
    assert len(shards) == _OBJECTS - 1 and set(shards.values()) == {1}
    assert not unfinished(tmp_path)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("503", "Please try again"),
        pytest.param("cut", "payload is not completed", marks=pytest.mark.long),
        pytest.param("changed", "checksum", marks=pytest.mark.long),
        ("hang", "did not send it in time"),
        pytest.param("silent", "did not send it in time", marks=pytest.mark.long),
        pytest.param("trickle", "did not send it in time", marks=pytest.mark.long),
    ],
)
def test_an_object_that_never_comes_is_named(
    server: S3Server, tmp_path: Path, impatient: float, kind: str, words: str
) -> None:
    folder = cache_folder(server.url, fetch_manifest(server.url))
    shards = open_shards(folder, "train")
    begin = time.monotonic()
    server.fault = lambda name, number: kind if name == "train-000003.tar" else None
    with pytest.raises(HpctrainError) as caught:
        shards.read(7)
    assert time.monotonic() - begin < impatient + _SPARE
    attempts = server.gets["train-000003.tar"]
    check(caught.value, "HT-object-not-fetched", object=f"{server.url}/train-000003.tar", attempts=attempts, most=8)
    assert words in caught.value.values["problem"] and 2 <= attempts <= 8
    assert not (folder / "train-000003.tar").exists() and not unfinished(tmp_path)
    assert len(shards.read(0)) > 0


def test_a_client_that_is_made_slowly_is_no_silent_server(
    server: S3Server, impatient: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine, where making it took up to 1.7 s."""
    from s3fs import S3FileSystem

    make = S3FileSystem.set_session

    async def slowly(self: S3FileSystem, *arguments: object, **named: object) -> object:
        await asyncio.sleep(0 if self._s3 else 1.5)
        return await make(self, *arguments, **named)

    monkeypatch.setattr(S3FileSystem, "set_session", slowly)
    assert fetch_manifest(server.url) and server.gets["manifest.json"] == 1


def test_credentials_that_come_at_another_attempt_are_enough(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client takes them when it is made, here from a program that fails at first."""
    found = {"Version": 1, "AccessKeyId": os.environ["AWS_ACCESS_KEY_ID"], "SecretAccessKey": "of-the-test"}
    program = tmp_path / "credentials"
    program.write_text(f"#!/bin/sh\nmkdir {tmp_path}/asked && exit 1\necho '{json.dumps(found)}'\n")
    program.chmod(0o700)
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {program}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    assert fetch_manifest(server.url) and (tmp_path / "asked").is_dir()


@pytest.mark.thorough
def test_the_loader_names_an_object_whose_server_hangs(
    server: S3Server, impatient: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The worker's start is waited for too.
    monkeypatch.setenv("HPCTRAIN_TIMEOUT", f"{3 * impatient + _SPARE}")
    server.fault = lambda name, number: "hang" if name == "train-000003.tar" else None
    begin = time.monotonic()
    with refused("HT-object-not-fetched", object=f"{server.url}/train-000003.tar"):
        epochs(server.url, [0], workers=1)
    assert time.monotonic() - begin < impatient + 2 * _SPARE


@pytest.mark.long
def test_a_damaged_object_is_named(server: S3Server, disk: Path, tmp_path: Path, impatient: float) -> None:
    whole = (disk / "train-000003.tar").read_bytes()
    for content, words in (
        (whole[:-512], f"cut short: {len(whole) - 512} bytes of {len(whole)}"),
        (whole[:600] + b"?" + whole[601:], "changed: its SHA-256 is not the one it was written with"),
    ):
        server.put_object("train-000003.tar", content)
        with refused("HT-object-not-fetched", object=f"{server.url}/train-000003.tar", problem=words):
            epochs(server.url, [0])
        shutil.rmtree(tmp_path / "cache")


@pytest.mark.parametrize("kind", ["503", "refused"])
def test_objects_that_cannot_be_had_are_not_called_damaged(
    server: S3Server, tmp_path: Path, impatient: float, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever believed it would upload a whole set anew."""
    server.fault = lambda name, number: kind if name == "train-000003.tar" else None
    assert main(["data", "stage", server.url, str(tmp_path / "to")]) == 1
    said = capsys.readouterr().err
    assert f"{server.url}/train-000003.tar: " in said and codes(said) == ["HT-object-not-fetched"]


def test_a_missing_object_is_named_at_once(server: S3Server) -> None:
    with refused("HT-object-not-fetched", object=f"{server.url}/nowhere/manifest.json", attempts=1):
        fetch_manifest(f"{server.url}/nowhere")


@pytest.mark.long
def test_a_set_that_was_written_anew_is_fetched_anew(server: S3Server, disk: Path) -> None:
    epochs(server.url, [0])
    manifest = read_manifest(disk)
    changed = manifest.model_copy(update={"classes": tuple(f"{name}-new" for name in manifest.classes)})
    server.put_object("manifest.json", changed.model_dump_json().encode())
    train, _ = open_sources(recipe(server.url))
    assert train.classes == changed.classes  # type: ignore[attr-defined]
    assert epochs(server.url, [0]) == epochs(disk, [0])
    # Nothing of the earlier set was taken.
    assert server.gets["train-000000.tar"] == 1


def test_a_large_object_is_one_request(server: S3Server, tmp_path: Path) -> None:
    """s3fs would fetch it in parts, each by a request of its own."""
    content = bytes(60 << 20)
    server.put_object("large", content)
    Objects(server.url).fetch(
        "large", tmp_path / "large", limit=len(content), size=len(content), sha256=hashlib.sha256(content).hexdigest()
    )
    assert server.requests == 1 and (tmp_path / "large").stat().st_size == len(content)


@pytest.mark.parametrize("kind", ["huge", "endless"])
@pytest.mark.parametrize("name", ["manifest.json", "train-index.npy", "train-000003.tar"])
def test_no_more_is_fetched_than_an_object_may_have(server: S3Server, tmp_path: Path, name: str, kind: str) -> None:
    folder = cache_folder(server.url, fetch_manifest(server.url))
    server.forget()
    server.fault = lambda asked, number: kind if asked == name else None
    with refused("HT-object-not-fetched", object=f"{server.url}/{name}", attempts=1):
        fetch_manifest(server.url)
        Shards(folder, "train").read(7)
    # At once, and nothing of it stays.
    assert server.gets[name] == 1
    # What is on its way when the header has come is less than a manifest may have.
    assert server.sent < (MOST_MANIFEST_BYTES if kind == "huge" else 100 << 20)
    assert not (folder / name).exists() or name == "manifest.json"
    assert not unfinished(tmp_path)


@pytest.mark.parametrize("kind", ["20 GB of zeros", "pipe", "device"])
def test_no_more_is_copied_of_a_file_than_an_object_may_have(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("s3fs")
    path = tmp_path / "manifest.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 20 * 10**9)
    with refused("HT-object-not-fetched", attempts=1):
        fetch_manifest(tmp_path.as_uri())


@pytest.mark.long
def test_staged_from_the_server(server: S3Server, disk: Path, tmp_path: Path) -> None:
    assert main(["data", "stage", server.url, str(tmp_path / "to")]) == 0
    assert epochs(tmp_path / "to", [0]) == epochs(disk, [0])
    # As the message about a damaged file of the cache says.
    cache = cache_folder(server.url, fetch_manifest(server.url))
    Shards(cache, "train").read(0)
    (cache / "train-000000.tar").write_bytes(b"")
    with refused("HT-shard-damaged", path=cache / "train-000000.tar") as caught:
        open_shards(cache, "train")
    assert f"hpctrain data stage URL {cache} --check" in caught.value.hint
    assert main(["data", "stage", server.url, str(cache), "--check"]) == 0
    assert main(["data", "verify", str(cache)]) == 0


@pytest.mark.long
def test_tokens_of_text(server: S3Server, tmp_path: Path) -> None:
    source = tmp_path / "source.jsonl"
    source.write_text("".join(json.dumps({"text": f"{number} bottles of beer " * 20}) + "\n" for number in range(40)))
    settings = {"tokenizer": "bytes", "validation_share": 0.3, "seed": 0, "part_bytes": 4000}
    prepare_text(
        Preparation(sources=(source,), folder=tmp_path / "tokens", **settings),  # type: ignore[arg-type]
        map,
        lambda words: None,
    )
    for path in (tmp_path / "tokens").glob("*.*"):
        server.put_object(f"tokens/{path.name}", path.read_bytes())
    url = f"{server.url}/tokens"
    disk, remote = (
        TokenShards(folder, "train") for folder in (tmp_path / "tokens", cache_folder(url, fetch_manifest(url)))
    )
    assert remote.read(0, len(remote)).tobytes() == disk.read(0, len(disk)).tobytes()
    assert main(["data", "stage", url, str(tmp_path / "to")]) == 2


def test_other_urls_of_fsspec(disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    monkeypatch.setenv("HPCTRAIN_CACHE", str(tmp_path))
    assert epochs(disk.as_uri(), [0]) == epochs(disk, [0])
    with refused("HT-url-unknown", problem="Protocol not known: nonsense"):
        fetch_manifest("nonsense://bucket/shards")


@pytest.mark.long
def test_a_cache_without_room_is_refused_before_the_start(
    server: S3Server, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(path.stat().st_size for path in disk.glob("*.tar"))
    with small_disk_at(tmp_path / "small", "1m") as small:
        monkeypatch.setenv("HPCTRAIN_CACHE", str(small))
        with refused("HT-disk-full", wanted=size / 1e9, done="fetched") as caught:
            open_sources(recipe(server.url))
        assert "HPCTRAIN_CACHE=DIR" in caught.value.hint
        assert not [name for name in server.gets if name.endswith(".tar")]
        # A limit may be what makes it fit, and where it does not the disk is named.
        files = ShardFiles(cache_folder(server.url, fetch_manifest(server.url)))
        shards = [file for split in read_manifest(disk).splits.values() for file in split.shards]
        with refused("HT-disk-full") as caught:
            for file in shards:
                files.path(file.stored)
        assert caught.value.values["path"].is_relative_to(small)
        # Its frames have files of the disk open, which could not be unmounted.
        del caught
        gc.collect()
        assert not unfinished(small)


def test_what_a_killed_run_left_in_the_cache_is_removed(server: S3Server) -> None:
    manifest = fetch_manifest(server.url)
    folder = cache_folder(server.url, manifest)
    killed, at_work = (temporary(folder / f"train-00000{number}.tar") for number in range(2))
    for path in (killed, at_work):
        path.write_bytes(b"half")
    long_ago = time.time() - 3600
    os.utime(killed, (long_ago, long_ago))
    assert cache_folder(server.url, manifest) == folder
    assert not killed.exists() and at_work.exists()


def test_a_cache_that_is_removed_meanwhile_is_fetched_again(server: S3Server, disk: Path) -> None:
    shards = open_shards(cache_folder(server.url, fetch_manifest(server.url)), "train")
    shutil.rmtree(shards.folder)
    assert shards.read(0) == open_shards(disk, "train").read(0)


def test_a_cache_that_anybody_could_have_made_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCTRAIN_CACHE", raising=False)
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path))
    folder = cache_folder("s3://bucket/shards", b"{}")
    root = tmp_path / f"hpctrain-cache-{os.getuid()}"
    assert folder.parent == root and root.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(root)
    (tmp_path / "elsewhere").mkdir()
    root.symlink_to(tmp_path / "elsewhere")
    with refused("HT-cache-not-safe", root=root):
        cache_folder("s3://bucket/shards", b"{}")


def test_a_login_node_needs_no_server(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    option = ["--set", f"data.path={server.url}"]
    assert main(["run", "goyal2017", "--smoke", "-np", "1", "--framework", "torch", "--dry-run", *option]) == 0
    assert main(["plan", "goyal2017", "-np", "8", *option]) == 0
    assert main(["submit", "goyal2017", "--smoke", "--cluster", "cpu", "--dry-run", *option]) == 0
    assert server.requests == 0
    assert "hush" not in capsys.readouterr().out


@pytest.mark.parametrize("url", ["s3://me:hush@bucket/shards", "https://host/shards?X-Amz-Signature=hush"])
def test_a_url_with_credentials_is_refused_unread(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "goyal2017", "--smoke", "-np", "1", "--dry-run", "--set", f"data.path={url}"]) == 2
    assert main(["data", "stage", url, str(tmp_path / "to")]) == 2
    assert main(["plan", "goyal2017", "-np", "8", "--set", f"data.path={url}", "--json"]) == 2
    printed, said = capsys.readouterr()
    assert codes(said) == ["HT-url-with-credentials"] * 3 and json.loads(printed)["error"]["code"] == codes(said)[0]
    assert "hush" not in printed + said
    assert list(tmp_path.iterdir()) == []


def test_without_the_extra_it_is_named(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with refused("HT-package-not-installed") as caught:
        fetch_manifest("s3://bucket/shards")
    assert "hpctrain[objects]" in caught.value.hint
    assert Objects("s3://bucket/shards/").at("x") == "s3://bucket/shards/x"
    assert len(open_shards(disk, "train")) == 29
