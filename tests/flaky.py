"""A plugin for pytest's second run of tests that failed: it notes those that pass now, which are defects too."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--flaky-file", type=Path, help="where to note the tests that pass this time")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    passed = [report.nodeid for report in terminalreporter.getreports("passed") if report.when == "call"]
    with config.option.flaky_file.open("a") as file:
        file.writelines(f"FLAKY {nodeid}: it failed, and then passed by itself\n" for nodeid in passed)
