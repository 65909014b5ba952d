"""What a mesh adds to a step: few operations and messages, however many parameters there are."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from torch import distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402

from hpctrain.worker.adapters.torch.parallel import optimizers  # noqa: E402
from hpctrain.worker.adapters.torch.parallel.pipeline import Pipeline  # noqa: E402
from hpctrain.worker.comm.single import SingleCommunicator  # noqa: E402
from support import needs  # noqa: E402
from support.torch_operations import Operations  # noqa: E402


def parameters(count: int) -> list[torch.nn.Parameter]:
    """Of two types, with gradients."""
    made = [torch.nn.Parameter(torch.ones(3, 2, dtype=(torch.float32, torch.bfloat16)[n % 2])) for n in range(count)]
    for each in made:
        each.grad = torch.full_like(each, 0.5)
    return made


def test_a_pipeline_looks_at_its_gradients_in_as_many_operations_for_any_number_of_parameters() -> None:
    def given(count: int) -> int:
        named = [(str(number), each) for number, each in enumerate(parameters(count))]
        stages = SimpleNamespace(named_parameters=lambda: named)
        with Operations() as operations:
            sampled = Pipeline._sample(stages)
        assert sampled.tolist() == [0.5] * 6 * count
        named[-1][1].grad.mul_(0.75)
        assert not torch.equal(Pipeline._sample(stages), sampled)
        return operations.count

    assert given(2) == given(40)


@pytest.fixture
def alone() -> Iterator[None]:
    """torch.distributed with one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@needs.pytorch_2_13
@pytest.mark.parametrize(("bucket_bytes", "messages"), [(25e6, 1), (70, 3)])
def test_zero_1_gathers_many_parameters_by_one_message(
    alone: None, monkeypatch: pytest.MonkeyPatch, bucket_bytes: float, messages: int
) -> None:
    """Ten parameters of 24 and 12 bytes, and one number."""
    monkeypatch.setattr(optimizers, "BUCKET_BYTES", bucket_bytes)
    # One as channels last lays it out, one without elements, and one number.
    odd = torch.empty_strided((4, 2, 1, 1), (2, 1, 2, 2)).fill_(1), torch.ones(3, 0), torch.tensor(1.0)
    own = [*parameters(10), *map(torch.nn.Parameter, odd)]
    optimizer = torch.optim.SGD(own, lr=1.0)
    optimizers.share_state(SingleCommunicator("test"), [optimizer], init_device_mesh("cpu", (1,)))
    own[-1].grad = torch.tensor(0.25)
    # What takes a tenth of a millisecond for each parameter.
    monkeypatch.setattr(torch.distributed.tensor.DTensor, "from_local", None)
    with CommDebugMode() as sent:
        optimizer.step()
    assert sent.get_total_counts() == messages
    assert [each.tolist() for each in own[:10]] == [[[0.5] * 2] * 3] * 10
    assert torch.equal(own[10], torch.ones(4, 2, 1, 1)) and own[-1].item() == 0.75
