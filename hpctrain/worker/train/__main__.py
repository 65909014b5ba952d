"""``python -m hpctrain.worker.train RUN_DIR``, which a launcher starts on each rank."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

from hpctrain.common.cluster.launcher import SRUN, detect
from hpctrain.common.files.regular import read_regular
from hpctrain.common.run import stopping


def _listen(directory: Path) -> None:
    """Survive a signal that comes during the imports; a plan that cannot be read is reported after them."""
    try:
        plan = json.loads(read_regular(directory / "plan.json", 2**24, links=False))
        # A script is asked by SIGTERM only once it has shown, by ht.should_stop, that it can stop.
        stopping.listen(plan["stop"]["signal"], *(["TERM", "INT", "USR1", "USR2"] if plan["recipe"] else []))
    except (OSError, ValueError, KeyError, TypeError):
        return


if __name__ == "__main__":
    if (launcher := detect()) and launcher.name == SRUN:
        stopping.outlast_repeats()
    _listen(Path(sys.argv[1]))
    from hpctrain.common.errors import HpctrainError
    from hpctrain.worker.train.rank import run_rank

    try:
        code = run_rank(Path(sys.argv[1]))
    except HpctrainError as error:
        # Of a rank that could not begin: its log and its record say nothing yet.
        print(f"hpctrain: {error}", file=sys.stderr)
        code = error.exit_code
    # The interpreter's last collections go through all that a framework has made: more than a second.
    gc.freeze()
    sys.exit(code)
