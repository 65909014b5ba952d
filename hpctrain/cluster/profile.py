"""A cluster profile: what a job on one cluster needs, as ``slurm/clusters/NAME.yaml`` or a user's own file says it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from hpctrain.cluster.container import Container

# Bytes with Slurm's units, as --mem takes them; 0 is all memory of a node.
Memory = Annotated[str, Field(pattern=r"^\d+[KMGT]?$")]
# Minutes, or [days-]hours[:minutes[:seconds]], as --time takes it.
TimeLimit = Annotated[str, Field(pattern=r"^(\d+|\d+:\d+(:\d+)?|\d+-\d+(:\d+){0,2})$")]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
# A path that may begin with a variable of the job, such as $TMPDIR or $SLURM_TMPDIR.
NodePath = Annotated[str, Field(pattern=r"^(/|\$[A-Za-z_][A-Za-z0-9_]*)[\w./-]*$")]


class Node(BaseModel):
    """What one node has."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpus: Annotated[int, Field(ge=0)] = 0
    gpu_type: str | None = Field(None, description="as Slurm's gres names it; None leaves it out of the request")
    gpu_option: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    cores: Annotated[int, Field(ge=1)] | None = Field(None, description="physical cores; None where nobody said")
    memory: Memory | None = Field(None, description="what to ask for with --mem; None for the partition's default")
    exclusive: bool = Field(False, description="take whole nodes")


class ClusterProfile(BaseModel):
    """One cluster.

    Attributes:
        source: the address of the documentation that the values are from, or what they were discovered by.
        tried: whether hpctrain was run there.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    source: str
    tried: bool = False
    remark: str = ""

    node: Node = Node()
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: TimeLimit | None = Field(None, description="of a job that does not ask for one; None for the partition's")
    max_nodes: Annotated[int, Field(ge=1)] | None = None
    sbatch: dict[str, str | None] = Field(default_factory=dict, description="further options of sbatch, without --")

    launcher: Literal["auto", "mpirun", "srun-pmix", "srun-pmi2"] = "auto"
    interface: str | None = Field(None, description="for connections that are not InfiniBand")
    fabric: str | None = Field(None, description="file of the switches and cables; None asks Slurm")
    node_map: str | None = Field(None, description="file of a node's GPUs, adapters and cores, or 'live'")

    modules: tuple[str, ...] = Field((), description="loaded in this order, after a purge")
    setup: tuple[str, ...] = Field((), description="lines of bash, executed as they are after the modules")
    environment: dict[VariableName, str] = Field(default_factory=dict)
    container: Container | None = None
    node_storage: NodePath | None = Field(None, description="fast storage of each node, for staged files")

    requeue: bool = Field(True, description="whether the cluster lets jobs requeue themselves")
    signal: str = Field("USR2", pattern=r"^[A-Z0-9+-]+$", description="that announces the end of a job")
    signal_seconds: Annotated[int, Field(ge=1, le=65535)] = Field(120, description="how long before the end")
