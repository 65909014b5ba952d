"""Cluster profiles: the shipped ones, what is said about wrong ones, and where they lie."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from hpctrain.common.errors import HpctrainError
from hpctrain.control.schedulers.profile import NodeProfile, sbatch_fault
from hpctrain.control.schedulers.profiles import describe_profiles, load_profile, profile_names, slurm_folder

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
        assert not profile.tried
        assert profile.remark


def test_each_shipped_profile_begins_with_the_command_that_uses_it() -> None:
    for name in profile_names():
        first = (slurm_folder() / "clusters" / f"{name}.yaml").read_text().splitlines()[0]
        assert first.startswith(f"# hpctrain submit RECIPE --cluster {name} ")


def test_what_is_commented_out_in_the_generic_profile_is_valid(tmp_path: Path) -> None:
    text = (slurm_folder() / "clusters" / "generic.yaml").read_text().replace("  gpus: 0\n", "")
    profile = load_profile(profile_file(tmp_path, re.sub(r"^( *)# (\w+: )", r"\1\2", text, flags=re.MULTILINE)))
    assert profile.model_fields_set >= {"account", "time", "sbatch", "modules", "setup", "environment", "node_storage"}
    assert profile.node.model_fields_set == {*NodeProfile.model_fields}


def test_profiles_are_described() -> None:
    described = {each.name: each for each in describe_profiles()}
    assert [*described] == profile_names()
    assert described["generic"].remark == load_profile("generic").remark


def test_a_profile_by_its_path_is_the_same(tmp_path: Path) -> None:
    text = (slurm_folder() / "clusters" / "clariden.yaml").read_text()
    assert load_profile(profile_file(tmp_path, text)) == load_profile("clariden")


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("partitoin: gpu", 3, "unknown key 'partitoin'; did you mean 'partition'?"),
        ("node: {gpuss: 4}", 3, "unknown key 'node.gpuss'; did you mean 'gpus'?"),
        ("container:\n  runtime: pyxis\n  images: x\n  image: x", 5, "unknown key 'container.images'; did you mean"),
        ("node: {gpus: -1}", 3, "node.gpus: "),
        ("node: {gpu_type: a100}", 3, "gpu_type is a100, but gpus is 0"),
        ("node: {gpus: 2, gpu_type: 'a b'}", 3, "node.gpu_type: "),
        ('account: "a\\n#SBATCH --uid=0"', 3, "account: must be a name without blanks"),
        ("qos: two words", 3, "qos: must be a name"),
        ("partition: --uid=0", 3, "partition: must be a name"),
        ("constraint: ''", 3, "constraint: must be a name"),
        ("name: a/b", 3, "the key 'name' was already given"),
        ("setup:\n  - echo one\n  - |\n    echo two\n    echo three", 5, "setup.1: must be one line"),
        ("modules: ['a; b']", 3, "modules.0: must be a name without blanks"),
        ("environment: {A-B: x}", 3, "environment.A-B"),
        ("environment: {OMP_NUM_THREADS: 8}", 3, "environment.OMP_NUM_THREADS: input should be a string, not 8: put"),
        ('environment: {A: "x\\0"}', 3, "environment.A: no variable can hold"),
        ("time: 90", 3, "time: input should be a string, not 90: put it in quotes"),
        ("time: soon", 3, "time: must be a time limit such as 90 (minutes), 2:00:00 or 1-12:00:00, not 'soon'"),
        ("time: '1:2:3:4'", 3, "time: "),
        ("node_storage: $(rm x)", 3, "node_storage: "),
        ("sbatch: {output: x}", 1, "sbatch: output is set by hpctrain: use --run-dir"),
        ("sbatch: {nodes: '2'}", 1, "sbatch: nodes is set by hpctrain: use --nodes"),
        ("sbatch: {--comment: x}", 1, "not the long name of an option"),
        ("sbatch: {gres: 'gpu:4'}", 1, "GPUs are set by hpctrain: use --gpus-per-node"),
        ('sbatch: {comment: "a\\nb"}', 1, "comment: the value is not one line"),
        ("sbatch: {outpu: x}", 1, "sbatch: output is set by hpctrain: use --run-dir"),
        ("sbatch: {mem: 4G}", 1, "sbatch: mem is set by node.memory"),
        ("sbatch: {exclusive: user}", 1, "sbatch: exclusive is set by node.exclusive"),
        ("node: {memory: much}", 3, "node.memory: "),
        ("container: {runtime: pyxis, image: x}\nlauncher: mpirun", 1, "pyxis is a plugin of srun"),
        ("launcher: srun", 3, "launcher: input should be 'auto', 'mpirun'"),
        *((f"signal: '{name}'", 3, "signal: ") for name in ("usr2", "TERM", "KILL", "STOP", "12", "URG", "WINCH")),
        ("signal: TERM", 3, "'TERM' cannot announce the end of a job; valid: ALRM, USR1, USR2, XCPU"),
        ("tried: 1", 3, "tried: "),
        ("sbatch: [", 4, "not valid YAML"),
        ("sbatch: &a {x: *a}", 3, "the alias *a has no place in a cluster profile"),
    ],
)
def test_a_wrong_profile_names_the_line(tmp_path: Path, text: str, line: int, said: str) -> None:
    file = profile_file(tmp_path, f"{LEAST}{text}\n")
    with pytest.raises(HpctrainError) as caught:
        load_profile(file)
    assert f"{file}:{line}: " in str(caught.value)
    assert said in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_profile_needs_no_more_than_name_and_source(tmp_path: Path) -> None:
    assert load_profile(profile_file(tmp_path, LEAST)).launcher == "auto"
    with pytest.raises(HpctrainError, match="the key 'source' is missing"):
        load_profile(profile_file(tmp_path, "name: mine\n"))
    with pytest.raises(HpctrainError, match=r"holds no cluster profile.*mapping"):
        load_profile(profile_file(tmp_path, "- a\n"))


def test_pyxis_goes_with_srun_and_further_options_pass(tmp_path: Path) -> None:
    text = (
        f"{LEAST}container: {{runtime: pyxis, image: x}}\nlauncher: srun-pmix\n"
        "node: {gpus: 4}\nsbatch: {gres: 'nvme:100', mail-type: 'END', contiguous: null}\n"
    )
    profile = load_profile(profile_file(tmp_path, text))
    assert profile.sbatch == {"gres": "nvme:100", "mail-type": "END", "contiguous": None}


@pytest.mark.parametrize("option", ["Nodes", "x_y", "", "-N", "a b", "a=b", "ünter"])
def test_options_of_sbatch_have_long_names(option: str) -> None:
    assert "long name" in (sbatch_fault(option, "x") or "")


def test_profiles_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(HpctrainError, match=r"unknown cluster 'dgx-h10'\n  did you mean 'dgx-h100'.*auto to discover"):
        load_profile("dgx-h10")
    with pytest.raises(HpctrainError, match=r"cannot read the cluster profile .*No such file.*\n.*generic"):
        load_profile(str(tmp_path / "none.yaml"))


def test_shipped_profiles_read_alike_in_other_readers_of_yaml() -> None:
    """A value that YAML 1.1 takes for something else (1:30, yes) would puzzle whoever edits the file."""
    for name in profile_names():
        plain = yaml.safe_load((slurm_folder() / "clusters" / f"{name}.yaml").read_text())
        assert load_profile(name).model_dump(mode="json", exclude_unset=True) == plain
