"""Drawings as plain text."""

from __future__ import annotations

import random
from dataclasses import replace

from fluxcb._draw.drawing import Drawing, Link, Node
from fluxcb._draw.outline import to_text, to_tree

MOMENT = ("StepEnd x TrainingPhase",)
SAMPLE = Drawing(
    "All moments",
    (
        Node("0", "Printer()", "host", ("cbstate.history",)),
        Node("1", "Recorder()", "host", ("step.loss",), ("cbstate.history",)),
        Node("2", "Clip()", "traced", (), ("step.grads",)),
        Node("3", "Noise()", "traced", (), ("step.grads",)),
        Node("4", "Scaler()", "both", (), ("step.loss",)),
        Node("5", "Idle()", "none"),
    ),
    (
        Link("1", "0", "cbstate.history", ("Recorder writes `cbstate.history`, Printer reads it",), MOMENT),
        Link("4", "1", "step.loss", ("Scaler writes `step.loss`, Recorder reads it",), MOMENT),
        Link("4", "0", "in_order", ("in_order",), MOMENT, implied=True),
        Link("3", "2", "step.grads", ("both write `step.grads`",), ("BackwardEnd x TrainingPhase",), kind="conflict"),
    ),
)


def test_tree_has_stages_reasons_and_count_of_implied_edges() -> None:
    assert (
        to_tree(SAMPLE)
        == """\
All moments: 6 callbacks, 3 edges, 1 conflict

stage 1
  traced  Clip()
            ! in conflict with Noise() (step.grads)
  traced  Noise()
            ! in conflict with Clip() (step.grads)
  both    Scaler()

stage 2
  host    Recorder()
            after Scaler() (step.loss)

stage 3
  host    Printer()
            after Recorder() (cbstate.history); 1 more follows from these

unordered
  idle    Idle()"""
    )


def test_tree_marks_cycles() -> None:
    nodes = SAMPLE.nodes[:2]
    drawing = Drawing("Loop", nodes, (Link("0", "1", "runafter", kind="cycle"), Link("1", "0", "a.b", kind="cycle")))
    assert (
        to_tree(drawing)
        == """\
Loop: 2 callbacks, 2 edges

stage 1
  host    Printer()
            ! after Recorder() (a.b), in a cycle

stage 2
  host    Recorder()
            ! after Printer() (runafter), in a cycle"""
    )


READS = Link("1", "0", "cbstate.a", ("Recorder writes `cbstate.a` at A, Printer reads it at B",), kind="data")


def test_data_flows_are_listed_at_reader() -> None:
    drawing = Drawing("Data", SAMPLE.nodes[:2], (READS,))
    assert (
        to_tree(drawing)
        == """\
Data: 2 callbacks, 0 edges

unordered
  host    Printer()
            reads cbstate.a from Recorder()
  host    Recorder()"""
    )
    drawing = Drawing("Data", SAMPLE.nodes[:3], (READS, Link("0", "2", "runafter"), Link("2", "1", "in_order")))
    assert (
        to_tree(drawing)
        == """\
Data: 3 callbacks, 2 edges

stage 1
  host    Printer()
            reads cbstate.a from Recorder()

stage 2
  traced  Clip()
            after Printer() (runafter)

stage 3
  host    Recorder()
            after Clip() (in_order)"""
    )


def test_text_has_section_for_data() -> None:
    assert to_text(Drawing("Data", SAMPLE.nodes[:2], (READS,))).partition("\n\ndata\n")[2] == (
        "  Recorder() -> Printer()\n    Recorder writes `cbstate.a` at A, Printer reads it at B"
    )


def test_long_lists_are_wrapped_between_words() -> None:
    nodes = [Node(str(i), f"Callback{i}() at EverySteps(steps=100)", "host") for i in range(6)]
    links = [Link(str(i), "5", f"cbstate.a_quite_long_name_{i}") for i in range(5)]
    lines = to_tree(Drawing("Many", tuple(nodes), tuple(links))).splitlines()
    told = lines[lines.index("stage 2") + 2 :]
    assert max(map(len, told)) <= 100
    assert " ".join(line.strip() for line in told) == "after " + ", ".join(
        f"Callback{i}() at EverySteps(steps=100) (cbstate.a_quite_long_name_{i})" for i in range(5)
    )


def test_empty_drawing_is_one_line() -> None:
    assert to_tree(Drawing("Nobody", (), ())) == "Nobody: 0 callbacks, 0 edges"
    assert to_text(Drawing("Nobody", (), ())) == "Nobody\n\ncallbacks"


TEXT = """\
All moments

callbacks
  Clip()  [traced]
    writes  step.grads
  Idle()  [idle]
  Noise()  [traced]
    writes  step.grads
  Printer()  [host]
    reads   cbstate.history
  Recorder()  [host]
    reads   step.loss
    writes  cbstate.history
  Scaler()  [both]
    writes  step.loss

edges
  Recorder() -> Printer()
    Recorder writes `cbstate.history`, Printer reads it
    at StepEnd x TrainingPhase
  Scaler() -> Printer()
    in_order
    at StepEnd x TrainingPhase
  Scaler() -> Recorder()
    Scaler writes `step.loss`, Recorder reads it
    at StepEnd x TrainingPhase

conflicts
  Clip() -- Noise()
    step.grads
    at BackwardEnd x TrainingPhase"""


def test_text_does_not_depend_on_input_order() -> None:
    assert to_text(SAMPLE) == TEXT
    rng = random.Random(0)
    for _ in range(5):
        nodes, links = list(SAMPLE.nodes), list(SAMPLE.links)
        rng.shuffle(nodes)
        rng.shuffle(links)
        turned = [replace(x, earlier=x.later, later=x.earlier) if x.kind == "conflict" else x for x in links]
        assert to_text(Drawing(SAMPLE.title, tuple(nodes), tuple(turned))) == TEXT
