"""What ``hpctrain bench`` refuses before it starts any rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.control.programs.bench import parse_sizes


def test_sizes_are_bytes_in_powers_of_1024_and_ascend():
    assert parse_sizes("1M, 4k,102400000,1024,1K") == (1024, 4096, 1 << 20, 102_400_000)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["step", "--image-size", "64"], "HT-option-not-usable-here"),
        (["step", "--model", "vgg"], "resnet50"),
        (["step", "--batch", "0"], "--batch"),
        (["allreduce", "-np", "1"], "-np"),
        (["allreduce", "--link-gbit", "1"], "HT-option-needs-another"),
        (["allreduce", "-np", "3", "-H", "n1:1,n2:1"], "HT-ranks-too-many"),
        (["step", "-np", "3", "-H", "n1,n2"], "HT-ranks-not-divisible"),
        (["loader", "--data", "nowhere"], "HT-shards-not-there"),
        (["loader", "--workers", "0"], "--workers"),
    ],
)
def test_wrong_use(arguments, says, capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments]) == 2
    assert says in capsys.readouterr().err
