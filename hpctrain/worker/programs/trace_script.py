"""``python -m hpctrain.worker.programs.trace_script OUT SCRIPT [ARGUMENT …]``: runs a script until its first step.

Writes OUT: ``{"workload": …}``, or ``{"error": …}`` for what the user can correct. Without OUT the script ended before.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from hpctrain.common.errors import HpctrainError
from hpctrain.common.run.directory import write_json
from hpctrain.common.workloads.workload import Workload
from hpctrain.worker import adapters


def main(out: Path, script: Path, arguments: list[str]) -> None:
    from hpctrain.worker.tracing.script import ScriptTracer

    def traced(workload: Workload) -> None:
        _end(out, {"workload": workload.model_dump(mode="json", exclude_defaults=True)})

    def distribute(model: Any, optimizer: Any, **settings: Any) -> Any:
        _require_torch(model)
        return own(model, optimizer, **settings)

    own = adapters.distribute
    adapters.distribute = distribute
    try:
        ScriptTracer(traced)
        sys.argv = [str(script), *arguments]
        sys.path[0] = str(script.parent)
        runpy.run_path(str(script), run_name="__main__")
    except HpctrainError as error:
        _end(out, {"error": error.record()})


def _require_torch(model: Any) -> None:
    if any(kind.__module__.partition(".")[0] == "keras" for kind in type(model).__mro__):
        raise HpctrainError(
            "HT-only-in-pytorch",
            "the script trains a Keras model, but only PyTorch networks can be traced",
            "trace the same network in PyTorch: ht.trace(model, batch, loss)",
        )


def _end(out: Path, answer: dict[str, Any]) -> None:
    """Nothing of the script runs after this, neither its handlers of exceptions nor those of its exit."""
    write_json(out, answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
