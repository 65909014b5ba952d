"""A small residual network whose batch norm goes over several ranks; the tests compute the same in one process.

``python batch_norm.py IN OUT FRAMEWORK=BACKEND`` reads weights, and images and labels of each rank, from IN and
writes OUT-FRAMEWORK-BACKEND-SPAN-RANK.npz: logits, gradients and statistics after one step in training.
"""

from __future__ import annotations

import functools
import sys

import numpy as np

import hpctrain as ht
from hpctrain.common.recipes.sections import BatchNormSettings
from hpctrain.worker.models.batch_norm import extent

# Of ranks 0 to 3. With groups of two, a rank's share is smaller than its neighbour's.
IMAGES = (3, 1, 2, 3)
SPANS = (6, "world")
MOMENTUM = 0.9


def torch_step(layers, given, comm) -> dict[str, np.ndarray]:
    import torch

    from hpctrain.common.recipes.sections import InitialWeights
    from hpctrain.worker.models.torch_batch_norm import TorchBatchNorm, average_statistics
    from hpctrain.worker.models.torch_resnet import Basic, ResNet

    norm = functools.partial(TorchBatchNorm, extent=layers, momentum=MOMENTUM)
    model = ResNet(Basic, (1, 1), classes=5, zero_gamma=False, weights=InitialWeights(), norm=norm).double()
    model.load_state_dict({name: torch.from_numpy(value) for name, value in given["state"].items()})
    x = torch.from_numpy(given["images"]).movedim(-1, 1).requires_grad_()
    logits = model(x)
    torch.nn.functional.cross_entropy(logits, torch.from_numpy(given["labels"]), reduction="sum").backward()
    found = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    found |= {name: buffer.numpy().copy() for name, buffer in model.named_buffers() if "running" in name}
    found |= {"logits": logits.detach().numpy(), "images": x.grad.movedim(1, -1).numpy()}
    with torch.no_grad():
        model.bn1.running_mean.fill_(comm.rank)
        model.layer2[0].bn2.running_var.fill_(comm.rank**2)
    average_statistics(model, comm)
    return found | {"averaged": np.stack([model.bn1.running_mean[:8], model.layer2[0].bn2.running_var[:8]])}


def keras_step(layers, given, comm) -> dict[str, np.ndarray]:
    import keras
    import tensorflow as tf

    from hpctrain.common.recipes.sections import InitialWeights
    from hpctrain.worker.models.convert import load_state, state_of
    from hpctrain.worker.models.keras_batch_norm import KerasBatchNorm, average_statistics
    from hpctrain.worker.models.keras_resnet import _basic, _Layers, _resnet

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    norm = functools.partial(KerasBatchNorm, extent=layers, momentum=MOMENTUM)
    own = _Layers(norm=norm, weights=InitialWeights(), zero_gamma=False)
    model = _resnet(_basic, (1, 1), own, classes=5)
    load_state(model, given["state"])

    @tf.function
    def step(x, labels):
        with tf.GradientTape() as tape:
            tape.watch(x)
            logits = model(x, training=True)
            loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        return logits, tape.gradient(loss, [x, *model.trainable_variables])

    logits, gradients = step(tf.constant(given["images"]), tf.constant(given["labels"]))
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


def compare(source: str, out: str, part: str) -> None:
    arrays = np.load(source)
    framework, _, backend = part.partition("=")
    step = {"torch": torch_step, "keras": keras_step}[framework]
    comm = ht.init(backend)
    given = {"images": arrays[f"images.{comm.rank}"], "labels": arrays[f"labels.{comm.rank}"]}
    given["state"] = {name[6:]: arrays[name] for name in arrays.files if name.startswith("state.")}
    for span in SPANS:
        layers = extent(BatchNormSettings(span=span), comm, at_once=max(IMAGES))
        np.savez(f"{out}-{framework}-{backend}-{span}-{comm.rank}.npz", **step(layers, given, comm))


if __name__ == "__main__":
    compare(*sys.argv[1:])
