"""Files that others can write are opened by :mod:`hpctrain.common.files` alone, which never waits and has bounds."""

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
        "worker.energy_meter",
        "common.cluster.interfaces",
        "worker.comm.stalls",
        "common.cluster.cores",
        "common.cluster.machine",
    },
    "of this installation": {
        "commit",
        "control.horovod.adapt",
        "control.horovod.cuda",
        "control.horovod.fingerprint",
        "control.horovod.wheel",
        "common.workloads.workload",
    },
    "of this very command, in a temporary folder of its own": {
        "worker.bench.allreduce",
        "worker.bench.loader_rates",
        "worker.bench.step",
        "worker.bench.sweep",
        "control.doctor.diagnosis",
        "control.programs.bench",
        "control.programs.traced_script",
        "worker.programs.links",
    },
    "written where the user says": {"report.output"},
    "a folder, of which nothing is read": {"common.run.records"},
    "made anew, or opened with private() as opener": {
        "common.checkpoints.manifest",
        "common.checkpoints.publish",
        "common.checkpoints.share",
        "report.tracking.tensorboard_files",
        "common.run.directory",
        "common.run.events.writer",
        "common.run.stopping",
    },
    "the user's own terminal, or what the user's command reads": {"worker.train.rank"},
    "the memory of the rank that started this process": {"worker.data.workers"},
    "the null device": {
        "cli.program",
        "cli.verify",
        "report.output",
        "worker.verify.recorder",
    },
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
            if opens and not in_memory:
                yield node


def test_nobody_else_opens_files() -> None:
    found = set()
    for path in _PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(_PACKAGE).with_suffix("").parts)
        if not module.startswith(("common.files.", "common.shards.")) and any(_openings(ast.parse(path.read_text()))):
            found.add(module)
    allowed = set().union(*_ALLOWED.values())
    assert found - allowed == set(), "use hpctrain.common.files.regular, or say here why not"
    assert allowed - found == set(), "no longer needed here"
