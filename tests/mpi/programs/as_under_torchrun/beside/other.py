"""Imported relatively."""

WORD = "word"
