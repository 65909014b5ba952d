"""Readers of outside data, with samples that are damaged for them."""
