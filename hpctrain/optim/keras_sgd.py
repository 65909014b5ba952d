"""SGD for Keras with PyTorch's update, so that one recipe means the same in both frameworks.

Keras' own SGD multiplies the rate into the momentum buffer, which needs a correction whenever the rate changes
(Goyal et al. 2017, arXiv 1706.02677, section 3), and decays weights apart from the gradient.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops


class MomentumSGD(keras.optimizers.Optimizer):  # type: ignore[misc]
    """v = momentum v + g + decay w; w -= rate v, or w -= rate (g + decay w + momentum v) with Nesterov's momentum.

    Args:
        l2: the decay, an L2 term in the gradient (Keras' ``weight_decay`` argument is another, decoupled one).
    """

    def __init__(
        self, learning_rate: float = 0.01, momentum: float = 0.0, nesterov: bool = False, l2: float = 0.0, **base: Any
    ) -> None:
        super().__init__(learning_rate=learning_rate, **base)
        self.momentum = momentum
        self.nesterov = nesterov
        self.l2 = l2

    def build(self, variables: list[Any]) -> None:
        """Make the momentum buffers."""
        if self.built:
            return
        super().build(variables)
        self._velocities = self.add_optimizer_variables(variables, "velocity")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable."""
        velocity = self._velocities[self._get_variable_index(variable)]
        gradient = ops.cast(gradient, variable.dtype) + self.l2 * variable
        self.assign(velocity, self.momentum * velocity + gradient)
        direction = gradient + self.momentum * velocity if self.nesterov else velocity
        self.assign_sub(variable, ops.cast(learning_rate, variable.dtype) * direction)

    def get_config(self) -> dict[str, Any]:
        """The settings, for a saved model."""
        return {**super().get_config(), "momentum": self.momentum, "nesterov": self.nesterov, "l2": self.l2}
