"""Scripts of Lightning, Fabric, Accelerate and the Trainer, and what they print in one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from support.pages import ROOT

# `make test` puts the frameworks beside the environment.
_BESIDE = ROOT / ".frameworks"
SCRIPTS = {
    f"digits_{name}.py": (Path(__file__).parent / "frameworks" / f"digits_{name}.py").read_text()
    for name in ("lightning", "fabric", "accelerate", "trainer")
}
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
    print(f"group of {torch.distributed.get_world_size()} over {torch.distributed.get_backend()}")
"""


def missing() -> str | None:
    """What makes the frameworks available; None where they are."""
    if _BESIDE.exists() or all(map(find_spec, ("lightning", "accelerate", "transformers"))):
        return None
    return "no Lightning and Transformers: make .frameworks/installed.stamp"


def write_all(folder: Path, *, without_hpctrain: bool = False) -> str:
    """Write all scripts, and one that runs them one after the other: importing the frameworks takes the longest.

    Returns:
        Its name.
    """
    head = "import runpy, sys\n"
    for name, text in SCRIPTS.items():
        lines = text.splitlines(keepends=True)
        if without_hpctrain:
            lines = [line for line in lines if not line.endswith("  #\n")]
        (folder / name).write_text("".join(lines))
    if without_hpctrain:
        head += "sys.modules['hpctrain'] = None\n"
    body = "".join(f"print('script {name}')\nrunpy.run_path({name!r}, run_name='__main__')\n" for name in SCRIPTS)
    (folder / "all_scripts.py").write_text(head + body + ("" if without_hpctrain else REPORT))
    return "all_scripts.py"


def losses(output: str) -> list[float]:
    """The losses that a script has printed, one an epoch."""
    found = re.findall(r"^epoch \d+ loss (\d+\.\d{12})$", output, flags=re.MULTILINE)
    return [float(loss) for loss in found]


def losses_of_all(output: str) -> dict[str, list[float]]:
    """Those of each script, of what :func:`write_all` wrote."""
    parts = re.split(r"^script (\w+\.py)$", output, flags=re.MULTILINE)
    return {name: losses(part) for name, part in zip(parts[1::2], parts[2::2], strict=True)}


def losses_alone(folder: Path) -> dict[str, list[float]]:
    """Those of each script in one process that has no hpctrain."""
    done = subprocess.run(
        [sys.executable, write_all(folder, without_hpctrain=True)],
        cwd=folder,
        env={**os.environ, **VARIABLES},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = losses_of_all(done.stdout)
    assert found.keys() == SCRIPTS.keys()
    for each in found.values():
        assert len(each) >= 3
        assert each[-1] < 0.5 * each[0]
    return found
