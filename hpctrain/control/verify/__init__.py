"""Proves that N ranks compute what one process computes: both run some steps, which are compared."""
