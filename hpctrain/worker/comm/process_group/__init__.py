"""torch.distributed's process groups over the ranks of a run, for what is built on them: FSDP, DTensor, pipelining.

Over the backend ``mpi`` they are hpctrain's own, registered as ``hpctrain``: shared memory within a node, MPI between
nodes, with the limits of all waits and the naming of stalled ranks.
"""
