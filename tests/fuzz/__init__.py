"""Readers of what comes from outside, given anything."""
