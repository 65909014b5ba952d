"""What ranks keep of the state, against the paper's table."""

from __future__ import annotations

import pytest

from hpctrain.control.predict.memory import StateBytes, zero_bytes

# Adam in mixed precision: 16-bit parameters and gradients; parameters, mean and variance in float32.
MIXED_ADAM = StateBytes(parameters=2, gradients=2, optimizer=12)


@pytest.mark.parametrize(
    ("parameters", "ranks", "gigabytes"),
    [
        # Rajbhandari et al. 2020, table 1: 7.5 billion and 128 billion parameters, by stage 1, 2 and 3.
        (7.5e9, 4, (52.5, 41.3, 30.0)),
        (7.5e9, 64, (31.4, 16.6, 1.88)),
        (7.5e9, 1024, (30.1, 15.1, 0.12)),
        (128e9, 64, (536, 284, 32.0)),
        (1e12, 1024, (4011, 2013, 15.6)),
    ],
)
def test_the_papers_table(parameters: float, ranks: int, gigabytes: tuple[float, ...]) -> None:
    found = [zero_bytes(parameters, MIXED_ADAM, stage=stage, ranks=ranks) for stage in (0, 1, 2, 3)]
    assert found[0].total == 16 * parameters
    assert [found[stage].total / 1e9 for stage in (1, 2, 3)] == pytest.approx(gigabytes, rel=0.005, abs=0.005)
