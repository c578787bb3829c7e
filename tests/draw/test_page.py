"""The page: HTML that stands alone and carries what its script shows."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

from fluxcb._draw.drawing import Drawing, Link, Node
from fluxcb._draw.page import to_page

ODD = "</script><!-- <b>&\"'"
ALL = Drawing(
    "Callbacks at all moments",
    (
        Node("x", "Recorder()", "host", ("step.loss",), (), (("class", ("pkg.Recorder",)), ("reads", ("step.loss",)))),
        Node("y", ODD, "traced", (), (ODD,), (("writes", (ODD,)),)),
    ),
    (Link("y", "x", "step.loss", ("one reason", ODD), ("StepEnd x TrainingPhase",), kind="cycle", implied=True),),
    ("ConflictError: something",),
)
MOMENT = Drawing("StepEnd x TrainingPhase", ALL.nodes[:1], ())
VOID = {"meta", "link"}


class Outline(HTMLParser):
    """What a page consists of; each element that is opened must be closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


PAGE = to_page({"All moments": ALL, f"StepEnd {ODD}": MOMENT})


def test_the_page_is_well_formed_and_offers_each_drawing() -> None:
    outline = Outline(PAGE)
    assert outline.open == []
    assert outline.texts["option"] == ["All moments", f"StepEnd {ODD}"]
    assert [a["value"] for tag, a in outline.attributes if tag == "option"] == ["0", "1"]
    assert [a["id"] for tag, a in outline.attributes if tag == "template"] == ["drawing-0", "drawing-1"]
    assert sum(tag == "svg" for tag, _ in outline.attributes) == 2
    ids = [a["id"] for _, a in outline.attributes if "id" in a]
    assert len(ids) == len(set(ids))


def test_the_data_is_what_the_drawings_say() -> None:
    [data] = re.findall(r'<script type="application/json" id="drawings">(.*?)</script>', PAGE, re.DOTALL)
    assert json.loads(data) == [
        {
            "title": "Callbacks at all moments",
            "problems": ["ConflictError: something"],
            "nodes": [
                {
                    "title": "Recorder()",
                    "where": "runs on the host",
                    "details": [["class", ["pkg.Recorder"]], ["reads", ["step.loss"]]],
                },
                {"title": ODD, "where": "traced into the step", "details": [["writes", [ODD]]]},
            ],
            "links": [
                {
                    "earlier": 1,
                    "later": 0,
                    "label": "step.loss",
                    "reasons": ["one reason", ODD],
                    "moments": ["StepEnd x TrainingPhase"],
                    "kind": "cycle",
                    "implied": True,
                }
            ],
        },
        {
            "title": "StepEnd x TrainingPhase",
            "problems": [],
            "nodes": [
                {
                    "title": "Recorder()",
                    "where": "runs on the host",
                    "details": [["class", ["pkg.Recorder"]], ["reads", ["step.loss"]]],
                }
            ],
            "links": [],
        },
    ]


def test_nothing_is_fetched_from_anywhere() -> None:
    assert set(re.findall(r"https?:[^\"' ]*", PAGE)) == {"http://www.w3.org/2000/svg"}
    for tag, attributes in Outline(PAGE).attributes:
        for name in ("src", "href", "srcset", "action", "data", "xlink:href"):
            assert attributes.get(name) in (None, "data:,"), tag
    assert "url(" not in PAGE
    assert "@import" not in PAGE
    assert "fetch(" not in PAGE


def test_every_id_that_the_script_asks_for_is_there() -> None:
    asked = set(re.findall(r'getElementById\("([\w-]+)"\)', PAGE))
    assert asked == {"drawings", "stage", "panel", "moment", "in", "out", "fit"}
    assert asked <= {a.get("id") for _, a in Outline(PAGE).attributes}
