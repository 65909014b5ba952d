"""Trackers: programs and services that show a run's curves, fed from its events and from nothing else."""
