"""Cases of the campaign: a kind of fault, on a framework, a backend and a mesh, all random choices from one seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fault_campaign.faulted_run import Ended, Place, Training
from fault_campaign.oracle import Promise, judge
from fault_campaign.references import PACE, STEPS, Library, Setting, copied, work_on
from hpctrain.common.recipes.mesh import parse_mesh

_FRAMEWORKS = {"t": "torch", "k": "keras"}
_BACKENDS = {"m": "mpi", "h": "horovod", "g": "gloo", "s": "single"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One faulted run: ``act`` brings the fault about and says what is promised of it."""

    framework: str
    backend: str
    mesh: str
    act: Callable[[Scene], Promise]


CASES: dict[str, Case] = {}


def kind(name: str, where: str) -> Callable[[Callable[[Scene], Promise]], Callable[[Scene], Promise]]:
    """Add a kind of fault to the cases.

    Args:
        where: its cases, each the first letters of a framework and a backend, and a mesh after a colon:
            ``tm kh tg:dp_shard=2``.
    """

    def register(act: Callable[[Scene], Promise]) -> Callable[[Scene], Promise]:
        for place in where.split():
            letters, _, mesh = place.partition(":")
            framework, backend = _FRAMEWORKS[letters[0]], _BACKENDS[letters[1]]
            words = " ".join(filter(None, (framework, backend, mesh)))
            CASES[f"{name}, {words}"] = Case(framework=framework, backend=backend, mesh=mesh, act=act)
        return act

    return register


def ranks_of(mesh: str) -> int:
    """How many ranks a mesh has, all of whose axes are given."""
    return math.prod(parse_mesh(mesh).sizes.values())


@dataclass(kw_only=True)
class Scene:
    """Where a kind acts.

    Attributes:
        place: its folder and its processes.
        library: what it is compared with.
        draw: everything random about it.
        setting: what is trained; a kind may choose another.
        training: the command that meets the fault, once it began.
    """

    case: Case
    place: Place
    library: Library
    draw: random.Random
    setting: Setting = field(init=False)
    training: Training | None = None

    def __post_init__(self) -> None:
        case = self.case
        ranks = ranks_of(case.mesh) if case.mesh else 1 if case.backend == "single" else 2
        self.setting = Setting(
            framework=case.framework, backend=case.backend, ranks=ranks, work=work_on(case.mesh), mesh=case.mesh
        )

    def change(self, **changes: Any) -> None:
        """Train something else than digits on two ranks; before anything else."""
        self.setting = replace(self.setting, **changes)

    def begin(self, *arguments: str, injected: Sequence[dict[str, Any]] = (), **options: Any) -> Training:
        """Start the run, slowly; ``options`` as of :meth:`Place.begin`."""
        self.training = self.place.begin(*self.setting.arguments, *arguments, injected=[PACE, *injected], **options)
        return self.training

    def stopped(self) -> Any:
        """A stopped run, to be damaged; returns its directory. What meets the fault is its resume."""
        return copied(self.library.stopped(self.setting), self.place)

    def rank(self) -> int:
        return self.draw.randrange(self.setting.ranks)

    def moment(self, first: int = 3, last: int = STEPS - 10) -> tuple[int, float]:
        """A step that this start of the run has done, and seconds into the next one."""
        return self.draw.randint(first, last), self.draw.uniform(0, 0.04)

    def once(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Something that is injected into one rank before one step, in one attempt."""
        step, _ = self.moment(2)
        once = str(self.place.folder / "injected")
        return {"what": what, "rank": self.rank(), "step": step, "once": once, **arguments}


def carry_out(case: Case, place: Place, library: Library, draw: random.Random) -> tuple[list[str], list[Ended]]:
    """Bring the fault about, and resume the run as documented; returns what is not as promised, and the ends."""
    scene = Scene(case=case, place=place, library=library, draw=draw)
    promise = case.act(scene)
    training = scene.training or place.begin("--resume")
    ends = [training.end()]
    if ends[0].code != 0 and ends[0].code is not None:
        if promise.mends:
            promise.mends()
        again = ("--resume",) if ends[0].began else training.arguments
        ends.append(place.begin(*again).end())
    return judge(promise, ends, place.directory.path, library.whole(scene.setting)), ends
