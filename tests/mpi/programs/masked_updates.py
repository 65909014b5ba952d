"""Steps of two trainers of which one gives updates early, with bad pixels on rank 1: ``masked_updates.py BACKEND``

With reduced gradients no rank may update; where ranks train alone, rank 0 goes on.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import hpctrain as ht
from hpctrain.worker.train import torch_updates

sys.path.append(str(Path(__file__).parents[2]))

from support.digits_recipes import digits_recipe
from support.early_updates import AVERAGED, OPTIMIZERS, STEPS, Early, Late, step
from support.small_runs import assert_same_state

# Numbers of a GPU are not read by updates on either side.
torch_updates._is_readable = lambda tensor: False
comm = ht.init(sys.argv[1])
for name in ("sgd", "lamb"):
    settings = digits_recipe(optimizer=OPTIMIZERS[name], **AVERAGED)
    for alone in (False, True):
        late, early = Late(settings, comm), Early(settings, comm)
        for each in (late, early):
            each.alone = each.guard.apart = alone
        for number in range(STEPS):
            bad = math.nan if number in (0, 2, 3) and comm.rank == 1 else None
            assert step(early, number + 100 * comm.rank, bad) == step(late, number + 100 * comm.rank, bad)
            assert_same_state(late, early)
        first = 1 if alone and comm.rank == 0 else 2
        assert early.early == [*range(first, STEPS)], early.early
        for each in (late, early):
            # Ranks that trained alone differ by intent.
            each.guard.steps = 0
print(f"rank {comm.rank} is through", flush=True)
