"""Proves that a launcher and the ranks' MPI belong together: ``python -m hpctrain.worker.comm.probe N``.

Exits 0 on every rank, and rank 0 prints one line of JSON, if the ranks see each other: N of them. Needs mpi4py alone.
"""

from __future__ import annotations

import json
import sys


def main(expected: int) -> int:
    """Run the probe, and return this rank's exit status."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.size != expected:
        library = MPI.Get_library_version().partition(",")[0].strip("\0\n ")
        print(f"a rank sees a world of {world.size} ranks instead of {expected}; its MPI is {library}", file=sys.stderr)
        return 1
    # A message from every rank shows that all hosts can be reached, which the size of the world does not.
    seen = world.gather(MPI.Get_processor_name())
    if seen is not None:
        print(json.dumps({"hpctrain_probe": len(seen)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
