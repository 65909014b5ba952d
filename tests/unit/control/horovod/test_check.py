"""What the checks say of each state that an environment can be in."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpctrain.cli.horovod import app
from hpctrain.common.cluster import mpi
from hpctrain.common.errors import HpctrainError
from hpctrain.control.horovod import check, cuda, fingerprint, install
from hpctrain.control.horovod.fingerprint import BuildFingerprint
from support.golden import check_text
from support.refusals import check as check_error
from support.refusals import refused

BUILD = "run: hpctrain horovod build"
UNFIT = "HT-horovod-build-unfit"


class Machine:
    """An environment made of files and versions; Horovod's files are real, the rest is what the test says."""

    def __init__(self, site: Path) -> None:
        self.versions: dict[str, str | None] = {"torch": "2.13.0", "tensorflow": "2.21.0"}
        self.mpi: mpi.MpiInstallation | None = mpi.MpiInstallation(
            flavour="open-mpi-5", version="5.0.11", mpirun=Path("/opt/mpi/bin/mpirun")
        )
        self.toolkit: cuda.Toolkit | None = None
        self.nccl: cuda.Nccl | None = None
        self.horovod = site / "horovod"

    def find_mpi(self) -> mpi.MpiInstallation:
        if self.mpi is None:
            raise HpctrainError("HT-of-test", "there is no MPI", mpi.INSTALL_HINT)
        return self.mpi

    def fingerprint(self) -> BuildFingerprint:
        return fingerprint.current_fingerprint(self.find_mpi(), self.toolkit, self.nccl)

    def install(self, **changes: str | None) -> None:
        """Horovod as its build for this machine leaves it, but for the changes."""
        record = dataclasses.replace(self.fingerprint(), **changes)
        keys = {"torch": "pytorch", "tensorflow": "tensorflow"}
        built = {keys[package]: getattr(record, package) for package in record.packages}
        self.horovod.mkdir(exist_ok=True)
        metadata = {**built, "hpctrain": json.loads(record.to_json())}
        (self.horovod / "metadata.json").write_text(json.dumps(metadata))

    def install_foreign(self) -> None:
        self.horovod.mkdir()
        (self.horovod / "metadata.json").write_text('{"pytorch": "2.13.0", "dummy": "none"}')


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path)
    for module in (check, fingerprint):
        monkeypatch.setattr(module, "package_version", lambda name: machine.versions[name])
    for module in (check, install):
        monkeypatch.setattr(module, "find_mpi", machine.find_mpi)
    monkeypatch.setattr(cuda, "find_accelerator", lambda: (machine.toolkit, machine.nccl))
    monkeypatch.setattr(cuda, "package_directory", lambda name: tmp_path / name if machine.horovod.exists() else None)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.28.1")
    return machine


def statuses() -> dict[str, str]:
    return {one.name: one.status for one in check.report()}


def refusal(framework: str) -> HpctrainError:
    with pytest.raises(HpctrainError) as error:
        check.require(framework)
    return error.value


def test_everything_built(machine: Machine) -> None:
    machine.install()
    check.require("torch")
    check.require("keras")
    assert statuses() == {"horovod": "ok", "mpi": "ok", "torch": "ok", "keras": "ok", "nccl": "not applicable"}
    assert CliRunner().invoke(app, ["check"]).exit_code == 0


def test_nothing_built(machine: Machine) -> None:
    error = refusal("torch")
    check_error(error, "HT-backend-unavailable")
    assert error.hint.startswith(BUILD) and error.exit_code == 2
    result = CliRunner().invoke(app, ["check"])
    assert result.exit_code == 3
    assert BUILD in result.output


def test_built_for_another_mpi(machine: Machine) -> None:
    machine.install()
    machine.mpi = mpi.MpiInstallation(flavour="mpich-hydra", version="4.0.2", mpirun=Path("/usr/bin/no-such-mpirun"))
    error = refusal("keras")
    found = "Horovod is built for Open MPI 5.0.11 at /opt/mpi/bin/mpirun"
    check_error(error, UNFIT, found=found, wanted="MPICH 4.0.2 at /usr/bin/no-such-mpirun")
    assert error.hint == BUILD
    assert statuses()["mpi"] == "failed"


def test_no_mpi_any_more(machine: Machine) -> None:
    machine.install()
    machine.mpi = None
    check_error(refusal("torch"), UNFIT, wanted="an MPI")
    result = CliRunner().invoke(app, ["check", "--json"])
    assert result.exit_code == 3
    assert "hpctrain[mpi]" in json.loads(result.stdout)["checks"][1]["remedy"]


def test_built_without_one_framework(machine: Machine) -> None:
    machine.install(tensorflow=None)
    check.require("torch")
    error = refusal("keras")
    check_error(error, UNFIT, found="Horovod is not built for TensorFlow", wanted="TensorFlow 2.21.0")
    assert error.hint == BUILD
    assert statuses()["keras"] == "failed"


def test_a_framework_that_is_not_installed_is_no_fault(machine: Machine) -> None:
    machine.versions["tensorflow"] = None
    machine.install()
    assert statuses()["keras"] == "not applicable"
    result = CliRunner().invoke(app, ["check"])
    assert result.exit_code == 0
    said = " ".join(result.output.split())
    assert "'hpctrain[keras]'" in said and BUILD in said
    check_error(refusal("keras"), UNFIT, found="TensorFlow is not installed")


def test_a_horovod_that_somebody_else_built(machine: Machine) -> None:
    machine.install_foreign()
    check.require("torch")
    check_error(refusal("keras"), UNFIT, found="Horovod is not built for TensorFlow")
    check_text("horovod-of-somebody-else", CliRunner().invoke(app, ["check"]).output)


def test_nccl_missing_and_there(machine: Machine) -> None:
    machine.toolkit = cuda.Toolkit(version="12.4", home=Path("/usr/local/cuda"))
    machine.install()
    assert statuses()["nccl"] == "failed"
    machine.nccl = cuda.Nccl(version="2.21.5", include=Path("/usr/include"), libraries=Path("/usr/lib"))
    assert statuses()["nccl"] == "failed", "built before NCCL was there"
    machine.install()
    assert statuses()["nccl"] == "ok"


def test_a_build_that_fits_is_not_made_again(machine: Machine) -> None:
    machine.install()
    result = CliRunner().invoke(app, ["build"])
    assert result.exit_code == 0
    check_text("horovod-already-installed", result.stdout)


def test_no_framework_to_build_for(machine: Machine) -> None:
    machine.versions = {"torch": None, "tensorflow": None}
    with refused("HT-package-not-installed"):
        install.build(lambda step: None)


def test_asking_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from hpctrain.control.horovod import check\n"
        "check.report()\n"
        "print([name for name in ('torch', 'tensorflow', 'horovod', 'mpi4py') if name in sys.modules])\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_a_folder_of_that_name_is_no_horovod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sources, say, beside a script: Python takes any folder on its path for a package."""
    (tmp_path / "horovod").mkdir()
    monkeypatch.setattr(cuda, "package_directory", lambda name: tmp_path / name)
    monkeypatch.setattr("importlib.metadata.version", lambda name: _no_such_package(name))
    assert fingerprint.find_installed() is None


def _no_such_package(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)
