"""Slurm jobs: the request, the job script, its submission, and the outcome."""
