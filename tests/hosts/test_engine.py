"""The MPI engine between hosts with links of their own: the right parameters, and no more on the links than it says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from support.hosts.local_hosts import LocalHosts
from support.imported_programs import imported
from support.launching import Launch

pytest.importorskip("torch")

PROGRAM = Path(__file__).parents[1] / "mpi" / "programs" / "torch_on_nodes.py"
# The sum between nodes, its types, what travels narrowed, and buffers of an odd size.
CASES = ("momentum", "odd", "float32", "bfloat16", "wire_fp16")


@pytest.mark.parametrize("hosts_and_slots", ["h1:2,h3:2", pytest.param("h1,h2,h3,h4", marks=pytest.mark.long)])
def test_ranks_on_several_hosts_equal_one_process(hosts_hpctrain: Launch, tmp_path: Path, hosts_and_slots: str):
    out = tmp_path / "out"
    started = ("run", str(PROGRAM), "-H", hosts_and_slots, "--backend", "mpi", "--run-dir", "run")
    result = hosts_hpctrain(*started, "--", str(out), *CASES)
    assert result.returncode == 0, result.stdout
    found = [dict(np.load(f"{out}-{rank}.npz")) for rank in range(4)]
    nodes = hosts_and_slots.count("h")
    assert {int(each["nodes"]) for each in found} == {nodes}
    program = imported(PROGRAM.with_name("torch_equivalence.py"))
    for name in CASES:
        reference = program.reference(name)
        for each in found:
            np.testing.assert_array_equal(each[name], found[0][name], err_msg=f"{name}: ranks differ")
        error = np.abs(found[0][name] - reference).max()
        assert error <= program.TOLERANCE.get(name, 1e-10), f"{name}: {error}"
        # Each byte of the sums leaves a node once in each half of the all-reduce, however many ranks the node has.
        sent = sum(int(each[f"{name} sent"]) for each in found)
        assert sent == 2 * (nodes - 1) * int(found[0][f"{name} reduced"]), name


@pytest.mark.long
def test_the_links_carry_what_an_all_reduce_has_to_send(hosts: LocalHosts, hosts_hpctrain: Launch):
    """Counted by the adapters, for 20 MB that the engine and five baselines reduce."""

    def sent() -> list[int]:
        counter = "/sys/class/net/eth0/statistics/tx_bytes"
        return [int(hosts.run(host, "cat", counter).stdout) for host in ("h1", "h2")]

    before = sent()
    arguments = ("--sizes", "20000000", "--rounds", "1", "--link-gbit", "1", "--json")
    result = hosts_hpctrain("bench", "allreduce", "-H", "h1,h2", *arguments)
    assert result.returncode == 0, result.stdout
    measured = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{")))
    rows = {row["engine"]: row for row in measured["rows"]}
    assert {(row["hosts"], row["ranks"]) for row in rows.values()} == {(2, 2)}
    # Of N hosts each sends 2 (N - 1) / N of the bytes: all of them, for two.
    assert {row["link_bound_s"] for row in rows.values()} == {20e6 / 125e6}
    for engine in ("mpi", "mpi fp16", "mpi bf16", "MPI_Allreduce", "gloo", "horovod"):
        # Nothing is faster than its bytes, but for what a link may send at once.
        least = 0.45 if "16" in engine else 0.9
        assert least < rows[engine]["ratio_to_link"] < 60, engine
    # The check, two calls to warm up and one that is timed, each at 20 MB or at half of that.
    for host, bytes_before, bytes_after in zip(("h1", "h2"), before, sent(), strict=True):
        assert 1.0 < (bytes_after - bytes_before) / (4 * 5 * 20e6) < 1.2, host
