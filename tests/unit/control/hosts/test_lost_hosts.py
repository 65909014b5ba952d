"""After how long a silent host is lost, and how mpirun is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.settings import HOST_TIMEOUT
from hpctrain.control.hosts.networks import keepalive_options
from support.refusals import refused


@given(st.integers(5, 3600))
def test_idle_time_and_probes_take_that_long_together(seconds):
    options = keepalive_options(HOST_TIMEOUT.read({"HPCTRAIN_HOST_TIMEOUT": str(seconds)}))
    assert options[::3] == ["--prtemca"] * 3
    assert options[1::3] == [f"oob_tcp_keepalive_{name}" for name in ("time", "intvl", "probes")]
    idle, interval, probes = map(int, options[2::3])
    assert min(idle, interval) >= 1
    assert idle + interval * probes == seconds


@pytest.mark.parametrize("text", ["", "4", "3601", "-5", "7.5", "1e2", "\u0665\u0660", "9" * 5000])
def test_what_is_no_number_of_seconds_is_refused(text):
    with refused("HT-variable-invalid", name="HPCTRAIN_HOST_TIMEOUT"):
        HOST_TIMEOUT.read({"HPCTRAIN_HOST_TIMEOUT": text})


def test_within_a_minute_by_default():
    assert HOST_TIMEOUT.read({}) <= 60
