"""The signatures of ht.distribute and the others: the same as those of the adapters that they call."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import get_overloads

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("keras")

import hpctrain as ht  # noqa: E402
from hpctrain.worker import adapters  # noqa: E402
from hpctrain.worker.adapters import keras as keras_adapter  # noqa: E402
from hpctrain.worker.adapters import torch as torch_adapter  # noqa: E402

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[4]


@pytest.mark.parametrize("name", ["distribute", "shard", "mean_loss", "sum_loss"])
def test_overloads_are_the_signatures_of_the_adapters(name: str) -> None:
    overloads = [inspect.signature(each) for each in get_overloads(getattr(adapters, name))]
    assert overloads == [inspect.signature(getattr(each, name)) for each in (torch_adapter, keras_adapter)]


def test_mypy_refuses_wrong_settings() -> None:
    calls = Path(__file__).with_name("typed_calls.py")
    found = subprocess.run([sys.executable, "-m", "mypy", calls], cwd=REPOSITORY, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_an_unknown_setting_is_refused_with_the_valid_ones() -> None:
    arrays = (np.zeros((4, 2)), np.zeros(4))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(4)), batch_size=2)
    model = torch.nn.Linear(1, 1)
    for call, setting, valid in (
        (
            lambda: ht.shard(arrays, batch_size=2, evaluation=True),
            "evaluation",
            "batch_size, comm, epoch, seed, shuffle",
        ),
        (lambda: ht.shard(loader, epoch=1), "epoch", "comm, evaluation, seed"),
        (lambda: ht.distribute(model, torch.optim.SGD(model.parameters()), bucket=1), "bucket", "'bucket_mb'"),
        (lambda: ht.mean_loss(torch.zeros(()), 1, share=1), "share", "comm"),
    ):
        with pytest.raises(ht.HpctrainError) as caught:
            call()
        assert repr(setting) in caught.value.message
        assert valid in caught.value.hint
