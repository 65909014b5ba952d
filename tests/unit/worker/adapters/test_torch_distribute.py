"""What ``ht.distribute`` takes care of, and for how long, where models are built up and taken apart."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

torch = pytest.importorskip("torch")


from hpctrain.worker.adapters.torch.distribute import distribute  # noqa: E402
from hpctrain.worker.adapters.torch.optimizer_contents import guard_of  # noqa: E402
from hpctrain.worker.adapters.torch.reducer import GradientReducer  # noqa: E402
from hpctrain.worker.comm.single import SingleCommunicator, SingleTorchEngine  # noqa: E402

X = torch.arange(12.0).view(4, 3)


def sgd(*models):
    return torch.optim.SGD([parameter for model in models for parameter in model.parameters()], lr=0.1)


def test_a_layer_is_unfrozen_parameter_by_parameter():
    comm, model = SingleCommunicator("test"), torch.nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    optimizer = sgd(model)
    for _ in range(2):
        distribute(model, optimizer, comm=comm)
        optimizer.zero_grad()
        model(X).sum().backward()
        optimizer.step()
        model.weight.requires_grad_(True)
    assert model.weight.grad.tolist() == [X.sum(0).tolist()] * 2
    assert model.bias.grad.tolist() == [4, 4]


def test_a_full_bucket_is_reduced_before_the_last_gradient_exists(monkeypatch):
    model, ahead = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)), []
    allreduce = SingleTorchEngine.allreduce

    def noted(*arguments, **settings):
        ahead.append(model[0].weight.grad is None)
        return allreduce(*arguments, **settings)

    monkeypatch.setattr(SingleTorchEngine, "allreduce", noted)
    comm = SingleCommunicator("test")
    comm.size = 2
    distribute(model, sgd(model), comm=comm, bucket_mb=1e-6)
    model(X).sum().backward()
    assert ahead[0] and not ahead[-1]


@pytest.mark.long
def test_what_proves_a_model_lives_as_long_as_its_parts():
    comm, generator, critic = SingleCommunicator("test"), torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)
    optimizers = [sgd(generator), sgd(critic)]
    distribute(torch.nn.ModuleList([generator, critic]), optimizers, comm=comm)
    gc.collect()
    guard = guard_of(optimizers[0])
    for count in (1, 2):
        critic(generator(X)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        assert guard.steps == count
    proof = weakref.ref(guard)
    del generator, critic, optimizers, optimizer, guard
    gc.collect()
    # Sealed, and kept for the last check.
    assert proof() is not None and proof()._sealed
    comm.make_last_checks()
    gc.collect()
    assert proof() is None


def test_replaced_parameters_are_let_go():
    comm, model = SingleCommunicator("test"), torch.nn.Linear(3, 2)
    optimizer = sgd(model)
    distribute(model, optimizer, comm=comm)
    before = weakref.ref(model.weight), weakref.ref(guard_of(optimizer))
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)
    optimizer = sgd(model)
    distribute(model, optimizer, comm=comm)
    gc.collect()
    assert [each() for each in before] == [None, None]


def test_gradients_of_several_devices_are_sent_in_one_order():
    """Autograd has a thread for each device: one that is slow to send does not let another pass."""

    class Engine:
        in_place, sent, begun = False, [], threading.Event()

        def allocate(self, numel, dtype, device):
            return torch.zeros(numel, dtype=dtype)

        def allreduce(self, buffer, name, wire):
            if buffer.dtype is torch.float32:
                self.begun.set()
                time.sleep(0.2)
            self.sent.append(buffer.dtype)

    engine, comm = Engine(), SingleCommunicator("test")
    comm.size, comm.torch = 2, lambda: engine
    model = torch.nn.ParameterList([torch.ones(3, dtype=torch.float64), torch.ones(3)])
    parameters = list(model.named_parameters())
    reducer = GradientReducer(comm, "test", bucket_bytes=1e6, wire=None)
    reducer.manage(parameters)
    for _, parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    reducer.running = True
    slow = threading.Thread(target=reducer._arrived, args=(id(model[1]),))
    slow.start()
    assert engine.begun.wait(100)
    reducer._arrived(id(model[0]))
    slow.join()
    assert engine.sent == [torch.float32, torch.float64]
