"""The MPI engine: ranks of one node reduce slices of each other's gradients in shared memory, nodes reduce by MPI.

A buffer of B bytes on a node of L ranks: every rank reads and writes its slice of all L buffers, B bytes each way,
which is what copying the buffer once would take. Between nodes each slice travels by itself, so that as many ranks of
a node drive the network as the smallest node has, and of N nodes each sends 2 (N - 1) / N x B bytes however many ranks
it has: as in a ring of the nodes, B for two of them (the hierarchy of Goyal et al. 2017, section 4, with MPI-3 shared
memory, Hoefler et al. 2013, https://doi.org/10.1007/s00607-013-0324-2, in the place of copies).

Sums go in the order of the ranks within a node, then in the order of the nodes, whatever the timing: results are the
same bits on all ranks and from run to run. 16-bit types are added up in float32, and each node's sum is scaled by
1 / ranks before nodes add up: a mean overflows in no 16-bit type that holds it. float32 and float64 are added up in
themselves, so that the sum over a node must not overflow.
"""
