"""Drawings of callback graphs: contents, selection of moments, and formats."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import Any

import pytest

import fluxcb.callbacks as library
from fluxcb import Append, Callback, Read, Unresolvable, Write, every, in_order, on
from fluxcb._check.dataflow import first_reads
from fluxcb._check.graph import CallbackGraph
from fluxcb._check.ordering import moment_name
from fluxcb._check.pictures import drawing, timeline
from fluxcb._check.preflight import checked_graph, unchecked_graph
from fluxcb._draw.drawing import Drawing, Timeline
from fluxcb._errors import CheckError, ConflictError, CycleError, DeclarationError
from fluxcb.events import BackwardEnd, EpochEnd, HostEvent, StepBegin, StepEnd
from fluxcb.phases import AbstractTrainingPhase, Phase, TrainingPhase, ValidationPhase
from tests.contract.every_callback import HOW, found

PHASES = (TrainingPhase, ValidationPhase)


class Norm(Callback):
    """Measure the gradients.

    A second paragraph.
    """

    def stateaccess(self) -> Any:  # norm
        return {"step": {"grads": Read(), "norm": Write()}}

    @on
    def measure(self, event: BackwardEnd, phase: AbstractTrainingPhase, learner: Any) -> None: ...


class Clip(Callback):
    def stateaccess(self) -> Any:
        return {"step": {"grads": Write()}}

    @on
    def clip(self, event: BackwardEnd, phase: AbstractTrainingPhase, learner: Any) -> None: ...


class Log(Callback):
    def stateaccess(self) -> Any:
        return {"step": {"norm": Read()}, "cbstate": {"log": Write(), "last": Read(previous=True), "notes": Append()}}

    @on(access={"step": {"norm": Read()}, "cbstate": {"log": Write()}})
    def note(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None: ...

    @on(access={"cbstate": {"notes": Append(), "last": Read(previous=True)}})
    def close(self, event: EpochEnd, phase: TrainingPhase, learner: Any) -> None: ...


class Show(Callback):
    def stateaccess(self) -> Any:
        return {"cbstate": {"log": Read(), "notes": Read()}}

    def runafter(self) -> Any:
        return (Log,)

    @on
    def show(self, event: StepEnd | EpochEnd, phase: TrainingPhase, learner: Any) -> None: ...


class Spike(Callback):
    def stateaccess(self) -> Any:
        return {"step": {"norm": Read()}, "cbstate": {"last": Write()}}

    @on(access={"step": {"norm": Read()}})
    def look(self, event: BackwardEnd, phase: TrainingPhase, learner: Any) -> None: ...

    @on(access={"cbstate": {"last": Write()}})
    def tell(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None: ...


class Idle(Callback): ...


def sample() -> CallbackGraph:
    clip, norm = Clip(), Norm()
    return checked_graph([every(Show(), steps=5), Log(), in_order(clip, norm), Spike(), Idle()], PHASES)


def nodes(picture: Drawing) -> dict[str, tuple[Any, ...]]:
    return {node.title: (node.kind, node.reads, node.writes) for node in picture.nodes}


def links(picture: Drawing) -> list[tuple[Any, ...]]:
    title = {node.key: node.title for node in picture.nodes}
    return [(title[x.earlier], title[x.later], x.kind, x.label, x.moments, x.implied) for x in picture.links]


STEP, EPOCH, BACK = "StepEnd x TrainingPhase", "EpochEnd x TrainingPhase", "BackwardEnd x TrainingPhase"
SHOW = "Show() at EverySteps(steps=5)"


def test_drawing_of_all_moments() -> None:
    picture = drawing(sample())
    assert picture.title == "Callbacks at all moments"
    assert nodes(picture) == {
        SHOW: ("host", ("cbstate.log", "cbstate.notes"), ()),
        "Log()": ("host", ("step.norm", "cbstate.last (previous)"), ("cbstate.log", "cbstate.notes (append)")),
        "Clip()": ("traced", (), ("step.grads",)),
        "Norm()": ("traced", ("step.grads",), ("step.norm",)),
        "Spike()": ("both", ("step.norm",), ("cbstate.last",)),
        "Idle()": ("none", (), ()),
    }
    assert sorted(links(picture)) == [
        ("Clip()", "Norm()", "order", "in_order", (BACK,), False),
        ("Log()", SHOW, "order", "runafter", (STEP, EPOCH), False),
        ("Norm()", "Log()", "data", "step.norm", (), False),
        ("Norm()", "Spike()", "order", "step.norm", (BACK,), False),
        ("Spike()", "Log()", "data", "cbstate.last", (), False),
    ]


def test_drawing_of_one_moment() -> None:
    graph = sample()
    assert nodes(drawing(graph, [(EpochEnd, TrainingPhase)])) == {
        SHOW: ("host", ("cbstate.log", "cbstate.notes"), ()),
        "Log()": ("host", ("cbstate.last (previous)",), ("cbstate.notes (append)",)),
    }
    picture = drawing(graph, [(StepEnd, TrainingPhase)])
    assert picture.title == STEP
    assert nodes(picture)["Spike()"] == ("host", (), ("cbstate.last",))
    assert links(picture) == [("Log()", SHOW, "order", "runafter", (STEP,), False)]


def rows(shown: Timeline) -> list[tuple[str, str, str]]:
    return [(row.moment, row.callback, row.handler) for row in shown.rows]


def test_rows_follow_order_of_fit() -> None:
    shown = timeline(sample())
    assert rows(shown) == [
        (BACK, "Clip()", "clip"),
        (BACK, "Norm()", "measure"),
        (BACK, "Spike()", "look"),
        (STEP, "Log()", "note"),
        (STEP, SHOW, "show, EverySteps(steps=5)"),
        (STEP, "Spike()", "tell"),
        (EPOCH, "Log()", "close"),
        (EPOCH, SHOW, "show"),
        ("", "Idle()", ""),
    ]
    assert [row.traced for row in shown.rows] == [True] * 3 + [False] * 6
    assert [(a.earlier, a.later, a.kind, a.label) for a in shown.arcs] == [
        (0, 1, "order", "in_order"),
        (1, 2, "order", "step.norm"),
        (3, 4, "order", "runafter"),
        (6, 7, "order", "runafter"),
        (1, 3, "data", "step.norm"),
        (5, 6, "data", "cbstate.last"),
    ]
    assert shown.arcs[-1].reasons == (f"Spike writes `cbstate.last` at {STEP}, Log reads it at {EPOCH}",)
    assert rows(timeline(sample(), [(EpochEnd, TrainingPhase)])) == rows(shown)[6:8]


def test_rows_show_shared_paths_first() -> None:
    one, other = Reader("a", cb(own=Write(), x=Write())), Reader("b", cb(x=Read()))
    assert [row.writes for row in timeline(checked_graph([one, other], PHASES)).rows] == [
        ("cbstate.x", "cbstate.own"),
        (),
    ]


def test_details_show_declarations_and_moments() -> None:
    shown = timeline(sample())
    details = {(row.callback, row.moment): dict(row.details) for row in shown.rows}
    norm = details["Norm()", BACK]
    assert re.fullmatch(r"Norm\.stateaccess  .*test_pictures\.py:\d+", norm.pop("declared")[0])
    assert re.fullmatch(r"Norm\.measure  .*test_pictures\.py:\d+", norm.pop("handler")[0])
    assert norm == {
        "runs": ("2 of 3 handlers",),
        "does": ("Measure the gradients.",),
        "class": (f"{__name__}.Norm",),
        "reads": ("step.grads",),
        "writes": ("step.norm",),
    }
    assert details[SHOW, STEP]["runs"] == ("2 of 3 handlers, EverySteps(steps=5)",)
    assert details[SHOW, EPOCH]["runs"] == ("2 of 2 handlers",)
    assert list(details["Idle()", ""]) == ["class", "declared"]


def test_each_edge_and_flow_is_drawn_once() -> None:
    callbacks: list[Callback] = []
    for name in found():
        how = HOW.get(name, {})
        made = how["make"]() if "make" in how else getattr(library, name)()
        graph = unchecked_graph([*callbacks, made], PHASES)
        if not graph.conflicts and not any(isinstance(problem, ConflictError) for problem in graph.problems):
            callbacks.append(made)
    graph = checked_graph(callbacks, PHASES)
    assert len(callbacks) > 55
    shown = timeline(graph)
    ends = [tuple((shown.rows[i].moment, shown.rows[i].callback) for i in (a.earlier, a.later)) for a in shown.arcs]
    label = [d.label for d in graph.declared]
    assert Counter(end for end, arc in zip(ends, shown.arcs, strict=True) if arc.kind == "order") == Counter(
        ((moment_name(moment), label[i]), (moment_name(moment), label[j]))
        for (i, j), edge in graph.edges.items()
        for moment in edge.moments
    )
    assert Counter(end for end, arc in zip(ends, shown.arcs, strict=True) if arc.kind == "data") == Counter(
        tuple((moment_name((h.event, h.phase)), h.declared.label) for h in (flow.writer, flow.reader))
        for flow in first_reads(graph, graph.moments)
    )
    assert {arc.kind for arc in shown.arcs} == {"order", "data"}
    for arc in shown.arcs:
        assert arc.earlier < arc.later
        assert (shown.rows[arc.earlier].moment == shown.rows[arc.later].moment) is (arc.kind == "order")
    handlers = Counter((moment_name(m), h.declared.label) for m, found in graph.orders.items() for h in found)
    assert Counter((row.moment, row.callback) for row in shown.rows if row.moment) == handlers
    headings = [moment for moment, _ in itertools.groupby(row.moment for row in shown.rows)]
    assert len(headings) == len(set(headings))


class Reader(Callback):
    """Read the given paths at StepEnd."""

    def __init__(self, name: str, access: Any, *after: type[Callback]) -> None:
        self.title, self.access, self.after = name, access, after

    def stateaccess(self) -> Any:
        return self.access

    @on
    def run(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None: ...

    def __repr__(self) -> str:
        return self.title


def cb(**permissions: Any) -> Any:
    return {"cbstate": permissions}


def test_transitive_edges_are_marked_as_implied() -> None:
    a, b, c = (
        Reader("a", cb(x=Write(), y=Write())),
        Reader("b", cb(x=Read(), z=Write())),
        Reader("c", cb(y=Read(), z=Read())),
    )
    assert links(drawing(checked_graph([a, b, c], PHASES))) == [
        ("a", "b", "order", "cbstate.x", (STEP,), False),
        ("a", "c", "order", "cbstate.y", (STEP,), True),
        ("b", "c", "order", "cbstate.z", (STEP,), False),
    ]


def test_label_counts_further_reasons() -> None:
    a, b = Reader("a", cb(x=Write(), y=Write())), Reader("b", cb(x=Read(), y=Read()))
    [link] = drawing(checked_graph([a, b], PHASES)).links
    assert link.label == "cbstate.x +1"
    assert link.reasons == (
        "Reader writes `cbstate.x`, Reader reads it",
        "Reader writes `cbstate.y`, Reader reads it",
    )


class Forth(Callback):
    """Write at StepBegin what `Back` reads then, and read at StepEnd what `Back` writes then."""

    def stateaccess(self) -> Any:
        return cb(forth=Write(), back=Read())

    @on(access=cb(forth=Write()))
    def begin(self, event: StepBegin, phase: TrainingPhase, learner: Any) -> None: ...

    @on(access=cb(back=Read()))
    def end(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None: ...


class Back(Callback):
    def stateaccess(self) -> Any:
        return cb(forth=Read(), back=Write())

    @on(access=cb(forth=Read()))
    def begin(self, event: StepBegin, phase: TrainingPhase, learner: Any) -> None: ...

    @on(access=cb(back=Write()))
    def end(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None: ...


def test_different_orders_at_different_moments_are_not_cycle() -> None:
    graph = checked_graph([Forth(), Back()], PHASES)
    assert links(drawing(graph)) == [
        ("Forth()", "Back()", "order", "cbstate.forth", ("StepBegin x TrainingPhase",), False),
        ("Back()", "Forth()", "order", "cbstate.back", (STEP,), False),
    ]
    assert {arc.kind for arc in timeline(graph).arcs} == {"order"}


def test_cycle_within_moment_is_drawn_as_cycle() -> None:
    a, b = Reader("a", cb(x=Write(), y=Read())), Reader("b", cb(x=Read(), y=Write()))
    follower = Reader("c", cb(x=Read()))
    graph = unchecked_graph([a, b, follower], PHASES)
    assert [type(problem) for problem in graph.problems] == [CycleError]
    picture = drawing(graph)
    assert links(picture) == [
        ("a", "b", "cycle", "cbstate.x", (STEP,), False),
        ("b", "a", "cycle", "cbstate.y", (STEP,), False),
        ("a", "c", "order", "cbstate.x", (STEP,), False),
    ]
    assert [arc.kind for arc in timeline(graph).arcs] == ["cycle", "cycle", "order"]
    assert timeline(graph).problems == (f"CycleError: {graph.problems[0]}",)
    for form in ("tree", "text", "mermaid", "dot", "svg", "html"):
        assert graph.render(form)


class Rival(Callback):
    def stateaccess(self) -> Any:
        return {"step": {"grads": Write()}}

    @on
    def clip(self, event: BackwardEnd, phase: AbstractTrainingPhase, learner: Any) -> None: ...


def test_conflicts_are_drawn_at_their_moments() -> None:
    graph = unchecked_graph([Clip(), Rival(), Norm()], PHASES)
    [found] = graph.conflicts
    assert (found.a.declared.label, found.b.declared.label) == ("Clip()", "Rival()")
    assert found.moments == [(BackwardEnd, TrainingPhase)]
    assert graph.problems == [found.error]
    assert isinstance(found.error, ConflictError)
    conflict = ("Clip()", "Rival()", "conflict", "step.grads", (BACK,), False)
    assert conflict in links(drawing(graph))
    assert conflict in links(drawing(graph, [(BackwardEnd, TrainingPhase)]))
    assert drawing(graph, [(StepEnd, TrainingPhase)]).links == ()
    [link] = [link for link in drawing(graph).links if link.kind == "conflict"]
    assert "\n".join(link.reasons) == str(found.error)
    with pytest.raises(ConflictError) as caught:
        checked_graph([Clip(), Rival(), Norm()], PHASES)
    assert str(caught.value) == str(found.error)


class Hermit(Rival):
    def resolveconflict(self, other: Callback) -> Any:
        return Unresolvable()


def test_unresolvable_callbacks_are_drawn_as_conflict() -> None:
    graph = unchecked_graph([Clip(), Hermit()], PHASES)
    assert links(drawing(graph)) == [("Clip()", "Hermit()", "conflict", "never together", (BACK,), False)]
    assert graph.problems == [graph.conflicts[0].error]


def test_conflict_at_requested_moment_raises_and_is_not_kept() -> None:
    graph = checked_graph([Clip(), Rival()], (ValidationPhase,))
    for _ in range(2):
        with pytest.raises(ConflictError):
            graph.render(event=BackwardEnd, phase=TrainingPhase)
    assert (graph.conflicts, graph.problems) == ([], [])


def test_unknown_format_raises_with_suggestion() -> None:
    with pytest.raises(DeclarationError) as caught:
        sample().render("mermade")
    assert str(caught.value) == (
        "A callback graph has no form 'mermade'. Did you mean `mermaid`?\n"
        "  fix:   choose one of tree, text, mermaid, dot, svg, html"
    )


def test_default_format_is_tree() -> None:
    graph = sample()
    assert graph.render() == graph.render("tree")
    assert (
        graph.render(event=StepEnd, phase=TrainingPhase)
        == f"""\
{STEP}: 3 callbacks, 1 edge

stage 1
  host    Log()

stage 2
  host    {SHOW}
            after Log() (runafter)

unordered
  host    Spike()"""
    )


def test_selecting_event_or_phase_gives_several_moments() -> None:
    graph = checked_graph([Reader("a", {}), Everyone()], PHASES)
    assert graph.render(event=StepEnd).splitlines()[0] == (
        "StepEnd x TrainingPhase, StepEnd x ValidationPhase: 2 callbacks, 0 edges"
    )
    assert graph.render(phase=ValidationPhase).splitlines()[0].startswith("EpochBegin x ValidationPhase, ")
    assert graph.render(event=BackwardEnd) == "No moment: 0 callbacks, 0 edges"


class Everyone(Callback):
    @on
    def run(self, event: HostEvent, phase: Phase, learner: Any) -> None: ...


def test_moment_of_unhandled_event_is_derived() -> None:
    class Later(HostEvent): ...

    graph = checked_graph([Everyone()], PHASES)
    assert (
        graph.render(event=Later, phase=TrainingPhase).splitlines()[0] == "Later x TrainingPhase: 1 callback, 0 edges"
    )


def summaries(page: str) -> list[str]:
    return re.findall(r"<summary>([^<]*) <small>", page)


def test_page_has_details_of_selected_moments() -> None:
    graph = sample()
    assert summaries(graph.render("html")) == [BACK, STEP, EPOCH, "At no moment"]
    assert summaries(graph.render("html", event=StepEnd, phase=TrainingPhase)) == [STEP]
    assert summaries(graph.render("html", phase=TrainingPhase)) == [BACK, STEP, EPOCH]
    assert summaries(graph.render("html", phase=ValidationPhase)) == []
    for chosen in ({}, {"phase": TrainingPhase}):
        assert graph.render("svg", **chosen) in graph.render("html", **chosen)


def test_notebook_formats() -> None:
    graph = sample()
    assert graph._repr_mimebundle_() == {
        "text/plain": graph.render("tree"),
        "image/svg+xml": graph.render("svg"),
        "text/vnd.mermaid": graph.render("mermaid"),
    }


def test_text_does_not_depend_on_list_order() -> None:
    def text(*callbacks: Any) -> str:
        return checked_graph(callbacks, PHASES).render("text")

    clip, norm = Clip(), Norm()
    one = text(in_order(clip, norm), Log(), Spike(), Show())
    assert text(Show(), Spike(), in_order(clip, norm), Log()) == one
    assert text(Log(), Show(), Spike(), in_order(clip, norm)) == one


def test_invalid_callbacks_are_derived_without_error() -> None:
    broken = [Reader("a", cb(missing=Read())), Reader("b", {"nonsense": Read()})]
    graph = unchecked_graph(broken, PHASES)
    assert [type(problem).__name__ for problem in graph.problems] == ["UnknownStateError", "MissingStateError"]
    with pytest.raises(CheckError, match="2 problems"):
        graph.require()
    assert len(timeline(graph).problems) == 2
