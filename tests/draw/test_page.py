"""The HTML page is self-contained and has no scripts."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from fluxcb._draw.drawing import Arc, Row, Timeline
from fluxcb._draw.page import to_page
from fluxcb._draw.svg import to_svg

ODD = "</style><script>alert(1)</script><!-- <b>&\"'"
STEP, EPOCH = "StepEnd x TrainingPhase", "EpochEnd x TrainingPhase"
TIMELINE = Timeline(
    f"Callbacks {ODD}",
    (
        Row(
            "Recorder()",
            STEP,
            False,
            "record",
            ("step.loss",),
            (),
            (("class", ("pkg.Recorder",)), ("reads", ("a", "b"))),
        ),
        Row(ODD, STEP, False, ODD, (), (ODD,), (("writes", (ODD,)),)),
        Row("Printer()", EPOCH, False, "show"),
        Row("Idle()", ""),
    ),
    (
        Arc(0, 1, "step.loss", ("one reason", ODD)),
        Arc(0, 1, "x", ("both write it",), "conflict"),
        Arc(0, 2, "x", ("Recorder writes, Printer reads",), "data"),
    ),
    ("ConflictError: something", ODD),
)
VOID = {"meta", "link"}


class Outline(HTMLParser):
    """Parse the elements of a page, and check that each opened element is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
            self.texts.append((tag, ""))

    def handle_startendtag(self, tag, attrs) -> None:
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        if self.open and self.texts[-1][0] == self.open[-1]:
            tag, text = self.texts[-1]
            self.texts[-1] = (tag, text + data)

    def of(self, *tags: str) -> list[str]:
        return [text.strip() for tag, text in self.texts if tag in tags]


PAGE = to_page(TIMELINE)


def test_page_is_well_formed_without_scripts() -> None:
    outline = Outline(PAGE)
    assert outline.open == []
    assert outline.of("script") == []
    assert not any(name.startswith("on") for _, attributes in outline.attributes for name in attributes)
    assert outline.of("h1") == [TIMELINE.title]
    assert outline.of("pre") == list(TIMELINE.problems)
    assert to_svg(TIMELINE) in PAGE


def test_details_of_each_moment_can_be_opened() -> None:
    outline = Outline(PAGE)
    assert outline.of("summary", "small") == [STEP, "2 handlers", EPOCH, "1 handler", "At no moment", "1 callback"]
    assert outline.of("h3") == ["Recorder().record", f"{ODD}.{ODD}", "Printer().show", "Idle()"]
    assert outline.of("dt", "dd") == [
        *("class", "pkg.Recorder", "reads", "a", "b"),
        *("in conflict with", f"{ODD}: both write it"),
        *("writes", ODD),
        *("after", f"Recorder(): one reason; {ODD}"),
        *("in conflict with", "Recorder(): both write it"),
        *("reads from", "Recorder(): Recorder writes, Printer reads"),
    ]


def test_page_loads_nothing_external() -> None:
    assert set(re.findall(r"https?:[^\"' ]*", PAGE)) == {"http://www.w3.org/2000/svg"}
    for tag, attributes in Outline(PAGE).attributes:
        for name in ("src", "href", "srcset", "action", "data", "xlink:href"):
            assert attributes.get(name) in (None, "data:,"), tag
    assert "url(" not in PAGE
    assert "@import" not in PAGE


def test_empty_page() -> None:
    outline = Outline(to_page(Timeline("Nothing", (), ())))
    assert outline.of("h1") == ["Nothing"]
    assert outline.of("summary") == []
