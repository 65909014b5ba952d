"""Trains a small network for a few steps with every optimizer of PyTorch and pytorch_optimizer, on replicas and meshes.

``python optimizers.py OUT BACKEND [NAME;…]`` writes OUT-RANK.json: by optimizer and kind what became of it, the
parameters or the error. The tests import this file and call :func:`reference`, which is plain PyTorch.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytorch_optimizer
import torch
from torch import nn

Make = Callable[[nn.Module], torch.optim.Optimizer]
STEPS, BATCH, SEED = 5, 12, 7
# They exchange messages of their own (and DeMo needs einops).
NOT_RUN = ("demo", "distributedmuon")
KINDS = ("replicas", "zero1", "zero3")


def network() -> nn.Module:
    """Sizes that divide over 2 ranks, and others."""
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4), nn.LayerNorm(4)).double()


def _of(kind: type[torch.optim.Optimizer], **settings: Any) -> Make:
    return lambda model: kind(model.parameters(), **settings)


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.dim() == 2]


def _muon(kind: type[torch.optim.Optimizer]) -> Make:
    """For matrices, with AdamW for the rest, as its authors use it."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        matrices = _matrices(model)
        others = [each for each in model.parameters() if each.dim() != 2]
        return kind([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}])

    return make


def _around(kind: type[torch.optim.Optimizer], **settings: Any) -> Make:
    return lambda model: kind(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), **settings)


def _sam(kind: type[torch.optim.Optimizer], **settings: Any) -> Make:
    return lambda model: kind(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, **settings)


def _torchs() -> dict[str, Make]:
    names = [
        each for each in torch.optim.__all__ if isinstance(getattr(torch.optim, each), type) and each != "Optimizer"
    ]
    made = {f"torch.optim.{each}": _of(getattr(torch.optim, each)) for each in names}
    made["torch.optim.Muon"] = lambda model: torch.optim.Muon([each for each in model.parameters() if each.dim() == 2])
    made["torch.optim.SGD"] = _of(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    made["torch.optim.LBFGS"] = _of(torch.optim.LBFGS, max_iter=4)
    made["torch.optim.LBFGS(line_search_fn='strong_wolfe')"] = _of(
        torch.optim.LBFGS, line_search_fn="strong_wolfe", max_iter=4
    )
    made["torch.optim.Adafactor"] = _of(torch.optim.Adafactor, lr=0.1)
    made["torch.optim.Adam(foreach=False)"] = _of(torch.optim.Adam, foreach=False)
    made["torch.optim.Adam(amsgrad=True)"] = _of(torch.optim.Adam, amsgrad=True, weight_decay=0.1)
    return made


def _others() -> dict[str, Make]:
    """The list of pytorch_optimizer, and its wrappers, which are not in it."""
    package = pytorch_optimizer
    made: dict[str, Make] = {}
    for name in package.get_supported_optimizers():
        kind = package.load_optimizer(name)
        if not kind.__module__.startswith("torch.") and name not in NOT_RUN:
            made[kind.__name__] = _of(kind)
    muons = ("Muon", "AdaMuon", "NorMuon", "AdaGO", "MuonClip")
    made.update({name: _muon(getattr(package, name)) for name in muons if name in made})
    for name in ("LOMO", "AdaLOMO", "AdamMini"):
        made[name] = getattr(package, name)
    made["Ranger21"] = _of(package.Ranger21, num_iterations=STEPS)
    made["AliG"] = _of(package.AliG, max_lr=0.1)
    made["SpectralSphere"] = lambda model: package.SpectralSphere(
        [each for each in model.parameters() if each.dim() == 2]
    )
    made["BSAM"] = _of(package.BSAM, num_data=BATCH)
    made["Lookahead"] = _around(package.Lookahead, k=2)
    made["OrthoGrad"] = _around(package.OrthoGrad)
    made["TRAC"] = _around(package.TRAC)
    made["PCGrad"] = _around(package.PCGrad)
    made["ScheduleFreeWrapper"] = _around(package.ScheduleFreeWrapper)
    for name in ("SAM", "WSAM", "LookSAM", "FriendlySAM"):
        made[name] = _sam(getattr(package, name))
    made["WSAM"] = lambda model: package.WSAM(model, model.parameters(), torch.optim.SGD, lr=0.1)
    return made


def optimizers() -> dict[str, Make]:
    return {**_torchs(), **dict(sorted(_others().items(), key=lambda item: item[0].lower()))}


# Which need a closure, or a backward pass that can be differentiated.
def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[torch.Tensor], name: str) -> None:
    graph = name in {"AdaHessian", "SophiaH"}
    closes = "LBFGS" in name or name in {"AliG", "BSAM", "SAM", "WSAM", "LookSAM", "FriendlySAM"}
    if name.startswith("ScheduleFree"):
        optimizer.train()
    for x in batches:

        @torch.enable_grad()
        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - x[:, :4]).square().mean()
            loss.backward(create_graph=graph)
            return loss

        closure()
        optimizer.step(closure) if closes else optimizer.step()


def data() -> torch.Tensor:
    return torch.randn(STEPS * BATCH, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def reference(name: str) -> list[list[float]] | str:
    """The parameters after plain PyTorch on whole batches, or its error."""
    model = network()
    try:
        optimizer = optimizers()[name](model)
        torch.manual_seed(SEED)
        train(model, optimizer, iter(data().split(BATCH)), name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return [each.detach().flatten().tolist() for each in model.parameters()]


def on_ranks(ht: Any, name: str, make: Make, kind: str) -> list[list[float]] | str:
    model = network()
    try:
        optimizer = make(model)
        if kind == "replicas":
            ht.distribute(model, optimizer, mesh=ht.mesh(dp_replicate=-1))
        else:
            ht.distribute(model, optimizer, mesh=ht.mesh(dp_shard=-1), plan=ht.ParallelPlan(zero=int(kind[-1])))
        torch.manual_seed(SEED)
        own = slice(ht.init().rank, None, ht.init().size)
        train(model, optimizer, (each[own] for each in data().split(BATCH)), name)
    except ht.HpctrainError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    return [each.detach().flatten().tolist() for each in whole]


def main() -> None:
    import hpctrain as ht

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    comm = ht.init(sys.argv[2])
    every = optimizers()
    found: dict[str, Any] = {}
    for name in sys.argv[3].split(";") if len(sys.argv) > 3 else every:
        for kind in KINDS:
            print(name, kind, file=sys.stderr, flush=True)
            found[f"{name}/{kind}"] = on_ranks(ht, name, every[name], kind)
            comm.barrier()
    Path(f"{sys.argv[1]}-{comm.rank}.json").write_text(json.dumps(found))
    comm.barrier()


if __name__ == "__main__":
    main()
