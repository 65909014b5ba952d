"""What a machine has: cores, GPUs, adapters, MPI; and the files and variables that launchers take."""
