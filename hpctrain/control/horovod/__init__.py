"""Horovod for this machine: downloaded, adapted, compiled, cached, installed and proved."""

from __future__ import annotations

VERSION = "0.28.1"

# The package of each --framework choice, and the title and Horovod's name of each package.
PACKAGES = {"torch": "torch", "keras": "tensorflow"}
TITLES = {"torch": "PyTorch", "tensorflow": "TensorFlow"}
METADATA_KEYS = {"torch": "pytorch", "tensorflow": "tensorflow"}
