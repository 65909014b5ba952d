"""A program for two or more ranks that reduces known numbers and checks the result.

Run by ``hpctrain horovod build`` as ``mpirun -np 2 python -m hpctrain.worker.comm.selftest --framework torch``.
"""

from __future__ import annotations

import argparse

import numpy as np

from hpctrain.worker.comm import init
from hpctrain.worker.comm.base import AnyArray, Communicator

NUMBERS = 100_003


def main() -> None:
    """Check that this rank receives the mean over all ranks; exits 0 if so."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--framework", choices=("torch", "keras"), required=True)
    framework = parser.parse_args().framework
    comm = init("horovod")
    if comm.size < 2:
        raise SystemExit("the self-test needs at least 2 ranks: start it with mpirun -np 2")
    # Integers below 2**24 and their halves are exact in float32, so the mean is known to the last bit.
    base = np.arange(NUMBERS, dtype=np.float32)
    reduced = _reduced(comm, framework, base * (comm.rank + 1))
    expected = base * ((comm.size + 1) / 2)
    wrong = np.flatnonzero(reduced != expected)
    if len(wrong):
        at = int(wrong[0])
        raise SystemExit(f"rank {comm.rank}: the mean is {reduced[at]} at {at}, it should be {expected[at]}")


def _reduced(comm: Communicator, framework: str, numbers: AnyArray) -> AnyArray:
    if framework == "torch":
        import torch

        buffer = torch.from_numpy(numbers)
        comm.torch().allreduce(buffer, "selftest").wait()
        return buffer.numpy()
    import tensorflow as tf

    (reduced,) = comm.tensorflow().allreduce([tf.constant(numbers)], "selftest")
    array: AnyArray = reduced.numpy()
    return array


if __name__ == "__main__":
    main()
