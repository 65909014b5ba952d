"""Turns the times of alternatives in each round into rows with ratios, and into tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpctrain.report.output import table

if TYPE_CHECKING:
    from rich.table import Table

    from hpctrain.control.predict.measurements import Sweep

Row = dict[str, Any]
Seconds = Mapping[str, Sequence[float]]

COPY = "copy"
OURS = "mpi"
LIMIT = "no communication"
HOROVOD, DDP = "horovod by hand", "ddp over gloo"


def ratio(seconds: Seconds, name: str, other: str | None) -> float | None:
    """The median over rounds of the ratios, which a drift of the machine's speed does not affect; None without the
    other.
    """
    if other is None or other not in seconds:
        return None
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[other], strict=True))


def step_rows(seconds: Seconds) -> list[Row]:
    """The rows of ``bench step``, one per variant."""
    return [
        {
            "variant": name,
            "median_s": statistics.median(times),
            "ratio_to_limit": ratio(seconds, name, LIMIT),
            "ratio_to_horovod": ratio(seconds, name, HOROVOD),
            "ratio_to_ddp": ratio(seconds, name, DDP),
        }
        for name, times in seconds.items()
    ]


def loader_rows(seconds: Mapping[str, Sequence[float]]) -> list[Row]:
    """The rows of ``bench loader``, one per number of processes."""
    return [
        {"workers": int(workers), "variant": "hpctrain", "samples_per_s": 1 / statistics.median(times)}
        for workers, times in seconds.items()
    ]


def allreduce_rows(
    seconds: Mapping[int, Seconds],
    ranks: int,
    *,
    oversubscribed: bool,
    hosts: int = 1,
    link_bytes_per_s: float | None = None,
) -> list[Row]:
    """The rows of ``bench allreduce``, one per engine and size.

    Args:
        seconds: the seconds of each round by bytes, then by engine; the plain copy among them.
        oversubscribed: whether there were more ranks than cores.
        link_bytes_per_s: what a host's link carries in each direction. Of N hosts each has to send 2 (N - 1) / N of
            the bytes of the buffer, and to receive as many (Patarasuk and Yuan 2009,
            https://doi.org/10.1016/j.jpdc.2008.09.002), which bounds the time from below.
    """
    rows = []
    for nbytes, engines in seconds.items():
        medians = {name: statistics.median(times) for name, times in engines.items()}
        for name, median in medians.items():
            # hpctrain's own engine with fewer bits does not count as another engine.
            others = [other for other in medians if other not in (name, COPY) and not other.startswith(f"{OURS} ")]
            fastest = min(others, key=medians.__getitem__) if others and name != COPY else None
            bound = 2 * (hosts - 1) / hosts * nbytes / link_bytes_per_s if link_bytes_per_s else None
            to_copy = ratio(engines, name, COPY)
            assert to_copy is not None
            rows.append(
                {
                    "engine": name,
                    "bytes": nbytes,
                    "ranks": ranks,
                    "hosts": hosts,
                    "oversubscribed": oversubscribed,
                    "rounds": len(engines[name]),
                    "median_s": median,
                    "ratio_to_copy": to_copy,
                    "share_of_limit": 1 / to_copy,
                    "fastest_other": fastest,
                    "ratio_to_fastest_other": ratio(engines, name, fastest),
                    "link_bound_s": bound,
                    "ratio_to_link": median / bound if bound and name != COPY else None,
                }
            )
    return rows


def step_table(rows: Sequence[Row], title: str) -> Table:
    """The table of :func:`step_rows`."""
    ratios = ("ratio_to_limit", "ratio_to_horovod", "ratio_to_ddp")
    cells = [[row["variant"], time_text(row["median_s"]), *(ratio_text(row[name]) for name in ratios)] for row in rows]
    columns = ("variant", "median", "to the limit", "to Horovod by hand", "to DDP")
    return table(columns, cells, title=title, left=("variant",))


def sweep_table(sweep: Sweep) -> Table:
    """The table of ``bench step --sweep``."""
    ranks = "1 rank" if sweep.ranks == 1 else f"{sweep.ranks} ranks"
    title = f"steps of {sweep.model} on {ranks}, {sweep.device}"
    cells = [(str(row.batch), time_text(row.median_s), f"{row.spread:.1%}") for row in sweep.rows]
    return table(("samples a rank", "median", "spread"), cells, title=title)


def loader_table(rows: Sequence[Row], title: str) -> Table:
    """The table of :func:`loader_rows`."""
    cells = [(str(row["workers"]), f"{row['samples_per_s']:.0f}") for row in rows]
    return table(("processes", "images/s"), cells, title=title)


def allreduce_table(rows: Sequence[Row], cores: int) -> Table:
    """The table of :func:`allreduce_rows` for one number of ranks: medians, and ratios of hpctrain's own engine."""
    first = rows[0]
    title = f"all-reduce of float32 on {first['ranks']} ranks"
    if first["hosts"] > 1:
        title += f" of {first['hosts']} hosts"
    if first["oversubscribed"]:
        title += f", oversubscribed: {cores} cores"
    bounded = first["link_bound_s"] is not None
    # Nothing of a copy goes over the links.
    engines = [name for name in dict.fromkeys(row["engine"] for row in rows) if not (bounded and name == COPY)]
    ratios = {"to copy": "ratio_to_copy", "to other": "ratio_to_fastest_other"}
    if bounded:
        ratios = {"to bound": "ratio_to_link"}
    cells = []
    for nbytes in dict.fromkeys(row["bytes"] for row in rows):
        members = {row["engine"]: row for row in rows if row["bytes"] == nbytes}
        times = [time_text(members[engine]["median_s"]) for engine in engines]
        cells.append([size_text(nbytes), *times, *(ratio_text(members[OURS][name]) for name in ratios.values())])
    of = "the links' bound" if bounded else "the copy, to the fastest other"
    caption = f"medians of the slowest rank; last: {OURS} to {of}"
    return table(("size", *engines, *ratios), cells, title=title, caption=caption)


def size_text(nbytes: float) -> str:
    """A size as ``64 KiB``, or in MB (10^6 bytes) if it is not a whole number of KiB."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor and nbytes % factor == 0 and nbytes / factor <= 1024:
            return f"{nbytes / factor:.0f} {unit}"
    return f"{nbytes / 1e6:.4g} MB" if nbytes >= 1e6 else f"{nbytes:.0f} B"


def time_text(seconds: float) -> str:
    """A time in µs below a millisecond, else in ms, with three digits."""
    value, unit = (seconds * 1e6, "µs") if seconds < 1e-3 else (seconds * 1e3, "ms")
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"


def ratio_text(value: float | None) -> str:
    """A ratio with two decimals, or two digits if it is small; empty without one."""
    return "" if value is None else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"
