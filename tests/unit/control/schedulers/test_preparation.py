"""What a job is prepared from."""

from __future__ import annotations

from pathlib import Path

from hpctrain.control.schedulers.preparation import host_options
from support.refusals import refused
from support.schedulers.job_scripts import PLAIN


def test_a_topologys_name_needs_a_file_before_the_job_waits_in_a_queue(tmp_path: Path) -> None:
    with refused("HT-topology-name-without-file", topology="gpu"):
        host_options(PLAIN, None, None, None, "gpu")
    assert host_options(PLAIN, tmp_path / "topology.yaml", None, None, "gpu").topology == "gpu"
    profile = PLAIN.model_copy(update={"fabric": "/etc/slurm/topology.yaml"})
    assert host_options(profile, None, None, None, "gpu").fabric == Path("/etc/slurm/topology.yaml")
