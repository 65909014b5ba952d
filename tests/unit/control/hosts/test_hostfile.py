"""Files of hosts, and lists of hosts with their slots."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.cluster.host_list import expand_slots
from hpctrain.common.cluster.launch_files import hydra_hostfile, open_mpi_hostfile, slurm_hostfile
from hpctrain.common.cluster.node_map import Slot
from hpctrain.control.hosts.arrange import parse_hostfile
from support.refusals import refused

NAMES = st.from_regex(r"[a-c]{1,2}[0-9]{1,3}(-ib[0-9])?(\.x)?", fullmatch=True)
SLOTS = st.dictionaries(NAMES, st.integers(1, 20), min_size=1, max_size=8)
PLACE = Slot(gpu=None, adapter=None, cores=())


@given(SLOTS)
def test_what_is_written_is_read(slots: dict[str, int]) -> None:
    placed = [(name, [PLACE] * count) for name, count in slots.items()]
    for write in (open_mpi_hostfile, hydra_hostfile):
        assert list(parse_hostfile(write(placed), "f").items()) == list(slots.items())
    alone = set(slots.values()) == {1}
    assert parse_hostfile(slurm_hostfile(placed), "f") == (dict.fromkeys(slots) if alone else slots)


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("n1:8,n2:8", {"n1": 8, "n2": 8}),
        ("gpu[001-003]:8,login1", {"gpu001": 8, "gpu002": 8, "gpu003": 8, "login1": None}),
        ("n[1,3]:2,n2:1", {"n1": 2, "n3": 2, "n2": 1}),
        # As mpirun -H of Open MPI 5.0.11 counts them, with --display allocation.
        ("n1:2,n1:2", {"n1": 4}),
        ("n1,n1", {"n1": 2}),
        ("n1:2,n1", {"n1": 3}),
        ("n[1-3]:8,n2", {"n1": 8, "n2": 9, "n3": 8}),
    ],
)
def test_lists(text: str, slots: dict[str, int | None]) -> None:
    assert expand_slots(text, "--hosts") == slots


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("n1:0", "after ':'"),
        ("n1:", "after ':'"),
        ("n1:two", "after ':'"),
        ("n1:2:3", "after ':'"),
        ("n[1-3:8", "it is empty"),
        ("", "it is empty"),
        (":8", "after ':'"),
        ("n1:8;id", "it is empty"),
    ],
)
def test_no_lists(text: str, reason: str) -> None:
    with refused("HT-hosts-not-a-list", where="--hosts") as caught:
        expand_slots(text, "--hosts")
    assert caught.value.values["reason"].startswith(reason)


def test_a_file_as_people_write_it() -> None:
    text = "# ours\n\n n1 slots=8 max_slots=16 # the first\r\nn2\tslots = 4\nn[3-4]:2\nlogin\n"
    assert parse_hostfile(text, "f") == {"n1": 8, "n2": 4, "n3": 2, "n4": 2, "login": None}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", 0),
        ("# none\n", 0),
        ("n1 slots=8\nn1 slots=8\n", 2),
        ("n1\nn1 slots=4\n", 2),
        ("n1\n^n2\n", 2),
        ("n1\nn2 slots=0\n", 2),
        *(
            (wrong, 1)
            for wrong in (
                *("n1 max-slots=4", "n1 slots=8 slots=8", "n1 slots", "n1 slot=8", "n1:8 slots=8", "n1 n2"),
                *("+n0 slots=4", "+e:2", "rank 0=n1 slot=1:0-3", "n1:0", "n1 port=22", "n1:8 user=somebody"),
                *("fe80::1 slots=4", "[2001:db8::7]", "somebody@fe80::1%eth0", "somebody@n1 slots=8"),
            )
        ),
    ],
)
def test_no_hostfiles(text: str, line: int) -> None:
    with refused("HT-hostfile-not-valid", where=f"f:{line}" if line else "f"):
        parse_hostfile(text, "f")


def test_a_line_that_is_no_list_of_hosts() -> None:
    with refused("HT-hosts-not-a-list", where="f:2", text="$(id)"):
        parse_hostfile("n1\n$(id)", "f")


# What Open MPI 5.0.11 (mpirun --display allocation) and MPICH 5.0.2 (ranks of a host) made of these lines.
@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("n1 slots=8 max-slots=8\nn2 slots=8 max_slots=8\n", {"n1": 8, "n2": 8}),
        # Tasks that go round the hosts.
        ("n1\nn2\nn1\nn2\nn3\n", {"n1": 2, "n2": 2, "n3": 1}),
        ("n1 slots=2\nn1\n", {"n1": 3}),
        ("n1:2\nn1:2\nn2:2\n", {"n1": 4, "n2": 2}),
        ("n1:2\nn2:2\nn1:2\n", {"n1": 4, "n2": 2}),
        ("n1:2\nn1\n", {"n1": 3}),
        ("10.0.0.1 slots=4 // the first\n# all\n", {"10.0.0.1": 4}),
    ],
)
def test_slots_as_mpirun_counts_them(text: str, slots: dict[str, int]) -> None:
    assert parse_hostfile(text, "f") == slots
