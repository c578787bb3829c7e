"""The SVG: XML that says what the drawing says, with nothing from outside."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxcb._draw.boxes import text_width
from fluxcb._draw.drawing import Drawing, Link, Node
from fluxcb._draw.svg import to_svg

SPACE = "{http://www.w3.org/2000/svg}"
RED = "#dc2626"


def parsed(drawing: Drawing) -> ElementTree.Element:
    return ElementTree.fromstring(to_svg(drawing))


def of_class(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [element for element in root.iter() if name in element.get("class", "").split()]


def words(element: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in element.iter(f"{SPACE}text")]


def tooltip(element: ElementTree.Element) -> str:
    return element.findtext(f"{SPACE}title") or ""


RECORDER = Node("r", "Recorder()", "host", ("step.loss",), ("cbstate.history",))
PRINTER = Node("p", "Printer()", "both", ("cbstate.history",))
CLIP = Node("c", "Clip()", "traced", (), ("step.grads",))
CLIP_TOO = Node("d", "Clip() #2", "traced", (), ("step.grads",))
IDLE = Node("i", "Idle()", "none")
SAMPLE = Drawing(
    "A sample",
    (RECORDER, PRINTER, CLIP, CLIP_TOO, IDLE),
    (
        Link("r", "p", "cbstate.history", ("Recorder writes it",), ("StepEnd x TrainingPhase",)),
        Link("c", "d", "step.grads", ("both write it",), ("BackwardEnd x TrainingPhase",), kind="conflict"),
    ),
)


def test_boxes_say_who_runs_where_and_what_is_read_and_written() -> None:
    nodes = of_class(parsed(SAMPLE), "node")
    assert [words(node) for node in nodes] == [
        ["host", "Recorder()", "reads", "step.loss", "writes", "cbstate.history"],
        ["host", "traced", "Printer()", "reads", "cbstate.history"],
        ["traced", "Clip()", "writes", "step.grads"],
        ["traced", "Clip() #2", "writes", "step.grads"],
        ["idle", "Idle()"],
    ]
    assert tooltip(nodes[0]) == "Recorder()\nruns on the host\nreads step.loss\nwrites cbstate.history"


def test_host_and_traced_differ_in_shape_and_colour_too() -> None:
    host, both, traced, _, _ = (of_class(node, "box")[0] for node in of_class(parsed(SAMPLE), "node"))
    assert len({box.get("fill") for box in (host, both, traced)}) == 3
    corners = re.compile(r"^M(\d+) 0H.*H(\d+)Q")  # the upper left one, and the lower left one
    assert [corners.match(box.get("d", "")).groups() for box in (host, both, traced)] == [  # type: ignore[union-attr]
        ("9", "9"),
        ("9", "0"),
        ("0", "0"),
    ]


def test_orders_have_a_tip_and_conflicts_are_red_and_dashed_without_one() -> None:
    order, conflict = of_class(parsed(SAMPLE), "link")
    assert order.get("class") == "link order"
    assert tooltip(order) == "Recorder() before Printer()\nRecorder writes it\nat StepEnd x TrainingPhase"
    assert len(of_class(order, "tip")) == 1
    [line] = of_class(order, "line")
    assert (line.get("stroke") != RED, line.get("stroke-dasharray")) == (True, None)
    assert tooltip(conflict) == "Clip() and Clip() #2\nboth write it\nat BackwardEnd x TrainingPhase"
    assert of_class(conflict, "tip") == []
    [line] = of_class(conflict, "line")
    assert (line.get("stroke"), line.get("stroke-dasharray")) == (RED, "6 4")


def test_a_circle_is_red_and_what_is_implied_is_thin() -> None:
    links = (Link("r", "p", kind="cycle"), Link("p", "c"), Link("r", "c", implied=True))
    drawn = of_class(parsed(Drawing("", (RECORDER, PRINTER, CLIP), links)), "link")
    lines = {link.get("data-link"): of_class(link, "line")[0] for link in drawn}
    assert lines["0"].get("stroke") == RED
    assert RED not in (lines["1"].get("stroke"), lines["2"].get("stroke"))
    assert float(lines["2"].get("stroke-width", 0)) < float(lines["1"].get("stroke-width", 0))


def test_labels_stand_on_links_where_there_is_room() -> None:
    labels = of_class(parsed(SAMPLE), "label")
    assert [label.text for label in labels] == ["cbstate.history", "step.grads"]


def test_a_label_that_is_too_long_loses_its_beginning() -> None:
    label = "cbstate.some_hub.that_is_nested.learning_rate"
    [shown] = of_class(parsed(Drawing("", (RECORDER, CLIP), (Link("r", "c", label),))), "label")
    assert shown.text is not None
    assert shown.text[0] == "…"
    assert label.endswith(shown.text[1:])


def test_the_legend_explains_what_occurs_and_nothing_else() -> None:
    assert words(of_class(parsed(SAMPLE), "legend")[0]) == [
        "runs on the host",
        "traced into the step",
        "on the host, and traced",
        "runs at no moment",
        "runs before",
        "conflict: no order is known",
    ]
    assert words(of_class(parsed(Drawing("", (CLIP,), ())), "legend")[0]) == ["traced into the step"]


def test_long_text_is_cut_and_stands_in_full_in_the_tooltip() -> None:
    title = f"Callback({'x' * 200})"
    node = Node("a", title, "host", tuple(f"cbstate.some_quite_long_name_of_a_path.{i}" for i in range(9)))
    [drawn] = of_class(parsed(Drawing("", (node,), ())), "node")
    shown = words(drawn)
    assert shown[1] == title[:31] + "…"
    assert shown[-1] == "+7 more"
    assert len(shown) == 6  # host, the title, `reads` and three lines
    assert tooltip(drawn).splitlines() == [title, "runs on the host", *(f"reads {path}" for path in node.reads)]


def test_a_long_title_goes_on_below() -> None:
    node = Node("a", "SomeQuiteLongCallback() at EverySteps(steps=100)", "host")
    [drawn] = of_class(parsed(Drawing("", (node,), ())), "node")
    assert words(drawn) == ["host", "SomeQuiteLongCallback() at", "EverySteps(steps=100)"]


def test_wide_characters_count_twice() -> None:
    assert text_width("ab", 10) == pytest.approx(2 * text_width("a", 10))
    assert text_width("日本", 10) == text_width("abcd", 10)
    assert text_width("e\u0301", 10) == text_width("e", 10)


@given(st.text(), st.text(), st.text())
def test_any_text_makes_well_formed_xml(title: str, path: str, label: str) -> None:
    nodes = (Node("<&'\"", title, "host", (path,)), Node("b", path, "traced", (), (title,)))
    links = (Link("<&'\"", "b", label, (title,), (path,)), Link("b", "<&'\"", title, kind="conflict"))
    root = parsed(Drawing(label, nodes, links))
    assert len(of_class(root, "node")) == 2
    assert len(of_class(root, "link")) == 2


def test_special_characters_arrive_as_they_are() -> None:
    odd = '<b>&amp;"it\'s" ]]> 日本'
    root = parsed(Drawing(odd, (Node("a", odd, "host", (odd,)),), ()))
    assert tooltip(root) == odd
    assert words(of_class(root, "node")[0]) == ["host", odd, "reads", odd]
    control = parsed(Drawing("a\x00b\x1bc\ud800d\ufffee", (), ()))
    assert tooltip(control) == "a\ufffdb\ufffdc\ufffdd\ufffde"


def test_it_stands_alone_and_beside_others() -> None:
    svg = to_svg(SAMPLE)
    assert re.findall(r"https?://[^\"' ]*", svg) == ["http://www.w3.org/2000/svg"]
    for name in ("id", "style", "href", "src"):
        assert f" {name}=" not in svg
    assert "<style" not in svg
    root = parsed(SAMPLE)
    paper = of_class(root, "paper")[0]
    assert (paper.get("width"), paper.get("height")) == (root.get("width"), root.get("height"))
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"


def test_nothing_makes_an_empty_picture() -> None:
    root = parsed(Drawing("Nobody", (), ()))
    assert tooltip(root) == "Nobody"
    assert words(root) == []


def test_the_same_drawing_gives_the_same_text() -> None:
    assert to_svg(SAMPLE) == to_svg(SAMPLE)
