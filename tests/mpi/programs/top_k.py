"""Trains a small network whose largest gradients alone travel between nodes; each rank is a node of its own.

``python top_k.py FRAMEWORK OUT`` writes OUT-RANK.npz with the parameters after the last step. The tests import this
file and call :func:`reference`, which is plain NumPy and PyTorch in one process: no hpctrain in it. ``python top_k.py
now_and_then OUT`` has a parameter that only every other step uses (:func:`reference_now_and_then`), and tries a
GradScaler.
"""

from __future__ import annotations

import itertools
import math
import sys

import numpy as np

RANKS, STEPS, RATE, FRACTION = 3, 12, 0.1, 0.05
SIZES = (6, 20, 3)


def data(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng((rank, step))
    return random.normal(size=(8, SIZES[0])), random.normal(size=(8, SIZES[-1]))


def weights() -> list[np.ndarray]:
    """In the order of both frameworks: kernel (inputs x outputs) and bias of each layer."""
    random = np.random.default_rng(5)
    shapes = [shape for inputs, outputs in itertools.pairwise(SIZES) for shape in ((inputs, outputs), (outputs,))]
    return [random.normal(size=shape) * 0.5 for shape in shapes]


def gradients(parameters: list[np.ndarray], x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """Of the mean squared error of tanh(x A + a) B + b, by hand."""
    first, first_bias, second, second_bias = parameters
    hidden = np.tanh(x @ first + first_bias)
    error = 2 * (hidden @ second + second_bias - y) / y.size
    back = error @ second.T * (1 - hidden**2)
    return [x.T @ back, back.sum(0), hidden.T @ error, error.sum(0)]


def reference(framework: str) -> list[np.ndarray]:
    """What the ranks are to have: the elements of a buffer lie as each framework's adapter puts them."""
    parameters = weights()
    order = [3, 2, 1, 0] if framework == "torch" else [0, 1, 2, 3]
    size = sum(each.size for each in parameters)
    kept = np.zeros((RANKS, size))
    for step in range(STEPS):
        total = np.zeros(size)
        for rank in range(RANKS):
            found = gradients(parameters, *data(rank, step))
            # PyTorch's weights are outputs x inputs.
            turned = [each.T if framework == "torch" else each for each in found]
            kept[rank] += np.concatenate([turned[index].ravel() for index in order]) / RANKS
            chosen = np.argsort(np.abs(kept[rank]))[size - math.ceil(FRACTION * size) :]
            total[chosen] += kept[rank, chosen]
            kept[rank, chosen] = 0
        for index in order:
            part, total = np.split(total, [parameters[index].size])
            shape = parameters[index].shape
            parameters[index] = parameters[index] - RATE * (
                part.reshape(shape[::-1]).T if framework == "torch" else part.reshape(shape)
            )
    return parameters


def in_torch(comm) -> list[np.ndarray]:
    import torch

    import hpctrain as ht

    layers = [torch.nn.Linear(inputs, outputs).double() for inputs, outputs in itertools.pairwise(SIZES)]
    model = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1])
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), weights(), strict=True):
            parameter.copy_(torch.from_numpy(value.T))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    ht.distribute(model, optimizer, comm=comm, compression="top_k", top_k=FRACTION)
    for step in range(STEPS):
        x, y = map(torch.tensor, data(comm.rank, step))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return [parameter.detach().cpu().numpy().T for parameter in model.parameters()]


def vectors(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng((rank, step))
    return random.normal(size=10), random.normal(size=10) * (step % 2 == 0)


def reference_now_and_then() -> list[np.ndarray]:
    kept, moved = np.zeros((RANKS, 20)), np.zeros(20)
    for step in range(STEPS):
        for rank in range(RANKS):
            # The last parameter lies first.
            kept[rank] += np.concatenate(vectors(rank, step)[::-1]) / RANKS
            chosen = np.argsort(np.abs(kept[rank]))[18:]
            moved[chosen] -= kept[rank, chosen]
            kept[rank, chosen] = 0
    return [moved[10:], moved[:10]]


def now_and_then(comm) -> list[np.ndarray]:
    import torch

    import hpctrain as ht

    model = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(10, dtype=torch.float64)) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ht.distribute(model, optimizer, comm=comm, compression="top_k", top_k=0.1)

    def loss(step: int):
        always, sometimes = map(torch.tensor, vectors(comm.rank, step))
        return model[0] @ always + (model[1] @ sometimes if step % 2 == 0 else 0)

    for step in range(STEPS):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
    moved = [parameter.detach().cpu().numpy().copy() for parameter in model]
    device = torch.get_default_device().type
    scaler = torch.amp.GradScaler(device, enabled=False)
    for _ in range(2):
        scaler.scale(loss(0)).backward()
        try:
            scaler.step(optimizer)
            refused = False
        except ht.HpctrainError as error:
            refused = error.code == "HT-compression-with-loss-scale"
        assert refused == scaler.is_enabled()
        scaler = torch.amp.GradScaler(device)
    return moved


def in_keras(comm) -> list[np.ndarray]:
    import keras
    import tensorflow as tf

    import hpctrain as ht

    keras.backend.set_floatx("float64")
    model = keras.Sequential(
        [keras.Input(SIZES[:1]), keras.layers.Dense(SIZES[1], activation="tanh"), keras.layers.Dense(SIZES[2])]
    )
    model.set_weights(weights())
    model, optimizer = ht.distribute(model, keras.optimizers.SGD(RATE), comm=comm, compression="top_k", top_k=FRACTION)
    for step in range(STEPS):
        x, y = data(comm.rank, step)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
    return [np.asarray(value) for value in model.get_weights()]


def main() -> None:
    framework, out = sys.argv[1:]
    from mpi4py import MPI

    from hpctrain.worker.comm.mpi_engine import MpiCommunicator

    comm = MpiCommunicator(MPI.COMM_WORLD, "each rank a node", lambda rank: rank)
    train = {"torch": in_torch, "keras": in_keras, "now_and_then": now_and_then}[framework]
    np.savez(f"{out}-{comm.rank}.npz", *train(comm))
    comm.shutdown()


if __name__ == "__main__":
    main()
