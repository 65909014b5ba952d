"""Starts the rank programs of commands other than run, and returns what they measured."""
