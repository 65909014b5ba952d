"""Runs the scripts of frameworks one after the other, whose imports take the longest, and says which group they had."""

import runpy
from pathlib import Path

import torch.distributed

for name in ("lightning_fit", "fabric_loop", "accelerate_loop", "trainer"):
    print(f"script {name}")
    runpy.run_path(str(Path(__file__).with_name(f"{name}.py")), run_name="__main__")
# Without a group each rank would have trained by itself on all samples, with the same losses.
print(f"group of {torch.distributed.get_world_size()} over {torch.distributed.get_backend()}")
