"""Benchmarks that run on the ranks: scripts that ``hpctrain bench`` launches like any user's."""
