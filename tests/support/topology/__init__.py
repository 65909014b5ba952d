"""Fabrics, and what programs print of them."""
