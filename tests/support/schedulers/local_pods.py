"""Pods of an Indexed Job as processes of this machine: each with a name and processes of its own.

They run the command of the manifest, with the variables that Kubernetes sets. In place of the names that its DNS knows,
the plan has addresses of this machine.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import yaml

from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.run.request import TrainingRequest
from hpctrain.control.schedulers.job_request import job_request
from hpctrain.control.schedulers.kubernetes.kubernetes_scheduler import prepare_pods
from hpctrain.control.schedulers.kubernetes.manifests import manifest_text
from hpctrain.control.schedulers.profile import ClaimMount, ClusterProfile, KubernetesProfile
from hpctrain.control.schedulers.scheduler import Cluster, Order

_BIN = Path(sys.executable).parent
_ROOT = Path(__file__).parents[3]
_NAMESPACES = ("unshare", "--uts", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child=KILL")
_NAMED = _ROOT / "tests" / "mpi" / "programs" / "named_host.py"
_SECONDS = 300


@functools.cache
def whatever_is_missing() -> str:
    """Why there can be no pods here; empty where there can."""
    try:
        tried = subprocess.run([*_NAMESPACES, "true"], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"unshare of util-linux: {error.strerror}"
    return tried.stderr.strip() if tried.returncode else ""


class Pod:
    """A pod that runs. Its end is that of all of its processes."""

    def __init__(self, command: list[str], environment: dict[str, str], hostname: str, log: Path) -> None:
        named = [*_NAMESPACES, sys.executable, str(_NAMED), hostname, *command]
        with log.open("ab") as file:
            self._process = subprocess.Popen(named, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def lose(self) -> None:
        """As when its node fails."""
        self._process.kill()
        self._process.wait()

    def terminate(self) -> None:
        """Send TERM to its first process, as kubelet does."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        os.kill(int(children.split()[0]), signal.SIGTERM)

    def wait(self) -> int:
        return self._process.wait(timeout=_SECONDS)


class LocalJob:
    """An Indexed Job.

    Args:
        folder: the volume.
        pods: how many, with a rank each.
        overrides: of the recipe digits.
    """

    def __init__(self, folder: Path, pods: int, overrides: list[str]) -> None:
        self.folder = folder
        self.run = folder / "run"
        volume = ClaimMount(claim="volume", path=str(folder))
        profile = ClusterProfile(
            name="local", source="the tests", kubernetes=KubernetesProfile(image="any", volumes=(volume,))
        )
        training = TrainingRequest(work=load_recipe("digits", overrides), framework="torch", backend="gloo")
        order = Order(
            cluster=Cluster(profile=profile),
            request=job_request(profile, "digits", {"nodes": pods}),
            training=training,
            options={"--job-name"},
            run_dir=self.run,
        )
        run = prepare_pods(order)
        assert run.run_directory == PurePosixPath(self.run)
        configuration, _, job = yaml.safe_load_all(manifest_text(run))
        plan = folder / "plan.json"
        names = f"digits-[0-{pods - 1}].digits:1"
        text = configuration["data"]["plan.json"]
        assert text.count(names) == 1
        plan.write_text(text.replace(names, ",".join(f"127.0.0.{pod + 1}:1" for pod in range(pods))))
        (container,) = job["spec"]["template"]["spec"]["containers"]
        program, *arguments = container["command"]
        mounted = [word.replace("/etc/hpctrain/plan.json", str(plan)) for word in arguments]
        self._command = [str(_BIN / program), *mounted]
        self.logs = [folder / f"pod-{pod}.log" for pod in range(pods)]

    def start(self, pod: int) -> Pod:
        # Without the interpreters that other tests fork, which are in no pod.
        environment = {
            **{name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ},
            "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(_ROOT),
            "JOB_COMPLETION_INDEX": str(pod),
            "HPCTRAIN_POD": "digits",
            "HPCTRAIN_POD_CPUS": "1",
            # A pod's own name has its address there.
            "GLOO_SOCKET_IFNAME": "lo",
        }
        return Pod(self._command, environment, f"digits-{pod}", self.logs[pod])

    @contextlib.contextmanager
    def pods(self) -> Iterator[list[Pod]]:
        """All of them, which are gone afterwards."""
        started: list[Pod] = []
        try:
            started += [self.start(pod) for pod in range(len(self.logs))]
            yield started
        finally:
            for pod in started:
                pod.lose()

    def said(self) -> str:
        return "\n".join(f"{log.name}: {line}" for log in self.logs for line in log.read_text().splitlines())


def wait_for_steps(run: Path, pods: list[Pod], *, attempt: int, steps: int) -> None:
    """Until that attempt has made so many."""
    events = run / "events.jsonl"
    deadline = time.monotonic() + _SECONDS
    while True:
        parts = events.read_bytes().split(b'"event": "start"') if events.exists() else []
        if len(parts) > attempt and parts[attempt].count(b'"event": "step"') >= steps:
            return
        assert all(pod.runs for pod in pods), f"a pod has ended before attempt {attempt}"
        assert time.monotonic() < deadline, f"waited in vain for attempt {attempt}"
        time.sleep(0.02)
