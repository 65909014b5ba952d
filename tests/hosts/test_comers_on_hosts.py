"""The commands of the page for comers that name two hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.comers import cells
from support.hosts.local_hosts import LocalHosts


@pytest.mark.long
@pytest.mark.parametrize("words", cells.printed("hosts"), ids=lambda words: words[1])
def test_scripts_of_others_have_the_losses_of_one_process(hosts: LocalHosts, tmp_path: Path, words: list[str]) -> None:
    cells.require(words[1])
    cells.execute(words, cells.on_hosts(hosts), tmp_path)
