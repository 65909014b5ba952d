"""One case of another program, as a script of its own: ``hpctrain verify one_case.py -np 2 -- PROGRAM CASE``.

What the programs expect to be refused is raised here, as it is to a user.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import hpctrain as ht

# An even division, and one that has a last batch of one sample.
EVENLY = {"torch": (24, 12), "keras": "even"}
UNEVENLY = {"torch": (22, 7), "keras": "uneven"}


def losses(program: ModuleType, name: str) -> None:
    """A case of plain_losses and counted_losses, or a pattern of Keras, unless ``EVEN`` is set in uneven batches."""
    from loss_runs import CASES, Run

    comm = ht.init()
    torch_seed()
    samples, batch = (EVENLY if os.environ.get("EVEN") else UNEVENLY)["torch"]
    CASES[name](Run(comm, comm.size, samples, batch))


def keras_patterns(program: ModuleType, name: str) -> None:
    import keras
    from keras_runs import PATTERNS, Run

    comm = ht.init()
    keras.utils.set_random_seed(1)
    PATTERNS[name](Run(True, (EVENLY if os.environ.get("EVEN") else UNEVENLY)["keras"], comm))


def torch_seed() -> None:
    import torch

    torch.manual_seed(1)
    torch.set_default_dtype(getattr(torch, os.environ.get("DTYPE", "float64")))


def with_communicator(cases: str) -> Callable[[ModuleType, str], None]:
    """A case that gets the communicator and is in a dictionary of its program."""

    def case(program: ModuleType, name: str) -> None:
        comm = ht.init()
        torch_seed()
        getattr(program, cases)[name](comm)

    return case


def of_data(program: ModuleType, name: str) -> None:
    comm = ht.init()
    if name in program.DIFFER and program.__name__ == "same_data":
        one_step()
    getattr(program, "begin", lambda _: None)(comm)
    (program.ALIKE | program.DIFFER)[name](comm)


def function(program: ModuleType, name: str) -> None:
    import keras

    given = [ht.init(), Path(tempfile.mkdtemp())]
    keras.utils.set_random_seed(1)
    weight = keras.Variable(1.0)
    keras.optimizers.SGD(0.1).apply([keras.ops.ones(())], [weight])
    case = getattr(program, name)
    case(*given[: case.__code__.co_argcount])


def mistake(program: ModuleType, name: str) -> None:
    ht.init()
    torch_seed()
    one_step()
    getattr(program, name)()


def of_mesh(program: ModuleType, name: str) -> None:
    ht.init()
    if wrong := os.environ.get("WRONG"):
        spoil(program, wrong)
    (program.pipelined if program.CASES[name].schedule else program.distributed)(name)


def spoil(program: ModuleType, wrong: str) -> None:
    """Make a script of a mesh wrong: its loss a sum over ranks, or its rate theirs."""
    ranks = ht.init().size
    loss_of, build = program.loss_of, program.build
    if wrong == "sum":
        program.loss_of = lambda *given: ranks * loss_of(*given)
        return

    def with_rate(*given: Any, **named: Any) -> Any:
        model, optimizer = build(*given, **named)
        for group in optimizer.param_groups:
            group["lr"] *= ranks
        return model, optimizer

    program.build = with_rate


class AnyText(str):
    """What one process has in place of a refusal's text, in which a case looks for words."""

    __slots__ = ()

    def __contains__(self, words: object) -> bool:
        return True


def one_step() -> None:
    """What is refused before anything trains, one process would train on, so that there is a step to compare."""
    import torch

    optimizer = torch.optim.SGD([weight := torch.nn.Parameter(torch.ones(1))], lr=0.1)
    weight.sum().backward()
    optimizer.step()


KINDS: dict[str, Callable[[ModuleType, str], None]] = {
    "plain_losses": losses,
    "counted_losses": losses,
    "keras_patterns": keras_patterns,
    "keras_guides": keras_patterns,
    "keras_loops": keras_patterns,
    "keras_fits": keras_patterns,
    "keras_counted": keras_patterns,
    "keras_whole": keras_patterns,
    "torch_misuse": with_communicator("CHECKS"),
    "keras_misuse": function,
    "same_data": of_data,
    "keras_same_data": of_data,
    "parallel": of_mesh,
    "parallel_misuse": mistake,
}


def main() -> None:
    name, case = sys.argv[1:]
    situations = importlib.import_module("situations")
    situations.refusal = situations.refused = lambda action, *_, **__: action()
    if name.startswith("keras"):
        importlib.import_module("keras_small").refused = lambda action, *_: (action(), AnyText())[1]
    KINDS[name](importlib.import_module(name), case)


if __name__ == "__main__":
    main()
