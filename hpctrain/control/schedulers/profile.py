"""Cluster profiles: the settings of jobs on one cluster, in ``slurm/clusters/NAME.yaml`` or a user's own file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from hpctrain.common.cluster.launcher import LAUNCHER
from hpctrain.common.errors import HpctrainError, InvalidValueError, nearest
from hpctrain.common.files.checked_yaml import LONGEST_FILE, Section, load_checked
from hpctrain.common.files.regular import read_text
from hpctrain.common.run.plan import Container
from hpctrain.common.secrets import is_secret
from hpctrain.control.schedulers.jobs import slurm_seconds

_PACKAGE = Path(__file__).parents[2]
# A character of one line of text.
_LINE = "[^\\x00-\\x08\\x0a-\\x1f\\x7f\u0085\u2028\u2029]"
_OPTION = re.compile(r"[a-z][a-z-]*")
# Options that hpctrain itself passes to sbatch, where a second value would conflict.
_SET_BY_HPCTRAIN = frozenset(
    (
        *("account", "array", "chdir", "clusters", "constraint", "cpus-per-task", "dependency", "error", "export"),
        *("export-file", "gpus", "gpus-per-node", "gpus-per-task", "job-name", "no-requeue"),
        *("nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "parsable", "partition", "qos", "requeue"),
        *("signal", "test-only", "time", "wait", "wrap"),
    )
)
# Keys that have no meaning without Slurm.
_OF_SLURM = frozenset(
    (
        *("partition", "account", "qos", "constraint", "sbatch", "launcher", "fabric", "modules", "setup"),
        *("container", "requeue"),
    )
)

# Fields of a pod's spec that hpctrain sets itself.
_SET_ELSEWHERE = frozenset(("containers", "volumes", "restartPolicy", "subdomain", "terminationGracePeriodSeconds"))


def _sbatch_options(options: dict[str, str | None]) -> dict[str, str | None]:
    """Refuse further options that sbatch must not get, by their long names without dashes."""
    for option, value in options.items():
        if not _OPTION.fullmatch(option):
            raise InvalidValueError(
                "HT-sbatch-option-not-valid",
                "{option!r} is not the long name of an option of sbatch without its dashes, such as mail-type",
                option=option,
            )
        gpus = option == "gres" and value is not None and re.match(r"(gres[/:])?gpu\b", value)
        # Slurm accepts abbreviated option names.
        if gpus or any(name.startswith(option) for name in _SET_BY_HPCTRAIN):
            raise InvalidValueError(
                "HT-sbatch-option-set-elsewhere",
                "{option} is set by hpctrain, from options of submit, keys of the profile or what a run needs",
                option=option,
            )
    return options


def _time_limit(text: str) -> str:
    if slurm_seconds(text) is None:
        raise InvalidValueError(
            "HT-value-not-valid",
            "must be a time limit such as 90 (minutes), 2:00:00 or 1-12:00:00, not {value!r}",
            value=text,
        )
    return text


Line = Annotated[str, Field(pattern=f"^{_LINE}+$")]
_OptionValue = Annotated[str, Field(pattern=f"^{_LINE}*$")]
# The value of a Slurm option that names something.
Word = Annotated[str, Field(pattern=r"^[^\s\x00-\x1f\x7f-][^\s\x00-\x1f\x7f]*$")]
# Bytes with Slurm's units, as --mem takes them; 0 is all memory of a node.
Memory = Annotated[str, Field(pattern=r"^[0-9]{1,15}[KMGT]?$")]
TimeLimit = Annotated[str, AfterValidator(_time_limit)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
# No variable can hold the character NUL.
VariableValue = Annotated[str, Field(pattern=r"^[^\x00]*$")]


MountPath = Annotated[str, Field(pattern=r"^/[^:]+$")]


class ClaimMount(Section):
    """A volume that every pod of a run mounts."""

    claim: str = Field(description="name of the PersistentVolumeClaim")
    path: MountPath = Field(description="where the pods see it")
    read_only: bool = False


class RdmaDevices(Section):
    """The network adapters of a pod, as a device plugin offers them."""

    resource: str = Field(description="as the plugin names it, such as rdma/hca or nvidia.com/rdma_shared")
    count: Annotated[int, Field(ge=1)] = 1


class KubernetesProfile(Section):
    """The settings of a Kubernetes cluster.

    Attributes:
        volumes: the run directories are in the first that is not read-only. All pods write to it.
    """

    namespace: str = "default"
    image: Annotated[str, Field(pattern=r"^\S+$")] | None = Field(None, description="None: --container names it")
    volumes: Annotated[tuple[ClaimMount, ...], Field(min_length=1)]
    gpu_resource: str = "nvidia.com/gpu"
    rdma: RdmaDevices | None = None
    shared_memory: Annotated[str, Field(pattern=r"^[1-9][0-9]*[KMGT]i$")] | None = Field(
        None, description="most that /dev/shm may hold; None for as much as the pod's memory"
    )
    secrets: tuple[str, ...] = Field((), description="Secrets whose keys are variables of every pod")
    labels: dict[str, str] = Field(default_factory=dict, description="of the job, such as kueue.x-k8s.io/queue-name")
    pod: dict[str, Any] = Field(
        default_factory=dict, description="further fields of every pod's spec, as Kubernetes names them"
    )
    backoff_limit: Annotated[int, Field(ge=0)] = Field(
        6, description="how many pods may fail for a reason that hpctrain does not know"
    )

    @property
    def runs(self) -> ClaimMount:
        """The volume of the run directories."""
        return next(volume for volume in self.volumes if not volume.read_only)

    @model_validator(mode="after")
    def _consistent(self) -> KubernetesProfile:
        if all(volume.read_only for volume in self.volumes):
            raise InvalidValueError(
                "HT-profile-not-valid", "volumes: none can be written to, and a run directory has to be on one"
            )
        if clash := sorted(_SET_ELSEWHERE & self.pod.keys()):
            raise InvalidValueError("HT-profile-not-valid", "pod: {fields} is set by hpctrain", fields=", ".join(clash))
        return self


class NodeProfile(Section):
    """The hardware of one node."""

    gpus: Annotated[int, Field(ge=0, le=1024)] = 0
    gpu_type: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")] | None = Field(
        None, description="as Slurm's gres names it; None leaves it out of the request"
    )
    gpu: Annotated[str, Field(pattern=r"^[a-z0-9-]+$")] | None = Field(
        None, description="as predictions name it: hpctrain predict --gpu"
    )
    adapters: Annotated[int, Field(ge=1)] | None = Field(None, description="of the network that the ranks use")
    link_gbit: Annotated[float, Field(gt=0)] | None = Field(None, description="Gbit/s that one of them sends")
    cores: Annotated[int, Field(ge=1)] | None = Field(None, description="physical cores; None where unknown")
    threads_per_core: Annotated[int, Field(ge=1)] = Field(
        1, description="CPUs that Slurm counts for each core: 2 where it counts hardware threads"
    )
    memory: Memory | None = Field(None, description="what to ask for with --mem; None for the partition's default")
    exclusive: bool = Field(False, description="take whole nodes")


class JobTerms(Section):
    """What a profile and a request say of a job in the same words; None leaves a value to Slurm."""

    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Word | None = None
    time: TimeLimit | None = Field(None, description="of a job that does not ask for one; None for the partition's")
    sbatch: Annotated[dict[str, _OptionValue | None], AfterValidator(_sbatch_options)] = Field(
        default_factory=dict, description="further options of sbatch, without --"
    )
    requeue: bool = Field(True, description="whether jobs may requeue themselves; else another one follows")
    signal_seconds: Annotated[int, Field(ge=1, le=65535)] = Field(
        120, description="how long before its end a job is told of it"
    )


class ClusterProfile(JobTerms):
    """One cluster.

    Attributes:
        source: the address of the documentation that the values are from, or what they were discovered by.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]
    source: Line
    scheduler: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")] | None = Field(
        None,
        description="pbs, grid_engine, or one that an installed package adds; None for Slurm, or Kubernetes where that "
        "section is there",
    )
    node: NodeProfile = NodeProfile.defaults()
    qsub: tuple[Line, ...] = Field(
        (),
        description="further options of PBS' or Grid Engine's qsub, a line each, in which {nodes}, {ranks} and "
        "{gpus_per_node} stand for the job's numbers",
    )
    launcher: Annotated[str, Field(pattern=rf"^({LAUNCHER})$")] = "auto"
    interface: Word | None = Field(None, description="for connections that are not InfiniBand")
    fabric: Line | None = Field(None, description="file of the switches and cables; None asks Slurm")
    node_map: Line | None = Field(None, description="file of a node's GPUs, adapters and cores, or 'live'")

    modules: tuple[Word, ...] = Field((), description="loaded in this order, after a purge")
    setup: tuple[Line, ...] = Field((), description="lines of bash, executed as they are after the modules")
    environment: dict[VariableName, VariableValue] = Field(default_factory=dict)
    container: Container | None = None
    kubernetes: KubernetesProfile | None = Field(None, description="None for Slurm")

    @property
    def scheduled_by(self) -> str:
        """The name of its scheduler."""
        return self.scheduler or ("kubernetes" if self.kubernetes else "slurm")

    @model_validator(mode="after")
    def _consistent(self) -> ClusterProfile:
        if self.kubernetes and (slurms := sorted(_OF_SLURM & self.model_fields_set)):
            raise InvalidValueError(
                "HT-profile-not-valid",
                "{keys}: for Slurm, and this is a profile for Kubernetes",
                keys=", ".join(slurms),
            )
        if self.scheduler == "kubernetes" and not self.kubernetes:
            raise InvalidValueError("HT-profile-not-valid", "scheduler: kubernetes needs the section of that name")
        for name in filter(is_secret, self.environment):
            raise InvalidValueError(
                "HT-secret-exposed",
                "environment: {name} is a secret and does not belong in a file: export it, and submit "
                "with --env {name}",
                name=name,
            )
        return self


def slurm_folder() -> Path:
    """The folder of job script templates and ``clusters/``: ``hpctrain/slurm`` in a wheel, ``slurm`` in a checkout.

    Raises:
        HpctrainError: neither is there.
    """
    places = (_PACKAGE / "slurm", _PACKAGE.parent / "slurm")
    for place in places:
        if (place / "clusters").is_dir():
            return place
    raise HpctrainError(
        "HT-profile-folder-missing",
        "hpctrain's Slurm templates and cluster profiles are in neither {packaged} nor {checkout}",
        "install hpctrain again",
        packaged=places[0],
        checkout=places[1],
    )


def profile_names() -> list[str]:
    """The names of the shipped profiles."""
    return sorted(path.stem for path in (slurm_folder() / "clusters").glob("*.yaml"))


def load_profile(name_or_path: str) -> ClusterProfile:
    """Load a shipped profile by its name, or any profile by its path.

    Args:
        name_or_path: a name of :func:`profile_names`, or a path (it holds a slash or ends in .yaml or .yml).

    Raises:
        HpctrainError: no such profile, or something in it that the schema refuses; names the file, the line and the
            key.
    """
    path = _find(name_or_path)
    hint = f"the shipped profiles go by their name: {', '.join(profile_names())}"
    text = read_text(path, "cluster profile", hint, limit=LONGEST_FILE)
    example = slurm_folder() / "clusters" / "generic.yaml"
    return load_checked(text, path, ClusterProfile, "cluster profile", f"{example} shows one")


def _find(name_or_path: str) -> Path:
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        return Path(name_or_path)
    names = profile_names()
    if name_or_path not in names:
        raise HpctrainError(
            "HT-choice-unknown",
            "unknown cluster {cluster!r}",
            f"{nearest(name_or_path, names)}; or auto to discover the one at hand, or the path of a .yaml file",
            cluster=name_or_path,
        )
    return slurm_folder() / "clusters" / f"{name_or_path}.yaml"
