"""``python -m hpctrain.worker.train RUN_DIR``, which a launcher starts on each rank."""

from __future__ import annotations

import atexit
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
        # A script gets SIGTERM as a request to stop only once it has called ht.should_stop.
        stopping.this_process.listen("USR2", *(["TERM", "INT", "USR1"] if plan["recipe"] else []))
    except (OSError, ValueError, KeyError, TypeError):
        return


if __name__ == "__main__":
    if (launcher := detect()) and launcher.name == SRUN:
        stopping.this_process.outlast_repeats()
    _listen(Path(sys.argv[1]))
    # The interpreter's final collections would visit every object of the framework, for more than a second. The first
    # exit handler is the last to run.
    atexit.register(gc.freeze)
    from hpctrain.common.errors import HpctrainError
    from hpctrain.worker.train.rank import run_rank

    try:
        code = run_rank(Path(sys.argv[1]))
    except HpctrainError as error:
        # This rank could not begin, so neither its log nor its record names the error.
        print(f"hpctrain: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)
