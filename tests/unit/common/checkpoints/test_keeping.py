"""Which checkpoints stay, and that nothing that is deleted looks damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.common.checkpoints import find
from hpctrain.common.checkpoints.find import Policy, newest_whole
from hpctrain.common.checkpoints.layout import hidden
from support.written_checkpoints import progress_of, write_checkpoint

POLICIES = st.builds(Policy, last=st.integers(1, 4), best=st.booleans(), every_epochs=st.none() | st.integers(1, 3))
# (iteration, its epoch, whether it ends the epoch, accuracy or none)
SAVES = st.lists(st.tuples(st.booleans(), st.none() | st.sampled_from([0.1, 0.5, 0.9])), min_size=1, max_size=8)


@given(POLICIES, SAVES)
def test_what_is_kept(policy: Policy, saves: list[tuple[bool, float | None]]) -> None:
    known = {i: progress_of(i, epoch=i, ends_epoch=ends) for i, (ends, _) in enumerate(saves, start=1)}
    scores = {i: score for i, (_, score) in enumerate(saves, start=1) if score is not None}
    kept = policy.kept(known, scores)
    newest = sorted(known, reverse=True)[: policy.last]
    assert set(newest) <= kept
    others = kept - set(newest)
    every = {i for i in known if policy.every_epochs and known[i].ends_epoch and i % policy.every_epochs == 0}
    assert every <= kept
    if policy.best and scores:
        first_best = min(i for i, score in scores.items() if score == max(scores.values()))
        assert first_best in kept
        others -= {first_best}
    assert others <= every


def test_one_that_cannot_be_read_back_just_now_stays(tmp_path: Path) -> None:
    newest = write_checkpoint(tmp_path, progress_of(2))
    (newest / "state.sha256").rename(tmp_path / "aside")
    find.delete_unkept(Policy(last=1), tmp_path, 2, {})
    (tmp_path / "aside").rename(newest / "state.sha256")
    assert newest_whole(tmp_path).iteration == 2


def test_a_deletion_that_crashes_leaves_nothing_that_looks_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It crashes after one file; the next of the same step clears up."""
    for iteration in (1, 2, 3):
        write_checkpoint(tmp_path, progress_of(iteration))

    def crash(path: Path, **_: object) -> None:
        if path.exists():
            next(path.glob("*.safetensors")).unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", crash)
        with pytest.raises(KeyboardInterrupt):
            find.delete_unkept(Policy(last=1), tmp_path, 3, {})
    assert len(hidden(tmp_path)) == 1
    assert newest_whole(tmp_path).damaged == ()
    (half,) = hidden(tmp_path)
    again = int(half.name.split("-")[1].split(".")[0])
    write_checkpoint(tmp_path, progress_of(again))
    find.delete(tmp_path / f"step-{again:08}")
    find.delete_unkept(Policy(last=1), tmp_path, 3, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
