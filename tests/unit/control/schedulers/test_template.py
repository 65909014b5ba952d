"""A user's own template of the job script."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.common.errors import HpctrainError
from hpctrain.control.schedulers.request import job_request
from hpctrain.control.schedulers.slurm.script import ScriptVariables, list_variables, render, variables
from support.refusals import refused
from support.schedulers.job_scripts import PLAIN


def rendered(text: str, folder: Path) -> str:
    template = folder / "mine.j2"
    template.write_text(text)
    values = variables(job_request(PLAIN, "digits", {}), PLAIN, run_directory=Path("/r un"), folder=Path("/f"))
    return render(values, template)


def test_it_gets_the_variables_and_can_include_others(tmp_path: Path) -> None:
    (tmp_path / "own.j2").write_text("# own\n")
    text = rendered('#!/bin/sh\n{{ directives[0] }}\ncd {{ run_dir | quote }}\n{% include "own.j2" %}\n', tmp_path)
    assert text == "#!/bin/sh\n#SBATCH --job-name=digits\ncd '/r un'\n# own\n"


def test_it_can_extend_that_of_hpctrain_under_the_same_name(tmp_path: Path) -> None:
    template = tmp_path / "job.sh.j2"
    template.write_text('{% include "job.sh.j2" %}\n# more\n')
    values = variables(job_request(PLAIN, "digits", {}), PLAIN, run_directory=Path("/r"), folder=Path("/f"))
    assert render(values, template).endswith("# more\n")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("#!/bin/sh\n\n{{ rundir }}\n", 3, ["'rundir'", "'run_dir'"]),
        ("#!/bin/sh\n{% if nodes > %}\n", 2, []),
        ("#!/bin/sh\n{% if nodes %}\n", 2, ["endif"]),
        ("#!/bin/sh\n{{ run_dir | quot }}\n", 2, ["quot"]),
        ("#!/bin/sh\n\n{{ directives.nothing }}\n", 3, ["nothing"]),
        ("#!/bin/sh\n{{ nodes / 0 }}\n", 2, ["zero"]),
        ("#!/bin/sh\n{{ nodes + run_dir }}\n", 2, ["unsupported"]),
    ],
)
def test_a_fault_in_it_is_told_with_its_line(text: str, line: int, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(HpctrainError) as caught:
        rendered(text, tmp_path)
    assert caught.value.message.startswith(f"{tmp_path}/mine.j2:{line}: ")
    for word in words:
        assert word in str(caught.value)


def test_an_undefined_name_is_answered_with_all_names(tmp_path: Path) -> None:
    with refused("HT-template-not-valid") as caught:
        rendered("#!/bin/sh\n{{ rundir }}", tmp_path)
    assert all(name in caught.value.hint for name in ScriptVariables.model_fields)


def test_no_script_and_no_file(tmp_path: Path) -> None:
    with refused("HT-template-not-valid") as caught:
        rendered("echo\n", tmp_path)
    assert "begins with #!" in caught.value.message
    with refused("HT-template-not-valid", template=tmp_path / "x"):
        render(variables(job_request(PLAIN, "x", {}), PLAIN, run_directory=Path("/"), folder=Path("/")), tmp_path / "x")
    with refused("HT-template-not-valid", reason="not_there.j2"):
        rendered('#!/bin/sh\n{% include "not_there.j2" %}\n', tmp_path)


def test_the_list_has_each_variable_with_its_type_and_meaning() -> None:
    lines = list_variables().splitlines()
    for line, (name, field) in zip(lines, ScriptVariables.model_fields.items(), strict=False):
        assert line.split()[0] == name
        assert field.description and line.endswith(field.description)
