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
from hpctrain.control.predict.allreduce_time import Ranks, check_curves
from hpctrain.control.predict.compute import CPU, Device
from hpctrain.control.predict.image_prediction import ImagePredictor
from hpctrain.control.predict.measurements import Calibration, read_calibration
from hpctrain.control.predict.micro_batch import fitting
from hpctrain.control.predict.network import Hardware
from hpctrain.control.predict.prediction import Node, Prediction, Run, Site, nodes_text
from hpctrain.control.predict.training import Training, recipe_training
from hpctrain.control.predict.transformers.language_prediction import LanguagePredictor
from hpctrain.control.predict.transformers.language_training import LanguageTraining, recipe_language_training
from hpctrain.control.predict.values import constants

if TYPE_CHECKING:
    from hpctrain.common.recipes.schema import Recipe
    from hpctrain.control.predict.network import Network

# Of a search, so many layouts are predicted with their ranges.
_MOST_CANDIDATES = 50


@dataclass(frozen=True, kw_only=True)
class PredictionRequest:
    """The hardware and options of a prediction for numbers of nodes, in rising order."""

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
    """The prediction; an error for hardware that is not known, or not whole, and for files of something else."""
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
    calibration, unstated = Calibration(), tuple[str, ...]()
    if isinstance(training, LanguageTraining):
        if node.engine != "nccl" or request.calibration:
            raise HpctrainError(
                "HT-option-not-usable-here",
                "transformers on {gpu} are predicted over nccl, not {engine}, and without measurements",
                "leave --backend, --framework and --calibration out",
                gpu=node.gpu,
                engine=node.engine,
            )
        unstated = () if hardware.states_links else ("network",)
    else:
        training = replace(training, framework=request.framework)
        calibration = read_calibration(request.calibration)
        device = Device(name=node.gpu)
        ranks = Ranks(network=networks[-1], local=node.local, device=device, engine=node.engine, rdma=node.rdma)
        if ranks.by_nccl:
            curves = tuple(curve.in_rack(gpu(node.gpu).rack) for curve in calibration.curves)
            calibration = replace(calibration, curves=curves)
        warnings = (*warnings, *check_curves(calibration.curves, ranks, stated=hardware.states_links))
    found = predict(training, node, networks, calibration=calibration, site=request.site, unstated=unstated)
    return replace(found, warnings=(*warnings, *found.warnings))


def predict(
    training: Training | LanguageTraining,
    node: Node,
    networks: Sequence[Network],
    *,
    calibration: Calibration = Calibration(),
    site: Site = Site(),
    unstated: tuple[str, ...] = (),
) -> Prediction:
    """Predict a training on each number of nodes.

    Args:
        networks: one for each number of nodes, which rises.
        calibration: for images alone.
        unstated: for transformers, what was assumed, as columns of ``ranges.yaml``.
    """
    if node.gpu != CPU:
        gpu(node.gpu)
    if not isinstance(training, LanguageTraining):
        calibration.require_fits(training.workload.name, node.gpu, training.precision)
    values = calibration.values(constants())
    predictors: list[ImagePredictor | LanguagePredictor] = [
        LanguagePredictor(training, node, network, values, unstated)
        if isinstance(training, LanguageTraining)
        else ImagePredictor(training, node, network, values, calibration)
        for network in networks
    ]
    *others, last = predictors
    runs: list[Run] = [predictor.runs(1)[0] for predictor in others]
    fastest, *slower = last.runs(_MOST_CANDIDATES)
    runs.append(fastest)
    first = predictors[0].alone(runs[0])
    reference = first.samples_per_s / first.network.hosts
    rows = [run.row(reference, values, site) for run in runs]
    searched = isinstance(training, LanguageTraining) and training.mesh is None
    candidates = [rows[-1], *(run.row(reference, values, site) for run in slower)] if searched else []
    further = last.further_constants() if isinstance(last, LanguagePredictor) else {}
    warnings = list(last.warnings(runs))
    if idle := [run.network.hosts for run in runs if run.data_ranks > run.batch]:
        warnings.append(f"on {nodes_text(idle[:1])} there are more ranks than samples in a step, so some have none")
    return Prediction(
        name=training.name,
        node=node,
        rows=tuple(rows),
        causes=last.causes(fastest),
        constants={name: values.constants[name] for name in sorted(values.used)} | further,
        warnings=tuple(dict.fromkeys(warnings)),
        candidates=tuple(candidates),
    )


def _sized(training: Training | LanguageTraining, node: Node) -> Training | LanguageTraining:
    """The training, with what chooses the micro-batch where its recipe has ``auto``; a search tries its own."""
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


def _engine(training: Training | LanguageTraining, request: PredictionRequest) -> str:
    """The engine that a run would choose there."""
    backend, on_cpu = _asked(training, request), request.hardware.gpu == CPU
    if backend == "auto":
        if on_cpu:
            return "mpi"
        return "nccl" if request.framework == "torch" else "horovod"
    found = CAPABILITIES[backend]
    if found.needs_gpus and on_cpu:
        problem = "needs GPUs, and --gpu cpu has none"
    elif not found.joins_ranks:
        problem = "is for one process"
    elif request.framework not in found.frameworks:
        problem = f"does not serve {request.framework}"
    elif not request.hardware.rdma and (on_cpu or backend in ("mpi", "gloo")):
        problem = "does not use NCCL here, which --tcp is about"
    else:
        return backend
    raise HpctrainError(
        "HT-backend-unfit",
        "backend {backend!r} {problem}",
        "choose --backend mpi, or nccl or horovod for GPUs, or leave it out",
        backend=backend,
        problem=problem,
    )


def _asked(training: Training | LanguageTraining, request: PredictionRequest) -> str:
    """The backend asked for, or the only one that the recipe can have."""
    backend = request.backend
    if backend not in BACKENDS:
        valid = nearest(backend, BACKENDS)
        raise HpctrainError("HT-choice-unknown", "unknown backend {backend!r}", valid, backend=backend)
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
            "fault_tolerance.lost_rank: shrink needs --backend mpi, not {backend!r}",
            "choose --backend mpi",
            backend=request.backend,
        )
    return "mpi"
