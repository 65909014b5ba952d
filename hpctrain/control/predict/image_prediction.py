"""Predicts a training in which each rank has the whole model, by the layers of its network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.common.bucket_groups import BUCKET_BYTES, mpi_bucket_bytes
from hpctrain.common.cluster.gpu_models import gpu
from hpctrain.control.predict.compute import CPU, Device
from hpctrain.control.predict.job import Job, Times, times
from hpctrain.control.predict.measurements import Calibration
from hpctrain.control.predict.memory import MemorySettings, memory, most_samples
from hpctrain.control.predict.prediction import Node, Run, nodes_text
from hpctrain.control.predict.training import Training
from hpctrain.control.predict.values import Cause, Estimate, Values, causes_of
from hpctrain.control.topology.fabric import Floats

if TYPE_CHECKING:
    from hpctrain.control.predict.network import Network

_WIRE = {"none": 1.0, "fp16": 0.5, "bf16": 0.5}


@dataclass(frozen=True, kw_only=True)
class ImageRun(Run):
    """A run with the events of its step."""

    job: Job
    times: Times


@dataclass(frozen=True)
class ImagePredictor:
    """One training on one number of nodes, by the constants after a calibration."""

    training: Training
    node: Node
    network: Network
    values: Values
    calibration: Calibration = Calibration()

    def runs(self, most: int) -> list[ImageRun]:
        """The training, in the only layout that it has."""
        job = self._job()
        step = times(job, self.values, self.calibration)
        # The error of the roofline itself, which no fit of constants reduces.
        total = step.total * np.exp(self.values.log_factor("step_residual"))
        run = ImageRun(
            node=self.node,
            network=job.network,
            batch=self.training.batch(job.count),
            data_ranks=job.count,
            batch_per_gpu=job.batch,
            at_once=job.at_once,
            total=total,
            waits=np.clip(step.exposed / total, 0, 1),
            busy=np.clip(step.busy / total, 0, 1),
            length=self.training.length(job.count, job.at_once, step.compute.forward, total, self.values),
            figures=memory_figures(self.training, job),
            job=job,
            times=step,
        )
        return [run]

    def alone(self, run: Run) -> Run:
        """The training on one node, which efficiency is against."""
        return replace(self, network=replace(self.network, hosts=1)).runs(1)[0]

    def _job(self) -> Job:
        training, node, hosts = self.training, self.node, self.network.hosts
        ranks, bucket_bytes = hosts * node.local, BUCKET_BYTES
        device = Device(name=node.gpu, precision=training.precision, software=training.software)
        if node.gpu == CPU:
            measured = max((sweep.ranks for sweep in self.calibration.sweeps), default=node.local)
            crowded = max(0.0, math.log2(node.local / measured))
            polled = node.engine == "horovod"
            device = replace(device, ranks=node.local, crowded=crowded, polled=polled, software=None)
        if training.communication.bucket_mb is not None:
            bucket_bytes = training.communication.bucket_mb * 1e6
        elif node.engine == "mpi":
            bucket_bytes = mpi_bucket_bytes(hosts=hosts, local=node.local, rdma=node.rdma)
        return Job(
            workload=training.workload,
            network=self.network,
            local=node.local,
            device=device,
            engine=node.engine,
            # The rank with the most samples is the slowest one.
            batch=-(-training.batch(ranks) // ranks),
            parts=training.parts(ranks),
            bucket_bytes=bucket_bytes,
            # Bytes sent for each byte of gradients.
            wire=_WIRE[training.communication.compression],
            state=training.state,
            rdma=node.rdma,
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

    def causes(self, run: Run) -> tuple[Cause, ...]:
        """What makes the range of a step as wide as it is."""
        return causes_of(self.values, run.total)

    def warnings(self, runs: Sequence[Run]) -> Iterator[str]:
        """What is assumed about all runs, of which this predictor made the last."""
        training, node, measured = self.training, self.node, self.calibration
        for run in runs:
            yield from run.network.warnings
        yield from training.assumptions
        fed = [run for run in runs if isinstance(run, ImageRun) and run.job.samples_per_s is not None]
        if fed and training.workers(node.gpu) not in measured.loaded:
            yield _decoding(fed, training)
        if node.gpu == CPU and not measured.sweeps:
            yield "the speed of the cores is assumed: hpctrain bench step --sweep --json measures it"
        if node.gpu != CPU and node.engine in ("mpi", "gloo"):
            copies = "the time of copies between GPUs and hosts; it was measured on CPUs only"
            yield f"assumed about {node.engine}: {copies}"
        engines = {curve.engine for curve in measured.curves}
        if engines and self._job().measured_as not in engines:
            yield f"no all-reduce of {node.engine} was measured, only of {', '.join(sorted(engines))}"


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

    def needed(batch: int) -> Estimate:
        return memory(training.largest, batch=batch, settings=settings).estimate(on_gpu=on_gpu)

    def fits(batch: int) -> bool:
        return needed(batch).value <= gpu(job.device.name).memory_bytes

    return {"memory_bytes": needed(job.at_once), "largest_batch": most_samples(fits) if on_gpu else None}


def _decoding(runs: Sequence[ImageRun], training: Training) -> str:
    """What is assumed about the input, and where it bounds the step."""
    made = runs[-1].job.samples_per_s
    assert made is not None
    needed = {run.network.hosts: run.job.batch / float(run.times.unfed[0]) for run in runs}
    bound = [nodes for nodes, taken in needed.items() if made[0] < taken]
    said = f", which bounds the step on {nodes_text(bound)}" if bound else ""
    workers = training.workers(runs[-1].node.gpu)
    how = "the GPU decodes" if training.decodes_on_gpu else f"{workers} workers a rank decode"
    return (
        f"{how} about {made[0]:.0f} images/s, and up to {max(needed.values()):.0f} are taken{said} "
        "(--set data.workers=N; bench loader --json measures it)"
    )
