"""Trackers: programs and services that show a run's curves, fed from its events and from nothing else.

Each tracker has a process beside the launcher, ``python -m hpctrain.report.tracking NAME RUN_DIR``, which reads
``events.jsonl`` as it grows. Training therefore never waits for a server. Because the events stay, the same program
sends later what a tracker did not get: all of it where the tracker is files, else from where
``RUN_DIR/tracking/NAME.json`` says that it stopped.

:mod:`hpctrain.report.tracking.curves` has the names of the curves, which are the same for all.
"""
