"""``hpctrain topology`` on generated fat trees, on listings of real clusters, and on what is not a fabric."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from fat_tree import fat_tree

from hpctrain.cli.main import main
from hpctrain.common.run.plan import HostOptions, Start
from hpctrain.control.planning.place_hosts import PlacedHosts
from hpctrain.control.topology.verify import End, Flow
from support.golden import check_text
from support.refusals import codes
from support.topology.listings import listing

SMALL = Path(__file__).parents[1] / "control" / "topology" / "discovered"
INTERLEAVED = ",".join(f"node{host:04d}" for host in (1, 5, 2, 6, 3, 7, 4, 8))
DEPTH_FIRST = [f"node{host:04d}" for host in range(1, 9)]


@pytest.fixture(autouse=True)
def _as_wide_as_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def fabric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Two leaves of four hosts, two spines: 2 : 1 oversubscribed."""
    monkeypatch.chdir(tmp_path)
    Path("fabric.txt").write_text(fat_tree(hosts=8, leaf_down=4, leaf_up=2))
    return "fabric.txt"


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What the command prints: its result, or where it must fail its message."""
    assert main(["topology", *arguments]) == code
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return printed.err if code == 2 else printed.out


def test_show_prints_a_table(fabric: str, capsys: pytest.CaptureFixture[str]):
    check_text("topology-show", run(capsys, "show", fabric))


RAGGED = [("leaf1", "spine1"), ("leaf2", "spine1"), ("leaf3", "spine2"), ("leaf4", "spine2")]
RAGGED += [("spine1", "core"), ("spine2", "core"), ("leaf5", "core")]
RAGGED += [(f"n{host} mlx5_0", f"leaf{(host + 1) // 2}") for host in range(1, 11)]
NAMELESS = [("n1 mlx5_0", "s1"), ("n2 mlx5_0", "s1"), ("MT4129 ConnectX7   Mellanox Technologies", "s1")]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes what ibnetdiscover would print of some cables."""
    monkeypatch.chdir(tmp_path)

    def written(cables: list[tuple[str, str]], **more: list[str]) -> str:
        Path("cables.txt").write_text(listing(cables, **more))
        return "cables.txt"

    return written


def test_place_reports_crossings_higher_up(write: Callable[..., str], capsys: pytest.CaptureFixture[str]):
    wanted = ["place", "--fabric", write(RAGGED), "--hosts", "n1,n2,n5,n6,n3,n4,n7,n8"]
    placed = json.loads(run(capsys, *wanted, "--json"))
    assert placed["given"]["crossings_by_level"] == [4, 4]
    assert placed["placed"]["crossings_by_level"] == placed["placed"]["bound_by_level"] == [4, 2]
    assert placed["already_optimal"] is False
    assert "higher up" in run(capsys, *wanted)


def test_the_fabrics_warnings_are_printed(write: Callable[..., str], capsys: pytest.CaptureFixture[str]):
    assert main(["topology", "place", "--hosts", "n1,n2", "--fabric", write(NAMELESS, alone=["n9 mlx5_0"])]) == 0
    check_text("topology-warnings", capsys.readouterr().err)


def test_place(fabric: str, capsys: pytest.CaptureFixture[str]):
    placed = json.loads(run(capsys, "place", "--fabric", fabric, "--hosts", INTERLEAVED, "--json"))
    assert placed["order"] == DEPTH_FIRST
    assert placed["given"]["crossings"] == 8
    for order in ("name", "tree", "placed"):
        assert placed[order]["crossings"] == placed[order]["bound"] == 2
        assert placed[order]["worst_load"] == 1
        assert placed[order]["bandwidth_bytes_per_s"] > placed["given"]["bandwidth_bytes_per_s"]
    # four flows leave each leaf over two uplinks
    assert placed["given"]["worst_load"] >= 2
    assert placed["already_optimal"] is False


def test_place_lays_a_mesh(fabric: str, capsys: pytest.CaptureFixture[str]):
    asked = ["place", "--fabric", fabric, "--hosts", "node[0001-0008]", "--gpus-per-node", "4", "--mesh"]
    laid = json.loads(run(capsys, *asked, "tp=4,pp=2,dp_shard=-1", "--json"))
    assert laid["mesh"]["in_bytes"]
    over = {name: sum(sum(a["levels"][2:]) for a in order["axes"]) for name, order in laid["mesh"]["orders"].items()}
    # FSDP is much louder than the pipeline here: its four hosts are on one leaf, and stages on two.
    along = {axis["axis"]: axis["levels"] for axis in laid["mesh"]["orders"]["laid"]["axes"]}
    assert sum(along["dp_shard"][2:]) == 0 < along["pp"][2]
    assert over["laid"] < over["given"]
    assert {frozenset(laid["order"][::2]), frozenset(laid["order"][1::2])} == {
        frozenset(DEPTH_FIRST[:4]),
        frozenset(DEPTH_FIRST[4:]),
    }
    assert main(["topology", *asked, "tp=8,dp_shard=4"]) == 0
    said = capsys.readouterr()
    check_text("topology-place-mesh", said.err + said.out)


def test_place_says_what_is_already_optimal(fabric: str, capsys: pytest.CaptureFixture[str]):
    words = "already optimal"
    assert words in run(capsys, "place", "--fabric", fabric, "--hosts", "node[0001-0008]")
    # No worse than any other, and neither sorted nor depth-first; what is printed and written is this order.
    other = "node0003,node0001,node0002,node0004,node0007,node0008,node0006,node0005"
    printed = run(capsys, "place", "--fabric", fabric, "--hosts", other, "--hostfile=hosts.txt")
    assert words in printed and printed.splitlines()[-1] == other
    assert Path("hosts.txt").read_text().split()[::2] == other.split(",")
    assert words not in run(capsys, "place", "--fabric", fabric, "--hosts", INTERLEAVED)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hosts", "node0009"], ["no host 'node0009'", "did you mean 'node000", "it has 8 hosts"]),
        (["--hosts", "node[0008-0020]"], ["'node0009'", "and 7 more"]),
        (["--hosts", "node[1"], ["--hosts", "node[1", "for example"]),
    ],
)
def test_misuse_of_place(fabric: str, capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]):
    message = run(capsys, "place", "--fabric", fabric, *arguments, code=2)
    assert all(word in message for word in words), message


def test_verify_needs_an_allocation(fabric: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    assert codes(run(capsys, "verify", code=2)) == ["HT-hosts-too-few"]
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node0001")
    said = run(capsys, "verify", code=2)
    assert codes(said) == ["HT-hosts-too-few"]
    assert "'node0099'" in run(capsys, "verify", "--hosts", "node0001,node0099", "--fabric", fabric, code=2)


class Measured:
    """Stands in for the ranks: what was asked of them, and flows of which those of one host are slow."""

    def __init__(self, hosts: list[str], slowest: float, slow: str) -> None:
        self.asked: list[tuple[list[tuple[str, int]], int, int, Start]] = []
        self.environment: dict[str, str] = {}
        ends = [End(host=host, device="mlx5_0") for host in hosts]
        self.flows = [
            Flow(round=round, source=a, target=b, bandwidth=slowest if slow in (a.host, b.host) else 40e9)
            for round, (a, b) in enumerate(itertools.permutations(ends, 2))
        ]

    def __call__(self, hosts: PlacedHosts, ranks: int, size: int, start: Start, options: HostOptions) -> list[Flow]:
        assert isinstance(options, HostOptions)
        self.asked.append(([(each.host, each.slots) for each in hosts.slots], ranks, size, start))
        self.environment = hosts.environment
        return self.flows


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Measured]:
    def make(number: int, slowest: float = 40e9, slow: str = "node0004") -> Measured:
        made = Measured(DEPTH_FIRST[:number], slowest, slow)
        monkeypatch.setattr("hpctrain.control.programs.links.measure_links", made)
        return made

    monkeypatch.setattr("hpctrain.control.hosts.arrange.program_output", lambda *command: "")
    return make


@pytest.mark.parametrize(("slowest", "code"), [(40e9, 0), (10e9, 3)])
def test_verify_names_what_is_slow(
    fabric: str, capsys: pytest.CaptureFixture[str], measured: Callable[..., Measured], slowest: float, code: int
):
    ranks = measured(4, slowest)
    arguments = ["verify", "-H", "node0001,node0002,node0003,node0004", "--json"]
    for known in (["--fabric", fabric], []):
        result = json.loads(run(capsys, *arguments, *known, code=code))
        assert len(result["flows"]) == 12
        faults = [(fault["kind"], fault["name"], fault["direction"]) for fault in result["faults"]]
        assert faults == ([("host", "node0004", way) for way in ("receives", "sends")] if code else [])
    assert ranks.asked == [([(host, 1) for host in DEPTH_FIRST[:4]], 1, 16_000_000, Start())] * 2


def test_verify_says_what_is_slow(capsys: pytest.CaptureFixture[str], measured: Callable[..., Measured]):
    measured(3, 10e6, "node0002")
    check_text("topology-verify-slow", run(capsys, "verify", "--hosts", "node000[1-3]", code=3))


def test_verify_says_that_two_hosts_are_too_few(
    fabric: str, capsys: pytest.CaptureFixture[str], measured: Callable[..., Measured]
):
    for number, known in ((2, ["--fabric", fabric]), (3, []), (2, [])):
        measured(number)
        assert main(["topology", "verify", "-H", ",".join(DEPTH_FIRST[:number]), *known]) == 0
    check_text("topology-verify-two-hosts", capsys.readouterr().err)


def test_show_and_place_with_forwarding_tables(capsys: pytest.CaptureFixture[str]):
    with_tables = [str(SMALL / "ibnetdiscover.txt"), "--routes", str(SMALL / "ibroutes"), "--json"]
    shown = json.loads(run(capsys, "show", *with_tables))
    assert (shown["adapters"], shown["switches"], shown["leaves"], shown["spines"]) == (6, 4, 2, 2)
    placed = json.loads(run(capsys, "place", "--fabric", *with_tables, "--hosts", "gpu4,gpu1,gpu5,gpu2"))
    assert sorted(placed["order"]) == ["gpu1", "gpu2", "gpu4", "gpu5"]
    assert placed["placed"]["crossings"] == placed["placed"]["bound"] == 2 < placed["given"]["crossings"] == 4


def test_two_subnets_from_two_files(fabric: str, capsys: pytest.CaptureFixture[str]):
    """Hosts are joined by their names: an adapter on each subnet, and a rail of each."""
    text = Path(fabric).read_text()
    guids = {guid: f"{int(guid, 16) + (1 << 40):016x}" for guid in re.findall(r"[0-9a-f]{16}", text)}
    Path("second.txt").write_text(
        re.sub(r"[0-9a-f]{16}", lambda match: guids[match[0]], text.replace("mlx5_0", "mlx5_1"))
    )
    shown = json.loads(run(capsys, "show", fabric, "second.txt", "--json"))
    part = {"hosts": 8, "adapters": 8, "switches": 4}
    assert {key: shown[key] for key in ("hosts", "adapters", "switches", "subnets")} == {
        "hosts": 8,
        "adapters": 16,
        "switches": 8,
        "subnets": 2,
    }
    assert shown["by_subnet"] == [part, part]
    check_text("topology-show-subnets", run(capsys, "show", fabric, "second.txt"))
    arguments = ("--hosts", INTERLEAVED, "--json")
    both = json.loads(run(capsys, "place", "--fabric", fabric, "--fabric", "second.txt", *arguments))
    one = json.loads(run(capsys, "place", "--fabric", fabric, *arguments))
    assert both["order"] == one["order"] == DEPTH_FIRST
    assert both["placed"]["bandwidth_bytes_per_s"] == 2 * one["placed"]["bandwidth_bytes_per_s"]
    assert json.loads(run(capsys, "show", fabric, "--json"))["subnets"] == 1
