"""The signatures of ht.distribute and the others: the same as those of the adapters that they call."""

from __future__ import annotations

import inspect
from typing import get_overloads

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("keras")

from hpctrain.worker import adapters  # noqa: E402
from hpctrain.worker.adapters import keras as keras_adapter  # noqa: E402
from hpctrain.worker.adapters import torch as torch_adapter  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["distribute", "shard"])
def test_overloads_are_the_signatures_of_the_adapters(name: str) -> None:
    overloads = [inspect.signature(each) for each in get_overloads(getattr(adapters, name))]
    assert overloads == [inspect.signature(getattr(each, name)) for each in (torch_adapter, keras_adapter)]
