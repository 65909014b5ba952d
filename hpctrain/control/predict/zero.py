"""The bytes of a training's state that a rank keeps, in closed form.

Source: Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, section 5 and table 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpctrain.common.recipes.optimizers import Optimizer

Stage = Literal[0, 1, 2, 3]

# The first stage at which ranks divide each kind of state.
_DIVIDED_FROM = {"optimizer": 1, "gradients": 2, "parameters": 3}
_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of the state, of a rank or of one parameter."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """The bytes of all three."""
        return self.parameters + self.gradients + self.optimizer


def bytes_of_parameter(optimizer: Optimizer) -> StateBytes:
    """One parameter's bytes: itself, its gradient and the optimizer's state are float32 with every precision."""
    elements = optimizer.rule.state_elements(optimizer)
    return StateBytes(parameters=_FLOAT32, gradients=_FLOAT32, optimizer=_FLOAT32 * elements)


def zero_bytes(parameters: float, each: StateBytes, *, stage: Stage, ranks: int) -> StateBytes:
    """The bytes of a rank.

    Args:
        parameters: that the rank has part in: those of its stage of a pipeline, divided by the ranks along tp.
        each: the bytes of one parameter's state.
        stage: 0 divides nothing, 1 the optimizer's state, 2 the gradients too, 3 the parameters too.
        ranks: the number of ranks that they are divided over.
    """
    share = {kind: parameters / (ranks if stage >= first else 1) for kind, first in _DIVIDED_FROM.items()}
    return StateBytes(**{kind: count * getattr(each, kind) for kind, count in share.items()})
