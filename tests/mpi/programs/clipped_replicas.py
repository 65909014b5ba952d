"""A recipe's clipped steps on two replicas of one process are those of one: ``python clipped_replicas.py``."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

from hpctrain.worker.comm.single import SingleCommunicator
from hpctrain.worker.data.samples import Samples
from hpctrain.worker.train.keras_trainer import KerasTrainer
from hpctrain.worker.train.strategy_trainer import StrategyTrainer

sys.path.append(str(Path(__file__).parents[2]))

from support.digits_recipes import digits_recipe

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
one, two = SingleCommunicator("one"), SingleCommunicator("two")
two.strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
recipe = digits_recipe(optimizer={"name": "sgd", "learning_rate": 0.5, "momentum": 0.9, "clip_norm": 0.05})
trainers = [KerasTrainer(recipe, one), StrategyTrainer(recipe, two)]
random = np.random.default_rng(0)


def weights(trainer: KerasTrainer) -> np.ndarray:
    return np.concatenate([each.numpy().ravel() for each in trainer.model.trainable_variables])


for scale in (1.0, 1.0, 1.0, 1e20, 1.0):
    images, labels = random.random((8, 8, 8, 1), np.float32), random.integers(0, 10, 8)
    before = weights(trainers[1])
    for trainer in trainers:
        trainer.step([Samples(images=images * np.float32(scale), labels=labels)], 1, 1 / 8, 0.5, 1.0)
        # Its loss is finite, and the norm of its gradients is not.
        assert trainer.faulty is (scale > 1)
    assert np.array_equal(before, weights(trainers[1])) is (scale > 1)
    np.testing.assert_allclose(weights(trainers[1]), weights(trainers[0]), rtol=0, atol=1e-6)
