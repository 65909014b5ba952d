"""Cluster profiles: the shipped ones, what is said about wrong ones, and where they lie."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpctrain.common.cluster.gpu_models import gpus
from hpctrain.control.schedulers.profile import NodeProfile, load_profile, profile_names, slurm_folder
from support.refusals import refused

ROOT = Path(__file__).parents[4]
LEAST = "name: mine\nsource: my site\n"


def profile_file(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_shipped_profiles_are_valid_and_say_where_they_are_from() -> None:
    assert {"generic", "cpu", "dgx-h100"} < set(profile_names())
    assert len(profile_names()) >= 6
    for name in profile_names():
        profile = load_profile(name)
        assert profile.name == name
        assert profile.source.startswith("https://")


def test_what_is_commented_out_in_the_generic_profile_is_valid(tmp_path: Path) -> None:
    text = (slurm_folder() / "clusters" / "generic.yaml").read_text().replace("  gpus: 0\n", "")
    profile = load_profile(profile_file(tmp_path, re.sub(r"^( *)# (\w+: )", r"\1\2", text, flags=re.MULTILINE)))
    assert profile.model_fields_set >= {"account", "time", "sbatch", "modules", "setup", "environment"}
    assert profile.node.model_fields_set == {*NodeProfile.model_fields}


@pytest.mark.parametrize(
    ("text", "line", "code", "values"),
    [
        ("node: {gpuss: 4}", 3, "HT-file-unknown-key", {"key": "node.gpuss"}),
        (
            "container:\n  runtime: pyxis\n  images: x\n  image: x",
            *(5, "HT-file-unknown-key", {"key": "container.images"}),
        ),
        ("node: {gpus: 2, gpu_type: 'a b'}", 3, "HT-file-value", {"key": "node.gpu_type"}),
        ('account: "a\\n#SBATCH --uid=0"', 3, "HT-file-value", {"key": "account"}),
        ("setup:\n  - echo one\n  - |\n    echo two\n    echo three", 5, "HT-file-value", {"key": "setup.1"}),
        ("environment: {A-B: x}", 3, "HT-file-value", {"key": "environment.A-B.[key]"}),
        ("environment: {OMP_NUM_THREADS: 8}", 3, "HT-file-value", {"key": "environment.OMP_NUM_THREADS", "value": "8"}),
        ("sbatch: {output: x}", 3, "HT-sbatch-option-set-elsewhere", {"option": "output"}),
        ("sbatch: {gres: 'gpu:4'}", 3, "HT-sbatch-option-set-elsewhere", {"option": "gres"}),
        ('sbatch: {comment: "a\\nb"}', 3, "HT-file-value", {"key": "sbatch.comment"}),
        ("node: {memory: much}", 3, "HT-file-value", {"key": "node.memory"}),
    ],
)
def test_a_wrong_profile_names_the_line(
    tmp_path: Path, text: str, line: int, code: str, values: dict[str, object]
) -> None:
    file = profile_file(tmp_path, f"{LEAST}{text}\n")
    with refused(code, where=f"{file}:{line}", **values) as caught:
        load_profile(file)
    assert caught.value.exit_code == 2


def test_a_profile_needs_no_more_than_name_and_source(tmp_path: Path) -> None:
    assert load_profile(profile_file(tmp_path, LEAST)).launcher == "auto"
    with refused("HT-file-missing-key", key="source"):
        load_profile(profile_file(tmp_path, "name: mine\n"))
    with refused("HT-file-no-mapping", kind="cluster profile"):
        load_profile(profile_file(tmp_path, "- a\n"))


def test_profiles_that_are_not_there(tmp_path: Path) -> None:
    with refused("HT-choice-unknown", cluster="dgx-h10") as caught:
        load_profile("dgx-h10")
    assert "'dgx-h100'" in caught.value.hint
    with refused("HT-file-unreadable", kind="cluster profile", path=tmp_path / "none.yaml") as caught:
        load_profile(str(tmp_path / "none.yaml"))
    assert "generic" in caught.value.hint


def test_the_gpus_of_the_shipped_profiles_are_known() -> None:
    named = {profile.node.gpu for profile in map(load_profile, profile_names())}
    assert named - {None} <= {*gpus()} and named & {*gpus()}
