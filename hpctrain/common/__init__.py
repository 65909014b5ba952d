"""What both halves use: recipes, the run directory, checkpoints, shards, files, and what a machine is."""
