"""Options of ``hpctrain predict``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.run_options import TrainingOptions
from hpctrain.common.errors import HpctrainError
from hpctrain.common.recipes.mesh import AXES
from hpctrain.control.topology.records import LANE_GBIT

# Matches 200Gb, 200G, 25Gbit/s, and 25GB/s, in which B stands for bytes.
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*[gG](b|bit|B)?(?:ps|/s)?", re.ASCII)
_MOST_NODES = 1_000_000
_NUMBER = re.compile(r"\d{1,7}", re.ASCII)
_DOUBLING = re.compile(r"(\d{1,7})\.\.(\d{1,7})", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class PredictedTraining(TrainingOptions):
    """Changes to what is predicted."""

    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a value of the recipe, or of a transformer's training: batch, micro_batch, …; repeatable.",
        ),
    ] = None
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            metavar="AXIS=RANKS,…|auto",
            help=f"Divide the ranks along {', '.join(AXES)}; or auto, the fastest mesh of a transformer that fits.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PredictionOptions:
    """The hardware of a prediction, and what is known of it."""

    transformer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|SIZES|FILE",
            help="Predict a transformer instead: llama3-8b; layers=32,width=4096,heads=32,…; or a config.json.",
        ),
    ] = None
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Predict time, memory and energy on these GPUs, or on `cpu`.",
        ),
    ] = None
    gpus_per_node: Annotated[int | None, typer.Option(metavar="G", min=1, help="Ranks per node.")] = None
    cluster: Annotated[
        str | None,
        typer.Option(metavar="PROFILE", help="Take a node's hardware from a profile."),
    ] = None
    adapters_per_node: Annotated[
        int | None,
        typer.Option(metavar="A", min=1, help="Network adapters per node."),
    ] = None
    link: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Rate of an adapter: 200Gb."),
    ] = None
    background: Annotated[
        str | None,
        typer.Option(
            metavar="LOW,HIGH",
            help="Shares of the links between switches that other jobs use: 0,0.3.",
        ),
    ] = None
    calibration: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Measurements: of `bench step --sweep`, `bench allreduce`, `bench loader`, nccl-tests; repeatable.",
        ),
    ] = None
    batch: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="For a script: samples per rank in a step."),
    ] = None
    optimizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="For a script: sgd (with momentum), adam, …"),
    ] = None
    precision: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="For a script or transformer: float32, bf16, fp16, fp8, fp4."),
    ] = None
    tcp: Annotated[bool, typer.Option("--tcp", help="The adapters have no RDMA.")] = False
    pue: Annotated[
        float,
        typer.Option(min=1.0, max=10.0, help="The site's power for each watt of its machines."),
    ] = 1.0
    grid_intensity: Annotated[
        float | None,
        typer.Option(metavar="G/KWH", min=0.0, max=10_000.0, help="Grams of CO2 per kWh."),
    ] = None
    explain: Annotated[
        bool,
        typer.Option("--explain", help="List the constants that matter most."),
    ] = False
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Plot throughput and efficiency."),
    ] = None


def node_counts(text: str) -> list[int]:
    """The numbers of ``--nodes``: 8, or 1,8,64, or 1..512, which doubles from 1 and ends with 512.

    Raises:
        HpctrainError: the text has another form, or a number is below 1 or too large.
    """
    found: set[int] = set()
    for part in map(str.strip, text.split(",")):
        doubling = _DOUBLING.fullmatch(part)
        if doubling:
            low, high = int(doubling[1]), int(doubling[2])
            if 1 <= low <= high <= _MOST_NODES:
                found |= {min(low << power, high) for power in range((high // low).bit_length() + 1)}
                continue
        elif _NUMBER.fullmatch(part) and 1 <= int(part) <= _MOST_NODES:
            found.add(int(part))
            continue
        raise HpctrainError(
            "HT-option-bad-value",
            "--nodes {text}: {part!r} is not a number of nodes",
            f"for example 8, or 1,8,64, or 1..512, up to {_MOST_NODES}",
            text=text,
            part=part,
        )
    return sorted(found)


def link_rate(text: str) -> float:
    """The rate of ``--link`` in bytes a second.

    Raises:
        HpctrainError: the text is no rate.
    """
    lanes = LANE_GBIT.get(text.strip().upper())
    if lanes is not None:
        return 4 * lanes * 1e9 / 8
    found = _RATE.fullmatch(text.strip())
    if found is None or float(found[1]) == 0:
        raise HpctrainError(
            "HT-option-bad-value",
            "--link {text}: not the rate of a link",
            "in Gbit/s, for example 200Gb; or HDR, NDR",
            text=text,
        )
    return float(found[1]) * 1e9 / (1 if found[2] == "B" else 8)


def background_shares(text: str) -> tuple[float, float]:
    """The two shares of ``--background``.

    Raises:
        HpctrainError: the text is not two numbers.
    """
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise HpctrainError(
            "HT-option-bad-value", "--background {text}: not two shares", "for example 0,0.3", text=text
        ) from None
    return low, high
