"""The figures of a benchmark from its times."""

from __future__ import annotations

import pytest

from hpctrain.cli.bench import compare


def test_ratios_are_taken_round_by_round():
    # the machine slows down threefold in the last round: medians of times would mislead, those of ratios do not
    seconds = {"limit": [1.0, 1.0, 3.0], "hand": [2.0, 2.0, 6.0], "ours": [1.9, 1.8, 5.4]}
    rows = {row["variant"]: row for row in compare(seconds, limit="limit", reference="hand")}
    assert rows["ours"]["ratio_to_limit"] == pytest.approx(1.8)
    assert rows["ours"]["ratio_to_horovod"] == pytest.approx(0.9)
    assert rows["limit"]["ratio_to_limit"] == 1.0
    assert rows["hand"]["median_s"] == 2.0
