"""What one rank holds of PyTorch's tensors; tests/mpi/test_divided_state.py has the same on real ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from hpctrain.worker.adapters.torch.optimizer_contents import load_optimizer, optimizer_tensors  # noqa: E402
from hpctrain.worker.adapters.torch.tensor_pieces import fill, pieces_of, tensor_of  # noqa: E402
from support import needs  # noqa: E402

RANKS = 8


@pytest.fixture(params=range(RANKS))
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """One of eight, without the others."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=RANKS)
    yield request.param
    dist.destroy_process_group()


@needs.pytorch_2_13
def test_three_axes_divide_one_dimension_from_right_to_left(rank: int) -> None:
    """Sharding within copies over tensor parallelism: of 7 rows 4 and 3, and of those 2 and 2, 2 and 1."""
    mesh = init_device_mesh("cpu", (2, 2, 2))
    _, shard, tp = np.unravel_index(rank, (2, 2, 2))
    rows = np.array_split(np.arange(7), 2)[tp]
    own = rows[:2] if shard == 0 else rows[2:]
    local = torch.from_numpy(own[:, None] * 10 + np.arange(3))
    placements = (Replicate(), _StridedShard(0, split_factor=2), Shard(0))
    tensor = DTensor.from_local(local, mesh, placements, shape=torch.Size((7, 3)), stride=(3, 1), run_check=False)
    (piece,) = pieces_of(tensor)
    assert (piece.shape, piece.box.offsets, piece.box.lengths) == ((7, 3), (own[0], 0), (len(own), 3))
    assert np.array_equal(piece.array(), local.numpy()) and piece.nbytes == local.nbytes
    fill(tensor, {"w": 5 + np.arange(7)[:, None] * 10 + np.arange(3)}, "w")
    assert np.array_equal(local.numpy(), 5 + own[:, None] * 10 + np.arange(3))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
@pytest.mark.parametrize("shape", [(), (2, 3), (0,)])
def test_a_plain_tensor_is_one_piece(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(6)[: int(np.prod(shape))].view(shape).to(getattr(torch, dtype))
    (piece,) = pieces_of(tensor)
    assert (piece.shape, piece.box.lengths, piece.nbytes) == (shape, shape, tensor.nbytes)
    assert piece.array().dtype.name == dtype
    assert torch.equal(tensor_of(np.asarray(piece.array())), tensor)
    other = torch.zeros_like(tensor)
    fill(other, {"w": np.asarray(piece.array())}, "w")
    assert torch.equal(other, tensor)
    with pytest.raises(ValueError, match=r"'w' has shape \[4\] there, and"):
        fill(other, {"w": np.zeros(4)}, "w")


def test_optimizer_state_goes_by_names_that_may_begin_alike() -> None:
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Module()
        model.a = torch.nn.Parameter(torch.ones(2))
        model.b = torch.nn.Module()
        model.b.a = torch.nn.Parameter(torch.ones(3))
        groups = [{"params": [model.b.a], "lr": 0.1}, {"params": [model.a]}]
        return model, torch.optim.Adam(groups)

    model, optimizer = made()
    (model.a.sum() * 2 + model.b.a.sum()).backward()
    optimizer.step()
    saved = optimizer_tensors(model.named_parameters(), optimizer)
    assert sorted(saved) == [f"{name}.{slot}" for name in ("a", "b.a") for slot in ("exp_avg", "exp_avg_sq", "step")]
    assert saved["a.exp_avg"].tolist() == pytest.approx([0.2] * 2) and saved["b.a.exp_avg"].shape == (3,)
    again, other = made()
    # Of a parameter that another stage of a pipeline has.
    state = {f"of.{name}": each.numpy() for name, each in saved.items()} | {"of.c.step": np.ones(())}
    load_optimizer(again.named_parameters(), other, state, "of.")
    found = optimizer_tensors(again.named_parameters(), other)
    assert found.keys() == saved.keys() and all(torch.equal(found[name], value) for name, value in saved.items())
