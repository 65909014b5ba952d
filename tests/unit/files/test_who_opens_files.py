"""Files that others can write are opened by :mod:`hpctrain.files` alone, which waits for nobody and has bounds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import hpctrain

_PACKAGE = Path(hpctrain.__file__).parent
_METHODS = frozenset(("read_text", "read_bytes", "write_text", "write_bytes"))
_OPENERS = frozenset(("open", "os.open", "io.open", "tarfile.open", "gzip.open", "np.load", "np.memmap", "torch.load"))

# What opens files by itself, and why it may.
_ALLOWED = {
    "the kernel's": {
        "bench.memory",
        "cluster.energy",
        "cluster.rdma",
        "comm.stacks",
        "doctor.facts",
        "launch.open_mpi_folder",
        "topology.machine_cores",
    },
    "of this installation": {
        "batch.script",
        "cluster.gpu_models",
        "cluster.packing.editables",
        "cluster.packing.environment",
        "cluster.packing.pack",
        "commit",
        "horovod.adapt",
        "horovod.cuda",
        "horovod.installed",
        "horovod.source",
        "horovod.wheel",
        "predict.constants",
        "predict.workload",
    },
    "of this very command, in a temporary folder of its own": {
        "bench.allreduce",
        "bench.checkpoint",
        "bench.collectives",
        "bench.loader",
        "bench.mesh_step",
        "bench.photographs",
        "bench.raw_decode",
        "bench.step",
        "bench.sweep",
        "doctor.start",
        "programs.bench",
        "programs.trace",
        "rank_programs.links",
    },
    "written where the user says": {"cli.output_files"},
    "a folder, of which nothing is read": {"run.held"},
    "made anew, or opened with private() as opener": {
        "checkpoints.manifest",
        "checkpoints.publish",
        "checkpoints.share",
        "report.tensorboard",
        "run.directory",
        "run.events.writer",
        "run.stopping",
    },
    "a folder, to hold it": {"launch.open_mpi_folder", "run.held"},
    "images that the benchmark was given": {"bench.other_loaders"},
    "the null device": {"cli.streams", "report.say", "report.tracking.__main__"},
}


def _openings(tree: ast.Module) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            # Images and archives in memory are not files.
            in_memory = any("BytesIO" in ast.unparse(each) or "fileobj" in ast.unparse(each) for each in node.args)
            in_memory |= any(each.arg == "fileobj" for each in node.keywords)
            method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            opens = name in _OPENERS or method in _METHODS or method == "open"
            if opens and not in_memory and not name.startswith("self._tracking."):
                yield node


def test_nobody_else_opens_files() -> None:
    found = set()
    for path in _PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(_PACKAGE).with_suffix("").parts)
        if not module.startswith(("files.", "shards.", "report.progress")) and any(
            _openings(ast.parse(path.read_text()))
        ):
            found.add(module)
    allowed = set().union(*_ALLOWED.values())
    assert found - allowed == set(), "use hpctrain.files.regular, or say here why not"
    assert allowed - found == set(), "no longer needed here"
