"""Runs that are hurt on purpose, and what is promised of them."""
