"""Horovod for this machine: downloaded, adapted, compiled, cached, installed and proved."""

from __future__ import annotations

VERSION = "0.28.1"

# What Horovod and its metadata call the framework of each --framework choice.
PACKAGES = {"torch": "torch", "keras": "tensorflow"}
TITLES = {"torch": "PyTorch", "tensorflow": "TensorFlow"}
METADATA_KEYS = {"torch": "pytorch", "tensorflow": "tensorflow"}
