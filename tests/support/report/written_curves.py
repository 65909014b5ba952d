"""Sends the events of a run that was written by hand to a tracker, as its launcher does."""

from __future__ import annotations

from hpctrain.common.recipes.tracking import Tracker
from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import EventsFile, kept
from hpctrain.report.tracking.sending import Trackers


def send(directory: RunDirectory, tracker: Tracker) -> list[str]:
    """Send all of a run; returns what was said."""
    said: list[str] = []
    with Trackers((tracker,), directory, said.append) as trackers:
        for event in kept(EventsFile(directory.events)):
            trackers.give(event)
    return said
