"""What a job has used, by the records of its ranks."""

from __future__ import annotations

from hpctrain.common.run.records import RankRecord
from hpctrain.control.schedulers.slurm.job_usage import busy, most_memory


def record(rank: int, host: str, peak: int, cpu: float, ended: float = 110.0) -> RankRecord:
    used = {"peak_bytes": peak, "cpu_seconds": cpu, "ended": ended}
    return RankRecord(rank=rank, host=host, pid=1, started=100.0, status="done", **used)


def test_memory_is_summed_by_host_and_time_over_all_cpus() -> None:
    records = [record(0, "n1", 2, 10.0), record(1, "n1", 3, 5.0), record(2, "n2", 4, 1.0, ended=105.0)]
    assert most_memory(records) == ("n1", 5)
    assert busy(records, cpus=4) == 0.4
    # Ranks that were killed have recorded nothing.
    lost = [record(0, "n1", 0, 0.0, ended=0.0)]
    assert (most_memory(lost), busy(lost, cpus=4)) == (None, None)
