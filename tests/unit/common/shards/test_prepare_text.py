"""Text to tokens: the same bytes on any processes, what is resumed, what is refused."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import psutil
import pytest

from hpctrain.cli.main import main
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.shards.resumable import Map
from hpctrain.common.shards.text.documents import Span, divide, documents, list_files
from hpctrain.common.shards.text.prepare import Preparation, prepare_text
from hpctrain.common.shards.text.token_manifest import TokenShards
from hpctrain.worker.data import open_sources
from support.refusals import refused
from support.shard_folders import contents

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "zwölf", "große", "Hunde", "and", "𝄞", "<|endoftext|>"]


def text(number: int) -> str:
    chosen = random.Random(number)
    return " ".join(chosen.choices(WORDS, k=chosen.randrange(1, 60)))


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    (folder / "more").mkdir()
    for number in range(20):
        (folder / f"{number:02}.txt").write_text(text(number), encoding="utf-8")
    documents = ({"id": number, "text": text(number)} for number in range(20, 120))
    lines = [json.dumps(each, ensure_ascii=each["id"] % 2 == 0) for each in documents]
    written = "\n".join([*lines[:80], "", *lines[80:]])
    (folder / "more" / "many.jsonl").write_text(written, encoding="utf-8")
    return folder


def prepared(source: Path, folder: Path, run: Map = map, **changes):
    settings = {"tokenizer": "bytes", "validation_share": 0.2, "part_bytes": 3000, **changes}
    said: list[str] = []
    manifest = prepare_text(Preparation(sources=(source,), folder=folder, **settings), run, said.append)
    return manifest, said


def content(folder: Path) -> dict[str, bytes]:
    return {name: each for name, each in contents(folder).items() if name.endswith(".bin")}


def texts(folder: Path, split: str) -> list[str]:
    shards = TokenShards(folder, split)
    row = shards.read(0, len(shards))
    parts = np.split(row, np.flatnonzero(row == 256) + 1)[:-1]
    return [part[:-1].astype(np.uint8).tobytes().decode() for part in parts]


def test_every_document_is_once_in_one_split_and_in_order(source, tmp_path):
    manifest, _ = prepared(source, tmp_path / "out")
    assert len(manifest.train.shards) > 4
    train, val = texts(tmp_path / "out", "train"), texts(tmp_path / "out", "val")
    everything = [text(number) for number in range(120)]
    assert sorted(train + val) == sorted(everything)
    assert [each for each in everything if each in train] == train
    assert (manifest.train.documents, manifest.val.documents) == (len(train), len(val))
    assert 0.1 < len(val) / 120 < 0.35
    assert not set(train) & set(val)


def test_the_bytes_do_not_depend_on_who_makes_a_part_when(source, tmp_path):
    def backwards(function, items):
        return [function(item) for item in list(items)[::-1]][::-1]

    manifests = [prepared(source, tmp_path / name, run)[0] for name, run in (("1", map), ("2", backwards))]
    assert content(tmp_path / "1") == content(tmp_path / "2")
    assert manifests[0] == manifests[1]


def test_what_is_missing_or_damaged_is_made_again_and_nothing_else(source, tmp_path):
    folder = tmp_path / "out"
    manifest, _ = prepared(source, folder)
    before = content(folder)
    times = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.bin")}
    (folder / "train-000002.bin").unlink()
    (folder / "val-000001.bin").write_bytes(b"damaged")
    (folder / "manifest.json").unlink()
    again, said = prepared(source, folder)
    assert (again, content(folder)) == (manifest, before)
    assert re.findall(r"\d+", said[-1])[-1] == "2"
    changed = {path.name for path in folder.glob("*.bin") if path.stat().st_mtime_ns != times[path.name]}
    assert changed == {f"{split}-00000{number}.bin" for split in ("train", "val") for number in (1, 2)}


def test_reading_goes_from_one_shard_into_the_next(source, tmp_path):
    prepared(source, tmp_path / "out")
    shards = TokenShards(tmp_path / "out", "train")
    files = sorted((tmp_path / "out").glob("train-*.bin"))
    whole = np.concatenate([np.frombuffer(path.read_bytes(), "<u2") for path in files])
    assert len(shards) == len(whole)
    opened = psutil.Process().num_fds()
    rows = [shards.read(begin, 2000) for begin in range(0, len(whole) - 2000, 577)]
    for number, row in enumerate(rows):
        np.testing.assert_array_equal(row, whole[number * 577 : number * 577 + 2000])
    # A large text has more shards than a process may have open files.
    assert psutil.Process().num_fds() == opened


@pytest.mark.parametrize("damage", ["cut", "longer", "gone"])
def test_a_shard_that_is_not_whole_is_named(source, tmp_path, damage):
    folder = tmp_path / "out"
    prepared(source, folder)
    shard = folder / "train-000001.bin"
    if damage == "gone":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-2] if damage == "cut" else shard.read_bytes() + b"xx")
    with refused("HT-shard-damaged", path=shard) as raised:
        TokenShards(folder, "train")
    # The command that mends it.
    assert f"hpctrain data prepare-text {source} {folder} --tokenizer bytes" in raised.value.hint
    prepared(source, folder)
    TokenShards(folder, "train")


def test_other_settings_do_not_go_on_in_a_folder(source, tmp_path):
    folder = tmp_path / "out"
    prepared(source, folder)
    with refused("HT-shards-begun-otherwise", settings="seed"):
        prepared(source, folder, seed=1)
    moved = tmp_path / "moved"
    shutil.copytree(source, moved)
    prepared(moved, folder)
    (moved / "00.txt").write_text("another", encoding="utf-8")
    with refused("HT-shards-begun-otherwise", settings="images or texts"):
        prepared(moved, folder)


@pytest.mark.parametrize(
    ("name", "line", "words"),
    [
        ("a.jsonl", b'{"text": "one"}\n{"text": 5}\n', "byte 16 is not a JSON object whose key 'text' is"),
        ("a.jsonl", b'{"text": "one"}\n{"body": "two"}\n', "byte 16 is not a JSON object"),
        ("a.jsonl", b'{"text": "\\ud83d"}\n', "byte 0 is not a JSON object"),
        ("a.txt", b"gr\xfcn", "byte 2 is not UTF-8"),
        ("a.csv", b"a,b", "neither a text file nor"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, name, line, words):
    (tmp_path / name).write_bytes(line)
    with refused("HT-source-wrong", words, path=tmp_path / name):
        prepared(tmp_path / name, tmp_path / "out")


def test_misuse_is_refused(source, tmp_path):
    with refused("HT-file-unreadable", path=tmp_path / "missing.txt"):
        prepared(tmp_path / "missing.txt", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with refused("HT-source-wrong", "has no text in it", path=tmp_path / "empty"):
        prepared(tmp_path / "empty", tmp_path / "out")
    with refused("HT-source-wrong", "of 120 documents 120 are in train, 0 in val"):
        prepared(source, tmp_path / "none", validation_share=0.0)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with refused("HT-output-exists", folder=tmp_path / "full", others="mine"):
        prepared(source, tmp_path / "full")


def test_spans_of_any_size_have_each_line_once(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": "x" * length}) for length in (0, 1, 5, 2, 9)]
    path.write_text("\n".join(lines) + "\n")
    for size in range(1, 60):
        parts = divide(list_files([path], print), size)
        found = [len(each) for part in parts for span in part for each in documents(span)]
        assert found == [0, 1, 5, 2, 9], size
    assert [*documents(Span(path=path, begin=0, end=1))] == [""]


def test_a_folder_s_text_is_taken_and_what_is_left_out_is_said(tmp_path):
    folder, elsewhere = tmp_path / "texts", tmp_path / "elsewhere"
    wanted = {
        "A.TXT": (b"one\r\n", ["one\n"]),
        # The mark of an editor on Windows.
        "b.txt": ("\ufeffzwölf".encode(), ["zwölf"]),
        "c.JSONL": (b'\xef\xbb\xbf{"text": "three"}\r\n\r\n{"text": "four"}', ["three", "four"]),
        "with blanks.md/d.md": (b"five", ["five"]),
    }
    hidden = ("._b.txt", ".cache/e.txt", "with blanks.md/.ipynb_checkpoints/d.md")
    for name, content in [
        *((name, each) for name, (each, _) in wanted.items()),
        *((name, b"\0\5\x16") for name in hidden),
    ]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    elsewhere.mkdir()
    (elsewhere / "f.txt").write_text("six")
    for name in ("f.jsonl.gz", "g.parquet", "h.text"):
        (folder / name).touch()
    (folder / "books").symlink_to(elsewhere)
    (folder / "loop").symlink_to(folder)
    (folder / "linked.txt").symlink_to(elsewhere / "f.txt")
    said: list[str] = []
    files = list_files([folder], said.append)
    found = {
        file.name: [each for span in next(iter(divide([file], 5)), ()) for each in documents(span)] for file in files
    }
    assert [file.name for file in files] == ["A.TXT", "b.txt", "c.JSONL", "linked.txt", "with blanks.md/d.md"]
    # A span of five bytes begins one line of the .jsonl.
    assert found == {
        **{name: texts for name, (_, texts) in wanted.items()},
        "c.JSONL": ["three"],
        "linked.txt": ["six"],
    }
    assert [*documents(Span(path=folder / "c.JSONL", begin=0, end=40))] == ["three", "four"]
    (left_out,) = said
    assert all(name in left_out for name in ("(5)", "books", "f.jsonl.gz", "g.parquet"))
    list_files([folder / "with blanks.md", elsewhere / "f.txt"], said.append)
    assert len(said) == 1


def library(folder: Path, tokens: int = 300, special: tuple[str, ...] = ("<|endoftext|>",)) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=tokens, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([text(number) for number in range(100)], trainer)
    made.enable_truncation(8)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_a_tokenizers_file_is_used(source, tmp_path):
    file = library(tmp_path)
    manifest, _ = prepared(source, tmp_path / "out", tokenizer=str(file))
    separator = manifest.settings.tokenizer.separator
    assert manifest.settings.tokenizer.vocabulary == 300
    import tokenizers

    plain = tokenizers.Tokenizer.from_file(str(file))
    assert separator == plain.token_to_id("<|endoftext|>")
    plain.no_truncation()
    shards = TokenShards(tmp_path / "out", "val")
    row = shards.read(0, len(shards))
    decoded = [plain.decode(part[:-1].tolist()) for part in np.split(row, np.flatnonzero(row == separator) + 1)[:-1]]
    # Written out in a text, it is no separator.
    assert any("<|endoftext|>" in each for each in decoded)
    prepared(source, tmp_path / "bytes")
    assert decoded == texts(tmp_path / "bytes", "val")


def test_a_tokenizer_that_does_not_do_is_refused(source, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    with refused("HT-tokenizer-wrong", path=tmp_path / "none.json"):
        prepared(source, tmp_path / "out", tokenizer=str(tmp_path / "none.json"))
    file = library(tmp_path)
    with refused("HT-tokenizer-wrong", "has no token '<eos>'", path=file) as raised:
        prepared(source, tmp_path / "out", tokenizer=str(file), separator="<eos>")
    assert "<|endoftext|>" in raised.value.hint
    words = {"<|endoftext|>": 0, **{f"word{number}": number for number in range(1, 65537)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<|endoftext|>"))
    made.save(str(file))
    with refused("HT-tokenizer-wrong", "has 65,537 tokens", "at most 65,536", path=file):
        prepared(source, tmp_path / "out", tokenizer=str(file))


def recipe(folder: Path, *overrides: str):
    return load_recipe("gpt2-124m", [f"data.path={folder}", *overrides])


def test_a_model_must_know_all_tokens(source, tmp_path):
    prepared(source, tmp_path / "out")
    train, val = open_sources(recipe(tmp_path / "out", "model.context=8", "model.vocabulary=257"))
    assert len(train) and len(val)
    with refused("HT-data-unfit", "has 257 tokens", "vocabulary has 256") as raised:
        open_sources(recipe(tmp_path / "out", "model.context=8", "model.vocabulary=256"))
    assert "--set model.vocabulary=320" in raised.value.hint


def test_a_text_shorter_than_a_window_is_refused(source, tmp_path):
    prepared(source, tmp_path / "out")
    with refused("HT-data-unfit", "text in val is shorter than a window of 8000 tokens"):
        open_sources(recipe(tmp_path / "out", "model.context=8000"))


def command_line(*arguments: str | Path) -> int:
    return main([*map(str, arguments)])


def test_the_commands(source, tmp_path, capsys):
    folder = tmp_path / "out"
    options = ["--tokenizer", "bytes", "--validation-share", "0.2", "--part-mb", "0.003"]
    assert command_line("data", "prepare-text", source / "more", source / "00.txt", folder, *options, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    splits = printed["splits"]
    assert (printed["vocabulary"], printed["separator"]) == (257, 256)
    assert splits["train"]["documents"] + splits["val"]["documents"] == 101
    assert splits["train"]["tokens"] == len(TokenShards(folder, "train"))
    assert command_line("data", "verify", folder) == 0
    assert str(splits["val"]["tokens"]) in capsys.readouterr().out
    shard = folder / "train-000001.bin"
    content = bytearray(shard.read_bytes())
    content[7] ^= 1
    shard.write_bytes(content)
    assert command_line("data", "verify", folder) == 3
    said = capsys.readouterr().err
    assert "train-000001.bin: changed" in said
    assert f"hpctrain data prepare-text {source / 'more'} {source / '00.txt'} {folder} --tokenizer bytes" in said
    assert command_line("data", "stage", folder, tmp_path / "staged") == 2
    assert "holds tokens" in capsys.readouterr().err
