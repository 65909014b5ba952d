"""Predicts a training in which each rank has the whole model, by the layers of its network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.common.bucket_groups import BUCKET_BYTES, mpi_bucket_bytes
from hpctrain.common.cluster.gpu_models import gpu
from hpctrain.control.predict.calibration import Calibration
from hpctrain.control.predict.causes import causes_of
from hpctrain.control.predict.compute import CPU, Device
from hpctrain.control.predict.constants import constants
from hpctrain.control.predict.job import Job, Times, times
from hpctrain.control.predict.layer_memory import MemorySettings, memory
from hpctrain.control.predict.memory import fewer, most_samples
from hpctrain.control.predict.node_energy import Site
from hpctrain.control.predict.prediction import Length, Node, Prediction, Run, idle_warnings, nodes_text, worthwhile
from hpctrain.control.predict.training import Course, Training
from hpctrain.control.predict.values import Estimate, Values
from hpctrain.control.topology.fabric import Floats

if TYPE_CHECKING:
    from hpctrain.control.predict.network import Network

_WIRE = {"none": 1.0, "fp16": 0.5, "bf16": 0.5}


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
    values = calibration.values(constants())
    predictor = _Predictor(training=training, node=node, device=device, values=values, calibration=calibration)
    alone, *steps = (predictor.step(network) for network in (replace(networks[0], hosts=1), *networks))
    reference: Floats = alone.batch / alone.times.total
    runs = [predictor.run(step) for step in steps]
    rates = [(1, float(reference[0])), *((run.network.hosts, float(run.samples_per_s[0])) for run in runs)]
    return Prediction(
        name=training.name,
        node=node,
        rows=tuple(run.row(reference, values, site) for run in runs),
        worthwhile=worthwhile(rates[rates[1][0] == 1 :]),
        constants={name: values.constants[name] for name in sorted(values.used)},
        causes=causes_of(values, runs[-1].total),
        warnings=_warnings(steps, training, calibration),
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
class _Step:
    """A step on one number of nodes.

    Attributes:
        batch: samples of all ranks.
    """

    batch: int
    job: Job
    times: Times

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

    def step(self, network: Network) -> _Step:
        """A step on these nodes."""
        ranks = network.hosts * self.node.local
        batch = self.training.batch(ranks)
        job = Job(
            workload=self.training.workload,
            network=network,
            local=self.node.local,
            device=self.device,
            engine=self.node.engine,
            # The rank with the most samples is the slowest one.
            batch=-(-batch // ranks),
            parts=self.training.parts(ranks),
            bucket_bytes=self._bucket_bytes(network.hosts),
            # Bytes sent for each byte of gradients.
            wire=_WIRE[self.training.communication.compression],
            state=self.training.state,
            rdma=self.node.rdma,
            samples_per_s=self._loaded(),
        )
        return _Step(batch=batch, job=job, times=self._times(job))

    def run(self, step: _Step) -> Run:
        """The training by such steps."""
        job, total = step.job, step.times.total
        course = self.training.course(job.count, self.values)
        return Run(
            node=self.node,
            network=job.network,
            batch=step.batch,
            batch_per_gpu=job.batch,
            at_once=job.at_once,
            total=total,
            waits=np.clip(step.times.exposed / total, 0, 1),
            busy=np.clip(step.times.busy / total, 0, 1),
            length=None if course is None else self._length(step, course),
            figures=memory_figures(self.training, job),
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

    def _length(self, step: _Step, course: Course) -> Length:
        """The steps of all epochs, the validation after each, and its checkpoints."""
        job = step.job
        forward = step.times.compute.forward * course.validation_cost
        validated = forward * math.ceil(course.validated / job.count / job.at_once)
        training: Floats = course.steps * step.times.total
        # Ranks copy their share of the state, and write it during the following steps.
        share = 4 * (1 + job.state) * self.training.workload.parameters / job.count
        written = share / self.values["checkpoint_bytes_per_s"]
        copied = share / self.values["host_copy_bytes_per_s"]
        waits = copied + np.maximum(0, written - training / course.checkpoints)
        epoch = training + validated + course.checkpoints * waits
        return Length(epochs=course.epochs, source=course.source, seconds=course.epochs * epoch)


def memory_figures(training: Training, job: Job) -> dict[str, Any]:
    """The figures of a row about memory, at a training's largest images."""
    settings = MemorySettings(
        optimizer=training.optimizer,
        precision=training.precision,
        bucket_bytes=job.bucket_bytes if job.count > 1 else None,
        in_place=job.in_place,
        compressed=job.wire < 1,
        parts=job.parts,
        fused=True,
    )
    on_gpu = job.device.name != CPU

    def needed(batch: int, changed: MemorySettings) -> Estimate:
        return memory(training.largest, batch=batch, settings=changed).estimate(on_gpu=on_gpu)

    def fits(batch: int) -> bool:
        return needed(batch, settings).value <= gpu(job.device.name).memory_bytes

    taken = needed(job.at_once, settings)
    choices = {
        "half the samples at once": needed(-(-job.at_once // 2), replace(settings, parts=2 * settings.parts)).value,
        "bf16": needed(job.at_once, replace(settings, precision="bf16")).value,
    }
    return {
        "memory_bytes": taken,
        "largest_batch": most_samples(fits) if on_gpu else None,
        "memory_choices": fewer(taken.value, choices),
    }


def _warnings(steps: Sequence[_Step], training: Training, calibration: Calibration) -> tuple[str, ...]:
    job = steps[-1].job
    found = [warning for step in steps for warning in step.job.network.warnings]
    found.extend(idle_warnings([step.nodes for step in steps if step.job.count > step.batch]))
    found.extend(training.assumptions)
    if job.samples_per_s is not None and training.workers(job.device.name) not in calibration.loaded:
        found.append(_decoding(steps, training))
    if job.device.name == CPU and not calibration.sweeps:
        found.append("the speed of the cores is assumed: hpctrain bench step --sweep --json measures it")
    if job.device.name != CPU and job.engine in ("mpi", "gloo"):
        found.append(
            f"assumed about {job.engine}: the time of copies between GPUs and hosts; it was measured on CPUs only"
        )
    engines = {curve.engine for curve in calibration.curves}
    if engines and job.measured_as not in engines:
        found.append(f"no all-reduce of {job.engine} was measured, only of {', '.join(sorted(engines))}")
    return tuple(dict.fromkeys(found))


def _decoding(steps: Sequence[_Step], training: Training) -> str:
    """What is assumed about the input, and where it bounds the step."""
    rates = [(step, step.job.samples_per_s) for step in steps if step.job.samples_per_s is not None]
    needed = {step.nodes: step.job.batch / float(step.times.unfed[0]) for step, _ in rates}
    bound = [step.nodes for step, made in rates if made[0] < needed[step.nodes]]
    said = f", which bounds the step on {nodes_text(bound)}" if bound else ""
    workers = training.workers(steps[-1].job.device.name)
    how = "the GPU decodes" if training.decodes_on_gpu else f"{workers} workers a rank decode"
    return (
        f"{how} about {rates[-1][1][0]:.0f} images/s, and up to "
        f"{max(needed.values()):.0f} are taken{said} (--set data.workers=N; bench loader --json measures it)"
    )
