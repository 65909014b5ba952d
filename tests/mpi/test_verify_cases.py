"""What hpctrain verify says of trainings that other tests compare with one process, or expect to be refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.launching import Launch
from support.refusals import codes

pytest.importorskip("torch")
pytestmark = pytest.mark.thorough

PROGRAM = Path(__file__).parent / "programs" / "one_case.py"
# Program, case and ranks.
EQUAL = (
    ("plain_losses", "penalties", 2),
    ("counted_losses", "pipeline", 2),
    ("parallel", "tp_fsdp_all", 4),
    ("parallel", "pp_zbv_all", 2),
    ("parallel", "pp_replicas_gpipe_all", 4),
    ("parallel", "hsdp_clip", 4),
    ("keras_counted", "train_step_divided_by_tokens", 2),
)
# And the code of the ranks' error.
FAILS = (
    ("parallel_misuse", "tie_across_units", 4, "HT-parallel-plan-not-valid"),
    ("same_data", "files_that_differ", 2, "HT-shard-different-data"),
    ("torch_misuse", "models_in_another_order_on_another_rank", 2, "HT-ranks-reduce-differently"),
)


@pytest.mark.parametrize(("program", "case", "ranks"), EQUAL)
def test_right_trainings_are_equal(hpctrain: Launch, program: str, case: str, ranks: int) -> None:
    done = hpctrain("verify", str(PROGRAM), "-np", str(ranks), "--oversubscribe", "--", program, case)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("wrong", ["sum", "rate"])
@pytest.mark.parametrize("case", ["fsdp", "tp", "pp_1f1b"])
def test_wrong_trainings_on_meshes_are_named(hpctrain: Launch, case: str, wrong: str) -> None:
    done = hpctrain("verify", str(PROGRAM), "-np", "2", "--", "parallel", case, WRONG=wrong)
    assert done.returncode == 3, done.stdout
    assert ("2 times" if wrong == "sum" else "learning rate") in done.stdout


@pytest.mark.parametrize(("program", "case", "ranks", "code"), FAILS)
def test_what_ranks_refuse_is_said(hpctrain: Launch, program: str, case: str, ranks: int, code: str) -> None:
    done = hpctrain("verify", str(PROGRAM), "-np", str(ranks), "--oversubscribe", "--", program, case)
    assert done.returncode == 1, done.stdout
    assert codes(done.stdout) == ["HT-verify-run-failed", code]
