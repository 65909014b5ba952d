"""The section of a recipe about the initial weights of its network."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpctrain.common.files.checked_yaml import Section
from hpctrain.common.recipes.bounds import Positive


class InitialWeights(Section):
    """The initial weights of a residual network's convolutions and last layer; other biases are 0."""

    fan: Literal["in", "out"] = Field(
        "out",
        description="a convolution's weights have the variance scale / fan: the values that go into one of its "
        "outputs, or the outputs that one of its inputs has a part in (He et al. 2015, arXiv 1502.01852)",
    )
    scale: Positive = Field(2.0, description="2 in He et al. 2015, 1 in TensorFlow's variance_scaling_initializer")
    truncated: bool = Field(False, description="drawn again beyond two deviations; the variance stays what it is")
    last_layer: Literal["normal", "uniform"] = Field(
        "normal",
        description="N(0, 0.01) and biases of 0 (Goyal et al. 2017), or what torch.nn.Linear does: weights and biases "
        "uniform within 1 / sqrt(its inputs)",
    )
