"""Runs the scripts beside it one after the other: importing torch takes the longest."""

import runpy
from pathlib import Path

import torch  # noqa: F401

for name in ("ddp", "nanogpt", "fsdp1", "titan", "elastic", "fsdp2"):
    print(f"script {name}")
    runpy.run_path(str(Path(__file__).with_name(f"{name}.py")), run_name="__main__")
