"""A host with a slow link is named while the run goes on, and its neighbours are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.common.run.directory import RunDirectory
from hpctrain.common.run.events import read_events
from hpctrain.common.run.events.kinds import SlowRankEvent
from support.hosts.local_hosts import LocalHosts
from support.launching import Launch

pytest.importorskip("torch")

_PROGRAM = Path(__file__).parents[1] / "mpi" / "programs" / "slow_rank.py"
# Three comparisons, of which two have to name the link: the first step has no begin, and a comparison needs ten.
_EVERY = 12


@pytest.mark.parametrize(
    ("backend", "slow", "direction"),
    [
        ("mpi", "h3", "from"),
        pytest.param("mpi", "h2", "to", marks=pytest.mark.thorough),
        pytest.param("mpi", "", "both", marks=pytest.mark.thorough),
        pytest.param("horovod", "h1", "both", marks=pytest.mark.thorough),
    ],
)
def test_the_host_with_a_slow_link_is_named(
    hosts: LocalHosts, hosts_hpctrain: Launch, tmp_path: Path, backend: str, slow: str, direction: str
):
    if slow:
        hosts.rate(slow, "100mbit", direction)
    started = ("run", str(_PROGRAM), "-H", "h1,h2,h3", "--backend", backend, "--run-dir", "run")
    result = hosts_hpctrain(*started, "--", "links", str(_EVERY))
    assert result.returncode == 0, result.stdout
    events = [event for event in read_events(RunDirectory(tmp_path / "run").events) if isinstance(event, SlowRankEvent)]
    # The hosts here share their cores, so that a rank may compute longer, too.
    found = [event for event in events if event.cause == "link"]
    assert [(event.rank, event.host) for event in found] == ([(int(slow[1]) - 1, slow)] if slow else [])
    assert all(event.iteration <= 3 * _EVERY for event in found)
