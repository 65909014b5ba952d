"""The installed packages against the known vulnerabilities of the Python Package Index, by pip-audit.

Fails where one is found, and where pip-audit cannot do it although the index answers. Where the index cannot be asked,
as without a network, or takes too long, it says so in one line and succeeds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import urllib.error
import urllib.request
from importlib.metadata import version
from typing import Any

_INDEX = "https://pypi.org"
_ANSWER_SECONDS = 5
_AUDIT_SECONDS = 120


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", default=_INDEX, help="that is asked whether it can be reached")
    parser.add_argument("--program", default="pip-audit")
    parser.add_argument("--seconds", type=float, default=_AUDIT_SECONDS, help="that the audit may take")
    options = parser.parse_args()
    try:
        if problem := unreachable(options.index):
            return left_out(problem)
        return report(audit(options.program, options.seconds))
    except subprocess.TimeoutExpired:
        return left_out(f"{options.program} did not end in {options.seconds:g} s")
    except AuditError as error:
        print(f"audit of packages: {error}", file=sys.stderr)
        return 1


class AuditError(Exception):
    """There is no audit, though there could be."""


def left_out(why: str) -> int:
    print(f"audit of packages left out: {why}")
    return 0


def unreachable(index: str) -> str | None:
    """Why an index does not tell vulnerabilities, None where it does."""
    address = f"{index}/pypi/pip/{version('pip')}/json"
    try:
        with urllib.request.urlopen(address, timeout=_ANSWER_SECONDS) as answer:  # noqa: S310 - https
            return None if "vulnerabilities" in json.load(answer) else f"{address} says nothing of vulnerabilities"
    except (OSError, ValueError) as error:
        return f"{address} cannot be reached: {error}"


def audit(program: str, seconds: float) -> list[dict[str, Any]]:
    """What pip-audit says of each package.

    Raises:
        AuditError: it is not there, or says nothing.
        subprocess.TimeoutExpired: it took longer.
    """
    command = [program, "--local", "--skip-editable", "--progress-spinner=off", "--format=json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except OSError as error:
        raise AuditError(f"cannot start {program}: {error.strerror}; `make lint` installs it") from error
    try:
        packages: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
        return packages
    except (ValueError, KeyError, TypeError) as error:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise AuditError(f"{program} failed with exit status {done.returncode}: {last}") from error


def report(packages: list[dict[str, Any]]) -> int:
    """Print what was found; 1 for a vulnerability."""
    found = [(package, fault) for package in packages for fault in package.get("vulns", ())]
    for package, fault in found:
        fixed = ", ".join(fault["fix_versions"]) or "no version yet"
        print(f"{package['name']} {package['version']}: {fault['id']}, fixed in {fixed}")
    left_out = [package["name"] for package in packages if "skip_reason" in package]
    if left_out:
        print(f"the index does not know {len(left_out)} of {len(packages)} packages, such as {left_out[0]}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
