"""How far predictions are from published runs.

    python benchmarks/predictions.py mlperf resnet50.csv [--constants | --shipped]
    python benchmarks/predictions.py llm transformers.csv [--shipped] [--removed] [--open]
    python benchmarks/predictions.py llm transformers.csv [--constants | --ranges | --blind]
    python benchmarks/predictions.py published
    python benchmarks/predictions.py energy

``mlperf`` predicts each ResNet-50 run of MLPerf Training in a table (round, submitter, system, nodes,
accelerators_per_node, accelerator, global_batch, images_per_s_blocks) twice. First by the runs of other systems alone:
one system after the other is left out, the constants are fitted to the others, and all of its runs are predicted. Then
with the system's own smallest runs besides. Both times beside a line through the two smallest runs, of the GPU's other
systems or of the system itself. ``--constants`` prints the fit to all runs, which constants.yaml holds; ``--shipped``
predicts all runs by constants.yaml, which has seen them.

``llm`` predicts each run of a transformer in a table, one family after the other left out, and says how far the order
of layouts in each sweep is right. Of rows with ``fits`` (yes or no, of ``memory_gib``), such as those of
benchmarks/memory_limits.csv, it says whether they are predicted to. Its columns are those that
benchmarks/transformer_runs.py reads, in any order, apart by commas, semicolons or tabs; what a row leaves out is
completed, and rows that cannot be expressed are counted and named. ``--constants`` prints the fit to all runs, which
step.yaml holds, and ``--ranges`` the ranges, which ranges.yaml holds; ``--shipped`` predicts all runs by both.
``--removed`` takes a third of the columns from each row first. Publishers are dealt into five folds by a hash of their
names: terms are changed looking at four of them alone (``--open``), and the fifth is run once at the end (``--blind``).

``published`` predicts runs that the network decides, and single nodes. ``energy`` predicts MLPerf's power measurements.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlperf
import numpy as np
import published
import transformer_fit
from constant_fit import Fit, drawn_after, fit
from mlperf import Run
from published import Published

from hpctrain.common.workloads.workload import load_workload
from hpctrain.control.predict.compute import Device
from hpctrain.control.predict.job import Job, times
from hpctrain.control.predict.network import stated_network
from hpctrain.control.predict.prediction import Node, energy
from hpctrain.control.predict.values import DRAWS, Constant, Estimate, Values, constants, drawn, estimate
from hpctrain.control.topology.fabric import Floats

# What all systems have in common.
_COMMON = (
    "all.pace",
    "memory_efficiency",
    "conv_efficiency",
    "kernel_s",
    "jitter",
    "wire_efficiency",
    "nccl_step_s",
    "nccl.overlap",
)
# How far one system is from the others: its clocks and software, and its network.
_OWN = {"own.pace": 0.06, "own.kernel_s": 0.5, "own.network": 0.4}
# Of the logarithm of a step's time: of a system from the common constants, and of its own runs from each other.
_BETWEEN_SYSTEMS = 0.10
_WITHIN_SYSTEM = 0.05
# What decides how well a family scales.
_OF_SCALING = (
    "wire_efficiency",
    "tcp.wire_efficiency",
    "nccl_step_s",
    "nccl.overlap",
    "horovod.overlap",
    "horovod.negotiation_s",
    "jitter",
)


def free_constants(gpus: Sequence[str]) -> dict[str, Constant]:
    """The constants with room to be fitted, and those of the fit alone."""
    found = dict(constants())
    for gpu in gpus:
        found[f"{gpu}.pace"] = found[f"{gpu}.pace"].model_copy(update={"value": 1.0, "spread": 0.2})
    found["kernel_s"] = found["kernel_s"].model_copy(update={"value": 1.2e-5, "spread": 0.6})
    for name, spread in {"all.pace": 0.2, **_OWN}.items():
        found[name] = Constant(value=1.0, unit="", spread=spread, kind="assumed", source="of the fit")
    return found


def step_s(run: Run, values: Values, *, own: bool) -> Floats:
    """The step of a run, (columns,); ``own``: by its system's constants besides the common ones."""
    logs = dict(values.logs)

    def add(name: str, other: str, sign: int = 1) -> None:
        logs[name] = values.log_factor(name) + sign * values.log_factor(other)

    pace = f"{run.gpu}.pace"
    add(pace, "all.pace")
    if own:
        logs[pace] = logs[pace] + values.log_factor("own.pace")
        add("kernel_s", "own.kernel_s")
        add("wire_efficiency", "own.network", -1)
        add("nccl_step_s", "own.network")
    seen = Values(constants=values.constants, columns=values.columns, logs=logs)
    return times(job_of(run), seen).total


@cache
def job_of(run: Run) -> Job:
    """Its step."""
    return run.job()


def fitted(others: Sequence[Run], known: Sequence[Run], free: Mapping[str, Constant], gpus: Sequence[str]) -> Fit:
    """The constants by other systems' runs, and by the system's own ones that are known.

    Runs of one system are not independent of each other: together they count as one.
    """
    sizes = {system: len(runs) for system, runs in mlperf.by_system(others).items()}
    errors = [_BETWEEN_SYSTEMS * sizes[run.system] ** 0.5 for run in others] + [_WITHIN_SYSTEM] * len(known)
    names = [*_COMMON, *(f"{gpu}.pace" for gpu in gpus), *(_OWN if known else ())]
    return fit(
        lambda values: (
            [step_s(run, values, own=False) for run in others] + [step_s(run, values, own=True) for run in known]
        ),
        np.array([run.seconds for run in (*others, *known)]),
        np.array(errors),
        free,
        names,
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run, its prediction and two baselines' in seconds; None where a baseline has too few runs."""

    run: Run
    predicted: Estimate
    line: float | None = None
    pooled: float | None = None

    @property
    def error(self) -> float:
        """Of the predicted step time."""
        return self.predicted.value / self.run.seconds - 1

    @property
    def line_error(self) -> float | None:
        """Of the baseline's."""
        return None if self.line is None else self.line / self.run.seconds - 1

    @property
    def inside(self) -> bool:
        """Whether the interval holds it."""
        return self.predicted.low <= self.run.seconds <= self.predicted.high


def predict_left_out(runs: Sequence[Run], *, own: bool) -> list[Case]:
    """Each system left out in turn; ``own``: its smallest runs are known."""
    gpus = sorted({run.gpu for run in runs})
    free = free_constants(gpus)
    cases = []
    noise = np.concatenate([[0.0], np.random.default_rng(0).standard_normal(DRAWS)])
    for system, members in mlperf.by_system(runs).items():
        known, rest = mlperf.smallest(members) if own else ([], members)
        if not rest:
            continue
        others = [run for run in runs if run.system != system]
        values = drawn_after(free, fitted(others, known, free, gpus))
        family = known if own else _family(others, system[0])
        for run in rest:
            columns = step_s(run, values, own=True) * np.exp(_WITHIN_SYSTEM * noise)
            line = mlperf.line(family, run.batch) if family else None
            pooled = _pooled([each for each in others if each.gpu == run.gpu], known, run.batch)
            cases.append(Case(run=run, predicted=estimate(columns), line=line, pooled=pooled))
    return cases


def _pooled(others: Sequence[Run], known: Sequence[Run], batch: float) -> float | None:
    """The line of all other systems, scaled to the system's own runs that are known."""
    found = mlperf.pooled_line(others, batch)
    if found is None:
        return None
    ratios = [run.seconds / (mlperf.pooled_line(others, run.batch) or run.seconds) for run in known]
    return found * float(np.mean(ratios)) if ratios else found


def predict_shipped(runs: Sequence[Run]) -> list[Case]:
    """All runs by the constants that ``hpctrain predict`` draws from."""
    values = drawn(constants())
    return [Case(run=run, predicted=estimate(times(job_of(run), values).total)) for run in runs]


def _family(others: Sequence[Run], gpu: str) -> list[Run]:
    """The smallest runs of a GPU."""
    family = sorted((run for run in others if run.gpu == gpu), key=lambda run: (run.gpus, run.round))
    return mlperf.smallest(family)[0] if len(family) > 1 else []


def summary(cases: Sequence[Case]) -> str:
    """Lines of the errors of the model and of each baseline, and of the intervals."""
    inside = np.mean([case.inside for case in cases])
    lines = [f"{_errors(cases, [case.predicted.value for case in cases])}; intervals hold in {inside:.0%}"]
    for name, said in (
        ("a line through the two smallest runs", lambda case: case.line),
        ("a line closest to all known runs of the GPU", lambda case: case.pooled),
    ):
        able = [case for case in cases if said(case) is not None]
        if able:
            lines.append(f"{name}: {_errors(able, [said(case) for case in able])}")
            lines.append(f"  the model on these: {_errors(able, [case.predicted.value for case in able])}")
    return "\n".join(lines)


def _errors(cases: Sequence[Case], said: Sequence[float]) -> str:
    errors = np.abs([value / case.run.seconds - 1 for value, case in zip(said, cases, strict=True)])
    return f"{len(cases)} runs, median {np.median(errors):.1%}, 90 % within {np.quantile(errors, 0.9):.1%}"


def print_cases(cases: Sequence[Case]) -> None:
    """A table, worst first."""
    print("| run | GPUs | images a GPU | measured ms | predicted ms | error | line |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for case in sorted(cases, key=lambda case: -abs(case.error)):
        low, value, high = (f"{each * 1e3:.4g}" for each in vars(case.predicted).values())
        value, low = low, value
        line = "" if case.line_error is None else f"{case.line_error:+.1%}"
        print(
            f"| {case.run.name} | {case.run.gpus} | {case.run.batch:.0f} | {case.run.seconds * 1e3:.4g} | "
            f"{value} [{low}, {high}]{'' if case.inside else ' *'} | {case.error:+.1%} | {line} |"
        )


def print_constants(runs: Sequence[Run]) -> None:
    """The fit to all runs, as constants.yaml has it: a system's own distance is part of the pace's spread."""
    gpus = sorted({run.gpu for run in runs})
    free = free_constants(gpus)
    found = fitted(runs, [], free, gpus)
    place = {name: index for index, name in enumerate(found.names)}
    for name in _COMMON[1:]:
        spread = found.covariance[place[name], place[name]] ** 0.5
        print(f"{name}: {free[name].value * np.exp(found.mean[place[name]]):.4g} spread {spread:.3f}")
    for gpu in gpus:
        both = [place["all.pace"], place[f"{gpu}.pace"]]
        mean, variance = found.mean[both].sum(), found.covariance[np.ix_(both, both)].sum()
        print(f"{gpu}.pace: {np.exp(mean):.3f} spread {(variance + _OWN['own.pace'] ** 2) ** 0.5:.3f}")


def calibrated(family: Published, others: Sequence[Published], free: Mapping[str, Constant]) -> Values:
    """Constants by a family's smallest run alone, and by how well the other families scale."""
    names = [f"{family.smallest.device.name}.pace", *_OF_SCALING]
    scaled = [(other.smallest, job, other.alone, rate) for other in others for rate, job in other.runs.values()]
    own = family.smallest
    found = fit(
        lambda values: (
            [times(own, values).total]
            + [times(job, values).total / times(smallest, values).total for smallest, job, _, _ in scaled]
        ),
        np.array(
            [own.batch * own.count / family.alone]
            + [(job.count / rate) / (smallest.count / alone) for smallest, job, alone, rate in scaled]
        ),
        np.array([_WITHIN_SYSTEM] + [_BETWEEN_SYSTEMS] * len(scaled)),
        free,
        names,
    )
    return drawn_after(free, found)


def print_published() -> None:
    """Each family predicted from its smallest run."""
    free = dict(constants())
    for name in free:
        if name.endswith(".pace"):
            free[name] = free[name].model_copy(update={"spread": 0.4})
    print("| run | measured images/s | predicted | error |\n|---|--:|--:|--:|")
    groups = (published.horovod_families(), published.resnet50_families(), [published.bert()])
    for families in groups:
        for family in families:
            values = calibrated(family, [other for other in families if other is not family], free)
            for name, (rate, job) in family.runs.items():
                found = estimate(job.batch * job.count / times(job, values).total)
                missed = "" if found.low <= rate <= found.high else " *"
                print(
                    f"| {name} | {rate:,.0f} | {found.value:,.0f} [{found.low:,.0f}, {found.high:,.0f}]{missed} | "
                    f"{found.value / rate - 1:+.1%} |"
                )


# Power of a node in W, and kWh of a run without switches, of MLPerf's ResNet-50 on 8 H100 a node: its power logs.
_POWER = (
    ("8 GPUs, 400 images each", 1, 400, 13.5, (6900, 7090), (1.54, 1.58)),
    ("64 GPUs, 50 images each", 8, 50, 2.5, (5740, 5800), (1.95, 1.97)),
)


def print_energy() -> None:
    """The power measurements of MLPerf."""
    free = dict(constants())
    values = drawn(free)
    print("| run | node W | predicted | kWh | predicted |\n|---|--:|--:|--:|--:|")
    for name, nodes, batch, minutes, watts, kwh in _POWER:
        job = Job(
            workload=load_workload("resnet50"),
            network=stated_network(nodes, adapters=8, bytes_per_s=400e9 / 8),
            local=8,
            device=Device(name="h100-sxm", precision="fp16", fused=True),
            engine="nccl",
            batch=batch,
            wire=0.5,
        )
        step = times(job, values)
        seconds = minutes * 60 * step.total / step.total[0]
        found = energy(
            values,
            Node(gpu="h100-sxm", local=8, engine="nccl"),
            nodes,
            busy=step.busy / step.total,
            seconds=seconds,
            samples_per_s=batch * job.count / step.total,
        )
        figures = [estimate(found["node_w"]), estimate(found["kwh"])]
        cells = [
            f"{low:,g} to {high:,g} | {each.value:,.4g} [{each.low:,.4g}, {each.high:,.4g}]"
            + ("" if each.low <= low and high <= each.high else " *")
            for (low, high), each in zip((watts, kwh), figures, strict=True)
        ]
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    of_mlperf = commands.add_parser("mlperf")
    of_mlperf.add_argument("table", type=Path)
    of_mlperf.add_argument("--constants", action="store_true")
    of_mlperf.add_argument("--shipped", action="store_true")
    of_transformers = commands.add_parser("llm")
    of_transformers.add_argument("table", type=Path)
    of_transformers.add_argument("--constants", action="store_true")
    for option in ("--shipped", "--ranges", "--removed", "--open", "--blind"):
        of_transformers.add_argument(option, action="store_true")
    commands.add_parser("published")
    commands.add_parser("energy")
    options = parser.parse_args()
    if options.command == "mlperf":
        runs = mlperf.read_runs(options.table)
        if options.constants:
            print_constants(runs)
            return
        if options.shipped:
            for title, some in (("all", runs), ("below 128 images a GPU", [run for run in runs if run.batch < 128])):
                cases = predict_shipped(some)
                errors = np.abs([case.error for case in cases])
                print(
                    f"{title}: {len(cases)} runs, median {np.median(errors):.1%}, 90 % within "
                    f"{np.quantile(errors, 0.9):.1%}; intervals hold in {np.mean([case.inside for case in cases]):.0%}"
                )
            return
        for title, own in (("by other systems", False), ("with the system's smallest runs", True)):
            cases = predict_left_out(runs, own=own)
            print(f"## {title}\n\n{summary(cases)}\n")
            print_cases(cases)
            print()
    elif options.command == "llm":
        transformer_fit.answer(options)
    elif options.command == "published":
        print_published()
    else:
        print_energy()


if __name__ == "__main__":
    main()
