"""One prediction as asked for on the command line: what is read for it, and the call."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.common.cluster.backends import BACKENDS, CAPABILITIES
from hpctrain.common.cluster.gpu_models import gpu
from hpctrain.common.errors import HpctrainError, nearest
from hpctrain.control.predict.allreduce_time import Ranks, curve_rate, over_nvlink
from hpctrain.control.predict.calibration import read_calibration
from hpctrain.control.predict.compute import CPU, Device
from hpctrain.control.predict.hardware import Hardware
from hpctrain.control.predict.image_prediction import predict
from hpctrain.control.predict.micro_batch import fitting
from hpctrain.control.predict.node_energy import Site
from hpctrain.control.predict.prediction import Node, Prediction
from hpctrain.control.predict.training import Training, recipe_training
from hpctrain.control.predict.transformers.language_prediction import predict_language
from hpctrain.control.predict.transformers.language_training import LanguageTraining, recipe_language_training

if TYPE_CHECKING:
    from hpctrain.common.recipes.schema import Recipe
    from hpctrain.control.predict.measurements import Curve


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


def training_of(recipe: Recipe) -> Training | LanguageTraining:
    """What is predicted of a recipe."""
    return recipe_language_training(recipe) if recipe.data.name == "text" else recipe_training(recipe)


def predict_request(training: Training | LanguageTraining, request: PredictionRequest) -> Prediction:
    """The prediction.

    Raises:
        HpctrainError: hardware that is not known, or not whole; files that cannot be read or are of something else.
    """
    hardware = request.hardware
    if hardware.named_gpu != CPU:
        gpu(hardware.named_gpu)
    elif isinstance(training, LanguageTraining):
        raise HpctrainError(
            "HT-prediction-not-possible", "transformers are predicted on GPUs, not on the cores of hosts", "--gpu NAME"
        )
    node = Node(gpu=hardware.named_gpu, local=hardware.local, engine=_engine(training, request), rdma=hardware.rdma)
    training = _sized(training, node)
    networks, warnings = hardware.networks(request.nodes)
    if isinstance(training, LanguageTraining):
        _require_served(node, request.calibration)
        unstated = () if hardware.states_links else ("network",)
        found = predict_language(training, node, networks, site=request.site, unstated=unstated)
        return replace(found, warnings=(*warnings, *found.warnings))
    training = replace(training, framework=request.framework)
    calibration = read_calibration(request.calibration)
    ranks = Ranks(
        network=networks[-1], local=node.local, device=Device(name=node.gpu), engine=node.engine, rdma=node.rdma
    )
    if ranks.by_nccl:
        curves = tuple(curve.in_rack(gpu(node.gpu).rack) for curve in calibration.curves)
        calibration = replace(calibration, curves=curves)
    doubts = check_curves(calibration.curves, ranks, stated=hardware.states_links)
    found = predict(training, node, networks, calibration=calibration, site=request.site)
    return replace(found, warnings=(*warnings, *doubts, *found.warnings))


def _sized(training: Training | LanguageTraining, node: Node) -> Training | LanguageTraining:
    """The training, with what chooses the micro-batch where its recipe has ``auto``; a search tries its own.

    Raises:
        HpctrainError: it is for hosts without GPUs, whose memory no data sheet has.
    """
    recipe = training.recipe
    searched = isinstance(training, LanguageTraining) and training.mesh is None
    if recipe is None or recipe.batch.micro_batch != "auto" or searched:
        return training
    if node.gpu == CPU:
        raise HpctrainError(
            "HT-batch-auto-not-possible",
            "batch.micro_batch: auto needs the memory of the {owners}, which is not known here",
            "--set batch.micro_batch=N",
            owners="hosts",
        )
    choose = functools.partial(fitting, recipe, room=gpu(node.gpu).memory_bytes)
    return replace(training, micro_batch=functools.cache(choose))


def _require_served(node: Node, calibration: Sequence[Path]) -> None:
    """Refuse what predictions of transformers do not know.

    Raises:
        HpctrainError: another engine, or measurements.
    """
    if node.engine != "nccl" or calibration:
        raise HpctrainError(
            "HT-option-not-usable-here",
            "transformers on {gpu} are predicted over nccl, not {engine}, and without measurements",
            "leave --backend, --framework and --calibration out",
            gpu=node.gpu,
            engine=node.engine,
        )


def _engine(training: Training | LanguageTraining, request: PredictionRequest) -> str:
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
    problem = None
    if found.needs_gpus and on_cpu:
        problem = "needs GPUs, and --gpu cpu has none"
    elif not found.joins_ranks:
        problem = "is for one process"
    elif request.framework not in found.frameworks:
        problem = f"does not serve {request.framework}"
    elif not request.hardware.rdma and (on_cpu or backend in ("mpi", "gloo")):
        problem = "does not use NCCL here, which --tcp is about"
    if problem:
        raise HpctrainError(
            "HT-backend-unfit",
            "backend {backend!r} {problem}",
            "choose --backend mpi, or nccl or horovod for GPUs, or leave it out",
            backend=backend,
            problem=problem,
        )
    return backend


def _asked(training: Training | LanguageTraining, request: PredictionRequest) -> str:
    """The backend asked for, or the only one that the recipe can have."""
    if request.backend not in BACKENDS:
        raise HpctrainError(
            "HT-choice-unknown",
            "unknown backend {backend!r}",
            nearest(request.backend, BACKENDS),
            backend=request.backend,
        )
    recipe = training.recipe
    if recipe is not None and recipe.sync:
        raise HpctrainError(
            "HT-prediction-not-possible",
            "predictions are for ranks that average their gradients in every step, but sync averages parameters",
            "--set sync=null predicts the same training without it",
        )
    if recipe is None or not recipe.fault_tolerance.fault_tolerant:
        return request.backend
    if request.backend not in ("auto", "mpi"):
        raise HpctrainError(
            "HT-shrink-not-possible",
            "fault_tolerance: shrink needs --backend mpi, not {backend!r}",
            "choose --backend mpi",
            backend=request.backend,
        )
    return "mpi"


# No algorithm moves an all-reduce between hosts in less time than each needs to send its buffer once. The margin is for
# rates that are rounded up, and for times that are means over ranks.
FASTER = 1.05


def check_curves(curves: Sequence[Curve], ranks: Ranks, *, stated: bool) -> list[str]:
    """Refuse curves that contradict the nodes of a prediction, and say what is doubtful about the others.

    Args:
        curves: all that were measured; only those of the engine that reduces count.
        ranks: of the prediction, on as many nodes as any.
        stated: whether adapters and their rate were stated. A contradiction to assumed ones is a warning.

    Raises:
        HpctrainError: a curve faster than the links of its hosts.
    """
    used = [curve for curve in curves if curve.engine == ranks.measured_as and curve.ranks > 1]
    warnings: list[str] = []
    for curve in used:
        fault = _fault_of_links(curve, ranks) if curve.hosts > 1 else None
        if fault and stated:
            raise fault
        if fault:
            warnings.append(f"{fault.message}, as is assumed: {fault.hint}")
    return [*warnings, *_other_locals(used, over_nvlink(ranks))]


def _fault_of_links(curve: Curve, ranks: Ranks) -> HpctrainError | None:
    """Why the links cannot have carried a curve."""
    size, seconds = min(curve.points, key=lambda point: point[1] / point[0])
    sent, links = size / seconds, curve_rate(curve, ranks)
    if ranks.by_nccl:
        # The hosts of a rack share what leaves it.
        sent /= max(1, gpu(ranks.device.name).rack // curve.local)
    if sent <= FASTER * links:
        return None
    return HpctrainError(
        "HT-calibration-implausible",
        "--calibration {source}: each of {hosts} hosts sent at least {rate}, and the adapters that {ranks} use carry "
        "{links}",
        "state the adapters and links that were measured (--adapters-per-node, --link); or its hosts are one machine "
        "under several names, or not all of the ranks are listed",
        source=curve.source,
        hosts=curve.hosts,
        rate=f"{sent / 1e9:.3g} GB/s",
        ranks=f"{curve.local} of {ranks.local} ranks of a node" if curve.local < ranks.local else "a node's ranks",
        links=f"{links / 1e9:.3g} GB/s",
    )


def _other_locals(curves: Sequence[Curve], ranks: Ranks) -> list[str]:
    """A warning where no curve has as many ranks a node as are predicted."""
    local = sorted({curve.local for curve in curves})
    if not local or ranks.local in local:
        return []
    measured = " and ".join(map(str, local))
    what = "rank" if measured == "1" else "ranks"
    return [f"all-reduces were measured with {measured} {what} of a node, and {ranks.local} are predicted"]
