"""``python -m hpctrain``: the command line, where ``hpctrain`` is not on the PATH."""

from __future__ import annotations

import sys

from hpctrain.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
