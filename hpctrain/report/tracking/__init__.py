"""Trackers: programs and services that show a run's curves, fed from its events and from nothing else.

:mod:`hpctrain.report.tracking.sending` has a thread of the launcher for each, so that training never waits for a
server. :mod:`hpctrain.report.tracking.curves` has the names of the curves, which are the same for all.
"""
