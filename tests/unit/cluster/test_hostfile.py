"""Files of hosts, and lists of hosts with their slots."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cluster.host_list import expand_slots
from hpctrain.cluster.hostfile import parse_hostfile, read_hostfile
from hpctrain.errors import HpctrainError
from hpctrain.topology.launch_files import hydra_hostfile, open_mpi_hostfile, slurm_hostfile
from hpctrain.topology.node_map import Slot

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


@given(SLOTS)
def test_a_list_with_slots(slots: dict[str, int]) -> None:
    text = ",".join(f"{name}:{count}" for name, count in slots.items())
    assert list(expand_slots(text, "--hosts").items()) == list(slots.items())


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("n1:8,n2:8", {"n1": 8, "n2": 8}),
        ("gpu[001-003]:8,login1", {"gpu001": 8, "gpu002": 8, "gpu003": 8, "login1": None}),
        ("n[1,3]:2,n2:1", {"n1": 2, "n3": 2, "n2": 1}),
        ("n1:2,n1:2", {"n1": 2}),
    ],
)
def test_lists(text: str, slots: dict[str, int | None]) -> None:
    assert expand_slots(text, "--hosts") == slots


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("n1:8,n1:4", "--hosts: n1 has slots: 8, and then: 4"),
        ("n[1-3]:8,n2", "--hosts: n2 has slots: 8, and then: none"),
        ("n1:0", "after ':' is a number of slots, at least 1"),
        ("n1:", "after ':' is a number"),
        ("n1:two", "after ':' is a number"),
        ("n1:2:3", "after ':' is a number"),
        ("n[1-3:8", "is not a list of hosts"),
        ("", "is not a list of hosts"),
        (":8", "is not a list of hosts"),
        ("n1:8;id", "is not a list of hosts"),
    ],
)
def test_no_lists(text: str, said: str) -> None:
    with pytest.raises(HpctrainError, match=said.replace("(", r"\(")):
        expand_slots(text, "--hosts")


def test_a_file_as_people_write_it() -> None:
    text = "# ours\n\n n1 slots=8 max_slots=16 # the first\r\nn2\tslots = 4\nn[3-4]:2\nlogin\n"
    assert parse_hostfile(text, "f") == {"n1": 8, "n2": 4, "n3": 2, "n4": 2, "login": None}


def test_tasks_that_go_round_the_hosts() -> None:
    assert parse_hostfile("n1\nn2\nn1\nn2\nn3\n", "f") == {"n1": 2, "n2": 2, "n3": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "f names no host"),
        ("# none\n", "f names no host"),
        ("n1 slots=8\nn1 slots=4\n", "f:2: n1 has slots: 8, and then: 4"),
        ("n1\nn2 slots=0\n", "f:2: 'n2 slots=0' is not a host"),
        ("n1 slot=8", "f:1: 'n1 slot=8' is not a host"),
        ("n1:8 slots=8", "f:1: "),
        ("n1 n2", "f:1: "),
        ("n1\n$(id)", r"f:2: '\$\(id\)' is not a list of hosts"),
    ],
)
def test_no_hostfiles(text: str, said: str) -> None:
    with pytest.raises(HpctrainError, match=said):
        parse_hostfile(text, "f")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(HpctrainError, match=r"cannot read .*nowhere: No such file"):
        read_hostfile(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(HpctrainError, match="binary is not text"):
        read_hostfile(tmp_path / "binary")
