"""Parameters that come and go after ``ht.distribute``: those of a model are reduced, others are not touched."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from hpctrain.worker.adapters.torch.distribute import distribute, statistics  # noqa: E402
from hpctrain.worker.adapters.torch.trainable import (  # noqa: E402
    is_distributed,
    is_reduced,
    take_new_parameters,
)
from hpctrain.worker.comm.single import SingleCommunicator  # noqa: E402

nn = torch.nn


def network():
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def given(model):
    return distribute(model, torch.optim.SGD(model.parameters(), 0.1), comm=SingleCommunicator("test"))


def every_parameter_is_reduced(model):
    take_new_parameters()
    return all(map(is_reduced, model.parameters())) and all(map(is_distributed, model.modules()))


def unfreeze(model):
    model.requires_grad_(True)


def replace(model):
    model[2] = nn.Linear(3, 5).double()


def insert(model):
    model.insert(1, nn.Linear(3, 3).double())


def nest(model):
    model[0].adapter = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 3))


def assign(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def parametrize(model):
    nn.utils.parametrizations.spectral_norm(model[0])
    nn.utils.parametrizations.weight_norm(model[2])


@pytest.mark.parametrize("change", [unfreeze, replace, insert, nest, assign, parametrize])
def test_what_a_model_gets_later_is_reduced(change):
    model = network()
    model[0].requires_grad_(change is not unfreeze)
    given(model)
    change(model)
    assert every_parameter_is_reduced(model)


def test_frozen_parameters_are_taken_once_and_stay():
    model = network()
    model[0].requires_grad_(False)
    given(model)
    reducer = statistics(model)
    for trained in (False, True, False, True):
        model[0].requires_grad_(trained)
        take_new_parameters()
    assert statistics(model) is reducer and every_parameter_is_reduced(model)


def test_copies_and_other_models_are_not_touched():
    model, other = network(), network()
    given(model)
    for each in (copy.deepcopy(model), other):
        take_new_parameters()
        assert not any(map(is_reduced, each.parameters())) and not any(map(is_distributed, each.modules()))
        assert all(parameter._post_accumulate_grad_hooks is None for parameter in each.parameters())
