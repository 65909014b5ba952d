"""The energy that a run drew, from the readings of its hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.common.files.printable import shortened
from hpctrain.common.run.events import Event, attempts
from hpctrain.common.run.events.kinds import EnergyEvent, RunEvent
from hpctrain.common.run.plan import Plan
from hpctrain.common.run.value_types import EnergySource, HostEnergy
from hpctrain.report.record import of_kind

_JOULES = 3.6e6
_SOURCES: dict[EnergySource, str] = {"gpu": "GPUs", "cpu": "CPUs", "dram": "DRAM"}


@dataclass(frozen=True, kw_only=True)
class MeasuredEnergy:
    """The energy read on all hosts, in all attempts of a run.

    Attributes:
        joules: the joules by source; a source that no host could read is missing.
        covers: in words, on which hosts each source was read, what could not be read and why.
    """

    joules: dict[EnergySource, float]
    covers: str

    @property
    def total(self) -> float | None:
        """The joules of all sources, which do not overlap; None without a source."""
        return sum(self.joules.values()) if self.joules else None


def energy_of(events: Sequence[Event], plan: Plan) -> MeasuredEnergy | None:
    """The energy of a run.

    Args:
        events: the events of all attempts, with or without steps. The energy of the attempts is added up: a step that
            was lost and done again was paid for twice.
    """
    readings = of_kind(events, EnergyEvent)
    if not readings:
        return None
    # A reading of a meter, which its host and its begin identify, includes those before it.
    meters = {(host, reading.began): reading for event in readings for host, reading in event.hosts.items()}
    joules: dict[EnergySource, float] = {}
    for reading in meters.values():
        for source, drawn in reading.joules.items():
            joules[source] = joules.get(source, 0.0) + drawn
    return MeasuredEnergy(joules=joules, covers=_covers(meters, events, plan))


def energy_keys(energy: MeasuredEnergy | None, samples: int | None) -> dict[str, Any]:
    """The keys of ``summary.json``; ``samples`` are those of the steps that count up to the last reading."""
    total, by_source = (energy.total, energy.joules) if energy else (None, {})
    return {
        "energy_kwh": kwh(total),
        "energy_by_source": {source: kwh(by_source.get(source)) for source in _SOURCES} if by_source else None,
        "joules_per_sample": total / samples if total is not None and samples else None,
        "energy_covers": energy.covers if energy else None,
    }


def kwh(joules: float | None) -> float | None:
    """Joules in kWh; None for None."""
    return None if joules is None else joules / _JOULES


def energy_text(amount: float) -> str:
    """An amount in kWh with a unit that suits it."""
    if amount >= 1:
        return f"{amount:,.2f} kWh"
    return f"{amount * 1e3:.2f} Wh" if amount >= 1e-2 else f"{amount * _JOULES:,.0f} J"


def _covers(meters: Mapping[tuple[str, float], HostEnergy], events: Sequence[Event], plan: Plan) -> str:
    missing = shortened("; ".join(dict.fromkeys(text for reading in meters.values() for text in reading.missing)))
    if not any(reading.joules for reading in meters.values()):
        return f"nothing here can be read: {missing or 'there is no counter'}"
    named = {host for run in of_kind(events, RunEvent) for host in run.hosts or ()}
    count = max(len(named) or len(plan.hosts) or 1, len({host for host, _ in meters}))
    parts = []
    for source, title in _SOURCES.items():
        hosts = {host for (host, _), reading in meters.items() if source in reading.joules}
        whole = f"{len(hosts)} of {count} host{'s' if count > 1 else ''}"
        parts.append(f"{title} of {whole}" if hosts else f"no {title}")
    begun = attempts(events)
    measured = sum(any(isinstance(event, EnergyEvent) for event in part) for part in begun)
    if measured < len(begun):
        parts.append(f"{measured} of {len(begun)} attempts")
    return ", ".join(parts) + (f" ({missing})" if missing else "")
