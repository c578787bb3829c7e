"""The geometry and the texts of SVG drawings."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxcb._draw.drawing import Arc, Row, Timeline
from fluxcb._draw.svg import to_svg

SPACE = "{http://www.w3.org/2000/svg}"
RED = "#dc2626"
BACK, STEP, EPOCH = "BackwardEnd x TrainingPhase", "StepEnd x TrainingPhase", "EpochEnd x TrainingPhase"
ROWS = (
    Row("Norm()", BACK, True, "measure", ("step.grads",), ("step.norm",)),
    Row("Clip()", BACK, True, "clip", (), ("step.grads",), cost="3.1% of the FLOPs"),
    Row("Noise()", BACK, True, "add", (), ("step.grads",)),
    Row("Recorder()", STEP, False, "record, EverySteps(steps=5)", ("step.loss",), ("cbstate.history",)),
    Row("Log()", STEP, False, "log", ("step.norm", "cbstate.history")),
    Row("Printer()", STEP, False, "show", ("cbstate.history",)),
    Row("Plot()", EPOCH, False, "plot", ("cbstate.history",)),
    Row("Idle()", ""),
)
ARCS = (
    Arc(0, 1, "in_order", ("in_order",)),
    Arc(1, 2, "step.grads", ("both write it",), "conflict"),
    Arc(3, 4, "cbstate.history", ("Recorder writes `cbstate.history`, Log reads it",)),
    Arc(3, 5, "cbstate.history", ("Recorder writes `cbstate.history`, Printer reads it",), implied=True),
    Arc(4, 5, "runafter", ("Printer.runafter names Log",)),
    Arc(0, 4, "step.norm", ("Norm writes `step.norm` at BackwardEnd, Log reads it at StepEnd",), "data"),
    Arc(3, 6, "cbstate.history", ("Recorder writes it at StepEnd, Plot reads it at EpochEnd",), "data"),
)
SAMPLE = Timeline("A sample", ROWS, ARCS)


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )

    def contains(self, other: Box) -> bool:
        return (
            self.left <= other.left
            and self.top <= other.top
            and other.right <= self.right
            and other.bottom <= self.bottom
        )


class Drawn(NamedTuple):
    """A drawn line: its ends and its vertical segment."""

    bus: int
    kind: str
    earlier: int
    later: int
    ends: tuple[tuple[float, float], tuple[float, float]]
    lane: float
    dash: str | None


def parsed(timeline: Timeline) -> ElementTree.Element:
    return ElementTree.fromstring(to_svg(timeline))


def of_class(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [element for element in root.iter() if name in element.get("class", "").split()]


def words(element: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in element.iter(f"{SPACE}text")]


def tooltip(element: ElementTree.Element) -> str:
    return element.findtext(f"{SPACE}title") or ""


def card(element: ElementTree.Element) -> Box:
    x, y, width, height = (float(element.get(name, "nan")) for name in ("x", "y", "width", "height"))
    return Box(x, y, x + width, y + height)


def cards(root: ElementTree.Element) -> list[Box]:
    return [card(of_class(row, "card")[0]) for row in of_class(root, "row")]


LINE = re.compile(
    r"M(?P<x>[-\d.e]+) (?P<y>[-\d.e]+)H[-\d.e]+Q(?P<lane>[-\d.e]+) (?P=y) (?P=lane) [-\d.e]+"
    r"V[-\d.e]+Q(?P=lane) (?P<y2>[-\d.e]+) [-\d.e]+ (?P=y2)H(?P<x2>[-\d.e]+)"
)


def lines(root: ElementTree.Element) -> list[Drawn]:
    found = []
    for number, bus in enumerate(of_class(root, "bus")):
        for arc in of_class(bus, "arc"):
            [line] = of_class(arc, "line")
            at = LINE.fullmatch(line.get("d", ""))
            assert at is not None, line.get("d")
            ends = ((float(at["x"]), float(at["y"])), (float(at["x2"]), float(at["y2"])))
            kind = arc.get("class", "").split()[1]
            earlier, later = int(arc.get("data-from", "")), int(arc.get("data-to", ""))
            found.append(Drawn(number, kind, earlier, later, ends, float(at["lane"]), arc.get("stroke-dasharray")))
    return found


def texts(root: ElementTree.Element) -> list[Box]:
    """Return the boxes of all texts, in a font as wide as any common monospaced font."""
    found = []

    def visit(element: ElementTree.Element, size: float) -> None:
        size = float(element.get("font-size", size))
        if element.tag == f"{SPACE}text":
            text = element.text or ""
            shown = [c for c in text if not unicodedata.combining(c)]
            cells = sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in shown)
            x, y = float(element.get("x", "nan")), float(element.get("y", "nan"))
            found.append(Box(x, y - 0.8 * size, x + 0.6 * size * cells, y + 0.25 * size))
        for child in element:
            visit(child, size)

    visit(root, 0.0)
    return found


def test_rows_are_in_order_below_their_moments() -> None:
    root = parsed(SAMPLE)
    assert [words(row) for row in of_class(root, "row")] == [
        ["Norm()", "step.grads", "step.norm"],
        ["Clip()", "3.1% of the FLOPs", "step.grads"],
        ["Noise()", "step.grads"],
        ["Recorder()", "step.loss", "cbstate.history"],
        ["Log()", "step.norm, cbstate.history"],
        ["Printer()", "cbstate.history"],
        ["Plot()", "cbstate.history"],
        ["Idle()"],
    ]
    headings = of_class(root, "moment")
    assert [words(heading) for heading in headings] == [[BACK], [STEP], [EPOCH], ["At no moment"]]
    tops = sorted([(box.top, 0) for box in cards(root)] + [(float(h[0].get("y", "nan")), 1) for h in headings])
    assert [is_heading for _, is_heading in tops] == [1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 1, 0]
    host = tooltip(of_class(root, "row")[3])
    assert host == "Recorder()\nrecord, EverySteps(steps=5) runs on the host\nreads step.loss\nwrites cbstate.history"
    fills = [of_class(row, "card")[0].get("fill") for row in of_class(root, "row")]
    assert len({fills[0], fills[3], fills[7]}) == 3


def test_solid_lines_are_left_and_dashed_lines_right() -> None:
    root = parsed(SAMPLE)
    left, right = cards(root)[0].left, cards(root)[0].right
    drawn = {(line.kind, line.earlier, line.later): line for line in lines(root)}
    assert set(drawn) == {(arc.kind, arc.earlier, arc.later) for arc in ARCS}
    for (kind, _, _), line in drawn.items():
        assert line.lane > right if kind == "data" else line.lane < left
        assert {"order": None, "data": "5 3", "conflict": "2 3"}[kind] == line.dash


def test_arrowheads_show_direction_and_conflicts_have_none() -> None:
    root = parsed(SAMPLE)
    for arc in of_class(root, "arc"):
        conflict = "conflict" in arc.get("class", "")
        assert (arc.get("stroke") == RED) is conflict
        assert len(of_class(arc, "tip")) == (0 if conflict else 1)
        for tip in of_class(arc, "tip"):
            x, y = map(float, re.match(r"M([\d.]+) ([\d.]+)", tip.get("d", "")).groups())  # type: ignore[union-attr]
            later = cards(root)[int(arc.get("data-to", ""))]
            assert x in (later.left, later.right)
            assert later.top < y < later.bottom


def test_cycles_are_red_and_implied_edges_are_lighter() -> None:
    arcs = (Arc(3, 4, kind="cycle"), Arc(4, 3, kind="cycle"), Arc(3, 5, implied=True), Arc(4, 5))
    found = {
        a.get("data-from", "") + a.get("data-to", ""): a for a in of_class(parsed(Timeline("", ROWS, arcs)), "arc")
    }
    assert [arc.get("stroke") == RED for arc in map(found.__getitem__, ("34", "43", "35", "45"))] == [
        True,
        True,
        False,
        False,
    ]
    assert float(found["35"].get("stroke-width", "")) < float(found["45"].get("stroke-width", ""))
    assert "implied" in found["35"].get("class", "")


def test_line_tooltips_show_reasons() -> None:
    found = {tuple(tooltip(bus).splitlines()) for bus in of_class(parsed(SAMPLE), "bus")}
    assert ("Norm() before Clip(): in_order",) in found
    assert ("Clip() and Noise(): both write it",) in found
    assert ("Recorder() to Plot(): Recorder writes it at StepEnd, Plot reads it at EpochEnd",) in found
    assert (
        "Recorder() before Log(): Recorder writes `cbstate.history`, Log reads it",
        "Recorder() before Printer(): Recorder writes `cbstate.history`, Printer reads it",
    ) in found


def test_legend_explains_only_what_occurs() -> None:
    explained = [
        "runs on the host",
        "traced into the step",
        "runs at no moment",
        "runs before, within a moment",
        "follows from other lines",
        "data that a later moment reads",
        "conflict: no order is declared",
    ]
    assert words(parsed(SAMPLE))[: len(explained)] == explained
    assert len(of_class(parsed(SAMPLE), "legend")) == len(explained)
    assert words(parsed(Timeline("", ROWS[:1], ())))[0] == "traced into the step"
    assert len(of_class(parsed(Timeline("", ROWS[:1], ())), "legend")) == 1


def test_wide_legend_is_wrapped() -> None:
    root = parsed(SAMPLE)
    bottoms = {text.get("y") for text in list(root.iter(f"{SPACE}text"))[: len(of_class(root, "legend"))]}
    assert len(bottoms) > 1
    assert float(root.get("width", "")) < 800


def test_row_height_fits_all_lines() -> None:
    arcs = tuple(Arc(0, i, f"step.{i}", kind="data") for i in range(1, 13))
    rows = tuple(Row("C()", f"Event{i}") for i in range(13))
    root = parsed(Timeline("", rows, arcs))
    first = cards(root)[0]
    ends = sorted({y for line in lines(root) for _, y in line.ends if y < first.bottom})
    assert len(ends) == 12
    assert first.top < ends[0]
    assert {round(b - a, 3) for a, b in itertools.pairwise(ends)} == {6.0}


def test_long_text_is_wrapped_and_tooltip_is_complete() -> None:
    title = "Callback(" + ", ".join(f"argument_{i}={i}" for i in range(20)) + ")"
    paths = tuple(f"cbstate.some_name_{i}" for i in range(9))
    row = Row(title, STEP, False, "run", paths, ("step.a",))
    [drawn] = of_class(parsed(Timeline("", (row,), ())), "row")
    assert words(drawn) == [
        "Callback(argument_0=0, argument_1=1,",
        "argument_2=2, argument_3=3,",
        "argument_4=4, argument_5=5, …",
        "cbstate.some_name_0,",
        "cbstate.some_name_1, +7 more",
        "step.a",
    ]
    assert tooltip(drawn).splitlines() == [
        title,
        "run runs on the host",
        *(f"reads {path}" for path in paths),
        "writes step.a",
    ]


def test_special_characters_are_escaped() -> None:
    odd = '<b>&amp;"it\'s" ]]> 日本'
    root = parsed(Timeline(odd, (Row(odd, odd, reads=(odd,)),), ()))
    assert tooltip(root) == odd
    assert words(of_class(root, "row")[0]) == [odd, odd]
    control = parsed(Timeline("a\x00b\x1bc\ud800d\ufffee\U0001f600", (), ()))
    assert tooltip(control) == "a\ufffdb\ufffdc\ufffdd\ufffde\U0001f600"


def test_svg_is_self_contained_and_isolated() -> None:
    svg = to_svg(SAMPLE)
    assert re.findall(r"https?://[^\"' ]*", svg) == ["http://www.w3.org/2000/svg"]
    for name in ("id", "style", "href", "src", "onclick"):
        assert f" {name}=" not in svg
    assert "<script" not in svg
    [style] = re.findall("<style>(.*?)</style>", svg)
    rules = re.sub(r"\{.*?\}", "\n", style).split("\n")
    selectors = [s for rule in rules for s in re.split(r",(?![^(]*\))", rule) if s]
    assert selectors
    assert all(selector.startswith(".fluxcb-graph") for selector in selectors)


def test_hovering_over_row_highlights_its_lines() -> None:
    style = re.findall("<style>(.*?)</style>", to_svg(SAMPLE))[0]
    for i in (0, 1, 2, 3, 4, 5, 6):
        assert f".fluxcb-graph:has(.r{i}:hover) .a{i}," in style
    assert ".a7" not in style
    for arc in of_class(parsed(SAMPLE), "arc"):
        assert {f"a{arc.get('data-from')}", f"a{arc.get('data-to')}"} <= set(arc.get("class", "").split())


def test_empty_picture() -> None:
    root = parsed(Timeline("Nothing", (), ()))
    assert tooltip(root) == "Nothing"
    assert words(root) == []


names = st.one_of(
    st.sampled_from(["Metrics()", "ClipGradients(1.0)", "日本語のコールバック(長い名前)", "<script>&\"'", "a" * 90]),
    st.text(max_size=60),
)


@st.composite
def timelines(draw: Any) -> Timeline:
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    rows = tuple(
        Row(
            draw(names),
            f"Event{i} x Phase",
            i % 2 == 0,
            "run",
            *(tuple(draw(st.lists(names, max_size=4))) for _ in "rw"),
        )
        for i, size in enumerate(sizes)
        for _ in range(size)
    )
    moment = [i for i, size in enumerate(sizes) for _ in range(size)]
    pairs = list(itertools.combinations(range(len(rows)), 2))
    arcs = []
    for a, b in draw(st.lists(st.sampled_from(pairs), unique=True, max_size=25)) if pairs else ():
        if moment[a] != moment[b]:
            arcs.append(Arc(a, b, draw(st.sampled_from(["step.a", "cbstate.b"])), kind="data"))
        else:
            kind = draw(st.sampled_from(["order", "order", "cycle", "conflict"]))
            back = kind == "cycle" and draw(st.booleans())
            implied = kind == "order" and draw(st.booleans())
            arcs.append(Arc(b if back else a, a if back else b, "x", ("why",), kind, implied))
    return Timeline(draw(names), rows, tuple(arcs))


@settings(deadline=None)
@given(timelines())
def test_each_arc_is_drawn_once_between_its_rows(timeline: Timeline) -> None:
    root = parsed(timeline)
    boxes, drawn = cards(root), lines(root)
    assert Counter((line.kind, line.earlier, line.later) for line in drawn) == Counter(
        (arc.kind, arc.earlier, arc.later) for arc in timeline.arcs
    )
    for line in drawn:
        edge = boxes[0].right if line.kind == "data" else boxes[0].left
        rows = {line.earlier: boxes[line.earlier], line.later: boxes[line.later]}
        for x, y in line.ends:
            assert abs(x - edge) <= 7  # a line ends at the card, or in the tip that touches the card
            assert [row for row, box in rows.items() if box.top < y < box.bottom]
        assert {row for row, box in rows.items() for _, y in line.ends if box.top < y < box.bottom} == set(rows)


@settings(deadline=None)
@given(timelines())
def test_lines_of_different_buses_do_not_overlap(timeline: Timeline) -> None:
    drawn = lines(parsed(timeline))
    for one, other in itertools.combinations(drawn, 2):
        if one.bus == other.bus:
            continue
        (a, b), (c, d) = (sorted(y for _, y in line.ends) for line in (one, other))
        assert abs(one.lane - other.lane) >= 8 or b < c or d < a
        for (x, y), (x2, y2) in itertools.product(one.ends, other.ends):
            apart = (x < one.lane) != (x2 < other.lane)  # one is on the left of the rows, the other on the right
            assert abs(y - y2) >= 5 or apart


@settings(deadline=None)
@given(timelines())
def test_text_overlaps_nothing_and_all_is_inside(timeline: Timeline) -> None:
    root = parsed(timeline)
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"
    whole = Box(0, 0, width, height)
    found = texts(root)
    for text in found:
        assert whole.contains(text)
    for one, other in itertools.combinations(found, 2):
        assert not one.meets(other)
    boxes = cards(root)
    for row, box in zip(of_class(root, "row"), boxes, strict=True):
        assert whole.contains(box)
        assert all(box.contains(text) for text in texts(row) if text.left < text.right)
    for one, other in itertools.combinations(boxes, 2):
        assert not one.meets(other)
    for line in lines(root):
        assert 0 < line.lane < width
        assert not boxes[0].left <= line.lane <= boxes[0].right


@given(st.text(), st.text(), st.text())
def test_any_text_gives_well_formed_xml(title: str, path: str, label: str) -> None:
    rows = (Row(title, label, False, path, (path,)), Row(path, label, True, title, (), (title,)))
    arcs = (Arc(0, 1, label, (title,)), Arc(1, 0, title, (path,), "conflict"))
    root = parsed(Timeline(label, rows, arcs))
    assert len(of_class(root, "row")) == 2
    assert len(of_class(root, "arc")) == 2


@pytest.mark.parametrize("part", [SAMPLE, Timeline("x", ROWS[:3], ARCS[:1])])
def test_same_timeline_gives_same_image(part: Timeline) -> None:
    assert to_svg(part) == to_svg(Timeline(part.title, tuple(part.rows), tuple(part.arcs)))
