"""The commit of this hpctrain. Imports the standard library alone, so that the build can load this file by itself."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_SECONDS = 10
# The build of a wheel or source package writes this file beside the module.
FILE = "COMMIT"


def of_checkout(root: Path) -> str | None:
    """The commit of a checkout, with ``-dirty`` where tracked files differ from it.

    Args:
        root: the checkout's own folder; a folder within another repository's checkout has no commit.

    Returns:
        The commit's first 12 digits, or None where there is no checkout or git cannot tell.
    """
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    # In a git hook, variables such as GIT_DIR name the hook's repository.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_SECONDS, env=variables)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def of_this_package() -> str | None:
    """The commit that the build recorded, or that of the checkout that this package lies in; None without both."""
    package = Path(__file__).parent
    written = package / FILE
    return written.read_text().strip() if written.is_file() else of_checkout(package.parent)
