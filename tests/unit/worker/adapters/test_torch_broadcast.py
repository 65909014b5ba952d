"""What a rank's optimizer has after rank 0's was written into it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hpctrain.worker.adapters.torch.broadcast import _Settings  # noqa: E402


def test_parameters_in_other_lists_of_a_group_stay_the_rank_s_own():
    mine, theirs = (torch.nn.Parameter(torch.full((2,), value)) for value in (1.0, 2.0))
    own, root = (torch.optim.SGD([{"params": [each], "anchors": [each]}], lr=each[0].item()) for each in (mine, theirs))
    _Settings(own).write(_Settings(root).values())
    assert own.param_groups[0]["anchors"][0] is mine
    assert mine.tolist() == [2, 2] and own.param_groups[0]["lr"] == 2
