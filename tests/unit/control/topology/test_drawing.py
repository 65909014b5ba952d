"""The picture of a fabric: what it must contain, and that it does not change by itself."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest

from hpctrain.control.topology.drawing import Ring, draw, ring_load, to_png, to_svg
from support.topology.small_fabric import small_fabric, two_levels

SVG = "{http://www.w3.org/2000/svg}"
CROSSING, IDLE, INSIDE = "#0b4f8a", "#b8c2cc", "#7fb3dd"


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def strokes(svg: str, colour: str) -> int:
    """Curves of a colour; the legend has one of each more."""
    paths = ElementTree.fromstring(svg).iter(f"{SVG}path")
    return sum(f"stroke: {colour}" in path.get("style", "") for path in paths)


def test_hosts_switches_and_titles_are_there():
    fabric = two_levels([2, 2], spines=2)
    svg = to_svg(draw(fabric, [Ring(title="before", hosts=[0, 2, 1, 3]), Ring(title="after", hosts=[0, 1, 2, 3])]))
    shown = texts(svg)
    for name in ("h00", "h01", "h02", "h03", "leaf0", "leaf1", "spine0", "spine1"):
        assert shown.count(name) == 2
    assert shown.count("before") == shown.count("after") == 1


@pytest.mark.parametrize(("order", "crossings"), [([0, 2, 1, 3], 4), ([0, 1, 2, 3], 2), ([3, 0, 1, 2], 2)])
def test_an_arc_for_each_two_neighbours(order: list[int], crossings: int):
    svg = to_svg(draw(two_levels([2, 2], spines=1), [Ring(title="", hosts=order)]))
    assert strokes(svg, CROSSING) - 1 == crossings
    assert strokes(svg, INSIDE) - 1 == 4 - crossings


def test_cables_are_coloured_by_load():
    fabric = two_levels([2, 2], spines=2)
    load = np.zeros(len(fabric.source))
    quiet = to_svg(draw(fabric, [Ring(title="", hosts=[0, 1, 2, 3], load=load)]))
    assert strokes(quiet, IDLE) - 1 == 8
    load[0] = 3
    assert strokes(to_svg(draw(fabric, [Ring(title="", hosts=[0, 1, 2, 3], load=load)])), IDLE) - 1 == 7


def test_ring_load_by_hand():
    # every link from a host carries its flow on each rail; two of the four flows go through the spine
    fabric = two_levels([2, 2], spines=1, rails=2)
    load = ring_load(fabric, [0, 1, 2, 3])
    up = (fabric.level[fabric.source] == 1) & (fabric.level[fabric.target] == 2)
    assert load[up].tolist() == [2.0, 2.0]
    assert set(load[fabric.level[fabric.source] == 0]) == {1.0}


def test_load_is_in_shares_of_an_adapter():
    fabric = small_fabric([("a m0", "leaf0", 4.0), ("b m0", "leaf1", 4.0), ("leaf0", "leaf1", 1.0)])
    assert sorted(set(ring_load(fabric, [0, 1]))) == [1.0, 4.0]


def test_a_large_fabric_is_folded():
    svg = to_svg(draw(two_levels([30, 30], spines=1), [Ring(title="", hosts=range(60))]))
    assert [text for text in texts(svg) if text.endswith("hosts")] == ["30 hosts", "30 hosts"]
    assert strokes(svg, CROSSING) - 1 == 2
    assert strokes(svg, INSIDE) - 1 == 0


def test_the_same_figure_gives_the_same_bytes():
    def picture() -> str:
        return to_svg(draw(two_levels([2, 2], spines=1), [Ring(title="x", hosts=[0, 2, 1, 3])]))

    first = picture()
    assert first == picture()
    assert "<dc:date>" not in first


def test_png_is_a_picture():
    png = to_png(draw(two_levels([1, 1], spines=1), [Ring(title="", hosts=[0, 1])]))
    assert png.startswith(b"\x89PNG")


def test_names_that_svg_must_escape():
    svg = to_svg(draw(small_fabric([("a&b m0", "leaf0"), ("<c>$d$ m0", "leaf0")]), [Ring(title="<&>", hosts=[0, 1])]))
    assert {"a&b", "<c>$d$", "<&>"} <= set(texts(svg))


def test_names_do_not_overlap_in_a_row():
    hosts = [f"compute-{number:03d}" for number in range(40)]
    figure = draw(small_fabric([(f"{host} m0", "leaf0") for host in hosts]), [Ring(title="", hosts=range(40))])
    figure.canvas.draw()
    boxes = sorted(
        (text.get_window_extent() for text in figure.axes[0].texts if text.get_text() in hosts), key=lambda box: box.x0
    )
    assert len(boxes) == 40
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_hosts_that_are_cabled_to_each_other():
    fabric = small_fabric([("a m0", "b m0")])
    svg = to_svg(draw(fabric, [Ring(title="", hosts=[0, 1], load=ring_load(fabric, [0, 1]))]))
    assert {"a", "b"} <= set(texts(svg))
    assert ring_load(fabric, [0, 1]).tolist() == [1.0, 1.0]
    assert strokes(svg, CROSSING) - 1 == 0


def test_a_leaf_that_the_ring_goes_through_is_there_without_its_hosts():
    fabric = small_fabric(
        [("a m0", "leaf0"), ("b m0", "leaf1"), ("c m0", "leaf2"), ("leaf0", "leaf1"), ("leaf1", "leaf2")]
    )
    hosts = [0, 2]
    shown = texts(to_svg(draw(fabric, [Ring(title="", hosts=hosts, load=ring_load(fabric, hosts))])))
    assert {"a", "c", "leaf0", "leaf1", "leaf2"} <= set(shown)
    assert "b" not in shown


def test_arcs_and_load_are_of_the_adapters_that_take_part():
    # The second host lost the adapter of the first rail, so that the ring is on the other, where both share a leaf.
    fabric = small_fabric(
        [("a m0", "leaf0"), ("a m1", "leaf1"), ("b m1", "leaf1"), ("leaf0", "spine0"), ("leaf1", "spine0")]
    )
    load = ring_load(fabric, [0, 1])
    assert set(load[fabric.source == fabric.names.index("a m0")]) == {0.0}
    assert strokes(to_svg(draw(fabric, [Ring(title="", hosts=[0, 1], load=load)])), CROSSING) - 1 == 0


def test_switches_above_the_same_boxes_are_one_box():
    fabric = two_levels([1] * 41, spines=41)
    shown = texts(to_svg(draw(fabric, [Ring(title="", hosts=range(41))])))
    assert [text for text in shown if text.endswith("switches")] == ["41 switches"]
