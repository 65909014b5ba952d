"""Jobs of a batch system: what is asked of Slurm, the script, its submission, and what became of it."""
