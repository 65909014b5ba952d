"""Predicts a training on each number of nodes: time, scaling, memory and energy, each with its interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.common.bucket_groups import BUCKET_BYTES, mpi_bucket_bytes
from hpctrain.common.cluster.gpu_models import gpu
from hpctrain.control.predict.calibration import Calibration
from hpctrain.control.predict.causes import Cause, causes_of
from hpctrain.control.predict.compute import CPU, Device
from hpctrain.control.predict.constants import Constant, constants
from hpctrain.control.predict.gpu_memory import rank_memory
from hpctrain.control.predict.job import Job, Times, times
from hpctrain.control.predict.node_energy import FIGURES, Machines, Site, energy
from hpctrain.control.predict.training import Course, Training
from hpctrain.control.predict.values import DRAWS, Estimate, Values, drawn, estimate
from hpctrain.control.topology.fabric import Floats

if TYPE_CHECKING:
    from hpctrain.control.predict.network import Network

# Ports of switches for each adapter: of a fat tree with two levels, one at the leaf and two above it.
SWITCH_PORTS = 3.0
_WIRE = {"none": 1.0, "fp16": 0.5, "bf16": 0.5}


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node of the cluster, whose nodes are all alike.

    Attributes:
        gpu: a name of :func:`hpctrain.common.cluster.gpu_models.gpus`, or ``cpu``.
        local: ranks, each with a GPU of its own, or together on the cores.
        rdma: whether its adapters have it; else NCCL uses sockets.
    """

    gpu: str
    local: int
    engine: str
    rdma: bool = True


@dataclass(frozen=True, kw_only=True)
class Row:
    """The prediction for one number of nodes.

    Attributes:
        batch_per_gpu: samples of a step of the rank that has most.
        at_once: samples that a rank computes together.
        samples_per_s: the throughput of all ranks together.
        efficiency: samples per second and node, against those of the recipe on one node.
        weak_efficiency: the same with one node's ranks having as many samples each as these.
        communication_share: what of a step is waiting for reductions.
        epochs: to the result, and ``epochs_source``: where they are from; None for a script, like all that follows
            from the length of a run.
        minutes: the time of the run with validation and checkpoints.
        memory_bytes: the memory in use on a GPU at its peak.
        largest_batch: samples that a GPU can compute at once; None on hosts without.
        memory_choices: bytes at the peak with half as many samples at once, and in bf16.
        kwh, facility_kwh, joules_per_sample, node_w, kg_co2: see
            :class:`hpctrain.control.predict.node_energy.Energy`; None for hosts without GPUs.
        tokens_per_s: of text; None for images, like all that follows.
        layout: of a transformer: the ranks along each axis, micro-batches, schedule, and what is computed again.
        step_terms, memory_terms: seconds of a step, and bytes of the rank that needs most, by cause.
        limited_by: the largest of the step's terms.
    """

    nodes: int
    gpus: int
    batch_per_gpu: float
    at_once: int
    step_s: Estimate
    samples_per_s: Estimate
    efficiency: Estimate
    weak_efficiency: Estimate
    communication_share: Estimate
    epochs: Estimate | None
    epochs_source: str | None
    minutes: Estimate | None
    memory_bytes: Estimate
    largest_batch: int | None
    memory_choices: Mapping[str, int]
    node_w: Estimate | None
    kwh: Estimate | None
    facility_kwh: Estimate | None
    joules_per_sample: Estimate | None
    kg_co2: Estimate | None
    tokens_per_s: Estimate | None = None
    layout: Mapping[str, Any] | None = None
    step_terms: Mapping[str, float] = field(default_factory=dict)
    memory_terms: Mapping[str, float] = field(default_factory=dict)
    limited_by: str | None = None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Rows by nodes, and what they rest on.

    Attributes:
        worthwhile: the nodes beyond which another one adds less than half of the throughput of the first; None if all
            in the range add more.
        constants: that the figures depend on, by name, with what a calibration made of them.
        causes: the constants that matter most for the step of the last row, by their share.
        candidates: of a search for the best mesh, those of the last row, the fastest first.
    """

    name: str
    node: Node
    rows: tuple[Row, ...]
    worthwhile: int | None
    constants: Mapping[str, Constant]
    causes: tuple[Cause, ...]
    warnings: tuple[str, ...]
    candidates: tuple[Row, ...] = ()


def predict(
    training: Training,
    node: Node,
    networks: Sequence[Network],
    *,
    calibration: Calibration = Calibration(),
    site: Site = Site(),
) -> Prediction:
    """Predict a training on each number of nodes.

    Args:
        networks: one for each number of nodes, which rises.

    Raises:
        HpctrainError: an unknown GPU, a calibration for another network or device, or a number of ranks that the
            recipe cannot have.
    """
    if node.gpu != CPU:
        gpu(node.gpu)
    device = _device(training, node, calibration)
    calibration.require_fits(training.workload.name, device.name, device.precision)
    fitted = calibration.fit(constants())
    values = drawn(fitted.constants, fitted=fitted.columns(DRAWS))
    predictor = _Predictor(
        training=training, node=node, device=device, values=values, calibration=calibration, site=site
    )
    first = predictor.run(replace(networks[0], hosts=1))
    runs = [predictor.run(network) for network in networks]
    return Prediction(
        name=training.name,
        node=node,
        rows=tuple(predictor.row(run, first) for run in runs),
        worthwhile=worthwhile(
            [(run.nodes, float(run.samples_per_s[0])) for run in ([first] if runs[0].nodes > 1 else []) + runs]
        ),
        constants={name: fitted.constants[name] for name in sorted(values.used)},
        causes=causes_of(values, runs[-1].times.total),
        warnings=_warnings(runs, training, calibration),
    )


def _device(training: Training, node: Node, calibration: Calibration) -> Device:
    """The device on which each rank computes."""
    if node.gpu != CPU:
        return Device(name=node.gpu, precision=training.precision, software=training.software)
    measured = max((sweep.ranks for sweep in calibration.sweeps), default=node.local)
    return Device(
        name=CPU,
        ranks=node.local,
        precision=training.precision,
        crowded=max(0.0, math.log2(node.local / measured)),
        polled=node.engine == "horovod",
    )


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A training on one number of nodes.

    Attributes:
        batch: samples of a step over all ranks.
        weak: the step on one node with as many samples a rank.
    """

    batch: int
    job: Job
    times: Times
    weak: Times

    @property
    def samples_per_s(self) -> Floats:
        """The throughput of all ranks, (columns,)."""
        found: Floats = self.batch / self.times.total
        return found

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self.job.network.hosts


@dataclass(frozen=True, kw_only=True)
class _Predictor:
    training: Training
    node: Node
    device: Device
    values: Values
    calibration: Calibration
    site: Site

    def run(self, network: Network) -> _Run:
        """The training on these nodes."""
        ranks = network.hosts * self.node.local
        batch = self.training.batch(ranks)
        # The rank with the most samples is the slowest one.
        job = self._job(network, batch=-(-batch // ranks), parts=self.training.parts(ranks))
        alone = replace(job, network=replace(network, hosts=1), wire=self._wire(), bucket_bytes=self._bucket_bytes(1))
        return _Run(batch=batch, job=job, times=self._times(job), weak=self._times(alone))

    def _job(self, network: Network, *, batch: int, parts: int) -> Job:
        return Job(
            workload=self.training.workload,
            network=network,
            local=self.node.local,
            device=self.device,
            engine=self.node.engine,
            batch=batch,
            parts=parts,
            bucket_bytes=self._bucket_bytes(network.hosts),
            wire=self._wire(),
            state=self.training.state,
            rdma=self.node.rdma,
            samples_per_s=self._loaded(),
        )

    def _loaded(self) -> Floats | None:
        """The samples that the input of a rank makes a second, (columns,): as measured, or by the workers it has."""
        workers = self.training.workers(self.node.gpu)
        if workers is None:
            return None
        if workers in self.calibration.loaded:
            return np.full(self.values.columns, self.calibration.loaded[workers])
        if self.training.decodes_on_gpu and self.node.gpu != CPU:
            return self.values["loader.gpu_images_per_s"]
        made: Floats = self.values["loader.images_per_s"] * max(workers, 1) ** self.values["loader.scaling"]
        return made

    def _wire(self) -> float:
        """Bytes sent for each byte of gradients."""
        return _WIRE[self.training.communication.compression]

    def _bucket_bytes(self, hosts: int) -> float:
        if self.training.communication.bucket_mb is not None:
            return self.training.communication.bucket_mb * 1e6
        if self.node.engine != "mpi":
            return BUCKET_BYTES
        return mpi_bucket_bytes(hosts=hosts, local=self.node.local, rdma=self.node.rdma)

    def _times(self, job: Job) -> Times:
        found = times(job, self.values, self.calibration.curves)
        # The error of the roofline itself, which no fit of constants reduces.
        off = np.exp(self.values.log_factor("step_residual"))
        return replace(found, total=found.total * off)

    def row(self, run: _Run, first: _Run) -> Row:
        """The figures of one number of nodes."""
        job, total = run.job, run.times.total
        course = self.training.course(job.ranks, self.values)
        seconds = None if course is None else course.epochs * self._epoch_s(run, course)
        throughput = run.samples_per_s
        held = rank_memory(self.training, job)
        return Row(
            nodes=run.nodes,
            gpus=job.ranks,
            batch_per_gpu=job.batch,
            at_once=job.at_once,
            step_s=estimate(total),
            samples_per_s=estimate(throughput),
            efficiency=estimate(throughput / run.nodes / first.samples_per_s),
            weak_efficiency=estimate(run.weak.total / total),
            communication_share=estimate(np.clip(run.times.exposed / total, 0, 1)),
            epochs=None if course is None else estimate(course.epochs),
            epochs_source=None if course is None else course.source,
            minutes=None if seconds is None else estimate(seconds / 60),
            memory_bytes=held.needed,
            largest_batch=held.largest_batch,
            memory_choices=held.choices,
            **self._energy(run, seconds),
        )

    def _epoch_s(self, run: _Run, course: Course) -> Floats:
        """Seconds of an epoch, (columns,): its steps, the validation after it, and its checkpoints."""
        one, job = run.times.compute, run.job
        forward = one.forward * course.validation_cost
        validated = forward * math.ceil(course.validated / job.ranks / job.at_once)
        training: Floats = course.steps * run.times.total
        # Ranks copy their share of the state, and write it during the following steps.
        share = 4 * (1 + job.state) * self.training.workload.parameters / job.ranks
        written = share / self.values["checkpoint_bytes_per_s"]
        copied = share / self.values["host_copy_bytes_per_s"]
        waits = copied + np.maximum(0, written - training / course.checkpoints)
        seconds: Floats = training + validated + course.checkpoints * waits
        return seconds

    def _energy(self, run: _Run, seconds: Floats | None) -> dict[str, Any]:
        """The figures of a row about energy."""
        network = run.job.network
        if self.node.gpu == CPU:
            return dict.fromkeys(FIGURES)
        found = energy(
            self.values,
            Machines(
                gpu=self.node.gpu,
                gpus_per_node=self.node.local,
                nodes=run.nodes,
                switch_ports=SWITCH_PORTS * network.rails * run.nodes if run.nodes > 1 else 0.0,
            ),
            busy=np.clip(run.times.busy / run.times.total, 0, 1),
            seconds=seconds,
            samples_per_s=run.samples_per_s,
            site=self.site,
        )
        return {name: None if columns is None else estimate(columns) for name, columns in vars(found).items()}


def worthwhile(rates: Sequence[tuple[int, float]]) -> int | None:
    """The last number of nodes up to which each one more adds at least half of what the first one does.

    Args:
        rates: numbers of nodes, rising, and what they do in a second.
    """
    half = rates[0][1] / rates[0][0] / 2
    for (nodes, rate), (more, faster) in pairwise(rates):
        if (faster - rate) / (more - nodes) < half:
            return nodes
    return None


def _warnings(runs: Sequence[_Run], training: Training, calibration: Calibration) -> tuple[str, ...]:
    job = runs[-1].job
    found = [warning for run in runs for warning in run.job.network.warnings]
    found.extend(idle_warnings([run.nodes for run in runs if run.job.ranks > run.batch]))
    found.extend(training.assumptions)
    if job.samples_per_s is not None and training.workers(job.device.name) not in calibration.loaded:
        found.append(_decoding(runs, training))
    if job.device.name == CPU and not calibration.sweeps:
        found.append("the speed of the cores is assumed: hpctrain bench step --sweep --json measures it")
    if job.device.name != CPU and job.engine in ("mpi", "gloo"):
        found.append(
            f"assumed about {job.engine}: the time of copies between GPUs and hosts; it was measured on CPUs only"
        )
    engines = {curve.engine for curve in calibration.curves}
    if engines and ("nccl" if job.engine == "horovod" and job.device.name != CPU else job.engine) not in engines:
        found.append(f"no all-reduce of {job.engine} was measured, only of {', '.join(sorted(engines))}")
    return tuple(dict.fromkeys(found))


def idle_warnings(nodes: Sequence[int]) -> list[str]:
    """What is said about the numbers of nodes that have more ranks than samples."""
    what = "there are more ranks than samples in a step, so some have none"
    return [f"on {nodes_text(nodes[:1])} {what}"] if nodes else []


def nodes_text(nodes: Sequence[int]) -> str:
    """Numbers of nodes in words, such as ``1, 2 nodes``."""
    return f"{', '.join(map(str, nodes))} node{'s' if list(nodes) != [1] else ''}"


def _decoding(runs: Sequence[_Run], training: Training) -> str:
    """What is assumed about the input, and where it bounds the step."""
    rates = [(run, run.job.samples_per_s) for run in runs if run.job.samples_per_s is not None]
    needed = {run.nodes: run.job.batch / float(run.times.unfed[0]) for run, _ in rates}
    bound = [run.nodes for run, made in rates if made[0] < needed[run.nodes]]
    said = f", which bounds the step on {nodes_text(bound)}" if bound else ""
    workers = training.workers(runs[-1].job.device.name)
    how = "the GPU decodes" if training.decodes_on_gpu else f"{workers} workers a rank decode"
    return (
        f"{how} about {rates[-1][1][0]:.0f} images/s, and up to "
        f"{max(needed.values()):.0f} are taken{said} (--set data.workers=N; bench loader --json measures it)"
    )
