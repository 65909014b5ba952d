"""Times a step on one GPU, and its memory, against what was predicted: ``python benchmarks/one_gpu.py [ROUNDS]``.

Residual networks and the transformer of ``hpctrain bench step``, without communication, as a script trains them: eager,
images channels last, forward passes under autocast where the type is narrow.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable

import torch

from hpctrain.common.cluster.gpu_models import gpu_reported_as
from hpctrain.common.workloads.workload import load_workload
from hpctrain.control.predict.network import stated_network
from hpctrain.control.predict.prediction import Node, Row, predict
from hpctrain.control.predict.training import script_training
from hpctrain.control.predict.values import Estimate
from hpctrain.worker.programs.workloads import OTHERS, RESIDUAL

_WARM_UP, _TOGETHER = 4, 5
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_CASES = [
    *itertools.product(["resnet50"], ["float32", "bf16"], [32, 64, 128, 256]),
    ("resnet101", "bf16", 128),
    ("resnet18", "bf16", 256),
    *itertools.product(["transformer"], ["float32", "bf16"], [32, 256]),
]


def step(name: str, precision: str, batch: int, *, cached: bool = True) -> Callable[[], None]:
    """One training step with SGD and momentum on the GPU, on one batch that stays there."""
    model = (RESIDUAL | OTHERS)[name]().cuda()
    sample = load_workload(name).sample
    if sample.dtype == "int64":
        x = torch.randint(0, 100, (batch, *sample.shape), device="cuda")
        y = torch.randint(0, 100, x.shape, device="cuda")
    else:
        model = model.to(memory_format=torch.channels_last)
        x = torch.randn(batch, 3, 224, 224, device="cuda").contiguous(memory_format=torch.channels_last)
        y = torch.randint(0, 1000, (batch,), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def run() -> None:
        optimizer.zero_grad()
        # A recording must not take weights that were converted before it began.
        with torch.autocast("cuda", _TYPES.get(precision), enabled=precision in _TYPES, cache_enabled=cached):
            # Nothing but the loss outlives the forward pass.
            loss = torch.nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()

    return run


def seconds(run: Callable[[], None], rounds: int) -> float:
    """The median time of a step."""
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(_TOGETHER):
            run()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - began) / _TOGETHER)
    return statistics.median(found)


def eager(name: str, precision: str, batch: int, rounds: int) -> tuple[float, int, int, int]:
    """Seconds of a step; and bytes: of tensors at their peak, that the allocator then held, and that were taken of the
    GPU: by this process, its CUDA context included, if nobody else uses it.
    """
    run = step(name, precision, batch)
    for _ in range(_WARM_UP):
        run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    median = seconds(run, rounds)
    free, total = torch.cuda.mem_get_info()
    return median, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), total - free


def replayed(name: str, precision: str, batch: int, rounds: int) -> float:
    """Seconds of the same step where a CUDA graph starts its kernels, and no Python."""
    run = step(name, precision, batch, cached=False)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        for _ in range(_WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return seconds(graph.replay, rounds)


def predicted(name: str, precision: str, batch: int, gpu: str) -> Row:
    """The same by ``hpctrain predict`` without measurements."""
    training = script_training(load_workload(name), per_rank=batch, precision=precision)
    node = Node(gpu=gpu, local=1, engine="nccl")
    return predict(training, node, [stated_network(1, adapters=1, bytes_per_s=1e9)]).rows[0]


def compared(real: float, said: Estimate, scale: float) -> str:
    """Cells of a table: measured, predicted with its range, how far apart."""
    low, value, high = (each * scale for each in (said.low, said.value, said.high))
    missed = "" if low <= real * scale <= high else " *"
    return f"{real * scale:.1f} | {value:.1f} [{low:.1f}, {high:.1f}]{missed} | {value / (real * scale) - 1:+.1%}"


def main(rounds: str = "7") -> None:
    gpu = gpu_reported_as(torch.cuda.get_device_name())
    if gpu is None:
        raise SystemExit(f"no data sheet of {torch.cuda.get_device_name()}")
    print(f"{gpu}, PyTorch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    print("| network | type | batch | eager, ms | replayed, ms | predicted | error |", end="")
    print(" tensors, MB | held | of the GPU | predicted | error |")
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    found = []
    for case in _CASES:
        empty()
        found.append(eager(*case, int(rounds)))
    # Not in between: a graph's memory is not given back at once.
    for case, (eager_s, tensors, held, taken) in zip(_CASES, found, strict=True):
        name, precision, batch = case
        empty()
        row = predicted(name, precision, batch, gpu)
        times = f"{eager_s * 1e3:.1f} | {compared(replayed(*case, int(rounds)), row.step_s, 1e3)}"
        memory = f"{tensors / 1e6:.1f} | {held / 1e6:.1f} | {compared(taken, row.memory_bytes, 1e-6)}"
        print(f"| {name} | {precision} | {batch} | {times} | {memory} |", flush=True)


def empty() -> None:
    """Give everything back that the step before took."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main(*sys.argv[1:])
