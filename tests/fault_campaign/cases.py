"""Cases of the campaign: a kind of fault, on a framework and a backend, all random choices from one seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fault_campaign.faulted_run import Ended, Place, Training
from fault_campaign.oracle import Promise, Verdict, judge
from fault_campaign.references import PACE, STEPS, Library, Setting, copied, work_on
from hpctrain.common.recipes.mesh import parse_mesh


class NotHereError(Exception):
    """What a kind needs is not there on this machine."""


# A framework's first letter and a backend's, and a mesh after a space: how many cases of a kind are on each.
Where = Mapping[str, int]
_FRAMEWORKS = {"t": "torch", "k": "keras"}
_BACKENDS = {"m": "mpi", "h": "horovod", "g": "gloo", "s": "single"}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of fault: ``act`` brings it about and says what is promised of it."""

    name: str
    where: Where
    act: Callable[[Scene], Promise]


KINDS: dict[str, Kind] = {}


def kind(name: str, **where: int) -> Callable[[Callable[[Scene], Promise]], Callable[[Scene], Promise]]:
    """Register a kind: ``@kind("kill -9 of a rank", tm=3, kh=1)`` has three cases of torch on mpi in each campaign."""

    def register(act: Callable[[Scene], Promise]) -> Callable[[Scene], Promise]:
        KINDS[name] = Kind(name=name, where=where, act=act)
        return act

    return register


@dataclass(frozen=True, kw_only=True)
class Case:
    """One faulted run; ``seed`` is all that it takes to repeat it."""

    kind: Kind
    seed: int
    framework: str
    backend: str
    mesh: str = ""


def deck() -> list[tuple[Kind, str, str, str]]:
    """One campaign, in an order in which its kinds are mixed."""
    cards = [
        (each, _FRAMEWORKS[where[0]], _BACKENDS[where[1]], where[3:])
        for each in KINDS.values()
        for where, count in each.where.items()
        for _ in range(count)
    ]
    random.Random(0).shuffle(cards)
    return cards


def ranks_of(mesh: str) -> int:
    """How many ranks a mesh has, all of whose axes are given."""
    return math.prod(parse_mesh(mesh).sizes.values())


def case_of(seed: int) -> Case:
    cards = deck()
    chosen, framework, backend, mesh = cards[seed % len(cards)]
    return Case(kind=chosen, seed=seed, framework=framework, backend=backend, mesh=mesh)


@dataclass(kw_only=True)
class Scene:
    """Where a kind acts.

    Attributes:
        case: this one.
        place: its folder and its processes.
        library: what it is compared with.
        draw: everything random about it.
        setting: what is trained; a kind may choose another.
        training: the command that meets the fault, once it began.
    """

    case: Case
    place: Place
    library: Library
    draw: random.Random = field(init=False)
    setting: Setting = field(init=False)
    training: Training | None = None

    def __post_init__(self) -> None:
        self.draw = random.Random(self.case.seed)
        mesh = self.case.mesh
        ranks = ranks_of(mesh) if mesh else 1 if self.case.backend == "single" else 2
        self.setting = Setting(
            framework=self.case.framework, backend=self.case.backend, ranks=ranks, work=work_on(mesh), mesh=mesh
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

    def once(self, name: str = "injected") -> str:
        """For what is injected, to be done once."""
        return str(self.place.folder / name)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a case."""

    case: Case
    verdict: Verdict
    seconds: float
    printed: str
    ends: tuple[Ended, ...] = ()


def carry_out(case: Case, place: Place, library: Library) -> tuple[Verdict, list[Ended]]:
    """Bring the fault about, resume the run as documented, judge."""
    scene = Scene(case=case, place=place, library=library)
    whole = None
    ends: list[Ended] = []
    promise = case.kind.act(scene)
    training = scene.training or place.begin("--resume")
    ends.append(training.end())
    if ends[0].code != 0 and ends[0].code is not None:
        if promise.mends:
            promise.mends()
        again = ("--resume",) if ends[0].began else training.arguments
        ends.append(place.begin(*again).end())
    whole = library.whole(scene.setting)
    return judge(promise, ends, place.directory.path, whole), ends
