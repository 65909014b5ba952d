"""The communicator of the backend ``deepspeed``: torch.distributed's group for DeepSpeed, which trains by itself.

hpctrain changes DeepSpeed in two ways: it never compiles during a run, and errors in a configuration are explained.

By default DeepSpeed compiles what it computes with at its first use, on every host, each rank at the same time: 94 s of
CPU for the reduction through shared memory that ``init_distributed`` builds where there are no GPUs. A rank that is
killed meanwhile leaves a lock in ``TORCH_EXTENSIONS_DIR``, on which all later runs wait for ever.
"""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from pydantic import ValidationError

from hpctrain.common.cluster.gpus import gpu_of
from hpctrain.common.errors import HpctrainError
from hpctrain.common.extras import missing_extra
from hpctrain.common.settings import SHARE_GPUS
from hpctrain.worker.comm.torch_distributed import TorchDistributedCommunicator
from hpctrain.worker.comm.torchrun import set_torchrun_variables

if TYPE_CHECKING:
    from mpi4py import MPI

# Sections that deepspeed.runtime.constants does not name.
_SECTIONS = frozenset(
    (
        *("activation_checkpointing", "aio", "autotuning", "comet", "comms_logger", "compile", "compression_training"),
        *(
            "csv_monitor",
            "data_efficiency",
            "elasticity",
            "flops_profiler",
            "hybrid_engine",
            "monitor_config",
            "nebula",
        ),
        *("pipeline", "tensor_parallel", "tensorboard", "timers", "wandb", "weight_quantization", "zero_optimization"),
    )
)
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

# The file of the configuration that is being read: DeepSpeed passes on a dictionary without the name.
_files: list[str] = []


class DeepSpeedCommunicator(TorchDistributedCommunicator):
    """Ranks started by MPI, in a group that ``deepspeed.initialize`` takes over: NCCL with a GPU per rank, or Gloo."""

    def __init__(self, world: MPI.Intracomm, reason: str) -> None:
        from mpi4py import MPI

        node = world.Split_type(MPI.COMM_TYPE_SHARED)
        own = gpu_of(node.rank, node.size, torch.cuda.device_count(), shared=bool(SHARE_GPUS.read()))
        gpus = world.allreduce(own is not None, MPI.LAND)
        node.Free()
        super().__init__("nccl" if gpus else "gloo", f"{reason}; over {'NCCL' if gpus else 'Gloo'}", world)
        self.backend = "deepspeed"
        # DeepSpeed distributes what a script trains with it, so the hint about undistributed models is not due.
        self.distributed = True
        set_torchrun_variables(self)
        # Left alone, DeepSpeed takes the GPUs that it sees even where they are too few for the ranks.
        os.environ.setdefault("DS_ACCELERATOR", "cuda" if gpus else "cpu")
        watch_deepspeed()

    def torch(self) -> NoReturn:
        raise HpctrainError(
            "HT-deepspeed-distributes-itself",
            "ht.distribute under --backend deepspeed: deepspeed.initialize already distributes the model",
            "leave ht.distribute out, or choose --backend nccl, mpi or gloo",
        )


def watch_deepspeed() -> None:
    """Change DeepSpeed for this process, before a script imports anything of it. Idempotent.

    Raises:
        HpctrainError: DeepSpeed is not installed.
    """
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        raise missing_extra(error) or error from error
    from deepspeed import ops
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine

    if hasattr(deepspeed.initialize, "watches"):
        return
    # Listing the compatible operations would run compilers, and DeepSpeed would then compile what it lists.
    ops.__compatible_ops__ = dict(installed_ops)
    OpBuilder.jit_load = _refuse_to_compile
    DeepSpeedEngine.get_optimizer_configuration = _with_torch_adam(DeepSpeedEngine.get_optimizer_configuration)
    DeepSpeedConfig.__init__ = _explained(DeepSpeedConfig.__init__)
    deepspeed.initialize = _checked(deepspeed.initialize)


def _refuse_to_compile(builder: Any, verbose: bool = True) -> NoReturn:
    raise HpctrainError(
        "HT-deepspeed-not-built",
        "DeepSpeed's {name} is not built, and hpctrain allows no compilation during a run: a rank killed "
        "meanwhile leaves a lock that all later runs wait for forever",
        f"build it once: {builder.BUILD_VAR}=1 pip install --no-build-isolation --force-reinstall --no-deps deepspeed; "
        "or choose an optimizer of PyTorch's, or leave the offload out",
        name=builder.name,
    )


def _with_torch_adam(configure: Any) -> Any:
    """Use PyTorch's Adam, which is the same rule, where DeepSpeed's own is not built."""

    @functools.wraps(configure)
    def configured(engine: Any, parameters: dict[str, Any], *arguments: Any, **settings: Any) -> Any:
        from deepspeed.git_version_info import installed_ops

        needed = "cpu_adam" if engine.zero_use_cpu_optimizer() else "fused_adam"
        if not installed_ops.get(needed):
            parameters["torch_adam"] = True
        return configure(engine, parameters, *arguments, **settings)

    return configured


def _checked(initialize: Any) -> Any:
    """Refuse a model in float64, whose gradients DeepSpeed narrows on the way, and keep a configuration's file name."""

    @functools.wraps(initialize)
    def initialized(args: Any = None, model: Any = None, *arguments: Any, **settings: Any) -> Any:
        given = [settings.get(key) for key in ("config", "config_params")] + [getattr(args, "deepspeed_config", None)]
        _files[:] = [str(each) for each in given if isinstance(each, str | Path)]
        named = model.named_parameters() if isinstance(model, torch.nn.Module) else ()
        if wide := next((name for name, each in named if each.dtype == torch.float64), None):
            raise HpctrainError(
                "HT-deepspeed-float64",
                "{parameter} is float64, and DeepSpeed does not train float64: it refuses it, or rounds "
                "to float32 on the way (ZeRO 1 was wrong by 1.2e-5)",
                "model.float(), or choose --backend nccl, mpi or gloo with ht.distribute",
                parameter=wide,
            )
        try:
            return initialize(args, model, *arguments, **settings)
        except Exception as error:
            if (first := _own_error(error)) is None:
                raise
            raise first from None

    initialized.watches = True  # type: ignore[attr-defined]
    return initialized


def _own_error(error: BaseException) -> HpctrainError | None:
    """The error of hpctrain behind one that DeepSpeed raised in its place."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, HpctrainError):
        found = found.__cause__ or found.__context__
    return found


def _explained(read: Any) -> Any:
    """Turn DeepSpeed's errors about a configuration into ones that name the file and the key."""

    @functools.wraps(read)
    def explained(config: Any, given: Any, *arguments: Any, **settings: Any) -> None:
        name = _files[0] if _files else "the DeepSpeed configuration"
        if isinstance(given, Mapping):
            _check_keys(given, name)
        try:
            read(config, given, *arguments, **settings)
        except ValidationError as error:
            raise _section_error(error, config._param_dict, name) from error
        except (AssertionError, ValueError) as error:
            raise _batch_error(config, name) or HpctrainError(
                "HT-deepspeed-bad-value", "{path}: {reason}", path=name, reason=str(error)
            ) from error

    return explained


def _check_keys(given: Mapping[str, Any], name: str) -> None:
    """Refuse a misspelt key: DeepSpeed ignores keys that it does not know."""
    from deepspeed.runtime import constants

    known = _SECTIONS | {value for value in vars(constants).values() if isinstance(value, str) and value}
    for key in given:
        near = () if key in known else difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        if near:
            raise HpctrainError(
                "HT-deepspeed-unknown-key",
                "{path}: DeepSpeed has no key {key!r}, and would ignore it",
                f"{near[0]}?",
                path=name,
                key=key,
            )


def _section_error(error: ValidationError, given: Mapping[str, Any], name: str) -> HpctrainError:
    """The error for the first fault that pydantic found, with its place in the configuration."""
    first = error.errors()[0]
    path = ".".join(map(str, first["loc"]))
    section = next(
        (key for key, value in given.items() if isinstance(value, Mapping) and str(first["loc"][0]) in value), None
    )
    if first["type"] == "extra_forbidden":
        return HpctrainError(
            "HT-deepspeed-unknown-key",
            "{file}: {section} has no key {key!r}",
            "see deepspeed.ai/docs/config-json",
            file=name,
            section=section or error.title,
            key=path,
        )
    return HpctrainError(
        "HT-deepspeed-bad-value",
        "{file}: {section}.{key} = {value!r}: {reason}",
        file=name,
        section=section or error.title,
        key=path,
        value=first["input"],
        reason=first["msg"],
    )


def _batch_error(config: Any, name: str) -> HpctrainError | None:
    """The error for three batch sizes that contradict each other; None where they agree, or are unknown."""
    train, micro, steps = (getattr(config, key, None) for key in _BATCH)
    ranks = getattr(config, "world_size", None)
    if not (train and ranks):
        return None
    if micro and steps and train != micro * steps * ranks:
        return HpctrainError(
            "HT-deepspeed-batch-size",
            "{path}: train_batch_size {batch} is not train_micro_batch_size_per_gpu {micro} x "
            "gradient_accumulation_steps {steps} x {ranks} ranks = {product}",
            f'"train_batch_size": {micro * steps * ranks}; or leave one of the three out, and DeepSpeed works it out',
            path=name,
            batch=train,
            micro=micro,
            steps=steps,
            ranks=ranks,
            product=micro * steps * ranks,
        )
    if not (micro and steps):
        return HpctrainError(
            "HT-deepspeed-batch-size",
            "{path}: train_batch_size {batch} is too small for {ranks} ranks with the other sizes that it gives",
            f"give a multiple of {ranks}, or fewer ranks",
            path=name,
            batch=train,
            ranks=ranks,
        )
    return None
