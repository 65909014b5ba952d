"""Fits the constants of a transformer's step to published runs, and says how far unseen publishers are off.

A family is a machine room or a publisher. Runs of one family are not independent of each other: its weight grows with
the root of their number. A constant stays near what was expected of it as far as runs do not say otherwise, and the
factor of a software near 1; where only the family that is left out has a software, its factor is 1.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations

import numpy as np
import yaml
from transformer_ranges import Incomplete, incomplete, made, spread_of
from transformer_runs import Run, Table, read_table

from hpctrain.control.predict.transformers.layout import Layout
from hpctrain.control.predict.transformers.ranges import Ranges, ReadConstants, shipped_ranges
from hpctrain.control.predict.transformers.rank_memory import memory
from hpctrain.control.predict.transformers.rates import factors, step_file
from hpctrain.control.topology.fabric import Floats

# Of the logarithm: of a run by itself, and of a software's factor.
_ERROR = 0.1
_SOFTWARE_SPREAD = 0.1
# Errors beyond so many of it count by their size alone (Huber).
_ROBUST = 1.5
_DIFFERENCE = 0.03
_ITERATIONS = 6
# Of the logarithm of a constant, by which a further iteration would move it at most.
_SETTLED = 1e-3


@dataclass(frozen=True)
class Case:
    """A run, what was predicted, and half the width of the range's logarithm."""

    run: Run
    predicted: float
    half: float
    guess: float | None = None

    @property
    def error(self) -> float:
        """Of tokens a second."""
        return self.predicted / self.run.measured - 1 if self.run.measured else math.nan

    @property
    def inside(self) -> bool:
        """Whether the range holds the run."""
        return abs(math.log1p(self.error)) <= self.half


class Fit:
    """The runs that count, and the constants as logarithms."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.families = np.array([run.family for run in runs])
        self.measured = np.log([run.measured for run in runs])
        free = {name: each for name, each in step_file().constants.items() if each.spread}
        self.fixed = {name: each.value for name, each in step_file().constants.items() if not each.spread}
        shared = {name: each.like or name for name, each in step_file().software.items()}
        self.software = [shared[run.software] for run in runs]
        software = sorted(set(self.software))
        self.names = [*free, *(f"software.{name}" for name in software)]
        self.prior = np.log([each.prior for each in free.values()] + [1.0] * len(software))
        self.spread = np.array([each.spread for each in free.values()] + [_SOFTWARE_SPREAD] * len(software))
        # Tables have many rows of few trainings: each is predicted once.
        first: dict[object, int] = {}
        self.like = [first.setdefault(run.training, index) for index, run in enumerate(runs)]

    def values(self, logs: Floats) -> dict[str, float]:
        """The constants by name."""
        found = dict(zip(self.names, np.exp(logs).tolist(), strict=True))
        own = {name.removeprefix("software."): value for name, value in found.items()}
        return {**self.fixed, **found, **factors(own)}

    def predicted(self, logs: Floats, which: Sequence[int] | None = None) -> Floats:
        """Logarithms of tokens a second."""
        values = self.values(logs)
        wanted = self.like if which is None else [self.like[index] for index in which]
        found = {index: self.runs[index].tokens_per_s(values) for index in set(wanted)}
        return np.log([found[index] for index in wanted])

    def slopes(self, logs: Floats) -> tuple[Floats, Floats]:
        """The predictions, and their slopes by each constant, (runs, constants)."""
        at, found = self.predicted(logs), np.zeros((len(self.runs), len(logs)))
        reads = self.reads(logs)
        for index, name in enumerate(self.names):
            if name.startswith("software."):
                found[:, index] = [f"software.{each}" == name for each in self.software]
                continue
            moved = logs.copy()
            moved[index] += _DIFFERENCE
            which = [run for run, like in enumerate(self.like) if name in reads[like]]
            found[which, index] = (self.predicted(moved, which) - at[which]) / _DIFFERENCE
        return at, found

    def reads(self, logs: Floats) -> dict[int, set[str]]:
        """The constants that the prediction of each training depends on."""
        found = {}
        for index in set(self.like):
            values = ReadConstants(self.values(logs))
            self.runs[index].tokens_per_s(values)
            found[index] = values.names
        return found

    def weights(self, kept: Floats) -> Floats:
        """One over the standard error of each run; 0 for those that do not count."""
        sizes: dict[str, int] = defaultdict(int)
        for family in self.families[kept]:
            sizes[family] += 1
        return np.array(
            [keep / (_ERROR * max(1, sizes[family]) ** 0.25) for family, keep in zip(self.families, kept, strict=True)]
        )

    def moved(self, logs: Floats, at: Floats, slopes: Floats, kept: Floats) -> Floats:
        """The constants that suit the runs best where predictions are as steep as here."""
        weights, centre = self.weights(kept), logs
        for _ in range(10):
            off = self.measured - at - slopes @ (logs - centre)
            scaled = np.abs(off) * weights
            robust = weights * np.sqrt(np.where(scaled > _ROBUST, _ROBUST / np.maximum(scaled, 1e-9), 1.0))
            weighted = slopes * robust[:, None]
            curvature = weighted.T @ weighted + np.diag(1 / self.spread**2)
            gradient = weighted.T @ (off * robust) + (self.prior - logs) / self.spread**2
            logs = logs + np.linalg.solve(curvature, gradient)
        return centre + np.clip(logs - centre, -0.7, 0.7)

    def all(self) -> Floats:
        """The constants by all runs."""
        logs = self.prior
        everything = np.ones(len(self.runs), bool)
        for _ in range(_ITERATIONS):
            before, logs = logs, self.moved(logs, *self.slopes(logs), everything)
            if np.abs(logs - before).max() < _SETTLED:
                break
        return logs

    def left_out(self, logs: Floats) -> dict[str, Floats]:
        """For each family the constants by the others alone; ``logs`` are those by all runs.

        Their slopes are taken at these: once more at the constants without a family, they move its median by at most
        two percent.
        """
        at, slopes = self.slopes(logs)
        families = sorted(set(self.families))
        return {family: self.moved(logs, at, slopes, self.families != family) for family in families}


def timed(table: Table) -> list[Run]:
    """The runs whose time can be predicted: of a known GPU."""
    return [run for run in table.runs if run.measured is not None and not run.assumed_gpu]


def errors_of(rows: Sequence[Incomplete], constants: Mapping[str, Mapping[str, float]]) -> list[float]:
    """Logarithms of predictions, by the constants without the row's family, over what was measured."""
    runs = [row.run for row in rows]
    return [math.log(run.tokens_per_s(constants[run.family]) / (run.measured or math.nan)) for run in runs]


@dataclass(frozen=True)
class LeftOut:
    """What families are predicted by that were left out: the constants and the ranges by the others."""

    constants: Mapping[str, Mapping[str, float]]
    ranges: Mapping[str, Ranges]

    @classmethod
    def of(cls, runs: Sequence[Run], rows: Sequence[Incomplete]) -> LeftOut:
        """Each family left out in turn.

        Args:
            rows: the runs with columns removed.
        """
        fit = Fit(runs)
        constants = {family: fit.values(logs) for family, logs in fit.left_out(fit.all()).items()}
        ranges = {}
        for family in constants:
            known = [row for row in rows if row.run.family != family]
            ranges[family] = made([run for run in runs if run.family != family], errors_of(known, constants), known)
        return cls(constants, ranges)

    def cases(self, runs: Sequence[Run]) -> list[Case]:
        """Runs of these families."""
        found = []
        for run, guess in zip(runs, guesses(runs), strict=True):
            ranges = self.ranges[run.family]
            half = ranges.quantile * spread_of(run, ranges)
            found.append(Case(run, run.tokens_per_s(self.constants[run.family]), half, guess))
        return found


def cases_shipped(runs: Sequence[Run]) -> list[Case]:
    """All runs by the constants and ranges that ``hpctrain predict`` uses."""
    ranges = shipped_ranges()
    return [
        Case(run, run.tokens_per_s(), ranges.quantile * ranges.margin * spread_of(run, ranges), guess)
        for run, guess in zip(runs, guesses(runs), strict=True)
    ]


def guesses(runs: Sequence[Run]) -> list[float | None]:
    """Tokens a second by one share of the data sheet's rate a GPU and precision, the median of other families' runs."""
    shares: dict[tuple[str, str], list[tuple[str, float]]] = defaultdict(list)
    for run in runs:
        key = run.system.name, run.layout.precision
        shares[key].append((run.family, (run.measured or 0) * run.model_flops / run.system.peak(run.layout.precision)))

    @cache
    def median(key: tuple[str, str], family: str) -> float | None:
        """Of the other families' runs of this kind, else of all."""
        others = [share for other, share in shares[key] if other != family]
        others = others or [share for each in shares.values() for other, share in each if other != family]
        return float(np.median(others)) if others else None

    found: list[float | None] = []
    for run in runs:
        precision = run.layout.precision
        share = median((run.system.name, precision), run.family)
        found.append(None if share is None else share * run.system.peak(precision) / run.model_flops)
    return found


def predicted_cases(runs: Sequence[Run], *, shipped: bool, removed: bool) -> list[Case]:
    """Each run with its prediction, as shipped or by the other families.

    Args:
        removed: runs without a third of their columns instead.
    """
    rows = incomplete(runs) if removed or not shipped else []
    wanted = [row.run for row in rows] if removed else runs
    return cases_shipped(wanted) if shipped else LeftOut.of(runs, rows).cases(wanted)


# Publishers are dealt into folds by a hash of their names. Terms and expectations may be changed looking at all folds
# but the last, which is run once at the end.
_FOLDS = 5


def is_blind(run: Run) -> bool:
    """Whether a run is of the fold that is not looked at."""
    return int(hashlib.sha256(run.family.encode()).hexdigest(), 16) % _FOLDS == _FOLDS - 1


def blind_cases(runs: Sequence[Run]) -> list[Case]:
    """The runs of the last fold, by constants and ranges of the others."""
    others = [run for run in runs if not is_blind(run)]
    closed = [run for run in runs if is_blind(run)]
    rows, fit = incomplete(others), Fit(others)
    constants = fit.values(fit.all())
    ranges = made(others, errors_of(rows, LeftOut.of(others, rows).constants), rows)
    families = {run.family for run in closed}
    return LeftOut(dict.fromkeys(families, constants), dict.fromkeys(families, ranges)).cases(closed)


def print_blind(table: Table) -> None:
    """The last fold's errors in one line."""
    cases = blind_cases(timed(table))
    if not cases:
        raise SystemExit("no publisher of this table is in the blind fold")
    line, _ = summary("blind fold", [case.run for case in cases], [case.predicted for case in cases])
    families = len({case.run.family for case in cases})
    held = np.mean([case.inside for case in cases])
    print(f"{line.partition(';')[0]}; {families} publishers; ranges hold in {held:.0%}")


# Reports.


def summary(title: str, runs: Sequence[Run], said: Sequence[float]) -> tuple[str, float]:
    """The errors of all runs in one line, and the mean over families of their medians."""
    errors = np.abs([value / (run.measured or math.nan) - 1 for value, run in zip(said, runs, strict=True)])
    families = np.array([run.family for run in runs])
    mean = float(np.mean([np.median(errors[families == family]) for family in set(families)]))
    line = f"{title}: {len(runs)} runs, median {np.median(errors):.1%}, 90 % within {np.quantile(errors, 0.9):.1%}"
    return f"{line}; mean {np.mean(errors):.1%}, families {mean:.1%}", mean


def memory_line(table: Table) -> tuple[str, str]:
    """Errors of peaks by what was published, never mixed, and the median of allocated ones in words."""
    off: dict[str, list[float]] = defaultdict(list)
    for run in table.runs:
        if run.peak and not run.assumed_gpu:
            held = memory(run.network, run.layout)
            said = held.allocated if run.kind == "not stated" else getattr(held, run.kind)
            off[run.kind].append(said / run.peak - 1)
    lines = [
        f"{kind}: {len(errors)} peaks, median {np.median(np.abs(errors)):.1%}, "
        f"from {min(errors):+.1%} to {max(errors):+.1%}"
        for kind, errors in sorted(off.items())
    ]
    allocated = off.get("allocated") or [each for errors in off.values() for each in errors]
    median = f"memory {np.median(np.abs(allocated)):.1%}" if allocated else "memory: no peaks"
    return "\n".join(lines or ["no peaks of memory were published"]), median


def fits(run: Run) -> bool:
    """Whether a run is predicted to fit, as a search judges it."""
    return memory(run.network, run.layout).fits(run.room)


def print_limits(table: Table) -> None:
    """Whether runs that did or did not fit their GPUs are predicted to, and the largest batches that did.

    Runs that differ in their micro-batch alone have a known limit where one of them did not fit: right is what says of
    all that did that they fit, and of all others that they do not.
    """
    known = [run for run in table.runs if run.fits is not None]
    if not known:
        return
    print("| run | network | GPUs | layout | printed | predicted GB |\n|---|---|---|---|---|--:|")
    for run in known:
        if fits(run) != run.fits:
            said = f"{run.row['printed_gb'] or '?'} GB" if run.fits else "did not fit"
            print(
                f"| {run.name} | {run.row['model']} | {run.layout.ranks} {run.row['gpu_type']} | {run.layout.mesh}, "
                f"{run.layout.micro_batch} x {run.layout.micro_batches}, {run.layout.precision} | {said} | "
                f"{memory(run.network, run.layout).used / 1e9:.1f} of {run.room / 1e9:.1f} |"
            )
    groups: dict[object, list[Run]] = defaultdict(list)
    for run in known:
        key = replace(run.layout, micro_batch=1, micro_batches=1)
        groups[run.network, run.room, key].append(run)
    limits = [own for own in groups.values() if not all(run.fits for run in own)]
    right = sum(fits(run) == run.fits for run in known)
    largest = sum(all(fits(run) == run.fits for run in own) for own in limits)
    out = sum(not run.fits for run in known)
    print(
        f"\nlimits: {right} of {len(known)} runs fit or do not as predicted, {out} of which did not fit; the largest "
        f"batch is right in {largest} of {len(limits)} with a known limit\n"
    )


@dataclass(frozen=True)
class Sweep:
    """Layouts of one training on as many GPUs, measured and predicted."""

    name: str
    measured: Sequence[float]
    predicted: Sequence[float]

    @property
    def tau(self) -> float:
        """Kendall's tau-b of both orders."""
        pairs = [
            (np.sign(self.measured[i] - self.measured[j]), np.sign(self.predicted[i] - self.predicted[j]))
            for i, j in combinations(range(len(self.measured)), 2)
        ]
        tied = [sum(1 for pair in pairs if pair[side] != 0) for side in (0, 1)]
        return float(sum(one * two for one, two in pairs) / max(1.0, math.sqrt(tied[0] * tied[1])))

    @property
    def short(self) -> float:
        """How much slower than the best the layout is that is predicted to be fastest."""
        return 1 - self.measured[int(np.argmax(self.predicted))] / max(self.measured)


def sweeps(runs: Sequence[Run], said: Sequence[float], least: int = 4) -> list[Sweep]:
    """The groups of runs that differ in their layout alone; a layout that was measured twice has its median."""
    groups: dict[tuple[object, ...], dict[Layout, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for run, value in zip(runs, said, strict=True):
        # vTrain's tables have several batches of each training; other sweeps vary the batch with the layout.
        whole = run.layout.global_batch if run.row["source_id"].startswith("vtrain") else 0
        software = run.row.get("framework", "").partition(" ")[0]
        name = f"{run.row['source_id']} {run.row['model']}, {software}, {run.layout.ranks} {run.system.name}"
        groups[name, run.network, run.layout.precision, whole][run.layout].append((run.measured or 0, value))
    return [
        Sweep(
            name=f"{key[0]}{f', batch {key[3]}' if key[3] else ''}",
            measured=[float(np.median([measured for measured, _ in each])) for each in members.values()],
            predicted=[each[0][1] for each in members.values()],
        )
        for key, members in groups.items()
        if len(members) >= least
    ]


def print_sweeps(table: Table, cases: Sequence[Case]) -> None:
    """Tau and the distance from the best of each sweep; runs of an unknown GPU are predicted as on a V100."""
    assumed = [run for run in table.runs if run.measured is not None and run.assumed_gpu]
    runs = [*(case.run for case in cases), *assumed]
    said = [*(case.predicted for case in cases), *(run.tokens_per_s() for run in assumed)]
    found = sweeps(runs, said)
    print("| sweep | layouts | Kendall's tau | pick below the best |\n|---|--:|--:|--:|")
    for each in sorted(found, key=lambda sweep: sweep.name):
        print(f"| {each.name} | {len(each.measured)} | {each.tau:.2f} | {each.short:.1%} |")
    if found:
        print(
            f"sweeps: {len(found)}, tau median {np.median([each.tau for each in found]):.2f}, "
            f"pick below the best median {np.median([each.short for each in found]):.1%}, "
            f"largest {max(each.short for each in found):.1%}"
        )


def probable_cause(case: Case, families: Mapping[str, float]) -> str:
    """Why a run is far off, as far as its family and its terms tell."""
    run, whole = case.run, families[case.run.family]
    off = math.log(1 + case.error)
    if abs(whole) > 0.5 * abs(off) and whole * off > 0:
        return f"its whole family: its software ({run.software}) or site"
    if run.guessed and set(run.guessed) - {"act_ckpt", "vocab"}:
        return f"not stated: {', '.join(run.guessed)}"
    terms = dict(run.terms)
    largest = max((name for name in terms if name != "matmul"), key=terms.__getitem__)
    return f"most besides matmul: {largest} {terms[largest] / sum(terms.values()):.0%}"


def print_coverage(table: Table) -> None:
    """How many rows are not predicted, and why; and what was completed in others."""
    reasons = Counter((row["family"], reason) for row, reason in table.left_out)
    for run in table.runs:
        if run.measured is None:
            reasons[
                run.family, "time not published, memory alone" if run.peak else "only whether it fits is published"
            ] += 1
        elif run.assumed_gpu:
            reasons[run.family, "GPU not stated, order of layouts alone"] += 1
    for (family, reason), count in sorted(reasons.items()):
        print(f"not predicted: {count} of {family}: {reason}")
    guessed = Counter(column for run in timed(table) for column in run.guessed)
    print(f"completed columns: {', '.join(f'{column} in {count}' for column, count in sorted(guessed.items()))}")


def print_families(cases: Sequence[Case], typical: Mapping[str, float]) -> None:
    """The errors of each family."""
    print("| family | runs | median error | 90 % within | bias | in the range |\n|---|--:|--:|--:|--:|--:|")
    for family in sorted(typical):
        own = [case for case in cases if case.run.family == family]
        off = np.abs([case.error for case in own])
        print(
            f"| {family} | {len(own)} | {np.median(off):.1%} | {np.quantile(off, 0.9):.1%} | "
            f"{math.expm1(typical[family]):+.1%} | {np.mean([case.inside for case in own]):.0%} |"
        )


def print_worst(cases: Sequence[Case], typical: Mapping[str, float]) -> None:
    """The twenty runs that are furthest off."""
    print("| run | network | GPUs | layout | error | probable cause |\n|---|---|--:|---|--:|---|")
    for case in sorted(cases, key=lambda case: -abs(math.log1p(case.error)))[:20]:
        run, layout = case.run, case.run.layout
        print(
            f"| {run.name} | {run.row['model']} | {layout.ranks} {run.system.name} | {layout.mesh}, "
            f"{layout.micro_batch} x {layout.micro_batches}, {layout.precision} | {case.error:+.0%} | "
            f"{probable_cause(case, typical)} |"
        )


def report(table: Table, *, shipped: bool, removed: bool = False, opened: bool = False) -> None:
    """All figures.

    Args:
        removed: of rows from which a third of the columns is removed.
        opened: without the runs of the blind fold.
    """
    runs = [run for run in timed(table) if not (opened and is_blind(run))]
    if not runs:
        print_coverage(table)
        peaks, median_peak = memory_line(table)
        print(f"\n{peaks}\n")
        print_limits(table)
        print(f"all: 0 runs; {median_peak}")
        return
    cases = predicted_cases(runs, shipped=shipped, removed=removed)
    runs = [case.run for case in cases]
    logs: dict[str, list[float]] = defaultdict(list)
    for case in cases:
        logs[case.run.family].append(math.log1p(case.error))
    typical = {family: float(np.median(off)) for family, off in logs.items()}
    print_coverage(table)
    for title, part in (("families", print_families), ("the twenty worst", print_worst)):
        print(f"\n{title}:\n")
        part(cases, typical)
    print("\nthe order of layouts:\n")
    print_sweeps(table, cases)
    peaks, median_peak = memory_line(table)
    print(f"\n{peaks}\n")
    print_limits(table)
    able = [case for case in cases if case.guess is not None]
    if able:
        said = [each.guess or math.nan for each in able]
        print(summary("one share of the peak a GPU", [each.run for each in able], said)[0])
    line, mean = summary("all", runs, [case.predicted for case in cases])
    held = np.mean([case.inside for case in cases])
    print(f"{line.partition(';')[0]}; families {mean:.1%}; ranges hold in {held:.0%}; {median_peak}")


def print_constants(table: Table) -> None:
    """The fit to all runs, as ``step.yaml`` has it."""
    fit = Fit(timed(table))
    for name, value in zip(fit.names, np.exp(fit.all()), strict=True):
        print(f"{name}: {value:.3g}")


def print_ranges(table: Table) -> None:
    """The ranges by all runs, as ``ranges.yaml`` has them."""
    runs = timed(table)
    rows = incomplete(runs)
    off = errors_of(rows, LeftOut.of(runs, rows).constants)
    print(yaml.safe_dump(made(runs, off, rows).model_dump(), sort_keys=True, width=110), end="")


def answer(options: argparse.Namespace) -> None:
    """What ``predictions.py llm`` prints."""
    table = read_table(options.table)
    if options.constants:
        print_constants(table)
    elif options.ranges:
        print_ranges(table)
    elif options.blind:
        print_blind(table)
    else:
        report(table, shipped=options.shipped, removed=options.removed, opened=options.open)
