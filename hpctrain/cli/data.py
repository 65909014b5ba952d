"""``hpctrain data``: images as shards, and text as tokens."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.options import AsJson
from hpctrain.common.errors import HpctrainError
from hpctrain.common.extras import require
from hpctrain.common.files.printable import json_text, printable, shell_word
from hpctrain.common.stderr import tell
from hpctrain.report.output import answer

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Make shards of ImageNet, check and stage them; make tokens."
)

Shards = Annotated[Path, typer.Argument(metavar="DIR", help="A folder of shards.")]
Processes = Annotated[
    int, typer.Option("-np", metavar="N", min=1, help="Processes of this machine that share the work.")
]

_NAMED = 10
# The usual size of a shard.
_USUAL_MB = 64


@app.command()
def shard(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A folder with train/ and val/ (or of classes), or of Parquet files.",
        ),
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the shards go.")],
    processes: Processes = 1,
    megabytes: Annotated[
        float | None, typer.Option("--shard-mb", metavar="MB", min=0.001, help="Largest size of a shard in MiB (64).")
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--shard-samples", metavar="N", min=1, help="Samples per shard.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order of the training images.")] = 0,
    image_column: Annotated[
        str, typer.Option(metavar="NAME", help="For Parquet: column of the images, binary or a struct with bytes.")
    ] = "image",
    label_column: Annotated[
        str, typer.Option(metavar="NAME", help="For Parquet: column of the labels, whole numbers or text.")
    ] = "label",
    short_side: Annotated[
        int | None,
        typer.Option(
            metavar="PIXELS", min=32, help="Make new JPEG files, of larger photographs with this shorter side."
        ),
    ] = None,
    quality: Annotated[int, typer.Option(metavar="Q", min=1, max=100, help="With --short-side: JPEG quality.")] = 90,
    validation_share: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            min=0.001,
            max=0.999,
            help="For SOURCE/CLASS/: share of the images that validate, chosen by a hash of their names.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make WebDataset shards of images, or continue making them; remakes shards that are missing or damaged."""
    require("imagenet")
    from hpctrain.common.shards.make import ShardRequest, make_shards
    from hpctrain.common.shards.manifest import Shrinking
    from hpctrain.common.shards.processes import with_processes

    if megabytes and samples:
        raise _wrong_options("--shard-mb and --shard-samples both say how large a shard is", "leave one out")
    sharding = ShardRequest(
        source=source,
        folder=folder,
        seed=seed,
        shard_bytes=None if samples else _bytes_of("--shard-mb", megabytes or _USUAL_MB),
        shard_samples=samples,
        image_column=image_column,
        label_column=label_column,
        shrinking=Shrinking(short_side=short_side, quality=quality) if short_side else None,
        validation_share=validation_share,
    )
    manifest = with_processes(processes, lambda run: make_shards(sharding, run, _say))
    counts = {name: {"samples": split.samples, "shards": len(split.shards)} for name, split in manifest.splits.items()}
    broken = [image.model_dump() for image in manifest.broken]
    if as_json:
        answer(json_text({"splits": counts, "classes": len(manifest.classes), "broken": broken}))
        return
    for name, count in counts.items():
        shards = f"{count['shards']} shard{'s' * (count['shards'] != 1)}"
        answer(f"{name}: {count['samples']} images of {len(manifest.classes)} classes in {shards}")
    if broken:
        answer(f"{len(broken)} images cannot be decoded; they are in the shards nevertheless:")
    for image in manifest.broken[:_NAMED]:
        answer(f"  {image.split} {image.key}: {image.message}")
    if len(broken) > _NAMED:
        answer(f"  and {len(broken) - _NAMED} more, in {folder / 'manifest.json'}")


def _wrong_options(problem: str, hint: str = "") -> HpctrainError:
    return HpctrainError("HT-data-options", "{problem}", hint, problem=problem)


def _say(text: str) -> None:
    tell(printable(text))


def _bytes_of(option: str, megabytes: float) -> int:
    if not math.isfinite(megabytes):
        raise _wrong_options(f"{option} {megabytes} is not a size", f"for example {option} {_USUAL_MB}")
    return int(megabytes * (1 << 20))


@app.command()
def prepare_text(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE…",
            help="Files or folders: a .txt, .md or .rst is one document, each line of a .jsonl has one as 'text'.",
        ),
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the tokens go.")],
    tokenizer: Annotated[
        str, typer.Option(metavar="FILE|bytes", help="A tokenizer.json of the tokenizers library, or bytes.")
    ],
    separator: Annotated[
        str, typer.Option(metavar="TOKEN", help="Token of the tokeniser that follows each document.")
    ] = "<|endoftext|>",
    validation_share: Annotated[
        float,
        typer.Option(metavar="SHARE", min=0, max=1, help="Share of the documents, chosen by a hash of their text."),
    ] = 0.0005,
    seed: Annotated[int, typer.Option(min=0, help="Decides which documents are for validation.")] = 0,
    processes: Processes = 1,
    megabytes: Annotated[
        float, typer.Option("--part-mb", metavar="MB", min=0.001, help="Amount of text per shard, in MiB.")
    ] = _USUAL_MB,
    as_json: AsJson = False,
) -> None:
    """Turn text into 16-bit tokens, or continue doing so; remakes shards that are missing or damaged."""
    from hpctrain.common.shards.processes import with_processes
    from hpctrain.common.shards.text import prepare

    wanted = prepare.Preparation(
        sources=tuple(sources),
        folder=folder,
        tokenizer=tokenizer,
        separator=separator,
        validation_share=validation_share,
        seed=seed,
        part_bytes=_bytes_of("--part-mb", megabytes),
    )
    manifest = with_processes(processes, lambda run: prepare.prepare_text(wanted, run, _say))
    known, splits = manifest.settings.tokenizer, {"train": manifest.train, "val": manifest.val}
    counts = {name: {"tokens": split.tokens, "documents": split.documents} for name, split in splits.items()}
    if as_json:
        answer(json_text({"splits": counts, "vocabulary": known.vocabulary, "separator": known.separator}))
        return
    for name, count in counts.items():
        answer(f"{name}: {count['tokens']:,} tokens of {count['documents']:,} documents")
    answer(f"vocabulary: {known.vocabulary:,} tokens, {known.separator} separates documents")


@app.command()
def verify(shards: Shards, as_json: AsJson = False) -> None:
    """Compare a folder of shards with its manifest: sizes and SHA-256. Exits 3 if anything differs."""
    from hpctrain.common.shards.folders import verify_folder

    verified = verify_folder(shards)
    if as_json:
        status = "failed" if verified.faults else "ok"
        rows = [{"file": file, "fault": fault} for file, fault in verified.faults.items()]
        remedy = verified.remedy if verified.faults else ""
        answer(json_text({"status": status, "shards": verified.shards, "faults": rows, "remedy": remedy}))
        if verified.faults:
            raise typer.Exit(3)
        return
    if verified.faults:
        listed = "".join(f"\n  {file}: {fault}" for file, fault in verified.faults.items())
        raise HpctrainError(
            "HT-data-damaged",
            "{path} is not as it was written:{listed}",
            f"{verified.remedy} makes these files again",
            exit_code=3,
            path=shards,
            listed=listed,
        )
    answer(f"{shards}: ok, {verified.shards} shards, {verified.holds}")


@app.command()
def stage(
    shards: Shards,
    to: Annotated[Path, typer.Argument(metavar="TO", help="A folder on a local disk of the node.")],
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Time limit to wait for another process of this node.")
    ] = 3600,
    check: Annotated[
        bool,
        typer.Option("--check", help="Also compare the SHA-256 of existing files, and recopy those that differ."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Copy the shards to a local disk, once per node: the first process copies, the others wait for it."""
    from hpctrain.common.shards.folders import holds_text
    from hpctrain.common.shards.stage import stage as copy

    if holds_text(shards):
        hint = f"cp -r {shell_word(shards)} TO"
        raise _wrong_options(f"{shards} holds tokens, and only images are staged", hint)
    done = copy(shards, to, wait_seconds=wait, check=check)
    if as_json:
        answer(json_text(asdict(done)))
        return
    answer(f"{to}: {done.copied} files copied ({done.bytes / 1e6:.3g} MB), {done.there} were already there")
