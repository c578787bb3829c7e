"""Mermaid and DOT output. The expected output was checked once with the Mermaid and Graphviz programs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fluxcb._draw.drawing import Drawing, Link, Node
from fluxcb._draw.notations import to_dot, to_mermaid

SAMPLE = Drawing(
    "A sample",
    (
        Node("0", "Recorder()", "host", ("step.loss",), ("cbstate.history",)),
        Node("1", 'Printer("a")', "both", ("cbstate.history",)),
        Node("2", "Clip()", "traced"),
        Node("3", "Idle()", "none"),
    ),
    (
        Link("0", "1", "cbstate.history", ("Recorder writes it",)),
        Link("2", "1", "runafter", implied=True),
        Link("1", "2", "in_order", kind="cycle"),
        Link("0", "2", "params", ("both write it",), kind="conflict"),
        Link("0", "3"),
    ),
)


def test_mermaid_has_classes_shapes_and_red_conflicts() -> None:
    assert (
        to_mermaid(SAMPLE)
        == """\
graph LR
  n0("Recorder()"):::host
  n1[["Printer(#34;a#34;)"]]:::hostAndTraced
  n2["Clip()"]:::traced
  n3["Idle()"]:::idle
  n0 -->|"cbstate.history"| n1
  n2 -.->|"runafter"| n1
  n1 -->|"in_order"| n2
  n0 -.-|"params"| n2
  n0 --> n3
  classDef host fill:#fff7e0,stroke:#b45309,color:#0f172a
  classDef hostAndTraced fill:#ede9fe,stroke:#6d28d9,color:#0f172a
  classDef traced fill:#e6f0ff,stroke:#1d4ed8,color:#0f172a
  classDef idle fill:#f4f4f5,stroke:#71717a,color:#0f172a
  linkStyle 2,3 stroke:#dc2626,color:#dc2626"""
    )
    assert to_mermaid(Drawing("Nobody", (), ())) == "graph LR"


@pytest.mark.parametrize(
    ("title", "escaped"),
    [
        ("a#b;", "a#35;b;"),
        ("`md` <b> & \\n", "#96;md#96; #60;b#62; #38; #92;n"),
        ("two\nlines", "two lines"),
        ("日本", "日本"),
        ("Scheduler({'lr': 1e-3})", "Scheduler({'lr': 1e-3})"),
    ],
)
def test_mermaid_escapes_special_characters(title: str, escaped: str) -> None:
    drawing = Drawing("", (Node("0", title, "traced"),), ())
    assert to_mermaid(drawing).splitlines()[1] == f'  n0["{escaped}"]:::traced'


def test_dot_output() -> None:
    host, traced = 'fillcolor="#fff7e0", color="#b45309"', 'fillcolor="#e6f0ff", color="#1d4ed8"'
    both, idle = 'fillcolor="#ede9fe", color="#6d28d9", peripheries=2', 'fillcolor="#f4f4f5", color="#71717a"'
    red = 'color="#dc2626", fontcolor="#dc2626"'
    assert (
        to_dot(SAMPLE)
        == f"""\
digraph "A sample" {{
  rankdir=LR;
  node [shape=box, fontname="monospace", fontsize=11];
  edge [fontname="monospace", fontsize=9];
  n0 [label="Recorder()\\n(host)\\nreads step.loss\\nwrites cbstate.history", style="rounded,filled", {host}];
  n1 [label="Printer(\\"a\\")\\n(host and traced)\\nreads cbstate.history", style="filled", {both}];
  n2 [label="Clip()\\n(traced)", style="filled", {traced}];
  n3 [label="Idle()\\n(runs at no moment)", style="filled", {idle}];
  n0 -> n1 [label="cbstate.history", tooltip="Recorder writes it"];
  n2 -> n1 [label="runafter", tooltip="", style=dotted];
  n1 -> n2 [label="in_order", tooltip="", {red}];
  n0 -> n2 [label="params", tooltip="both write it", dir=none, constraint=false, {red}, style=dashed];
  n0 -> n3 [label="", tooltip=""];
}}"""
    )


def test_data_flows_are_dashed_and_blue() -> None:
    links = (Link("0", "1", "runafter"), Link("0", "1", "cbstate.a", ("Recorder writes it",), kind="data"))
    drawing = Drawing("A sample", SAMPLE.nodes[:2], links)
    mermaid = to_mermaid(drawing).splitlines()
    assert mermaid[3:5] == ['  n0 -->|"runafter"| n1', '  n0 -.->|"cbstate.a"| n1']
    assert mermaid[-1] == "  linkStyle 1 stroke:#0369a1,color:#0369a1"
    blue = 'color="#0369a1", fontcolor="#0369a1", style=dashed'
    assert to_dot(drawing).splitlines()[-2] == (
        f'  n0 -> n1 [label="cbstate.a", tooltip="Recorder writes it", constraint=false, {blue}];'
    )


def test_dot_escapes_special_characters() -> None:
    odd = replace(SAMPLE.nodes[2], title='\\N "q" &lt; a\tb')
    assert '  n0 [label="\\\\N \\"q\\" &amp;lt; a b\\n(traced)",' in to_dot(Drawing('"', (odd,), ()))
    assert to_dot(Drawing('"', (odd,), ())).startswith('digraph "\\"" {')


def test_keys_may_be_any_string() -> None:
    drawing = Drawing("", (Node("a b", "A", "host"), Node('"', "B", "host")), (Link("a b", '"', "x"),))
    assert '  n0 -->|"x"| n1' in to_mermaid(drawing).splitlines()
    assert re.search(r'^  n0 -> n1 \[label="x"', to_dot(drawing), re.MULTILINE)
