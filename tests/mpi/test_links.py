"""``hpctrain topology verify`` between real ranks."""

from __future__ import annotations

import json

from support.launching import Launch


def test_two_ranks_of_this_machine(hpctrain: Launch):
    result = hpctrain("topology", "verify", "-np", "2", "--size-mb", "0.5", "--json")
    assert result.returncode == 0, result.stdout
    # Both streams are in it, and the shared memory of a run that was killed, also by another test, is told of first.
    measured = json.loads(result.stdout[result.stdout.index("{") :])
    assert measured["faults"] == []
    forth, back = measured["flows"]
    assert (forth["source"], forth["target"]) == (back["target"], back["source"])
    assert forth["source"].endswith("rank 0")
    assert forth["target"].endswith("rank 1")
    for flow in (forth, back):
        # a machine's memory, between a slow disk's speed and anything that is sold
        assert 1e7 < flow["bandwidth"] < 1e12
        assert 1e-8 < flow["latency"] < 1e-1
