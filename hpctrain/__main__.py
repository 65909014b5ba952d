"""``python -m hpctrain``: the command line, where ``hpctrain`` is not on the PATH."""

from __future__ import annotations

from hpctrain.cli.program import program

if __name__ == "__main__":
    program()
