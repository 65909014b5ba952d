"""The cache's key changes with everything that a wheel depends on, and with nothing else."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from hpctrain.common.cluster.mpi import MpiInstallation
from hpctrain.control.horovod import adapt, fingerprint
from hpctrain.control.horovod.cuda import Nccl, Toolkit
from hpctrain.control.horovod.fingerprint import current_fingerprint
from hpctrain.control.horovod.wheel import cached_wheel, wheel_home

MPI = MpiInstallation(flavour="open-mpi-4", version="4.1.4", mpirun=Path("/opt/mpi/bin/mpirun"))
TOOLKIT = Toolkit(version="12.4", home=Path("/usr/local/cuda"))
NCCL = Nccl(version="2.21.5", include=Path("/usr/include"), libraries=Path("/usr/lib"))


@pytest.fixture(autouse=True)
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """The frameworks' versions as the test wants them."""
    installed: dict[str, str | None] = {"torch": "2.13.0+cpu", "tensorflow": "2.21.0"}
    monkeypatch.setattr(fingerprint, "package_version", installed.__getitem__)
    return installed


def test_the_key_changes_with_each_thing_it_depends_on(
    versions: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [current_fingerprint(MPI, TOOLKIT, NCCL).key]
    keys.append(current_fingerprint(dataclasses.replace(MPI, version="4.1.5"), TOOLKIT, NCCL).key)
    keys.append(current_fingerprint(dataclasses.replace(MPI, flavour="open-mpi-5", version="4.1.4"), TOOLKIT, None).key)
    keys.append(current_fingerprint(dataclasses.replace(MPI, mpirun=Path("/opt/other/bin/mpirun")), TOOLKIT, NCCL).key)
    keys.append(current_fingerprint(MPI, None, None).key)
    keys.append(current_fingerprint(MPI, dataclasses.replace(TOOLKIT, version="13.0"), NCCL).key)
    keys.append(current_fingerprint(MPI, TOOLKIT, dataclasses.replace(NCCL, version="2.22.3")).key)
    for package, version in {"torch": "2.12.0", "tensorflow": None}.items():
        monkeypatch.setitem(versions, package, version)
        keys.append(current_fingerprint(MPI, TOOLKIT, NCCL).key)
    monkeypatch.setattr(adapt, "ADAPTATIONS", ())
    keys.append(current_fingerprint(MPI, TOOLKIT, NCCL).key)
    monkeypatch.setattr("sysconfig.get_platform", lambda: "linux-aarch64")
    keys.append(current_fingerprint(MPI, TOOLKIT, NCCL).key)
    assert len(set(keys)) == len(keys)


def test_the_environments_own_mpi_is_the_same_in_every_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = set()
    for name in ("one", "another place"):
        monkeypatch.setattr(sys, "prefix", str(tmp_path / name))
        mpi = dataclasses.replace(MPI, mpirun=tmp_path / name / "bin" / "mpirun")
        keys.add(current_fingerprint(mpi, None, None).key)
    assert len(keys) == 1
    assert current_fingerprint(MPI, None, None).key not in keys


def test_a_wheel_is_found_again_by_its_key_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wanted = current_fingerprint(MPI, None, None)
    home = wheel_home(wanted)
    assert home == tmp_path / "hpctrain" / "wheels" / wanted.key
    assert cached_wheel(wanted) is None
    home.mkdir(parents=True)
    (home / "horovod.whl").touch()
    (home / "build.log").touch()
    assert cached_wheel(wanted) == home / "horovod.whl"
    assert cached_wheel(current_fingerprint(MPI, TOOLKIT, NCCL)) is None
