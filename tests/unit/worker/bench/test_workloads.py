from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hpctrain.worker.bench.workloads import workload  # noqa: E402


@pytest.mark.parametrize("model", ["convnet", "resnet50"])
def test_images_lie_as_those_of_recipes_do(model: str) -> None:
    x = workload(model, batch=2, image_size=16, rank=0).x
    assert x.shape[:2] == (2, 3)
    assert x.is_contiguous(memory_format=torch.channels_last)
