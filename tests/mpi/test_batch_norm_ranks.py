"""Batch norm over groups of four real ranks equals one process on what the ranks of a group compute together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.imported_programs import imported

torch = pytest.importorskip("torch")

from hpctrain.common.recipes.sections import InitialWeights  # noqa: E402
from hpctrain.worker.models.torch_resnet import Basic, ResNet  # noqa: E402

PROGRAM = Path(__file__).parent / "programs" / "batch_norm.py"
RANKS = 4


program = imported(PROGRAM)


def plain(channels: int) -> torch.nn.BatchNorm2d:
    return torch.nn.BatchNorm2d(channels, momentum=1 - program.MOMENTUM)


def network() -> torch.nn.Module:
    return ResNet(Basic, (1, 1), classes=5, zero_gamma=False, weights=InitialWeights(), norm=plain).double()


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> tuple[Path, dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    torch.manual_seed(0)
    arrays = {f"state.{name}": value.numpy() for name, value in network().state_dict().items()}
    for name, value in arrays.items():
        if value.ndim == 1:
            arrays[name] = value + random.uniform(0, 0.5, value.shape)
    for rank, images in enumerate(program.IMAGES):
        # Ranks that differ, so that their own statistics would not do.
        arrays[f"images.{rank}"] = random.normal(rank, 1 + rank, size=(images, 32, 32, 3))
        arrays[f"labels.{rank}"] = random.integers(0, 5, images)
    path = tmp_path_factory.mktemp("batch_norm") / "given.npz"
    np.savez(path, **arrays)
    return path, arrays


def reference(arrays: dict[str, np.ndarray], ranks: range) -> dict[str, np.ndarray]:
    """PyTorch's own layers in one process, on all images of these ranks."""
    model = network()
    state = {name[6:]: torch.tensor(value) for name, value in arrays.items() if name.startswith("state.")}
    model.load_state_dict(state)
    images, labels = (np.concatenate([arrays[f"{what}.{rank}"] for rank in ranks]) for what in ("images", "labels"))
    x = torch.from_numpy(images).movedim(-1, 1).requires_grad_()
    logits = model(x)
    torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels), reduction="sum").backward()
    found = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    found |= {name: buffer.numpy() for name, buffer in model.named_buffers() if "running" in name}
    return found | {"logits": logits.detach().numpy(), "images": x.grad.movedim(1, -1).numpy()}


@pytest.mark.parametrize(
    ("framework", "backend"),
    [("torch", "mpi"), ("keras", "mpi"), pytest.param("torch", "gloo", marks=pytest.mark.thorough)],
)
@pytest.mark.long
def test_a_group_of_ranks_equals_one_process_on_the_joined_batch(given, mpirun, tmp_path, framework, backend):
    pytest.importorskip(framework)
    mpirun(PROGRAM, RANKS, str(given[0]), str(tmp_path / "out"), f"{framework}={backend}")
    for span, size in zip(program.SPANS, (2, RANKS), strict=True):
        ranks = [np.load(tmp_path / f"out-{framework}-{backend}-{span}-{rank}.npz") for rank in range(RANKS)]
        for start in range(0, RANKS, size):
            _compare(ranks[start : start + size], reference(given[1], range(start, start + size)))
        for rank in ranks:
            assert (rank["averaged"] == [[1.5] * 8, [3.5] * 8]).all()


def _compare(ranks: list, expected: dict[str, np.ndarray]) -> None:
    assert set(ranks[0].files) == {*expected, "averaged"}
    for name, value in expected.items():
        parts = [rank[name] for rank in ranks]
        if name in ("logits", "images"):
            joined = np.concatenate(parts)
        elif "running" in name:
            assert all(np.array_equal(part, parts[0]) for part in parts)
            joined = parts[0]
        else:
            joined = np.sum(parts, axis=0)
        np.testing.assert_allclose(joined, value, rtol=1e-9, atol=1e-9, err_msg=name)
