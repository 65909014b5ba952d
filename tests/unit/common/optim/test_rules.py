"""Every update rule in both frameworks against the papers' formulas in NumPy, float64, over 50 steps with a rate that
changes: after each step all parameters are equal to 1e-10.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("keras")

import torch

from hpctrain.worker.train import keras_rules, torch_rules
from support.optimizer_runs import (
    INTERRUPTED,
    KINDS,
    RATES,
    SHARES,
    START,
    Arrays,
    distance,
    keras_model,
    keras_path,
    keras_steps,
    settings,
    torch_model,
    torch_path,
    torch_steps,
)

PATHS = {"torch": torch_path, "keras": keras_path}
NORM_AND_BIAS = ("norm", "bias")

SGD = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "l2": {"momentum": 0.9, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "undecayed": NORM_AND_BIAS},
    "rate inside": {"momentum": 0.9, "rate_in_momentum": True, "weight_decay": 0.1},
    "rate inside, nesterov": {"momentum": 0.9, "rate_in_momentum": True, "nesterov": True, "undecayed": ("bias",)},
}

_PAPER = {"momentum": 0.9, "weight_decay": 0.1, "rate_in_momentum": True, "trust_coefficient": 0.5}
LARS = {
    "the paper": _PAPER,
    "MLPerf": {**_PAPER, "epsilon": 0.01, "undecayed": NORM_AND_BIAS, "unadapted": NORM_AND_BIAS},
    "undecayed but adapted": {**_PAPER, "undecayed": ("norm",)},
    "unadapted but decayed": {**_PAPER, "unadapted": ("bias",)},
    "rate outside": {**_PAPER, "rate_in_momentum": False},
    "norm of sum": {**_PAPER, "trust_denominator": "norm_of_sum"},
    "norm of sum, epsilon": {**_PAPER, "trust_denominator": "norm_of_sum", "epsilon": 0.01},
    "nesterov": {**_PAPER, "nesterov": True},
    "nesterov, rate outside": {**_PAPER, "nesterov": True, "rate_in_momentum": False},
    "no momentum": {**_PAPER, "momentum": 0.0},
    "no decay": {**_PAPER, "weight_decay": 0.0},
    "another decay in the ratio": {**_PAPER, "trust_decay": 1.3, "undecayed": NORM_AND_BIAS},
}

LAMB = {
    "no decay": {},
    "decay": {"weight_decay": 0.1},
    "undecayed": {"weight_decay": 0.1, "undecayed": NORM_AND_BIAS},
    "unadapted": {"weight_decay": 0.1, "unadapted": NORM_AND_BIAS},
    "undecayed and unadapted": {"weight_decay": 0.1, "undecayed": ("norm",), "unadapted": ("norm",)},
    "other betas and epsilon": {"weight_decay": 0.1, "betas": (0.5, 0.9), "epsilon": 0.01},
    "no first moment": {"betas": (0.0, 0.9)},
    "no bias correction": {"weight_decay": 0.1, "bias_correction": False},
}

_TRANSITION = {"center": 10.0, "period": 5.0, "rmsprop_rate": 0.05}
TRANSITIONS = {
    "the paper": {"momentum": 0.9, "weight_decay": 0.1, "transition": _TRANSITION},
    "undecayed": {"momentum": 0.9, "weight_decay": 0.1, "undecayed": NORM_AND_BIAS, "transition": _TRANSITION},
    "no momentum": {"epsilon": 0.01, "transition": {**_TRANSITION, "square_decay": 0.5}},
}


def numpy_sgd(w, gradients, *, m=0.0, nesterov=False, decay=0.0, inside=False):
    path, v = [], np.zeros_like(w)
    for g, rate in zip(gradients, RATES, strict=True):
        d = g + decay * w
        if inside:
            v = m * v + rate * d
            w = w - (m * v + rate * d if nesterov else v)
        else:
            v = m * v + d
            w = w - rate * (m * v + d if nesterov else v)
        path.append(w)
    return path


def numpy_lars(w, gradients, *, m, beta, ratio_beta, eta, eps, inside, nesterov, of_sum, adapted):
    path, v = [], np.zeros_like(w)
    for g, rate in zip(gradients, RATES, strict=True):
        w_norm, g_norm, sum_norm = (np.sqrt(np.sum(x**2)) for x in (w, g, g + beta * w))
        trust = 1.0
        if adapted and w_norm and (sum_norm if of_sum else g_norm):
            trust = eta * w_norm / ((sum_norm if of_sum else g_norm + ratio_beta * w_norm) + eps)
        if inside:
            v = m * v + rate * trust * (g + beta * w)
            w = w - (m * v + rate * trust * (g + beta * w) if nesterov else v)
        else:
            v = m * v + trust * (g + beta * w)
            w = w - rate * (m * v + trust * (g + beta * w) if nesterov else v)
        path.append(w)
    return path


def numpy_lamb(w, gradients, *, betas, eps, decay, adapted, corrected=True):
    path, m, v = [], np.zeros_like(w), np.zeros_like(w)
    for t, (g, rate) in enumerate(zip(gradients, RATES, strict=True), start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        first, second = (1 - betas[0] ** t, 1 - betas[1] ** t) if corrected else (1, 1)
        r = m / first / (np.sqrt(v / second) + eps) + decay * w
        w_norm, r_norm = np.sqrt(np.sum(w**2)), np.sqrt(np.sum(r**2))
        w = w - rate * (w_norm / r_norm if adapted and w_norm and r_norm else 1.0) * r
        path.append(w)
    return path


def numpy_transition(w, gradients, *, m, decay, eps, rho, rmsprop_rate):
    path, s, v = [], np.zeros_like(w), np.zeros_like(w)
    for g, rate, share in zip(gradients, RATES, SHARES, strict=True):
        d = g + decay * w
        s = rho * s + (1 - rho) * d**2
        v = m * v - (share + (1 - share) * rmsprop_rate / (np.sqrt(s) + eps)) * d
        w = w + rate * v
        path.append(w)
    return path


def of_every_parameter(reference) -> list[Arrays]:
    """``reference(w, gradients, kind)`` of each, as a path of all."""
    each = [
        reference(w, [at_step[i] for at_step in INTERRUPTED], kind)
        for i, (w, kind) in enumerate(zip(START, KINDS, strict=True))
    ]
    return [list(at_step) for at_step in zip(*each, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("framework", PATHS)
@pytest.mark.parametrize("variant", SGD)
def test_sgd(framework, variant):
    values = SGD[variant]

    def reference(w, gradients, kind):
        decay = 0.0 if kind in values.get("undecayed", ()) else values.get("weight_decay", 0.0)
        return numpy_sgd(
            w,
            gradients,
            m=values.get("momentum", 0.0),
            nesterov=values.get("nesterov", False),
            inside=values.get("rate_in_momentum", False),
            decay=decay,
        )

    assert distance(PATHS[framework](settings("sgd", **values), INTERRUPTED), of_every_parameter(reference)) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("framework", PATHS)
@pytest.mark.parametrize("variant", LARS)
def test_lars(framework, variant):
    values = LARS[variant]

    def reference(w, gradients, kind):
        beta = 0.0 if kind in values.get("undecayed", ()) else values["weight_decay"]
        return numpy_lars(
            w,
            gradients,
            m=values["momentum"],
            beta=beta,
            ratio_beta=values.get("trust_decay", beta) if beta else 0.0,
            eta=values["trust_coefficient"],
            eps=values.get("epsilon", 0.0),
            inside=values["rate_in_momentum"],
            nesterov=values.get("nesterov", False),
            of_sum=values.get("trust_denominator") == "norm_of_sum",
            adapted=kind not in values.get("unadapted", ()),
        )

    assert distance(PATHS[framework](settings("lars", **values), INTERRUPTED), of_every_parameter(reference)) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("framework", PATHS)
@pytest.mark.parametrize("variant", LAMB)
def test_lamb(framework, variant):
    values = LAMB[variant]

    def reference(w, gradients, kind):
        return numpy_lamb(
            w,
            gradients,
            betas=values.get("betas", (0.9, 0.999)),
            eps=values.get("epsilon", 1e-6),
            decay=0.0 if kind in values.get("undecayed", ()) else values.get("weight_decay", 0.0),
            adapted=kind not in values.get("unadapted", ()),
            corrected=values.get("bias_correction", True),
        )

    assert distance(PATHS[framework](settings("lamb", **values), INTERRUPTED), of_every_parameter(reference)) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("framework", PATHS)
@pytest.mark.parametrize("variant", TRANSITIONS)
def test_rmsprop_to_sgd(framework, variant):
    values = TRANSITIONS[variant]

    def reference(w, gradients, kind):
        return numpy_transition(
            w,
            gradients,
            m=values.get("momentum", 0.0),
            decay=0.0 if kind in values.get("undecayed", ()) else values.get("weight_decay", 0.0),
            eps=values.get("epsilon", 1e-8),
            rho=values["transition"].get("square_decay", 0.99),
            rmsprop_rate=values["transition"]["rmsprop_rate"],
        )

    assert (
        distance(PATHS[framework](settings("rmsprop_to_sgd", **values), INTERRUPTED), of_every_parameter(reference))
        < 1e-10
    )


@pytest.mark.slow
@pytest.mark.parametrize("framework", PATHS)
@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_adam_has_the_recipes_betas_epsilon_and_undecayed_kinds(framework, name):
    """Without a trust ratio lamb's r is AdamW's direction. Keras takes the powers of beta in float32, and adds epsilon
    where it weighs less in the first steps: here it is too small to matter.
    """
    decay = {"weight_decay": 0.1, "undecayed": ("norm",)} if name == "adamw" else {}
    ours = PATHS[framework](settings(name, betas=(0.5, 0.9), epsilon=1e-14, **decay), INTERRUPTED)

    def reference(w, gradients, kind):
        beta = 0.1 if decay and kind not in decay["undecayed"] else 0.0
        return numpy_lamb(w, gradients, betas=(0.5, 0.9), eps=1e-14, decay=beta, adapted=False)

    assert distance(ours, of_every_parameter(reference)) < {"torch": 1e-10, "keras": 1e-6}[framework]


GOYAL = {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4, "undecayed": ("norm",)}


def test_goyals_sgd_gives_the_same_float32_parameters_in_both_frameworks():
    torch_net, keras_net = torch_model(torch.float32), keras_model("float32")
    ours = torch_steps(torch_net, torch_rules.make_optimizer(settings("sgd", **GOYAL), torch_net))
    theirs = keras_steps(keras_net, keras_rules.make_optimizer(settings("sgd", **GOYAL), keras_net))
    assert distance(ours[-1:], theirs[-1:]) / np.abs(np.concatenate([x.ravel() for x in ours[-1]])).max() < 1e-6
    assert ours[-1][0].dtype == theirs[-1][0].dtype == np.float32


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("sgd", SGD["rate inside"]),
        ("lars", LARS["MLPerf"]),
        ("lamb", LAMB["undecayed"]),
        ("rmsprop_to_sgd", TRANSITIONS["the paper"]),
    ],
)
def test_goes_on_from_its_state(name, values):
    """PyTorch's tensors alone, as a checkpoint keeps them; Keras' variables.

    In which order a norm is added up may depend on where in memory its array begins.
    """
    chosen = settings(name, **values)
    expected = torch_path(chosen)
    model = torch_model()
    before = torch_rules.make_optimizer(chosen, model)
    torch_steps(model, before, last=25)
    kept = {
        index: {key: torch.from_numpy(value.numpy().copy()) for key, value in state.items()}
        for index, state in before.state_dict()["state"].items()
    }
    after = torch_rules.make_optimizer(chosen, model)
    after.load_state_dict({**after.state_dict(), "state": kept})
    assert distance(torch_steps(model, after, first=25), expected[25:]) < 1e-13

    net = keras_model()
    whole = keras_steps(net, keras_rules.make_optimizer(chosen, net))
    net = keras_model()
    first = keras_rules.make_optimizer(chosen, net)
    keras_steps(net, first, last=25)
    second = keras_rules.make_optimizer(chosen, net)
    second.build(net.trainable_variables)
    for old, new in zip(first.variables, second.variables, strict=True):
        new.assign(old.numpy())
    assert distance(keras_steps(net, second, first=25), whole[25:]) < 1e-13


def test_pytorchs_own_sgd_is_used_where_it_is_the_recipes():
    model = torch_model()
    assert type(torch_rules.make_optimizer(settings("sgd", **GOYAL), model)) is torch.optim.SGD
    inside = settings("sgd", momentum=0.9, rate_in_momentum=True)
    assert type(torch_rules.make_optimizer(inside, model)) is torch_rules.TorchRuleOptimizer


def test_bias_correction_is_exact_in_float32():
    """The first step of lamb is the sign of the gradient, here 1, whatever the betas. 1 - 0.999 would have an error of
    1e-5 in float32.
    """
    model = torch.nn.LayerNorm(3, bias=False)
    chosen = settings("lamb", unadapted=("norm",), epsilon=1e-12).model_copy(update={"learning_rate": 1.0})
    optimizer = torch_rules.make_optimizer(chosen, model)
    model.weight.grad = torch.ones(3)
    optimizer.step()
    np.testing.assert_allclose(model.weight.detach().numpy(), 0.0, atol=1e-6)
