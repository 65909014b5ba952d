"""Runs flows with their dependencies in SimGrid, on links and routes that are given.

Run by the system's Python, for which Debian packages SimGrid (python3-simgrid); imports nothing else. Reads one JSON
object from the standard input:

    bandwidth: of each link, bytes a second
    routes: [sender, receiver, [link, …]] of adapters that send to each other, by number
    runs: lists of actors, one list after the other; an actor is
        {"adapter": number, "steps": [{"kind", "repeats", "send", "receive"}, …]}
        with lists of [receiver, bytes, lane] to send and of [sender, lane] to receive

Messages of one sender, receiver and lane arrive in their order.

In a step of kind ``exchange`` an actor sends and receives at the same time, and goes on when its own messages are done;
in one of kind ``relay`` it sends on what it has received, while it receives the next. Nobody waits for anyone else.
Prints the simulated seconds of each run as a JSON list.
"""

import json
import os
import sys

from simgrid import Actor, Comm, Engine, Host, LinkInRoute, Mailbox, NetZone

# Pure max-min fair sharing of links, so that what is judged is contention alone: CM02 has no correction for TCP's slow
# start and headers (its bandwidth factor and its weight S are 1 and 0); no acknowledgements on the way back; a window
# that never limits a flow. Links have no latency.
SETTINGS = (
    "network/model:CM02",
    "network/bandwidth-factor:1",
    "network/weight-S:0",
    "network/crosstraffic:0",
    "network/TCP-gamma:1e18",
)


def exchange(step, inbox, outbox):
    for _ in range(step["repeats"]):
        sent = [mailbox.put_async("part", size) for mailbox, size in outbox]
        for mailbox in inbox:
            mailbox.get()
        Comm.wait_all(sent)


def relay(step, inbox, outbox):
    sent = []
    for _ in range(step["repeats"]):
        # What comes next is received while the last is still being sent.
        arriving = [mailbox.get_async() for mailbox in inbox]
        # The second of each pair holds the memory that the message is written to.
        Comm.wait_all([comm for comm, _ in arriving])
        Comm.wait_all(sent)
        sent = [mailbox.put_async("part", size) for mailbox, size in outbox]
    Comm.wait_all(sent)


def act(run, actor):
    own = actor["adapter"]
    for step in actor["steps"]:
        inbox = [Mailbox.by_name(f"{run} {lane}: {sender} to {own}") for sender, lane in step["receive"]]
        outbox = [(Mailbox.by_name(f"{run} {lane}: {own} to {other}"), size) for other, size, lane in step["send"]]
        {"exchange": exchange, "relay": relay}[step["kind"]](step, inbox, outbox)


def conduct(runs, seconds):
    """One run after the other: they must not share links."""
    for run, actors in enumerate(runs):
        began = Engine.clock
        started = [Actor.create("rank", Host.by_name(str(actor["adapter"])), act, run, actor) for actor in actors]
        for actor in started:
            actor.join()
        seconds.append(Engine.clock - began)


def main():
    # Actors are threads that take turns: a second core would only add the way between cores.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    task = json.load(sys.stdin)
    engine = Engine([sys.argv[0], *(f"--cfg={setting}" for setting in SETTINGS), "--log=root.thresh:error"])
    zone = NetZone.create_full_zone("fabric")
    links = [
        LinkInRoute(zone.create_link(f"link{number}", [rate]).set_latency(0).seal())
        for number, rate in enumerate(task["bandwidth"])
    ]
    adapters = sorted({end for sender, receiver, _ in task["routes"] for end in (sender, receiver)})
    point = {adapter: zone.create_host(str(adapter), 1e9).seal().netpoint for adapter in adapters}
    for sender, receiver, path in task["routes"]:
        zone.add_route(point[sender], point[receiver], None, None, [links[link] for link in path], False)
    zone.seal()
    seconds = []
    Actor.create("conductor", Host.by_name(str(adapters[0])), conduct, task["runs"], seconds)
    engine.run()
    print(json.dumps(seconds))


main()
