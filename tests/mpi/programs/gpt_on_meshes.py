"""A small GPT on some ranks, divided over meshes: losses and parameters of each, for test_gpt_on_meshes.py to compare.

Usage: gpt_on_meshes.py OUTPUT NAME:MESH:[KEY=VALUE:…]STEPS…, which trains the case of gpt.py that the name begins with,
from the last checkpoint of the name, if it
has one, until so many steps are done. Rank 0 writes ``OUTPUT-NAME.jsonl``, and every rank ``OUTPUT-NAME-RANK.npz`` with
what it has of the parameters.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gpt
import numpy as np
import recipe_runs

import hpctrain as ht
from hpctrain.common.checkpoints.find import newest_whole
from hpctrain.common.recipes.load import mesh_overrides, override_recipe
from hpctrain.worker.adapters.data_ranks import set_mesh
from hpctrain.worker.adapters.torch.tensor_pieces import pieces_of
from hpctrain.worker.comm import Communicator
from hpctrain.worker.data import open_sources
from hpctrain.worker.train.recipe import torch_trainer


def train(comm: Communicator, output: str, name: str, mesh: str, changes: list[str], steps: int) -> None:
    case = name.partition("-")[0]
    recipe = override_recipe(gpt.recipe(case if case in gpt.CASES else "uneven"), [*mesh_overrides(mesh), *changes])
    set_mesh(comm, recipe.mesh)
    trainer = torch_trainer(recipe, comm)(recipe, comm)
    folder = Path(f"{output}-{name}")
    begun = comm.broadcast_object(newest_whole(folder).iteration if comm.rank == 0 else 0)
    stop_at = steps - 1 if steps < gpt.EPOCHS * gpt.STEPS else None
    sources = open_sources(recipe)
    recipe_runs.train(name, recipe, comm, trainer, output, sources=sources, stop_at=stop_at, resume_from=begun)
    pieces = {
        f"{key.removeprefix('model.')}@{','.join(map(str, piece.box.offsets))}": piece.array()
        for key, tensor in trainer._parameters()
        for piece in pieces_of(tensor)
    }
    np.savez(f"{output}-{name}-{comm.rank}.npz", **pieces)


def main(output: str, *cases: str) -> None:
    comm = ht.init()
    for case in cases:
        name, mesh, *changes, steps = case.split(":")
        train(comm, output, name, mesh, changes, int(steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
