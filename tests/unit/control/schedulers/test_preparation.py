"""What a job is prepared from."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from hpctrain.control.schedulers.order import host_options, requested
from hpctrain.control.schedulers.scheduler import Cluster
from hpctrain.control.schedulers.slurm.limits import Limits, check_limits
from support.refusals import refused
from support.schedulers.job_scripts import PLAIN


def test_a_topologys_name_needs_a_file_before_the_job_waits_in_a_queue(tmp_path: Path) -> None:
    with refused("HT-option-needs-another", topology="gpu"):
        host_options(PLAIN, None, None, None, "gpu")
    assert host_options(PLAIN, tmp_path / "topology.yaml", None, None, "gpu").topology == "gpu"
    profile = PLAIN.model_copy(update={"fabric": "/etc/slurm/topology.yaml"})
    assert host_options(profile, None, None, None, "gpu").fabric == Path("/etc/slurm/topology.yaml")


def test_the_default_partition_limits_no_job_whose_partition_the_site_may_choose() -> None:
    """As Perlmutter's plugin chooses it by the constraint and the QOS."""
    cluster = Cluster(profile=PLAIN, check=partial(check_limits, partitions=(Limits(partition="cpu", gpus=0),)))
    asked = {"gpus_per_node": 4, "cpus_per_task": 1}
    with refused("HT-job-larger-than-a-node", partition="cpu"):
        requested(cluster, "x", asked)
    for named in ({"qos": "regular"}, {"constraint": "gpu"}):
        assert requested(cluster, "x", {**asked, **named}).gpus_per_node == 4
        with refused("HT-job-larger-than-a-node", partition="cpu"):
            requested(cluster, "x", {**asked, **named, "partition": "cpu"})
