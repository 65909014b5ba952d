"""A small residual network whose batch norm goes over several ranks, against PyTorch's own in one process.

``python batch_norm.py FRAMEWORK BACKEND`` on four ranks: rank 0 compares logits, gradients and statistics after one
step in training with those of one process on all images of the ranks that compute together.
"""

from __future__ import annotations

import functools
import sys

import numpy as np

import hpctrain as ht
from hpctrain.common.recipes.sections import BatchNormSettings, InitialWeights
from hpctrain.worker.models.batch_norm import extent

# Of ranks 0 to 3. With groups of two, a rank's share is smaller than its neighbour's.
IMAGES = (3, 1, 2, 3)
# The settings of a span, and the ranks that compute together.
SPANS = {6: 2, "world": 4}
MOMENTUM = 0.9
Arrays = dict[str, np.ndarray]


def torch_network(norm):
    from hpctrain.worker.models.torch_resnet import Basic, ResNet

    return ResNet(Basic, (1, 1), classes=5, zero_gamma=False, weights=InitialWeights(), norm=norm).double()


def plain_network():
    import torch

    return torch_network(lambda channels: torch.nn.BatchNorm2d(channels, momentum=1 - MOMENTUM))


def results(model, logits, images) -> Arrays:
    found = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    found |= {name: buffer.numpy().copy() for name, buffer in model.named_buffers() if "running" in name}
    return found | {"logits": logits.detach().numpy(), "images": images.grad.movedim(1, -1).numpy()}


def torch_loss(model, images, labels) -> Arrays:
    import torch

    x = torch.from_numpy(images).movedim(-1, 1).requires_grad_()
    logits = model(x)
    torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels), reduction="sum").backward()
    return results(model, logits, x)


def torch_step(layers, state, images, labels, comm) -> Arrays:
    import torch

    from hpctrain.worker.models.torch_batch_norm import TorchBatchNorm, average_statistics

    model = torch_network(functools.partial(TorchBatchNorm, extent=layers, momentum=MOMENTUM))
    model.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})
    found = torch_loss(model, images, labels)
    with torch.no_grad():
        model.bn1.running_mean.fill_(comm.rank)
        model.layer2[0].bn2.running_var.fill_(comm.rank**2)
    average_statistics(model, comm)
    return found | {"averaged": np.stack([model.bn1.running_mean[:8], model.layer2[0].bn2.running_var[:8]])}


def keras_step(layers, state, images, labels, comm) -> Arrays:
    import keras
    import tensorflow as tf

    from hpctrain.worker.models.convert import load_state, state_of
    from hpctrain.worker.models.keras_batch_norm import KerasBatchNorm, average_statistics
    from hpctrain.worker.models.keras_resnet import _basic, _Layers, _resnet

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    norm = functools.partial(KerasBatchNorm, extent=layers, momentum=MOMENTUM)
    own = _Layers(norm=norm, weights=InitialWeights(), zero_gamma=False)
    model = _resnet(_basic, (1, 1), own, classes=5)
    load_state(model, state)

    @tf.function
    def step(x, labels):
        with tf.GradientTape() as tape:
            tape.watch(x)
            logits = model(x, training=True)
            loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        return logits, tape.gradient(loss, [x, *model.trainable_variables])

    logits, gradients = step(tf.constant(images), tf.constant(labels))
    found = {name: value for name, value in state_of(model).items() if "running" in name}
    first, last = model.get_layer("bn1"), model.get_layer("layer2.0.bn2")
    first.moving_mean.assign(np.full(64, comm.rank))
    last.moving_variance.assign(np.full(128, comm.rank**2))
    average_statistics(model, comm)
    found["averaged"] = np.stack([first.moving_mean[:8], last.moving_variance[:8]])
    # The conversion of weights converts their gradients too.
    for variable, gradient in zip(model.trainable_variables, gradients[1:], strict=True):
        variable.assign(gradient)
    found |= {name: value for name, value in state_of(model).items() if "running" not in name}
    return found | {"logits": logits.numpy(), "images": gradients[0].numpy()}


def given() -> tuple[Arrays, list[np.ndarray], list[np.ndarray]]:
    """Weights, and images and labels of ranks that differ, so that their own statistics would not do."""
    import torch

    random = np.random.default_rng(0)
    torch.manual_seed(0)
    state = {name: value.numpy() for name, value in plain_network().state_dict().items()}
    state |= {name: value + random.uniform(0, 0.5, value.shape) for name, value in state.items() if value.ndim == 1}
    images = [random.normal(rank, 1 + rank, size=(count, 32, 32, 3)) for rank, count in enumerate(IMAGES)]
    return state, images, [random.integers(0, 5, count) for count in IMAGES]


def compare(ranks: list[Arrays], state: Arrays, images: list[np.ndarray], labels: list[np.ndarray]) -> None:
    import torch

    model = plain_network()
    model.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})
    expected = torch_loss(model, np.concatenate(images), np.concatenate(labels))
    assert ranks[0].keys() == {*expected, "averaged"}
    for name, value in expected.items():
        parts = [rank[name] for rank in ranks]
        if "running" in name:
            assert all(np.array_equal(part, parts[0]) for part in parts)
        joined = np.concatenate(parts) if name in ("logits", "images") else parts[0]
        if name not in ("logits", "images") and "running" not in name:
            joined = np.sum(parts, axis=0)
        np.testing.assert_allclose(joined, value, rtol=1e-9, atol=1e-9, err_msg=name)
    assert all((rank["averaged"] == [[1.5] * 8, [3.5] * 8]).all() for rank in ranks)


def main(framework: str, backend: str) -> None:
    step = {"torch": torch_step, "keras": keras_step}[framework]
    comm = ht.init(backend)
    state, images, labels = comm.broadcast_object(given() if comm.rank == 0 else None)
    for span, size in SPANS.items():
        layers = extent(BatchNormSettings(span=span), comm, at_once=max(IMAGES))
        everyone = comm.allgather_object(step(layers, state, images[comm.rank], labels[comm.rank], comm))
        for first in range(0, comm.size if comm.rank == 0 else 0, size):
            of = slice(first, first + size)
            compare(everyone[of], state, images[of], labels[of])
            print(f"{size} ranks agree", flush=True)
        comm.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
