"""With --json a command prints one document on stdout, also where it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.common.errors import HpctrainError
from support.refusals import check, codes


@pytest.mark.parametrize(
    ("arguments", "exit_code", "code", "values"),
    [
        (["status", "nowhere", "--json"], 2, "HT-run-not-found", {"target": "nowhere"}),
        (["checkpoint", "verify", "empty", "--json"], 3, "HT-checkpoint-none", {"target": "empty"}),
        (["data", "shard", ".", "out", "--shard-mb", "9", "--shard-samples", "9", "--json"], 2, "HT-data-options", {}),
        (["bench", "step", "--precision", "bf16", "--json"], 2, "HT-option-needs-another", {}),
    ],
)
def test_an_error_is_the_document(
    arguments: list[str],
    exit_code: int,
    code: str,
    values: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty/checkpoints").mkdir(parents=True)
    assert main(arguments) == exit_code
    printed = capsys.readouterr()
    (name, error), *others = json.loads(printed.out).items()
    assert (name, others, error["exit_code"], codes(printed.err)) == ("error", [], exit_code, [code])
    check(HpctrainError.from_record(error), code, **values)
    assert main(arguments[:-1]) == exit_code
    assert capsys.readouterr().out == ""
