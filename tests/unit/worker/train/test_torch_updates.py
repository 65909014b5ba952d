"""Updates of many parameters at once against the same rules for one parameter at a time."""

from __future__ import annotations

import pytest

from hpctrain.common.optim import rules
from hpctrain.common.optim.rules import Operations, Rule, UpdateStep
from hpctrain.common.recipes.optimizers import SCALARS, Optimizer

torch = pytest.importorskip("torch")
from hpctrain.worker.train import torch_rules  # noqa: E402

ONE_BY_ONE = Operations(norm=torch.linalg.vector_norm, sqrt=torch.sqrt, expm1=torch.expm1, where=torch.where)
MOMENTUM = {"momentum": 0.9, "weight_decay": 0.1}
TRANSITION = {"center": 10.0, "period": 5.0, "rmsprop_rate": 0.05}
CHOSEN = {
    "sgd, the rate inside": ("sgd", {**MOMENTUM, "rate_in_momentum": True, "nesterov": True}),
    "lars": ("lars", {**MOMENTUM, "rate_in_momentum": True, "undecayed": ("norm", "bias"), "unadapted": ("norm",)}),
    "lars, no momentum": ("lars", {"weight_decay": 0.1, "trust_denominator": "norm_of_sum"}),
    "lamb": ("lamb", {"weight_decay": 0.1, "undecayed": ("norm", "bias")}),
    "lamb, uncorrected": ("lamb", {"bias_correction": False, "unadapted": ("bias",)}),
    "rmsprop_to_sgd": ("rmsprop_to_sgd", {**MOMENTUM, "transition": TRANSITION}),
}
RATES = (0.1, 0.3, 0.3, 0.0, 0.05, 0.2)
# What one operation on all of a type's numbers may be wrong by, in units of the largest parameter.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6}


def settings(chosen: str) -> Optimizer:
    name, values = CHOSEN[chosen]
    return Optimizer.model_validate({"name": name, "learning_rate": 0.1, **values}, strict=False)


def network(dtype: torch.dtype) -> torch.nn.Module:
    """Parameters of every kind, one without any number, one that starts at zero, and one that is never used."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 7, 3), torch.nn.BatchNorm2d(7), torch.nn.Linear(11, 5), torch.nn.Linear(4, 4)]
    layers[3].weight = torch.nn.Parameter(torch.empty(0, 4))
    return torch.nn.Sequential(*layers, torch.nn.Linear(2, 2)).to(dtype)


def give_gradients(model: torch.nn.Module, step: int) -> None:
    random = torch.Generator().manual_seed(step)
    for name, parameter in model.named_parameters():
        gradient = torch.randn(parameter.shape, generator=random, dtype=torch.float64).to(parameter.dtype)
        # One parameter has no gradient in some steps, and the last layer never has one.
        parameter.grad = None if name.startswith("4.") or (name == "2.bias" and step in (1, 2)) else gradient


def one_by_one(model: torch.nn.Module, chosen: Optimizer, states: dict, step: UpdateStep) -> None:
    kinds = torch_rules.parameter_kinds(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            rule = Rule(settings=chosen, kind=kinds[name], ops=ONE_BY_ONE)
            state = states.setdefault(
                name,
                {
                    each: torch.zeros(() if each in SCALARS else parameter.shape).to(parameter)
                    for each in chosen.rule.slots(chosen)
                },
            )
            change, new = rule.update(step, parameter, parameter.grad, state)
            parameter.sub_(change)
            state |= {each: torch.as_tensor(value, dtype=parameter.dtype) for each, value in new.items()}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("chosen", CHOSEN)
def test_gives_what_the_rule_gives_for_each_parameter(chosen: str, dtype: torch.dtype, layout: torch.memory_format):
    ours, theirs, rule = network(dtype), network(dtype), settings(chosen)
    ours.to(memory_format=layout)
    optimizer, states = torch_rules.make_optimizer(rule, ours), {}
    for number, rate in enumerate(RATES):
        share = number / (len(RATES) - 1)
        for group in optimizer.param_groups:
            group["lr"] = rate
            if "sgd_share" in group:
                group["sgd_share"] = share
        give_gradients(ours, number)
        give_gradients(theirs, number)
        kept = [None if each.grad is None else each.grad.clone() for each in ours.parameters()]
        optimizer.step()
        one_by_one(theirs, rule, states, UpdateStep(rate=rate, sgd_share=share))
        for gradient, parameter in zip(kept, ours.parameters(), strict=True):
            assert gradient is None or torch.equal(gradient, parameter.grad)
        if number == 2:
            # As a checkpoint keeps it.
            state = optimizer.state_dict()
            optimizer = torch_rules.make_optimizer(rule, ours)
            optimizer.load_state_dict(state)
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        largest = max(1.0, float(other.detach().abs().max())) if other.numel() else 1.0
        assert torch.allclose(one, other, rtol=0, atol=TOLERANCE[dtype] * largest), name
        for slot, value in states.get(name, {}).items():
            found = optimizer.state[one][slot]
            largest = max(1.0, float(value.abs().max())) if value.numel() else 1.0
            assert torch.allclose(found, value, rtol=0, atol=TOLERANCE[dtype] * largest), (name, slot)
    assert not optimizer.state.get(ours[4].weight)


def test_updates_few_enough_numbers_at_once(monkeypatch: pytest.MonkeyPatch):
    """However parameters are put together, the numbers are the same."""
    results = []
    for together in (1, 50, 1 << 18):
        monkeypatch.setitem(rules.TOGETHER, "cpu", together)
        model = network(torch.float64)
        give_gradients(model, 0)
        lists = list(torch_rules._together(each for each in model.parameters() if each.grad is not None))
        assert all(len(each) == 1 or sum(p.numel() for p in each) <= together for each in lists)
        torch_rules.make_optimizer(settings("lars"), model).step()
        results.append([each.detach().clone() for each in model.parameters()])
    assert all(
        torch.allclose(*pair, rtol=0, atol=1e-15)
        for others in results[1:]
        for pair in zip(results[0], others, strict=True)
    )
