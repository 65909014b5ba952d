"""The hosts of a run: which they are, how they reach each other, and which have been lost."""
