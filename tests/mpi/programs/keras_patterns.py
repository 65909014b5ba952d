"""Ways to train with Keras, each on all ranks and on one process with the full batch, which are to agree.

``python keras_patterns.py OUT (plain|BACKEND).KIND[=NAME,…]`` writes OUT-BACKEND.KIND-RANK.npz with what each
pattern came to, or the error that it raised. The plain run imports no hpctrain.
"""

from __future__ import annotations

import sys

import keras
import keras_scripts  # noqa: F401 - both add their patterns
import keras_types  # noqa: F401
import numpy as np
import tensorflow as tf
from keras_runs import PATTERNS, Run


def train(name: str, kind: str, comm, distributed: bool) -> dict[str, np.ndarray]:
    keras.utils.set_random_seed(5)
    leaves = tf.nest.flatten(PATTERNS[name](Run(distributed, kind, comm)))
    return {f"{name}.{kind}.{i}": np.asarray(leaf, dtype=np.float64) for i, leaf in enumerate(leaves)}


def main(out: str, chosen: str, names: str) -> None:
    backend, _, kind = chosen.partition(".")
    comm = None
    if backend != "plain":
        import hpctrain as ht

        comm = ht.init(backend)
    results = {}
    for name in names.split(",") if names else PATTERNS:
        try:
            results |= train(name, kind, comm, backend != "plain")
        except Exception as error:
            print(f"{name} {kind}: {type(error).__name__}: {error}", file=sys.stderr)
            results[f"{name}.{kind}.error"] = np.array(str(error))
        np.savez(f"{out}-{chosen}-{comm.rank if comm else 0}.npz", **results)


if __name__ == "__main__":
    wanted, _, patterns = sys.argv[2].partition("=")
    main(sys.argv[1], wanted, patterns)
