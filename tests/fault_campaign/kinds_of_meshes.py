"""Runs whose model is divided over a mesh: hurt as all others are, and gone on with on other meshes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from fault_campaign import kinds_of_files as files
from fault_campaign import kinds_of_ranks as ranks
from fault_campaign.cases import Scene, kind, ranks_of
from fault_campaign.kinds_of_runs import of_ranks, stop
from fault_campaign.oracle import Promise
from fault_campaign.references import PACE

_FSDP, _HSDP, _TP, _PP, _TP_FSDP = "dp_shard=2", "dp_replicate=2,dp_shard=2", "tp=2", "pp=2", "dp_shard=2,tp=2"
_BOTH = f"tg:{_FSDP} tm:{_FSDP}"
# Within which ranks on Gloo have to find each other, too, after they loaded PyTorch.
_TIMEOUT = 30

_SHARE = partial(files.damage_newest, pattern="*.safetensors")
kind("mesh: kill -9 of a rank", f"{_BOTH} tm:{_HSDP} tg:{_TP} tm:{_PP}")(ranks.kill_rank)
_KILLED = partial(ranks.killed_within, number=ranks.signal.SIGKILL)
kind("mesh: kill -9 within a step", f"{_BOTH} tm:{_TP} tg:{_PP}")(_KILLED)
kind("mesh: kill -9 while a checkpoint is written", f"{_BOTH} tg:{_PP}")(ranks.kill_writing)
kind("mesh: kill -9 of everything", f"{_BOTH} tg:{_TP}")(ranks.kill_all)
kind("mesh: SIGSTOP of a rank for good", f"{_BOTH} tg:{_PP}")(partial(ranks.stop_for_good, timeout=_TIMEOUT))
kind("mesh: a signal to the launcher", f"{_BOTH} tg:{_TP} tm:{_PP}")(ranks.ask)
kind("mesh: a checkpoint's share cut short", f"{_BOTH} tg:{_TP}")(partial(_SHARE, damage=files.cut))
kind("mesh: a checkpoint's share with a flipped bit", f"{_BOTH} tg:{_PP}")(partial(_SHARE, damage=files.flip))
kind("mesh: a checkpoint's share missing", f"{_BOTH} tm:{_PP}")(partial(_SHARE, damage=files.remove))
kind("mesh: every checkpoint damaged", _BOTH)(files.all_damaged)
kind("mesh: a sample that is not a number, rule stop", f"tg:{_FSDP}")(ranks.poison_and_stop)
kind("mesh: a sample that is not a number, rule skip", f"tm:{_FSDP}")(ranks.poison_and_skip)
kind("mesh: a disk too full for a checkpoint", _BOTH)(files.full_disk)

# Where a run on a mesh goes on; an axis that is not named keeps its ranks.
_THEN: dict[str, tuple[str, ...]] = {
    _FSDP: ("dp_replicate=2,dp_shard=1",),
    _HSDP: ("dp_replicate=1,dp_shard=3", "dp_replicate=1,dp_shard=1"),
    _TP: ("tp=1,pp=2",),
    _PP: ("pp=1,tp=2",),
    _TP_FSDP: ("dp_shard=2,tp=1",),
}


@kind(
    "mesh: SIGTERM, and on with another mesh",
    f"{_BOTH} tg:{_HSDP} tm:{_HSDP} tg:{_TP} tm:{_TP} tg:{_PP} tm:{_TP_FSDP}",
)
def other_mesh(scene: Scene) -> Promise:
    """Its losses are those of the mesh that it began on."""
    *between, last = _THEN[scene.case.mesh]
    stop(scene.begin(), *scene.moment(3, 40))
    for mesh in between:
        stop(scene.place.begin(*_onto(mesh), injected=[PACE]), scene.draw.randint(2, 6))
    scene.training = scene.place.begin(*_onto(last))
    wanted = [ranks_of(mesh) for mesh in (scene.case.mesh, *between, last)]
    return Promise(codes=(0,), equal="mesh", check=of_ranks(wanted))


def _onto(mesh: str) -> tuple[str, ...]:
    return ("--resume", "--accept-changes", "--mesh", mesh, "-np", str(ranks_of(mesh)), "--oversubscribe")


@kind("mesh: two shares in each other's place", _BOTH)
def shares_exchanged(scene: Scene) -> Promise:
    """Each of them is whole."""

    def exchange(share: Path, draw: object) -> None:
        first, second = sorted(share.parent.glob("*.safetensors"))
        kept = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(kept)

    return files.damage_newest(scene, "*.safetensors", exchange)


@kind("mesh: a parameter that is not a number, rule stop", f"tg:{_TP} tm:{_PP}")
def spoilt_parameter(scene: Scene) -> Promise:
    """In what one rank has of it: by the loss it reaches all."""
    injected = scene.once("spoil")
    scene.begin(injected=[injected])
    said = (f"step {injected['step']} of epoch .* numbers that are not finite",)
    check = partial(ranks.not_finite, rule="stop", step=injected["step"])
    return Promise(codes=(1,), says=said, check=check)


@kind("mesh: a bit flipped on one of two replicas", f"tm:{_HSDP}")
def flip_replica(scene: Scene) -> Promise:
    """The two ranks that hold the same part of a parameter are named; of two it cannot tell which."""
    injected = scene.once("flip", parameter=scene.draw.randrange(6), bit=scene.draw.randint(8, 22))
    scene.begin("--set", f"guard.every={ranks.GUARDED}", injected=[injected])
    first = injected["rank"] % 2
    names = rf"different parameters: '\S+' .*between rank {first} \(\S+\) and rank {first + 2} \("
    return Promise(codes=ranks.RESTARTED, says=(names,))
