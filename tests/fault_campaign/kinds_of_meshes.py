"""Runs whose model is divided over a mesh: hurt as all others are, and gone on with on other meshes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from fault_campaign import kinds_of_disks as disks
from fault_campaign import kinds_of_files as files
from fault_campaign import kinds_of_numbers as numbers
from fault_campaign import kinds_of_signals as signals
from fault_campaign.cases import Scene, kind, ranks_of
from fault_campaign.faulted_run import OutOfTimeError, Training
from fault_campaign.oracle import Event, Promise
from fault_campaign.references import PACE

_FSDP, _HSDP, _TP, _PP, _TP_FSDP = "dp_shard=2", "dp_replicate=2,dp_shard=2", "tp=2", "pp=2", "dp_shard=2,tp=2"

# Within which ranks on Gloo have to find each other, too, after they loaded PyTorch.
_TIMEOUT = 30

_SHARE = partial(files.damage_newest, pattern="*.safetensors")
# What is done to a run, whatever it is of.
_DONE: Mapping[str, tuple[Callable[[Scene], Promise], Mapping[str, int]]] = {
    "kill -9 of a rank": (
        signals.kill_rank,
        {f"tg {_FSDP}": 2, f"tm {_FSDP}": 2, f"tm {_HSDP}": 1, f"tg {_TP}": 1, f"tm {_PP}": 1},
    ),
    "kill -9 within a step": (
        signals.kill_within,
        {f"tg {_FSDP}": 2, f"tm {_FSDP}": 2, f"tm {_TP}": 1, f"tg {_PP}": 1},
    ),
    "kill -9 while a checkpoint is written": (
        signals.kill_writing,
        {f"tg {_FSDP}": 2, f"tm {_FSDP}": 2, f"tg {_PP}": 1},
    ),
    "kill -9 of everything": (signals.kill_all, {f"tg {_FSDP}": 1, f"tm {_FSDP}": 1, f"tg {_TP}": 1}),
    "SIGSTOP of a rank for good": (
        partial(signals.stop_for_good, timeout=_TIMEOUT),
        {f"tg {_FSDP}": 1, f"tm {_FSDP}": 2, f"tg {_PP}": 1},
    ),
    "a signal to the launcher": (
        signals.ask,
        {f"tg {_FSDP}": 2, f"tm {_FSDP}": 1, f"tg {_TP}": 1, f"tm {_PP}": 1},
    ),
    "a checkpoint's share cut short": (
        partial(_SHARE, damage=files.cut),
        {f"tg {_FSDP}": 1, f"tm {_FSDP}": 1, f"tg {_TP}": 1},
    ),
    "a checkpoint's share with a flipped bit": (
        partial(_SHARE, damage=files.flip),
        {f"tg {_FSDP}": 1, f"tm {_FSDP}": 2, f"tg {_PP}": 1},
    ),
    "a checkpoint's share missing": (
        partial(_SHARE, damage=files.remove),
        {f"tg {_FSDP}": 1, f"tm {_FSDP}": 1, f"tm {_PP}": 1},
    ),
    "every checkpoint damaged": (files.all_damaged, {f"tg {_FSDP}": 1, f"tm {_FSDP}": 1}),
    "a sample that is not a number, rule stop": (numbers.poison_and_stop, {f"tg {_FSDP}": 1}),
    "a sample that is not a number, rule skip": (numbers.poison_and_skip, {f"tm {_FSDP}": 1}),
    "a disk too full for a checkpoint": (disks.full_for_checkpoints, {f"tg {_FSDP}": 1, f"tm {_FSDP}": 1}),
}
for _name, (_act, _where) in _DONE.items():
    kind(f"mesh: {_name}", **_where)(_act)

# Where a run on a mesh goes on; an axis that is not named keeps its ranks.
_THEN: Mapping[str, tuple[str, ...]] = {
    _FSDP: ("dp_replicate=2,dp_shard=1",),
    _HSDP: ("dp_replicate=1,dp_shard=3", "dp_replicate=1,dp_shard=1"),
    _TP: ("tp=1,pp=2",),
    _PP: ("pp=1,tp=2",),
    _TP_FSDP: ("dp_shard=2,tp=1",),
}


@kind(
    "mesh: SIGTERM, and on with another mesh",
    **{f"tg {_FSDP}": 1, f"tm {_FSDP}": 1, f"tg {_HSDP}": 1, f"tm {_HSDP}": 1},
    **{f"tg {_TP}": 1, f"tm {_TP}": 1, f"tg {_PP}": 1, f"tm {_TP_FSDP}": 1},
)
def other_mesh(scene: Scene) -> Promise:
    """Its losses are those of the mesh that it began on."""
    *between, last = _THEN[scene.case.mesh]
    training = scene.begin()
    _stop(training, *scene.moment(3, 40))
    for mesh in between:
        training = scene.place.begin(*_onto(mesh), injected=[PACE])
        _stop(training, scene.draw.randint(2, 6))
    scene.training = scene.place.begin(*_onto(last))
    wanted = [ranks_of(mesh) for mesh in (scene.case.mesh, *between, last)]

    def check(events: Sequence[Event]) -> list[str]:
        ranks = [event["ranks"] for event in events if event["event"] == "run"]
        return [] if ranks == wanted else [f"numbers of ranks: {ranks}, not {wanted}"]

    return Promise(codes=(0,), equal="mesh", check=check)


def _onto(mesh: str) -> tuple[str, ...]:
    return ("--resume", "--accept-changes", "--mesh", mesh, "-np", str(ranks_of(mesh)), "--oversubscribe")


def _stop(training: Training, step: int, delay: float = 0.0) -> None:
    training.wait_for_step(step, delay)
    training.send(signal.SIGTERM)
    ended = training.end()
    if ended.code != 4:
        raise OutOfTimeError(f"ranks that were asked to stop ended with {ended.code}:\n{ended.printed}")


@kind("mesh: two shares in each other's place", **{f"tg {_FSDP}": 1, f"tm {_FSDP}": 1})
def shares_exchanged(scene: Scene) -> Promise:
    """Each of them is whole."""

    def exchange(run_share: files.Path, draw: object) -> None:
        first, second = sorted(run_share.parent.glob("*.safetensors"))
        kept = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(kept)

    return files.damage_newest(scene, "*.safetensors", exchange)


@kind("mesh: a parameter that is not a number, rule stop", **{f"tg {_TP}": 1, f"tm {_PP}": 1})
def spoilt_parameter(scene: Scene) -> Promise:
    """In what one rank has of it: by the loss it reaches all."""
    injected = numbers.once(scene, "spoil")
    scene.begin(injected=[injected])

    def check(events: Sequence[Event]) -> list[str]:
        told = [(event["rule"], event["iteration"]) for event in events if event["event"] == "non_finite"]
        return [] if told == [("stop", injected["step"])] else [f"told of as not finite: {told}"]

    return Promise(codes=(1,), says=(f"step {injected['step']} of epoch .* numbers that are not finite",), check=check)


@kind("mesh: a bit flipped on one of two replicas", **{f"tm {_HSDP}": 1})
def flip_replica(scene: Scene) -> Promise:
    """The two ranks that hold the same part of a parameter are named; of two it cannot tell which."""
    injected = numbers.once(scene, "flip", parameter=scene.draw.randrange(6), bit=scene.draw.randint(8, 22))
    scene.begin("--set", f"guard.every={numbers.GUARDED}", injected=[injected])
    first = injected["rank"] % 2
    names = rf"different parameters: '\S+' .*between rank {first} \(\S+\) and rank {first + 2} \("
    return Promise(codes=signals.RESTARTED, says=(names,))
