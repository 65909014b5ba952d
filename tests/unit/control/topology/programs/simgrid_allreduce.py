"""Simulates all-reduces on a fat tree with SimGrid, which knows nothing of hpctrain: its own fat-tree zone with its
own D-mod-k routing, its own solver of bandwidth sharing, and the messages of each rank.

Run by the system's Python, for which Debian packages SimGrid. Arguments: a platform file, then one line of JSON with
``pattern``, ``bytes`` and ``orders`` (lists of host numbers); prints the simulated seconds of each order as JSON.
"""

import json
import sys

from simgrid import Actor, Engine, Host, Mailbox

# Pure max-min fair sharing of links, so that what is judged is contention alone: CM02 has no correction for TCP's slow
# start and headers; no acknowledgements on the way back; a window that never limits a flow.
SETTINGS = ("network/model:CM02", "network/crosstraffic:0", "network/TCP-gamma:1e18")


def exchange(run, source, sender, receiver, size):
    """Sends to one rank, receives from another, and waits for both."""
    sent = Mailbox.by_name(f"{run}: {source} to {receiver}").put_async("part", int(size))
    Mailbox.by_name(f"{run}: {sender} to {source}").get()
    sent.wait()


def ring(run, number, ranks, size):
    for _ in range(2 * (ranks - 1)):
        exchange(run, number, (number - 1) % ranks, (number + 1) % ranks, size / ranks)


def halving_doubling(run, number, ranks, size):
    distances = [2**bit for bit in reversed(range(ranks.bit_length() - 1))]
    for distance in [*distances, *reversed(distances)]:
        exchange(run, number, number ^ distance, number ^ distance, size * distance / ranks)


def rank(run, number, ranks, size, pattern):
    {"ring": ring, "halving_doubling": halving_doubling}[pattern](run, number, ranks, size)
    finished[run] = max(finished.get(run, 0.0), Engine.clock)


def conduct(orders, size, pattern):
    """One all-reduce after the other: they must not share links."""
    for run, order in enumerate(orders):
        began = Engine.clock
        actors = [
            Actor.create(f"rank{number}", Host.by_name(f"h{host}"), rank, run, number, len(order), size, pattern)
            for number, host in enumerate(order)
        ]
        for actor in actors:
            actor.join()
        finished[run] -= began


finished = {}
engine = Engine([sys.argv[0], *(f"--cfg={setting}" for setting in SETTINGS), "--log=root.thresh:warning"])
engine.load_platform(sys.argv[1])
task = json.loads(sys.argv[2])
Actor.create("conductor", Host.by_name("h0"), conduct, task["orders"], task["bytes"], task["pattern"])
engine.run()
print(json.dumps([finished[run] for run in range(len(task["orders"]))]))
