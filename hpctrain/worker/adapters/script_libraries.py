"""Changes in libraries before a script begins, so that it finds a run as it finds one of its own launcher.

Scripts for DistributedDataParallel, FSDP or torchtitan, and Lightning, Accelerate and the Hugging Face Trainer
distribute a training by themselves over torch.distributed, if torchrun's variables say so. Every rank of a script gets
these, and the default group that the script asks torch.distributed for is that of the run's backend: hpctrain's own
over ``mpi``. tf.distribute reads ``TF_CONFIG``, which ranks have with the backend ``multi_worker``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from hpctrain.common.cluster.launcher import AS_TORCHRUN, SRUN_NONE, TORCHRUN, TORCHRUN_MARK, detect
from hpctrain.common.run.plan import Plan
from hpctrain.worker.comm.after_import import change_after_import

# The classes that choose the devices of a Trainer and of Fabric, by their modules.
_CONNECTORS = {
    "lightning.pytorch.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "pytorch_lightning.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "lightning.fabric.connector": "_Connector",
    "lightning_fabric.connector": "_Connector",
}
_GROUPS = "torch.distributed.distributed_c10d"
_IN_HOST_MEMORY = ("gloo", "mpi")


def serve_torchrun_scripts(plan: Plan, rank: int, port: int) -> None:
    """Prepare this rank for a script that distributes by itself, and can make a store at ``port`` of the first host.

    Called before the script begins.
    """
    capable = plan.capabilities
    # Replicas of one process are no ranks, which the variables would promise.
    if not plan.script or capable is None or capable.replicates:
        return
    launcher = detect()
    for name, value in script_variables(plan, rank, port).items():
        if name.startswith(("PL_", "ACCELERATE_")):
            # What the user has set stays, unless it is about which rank this is.
            os.environ.setdefault(name, value)
        elif not (launcher and launcher.name == TORCHRUN):
            # torchrun's own variables stay: they say where its store is.
            os.environ[name] = value
    connectors = {module: functools.partial(_give_devices, name) for module, name in _CONNECTORS.items()}
    change_after_import({_GROUPS: _give_default_group, **connectors})


def torchrun_variables(plan: Plan, rank: int, port: int, *, alone: bool = False) -> dict[str, str]:
    """torchrun's variables for a rank of a plan, or for the only rank of a node where it is ``alone``.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables.
    """
    homes = [(node, local) for node, host in enumerate(plan.hosts) for local in range(host.slots)]
    node, local_rank = homes[rank]
    local_size, nodes = plan.hosts[node].slots, len(plan.hosts)
    if alone:
        local_rank, local_size, node, nodes = 0, 1, rank, plan.ranks
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(plan.ranks),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(plan.ranks),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        # The agent's store is torchrun's own.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        # Slurm's name of a node may not be one of the network.
        "MASTER_ADDR": plan.start.environment.get("MASTER_ADDR", plan.hosts[0].host),
        "MASTER_PORT": str(port),
        TORCHRUN_MARK: AS_TORCHRUN,
    }


def join_without_mpi(plan: Plan, rank: int, port: int) -> None:
    """Have this rank, which srun started without an MPI, join its run as one of torchrun's.

    Slurm gives each step another number, so that the ranks of another run can never take this one's store for theirs.
    """
    step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
    os.environ |= {**torchrun_variables(plan, rank, port), TORCHRUN_MARK: f"{SRUN_NONE}-{step}"}


def script_variables(plan: Plan, rank: int, port: int) -> dict[str, str]:
    """torchrun's variables, and what the frameworks would not find out by themselves."""
    # Each rank that shares a GPU sees one, so that it is to a framework like the only rank of a node.
    variables = torchrun_variables(plan, rank, port, alone=plan.start.share_gpus)
    if plan.capabilities is None or not (plan.capabilities.joins_ranks and plan.capabilities.has_meshes):
        return variables
    # Where a script of Lightning or Fabric names none. Theirs would be one CPU, or all GPUs.
    variables |= {
        "PL_TRAINER_DEVICES": variables["LOCAL_WORLD_SIZE"],
        "PL_TRAINER_NUM_NODES": variables["GROUP_WORLD_SIZE"],
    }
    if plan.backend in _IN_HOST_MEMORY:
        # Accelerate distributes on CPUs only when asked; both would choose GPUs, which these backends cannot use.
        variables |= {"PL_TRAINER_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true"}
    return variables


def _give_devices(name: str, module: ModuleType) -> None:
    """Make Lightning or Fabric take its devices from the run where a script leaves the choice to it."""
    connector = getattr(module, name)
    original = connector.__init__
    free = {"devices": "auto", "num_nodes": 1, "accelerator": "auto"}

    @functools.wraps(original)
    def choosing(self: Any, *arguments: Any, **settings: Any) -> None:
        bound = inspect.signature(original).bind(self, *arguments, **settings)
        bound.apply_defaults()
        for name, left_free in free.items():
            value = os.environ.get(f"PL_TRAINER_{name.upper()}")
            if value and bound.arguments[name] == left_free:
                bound.arguments[name] = int(value) if value.isdigit() else value
        original(*bound.args, **bound.kwargs)

    connector.__init__ = choosing


def _give_default_group(module: ModuleType) -> None:
    """Make ``init_process_group`` for all ranks join the run's default group, which has the name that it asks for."""
    for name in ("init_process_group", "get_backend", "new_group"):
        wrapped = _through_default_group(name, getattr(module, name))
        _put(name, wrapped, module, "torch.distributed", "torch.distributed.device_mesh")


def _put(name: str, function: Any, module: ModuleType, *others: str) -> None:
    """Put a function into a module, and into those that have imported it from there before, as a sitecustomize may."""
    for namespace in (module, *map(sys.modules.get, others)):
        if namespace is not None and hasattr(namespace, name):
            setattr(namespace, name, function)


def _through_default_group(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def calling(*arguments: Any, **settings: Any) -> Any:
        from hpctrain.worker.adapters.torch import default_group

        return getattr(default_group, name)(original, *arguments, **settings)

    return calling


# The functions that save, by module, with the name of the argument that is a path; and a package that has one too.
_SAVING = {"torch.serialization": ("save", "f", "torch"), "safetensors.torch": ("save_file", "filename", "")}


def save_whole_files() -> None:
    """Save whole files from now on. Called before the script begins, on runs of several ranks."""
    change_after_import(dict.fromkeys(_SAVING, _save_whole))


def _save_whole(module: ModuleType) -> None:
    name, place, package = _SAVING[module.__name__]
    _put(name, _whole(getattr(module, name), place), module, package)


def _whole(save: Callable[..., Any], place: str) -> Callable[..., Any]:
    """A function that saves whole files, if its argument of the name ``place`` is a path."""
    signature = inspect.signature(save)

    @functools.wraps(save)
    def saving(*arguments: Any, **settings: Any) -> Any:
        bound = signature.bind(*arguments, **settings)
        if not isinstance(bound.arguments[place], str | os.PathLike):
            return save(*arguments, **settings)
        with replacing(Path(bound.arguments[place])) as path:
            bound.arguments[place] = path
            return save(*bound.args, **bound.kwargs)

    return saving


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A context manager for the path of a file that takes another's place at its end, unless there is an error."""
    target = path.resolve()
    writable = target.parent.is_dir() and os.access(target.parent, os.W_OK)
    if not writable or (target.exists() and not target.is_file()):
        # Whatever there is to say, a device, or a file in a folder that takes no others.
        yield path
        return
    # A folder, since the name is a part of what PyTorch writes.
    with tempfile.TemporaryDirectory(prefix=".hpctrain-", dir=target.parent, ignore_cleanup_errors=True) as folder:
        path = Path(folder) / target.name
        yield path
        if target.exists():
            shutil.copymode(target, path)
        path.replace(target)


_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_LOOK_SECONDS = 1.0
# The classes that start workers, by module.
_STARTING = {
    "torch.utils.data.dataloader": "_MultiProcessingDataLoaderIter",
    "torchdata.stateful_dataloader.stateful_dataloader": "_StatefulMultiProcessingDataLoaderIter",
}


def keep_loader_workers() -> None:
    """Change how workers are started from now on, as soon as the script imports PyTorch."""
    change_after_import(dict.fromkeys(_STARTING, _keep_workers))


def _keep_workers(module: ModuleType) -> None:
    iterator = getattr(module, _STARTING[module.__name__])
    original = iterator.__init__

    @functools.wraps(original)
    def starting(self: Any, loader: Any, *further: Any) -> None:
        initialise = loader.worker_init_fn
        # A partial function, which can be pickled where workers are spawned.
        loader.worker_init_fn = functools.partial(_begin_worker, initialise)
        try:
            original(self, loader, *further)
        finally:
            loader.worker_init_fn = initialise
            for worker in getattr(self, "_workers", ()):
                # The rank sends SIGTERM to its workers at its own end.
                worker._popen.terminate = worker._popen.kill

    iterator.__init__ = starting


def _begin_worker(of_script: Callable[[int], object] | None, worker: int) -> None:
    """What a worker calls first; ``of_script`` is the script's own such function."""
    for number in _REQUESTS:
        # SIG_IGN would be inherited by programs that a worker starts.
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
    rank = multiprocessing.parent_process()
    if rank and rank.pid:
        threading.Thread(target=_end_with, args=(rank.pid,), daemon=True).start()
    if of_script is not None:
        of_script(worker)


def _end_with(rank: int) -> None:
    while os.getppid() == rank:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)


def serve_tensorflow_scripts(plan: Plan) -> None:
    """Prepare this rank for a script that distributes by itself. Called before the script begins; collective."""
    served = ("horovod.tensorflow", "horovod._keras", "horovod._keras.callbacks")
    change_after_import(dict.fromkeys(served, _serve_horovod))
    if plan.backend == "multi_worker":
        from hpctrain.worker.comm.addresses import name_workers

        name_workers()


def _serve_horovod(module: ModuleType) -> None:
    """Change one of Horovod's modules, if Keras is Keras 3."""
    import tensorflow as tf

    if tf.keras.__version__ < "3":
        return
    from hpctrain.worker.adapters import horovod_keras

    if module.__name__ == "horovod.tensorflow":
        horovod_keras.serve_variables(module)
    elif module.__name__ == "horovod._keras":
        module.create_distributed_optimizer = horovod_keras.create_distributed_optimizer  # type: ignore[attr-defined]
        module.load_model = horovod_keras.load_model  # type: ignore[attr-defined]
    else:
        horovod_keras.serve_callbacks(module)
