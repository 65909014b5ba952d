"""Scripts by the conventions of other tools, unchanged: the commands of the page for comers, and killed ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.comers import cells
from support.launching import Launch
from support.refusals import codes

PROGRAM = Path(__file__).parent / "programs" / "horovod_keras_scripts.py"


# Those of torch.distributed and of frameworks run side by side in test_torchrun_scripts.py and test_frameworks.py.
_OTHERS = [words for words in cells.printed("here") if Path(words[1]).stem.startswith(("horovod", "tf"))]


@pytest.mark.long
@pytest.mark.parametrize("words", _OTHERS, ids=lambda words: words[1])
def test_scripts_of_others_have_the_losses_of_one_process(tmp_path: Path, words: list[str]) -> None:
    cells.require(words[1])
    cells.execute(words, cells.on_this_machine, tmp_path)


@pytest.mark.long
def test_micro_batches_that_accelerate_accumulates(tmp_path: Path) -> None:
    cells.require("accelerate_loop")
    cells.execute(["run", "accelerate_accumulate.py", "-np", "2"], cells.on_this_machine, tmp_path)


@pytest.mark.long
def test_processes_that_a_rank_spawns_are_no_ranks(hpctrain: Launch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = "import torch.multiprocessing as mp\nimport hpctrain as ht\nht.init()\n"
    (tmp_path / "script.py").write_text(f"{script}if __name__ == '__main__':\n    mp.spawn(print, nprocs=1)\n")
    result = hpctrain("run", "script.py", "-np", "2")
    assert result.returncode == 1, result.stdout
    assert "HT-call-in-child-process" in codes(result.stdout)


@pytest.mark.long
def test_horovods_functions_for_keras_reduce_on_keras_3(hpctrain: Launch, tmp_path: Path) -> None:
    cells.require("horovod_keras")
    result = hpctrain("run", str(PROGRAM), "-np", "2", "--backend", "horovod", "--", str(tmp_path))
    assert result.returncode == 0, result.stdout
    for rank in range(2):
        said = json.loads((tmp_path / f"said-{rank}.json").read_text())
        refused = said.pop("refused")
        assert refused == 2 * ["HT-horovod-keras-not-supported"]
        # Both ranks are told the mean, and the warm-up of two epochs is over.
        assert said.pop("rate") == pytest.approx(0.2)
        assert said.pop("loss") > 0
        assert said.pop("saved")
        assert said.keys() == {"fit", "sum", "predivided", "broadcast", "tape", "loaded", "skipped"}
        assert max(said.values()) < 1e-12, said


@pytest.mark.long
def test_a_strategy_of_tensorflow_without_its_backend_ends_as_failed(hpctrain: Launch) -> None:
    """Each rank would be the only worker, and train a model of its own."""
    cells.require("tf_distribute")
    result = hpctrain("run", str(cells.SCRIPTS / "tf_distribute.py"), "-np", "2")
    assert result.returncode == 1, result.stdout
    assert "HT-ranks-trained-alone" in codes(result.stdout)
