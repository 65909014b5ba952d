"""Events: what happened in a run, one JSON object a line in ``events.jsonl``. Its only record.

:mod:`hpctrain.common.run.events.kinds` has the kinds with their keys, units and values, as models. A line has the keys
``time`` and ``event``, the kind, and those of the kind. A number that is not finite is null.
"""

from hpctrain.common.run.events.kinds import Event
from hpctrain.common.run.events.reader import EventsFile, attempts, kept, line_of, parse_event, read_events, run_id
from hpctrain.common.run.events.writer import EventWriter

__all__ = ["Event", "EventWriter", "EventsFile", "attempts", "kept", "line_of", "parse_event", "read_events", "run_id"]
