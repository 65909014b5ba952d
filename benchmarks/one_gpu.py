"""Times a step on one GPU, and its memory, against what was predicted: ``python benchmarks/one_gpu.py [ROUNDS]``.

Residual networks and the transformer of ``hpctrain bench step``, without communication, as a script trains them: eager,
images channels last, forward passes under autocast where the type is narrow.

``python benchmarks/one_gpu.py gpt [ROUNDS]``: a GPT of 1.3 billion parameters with and without recomputation: tokens a
second, model FLOPs utilisation, and peak memory beside the predicted one.
"""

from __future__ import annotations

import functools
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from shipped_workloads import OTHERS, RESIDUAL
from torch.utils.checkpoint import checkpoint

from hpctrain.common.cluster.gpu_models import gpu_reported_as, matmul_flops
from hpctrain.common.recipes.gpt import GptSettings
from hpctrain.common.workloads.workload import load_workload
from hpctrain.control.predict.network import stated_network
from hpctrain.control.predict.prediction import Node, Row
from hpctrain.control.predict.prediction_request import predict
from hpctrain.control.predict.training import script_training
from hpctrain.control.predict.transformers.layout import Layout
from hpctrain.control.predict.transformers.rank_memory import memory
from hpctrain.control.predict.values import Estimate
from hpctrain.worker.models.torch_gpt import GPT

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
        _wait()
        began = time.perf_counter()
        for _ in range(_TOGETHER):
            run()
        _wait()
        found.append((time.perf_counter() - began) / _TOGETHER)
    return statistics.median(found)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


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


def large_gpt(
    settings: GptSettings, batch: int, *, recompute: bool, rounds: int, device: str = "cuda"
) -> dict[str, Any]:
    """A GPT's step in bfloat16 with AdamW, on one batch that stays on the device.

    Returns:
        ``tokens_per_s``; and on a GPU, ``flops_utilisation``, and ``peak_bytes`` of tensors with ``predicted_bytes``.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(settings)
        x = torch.randint(settings.vocabulary, (batch, settings.context))
    if recompute:
        for block in model.blocks.values():
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    on_gpu = device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu)

    def run() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        optimizer.step()

    for _ in range(_WARM_UP):
        run()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    rate = batch * settings.context / seconds(run, rounds)
    layout = Layout(
        micro_batch=batch,
        zero=0,
        recomputation="full" if recompute else "none",
        autocast=True,
        kernels="eager",
        divided_vocabulary=False,
    )
    found: dict[str, Any] = {
        "recomputation": recompute,
        "parameters": settings.parameters,
        "tokens_per_s": rate,
        "predicted_bytes": memory(settings.transformer, layout).allocated,
    }
    if on_gpu:
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        if peak := matmul_flops(torch.cuda.get_device_name(), "bf16"):
            found["flops_utilisation"] = rate * settings.flops_per_token / peak
    return found


def gpt(rounds: str = "5") -> None:
    """Print the figures of :func:`large_gpt` for 24 layers of width 2,048."""
    settings = GptSettings(layers=24, width=2048, heads=16)
    for recompute in (False, True):
        empty()
        found = large_gpt(settings, 8, recompute=recompute, rounds=int(rounds))
        print(", ".join(f"{name} {value:.4g}" for name, value in found.items()), flush=True)


def empty() -> None:
    """Give everything back that the step before took."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    gpt(*sys.argv[2:]) if sys.argv[1:2] == ["gpt"] else main(*sys.argv[1:])
