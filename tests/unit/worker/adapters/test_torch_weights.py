"""Which weight a gradient gets, and what is refused, on one rank of several, without starting the others.

That ranks together train as one process does is shown by tests/mpi/test_torch_patterns.py.
"""

from __future__ import annotations

import itertools
import weakref

import pytest

from support.refusals import refused

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from hpctrain.common.errors import HpctrainError  # noqa: E402
from hpctrain.worker.adapters.torch import distribute, forwards, shard  # noqa: E402
from hpctrain.worker.adapters.torch.batches import tensors_in  # noqa: E402
from hpctrain.worker.adapters.torch.weights import (  # noqa: E402
    batch_weights,
    computed_samples,
    look_alike,
    own_samples,
    weight,
)
from hpctrain.worker.comm.single import SingleCommunicator  # noqa: E402
from hpctrain.worker.data.sampling import share  # noqa: E402

RANKS, TOTALS = range(1, 9), range(1, 65)


def rank_of(rank: int, size: int) -> SingleCommunicator:
    comm = SingleCommunicator("test")
    comm.rank, comm.size = rank, size
    return comm


class Setting:
    """One rank of several, with a model whose gradient is its weight in each element."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.comm = rank_of(0, ranks)
        self.model = nn.Linear(1, 1, bias=False)
        distribute(self.model, torch.optim.SGD(self.model.parameters(), lr=0.1), comm=self.comm)
        self.comm.rank = rank  # afterwards: nobody broadcasts what rank 0 has

    def loader(self, samples: int, batch: int, **settings):
        return self.loader_of(torch.ones(samples, 1), batch, **settings)

    def loader_of(self, x, batch: int, **settings):
        data = TensorDataset(x)
        return shard(DataLoader(data, batch_size=batch), comm=self.comm, **settings)

    def gradient(self, loss) -> float:
        self.model.zero_grad()
        loss.backward()
        return self.model.weight.grad.item()


def test_weights_are_those_of_the_shares():
    for ranks, total in itertools.product(RANKS, TOTALS):
        shares = [share(np.arange(total), rank, ranks) for rank in range(ranks)]
        assert [own.count for own in shares] == [own_samples(total, rank, ranks) for rank in range(ranks)]
        assert [own.weight for own in shares] == [weight(total, rank, ranks) for rank in range(ranks)]


def test_two_batch_sizes_differ_on_some_rank():
    for ranks in RANKS:
        seen = {tuple(computed_samples(total, rank, ranks) for rank in range(ranks)) for total in TOTALS}
        assert len(seen) == len(TOTALS)


def test_batch_sizes_that_a_rank_cannot_tell_apart():
    assert look_alike(frozenset({16, 15}), 2)  # 8 on rank 0
    assert not look_alike(frozenset({16, 9}), 2)
    assert not look_alike(frozenset({16, 8}), 2)
    assert look_alike(frozenset({7, 5}), 3)  # 2 on rank 1


@pytest.mark.parametrize("rank", [0, 1])
def test_each_batch_has_its_weight_however_late_it_is_computed(rank):
    setting = Setting(rank, 2)
    batches = [x for (x,) in setting.loader(12, 5)]
    for index in (2, 0, 1, 2, 2):
        total = (5, 5, 2)[index]
        assert setting.gradient(setting.model(batches[index]).mean()) == pytest.approx(weight(total, rank, 2))


def test_a_graph_keeps_the_weight_of_its_batch():
    setting = Setting(0, 2)
    losses = [setting.model(x).mean() for (x,) in setting.loader(12, 5)]
    gradients = [setting.gradient(loss) for loss in reversed(losses)]
    assert gradients == pytest.approx([1.0, 1.2, 1.2])
    losses = [setting.model(x).mean() for (x,) in setting.loader(12, 5)]
    with refused("HT-batch-several-in-backward"):
        setting.gradient(losses[0] + losses[2])


def test_a_gradient_without_weight_is_zero_even_where_it_is_no_number():
    setting = Setting(1, 2)
    *_, (x,) = setting.loader(6, 5)
    assert len(x) == 2 and setting.gradient(setting.model(x).mean() * torch.nan) == 0.0


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda x: x[:2], "HT-batch-part"),
        (lambda x: x.split(1)[0], "HT-batch-part"),
        (lambda x: torch.cat([x, x]), "HT-batch-unknown-shape"),
        (lambda x: torch.ones(100, 1), "HT-batch-unknown-shape"),
    ],
)
def test_what_cannot_be_told_is_refused(change, code):
    setting = Setting(0, 2)
    x = next(iter(setting.loader(12, 5)))[0]
    with refused(code):
        setting.gradient(setting.model(change(x)).mean())
    assert setting.model.weight.grad is None


@pytest.mark.parametrize(
    "change", [lambda x: x.t().t(), lambda x: x[:, :1], lambda x: x.double().float(), lambda x: x * 1, torch.clone]
)
def test_views_and_copies_of_all_samples_are_known(change):
    setting = Setting(0, 2)
    x = next(iter(setting.loader(12, 5)))[0]
    assert setting.gradient(setting.model(change(x)).mean()) == pytest.approx(1.2)


class Scale(nn.Module):
    """Its gradient is its weight, whatever it gets."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.scale * torch.ones_like(x)


def total_of(setting: Setting, inputs, totals=(64, 12)) -> int | None:
    """Of which batch a model's forward pass of these is; None where it is refused."""
    model = Scale()
    distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=setting.comm)
    try:
        model(inputs).mean().backward()
    except HpctrainError:
        return None
    found = [total for total in totals if model.scale.grad.item() == pytest.approx(weight(total, setting.comm.rank, 3))]
    assert len(found) == 1, model.scale.grad
    return found[0]


@pytest.mark.parametrize(
    ("shape", "batch", "samples", "change", "total"),
    [
        ((5, 4), 64, 76, lambda x: x * 1, 64),
        ((5, 4), 64, 76, lambda x: x.mul(1).permute(2, 0, 1), 64),
        ((5, 4), 64, 76, lambda x: x.mul(1)[:, 1:], 64),
        ((5, 4), 64, 76, lambda x: x.mul(1).reshape(-1, 4), None),  # 12 is 4 a rank
        ((5, 4), 64, 76, lambda x: x.mul(1)[:7], None),
        ((28, 28), 64, 67, lambda x: x.mul(1).unsqueeze(1), 64),  # 3 is 1 a rank
        ((28, 28), 64, 64, lambda x: x.mul(1).unsqueeze(1), 64),
    ],
)
def test_copies_are_known_by_whole_samples_only(shape, batch, samples, change, total):
    setting = Setting(0, 3)
    x = next(iter(setting.loader_of(torch.ones(samples, *shape), batch)))[0]
    assert total_of(setting, change(x)) == total


def test_another_loader_of_as_many_samples_as_a_picture_has_rows():
    setting = Setting(0, 3)
    next(iter(setting.loader_of(torch.ones(84, 28, 28), 84)))
    x = next(iter(setting.loader_of(torch.ones(64, 28, 28), 64)))[0]
    assert total_of(setting, x.mul(1).unsqueeze(1)) == 64


@pytest.mark.parametrize(
    ("change", "total"),
    [
        (torch.tanh, 64),
        (lambda h: h.flatten(0, 1), 64),
        (lambda h: torch.tanh(h).flatten(0, 1), 64),
        (lambda h: h.detach().flatten(0, 1), 64),
        (lambda h: h.transpose(0, 1).contiguous(), 64),
        (lambda h: h[:, -1] + 1, 64),
        (lambda h: h[:11], None),
        (lambda h: torch.tanh(h)[:11].flatten(0, 1), None),
    ],
)
def test_hidden_states_are_of_the_forward_pass_that_they_come_from(change, total):
    setting = Setting(0, 3)
    x = next(iter(setting.loader_of(torch.ones(76, 5, 4), 64)))[0]
    assert total_of(setting, change(nn.Linear(4, 4)(x))) == total  # as wide as the share of 12


def test_hidden_states_of_two_batches_have_no_weight():
    setting = Setting(0, 3)
    first, second = (x for (x,) in setting.loader_of(torch.ones(76, 5, 4), 64))
    layer = nn.Linear(4, 4)
    assert total_of(setting, torch.cat([layer(first), layer(second)])) is None


def test_a_refusal_is_over_with_the_next_epoch():
    setting = Setting(0, 2)

    def unseen(x):
        return setting.gradient(nn.functional.linear(x, setting.model.weight).mean())

    first, _ = setting.loader(66, 33)
    with refused("HT-batch-without-module-call"):
        unseen(first[0])
    with refused("HT-batch-part"):
        setting.gradient(setting.model(first[0][:8]).mean())
    for (x,) in setting.loader(64, 32):
        assert setting.gradient(setting.model(x.mul(1)[:8]).mean()) == 1.0
    assert [unseen(x) for (x,) in setting.loader(12, 5)] == pytest.approx([1.2, 1.2, 1.0])
    assert setting.gradient(setting.model(first[0]).mean()) == pytest.approx(weight(33, 0, 2))
    with refused("HT-batch-part"):
        setting.gradient(setting.model(first[0][:8]).mean())


def test_nothing_is_forgotten_without_a_refusal():
    setting = Setting(0, 2)
    copies = [x * 1 for (x,) in setting.loader(12, 5)]
    next(iter(setting.loader(8, 8)))
    assert [setting.gradient(setting.model(x).mean()) for x in copies] == pytest.approx([1.2, 1.2, 1.0])
    with refused("HT-batch-without-module-call"):
        setting.gradient(nn.functional.linear(copies[0], setting.model.weight).mean())


def test_gradients_of_even_batches_have_no_hook():
    setting = Setting(0, 2)

    def gradients(loader):
        found = []
        for (x,) in loader:
            found.append(setting.gradient(nn.functional.linear(x, setting.model.weight).mean()))
        return found

    assert gradients(setting.loader(12, 4)) == [1.0] * 3
    assert not setting.model.weight._backward_hooks
    later = nn.Linear(1, 1)
    assert gradients(setting.loader(12, 5)) == pytest.approx([1.2, 1.2, 1.0])  # each was drawn before its own
    setting.comm.rank = 0
    distribute(later, torch.optim.SGD(later.parameters(), lr=0.1), comm=setting.comm)
    assert all(len(each._backward_hooks) == 1 for each in (setting.model.weight, *later.parameters()))


def test_copies_of_batches_that_look_alike_are_those_of_the_last_draw():
    gradients = []
    for rank in (0, 1):
        setting = Setting(rank, 2)
        first, last = (x for (x,) in setting.loader(31, 16))
        assert setting.gradient(setting.model(last * 1).mean()) == pytest.approx(weight(15, rank, 2))
        try:
            gradients.append(setting.gradient(setting.model(first * 1).mean()))
        except HpctrainError:
            gradients.append(None)
    assert None in gradients  # a rank that can tell refuses
    assert setting.gradient(setting.model(first).mean()) == 1.0


def test_where_no_forward_pass_was_seen_the_order_counts():
    setting = Setting(0, 2)

    def unseen(x):
        return setting.gradient(nn.functional.linear(x, setting.model.weight).mean())

    assert [unseen(x) for (x,) in setting.loader(12, 5)] == pytest.approx([1.2, 1.2, 1.0])
    first, *_ = setting.loader(12, 5)
    with refused("HT-batch-without-module-call"):
        unseen(first[0])


def test_batches_of_an_evaluation_have_no_weight():
    setting = Setting(0, 2)
    x = next(iter(setting.loader(12, 5, evaluation=True)))[0]
    with refused("HT-batch-of-evaluation"):
        setting.gradient(setting.model(x).mean())
    assert setting.gradient(setting.model(torch.ones(3, 1)).mean()) == 1.0


def test_even_batches_are_not_looked_at():
    setting = Setting(0, 2)
    batches = [x for (x,) in setting.loader(12, 4)]
    assert setting.gradient(setting.model(batches[0][:1]).mean() + setting.model(batches[1] * 2).mean()) == 3.0
    weights = batch_weights(setting.comm)
    assert weights not in forwards._watchers
    list(setting.loader(12, 5))
    assert weights in forwards._watchers


def test_loader_model_and_batches_are_freed():
    setting = Setting(0, 2)
    loader = setting.loader(12, 5)
    batch = next(iter(loader))
    loss = setting.model(batch[0]).mean()
    gone = [weakref.ref(each) for each in (loader, batch[0], setting.model, setting.comm)]
    del loader, batch, loss, setting
    import gc

    gc.collect()
    assert [reference() for reference in gone] == [None] * 4


def test_tensors_are_found_in_containers_and_objects():
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)

    class Own:
        def __init__(self):
            self.inner = {"a": [a, (b, self)], "n": 3, "text": "x"}

    assert {id(each) for each in tensors_in([Own(), c, c, None])} == {id(a), id(b), id(c)}


class Positions(nn.Module):
    """Whose positions are computed by themselves, from no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.positions, self.head = nn.Linear(3, 3), nn.Embedding(3, 3), nn.Linear(3, 1)
        nn.init.ones_(self.head.weight)


def _with_positions():
    comm = rank_of(0, 2)
    model = Positions()
    distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=comm)
    # 3 samples of the first batch, and 2 of the second, on rank 0.
    loader = shard(DataLoader(TensorDataset(torch.ones(8, 3, 3)), batch_size=5), comm=comm)
    return model, [x for (x,) in loader]


@pytest.mark.parametrize("index", [0, 1])
def test_positions_have_the_weight_of_what_they_are_added_to(index):
    model, batches = _with_positions()
    x = batches[index]
    model.head(model.body(x) + model.positions(torch.arange(3))).mean().backward()
    assert torch.allclose(model.positions.weight.grad, torch.full((3, 3), weight(len(x) * 2 - 1, 0, 2) / 3))


@pytest.mark.parametrize(
    ("loss_of", "code"),
    [
        # Of two batches; and of the second, added where no module sees it.
        (
            lambda model, one, other, where: model.head(one + where) + model.head(other + where)[:2].sum(),
            "HT-batch-several-in-backward",
        ),
        (
            lambda model, one, other, where: model.head(one).mean() + (other + where).mean(),
            "HT-batch-without-module-call",
        ),
    ],
)
def test_positions_of_what_is_not_known_are_refused(loss_of, code):
    model, batches = _with_positions()
    loss = loss_of(model, *map(model.body, batches), model.positions(torch.arange(3))).mean()
    with refused(code):
        loss.backward()


@pytest.mark.parametrize(("count", "captured"), [(3, True), (2**17 + 1, False)])
def test_positions_are_not_read_from_a_gpu_that_must_not_wait(monkeypatch, count, captured):
    model, _ = _with_positions()

    def equal(*_):
        raise AssertionError

    monkeypatch.setattr(torch, "equal", equal)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: captured)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    model.positions = nn.Embedding(count, 1)
    model.positions(torch.arange(count))


def test_numbers_of_a_batch_are_no_positions():
    comm = rank_of(1, 2)
    model = nn.Embedding(5, 1)
    distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=comm)
    numbers = shard(DataLoader(TensorDataset(torch.tensor([9, 9, 9, 0, 1])), batch_size=5), comm=comm)
    for (x,) in numbers:
        assert x.tolist() == [0, 1]
        model(x).sum().backward()
    assert model.weight.grad[:2, 0].tolist() == pytest.approx([weight(5, 1, 2)] * 2)
