"""scikit-learn's bundled handwritten digits: 1,797 grey images of 8 x 8, ten classes."""

from __future__ import annotations

import numpy as np

from hpctrain.common.errors import HpctrainError
from hpctrain.worker.data.samples import Samples


def load_digits(*, test_fraction: float, seed: int) -> tuple[Samples, Samples]:
    """The training and the test set, every class with the same share of both.

    Raises:
        HpctrainError: one of the two would lack a class.
    """
    from sklearn.datasets import load_digits as bundled
    from sklearn.model_selection import train_test_split

    images, labels = bundled(return_X_y=True)
    everything = Samples(
        images=(images / 16).astype(np.float32).reshape(-1, 8, 8, 1),
        labels=labels.astype(np.int64),
    )
    try:
        train, test = train_test_split(
            np.arange(len(labels)), test_size=test_fraction, random_state=seed, stratify=labels
        )
    except ValueError as error:
        raise HpctrainError(
            f"data.test_fraction={test_fraction:g} cannot divide the {len(labels)} digits: {error}",
            "choose a fraction between 0.01 and 0.99",
        ) from error
    return everything[train], everything[test]
