"""The adaptations: every one applied, or an error that names what is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.control.horovod import adapt
from support.refusals import refused


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Sources that hold exactly what the adaptations replace, with other text around it."""
    for adaptation in adapt.ADAPTATIONS:
        path = tmp_path / adaptation.file
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text() if path.exists() else "before\n"
        path.write_text(f"{before}{adaptation.old}\nbetween\n")
    return tmp_path


def test_every_text_is_replaced_and_the_rest_is_kept(source: Path) -> None:
    adapt.adapt(source, ("torch", "tensorflow"))
    root = (source / "CMakeLists.txt").read_text()
    assert "set(CMAKE_CXX_STANDARD 20)" in root
    assert '"\\"hpctrain\\": $ENV{HPCTRAIN_FINGERPRINT}\\n}"' in root
    assert root.startswith("before\n")
    assert root.count("between\n") == 3
    assert "xla_mpi_ops" not in (source / "horovod/tensorflow/CMakeLists.txt").read_text()


@pytest.mark.parametrize("lost", adapt.ADAPTATIONS, ids=lambda adaptation: adaptation.old[:30])
def test_a_text_that_is_not_found_is_an_error(source: Path, lost: adapt.Adaptation) -> None:
    path = source / lost.file
    path.write_text(path.read_text().replace(lost.old, "something else"))
    with refused("HT-horovod-build-failed", file=lost.file, reason=lost.reason) as error:
        adapt.adapt(source, ("torch", "tensorflow"))
    assert error.value.exit_code == 1
