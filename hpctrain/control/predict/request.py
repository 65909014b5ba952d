"""One prediction as asked for on the command line: what is read for it, and the call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.common.cluster.backends import BACKENDS, CAPABILITIES
from hpctrain.common.cluster.gpu_models import gpu
from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.control.predict.calibration import read_calibration
from hpctrain.control.predict.collectives import Ranks
from hpctrain.control.predict.compute import CPU
from hpctrain.control.predict.curve_checks import check_curves
from hpctrain.control.predict.energy import Site
from hpctrain.control.predict.hardware import Hardware
from hpctrain.control.predict.prediction import Node, Prediction, predict
from hpctrain.control.predict.training import Training


@dataclass(frozen=True, kw_only=True)
class PredictionRequest:
    """The hardware and options of a prediction.

    Attributes:
        nodes: the numbers of nodes to predict for, in rising order.
        calibration: files of measurements that replace assumptions.
    """

    hardware: Hardware
    nodes: Sequence[int]
    backend: str = "auto"
    framework: str = "torch"
    calibration: Sequence[Path] = ()
    site: Site = Site()


def predict_request(training: Training, request: PredictionRequest) -> Prediction:
    """The prediction.

    Raises:
        HpctrainError: hardware that is not known, or not whole; files that cannot be read or are of something else.
    """
    hardware = request.hardware
    if hardware.named_gpu != CPU:
        gpu(hardware.named_gpu)
    node = Node(gpu=hardware.named_gpu, local=hardware.local, engine=_engine(training, request), rdma=hardware.rdma)
    networks, warnings = hardware.networks(request.nodes)
    calibration = read_calibration(request.calibration)
    ranks = Ranks(network=networks[-1], local=node.local, device=node.gpu, engine=node.engine, rdma=node.rdma)
    doubts = check_curves(calibration.curves, ranks, stated=hardware.states_links)
    found = predict(training, node, networks, calibration=calibration, site=request.site)
    return replace(found, warnings=(*warnings, *doubts, *found.warnings))


def _engine(training: Training, request: PredictionRequest) -> str:
    """The engine that a run would choose there.

    Raises:
        HpctrainError: a backend that does not serve the training or the nodes.
    """
    backend, on_cpu = _asked(training, request), request.hardware.gpu == CPU
    if backend == "auto":
        if on_cpu:
            return "mpi"
        return "nccl" if request.framework == "torch" else "horovod"
    found = CAPABILITIES[backend]
    if found.needs_gpus and on_cpu:
        raise HpctrainError(
            "HT-backend-needs-gpus",
            "backend {backend!r} needs GPUs, and --gpu cpu has none",
            "--backend mpi or gloo",
            backend=backend,
        )
    if not found.joins_ranks:
        raise HpctrainError(
            "HT-backend-for-one-process",
            "backend {backend!r} is for one process",
            "leave --backend out, or choose mpi, nccl or horovod",
            backend=backend,
        )
    if request.framework not in found.frameworks:
        raise HpctrainError(
            "HT-backend-not-for-framework",
            "backend {backend!r} does not serve {framework}",
            "choose --backend mpi or horovod",
            backend=backend,
            framework=request.framework,
        )
    if not request.hardware.rdma and (on_cpu or backend in ("mpi", "gloo")):
        raise HpctrainError(
            "HT-backend-without-tcp",
            "--tcp is about NCCL, and {backend} does not use it here",
            "leave --tcp out",
            backend=backend,
        )
    return backend


def _asked(training: Training, request: PredictionRequest) -> str:
    """The backend asked for, or the only one that the recipe can have."""
    if request.backend not in BACKENDS:
        raise HpctrainError(
            "HT-backend-unknown",
            "unknown backend {backend!r}",
            nearest(request.backend, BACKENDS),
            backend=request.backend,
        )
    recipe = training.recipe
    if recipe is not None and recipe.sync:
        raise HpctrainError(
            "HT-prediction-sync-parameters",
            "predictions are for ranks that average their gradients in every step, but sync averages parameters",
            "--set sync=null predicts the same training without it",
        )
    if recipe is None or not (recipe.fault_tolerance.fault_tolerant or recipe.communication.compression == "top_k"):
        return request.backend
    if request.backend not in ("auto", "mpi"):
        raise HpctrainError(
            "HT-recipe-needs-mpi",
            "fault_tolerance: shrink and compression: top_k need --backend mpi, not {backend!r}",
            "choose --backend mpi",
            backend=request.backend,
        )
    return "mpi"
