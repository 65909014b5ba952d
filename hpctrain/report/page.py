"""``report.html``: one run on one self-contained page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from hpctrain.common.cluster.gpus import SHARING_NOTE
from hpctrain.common.cluster.host_list import fold_hosts
from hpctrain.common.files.printable import encodable, printable, shortened
from hpctrain.common.files.whole import write_whole
from hpctrain.common.recipes.difference import flat
from hpctrain.common.recipes.keys import used_values
from hpctrain.common.recipes.mesh_traffic import bytes_text
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.directory import RunDirectory, read_model
from hpctrain.common.run.events.kinds import FaultEvent
from hpctrain.common.run.plan import Plan
from hpctrain.common.run.records import RankRecord, read_records
from hpctrain.control.schedulers.run_jobs import LastWords, last_words, summary_status
from hpctrain.control.schedulers.submission import scheduler_of
from hpctrain.control.verify.differences import lines_of, read_verdict
from hpctrain.report.output import duration
from hpctrain.report.plots import MOST_NAMES, curves
from hpctrain.report.record import PastAttempt, Record, event_line, first_of
from hpctrain.report.summary import energy_text, kwh, reported_text, result_name, result_title, summarise_record

UNFINISHED = "unfinished"
# Of more lines and attempts, and of faults of one attempt, a page counts the rest.
_MOST_LINES, _MOST_FAULTS = 100, 10
# How long a scheduler may take to say what its nodes drew.
_ANSWER_SECONDS = 10.0
_LONGEST_NAME = 500
_ELSEWHERE = "copy the run directory to a place of your own"


# Keys of a summary with their names, how they are written, and remarks.
_FIGURES: tuple[tuple[str, str, Callable[[float], str], str], ...] = (
    ("samples_per_s", "throughput", "{:,.0f}".format, "samples/s, all ranks"),
    ("tokens_per_s", "tokens", "{:,.0f}".format, "tokens/s, all ranks"),
    ("flops_utilisation", "model FLOPs utilisation", "{:.1%}".format, "of the GPUs' stated peak"),
    ("communication_share", "communication", "{:.1%}".format, "of a step, waiting for reductions"),
    ("gathered_bytes", "gathered rows", bytes_text, "by one rank, for functions of whole batches"),
    ("data_share", "data", "{:.1%}".format, "of a step, waiting for samples"),
)


def write_report(directory: RunDirectory) -> Path:
    """Write the report of a run, finished or not, and return its path."""
    write_whole(directory.report, encodable(printable(render(directory))).encode(), private=True, elsewhere=_ELSEWHERE)
    return directory.report


def read_summary(directory: RunDirectory) -> dict[str, Any]:
    """The summary of a run by what it has recorded so far, with the status that it left."""
    return _summary(directory, Record(directory), read_model(directory.plan, Plan))


def _summary(directory: RunDirectory, record: Record, plan: Plan) -> dict[str, Any]:
    ended = record.end.status if record.end else UNFINISHED
    return summarise_record(record, plan, summary_status(directory) or ended)


def render(directory: RunDirectory) -> str:
    """Render the page."""
    plan, record = read_model(directory.plan, Plan), Record(directory)
    ranks = read_records(directory).values()
    reported = plan.recipe.reported_at(plan.recipe.global_batch) if plan.recipe else None
    verdict, summary = read_verdict(directory), _summary(directory, record, plan)
    others = (event for event in record.events if not isinstance(event, FaultEvent))
    trouble = [*(fault for _, fault in record.survived), *others]
    return template("page.html.jinja").render(
        plan=plan,
        summary=summary,
        unfinished=summary["status"] == UNFINISHED,
        sharing_note=SHARING_NOTE,
        last_time=_date(record.last_time) if record.last_time else "",
        figures=[*_figures(summary, plan.recipe), *_energy(summary, record, directory)],
        verdict=[line.strip() for line in lines_of(verdict)] if verdict else [],
        curves=[(shortened(name, _LONGEST_NAME), _picture(svg)) for name, svg in curves(record, reported).items()],
        left_out=len(record.sums.logged) - MOST_NAMES,
        settings=settings(plan),
        faults=_faults(record, ranks, None if summary["status"] == "done" else last_words(directory)),
        survived=first_of([*filter(None, map(event_line, trouble))], _MOST_LINES),
        attempts=[_attempt_row(attempt) for attempt in record.attempts[-_MOST_LINES:]],
        earlier_attempts=len(record.attempts) - _MOST_LINES,
    )


def _picture(svg: str) -> Markup:
    return Markup(svg)  # noqa: S704 - Matplotlib writes it, and escapes the texts in it


def template(name: str) -> Template:
    """A page's template, for tables with the filter ``text``."""
    environment = Environment(
        loader=PackageLoader("hpctrain.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["text"] = _text
    return environment.get_template(name)


def _figures(summary: Mapping[str, Any], recipe: Recipe | None) -> list[tuple[str, str, str]]:
    """The headline: name, value and a remark of each."""
    figures = []
    if recipe:
        value = summary["metrics"].get(result_name(recipe))
        figures.append((result_title(recipe), "—" if value is None else f"{value:.4f}", reported_text(recipe)))
    else:
        figures += [
            (shortened(name, _LONGEST_NAME), "—" if value is None else f"{value:.6g}", "last logged value")
            for name, value in islice(summary["metrics"].items(), MOST_NAMES)
        ]
    for key, title, text, remark in _FIGURES:
        amount = summary.get(key)
        # Rows that were not gathered, and gradients that were not reduced, are no figures.
        if amount is not None and (amount or text is not bytes_text):
            figures.append((title, text(amount), remark))
    if summary.get("seconds") is not None:
        epochs = "" if summary["epochs"] is None else f"{summary['epochs']} epochs, "
        figures.append(("time", duration(summary["seconds"]) or "", f"{epochs}{summary['steps']} steps"))
    return figures


def _energy(summary: Mapping[str, Any], record: Record, directory: RunDirectory) -> list[tuple[str, str, str]]:
    """The energy by the hosts' counters and, where it has any, by the scheduler's accounting."""
    figures = []
    if (drawn := summary.get("energy_kwh")) is not None:
        covers, joules = summary["energy_covers"], summary["joules_per_sample"]
        figures.append(
            ("energy", energy_text(drawn), covers if joules is None else f"{joules:.3g} J a sample; {covers}")
        )
    jobs = [attempt.start.job for attempt in record.attempts if attempt.start and attempt.start.job]
    if drawn := kwh(scheduler_of(directory).joules(list(dict.fromkeys(jobs)), seconds=_ANSWER_SECONDS)):
        figures.append(("energy of the jobs", energy_text(drawn), "by the scheduler's accounting, of whole nodes"))
    return figures


def settings(plan: Plan) -> dict[str, list[tuple[str, Any]]]:
    """The plan as tables: titles, and rows of dotted keys and values."""
    tables = {
        "Launch": [
            ("ranks", plan.ranks),
            *([] if plan.mesh.replicates_only else [("mesh", str(plan.mesh))]),
            ("threads_per_rank", plan.threads_per_rank),
            ("hosts", ", ".join(f"{host.host}:{host.slots}" for host in plan.hosts)),
            ("backend", plan.backend),
        ]
    }
    if plan.recipe:
        used = used_values(plan.recipe)
        recipe = {key: value for key, value in used.items() if key not in ("name", "source", "cost", "reported")}
        tables = {"Recipe": list(flat(recipe)), **tables}
    if plan.script:
        tables = {"Script": [("path", plan.script.path), ("arguments", " ".join(plan.script.arguments))], **tables}
    tables["Versions"] = list(plan.versions.items())
    return tables


def _faults(record: Record, ranks: Iterable[RankRecord], words: LastWords | None) -> list[str]:
    """The run's fault events or, before the launcher wrote one, the errors of the ranks; else that in its job's log."""
    raised = []
    for rank in ranks:
        if rank.status == "failed":
            error = f"{rank.error.type}: {rank.error.message}" if rank.error else f"exit status {rank.exit_code}"
            raised.append(f"Rank {rank.rank} on {rank.host}: {error}")
    of_job = [words.error] if words and words.error else []
    return first_of([fault.message for fault in record.faults] or raised or of_job, _MOST_FAULTS)


def _attempt_row(attempt: PastAttempt) -> tuple[Any, ...]:
    """An attempt as the page's table shows it."""
    start = attempt.start
    ending = [attempt.end.status if attempt.end else UNFINISHED]
    if attempt.fatal:
        ending = first_of([fault.message for fault in attempt.fatal], _MOST_FAULTS)
    elif attempt.stopped:
        ending = [attempt.stopped.text]
    begun: tuple[Any, ...] = (None,) * 5
    if start:
        hosts = start.hosts and fold_hosts(start.hosts)
        begun = (start.attempt, _date(start.time), start.iteration, start.job, hosts)
    return (*begun, "\n".join(ending))


def _text(value: Any) -> str:
    """A value as a table shows it."""
    if value is None:
        return "—"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return shortened(", ".join(map(_text, value))) or "—"
    # 4 / 3 is as wide as a card of a narrow page.
    return shortened(str(float(f"{value:.10g}") if isinstance(value, float) else value))


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
