"""Networks and values that several tests of predictions use."""

from __future__ import annotations

from hpctrain.common.workloads.workload import Layer, Sample, Workload
from hpctrain.control.predict.values import Values, constants, drawn


def plain(**values: float) -> Values:
    """The constants' own values in one column, some of them replaced; a dot in a name is written as two underscores."""
    known = dict(constants())
    for name, value in values.items():
        key = name.replace("__", ".")
        known[key] = known[key].model_copy(update={"value": value})
    return drawn(known, count=0)


def one_layer(**quantities: object) -> Workload:
    """A network of one layer."""
    given = {"name": "layer", "kind": "conv", "parameters": (1000,), "places": (0,), **quantities}
    layer = Layer.model_validate(given)
    return Workload(
        name="small",
        sample=Sample(shape=(3,), dtype="float32"),
        layers=(layer,),
        buffers=0,
        outputs=10,
        source="a test",
    )
