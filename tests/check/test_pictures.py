"""Pictures of callback graphs: what they show, of which moments, and in which forms."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from fluxcb import Append, Callback, Read, Unresolvable, Write, every, in_order, on
from fluxcb._check.graph import CallbackGraph
from fluxcb._check.pictures import drawing
from fluxcb._check.preflight import build_graph, derive_graph
from fluxcb._draw.drawing import Drawing
from fluxcb._errors import CheckError, ConflictError, CycleError, DeclarationError
from fluxcb.events import BackwardEnd, EpochEnd, HostEvent, StepBegin, StepEnd
from fluxcb.phases import AbstractTrainingPhase, Phase, TrainingPhase, ValidationPhase

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
    return build_graph([every(Show(), steps=5), Log(), in_order(clip, norm), Spike(), Idle()], PHASES)


def nodes(picture: Drawing) -> dict[str, tuple[Any, ...]]:
    return {node.title: (node.kind, node.reads, node.writes) for node in picture.nodes}


def links(picture: Drawing) -> list[tuple[Any, ...]]:
    title = {node.key: node.title for node in picture.nodes}
    return [(title[x.earlier], title[x.later], x.kind, x.label, x.moments, x.implied) for x in picture.links]


STEP, EPOCH, BACK = "StepEnd x TrainingPhase", "EpochEnd x TrainingPhase", "BackwardEnd x TrainingPhase"
SHOW = "Show() at EverySteps(steps=5)"


def test_all_moments_show_whole_declarations_and_edges_with_reasons_in_a_word() -> None:
    picture = drawing(sample())
    assert picture.title == "Callbacks at all moments"
    assert picture.problems == ()
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
        ("Norm()", "Spike()", "order", "step.norm", (BACK,), False),
    ]


def test_one_moment_shows_who_runs_then_with_the_access_and_edges_of_then() -> None:
    graph = sample()
    assert nodes(drawing(graph, [(EpochEnd, TrainingPhase)])) == {
        SHOW: ("host", ("cbstate.log", "cbstate.notes"), ()),
        "Log()": ("host", ("cbstate.last (previous)",), ("cbstate.notes (append)",)),
    }
    picture = drawing(graph, [(StepEnd, TrainingPhase)])
    assert picture.title == STEP
    assert nodes(picture)["Spike()"] == ("host", (), ("cbstate.last",))
    assert links(picture) == [("Log()", SHOW, "order", "runafter", (STEP,), False)]


def test_details_say_what_is_declared_where_and_when_it_runs() -> None:
    picture = drawing(sample())
    details = {node.title: dict(node.details) for node in picture.nodes}
    place = details["Norm()"].pop("declared")
    assert re.fullmatch(r"Norm\.stateaccess  .*test_pictures\.py:\d+", place[0])
    assert details["Norm()"] == {
        "does": ("Measure the gradients.",),
        "class": (f"{__name__}.Norm",),
        "reads": ("step.grads",),
        "writes": ("step.norm",),
        "runs": (f"{BACK}: measure (traced, 2 of 3)",),
    }
    assert details[SHOW]["runs"] == (
        f"{STEP}: show (host, 2 of 3, EverySteps(steps=5))",
        f"{EPOCH}: show (host, 2 of 2)",
    )
    assert "runs" not in details["Idle()"]


class Reader(Callback):
    """Reads what it is given, at StepEnd."""

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


def test_what_follows_from_other_edges_of_its_moment_is_implied() -> None:
    a, b, c = (
        Reader("a", cb(x=Write(), y=Write())),
        Reader("b", cb(x=Read(), z=Write())),
        Reader("c", cb(y=Read(), z=Read())),
    )
    assert links(drawing(build_graph([a, b, c], PHASES))) == [
        ("a", "b", "order", "cbstate.x", (STEP,), False),
        ("a", "c", "order", "cbstate.y", (STEP,), True),
        ("b", "c", "order", "cbstate.z", (STEP,), False),
    ]


def test_several_reasons_are_counted() -> None:
    a, b = Reader("a", cb(x=Write(), y=Write())), Reader("b", cb(x=Read(), y=Read()))
    [link] = drawing(build_graph([a, b], PHASES)).links
    assert link.label == "cbstate.x +1"
    assert link.reasons == (
        "Reader writes `cbstate.x`, Reader reads it",
        "Reader writes `cbstate.y`, Reader reads it",
    )


class Forth(Callback):
    """Writes at StepBegin what `Back` reads then, and reads at StepEnd what it writes then."""

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


def test_an_order_that_differs_between_moments_is_no_circle() -> None:
    graph = build_graph([Forth(), Back()], PHASES)
    assert links(drawing(graph)) == [
        ("Forth()", "Back()", "order", "cbstate.forth", ("StepBegin x TrainingPhase",), False),
        ("Back()", "Forth()", "order", "cbstate.back", (STEP,), False),
    ]
    assert 'class="link order"' in graph.render("svg")
    assert "cycle" not in graph.render("svg")


def test_a_circle_within_a_moment_is_drawn_as_one() -> None:
    a, b = Reader("a", cb(x=Write(), y=Read())), Reader("b", cb(x=Read(), y=Write()))
    follower = Reader("c", cb(x=Read()))
    graph = derive_graph([a, b, follower], PHASES)
    assert [type(problem) for problem in graph.problems] == [CycleError]
    picture = drawing(graph)
    assert links(picture) == [
        ("a", "b", "cycle", "cbstate.x", (STEP,), False),
        ("b", "a", "cycle", "cbstate.y", (STEP,), False),
        ("a", "c", "order", "cbstate.x", (STEP,), False),
    ]
    assert picture.problems == (f"CycleError: {graph.problems[0]}",)
    for form in ("tree", "text", "mermaid", "dot", "svg", "html"):
        assert graph.render(form)


class Rival(Callback):
    def stateaccess(self) -> Any:
        return {"step": {"grads": Write()}}

    @on
    def clip(self, event: BackwardEnd, phase: AbstractTrainingPhase, learner: Any) -> None: ...


def test_conflicts_stay_known_and_are_drawn_at_their_moments() -> None:
    graph = derive_graph([Clip(), Rival(), Norm()], PHASES)
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
        build_graph([Clip(), Rival(), Norm()], PHASES)
    assert str(caught.value) == str(found.error)


class Hermit(Rival):
    def resolveconflict(self, other: Callback) -> Any:
        return Unresolvable()


def test_two_that_can_never_be_together_are_in_conflict() -> None:
    graph = derive_graph([Clip(), Hermit()], PHASES)
    assert links(drawing(graph)) == [("Clip()", "Hermit()", "conflict", "never together", (BACK,), False)]
    assert graph.problems == [graph.conflicts[0].error]


def test_a_conflict_at_a_moment_that_is_asked_for_later_is_raised_and_not_kept() -> None:
    graph = build_graph([Clip(), Rival()], (ValidationPhase,))
    for _ in range(2):
        with pytest.raises(ConflictError):
            graph.render(event=BackwardEnd, phase=TrainingPhase)
    assert (graph.conflicts, graph.problems) == ([], [])


def test_an_unknown_form_is_refused_with_the_nearest() -> None:
    with pytest.raises(DeclarationError) as caught:
        sample().render("mermade")
    assert str(caught.value) == (
        "A callback graph has no form 'mermade'. Did you mean `mermaid`?\n"
        "  fix:   choose one of tree, text, mermaid, dot, svg, html"
    )


def test_the_tree_is_the_default_form() -> None:
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


def test_an_event_or_a_phase_alone_chooses_several_moments() -> None:
    graph = build_graph([Reader("a", {}), Everyone()], PHASES)
    assert graph.render(event=StepEnd).splitlines()[0] == (
        "StepEnd x TrainingPhase, StepEnd x ValidationPhase: 2 callbacks, 0 edges"
    )
    assert graph.render(phase=ValidationPhase).splitlines()[0].startswith("EpochBegin x ValidationPhase, ")
    assert graph.render(event=BackwardEnd) == "No moment: 0 callbacks, 0 edges"


class Everyone(Callback):
    @on
    def run(self, event: HostEvent, phase: Phase, learner: Any) -> None: ...


def test_a_moment_of_an_event_that_nobody_named_is_derived() -> None:
    class Later(HostEvent): ...

    graph = build_graph([Everyone()], PHASES)
    assert (
        graph.render(event=Later, phase=TrainingPhase).splitlines()[0] == "Later x TrainingPhase: 1 callback, 0 edges"
    )


def options(page: str) -> list[str]:
    return re.findall(r"<option[^>]*>([^<]*)</option>", page)


def test_the_page_has_all_moments_and_each() -> None:
    graph = sample()
    assert options(graph.render("html")) == ["All moments", BACK, STEP, EPOCH]
    assert options(graph.render("html", event=StepEnd, phase=TrainingPhase)) == [STEP]
    assert options(graph.render("html", phase=TrainingPhase)) == ["All of these moments", BACK, STEP, EPOCH]
    assert options(graph.render("html", phase=ValidationPhase)) == ["All of these moments"]
    [data] = re.findall(r'id="drawings">(.*?)</script>', graph.render("html"), re.DOTALL)
    assert [[node["title"] for node in page["nodes"]] for page in json.loads(data)[1:]] == [
        ["Clip()", "Norm()", "Spike()"],
        [SHOW, "Log()", "Spike()"],
        [SHOW, "Log()"],
    ]


def test_notebooks_are_shown_the_tree_the_svg_and_mermaid() -> None:
    graph = sample()
    assert graph._repr_mimebundle_() == {
        "text/plain": graph.render("tree"),
        "image/svg+xml": graph.render("svg"),
        "text/vnd.mermaid": graph.render("mermaid"),
    }


def test_the_text_is_the_same_for_every_order_of_the_list() -> None:
    def text(*callbacks: Any) -> str:
        return build_graph(callbacks, PHASES).render("text")

    clip, norm = Clip(), Norm()
    one = text(in_order(clip, norm), Log(), Spike(), Show())
    assert text(Show(), Spike(), in_order(clip, norm), Log()) == one
    assert text(Log(), Show(), Spike(), in_order(clip, norm)) == one


def test_a_set_that_is_wrong_is_derived_without_raising() -> None:
    broken = [Reader("a", cb(missing=Read())), Reader("b", {"nonsense": Read()})]
    graph = derive_graph(broken, PHASES)
    assert [type(problem).__name__ for problem in graph.problems] == ["UnknownStateError", "MissingStateError"]
    with pytest.raises(CheckError, match="2 problems"):
        graph.require()
    assert len(drawing(graph).problems) == 2
