"""``python -m hpctrain.train RUN_DIR``: what a launcher starts once a rank."""

from __future__ import annotations

import sys
from pathlib import Path

from hpctrain.train.rank import run_rank

if __name__ == "__main__":
    sys.exit(run_rank(Path(sys.argv[1])))
