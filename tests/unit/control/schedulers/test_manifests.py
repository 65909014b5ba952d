"""The manifests of Kubernetes, against files that a person can read, the published schemas, and what they promise.

After a change that is meant: ``REGENERATE=1 python -m pytest tests/unit/control/schedulers/test_manifests.py``.

The schemas of Kubernetes are kubernetes-validate's.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from hpctrain.common.cluster.host_list import expand_slots
from hpctrain.common.files.checked_yaml import dump_all
from hpctrain.common.recipes.load import load_recipe
from hpctrain.common.recipes.schema import Recipe
from hpctrain.common.run.plan import Plan, Script, Start
from hpctrain.common.run.request import TrainingRequest
from hpctrain.control.schedulers.job_request import job_request
from hpctrain.control.schedulers.kubernetes.kubernetes_scheduler import object_name, prepare_pods
from hpctrain.control.schedulers.kubernetes.manifests import (
    PLAN,
    PodRun,
    manifest_text,
    manifests,
    memory_quantity,
)
from hpctrain.control.schedulers.profile import ClaimMount, ClusterProfile, KubernetesProfile, NodeProfile, RdmaDevices
from hpctrain.control.schedulers.scheduler import Cluster, Order
from support.refusals import invalid, refused

GOLDEN = Path(__file__).parents[3] / "golden" / "kubernetes"
# podFailurePolicy is stable from the first on; the second is the newest that the validator has.
OLDEST = "1.31.0"

VOLUME = ClaimMount(claim="runs", path="/runs")
PLAIN = ClusterProfile(name="plain", source="the tests", kubernetes=KubernetesProfile(volumes=(VOLUME,)))
GPUS = ClusterProfile(
    name="gpus",
    source="the tests",
    node=NodeProfile(gpus=8, cores=48, threads_per_core=2, memory="900G", exclusive=True),
    time="24:00:00",
    environment={"NCCL_DEBUG": "WARN", "MOTTO": 'it\'s $HOME: "y"\n- yes'},
    signal_seconds=300,
    kubernetes=KubernetesProfile(
        namespace="training",
        image="registry.example.org/hpctrain:0.1",
        volumes=(ClaimMount(claim="imagenet", path="/data", read_only=True), VOLUME),
        rdma=RdmaDevices(resource="rdma/hca", count=8),
        shared_memory="64Gi",
        pod={
            "nodeSelector": {"node-pool": "h100", "y": "n"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "imagePullSecrets": [{"name": "registry"}],
            "securityContext": {"runAsUser": 1000, "fsGroup": 1000},
        },
        secrets=("tokens",),
    ),
)


def of_kubernetes(profile: ClusterProfile, **changes: Any) -> ClusterProfile:
    """The profile with other values of its part about Kubernetes."""
    assert profile.kubernetes is not None
    return profile.model_copy(update={"kubernetes": profile.kubernetes.model_copy(update=changes)})


def pod_run(
    profile: ClusterProfile = PLAIN,
    work: Recipe | Script | None = None,
    *,
    backend: str = "auto",
    framework: str | None = None,
    start: Start = Start(),
    run_directory: Path | None = None,
    **asked: Any,
) -> PodRun:
    """A run on a cluster; ``asked`` are options about the job."""
    request = job_request(profile, "digits", asked)
    training = TrainingRequest(
        work=load_recipe("digits", []) if work is None else work, framework=framework, backend=backend, start=start
    )
    order = Order(
        cluster=Cluster(profile=profile),
        request=request,
        training=training,
        options={"--job-name"},
        image=None if profile.kubernetes and profile.kubernetes.image else "hpctrain:test",
        run_dir=run_directory,
    )
    return prepare_pods(order)


CASES = {
    "gloo-1": pod_run(nodes=1, tasks_per_node=2),
    "gloo-4": pod_run(nodes=4, tasks_per_node=2),
    "nccl-4": pod_run(GPUS, nodes=4),
    "nccl-kueue-4": pod_run(of_kubernetes(GPUS, labels={"kueue.x-k8s.io/queue-name": "training"}), nodes=4, time="0"),
    "single": pod_run(),
}


def shown(run: PodRun) -> str:
    """The manifests without the plan, which has a test of its own and grows with every key of a recipe."""
    objects = manifests(run)
    objects[0]["data"][PLAN] = "(the plan)"
    return dump_all(objects)


def documents(run: PodRun) -> list[dict[str, Any]]:
    """The objects as another program reads them."""
    return list(yaml.safe_load_all(manifest_text(run)))


def job(run: PodRun) -> dict[str, Any]:
    return documents(run)[-1]


def template_of(run: PodRun) -> dict[str, Any]:
    template: dict[str, Any] = job(run)["spec"]["template"]
    return template


# The others differ from these in their numbers, a label and a time limit, which have tests below.
@pytest.mark.parametrize("name", ["gloo-4", "nccl-4"])
def test_golden(name: str) -> None:
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("REGENERATE"):
        path.write_text(shown(CASES[name]))
    assert shown(CASES[name]) == path.read_text(), f"if the change is meant: REGENERATE=1 python -m pytest {__file__}"


@pytest.mark.parametrize("name", CASES)
def test_what_is_read_is_what_was_meant(name: str) -> None:
    assert documents(CASES[name]) == manifests(CASES[name])


@pytest.mark.parametrize("version", [OLDEST, None])
@pytest.mark.parametrize("name", CASES)
def test_the_published_schemas_accept_it(name: str, version: str | None) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    version = version or kubernetes_validate.latest_version()
    for each in documents(CASES[name]):
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("name", CASES)
def test_the_plan_comes_back_whole(name: str) -> None:
    run = CASES[name]
    assert Plan.model_validate_json(documents(run)[0]["data"][PLAN]) == run.plan


@pytest.mark.parametrize("name", CASES)
def test_every_mount_has_its_volume_and_the_run_directory_is_on_one(name: str) -> None:
    run = CASES[name]
    template = template_of(run)
    (container,) = template["spec"]["containers"]
    mounts = {each["name"]: each for each in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in template["spec"]["volumes"]}
    writable = [each["mountPath"] for each in mounts.values() if not each.get("readOnly")]
    assert any(run.run_directory.is_relative_to(path) for path in writable)


def test_the_hosts_of_the_plan_are_the_names_that_the_service_gives_the_pods() -> None:
    _, service, four = documents(CASES["gloo-4"])
    name, subdomain = four["metadata"]["name"], four["spec"]["template"]["spec"]["subdomain"]
    assert service["metadata"]["name"] == subdomain
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= four["spec"]["template"]["metadata"]["labels"].items()
    # Kubernetes calls them JOB-INDEX.SUBDOMAIN.
    hosts = CASES["gloo-4"].plan.host_options.hosts
    assert hosts is not None
    assert expand_slots(hosts, "") == {f"{name}-{index}.{subdomain}": 2 for index in range(4)}
    sizes = {name: job(run)["spec"]["completions"] for name, run in CASES.items()}
    assert sizes == {"gloo-1": 1, "gloo-4": 4, "nccl-4": 4, "nccl-kueue-4": 4, "single": 1}
    one = CASES["gloo-1"].plan.host_options.hosts
    assert one is not None and expand_slots(one, "") == {"digits-0.digits": 2}


def test_exit_codes() -> None:
    """0 done, 1 failed, 2 wrong use, 3 a check refused, 4 resumable: as hpctrain documents them."""
    spec = job(CASES["nccl-4"])["spec"]
    rules = spec["podFailurePolicy"]["rules"]

    def action(code: int, *, disrupted: bool = False) -> str:
        for rule in rules:
            condition = rule.get("onPodConditions")
            if condition == [{"type": "DisruptionTarget", "status": "True"}] and disrupted:
                return str(rule["action"])
            if (codes := rule.get("onExitCodes")) and codes["operator"] == "In" and code in codes["values"]:
                assert codes["containerName"] == spec["template"]["spec"]["containers"][0]["name"]
                return str(rule["action"])
        return "Count"

    assert [action(code) for code in (1, 2, 3, 4, 137)] == ["FailJob", "FailJob", "FailJob", "Ignore", "Count"]
    assert action(143, disrupted=True) == action(1, disrupted=True) == "Ignore"
    # A pod failure policy is allowed with no other restart policy; with another replacement two pods would train.
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["podReplacementPolicy"] == "Failed"


def test_a_pod_has_longer_to_leave_than_the_ranks_have_to_stop() -> None:
    for run in CASES.values():
        assert run.plan.stop.seconds < template_of(run)["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.parametrize(
    ("backend", "profile", "chosen"), [("auto", PLAIN, "gloo"), ("auto", GPUS, "nccl"), ("gloo", GPUS, "gloo")]
)
def test_the_backend_of_pods(backend: str, profile: ClusterProfile, chosen: str) -> None:
    run = pod_run(profile, backend=backend, nodes=2, tasks_per_node=2)
    assert (run.plan.asked_backend, run.plan.start.launcher) == (chosen, "torchrun")


@pytest.mark.parametrize(
    ("backend", "framework", "profile"),
    [
        ("auto", "keras", PLAIN),
        ("auto", "keras", GPUS),
        ("mpi", "torch", GPUS),
        ("horovod", "torch", PLAIN),
        ("multi_worker", "keras", PLAIN),
    ],
)
def test_what_needs_an_mpi_is_refused(backend: str, framework: str, profile: ClusterProfile) -> None:
    with refused("HT-backend-unfit"):
        pod_run(profile, backend=backend, framework=framework, nodes=2, tasks_per_node=2)


@pytest.mark.parametrize("setting", ["fault_tolerance.lost_rank=shrink", "sync={mode: async}"])
def test_recipes_that_need_an_mpi_are_refused(setting: str) -> None:
    with refused("HT-backend-unfit"):
        pod_run(work=load_recipe("digits", [setting]), nodes=2)


def test_nodes_get_what_is_asked_for() -> None:
    template = template_of(CASES["nccl-4"])
    (container,) = template["spec"]["containers"]
    limits = {"cpu": "96", "memory": "900Gi", "nvidia.com/gpu": "8", "rdma/hca": "8"}
    assert container["resources"] == {"requests": limits, "limits": limits}
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert job(CASES["nccl-4"])["spec"]["activeDeadlineSeconds"] == 24 * 3600
    assert "activeDeadlineSeconds" not in job(CASES["nccl-kueue-4"])["spec"]


@pytest.mark.parametrize(
    ("memory", "quantity"),
    [("480G", "480Gi"), ("500", "500Mi"), ("1T", "1Ti"), ("0", None), ("0G", None), (None, None)],
)
def test_memory(memory: str | None, quantity: str | None) -> None:
    assert memory_quantity(memory) == quantity


def test_what_the_profile_says_in_kubernetes_own_words() -> None:
    assert job(CASES["nccl-kueue-4"])["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training"
    template = template_of(CASES["nccl-4"])
    assert template["spec"]["securityContext"] == {"runAsUser": 1000, "fsGroup": 1000}
    assert template["spec"]["nodeSelector"] == {"node-pool": "h100", "y": "n"}


@pytest.mark.parametrize(
    "text", ["y", "NO", "1e3", "0o17", "1_000", "null", "~", "a: b", "- x", "#", "é\n $(HOME) \t", "01"]
)
def test_no_text_becomes_anything_else(text: str) -> None:
    written = dump_all([{"value": text}])
    assert yaml.safe_load(written) == {"value": text}
    # What go-yaml 2 would read as a truth value or as an octal number is in quotes.
    assert text not in ("y", "NO", "0o17") or f"'{text}'" in written


def test_a_script_goes_with_the_plan_unless_it_is_on_a_volume(tmp_path: Path) -> None:
    file = tmp_path / "my train.py"
    file.write_text("print('here')\n")
    run = pod_run(work=Script(path=file), backend="gloo", nodes=2)
    script = run.plan.script
    assert script is not None and script.path == Path("/etc/hpctrain/my-train.py")
    assert documents(run)[0]["data"]["my-train.py"] == "print('here')\n"
    there = Path("/runs/code/train.py")
    run = pod_run(work=Script(path=there), backend="gloo", nodes=2)
    assert run.plan.script is not None and run.plan.script.path == there
    assert set(documents(run)[0]["data"]) == {PLAN}
    file.write_bytes(b"#" * 200_000)
    with refused("HT-file-unreadable", path=file) as caught:
        pod_run(work=Script(path=file), backend="gloo")
    assert caught.value.hint.endswith(": /runs")


def test_run_directories() -> None:
    template = template_of(pod_run(run_directory=Path("/runs/$(HOME)/it's")))
    assert "--run-dir=/runs/$$(HOME)/it's" in template["spec"]["containers"][0]["command"]
    assert pod_run(GPUS).run_directory == PurePosixPath("/runs/hpctrain-runs/digits")
    assert pod_run(GPUS, run_directory=Path("/runs/one")).run_directory == PurePosixPath("/runs/one")
    for elsewhere in ("/data/one", "one", "/runs/../etc", "/runsx"):
        with refused("HT-run-directory-unfit", folder=elsewhere) as caught:
            pod_run(GPUS, run_directory=Path(elsewhere))
        assert caught.value.hint.endswith("--run-dir /runs/hpctrain-runs/one")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("digits", "digits"),
        ("My_Run.v2", "my-run-v2"),
        ("2017 goyal", "run-2017-goyal"),
        ("…", "run"),
        ("x" * 80, "x" * 48),
        (f"{'x' * 80}-20260101-120000", f"{'x' * 32}-20260101-120000"),
    ],
)
def test_names(text: str, name: str) -> None:
    assert object_name(text) == name


def test_misuse() -> None:
    with refused("HT-run-directory-unfit"):
        pod_run(run_directory=Path(os.fsdecode(b"/runs/\xff")))
    with refused("HT-plan-not-utf8"):
        manifest_text(pod_run(start=Start(environment={"A": os.fsdecode(b"\xff")})))
    with refused("HT-profile-lacks-key"):
        prepare_without_image()
    with refused("HT-secret-exposed", variable="HF_TOKEN"):
        pod_run(start=Start(passed=("HF_TOKEN",)))
    assert pod_run(GPUS, start=Start(passed=("HF_TOKEN",))).plan.start.passed == ("HF_TOKEN",)
    with invalid("HT-profile-not-valid"):
        KubernetesProfile(volumes=(ClaimMount(claim="a", path="/a", read_only=True),))
    with invalid("HT-profile-not-valid"):
        KubernetesProfile(volumes=(VOLUME,), pod={"containers": []})
    for wrong in ({"kubernetes": PLAIN.kubernetes, "modules": ("a",)}, {"scheduler": "kubernetes"}):
        with invalid("HT-profile-not-valid"):
            ClusterProfile(name="x", source="x", **wrong)


def prepare_without_image() -> None:
    training = TrainingRequest(work=load_recipe("digits", []))
    request = job_request(PLAIN, "digits", {})
    prepare_pods(Order(cluster=Cluster(profile=PLAIN), request=request, training=training))
