"""The report on a telephone: the page itself never scrolls sideways."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hpctrain.common.run.directory import RunDirectory, write_json
from hpctrain.common.run.plan import Script
from hpctrain.report.page import write_report
from support.report.written_runs import recipe_plan, run_events, script_plan, write_run

_BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_LONG = "/lustre/projects/" + "a-folder-whose-name-has-no-blank_" * 8
# Pages are put into frames of one page, whose script may then measure them.
_FRAMES = """<!doctype html><body style="margin:0">{frames}<script>
addEventListener("load", () => {{
  const widths = [...document.querySelectorAll("iframe")].map(frame => {{
    const page = frame.contentDocument;
    const pictures = [...page.querySelectorAll("svg")].map(svg => svg.getBoundingClientRect().right);
    return [page.documentElement.scrollWidth, Math.ceil(Math.max(0, ...pictures))].join(":");
  }});
  document.body.textContent = "widths " + widths.join(" ") + ".";
}});
</script>"""


@pytest.fixture
def wide(tmp_path: Path) -> list[RunDirectory]:
    """Runs whose hosts, paths and messages are as long as those of a cluster can be."""
    host = "gpu-node-0001.rack-17.a-cluster-with-a-long-name.example.org"
    fault = {"time": 1.0, "event": "fault", "rank": 1, "host": host, "message": f"cannot read {_LONG}\n{'x' * 300}"}
    recipe = write_run(tmp_path / "recipe", recipe_plan(), [*run_events(), fault, *run_events()])
    for rank in range(2):
        record = {"rank": rank, "host": host, "pid": 7, "started": 1.0, "status": "done", "ended": 9.0, "exit_code": 0}
        write_json(recipe.rank(rank), record)
    plan = script_plan().model_copy(update={"script": Script(path=Path(_LONG), arguments=(_LONG,))})
    return [recipe, write_run(tmp_path / "script", plan, [])]


def test_what_may_be_wide_wraps_or_scrolls_in_its_box(wide: list[RunDirectory]) -> None:
    page = write_report(wide[0]).read_text()
    boxes = re.findall(r'<div class="([^"]*)"><table>', page)
    assert len(boxes) == page.count("<table") > 3
    assert {*boxes} == {"card", "card scroll"}
    for rule in (
        r"\.scroll \{[^}]*overflow-x: auto",
        r"\nth, td \{[^}]*overflow-wrap: anywhere",
        r"\nsvg \{[^}]*width: 100%; height: auto",
    ):
        assert re.search(rule, page)


@pytest.mark.skipif(_BROWSER is None, reason="neither chromium nor google-chrome is on the PATH")
def test_no_page_is_wider_than_its_window(wide: list[RunDirectory], tmp_path: Path) -> None:
    assert _BROWSER is not None
    pages = [html.escape(write_report(directory).read_text()) for directory in wide]
    windows = [(width, page) for width in (390, 1200) for page in pages]
    frames = "".join(f'<iframe style="width:{width}px;border:0" srcdoc="{page}"></iframe>' for width, page in windows)
    (tmp_path / "frames.html").write_text(_FRAMES.format(frames=frames))
    done = subprocess.run(
        [
            _BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            (tmp_path / "frames.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    measured = re.search(r"widths ([\d: ]+)\.", done.stdout)
    assert measured, done.stderr
    for (width, _), pair in zip(windows, measured[1].split(), strict=True):
        page, pictures = map(int, pair.split(":"))
        assert page <= width
        assert pictures <= width
