"""Data sets as shards: how they are made, checked, staged and read."""
