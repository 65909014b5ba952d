"""``hpctrain bench``: ratios between alternatives, measured in one run on real ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hpctrain.cli.options import AsJson, NamedHosts, with_groups
from hpctrain.common.errors import HpctrainError
from hpctrain.common.files.printable import json_text
from hpctrain.report.output import answer, print_table, tell

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Measure what training costs on this machine.")

_SIZES = "1K,4K,16K,64K,256K,1M,4M,16M,64M,102400000,256M"


Model = Literal["convnet", "resnet50", "transformer", "digits"]
# Samples a rank that one core computes in well under a second.
_BATCHES: dict[Model, int] = {"convnet": 16, "resnet50": 8, "transformer": 8, "digits": 32}

Precision = Literal["float32", "bf16", "fp16"]

Ranks = Annotated[int | None, typer.Option("-np", metavar="N", min=1, help="Number of ranks (2, or the hosts' slots).")]


# Below this load average, a measurement counts as undisturbed.
_QUIET = 0.5
# What JSON says about a measurement beside its rows.
_ABOUT = ("ranks", "hosts", "cores", "oversubscribed", "load", "left_out")


def _print(measured: Mapping[str, Any], record: Mapping[str, Any], table: Any, *, as_json: bool) -> None:
    """Print a table, with warnings about what was not measured and about other processes; or all of it as JSON."""
    about = {name: measured[name] for name in _ABOUT if name in measured}
    if as_json:
        answer(json_text({**record, **about}))
        return
    print_table(table)
    if measured["load"] > _QUIET:
        tell(f"other processes were running: the load was {measured['load']} before; measure again when it is near 0")
    for name, why in about.get("left_out", {}).items():
        tell(f"left out: {name}: {why}")


@app.command()
@with_groups
def allreduce(
    ranks: Annotated[
        int | None, typer.Option("-np", metavar="N", min=2, help="Number of ranks (2, or the hosts' slots).")
    ] = None,
    *,
    hosts: NamedHosts,
    link_gbit: Annotated[
        float | None,
        typer.Option(metavar="GBIT", min=1e-3, help="Bandwidth of a host's link; also shows the ratio to its bound."),
    ] = None,
    sizes: Annotated[str, typer.Option(metavar="LIST", help="Bytes; K, M and G are powers of 1024.")] = _SIZES,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds for sizes up to 16 MiB; larger sizes get fewer, at least 7.")
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """Time an all-reduce with each engine, interleaved: hpctrain's own (mpi), MPI_Allreduce, Horovod, torch.distributed
    over Gloo (and NCCL, where each rank has a GPU), and a plain copy of the same number of bytes, which is the limit on
    one host. On several hosts hpctrain's own engine also sends float16 and bfloat16.
    """
    from hpctrain.common.run.plan import HostOptions
    from hpctrain.control.programs.bench import measure, parse_sizes
    from hpctrain.report.benchmarks import allreduce_rows, allreduce_table

    wanted = parse_sizes(sizes)
    options = HostOptions(**hosts.given())
    if link_gbit and not (options.hosts or options.hostfile):
        raise HpctrainError(
            "HT-option-needs-another",
            "--link-gbit describes the links between hosts",
            "name the hosts: -H n1,n2, or --hostfile FILE",
        )
    measured = measure("allreduce", ranks, ",".join(map(str, wanted)), str(rounds), hosts=options)
    rows = allreduce_rows(
        {int(size): times for size, times in measured["seconds"].items()},
        measured["ranks"],
        oversubscribed=measured["oversubscribed"],
        hosts=measured["hosts"],
        link_bytes_per_s=link_gbit * 1e9 / 8 if link_gbit else None,
    )
    _print(measured, {"rows": rows}, allreduce_table(rows, measured["cores"]), as_json=as_json)


@app.command()
@with_groups
def step(
    ranks: Ranks = None,
    *,
    hosts: NamedHosts,
    model: Annotated[
        Model, typer.Option(help="Network; they have 13, 26, 10 and 0.09 million parameters.")
    ] = "convnet",
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each variant.")] = 30,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples per rank (16, 8, 8, 32).")] = None,
    image_size: Annotated[
        int | None, typer.Option(min=32, help="Side length of resnet50's images in pixels (64).")
    ] = None,
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="Measure half, one, two and four times the batch, for `predict --calibration`."),
    ] = False,
    precision: Annotated[
        Precision, typer.Option(help="Precision of the forward and backward pass; for --sweep.")
    ] = "float32",
    as_json: AsJson = False,
) -> None:
    """Time one training step without communication (the limit), with Horovod's own optimizer, with PyTorch's
    DistributedDataParallel, and through hpctrain over each of its backends, interleaved.
    """
    from hpctrain.common.run.plan import HostOptions
    from hpctrain.control.programs.bench import measure
    from hpctrain.report.benchmarks import step_rows, step_table

    if image_size and model != "resnet50":
        raise HpctrainError(
            "HT-option-not-usable-here",
            "--image-size is for resnet50, not for {model}",
            "leave it out, or add --model resnet50",
            model=model,
        )
    samples = batch or _BATCHES[model]
    options = HostOptions(**hosts.given())
    if sweep:
        batches = sorted({max(1, samples // 2), samples, 2 * samples, 4 * samples})
        size = (image_size or 64) if model == "resnet50" else None
        arguments = (model, str(rounds), ",".join(map(str, batches)), str(size or 0), precision)
        measured = measure("sweep", ranks, *arguments, hosts=options)
        _print_sweep(measured, model, size, precision, as_json=as_json)
        return
    if precision != "float32":
        raise HpctrainError(
            "HT-option-needs-another",
            "--precision {precision} is for --sweep",
            "leave it out, or add --sweep",
            precision=precision,
        )
    measured = measure("step", ranks, model, str(rounds), str(samples), str(image_size or 64), hosts=options)
    rows = step_rows(measured["seconds"])
    where = f" of {measured['hosts']} hosts" if measured["hosts"] > 1 else ""
    title = f"one step of {model} on {measured['ranks']} ranks{where}, {samples} samples each, {rounds} rounds"
    record = {"model": model, "batch": samples, "rounds": rounds, "rows": rows}
    title += ", oversubscribed" if measured["oversubscribed"] else ""
    _print(measured, record, step_table(rows, title), as_json=as_json)


def _print_sweep(
    measured: Mapping[str, Any], model: Model, size: int | None, precision: Precision, *, as_json: bool
) -> None:
    """Print steps without communication at several batch sizes, which calibrate a prediction."""
    from hpctrain.control.predict.measurements import make_sweep
    from hpctrain.report.benchmarks import sweep_table

    if measured["hosts"] > 1:
        raise HpctrainError(
            "HT-option-not-usable-here",
            "--sweep measures what one node computes",
            "leave the hosts out, or name one",
        )
    name = "digits_cnn" if model == "digits" else str(model)
    made = make_sweep(measured, name, image_size=size, precision=precision)
    _print({"load": measured["load"]}, {"sweeps": [made.model_dump()]}, sweep_table(made), as_json=as_json)


@app.command()
def loader(
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Shards; by default photographs made for the benchmark.")
    ] = None,
    workers: Annotated[
        list[int] | None, typer.Option(metavar="N", min=1, help="Processes (1 and 2); repeatable.")
    ] = None,
    image_size: Annotated[int, typer.Option(min=32, help="Side length of the images that they make.")] = 224,
    rounds: Annotated[int, typer.Option(min=1, help="Passes over the photographs.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Images per second of hpctrain's loader, by the number of its processes, for `predict --calibration`."""
    from hpctrain.control.programs.bench import measure
    from hpctrain.report.benchmarks import loader_rows, loader_table

    numbers = list(dict.fromkeys(workers or [1, 2]))
    if data and not (data / "manifest.json").is_file():
        raise HpctrainError(
            "HT-shards-not-there",
            "{folder} is not a folder of shards",
            "hpctrain data shard SOURCE DIR makes one",
            folder=data,
        )
    folder = str(data.absolute()) if data else ""
    measured = measure("loader_rates", 1, str(rounds), str(image_size), folder, *map(str, numbers), backend="single")
    rows = loader_rows(measured["seconds"])
    title = f"photographs to {image_size} pixels"
    record = {"image_size": image_size, "rounds": rounds, "rows": rows}
    _print(measured, record, loader_table(rows, title), as_json=as_json)
