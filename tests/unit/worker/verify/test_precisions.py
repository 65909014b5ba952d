"""In which precision a GPU multiplies, by whichever of PyTorch's settings a script has chosen it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from hpctrain.worker.verify.torch_steps import _rounds_products  # noqa: E402

SETTINGS = [
    each
    for each in (
        getattr(torch.backends.cudnn, "conv", None),
        getattr(torch.backends.cudnn, "rnn", None),
        torch.backends.cuda.matmul,
    )
    if hasattr(each, "fp32_precision")
]


@pytest.fixture
def settings() -> Iterator[list[object]]:
    if not SETTINGS:
        pytest.skip("this PyTorch has the older settings alone")
    before = [each.fp32_precision for each in SETTINGS]
    yield SETTINGS
    for each, value in zip(SETTINGS, before, strict=True):
        each.fp32_precision = value


def test_tf32_is_known_by_the_settings_that_cannot_be_mixed_with_the_older_ones(settings):
    for each in settings:
        each.fp32_precision = "ieee"
    with pytest.raises(RuntimeError):
        assert torch.backends.cudnn.allow_tf32
    assert not _rounds_products()
    for each in settings:
        each.fp32_precision = "tf32"
        assert _rounds_products()
        each.fp32_precision = "ieee"
