"""``hpctrain predict``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.options import NodeFile, Switches, with_groups
from hpctrain.cli.training_options import TrainingOptions
from hpctrain.cli.work import print_notes
from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.mesh import Mesh, parse_mesh
from hpctrain.common.run.request import FRAMEWORKS
from hpctrain.common.workloads.workload import read_workload
from hpctrain.control.predict.network import Hardware
from hpctrain.control.predict.prediction import Site
from hpctrain.control.predict.prediction_request import PredictionRequest, predict_request, training_of
from hpctrain.control.predict.training import Training, require_data_parallel, require_known, script_training
from hpctrain.control.predict.transformers.language_training import (
    LanguageTraining,
    parse_settings,
    recipe_language_training,
)
from hpctrain.control.predict.transformers.model_sizes import transformer
from hpctrain.control.programs.traced_script import trace_script
from hpctrain.control.schedulers.profile import load_profile
from hpctrain.control.topology.node_file import node_map_of
from hpctrain.control.topology.records import LANE_GBIT
from hpctrain.report.output import answer, answer_json, print_table, tell
from hpctrain.report.prediction_table import (
    candidate_table,
    memory_warnings,
    prediction_notes,
    prediction_record,
    prediction_table,
)

# A transformer in a few words is longer than a title should be.
_LONG_NAME = 40


# Matches 200Gb, 200G, 25Gbit/s, and 25GB/s, in which B stands for bytes.
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*[gG](b|bit|B)?(?:ps|/s)?", re.ASCII)
_MOST_NODES = 1_000_000
_NUMBER = re.compile(r"\d{1,7}", re.ASCII)
_DOUBLING = re.compile(r"(\d{1,7})\.\.(\d{1,7})", re.ASCII)


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
        str | None, typer.Option(metavar="NAME", help="Predict time, memory and energy on these GPUs, or on `cpu`.")
    ] = None
    gpus_per_node: Annotated[int | None, typer.Option(metavar="G", min=1, help="Ranks per node.")] = None
    cluster: Annotated[str | None, typer.Option(metavar="PROFILE", help="Take a node's hardware from a profile.")] = (
        None
    )
    adapters_per_node: Annotated[int | None, typer.Option(metavar="A", min=1, help="Network adapters per node.")] = None
    link: Annotated[str | None, typer.Option(metavar="RATE", help="Rate of an adapter: 200Gb.")] = None
    calibration: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Measurements: of `bench step --sweep`, `bench allreduce`, `bench loader`; repeatable.",
        ),
    ] = None
    batch: Annotated[int | None, typer.Option(metavar="N", min=1, help="For a script: samples per rank in a step.")] = (
        None
    )
    optimizer: Annotated[
        str | None, typer.Option(metavar="NAME", help="For a script: sgd (with momentum), adam, …")
    ] = None
    precision: Annotated[
        str | None, typer.Option(metavar="NAME", help="For a script or transformer: float32, bf16, fp16, fp8, fp4.")
    ] = None
    tcp: Annotated[bool, typer.Option("--tcp", help="The adapters have no RDMA.")] = False
    pue: Annotated[float, typer.Option(min=1.0, max=10.0, help="The site's power for each watt of its machines.")] = 1.0
    grid_intensity: Annotated[
        float | None, typer.Option(metavar="G/KWH", min=0.0, max=10_000.0, help="Grams of CO2 per kWh.")
    ] = None
    explain: Annotated[bool, typer.Option("--explain", help="List the constants that matter most.")] = False


@with_groups
def predict(
    work: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE|SCRIPT|TRACE",
            help="A recipe's name or file; a script; or a network that hpctrain.trace wrote, a .json file.",
            show_default=False,
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="Arguments of a script.")
    ] = None,
    *,
    nodes: Annotated[
        str, typer.Option(metavar="N", help="Numbers of nodes: 8, or 1,8,64, or 1..512, which doubles.")
    ] = "1",
    training: TrainingOptions,
    options: PredictionOptions,
    switches: Switches,
    node: NodeFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Predict how long a training takes, how well it scales, and how much memory and energy it needs. Starts nothing.

    Each figure has a range that holds 80 % of the cases. --set changes a recipe, or a transformer's training (batch,
    micro_batch, …), and --mesh auto finds the fastest mesh of a transformer that fits.
    """
    if training.framework is not None and training.framework not in FRAMEWORKS:
        raise HpctrainError(
            "HT-choice-unknown",
            "unknown framework {framework!r}",
            nearest(training.framework, FRAMEWORKS),
            framework=training.framework,
        )
    asked = _asked(work, training, options, arguments or ())
    prediction = predict_request(
        asked,
        PredictionRequest(
            hardware=_hardware(switches, node, options),
            nodes=node_counts(nodes),
            backend=training.backend or "auto",
            framework=training.framework or "torch",
            calibration=options.calibration or (),
            site=Site(pue=options.pue, g_per_kwh=options.grid_intensity),
        ),
    )
    for warning in (*prediction.warnings, *memory_warnings(prediction)):
        tell(f"hpctrain: warning: {warning}")
    if as_json:
        answer_json(prediction_record(prediction))
        return
    print_table(prediction_table(prediction))
    if prediction.candidates:
        print_table(candidate_table(prediction))
    answer("\n".join(prediction_notes(prediction, explain=options.explain)))


def _asked(
    work: str | None, training: TrainingOptions, options: PredictionOptions, arguments: Sequence[str]
) -> Training | LanguageTraining:
    """The training that is predicted."""
    if (work is None) == (options.transformer is None):
        raise HpctrainError(
            "HT-argument-missing",
            "what is to be predicted: a recipe, a script, a trace, or a --transformer",
            "name one of them, such as hpctrain predict goyal2017 or --transformer llama3-8b",
        )
    return _transformer(options, training) if work is None else _training(work, training, options, arguments)


def _transformer(options: PredictionOptions, training: TrainingOptions) -> LanguageTraining:
    """The training of the network of ``--transformer``."""
    text = options.transformer
    assert text is not None
    if options.batch is not None or options.optimizer is not None:
        raise HpctrainError(
            "HT-option-not-usable-here",
            "{options} for scripts, and {work} is a transformer",
            "--set batch=N, --set micro_batch=N, --set state=NAME",
            options="--batch and --optimizer are",
            work=text,
        )
    overrides = list(training.overrides or ())
    if options.precision is not None:
        overrides.append(f"precision={options.precision}")
    auto = training.mesh == "auto"
    return LanguageTraining(
        name=text if len(text) < _LONG_NAME else "transformer",
        network=transformer(text),
        settings=parse_settings(overrides),
        mesh=None if auto else parse_mesh(training.mesh) if training.mesh else Mesh(dp_shard=-1),
    )


def _training(
    work: str, training: TrainingOptions, options: PredictionOptions, arguments: Sequence[str]
) -> Training | LanguageTraining:
    """The training that is predicted."""
    of_script = {"batch": options.batch, "optimizer": options.optimizer, "precision": options.precision}
    if not work.endswith((".py", ".json")):
        wrong = next((name for name, value in of_script.items() if value is not None), None)
        if wrong or arguments:
            what = f"--{wrong} is" if wrong else "arguments after -- are"
            raise HpctrainError(
                "HT-option-not-usable-here",
                "{options} for scripts, and {work} is a recipe",
                "change a recipe by --set KEY=VALUE",
                options=what,
                work=work,
            )
        if training.mesh != "auto":
            return training_of(print_notes(load_recipe(work, training.of_recipe)))
        recipe = print_notes(load_recipe(work, training.overrides or ()))
        if recipe.data.name != "text":
            raise _no_search(work)
        return recipe_language_training(recipe, auto=True)
    if training.overrides:
        raise HpctrainError(
            "HT-option-not-usable-here",
            "--set is for recipes, and {work} is not one",
            "--batch, --optimizer, --precision",
            work=work,
        )
    if training.mesh == "auto":
        raise _no_search(work)
    if training.mesh is not None:
        require_data_parallel(parse_mesh(training.mesh))
    if options.batch is None:
        raise HpctrainError(
            "HT-argument-missing", "how many samples does a rank of {work} have in a step?", "--batch N", work=work
        )
    known = {"optimizer": options.optimizer or "sgd", "precision": options.precision or "float32"}
    require_known(**known)
    if work.endswith(".json"):
        workload = read_workload(Path(work))
    else:
        tell(f"hpctrain: tracing one step of {work}")
        workload = trace_script(Path(work), arguments)
    return script_training(workload, per_rank=options.batch, **known)


def _no_search(work: str) -> HpctrainError:
    return HpctrainError(
        "HT-option-not-usable-here",
        "--mesh auto is for transformers, and {work} is none",
        "leave it out: each rank then has the whole model",
        work=work,
    )


def _hardware(switches: Switches, node: str | None, options: PredictionOptions) -> Hardware:
    stated = Hardware(
        gpu=options.gpu,
        gpus_per_node=options.gpus_per_node,
        adapters=options.adapters_per_node,
        link_bytes_per_s=None if options.link is None else link_rate(options.link),
        **vars(switches),
        rdma=not options.tcp,
    )
    if node:
        node_map = node_map_of(node)
        for warning in node_map.warnings:
            tell(f"hpctrain: warning: {warning}")
        stated = stated.like(node_map)
    return stated.completed(load_profile(options.cluster).node) if options.cluster else stated


def node_counts(text: str) -> list[int]:
    """The numbers of ``--nodes``: 8, or 1,8,64, or 1..512, which doubles from 1 and ends with 512.

    Raises:
        HpctrainError: the text has another form, or a number is below 1 or too large.
    """
    counts: set[int] = set()
    for part in map(str.strip, text.split(",")):
        doubling = _DOUBLING.fullmatch(part)
        if doubling:
            low, high = int(doubling[1]), int(doubling[2])
            if 1 <= low <= high <= _MOST_NODES:
                counts |= {min(low << power, high) for power in range((high // low).bit_length() + 1)}
                continue
        elif _NUMBER.fullmatch(part) and 1 <= int(part) <= _MOST_NODES:
            counts.add(int(part))
            continue
        raise HpctrainError(
            "HT-option-bad-value",
            "--nodes {text}: {part!r} is not a number of nodes",
            f"for example 8, or 1,8,64, or 1..512, up to {_MOST_NODES}",
            text=text,
            part=part,
        )
    return sorted(counts)


def link_rate(text: str) -> float:
    """The rate of ``--link`` in bytes a second.

    Raises:
        HpctrainError: the text is no rate.
    """
    lanes = LANE_GBIT.get(text.strip().upper())
    if lanes is not None:
        return 4 * lanes * 1e9 / 8
    rate = _RATE.fullmatch(text.strip())
    if rate is None or float(rate[1]) == 0:
        raise HpctrainError(
            "HT-option-bad-value",
            "--link {text}: not the rate of a link",
            "in Gbit/s, for example 200Gb; or HDR, NDR",
            text=text,
        )
    return float(rate[1]) * 1e9 / (1 if rate[2] == "B" else 8)
