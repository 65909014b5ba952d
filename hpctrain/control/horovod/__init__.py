"""Horovod for this machine: downloaded, adapted, compiled, cached, installed and proved."""

from __future__ import annotations

VERSION = "0.28.1"

# By --framework choice the package of the framework, and by package its title and its name in Horovod's metadata.
PACKAGES = {"torch": "torch", "keras": "tensorflow"}
TITLES = {"torch": "PyTorch", "tensorflow": "TensorFlow"}
METADATA_KEYS = {"torch": "pytorch", "tensorflow": "tensorflow"}
