"""Jobs and pods, and programs in the place of Slurm's."""
