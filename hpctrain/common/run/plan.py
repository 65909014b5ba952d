"""The plan: everything that determines the numbers of one run, and how its ranks are started.

The login half writes it to ``plan.json``; every rank reads it from there. The two halves share nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from hpctrain.common.cluster.backends import CAPABILITIES, Capabilities
from hpctrain.common.cluster.node_map import Slot
from hpctrain.common.errors import InvalidValueError
from hpctrain.common.frozen import FrozenModel
from hpctrain.common.recipes.families import Framework
from hpctrain.common.recipes.mesh import Mesh
from hpctrain.common.recipes.mesh_traffic import MeshTraffic
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.recipes.tracking import DEFAULT, Tracker, Trackers

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""The variables by which libraries choose their number of threads."""

_RESTARTS = 3


class Copied(FrozenModel):
    """A copy of the code of a script that was submitted, in the run's directory."""

    source: Path = Field(description="the folder that was copied")
    target: Path = Field(description="its copy")

    def of(self, path: Path) -> Path:
        """The copy of a path; the path itself where it is not of the folder."""
        return self.target / path.relative_to(self.source) if path.is_relative_to(self.source) else path

    def entry(self, text: str) -> str:
        """The copy of an entry of ``sys.path``; the entry itself where the copy has no folder of its own for it."""
        copy = self.of(Path(text).resolve())
        # What is linked there, as a virtual environment may be, keeps the name under which it may be imported already.
        return str(copy) if copy.is_dir() and copy.resolve().is_relative_to(self.target.resolve()) else text


class Script(FrozenModel):
    """A user's own training script."""

    path: Path = Field(description="where it was when it was started or submitted")
    name: str = Field("", description="as it was given, which is its own sys.argv[0]")
    arguments: tuple[str, ...] = ()
    mesh: Mesh = Field(Mesh.defaults(), description="that it makes with ht.mesh()")
    tracking: Trackers | None = Field(None, description="as a recipe's")
    commit: str | None = Field(None, description="of Git, that the code of a submitted script is of")
    copied: Copied | None = Field(None, description="None where it runs where it is")

    @property
    def file(self) -> Path:
        """The file that runs: the script or its copy."""
        return self.copied.of(self.path) if self.copied else self.path


Runtime = Literal["apptainer", "pyxis"]


class Container(FrozenModel):
    """A container image.

    Attributes:
        runtime: ``apptainer`` wraps each rank's command; ``pyxis`` is a plugin of srun, which then starts the ranks.
        image: a file, or an address that the runtime knows (``docker://…``, ``nvcr.io#nvidia/…``).
        mounts: ``SOURCE[:TARGET[:OPTIONS]]`` each. The run directory is always there.
    """

    runtime: Runtime
    image: str
    mounts: tuple[str, ...] = ()


class Slots(FrozenModel):
    """The slots for ranks on one host."""

    host: str
    slots: int = Field(ge=1)
    places: tuple[Slot, ...] = Field(
        (), description="GPU, adapter and cores of each local rank; empty leaves them to the launcher"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Slots:
        if len(self.places) not in (0, self.slots):
            raise InvalidValueError(
                "HT-plan-not-valid",
                "{host}: {places} places for {slots} slots",
                host=self.host,
                places=len(self.places),
                slots=self.slots,
            )
        return self


class HostOrder(FrozenModel):
    """The benefit of an order of hosts: how often a ring over them crosses between groups of leaves."""

    fabric: str = Field(description="where the fabric is known from")
    crossings_given: int = Field(description="in the order in which the hosts were named")
    crossings: int = Field(description="in the order of the plan")
    bound: int = Field(description="that no order can be under")


class HostOptions(FrozenModel):
    """The options about hosts; None for those that were not given."""

    hosts: str | None = None
    hostfile: Path | None = None
    nodes: int | None = None
    fabric: Path | None = None
    routes: Path | None = None
    node: str | None = None
    interface: str | None = None


class Start(FrozenModel):
    """How ranks are started.

    Attributes:
        python: the interpreter of the ranks; None for that of this environment, or ``python3`` of the container.
        passed: variables that every rank gets from whoever starts it; secrets, whose values no plan holds.
        oversubscribe: whether the ranks, and processes that a script starts by MPI, may be more than the cores.
        share_gpus: whether the ranks share the GPUs of their host, which has fewer; speeds then mean nothing.
        arguments: further ones for mpirun or srun, after those of hpctrain.
    """

    launcher: str = "auto"
    python: str | None = None
    container: Container | None = None
    environment: dict[str, str] = Field(default_factory=dict)
    passed: tuple[str, ...] = ()
    oversubscribe: bool = False
    share_gpus: bool = False
    arguments: tuple[str, ...] = ()

    def mounting(self, folder: Path) -> Start:
        """The same, with a folder that a container sees too."""
        if self.container is None:
            return self
        mounts = (*self.container.mounts, str(folder))
        return self.model_copy(update={"container": self.container.model_copy(update={"mounts": mounts})})


class Stop(FrozenModel):
    """How a run is stopped so that it can be resumed.

    Attributes:
        seconds: how long the ranks may take to end the step, write a checkpoint and leave, before every process is
            ended.
        restarts: how often in a row the launcher starts a run again that failed and got no further than the time
            before; None for 3, and for none where it is a script. It may be resumed as often, and at least three times.
    """

    seconds: float = Field(60.0, gt=0)
    restarts: int | None = Field(None, ge=0)


class Plan(FrozenModel):
    """One run. Exactly one of ``recipe`` and ``script`` is set.

    A submitted run has no ``hosts`` until its job has them; what follows from the hosts (their order, the network's
    part of the environment, threads, versions) is then filled in.
    """

    recipe: Recipe | None = None
    script: Script | None = None
    framework: Framework | None = Field(None, description="None for a script: it chooses by itself")
    backend: str = Field("auto", description="what reduces gradients; for a placed plan never auto")
    asked_backend: str = Field(
        "auto", description="what the user asked for; other hosts may make another backend of it"
    )
    backend_reason: str = Field("", description="why this backend, in words")
    micro_batch_reason: str = Field("", description="why this batch.micro_batch, in words, where it was auto")
    ranks: int = Field(ge=1)
    begun_ranks: int | None = Field(
        None,
        description="that it was started with, where this attempt has another number; what the recipe's batch is for",
    )
    host_options: HostOptions = Field(default_factory=HostOptions)
    start: Start = Field(default_factory=Start)
    stop: Stop = Field(default_factory=Stop)
    hosts: tuple[Slots, ...] = ()
    host_order: HostOrder | None = Field(None, description="None for one host")
    mesh_traffic: MeshTraffic | None = Field(None, description="None where ranks only replicate")
    environment: dict[str, str] = Field(default_factory=dict, description="the network settings of every rank")
    threads_per_rank: int = Field(ge=1)
    versions: dict[str, str] = Field(default_factory=dict, description="of the packages that decide the numbers")

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        if (self.recipe is None) == (self.script is None):
            raise InvalidValueError("HT-plan-not-valid", "a plan is of a recipe or of a script")
        placed = {bool(host.places) for host in self.hosts}
        if len(placed) > 1:
            raise InvalidValueError("HT-plan-not-valid", "all hosts have places for their ranks, or none has")
        return self

    @property
    def title(self) -> str:
        """The recipe's name, or the script's file name."""
        if self.recipe:
            return self.recipe.name
        assert self.script is not None
        return self.script.path.name

    @property
    def asked_mesh(self) -> Mesh:
        """The mesh that the recipe or the command line names."""
        return self.work.mesh

    @property
    def trackers(self) -> tuple[Tracker, ...]:
        """Where the run's curves go."""
        return DEFAULT if self.work.tracking is None else self.work.tracking

    @property
    def work(self) -> Recipe | Script:
        """What is trained."""
        work = self.recipe or self.script
        assert work is not None
        return work

    @property
    def mesh(self) -> Mesh:
        """The mesh of this number of ranks."""
        return self.asked_mesh.at(self.ranks)

    @property
    def capabilities(self) -> Capabilities | None:
        """The backend's capabilities; None while it is not chosen."""
        return CAPABILITIES.get(self.backend)

    @property
    def needs_launcher(self) -> bool:
        """Whether a launcher starts the ranks; a backend for a single process needs none."""
        return self.capabilities is None or self.capabilities.joins_ranks

    @property
    def processes(self) -> int:
        """How many processes there are: one for each rank, or one whose replicas they are."""
        return 1 if self.capabilities and self.capabilities.replicates else self.ranks

    @property
    def fault_tolerant(self) -> bool:
        """Whether the ranks continue without one that died, from the first step on."""
        return self.recipe is not None and self.recipe.fault_tolerance.fault_tolerant

    @property
    def restarts(self) -> int:
        """How often in a row, without progress, the launcher restarts the run after a failure."""
        if self.stop.restarts is not None:
            return self.stop.restarts
        return _RESTARTS if self.recipe else 0
