"""The command line of mpirun, srun or torchrun, and which of them is there."""
