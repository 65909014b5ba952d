"""Imports its package's other module relatively."""

from .other import WORD

NAME = f"{__name__} {WORD}"
