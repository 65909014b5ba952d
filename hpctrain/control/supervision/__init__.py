"""Starts a run, follows it, finds out why it failed, and restarts it."""
