"""Curves as SVG images."""

import math
import re
from xml.etree import ElementTree

import pytest

from fluxcb.plots.panel import Panel
from fluxcb.plots.svg import panels_svg

SVG = "{http://www.w3.org/2000/svg}"


def parsed(*panels, title=""):
    return ElementTree.fromstring(panels_svg(panels, title=title))


def places(line):
    return [tuple(map(float, point.split(","))) for point in line.get("points").split()]


@pytest.mark.parametrize("points", [[], [(1, math.nan)], [(3, 2.0)], [(0, 1.0), (10, 3.0), (20, math.inf)]])
def test_any_points_give_image(points):
    picture = parsed(Panel({"a & b": points}, "x", "y"), title="<t>")
    finite = [p for p in points if math.isfinite(p[1])]
    assert [len(places(line)) for line in picture.findall(f"{SVG}polyline")] == ([len(finite)] if finite else [])
    assert len(picture.findall(f"{SVG}circle")) == len(finite)
    assert picture.find(f"{SVG}text").text == "<t>"


def test_undrawable_point_leaves_gap():
    points = [(1, 1.0), (2, 2.0), (3, math.nan), (4, 1.0), (5, 3.0), (6, 2.0)]
    lines = parsed(Panel({"loss": points})).findall(f"{SVG}polyline")
    assert [len(places(line)) for line in lines] == [2, 3]


def test_points_are_at_axis_positions():
    picture = parsed(Panel({"loss": [(0, 0.0), (5, 0.1), (10, 0.4)]}, "step", "loss"))
    [line] = picture.findall(f"{SVG}polyline")
    (x0, y0), (x1, y1), (x2, y2) = places(line)
    assert (x1 - x0, y0 - y1) == pytest.approx(((x2 - x0) / 2, (y0 - y2) / 4), abs=0.11)
    label = {text.text: text for text in picture.findall(f"{SVG}text")}
    assert float(label["10"].get("x")) == pytest.approx(x2, abs=0.11)
    assert float(label["0.4"].get("y")) == pytest.approx(y2 + 4, abs=0.11)


def test_logarithmic_axis():
    [line] = parsed(Panel({"loss": [(0.1, 0.0), (1, 1.0), (10, 2.0)]}, log_x=True)).findall(f"{SVG}polyline")
    (a, _), (b, _), (c, _) = places(line)
    assert b - a == pytest.approx(c - b, abs=0.11)


def test_mark_is_vertical_line_with_legend_entry():
    picture = parsed(Panel({"loss": [(0, 0.0), (10, 1.0)]}, marks={"best: 5": 5.0}))
    [mark] = [path for path in picture.findall(f"{SVG}path") if path.get("class") == "mark"]
    (left, _), (right, _) = places(picture.find(f"{SVG}polyline"))
    x = float(re.match(r"M([\d.]+) ", mark.get("d"))[1])
    assert x == pytest.approx((left + right) / 2, abs=0.11)
    assert [text.text for text in picture.iter(f"{SVG}text") if text.get("class") == "legend"] == ["loss", "best: 5"]


@pytest.mark.parametrize("length", [5, 30, 200])
def test_legend_is_inside_image_and_above_curves(length):
    names = [f"{n}{'m' * length}" for n in range(5)]
    picture = parsed(Panel({name: [(0, 0.0), (1, 1.0)] for name in names}))
    entries = [text for text in picture.iter(f"{SVG}text") if text.get("class") == "legend"]
    assert [entry.text for entry in entries] == names
    for entry in entries:  # 7 pixels are a mean width of sans-serif text at 12
        assert float(entry.get("x")) + 7 * len(entry.text) <= float(picture.get("width"))
    top = min(y for line in picture.findall(f"{SVG}polyline") for _, y in places(line))
    assert max(float(entry.get("y")) for entry in entries) < top
    spots = [(entry.get("x"), entry.get("y")) for entry in entries]
    assert len(set(spots)) == len(spots)


def test_lines_differ_in_color_and_dashes():
    curves = {str(n): [(0, 0.0), (1, n)] for n in range(6)}
    lines = parsed(Panel(curves)).findall(f"{SVG}polyline")
    assert len({line.get("stroke") for line in lines}) == 6
    assert len({line.get("stroke-dasharray") for line in lines}) == 6


def test_panels_are_stacked_vertically():
    picture = parsed(Panel({"a": [(0, 0.0), (1, 1.0)]}), Panel({"b": [(0, 0.0), (1, 1.0)]}))
    upper, lower = (places(line) for line in picture.findall(f"{SVG}polyline"))
    assert max(y for _, y in upper) < min(y for _, y in lower)
    assert max(y for _, y in lower) < float(picture.get("height"))
