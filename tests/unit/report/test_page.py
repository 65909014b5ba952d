from __future__ import annotations

import re
import textwrap
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hpctrain.common.run.directory import RunDirectory, write_json
from hpctrain.report.page import read_summary, render, settings, write_report
from support.golden import check_text
from support.refusals import refused
from support.report.written_runs import digits, recipe_plan, run_events, script_plan, write_run

_VOID = {"meta", "br", "hr", "img", "link"}


class _Page(HTMLParser):
    """The page as a browser sees it: its text outside <style>, its elements, its references, its identifiers."""

    def __init__(self, directory: RunDirectory) -> None:
        super().__init__()
        self.text = self._words = ""
        self.tags: list[str] = []
        self.references: list[str] = []
        self.identifiers: list[str] = []
        self._open: list[str] = []
        self.source = write_report(directory).read_text()
        self.feed(self.source)
        self.text = " ".join(self.text.split())
        assert not self._open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [
            value or "" for name, value in attributes if name in {"src", "href", "xlink:href", "action"}
        ]
        self.identifiers += [value or "" for name, value in attributes if name == "id"]
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def stored(self) -> str:
        """The text outside pictures in short lines, without the recipe's settings."""
        return textwrap.fill(re.sub(r" Recipe model\.name .* Launch ", " Launch ", " ".join(self._words.split())), 120)

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text += f" {data}"
        if not {"style", "svg"}.intersection(self._open):
            self._words += f" {data}"


def test_finished_run(finished: RunDirectory) -> None:
    page = _Page(finished)
    check_text("page", page.stored())
    for setting in ("batch.size 64", "optimizer.nesterov yes", "torch 2.13.0", "hosts node1:2", "torch · horovod · 2"):
        assert setting in page.text
    assert page.tags.count("svg") == 4


def test_page_needs_nothing_beside_itself(finished: RunDirectory, drawn: None) -> None:
    page = _Page(finished)
    assert not {"script", "link", "img", "iframe", "image"} & set(page.tags)
    assert all(reference.startswith("#") for reference in page.references)
    assert not re.search(r"@import|url\((?!#)", page.source)
    assert "#0101" not in page.source
    assert len(set(page.identifiers)) == len(page.identifiers)
    used = {reference.removeprefix("#") for reference in page.references}
    assert used | set(re.findall(r"url\(#([^)]+)\)", page.source)) <= set(page.identifiers)


def test_unfinished_run_says_so(tmp_path: Path) -> None:
    events = run_events(epochs=1)
    page = _Page(write_run(tmp_path / "run", recipe_plan(), events))
    check_text("page-unfinished", page.stored())
    assert page.tags.count("svg") == 4


def _rank(rank: int, host: str, status: str, **facts: object) -> dict[str, object]:
    return {"rank": rank, "host": host, "pid": 7, "started": 100.0, "status": status, "ended": 112.5, **facts}


def test_failed_run_shows_the_fault(tmp_path: Path) -> None:
    fault = {"time": 1.0, "event": "fault", "rank": 3, "host": "node3", "message": "rank 3 on node3: loss <nan>"}
    directory = write_run(tmp_path / "run", recipe_plan(), [*run_events(epochs=1), fault])
    error = {"type": "ValueError", "message": "no <file>"}
    write_json(directory.rank(1), _rank(1, "node2", "failed", exit_code=1, error=error))
    write_json(directory.summary, {**read_summary(directory), "status": "failed"})
    page = _Page(directory)
    check_text("page-failed", page.stored())


@pytest.mark.parametrize("events", [None, []])
def test_script_without_events(tmp_path: Path, events: list[dict[str, object]] | None) -> None:
    page = _Page(write_run(tmp_path / "run", script_plan(), events))
    check_text("page-without-events", page.stored())
    assert "svg" not in page.tags


def test_nothing_a_user_wrote_becomes_markup(tmp_path: Path) -> None:
    attack = "<script>alert(1)</script>"
    recipe = digits().model_copy(update={"name": attack, "source": attack})
    recipe = recipe.model_copy(update={"reported": (recipe.reported[0].model_copy(update={"remark": attack}),)})
    plan = recipe_plan(recipe=recipe, versions={attack: attack})
    fault = {"time": 1.0, "event": "fault", "rank": 1, "host": attack, "message": attack}
    directory = write_run(tmp_path / "run", plan, [*run_events(), fault])
    write_json(directory.rank(0), _rank(0, attack, "failed", error={"type": attack, "message": attack}))
    page = _Page(directory)
    assert "script" not in page.tags
    assert page.text.count(attack) == 7


@pytest.mark.parametrize(
    ("file", "text", "code", "values"),
    [
        ("plan.json", "{}", "HT-file-missing-key", {"key": "ranks"}),
        ("summary.json", "{}", "HT-file-missing-key", {"key": "status"}),
        ("events.jsonl", '{"time": 1, "event": "step"}\n', "HT-event-invalid", {}),
    ],
)
def test_damaged_files_are_named(
    finished: RunDirectory, file: str, text: str, code: str, values: dict[str, object]
) -> None:
    (finished.path / file).write_text(text)
    with refused(code, **values) as caught:
        write_report(finished)
    assert caught.value.message.startswith(str(finished.path / file))


def test_very_much_of_everything_is_counted(tmp_path: Path) -> None:
    fault = {"time": 1.0, "event": "fault", "rank": 3, "host": "n" * 20_000, "message": "<" * 20_000}
    start = {"time": 1.0, "event": "start", "attempt": 1, "iteration": 0, "hosts": [f"n{i}" for i in range(2000)]}
    log = {"time": 1.0, "event": "log", "iteration": 1, "values": {"n" * 10**6: 1.0}}
    events = [*[start, fault] * 110, log, *[fault] * 30]
    directory = write_run(tmp_path / "run", script_plan("s" * 10**6), events)
    page = render(directory)
    assert len(page) < 4e6
    for counted in ("and 21 more", "and 9 more", ">10 earlier attempts"):
        assert counted in page, counted


def test_the_settings_are_those_of_the_training() -> None:
    """What a recipe says of itself is no setting, such as a cost that is empty."""
    found = dict(settings(recipe_plan())["Recipe"])
    assert found["model.name"] == "digits_cnn"
    assert found.keys().isdisjoint({"cost", "model.vocabulary", "images.size", "optimizer.betas"})
