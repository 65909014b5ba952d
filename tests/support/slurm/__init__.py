"""A real Slurm of four nodes on this machine."""
