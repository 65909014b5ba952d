"""Transformers in closed form: their sizes, how a mesh divides them, and the memory of each rank. No NumPy."""
