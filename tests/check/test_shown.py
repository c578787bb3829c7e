"""The display of graphs and of rendered texts in REPLs and notebooks."""

from __future__ import annotations

import copy
import html
import pickle
import re
from typing import Any
from xml.etree import ElementTree

import networkx as nx
import pytest

from fluxcb import Callback, Read, Write, on
from fluxcb._check.graph import CallbackGraph
from fluxcb._check.preflight import checked_graph, unchecked_graph
from fluxcb.events import StepEnd
from fluxcb.phases import TrainingPhase

SVG = "{http://www.w3.org/2000/svg}"


class Writer(Callback):
    def stateaccess(self) -> Any:
        return {"cbstate": {"a": Write()}}

    @on
    def write(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None: ...


class Passer(Callback):
    def stateaccess(self) -> Any:
        return {"cbstate": {"a": Read(), "b": Write()}}

    @on
    def hand_on(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None: ...


class Reader(Callback):
    def stateaccess(self) -> Any:
        return {"cbstate": {"a": Read(), "b": Read()}}

    @on
    def read(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None: ...


def chain() -> CallbackGraph:
    return checked_graph([Reader(), Passer(), Writer()], (TrainingPhase,))


def picture(graph: Any) -> tuple[list[str], int]:
    """Return the callbacks in the rows of a notebook picture, and its number of lines."""
    root = ElementTree.fromstring(graph._repr_mimebundle_()["image/svg+xml"])
    groups = root.findall(f".//{SVG}g")
    rows = [g.findtext(f"{SVG}title", "") for g in groups if (g.get("class") or "").startswith("row")]
    arcs = [g for g in groups if (g.get("class") or "").startswith("arc")]
    return [title.splitlines()[0] for title in rows], len(arcs)


def test_networkx_graph_is_displayed_as_picture() -> None:
    graph = chain()
    shown = graph.digraph
    assert isinstance(shown, nx.DiGraph)
    assert shown._repr_mimebundle_() == {
        "text/plain": "<CallbackDiGraph with 3 nodes and 3 edges>",
        "image/svg+xml": graph.render("svg"),
    }
    assert repr(shown) == "<CallbackDiGraph with 3 nodes and 3 edges>"
    assert list(nx.topological_sort(shown)) == ["Writer()", "Passer()", "Reader()"]
    assert shown.edges["Writer()", "Reader()"] == {
        "reasons": ("Writer writes `cbstate.a`, Reader reads it",),
        "moments": ("StepEnd x TrainingPhase",),
    }


@pytest.mark.parametrize(
    "copied",
    [nx.DiGraph.copy, copy.copy, copy.deepcopy, lambda graph: pickle.loads(pickle.dumps(graph)), nx.freeze],
    ids=["copy", "copy.copy", "deepcopy", "pickle", "freeze"],
)
def test_copied_graphs_have_same_display(copied: Any) -> None:
    graph = chain().digraph
    again = copied(graph)
    assert again._repr_mimebundle_() == graph._repr_mimebundle_()
    assert nx.utils.graphs_equal(nx.DiGraph(again.edges), nx.DiGraph(graph.edges))
    assert again.edges["Writer()", "Passer()"]["reasons"] == ("Writer writes `cbstate.a`, Passer reads it",)


def test_subgraphs_have_partial_display() -> None:
    graph = chain().digraph
    assert picture(graph) == (["Writer()", "Passer()", "Reader()"], 3)
    assert picture(graph.subgraph(["Writer()", "Reader()"])) == (["Writer()", "Reader()"], 1)
    assert picture(graph.edge_subgraph([("Writer()", "Passer()")])) == (["Writer()", "Passer()"], 1)
    smaller = graph.copy()
    smaller.remove_edge("Writer()", "Reader()")
    assert picture(smaller) == (["Writer()", "Passer()", "Reader()"], 2)


def test_modified_graph_has_no_picture() -> None:
    graph = chain().digraph
    reversed_ = graph.reverse()
    other = graph.copy()
    other.add_edge("Reader()", "mine")
    for changed in (reversed_, other, nx.relabel_nodes(graph, {"Writer()": "w"}), type(graph)([(1, 2)])):
        assert list(changed._repr_mimebundle_()) == ["text/plain"]
    assert list(nx.transitive_reduction(graph).edges) == [("Passer()", "Reader()"), ("Writer()", "Passer()")]
    assert set(graph.to_undirected()["Writer()"]) == {"Passer()", "Reader()"}


def test_rendered_graph_is_string_with_rich_display() -> None:
    graph = chain()
    for form in ("tree", "text", "dot", "mermaid", "svg", "html"):
        shown = graph.render(form)
        assert isinstance(shown, str)
        assert repr(shown) == shown
        assert pickle.loads(pickle.dumps(shown)) == shown
    svg, mermaid, page = (graph.render(form) for form in ("svg", "mermaid", "html"))
    assert svg._repr_svg_() == svg  # pyright: ignore[reportAttributeAccessIssue]
    assert mermaid._repr_mimebundle_() == {  # pyright: ignore[reportAttributeAccessIssue]
        "text/plain": mermaid,
        "text/vnd.mermaid": mermaid,
    }
    frame = re.fullmatch('<iframe srcdoc="([^"]*)" [^>]*></iframe>', page._repr_html_())  # pyright: ignore
    assert frame is not None
    assert html.unescape(frame[1]) == page


def test_picture_of_invalid_callbacks_shows_conflict() -> None:
    graph = unchecked_graph([Writer(), Writer()], (TrainingPhase,)).digraph
    assert re.findall('class="arc ([a-z]+)', graph._repr_mimebundle_()["image/svg+xml"]) == ["conflict"]
