"""Jobs of Slurm: their scripts, limits, submission and state."""
