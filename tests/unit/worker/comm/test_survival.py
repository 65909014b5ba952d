"""Which part of a run goes on when hosts fall silent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.worker.comm.survival import is_majority

_hosts = st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=20)


@given(_hosts, st.sets(st.sampled_from("abcdefg")))
def test_of_two_parts_of_a_run_at_most_one_goes_on(hosts, cut_off):
    left = [host for host in hosts if host not in cut_off]
    others = [host for host in hosts if host in cut_off]
    assert not (is_majority(hosts, left) and is_majority(hosts, others))


def test_three_of_four_hosts_go_on_and_of_two_halves_neither():
    hosts = ["a", "a", "b", "c", "d"]
    assert is_majority(hosts, ["b", "c", "d"])
    assert not is_majority(hosts, ["a", "a", "b"])
    assert not is_majority(hosts, ["a"])
    assert not is_majority(["a", "b"], ["a"])
