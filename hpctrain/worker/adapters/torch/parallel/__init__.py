"""Models divided over a mesh, by PyTorch's own parts: FSDP2, tensor parallelism and pipelines."""

from __future__ import annotations

from hpctrain.worker.adapters.torch.parallel.parallel_plan import ParallelPlan
from hpctrain.worker.adapters.torch.parallel.pipeline import Pipeline
from hpctrain.worker.adapters.torch.parallel.sharding import device_mesh, mesh

__all__ = ["ParallelPlan", "Pipeline", "device_mesh", "mesh"]
