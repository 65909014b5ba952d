"""Turns a plan into the command that starts its ranks. Pure: launcher and interpreter are arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from urllib.parse import quote

from hpctrain.common.cluster.launch_files import hydra_hostfile, slurm_hostfile
from hpctrain.common.cluster.launcher import ONE_ADDRESS, SIZE_VARIABLES
from hpctrain.common.cluster.mpi import MpiInstallation
from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import port_of
from hpctrain.common.run.plan import THREADS, Container, Plan
from hpctrain.common.secrets import is_secret
from hpctrain.common.settings import BACKEND, BACKEND_REASON, HOST_TIMEOUT, REPLICAS, SHARE_GPUS
from hpctrain.control.hosts.networks import keepalive_options
from hpctrain.control.launchers.command import Command, Launcher, Srun, Torchrun
from hpctrain.control.planning.mesh_plan import mesh_environment

TRAIN = "hpctrain.worker.train"
DAEMON = "hpctrain.worker.programs.daemon"

# A step that reads another process's parameters blocks one of TensorFlow's threads while others serve this process's
# parameters; with a single thread the first step deadlocks.
_SERVER_THREADS = 8

# Settings of hpctrain, of Python, and of the libraries for communication and computing: ranks with different settings
# can deadlock. And of those for which a rank chooses what the user has not. CUDA's are left out, because visible GPUs
# differ by host, and TF_CONFIG, which differs by process.
_SETTINGS = re.compile(
    r"(?!TF_CONFIG$)(HPCTRAIN|GLOO|HF_HUB|HOROVOD|KERAS|KMP|MKL|NCCL|OMP|OMPI_MCA|OPENBLAS|PYTORCH|TF|TORCH|"
    r"TRANSFORMERS|TRITON|UCX|WANDB|XLA)_\w+|TORCHINDUCTOR_CACHE_DIR|PYTHON[A-Z]+",
    re.ASCII,
)


def own_threads(environment: Mapping[str, str]) -> dict[str, str]:
    """The numbers of threads that the user's own environment has."""
    return {name: environment[name] for name in THREADS if environment.get(name)}


def rank_environment(plan: Plan, threads: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """The variables that every rank gets; the user's own take precedence over hpctrain's.

    Args:
        threads: those of :func:`own_threads`. The first of them stands for all that are not set.
    """
    # Replicas share the threads of their process.
    replicas = plan.ranks // plan.processes
    given = {**threads, **plan.environment, **plan.start.environment}
    # OMP_NUM_THREADS may be a list for nested loops.
    number = given.get(THREADS[0], "").partition(",")[0] or str(plan.threads_per_rank * replicas)
    return {
        BACKEND.name: plan.backend,
        **({BACKEND_REASON.name: plan.backend_reason} if plan.backend_reason else {}),
        **dict.fromkeys(sorted(THREADS), number),
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_NUM_INTEROP_THREADS": str(_SERVER_THREADS if plan.backend == "parameter_server" else replicas),
        "TF_NUM_INTRAOP_THREADS": number,
        **({REPLICAS.name: str(replicas)} if replicas > 1 else {}),
        **({SHARE_GPUS.name: "1"} if plan.start.share_gpus else {}),
        **mesh_environment(plan),
        **threads,
        **plan.environment,
        **plan.start.environment,
    }


def settings_of(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the variables that must be the same on all ranks; secrets are left out."""
    return tuple(sorted(name for name in environment if _SETTINGS.fullmatch(name) and not is_secret(name)))


@dataclass(frozen=True, kw_only=True)
class LaunchSite:
    """What a launch takes from the place where it happens.

    Attributes:
        python: the interpreter of the ranks where neither the plan nor a container has its own.
        cores: physical cores of each host. Ranks are bound to cores where these suffice, unless the plan has places:
            ranks with places bind themselves.
        root: whether the superuser starts the run, which Open MPI allows only with an option.
        slurm: the settings of an mpirun inside a Slurm job; None outside.
        tcp: whether Open MPI's ranks on a single host may listen on all networks, though they need none.
        host_timeout: seconds of silence after which Open MPI considers one of several hosts lost.
        settings: the variables that Open MPI's mpirun passes on to other hosts; other launchers pass on all.
        threads: how many threads the user's own variables ask for, see :func:`own_threads`.
    """

    python: Path
    cores: int
    root: bool
    slurm: Mapping[str, str] | None = None
    tcp: bool = True
    host_timeout: int = HOST_TIMEOUT.default
    settings: Sequence[str] = ()
    threads: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Ranks:
    """What a launcher is to start: the program of each rank with its variables, and whether it is bound to cores."""

    plan: Plan
    run_directory: Path
    program: tuple[str, ...]
    environment: Mapping[str, str]
    bound: bool


def launch_command(
    plan: Plan,
    run_directory: Path,
    launcher: Launcher | None,
    site: LaunchSite,
    *,
    work: Sequence[str] | None = None,
    attempt: int = 1,
) -> Command:
    """The command that runs a plan.

    Args:
        run_directory: absolute path of the directory with the plan.
        launcher: starts the ranks; None for the backend ``single``.
        work: module and arguments that each rank executes; by default the training of ``run_directory``.
        attempt: the attempt's number, which separates its torchruns from those of an earlier attempt.

    Raises:
        HpctrainError: the launcher cannot start the plan's container, or a path cannot be mounted in it.
    """
    arguments = ("-P", "-m", *(work or (TRAIN, str(run_directory))))
    environment = rank_environment(plan, site.threads)
    container = plan.start.container
    # -P keeps the current directory out of the search path, so that no file of the user hides a module.
    interpreter = plan.start.python or ("python3" if container else str(site.python))
    program = (*_apptainer(plan, run_directory), interpreter, *arguments)
    if container:
        _require_plugin(container, launcher)
    if launcher is None:
        return Command(program=program, environment=environment, without=SIZE_VARIABLES)
    placed = any(host.places for host in plan.hosts)
    fitting = plan.threads_per_rank * max(host.slots for host in plan.hosts) <= site.cores
    # Open MPI binds no process that a script starts by MPI where all cores are taken: it refuses to start it.
    bound = fitting and not placed and not plan.start.oversubscribe
    ranks = _Ranks(plan=plan, run_directory=run_directory, program=program, environment=environment, bound=bound)
    if isinstance(launcher, Srun):
        return _srun(ranks, launcher)
    if isinstance(launcher, Torchrun):
        return _torchrun(ranks, launcher, site.python, attempt)
    return _mpirun(ranks, launcher, site)


def _require_plugin(container: Container, launcher: Launcher | None) -> None:
    if container.runtime == "pyxis" and not isinstance(launcher, Srun):
        called = "no launcher" if launcher is None else launcher.name
        raise HpctrainError(
            "HT-launcher-not-usable-here",
            "the container {image} is for pyxis, a plugin of srun, and {launcher} starts the ranks",
            "choose --launcher srun-pmix, or --container-runtime apptainer",
            image=container.image,
            launcher=called,
        )


def _mpirun(ranks: _Ranks, mpi: MpiInstallation, site: LaunchSite) -> Command:
    plan, slurm = ranks.plan, site.slurm
    files: dict[Path, str] = {}
    if mpi.flavour == "mpich-hydra":
        options = _mpich(ranks)
    elif mpi.flavour == "intel-mpi":
        # -hosts takes no slots.
        hostfile = ranks.run_directory / "hostfile"
        files[hostfile] = hydra_hostfile((host.host, range(host.slots)) for host in plan.hosts)
        options = _intel(ranks, hostfile)
    else:
        options = _open_mpi(ranks, site)
        if mpi.flavour == "open-mpi-5":
            options += _open_mpi_5(ranks, site)
    return Command(
        program=ranks.program,
        launcher=(str(mpi.mpirun), *options, *plan.start.arguments),
        environment=dict(slurm or {}),
        # mpirun starts one daemon per host by srun, which would confine it to the processors of one rank.
        without=("SRUN_CPUS_PER_TASK",) if slurm is not None else (),
        files=files,
    )


def _open_mpi(ranks: _Ranks, site: LaunchSite) -> list[str]:
    plan = ranks.plan
    options = ["--allow-run-as-root"] if site.root else []
    options += ["-np", str(plan.ranks), "--host", _host_slots(plan)]
    if ranks.bound:
        options += ["--map-by", f"slot:PE={plan.threads_per_rank}", "--bind-to", "core"]
    else:
        options += ["--bind-to", "none"]
        if len(plan.hosts) > 1 or plan.hosts[0].places:
            # Without it Open MPI may go round the hosts; a plan fills one after the other.
            options += ["--map-by", "slot"]
        if not plan.hosts[0].places:
            # Where ranks share a core, a waiting rank yields it to the rank it waits for. MPI_Allreduce of 1 KB on
            # 4 ranks and 2 cores takes 29 us with this option, and 48 ms without.
            options += ["--mca", "mpi_yield_when_idle", "1"]
    # Without an InfiniBand adapter the UCX one-sided component prints an error line a rank.
    options += ["--mca", "osc", "^ucx"]
    # Ranks need TCP to reach processes that a script starts by MPI, which need slots of their own.
    alone = len(plan.hosts) == 1 and not plan.fault_tolerant and not plan.start.oversubscribe
    if alone and not site.tcp and "btl" not in plan.start.arguments:
        options += ["--mca", "btl", "^tcp"]
    if site.slurm is not None or plan.start.oversubscribe:
        # The job may have fewer tasks than the plan has ranks, for example one per host with all of its GPUs.
        options.append("--oversubscribe")
    options += [word for name, value in ranks.environment.items() for word in ("-x", f"{name}={value}")]
    # The user's variables are passed by name, because every user can see the values on a command line.
    settings = (name for name in site.settings if name not in ranks.environment)
    return options + [word for name in dict.fromkeys([*plan.start.passed, *settings]) for word in ("-x", name)]


def _open_mpi_5(ranks: _Ranks, site: LaunchSite) -> list[str]:
    options = ["--with-ft", "ulfm"] if ranks.plan.fault_tolerant else []
    if len(ranks.plan.hosts) > 1:
        options += keepalive_options(site.host_timeout)
    if site.slurm is not None:
        # Needed on one host too: after salloc on a login node, mpirun itself runs on another.
        options += guarded_daemons(ranks.run_directory, site.python)
    return options


def _mpich(ranks: _Ranks) -> list[str]:
    options = ["-n", str(ranks.plan.ranks), "-hosts", _host_slots(ranks.plan)]
    options += ["-bind-to", f"core:{ranks.plan.threads_per_rank}" if ranks.bound else "none"]
    return options + _genv(ranks.environment)


def _intel(ranks: _Ranks, hostfile: Path) -> list[str]:
    # One domain per rank, with an equal share of the cores.
    pinning = {"I_MPI_PIN_DOMAIN": "auto:compact"} if ranks.bound else {"I_MPI_PIN": "off"}
    return ["-n", str(ranks.plan.ranks), "-machinefile", str(hostfile), *_genv({**pinning, **ranks.environment})]


def _genv(environment: Mapping[str, str]) -> list[str]:
    return [word for name, value in environment.items() for word in ("-genv", name, value)]


def _host_slots(plan: Plan) -> str:
    return ",".join(f"{host.host}:{host.slots}" for host in plan.hosts)


def guarded_daemons(run_directory: Path, python: Path) -> list[str]:
    """The option by which Open MPI 5 starts its daemons so that they survive Slurm's SIGTERM.

    mpirun splits the value at spaces, so that no option is given where Python's path has some.
    Source: https://docs.prrte.org (``prte_launch_agent``, as ``prte_info --param prte all`` names it).
    """
    if len(str(python).split()) != 1:
        return []
    words = (str(python), "-P", "-m", DAEMON, quote(str(run_directory)), "prted")
    return ["--prtemca", "prte_launch_agent", " ".join(words)]


def _srun(ranks: _Ranks, srun: Srun) -> Command:
    """srun's command. The ranks inherit its environment, which, unlike options, may hold any value.

    Source: https://slurm.schedmd.com/srun.html.
    """
    plan, environment = ranks.plan, ranks.environment
    hostfile = ranks.run_directory / "hostfile"
    options = [f"--mpi={srun.mpi}", f"--nodes={len(plan.hosts)}", f"--ntasks={plan.ranks}"]
    # Tasks follow the lines of SLURM_HOSTFILE. sbatch --export=NONE would be the step's setting too.
    options += ["--distribution=arbitrary", "--export=ALL", "--kill-on-bad-exit=1"]
    # hpctrain may itself run in a step that has the job's processors.
    options += ["--overlap"]
    if ranks.bound:
        # Slurm's CPUs may be hardware threads; the plan counts cores.
        options += [f"--cpus-per-task={plan.threads_per_rank}", "--threads-per-core=1", "--cpu-bind=cores"]
    else:
        # Ranks with places bind themselves to cores, also on uneven hosts and in a part of a node.
        options += ["--overcommit", "--cpu-bind=none"]
        if not plan.hosts[0].places:
            environment = {**environment, "OMPI_MCA_mpi_yield_when_idle": "1"}
    return Command(
        program=ranks.program,
        launcher=("srun", *options, *_pyxis(plan, ranks.run_directory), *plan.start.arguments),
        environment={**environment, "SLURM_HOSTFILE": str(hostfile)},
        without=JOB_SETTINGS,
        files={hostfile: slurm_hostfile((host.host, range(host.slots)) for host in plan.hosts)},
    )


def _torchrun(ranks: _Ranks, torchrun: Torchrun, python: Path, attempt: int) -> Command:
    """torchrun's command on one host. Its ranks inherit its environment.

    Each host has a fixed rank in the rendezvous and no restarts: hpctrain itself restarts a run from its checkpoint.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html.
    """
    plan = ranks.plan
    # All hosts know one port; on a single host any free one does.
    alone = len(plan.hosts) == 1
    endpoint = "127.0.0.1:0" if alone else f"{plan.hosts[0].host}:{port_of(ranks.run_directory)}"
    options = [f"--nnodes={len(plan.hosts)}", f"--nproc-per-node={plan.hosts[torchrun.node].slots}", "--max-restarts=0"]
    options += [f"--rdzv-backend={ONE_ADDRESS}", f"--rdzv-conf=rank={torchrun.node}"]
    options += [f"--rdzv-endpoint={endpoint}", f"--rdzv-id=attempt-{attempt}", *plan.start.arguments, "--no-python"]
    return Command(
        program=ranks.program,
        launcher=(str(python), "-P", "-m", "hpctrain.worker.programs.torchrun", *options),
        environment=ranks.environment,
        # Sizes set by a surrounding mpirun or srun would take precedence.
        without=SIZE_VARIABLES,
    )


# Variables of the job, or of the step around it, by which srun would override the plan.
JOB_SETTINGS = ("SLURM_HINT", "SLURM_NTASKS_PER_NODE", "SLURM_THREADS_PER_CORE", "SRUN_CPUS_PER_TASK")


def _apptainer(plan: Plan, run_directory: Path) -> list[str]:
    """The arguments before the interpreter. Without GPUs ``--nv`` only prints a warning.

    Source: https://apptainer.org/docs/user/latest/gpu.html.
    """
    container = plan.start.container
    if container is None or container.runtime != "apptainer":
        return []
    binds = [word for mount in _mounts(plan, container, run_directory) for word in ("--bind", mount)]
    return ["apptainer", "exec", "--nv", *binds, container.image]


def _pyxis(plan: Plan, run_directory: Path) -> list[str]:
    """srun's options of the plugin. Source: https://github.com/NVIDIA/pyxis/wiki/Usage."""
    container = plan.start.container
    if container is None or container.runtime != "pyxis":
        return []
    mounts = [mount if ":" in mount else f"{mount}:{mount}" for mount in _mounts(plan, container, run_directory)]
    return [f"--container-image={container.image}", f"--container-mounts={','.join(mounts)}"]


def _mounts(plan: Plan, container: Container, run_directory: Path) -> list[str]:
    folders = [run_directory]
    if plan.script:
        folders.append(plan.script.file.parent)
    for path in folders:
        if ":" in str(path) or "," in str(path):
            raise HpctrainError(
                "HT-container-path-not-mountable",
                "{path} cannot be mounted in a container: ':' and ',' have a meaning there",
                "choose another directory",
                path=path,
            )
    return [*dict.fromkeys(str(path) for path in folders), *container.mounts]
