"""Ways to draw batches and to compute them: each is run by one process on whole batches and by the ranks on shares.

``python torch_patterns.py BACKEND,… OUT [PATTERN…]`` writes OUT-BACKEND-RANK.json: of each pattern and each
division of the batches, what was refused, how many updates were made, and how far the worst of them is from one
process's. ``gloo@dp_shard=2+units`` is a BACKEND whose models are divided over that mesh, here with each linear layer
gathered by itself.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import numpy as np
import patterns_of_computing  # noqa: F401 - fills PATTERNS
import patterns_of_drawing  # noqa: F401
import patterns_of_models  # noqa: F401
import torch
from pattern_runs import PATTERNS, Run

import hpctrain as ht
from hpctrain.common.errors import HpctrainError
from hpctrain.worker.adapters.torch.parallel.division import of_divided_tensors

# Samples and batch size. Over 2 and 3 ranks: always evenly; never; and with a last batch of one sample.
DIVISIONS = {"even": (60, 24), "uneven": (26, 7), "small": (22, 7)}


def references(comm, cases: list[tuple[str, str]]) -> dict[tuple[str, str], list[torch.Tensor]]:
    """The parameters after each update of one process, by pattern and division; each rank computes some of them."""
    own = {}
    for name, division in cases[comm.rank :: comm.size]:
        torch.compiler.reset()
        alone = Run(None, comm.size, *DIVISIONS[division])
        torch.manual_seed(5)
        PATTERNS[name](alone)
        # Each rank may have a GPU of its own.
        own[name, division] = [state.cpu() for state in alone.states]
    return {case: states for part in comm.allgather_object(own) for case, states in part.items()}


def outcome(function, comm, division: str, mesh: str, expected: list[torch.Tensor]) -> dict[str, object]:
    print(function.__name__, division, file=sys.stderr)
    torch.compiler.reset()
    shared = Run(comm, comm.size, *DIVISIONS[division], mesh)
    torch.manual_seed(5)
    refused = ""
    try:
        function(shared)
    except HpctrainError as error:
        refused = str(error)
    except RuntimeError as error:
        # As hpctrain shows it where nothing catches it.
        refused = of_divided_tensors(error)
        if not refused:
            raise
    pairs = zip(expected, shared.states, strict=False)
    errors = [float((one - many.cpu()).abs().max()) for one, many in pairs]
    gc.collect()
    return {
        "refused": refused,
        "updates": len(shared.states),
        "expected": len(expected),
        # Unlike max, it keeps what is not a number.
        "error": float(np.max(errors)) if errors else 0.0,
    }


def main() -> None:
    torch.set_num_threads(1)
    backends, out, *names = sys.argv[1:]
    for index, place in enumerate(backends.split(",")):
        backend, _, mesh = place.partition("@")
        divisions = ("uneven",) if mesh else DIVISIONS
        ht.shutdown()
        comm = ht.init(backend)
        # Compiling takes longer than all else, and is the same on any ranks and whatever carries the messages.
        with_compiled = index == 0 and comm.size == 2 and not mesh
        chosen = [name for name in names or PATTERNS if with_compiled or not name.startswith("compiled")]
        wanted = references(comm, [(name, division) for name in chosen for division in divisions])
        results = {
            name: {
                division: outcome(PATTERNS[name], comm, division, mesh, wanted[name, division])
                for division in divisions
            }
            for name in chosen
        }
        Path(f"{out}-{place}-{comm.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
