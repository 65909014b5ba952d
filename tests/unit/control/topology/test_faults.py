"""Which hosts are named for flows that are slow, with made-up flows: those that are slow, in the right direction."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.control.topology.verify import End, Fault, Flow, compare, incomparable, rounds
from support.golden import check_text

SPEED = 125e6
Shares = Mapping[str, float]


def measured(names: list[str], sends: Shares, receives: Shares, *, rails: int = 1) -> list[Flow]:
    """Every flow of the rounds at the speed of its slower end."""
    ends = [End(host=name, device=f"m{rail}") for name in names for rail in range(rails)]
    return [
        Flow(
            round=number,
            source=ends[source],
            target=ends[target],
            bandwidth=SPEED * min(share(sends, ends[source]), share(receives, ends[target])),
        )
        for number, pairs in enumerate(rounds(len(names), rails))
        for source, target in pairs
    ]


def share(shares: Shares, end: End) -> float:
    """That of an adapter, or of its host."""
    return min(shares.get(str(end), 1.0), shares.get(end.host, 1.0))


def named(faults: tuple[Fault, ...]) -> set[tuple[str, str, str]]:
    return {(fault.kind, fault.name, fault.direction) for fault in faults}


def directions_of(host: str, slow: str) -> set[tuple[str, str, str]]:
    """A host that is slow both ways has a fault for each."""
    return {("host", host, direction) for direction in (("sends", "receives") if slow == "both" else (slow,))}


def hosts(number: int) -> list[str]:
    return [f"h{host}" for host in range(1, number + 1)]


@pytest.mark.slow
@given(st.integers(2, 12), st.data())
def test_an_even_network_has_no_fault(number: int, data: st.DataObject):
    flows = [replace(flow, bandwidth=SPEED * data.draw(st.floats(0.8, 1))) for flow in measured(hosts(number), {}, {})]
    assert compare(flows) == ()


@given(st.integers(3, 12), st.floats(0.02, 0.6), st.sampled_from(["both", "sends", "receives"]), st.data())
def test_one_slow_host_is_the_only_one_named(number: int, slowed: float, direction: str, data: st.DataObject):
    names = hosts(number)
    slow = data.draw(st.sampled_from(names))
    sends = {slow: slowed} if direction != "receives" else {}
    receives = {slow: slowed} if direction != "sends" else {}
    flows = measured(names, sends, receives)
    faults = compare(flows)
    assert named(faults) == directions_of(slow, direction)
    assert faults[0].reached == pytest.approx(slowed)
    assert faults[0].alternatives == ()


@given(st.integers(3, 12), st.data())
def test_less_than_half_of_the_hosts_are_all_named_and_no_other(number: int, data: st.DataObject):
    names = hosts(number)
    slow = st.sets(st.sampled_from(names), max_size=(number - 1) // 2)
    directions = {name: data.draw(st.sampled_from(["both", "sends", "receives"])) for name in data.draw(slow)}
    sends = {name: 0.1 for name, direction in directions.items() if direction != "receives"}
    receives = {name: 0.1 for name, direction in directions.items() if direction != "sends"}
    faults = compare(measured(names, sends, receives))
    assert named(faults) == set().union(*(directions_of(*each) for each in directions.items()))


@pytest.mark.parametrize("rails", [1, 2])
def test_two_that_receive_badly_do_not_make_the_third_a_bad_sender(rails: int):
    for slow in itertools.combinations(hosts(3), 2):
        faults = compare(measured(hosts(3), {}, dict.fromkeys(slow, 0.1), rails=rails))
        assert named(faults) == {("host", name, "receives") for name in slow}


def test_both_directions_at_different_rates_are_two_faults():
    faults = compare(measured(hosts(4), {"h2": 0.1}, {"h2": 0.5}))
    check_text("faults-directions", "\n".join(map(str, faults)))


def test_of_two_hosts_either_may_be_slow():
    (fault,) = compare(measured(hosts(2), {"h1": 0.1}, {}))
    assert (fault.name, fault.direction, fault.alternatives) == ("h1", "sends", ("host h2 receives",))


def test_two_hosts_that_are_alike_cannot_be_compared():
    flows = measured(hosts(2), {"h1": 0.1}, {"h1": 0.1})
    assert compare(flows) == ()
    assert incomparable(flows, None)
    assert not incomparable(measured(hosts(3), {}, {}), None)


def test_what_no_good_flow_clears_is_left_open():
    # From h1 to h2 nobody can say: all else that h1 sends and that h2 receives goes through h3, which is slow itself.
    flows = measured(hosts(3), {"h3": 0.1}, {"h3": 0.1})
    flows = [
        replace(flow, bandwidth=0.1 * SPEED) if (flow.source.host, flow.target.host) == ("h1", "h2") else flow
        for flow in flows
    ]
    assert named(compare(flows)) == directions_of("h3", "both") | {("host", "h1", "sends")}
