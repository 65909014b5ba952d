"""Lists of hosts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.cluster.host_list import MOST_HOSTS, expand_hosts, fold_hosts
from support.refusals import refused


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3,5]", ["n1", "n2", "n3", "n5"]),
        ("n3,n1,n3", ["n3", "n1"]),
        # As `scontrol show hostnames` of Slurm 22.05 has them.
        ("gpu1[8-11]", ["gpu18", "gpu19", "gpu110", "gpu111"]),
        ("g1[08-11]", ["g108", "g109", "g110", "g111"]),
        ("a1[9-10]b2[9-10]", ["a19b29", "a19b210", "a110b29", "a110b210"]),
        ("r[2,1]n[2,1]", ["r2n2", "r2n1", "r1n2", "r1n1"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
        ("n[098-101,7]", ["n098", "n099", "n100", "n101", "n7"]),
        ("n[01-3]", ["n01", "n02", "n03"]),
        ("n[1-2],login.example.org", ["n1", "n2", "login.example.org"]),
    ],
)
def test_expanded_in_the_order_given(text: str, names: list[str]) -> None:
    assert list(expand_hosts(text, "--hosts")) == names


def test_a_range_that_outgrows_its_zeros_is_expanded_as_slurm_does() -> None:
    # `scontrol show hostlist` writes these 1,001 names as this list.
    assert expand_hosts("n[001-1001]", "f:7") == tuple(f"n{number:03}" for number in range(1, 1002))


@pytest.mark.parametrize(
    "text",
    [
        *("", "n1,,n2", "n[1-3", "n[[1]]", "n[]", "n[3-1]", "n 1", "@all", "n[1-2]!n1", "n1\x00", "ñ1"),
        "n" + "1" * 5000,
    ],
)
def test_refused(text: str) -> None:
    with refused("HT-hosts-not-a-list", where="f:7", text=text if len(text) <= 60 else f"{text[:60]}…"):
        expand_hosts(text, "f:7")


@pytest.mark.parametrize("text", ["n1:2", "n1:2,n2:2", "n[1-2]:4", ":"])
def test_slots_of_mpirun_are_no_part_of_a_name(text: str) -> None:
    with refused("HT-hosts-not-a-list", where="--hosts", text=text, reason="no slots belong here"):
        expand_hosts(text, "--hosts")


@pytest.mark.parametrize(
    "text",
    ["n[1-999999999]", "n[0-99999]x[0-99999]", "n[1-500000000,900000000-1]", f"n[1-{MOST_HOSTS + 1}]", "n[1-3]" * 11],
)
def test_more_than_any_cluster_has_is_refused_at_once(text: str) -> None:
    with refused("HT-hosts-not-a-list", reason=f"these are more than {MOST_HOSTS} names"):
        expand_hosts(text, "f:7")


@pytest.mark.long
@given(
    st.lists(
        st.from_regex(r"[a-c]{1,2}[0-9]{1,3}(-ib[0-9])?", fullmatch=True)
        | st.from_regex(r"[0-9a-f]{16}", fullmatch=True),
        min_size=1,
        unique=True,
    )
)
def test_folded_and_expanded_again(names: list[str]) -> None:
    assert sorted(expand_hosts(fold_hosts(names), "f")) == sorted(names)


@pytest.mark.parametrize("hostile", ["n[1", "n[1-999999999]", "a@b", "a!b", "x" * 100000, "a,b[2-", "n1\x1b"])
def test_what_is_no_name_is_folded_as_it_is(hostile: str) -> None:
    assert fold_hosts(["n2", hostile, "n1"]) == ",".join(["n[1-2]", hostile])
