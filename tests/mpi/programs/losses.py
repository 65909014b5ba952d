"""``python losses.py BACKEND,… OUT [CASE …]`` writes OUT-BACKEND-RANK.json: of each case of each division, how far its
losses and parameters are from one process's, how many updates were made, and what was refused.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import plain_losses  # noqa: F401 - registers its cases
import torch
from loss_runs import CASES, DIVISIONS, Run
from situations import refusal

import hpctrain as ht
from hpctrain.common.recipes.mesh import Mesh
from hpctrain.worker.adapters.data_ranks import set_mesh


def references(comm, names: list[str]) -> dict[tuple[str, str], Run]:
    """What one process comes to, by case and division; each rank computes some of them."""
    own = {}
    for name, division in [(name, division) for name in names for division in DIVISIONS][comm.rank :: comm.size]:
        own[name, division] = alone = Run(None, comm.size, *DIVISIONS[division])
        torch.manual_seed(5)
        CASES[name](alone)
    return {case: run for part in comm.allgather_object(own) for case, run in part.items()}


def outcome(function, comm, division: str, alone: Run) -> dict[str, object]:
    set_mesh(comm, Mesh())
    print(function.__name__, division, file=sys.stderr)
    shared = Run(comm, comm.size, *DIVISIONS[division])
    torch.manual_seed(5)
    everyone = comm.allgather_object(refusal(lambda: function(shared)))
    losses = [abs(one - many) / max(1.0, abs(one)) for one, many in zip(alone.losses, shared.losses, strict=False)]
    states = [
        float((one - many).abs().max() / one.abs().max().clamp(min=1))
        for one, many in zip(alone.states, shared.states, strict=False)
    ]
    gc.collect()
    return {
        "refused": next((each for each in everyone if each), None),
        "updates": max(len(shared.states), len(shared.losses)),
        "expected": max(len(alone.states), len(alone.losses)),
        "error": float(torch.tensor([0.0, *losses, *states]).max()),  # keeps what is not a number
    }


def main() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    backends, out, *names = sys.argv[1:]
    for backend in backends.split(","):
        ht.shutdown()
        comm = ht.init(backend)
        results = {}
        expected = references(comm, names or list(CASES))
        for name in names or CASES:
            results[name] = {
                division: outcome(CASES[name], comm, division, expected[name, division]) for division in DIVISIONS
            }
            Path(f"{out}-{backend}-{comm.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
