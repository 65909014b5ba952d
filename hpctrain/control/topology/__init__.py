"""Fabrics: cabling, routes, and placement of ranks. Pure: text in, values out."""
