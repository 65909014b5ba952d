"""What watchers of backward passes get as roots, and what PyTorch still gets after they looked at it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.autograd.graph import get_gradient_edge  # noqa: E402

from hpctrain.worker.adapters.torch.backward_passes import watch_backward  # noqa: E402


class _Watcher:
    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def backward_begins(self, roots, *, trains, within):
        self.seen.append([each.ndim for each in roots])


@pytest.mark.parametrize(
    ("roots_of", "seen"),
    [
        (lambda loss: loss, [0]),
        (lambda loss: [loss], [0]),
        (lambda loss: (each for each in (loss,)), [0]),
        (get_gradient_edge, []),
        (lambda loss: [get_gradient_edge(loss)], []),
        (lambda loss: (loss, get_gradient_edge(2 * loss)), [0]),
    ],
)
def test_only_tensors_are_told_and_everything_is_computed(roots_of, seen):
    watcher = _Watcher()
    watch_backward(watcher)
    x = torch.ones(3, requires_grad=True)
    roots = roots_of(x.sum())
    count = len(roots) if isinstance(roots, list | tuple) and not hasattr(roots, "node") else 1
    torch.autograd.backward(roots, [torch.tensor(1.0)] * count)
    assert watcher.seen == [seen]
    assert x.grad.tolist() == ([3.0] * 3 if count == 2 else [1.0] * 3)
