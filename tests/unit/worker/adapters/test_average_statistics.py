"""``ht.average_statistics``: the running statistics of all ranks, in models as users build them."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import hpctrain as ht
from support.refusals import refused
from support.thread_ranks import on_ranks


def test_running_statistics_of_any_normalisation_become_the_mean_over_the_ranks():
    torch = pytest.importorskip("torch")

    def model():
        return torch.nn.ModuleList(
            [
                torch.nn.BatchNorm1d(3),
                torch.nn.InstanceNorm1d(3, track_running_stats=True),
                torch.nn.BatchNorm1d(3, track_running_stats=False),
                torch.nn.BatchNorm1d(3, momentum=None),
            ]
        )

    def work(comm):
        own = model()
        x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(comm.rank))
        for norm in own:
            norm(x)
        before = {name: buffer.clone() for name, buffer in own.named_buffers()}
        ht.average_statistics(own, comm=comm)
        return before, dict(own.named_buffers())

    befores, afters = zip(*on_ranks(3, work), strict=True)
    names = [name for name in befores[0] if "running" in name]
    assert len(names) == 6
    for name in names:
        wanted = np.mean([before[name].double().numpy() for before in befores], axis=0)
        assert not np.allclose(befores[0][name], wanted, rtol=1e-3)
        for after in afters:
            np.testing.assert_array_equal(after[name].numpy(), wanted.astype(np.float32))


@pytest.mark.parametrize("use", ["evaluate", "save"])
def test_statistics_of_rank_0_alone_are_said_to_be_so_once(use):
    torch = pytest.importorskip("torch")
    from hpctrain.worker.adapters.torch.own_statistics import warn_of_own_statistics

    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    said = []
    warn_of_own_statistics(model, lambda: said.append(use))

    def used():
        model.state_dict() if use == "save" else model.eval()(torch.ones(2, 3))

    used()
    model.train()(torch.ones(2, 3))
    on_ranks(1, lambda comm: ht.average_statistics(model, comm=comm))
    used()
    assert said == []
    for _ in range(2):
        model.train()(torch.ones(2, 3))
        used()
    assert said == [use]
    # Whole models are copied and pickled, and what is made of them says nothing.
    model, said = torch.nn.Sequential(torch.nn.BatchNorm1d(3)), []
    warn_of_own_statistics(model, lambda: said.append(use))
    made = copy.deepcopy(model)
    made(torch.ones(2, 3))
    made.eval()(torch.ones(2, 3))
    made.state_dict()
    assert said == []


@pytest.mark.parametrize("made", [lambda model: model, copy.deepcopy])
def test_a_model_that_is_watched_refuses_to_be_scripted(made):
    torch = pytest.importorskip("torch")
    from hpctrain.worker.adapters.torch.own_statistics import warn_of_own_statistics

    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    warn_of_own_statistics(model, lambda: None)
    with refused("HT-model-not-scriptable") as caught:
        torch.jit.script(made(model))
    assert "state_dict()" in caught.value.hint


def test_the_steps_of_a_scripted_model_are_not_seen_so_it_is_warned_of_at_once():
    torch = pytest.importorskip("torch")
    from hpctrain.worker.adapters.torch.own_statistics import warn_of_own_statistics

    said = []
    model = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)))
    warn_of_own_statistics(model, lambda: said.append("own"))
    assert said == ["own"]
    assert torch.isfinite(model(torch.ones(2, 3))).all()


def test_a_model_without_running_statistics_has_nothing_to_say():
    torch = pytest.importorskip("torch")
    from hpctrain.worker.adapters.torch.own_statistics import warn_of_own_statistics

    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3, track_running_stats=False), torch.nn.SyncBatchNorm(3))
    warn_of_own_statistics(model, pytest.fail)
    assert not model._state_dict_pre_hooks


def test_keras_model():
    keras = pytest.importorskip("keras")
    models = []
    for rank in range(2):
        model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization()])
        model.layers[0].moving_mean.assign([rank, 1.0, 2.0])
        models.append(model)
    on_ranks(2, lambda comm: ht.average_statistics(models[comm.rank], comm=comm))
    assert [model.layers[0].moving_mean.numpy().tolist() for model in models] == [[0.5, 1.0, 2.0]] * 2


def test_what_is_no_model():
    with refused("HT-call-wrong-object"):
        ht.average_statistics([1])
