"""Around the ranks of ``topology verify``: the folder they share, and the names of what they measured."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import pytest

from hpctrain.common.run.plan import Plan, Script, Slots
from hpctrain.control.planning.place_hosts import PlacedHosts
from hpctrain.control.programs.links import flows_of, measure_links
from hpctrain.control.topology.verify import End
from support.refusals import refused

HOSTS = PlacedHosts(slots=(Slots(host="a", slots=1), Slots(host="b", slots=1)))


def test_a_read_only_current_directory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def refuse(prefix: str, dir: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(dir / prefix))

    # The superuser, as whom tests may run, can write any folder.
    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    with refused("HT-file-unwritable", path=str(tmp_path), reason="Read-only file system") as caught:
        measure_links(HOSTS, 1, 1000)
    assert caught.value.exit_code == 2


def test_ends_have_the_names_of_the_plan() -> None:
    plan = Plan(
        script=Script(path=Path("links.py")),
        backend="mpi",
        ranks=4,
        hosts=(Slots(host="b.cluster", slots=2), Slots(host="a.cluster", slots=2)),
        threads_per_rank=1,
    )
    measured = {
        "devices": ["mlx5_0", "mlx5_1", "mlx5_0", "mlx5_1"],
        "flows": [{"round": 0, "source": 1, "target": 2, "bandwidth": 1e9, "spread": 0.1}],
    }
    (flow,) = flows_of(measured, plan)
    assert flow.source == End(host="b.cluster", device="mlx5_1")
    assert flow.target == End(host="a.cluster", device="mlx5_0")
