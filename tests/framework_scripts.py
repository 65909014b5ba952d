"""The scripts of Lightning, Fabric, Accelerate and the Trainer on the pages, and what they print in one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from pages import ROOT, scripts

# `make test` puts the frameworks beside the environment.
_BESIDE = ROOT / ".frameworks"
SCRIPTS = {name: text for name, text in scripts().items() if name not in ("digits_torch.py", "digits_keras.py")}
VARIABLES = {
    "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(_BESIDE)))),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
# An epoch's mean is added up in float32 by Lightning and the Trainer; the training itself is in float64.
TOLERANCE = 1e-6
# Further lines of a script: without a group each rank could have trained by itself on the whole batch.
REPORT = """
import torch.distributed
if torch.distributed.is_initialized():
    print("group of", torch.distributed.get_world_size(), "over", torch.distributed.get_backend())
"""


def missing() -> str | None:
    """What makes the frameworks available; None where they are."""
    if _BESIDE.exists() or all(map(find_spec, ("lightning", "accelerate", "transformers"))):
        return None
    return "no Lightning and Transformers: make .frameworks/installed.stamp"


def losses(output: str) -> list[float]:
    """The losses that a script has printed, one an epoch."""
    found = re.findall(r"^epoch \d+ loss (\d+\.\d{12})$", output, flags=re.MULTILINE)
    return [float(loss) for loss in found]


def losses_alone(folder: Path, name: str) -> list[float]:
    """Those of a script in one process that has no hpctrain."""
    kept = [line for line in SCRIPTS[name].splitlines() if not line.endswith("  #")]
    (folder / name).write_text("\n".join(("import sys", "sys.modules['hpctrain'] = None", *kept, "")))
    done = subprocess.run(
        [sys.executable, name],
        cwd=folder,
        env={**os.environ, **VARIABLES},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(done.stdout)
