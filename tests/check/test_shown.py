"""What REPLs and notebooks display of a graph and of the texts made from it."""

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
from fluxcb._check.preflight import build_graph, derive_graph
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
    return build_graph([Reader(), Passer(), Writer()], (TrainingPhase,))


def picture(graph: Any) -> tuple[list[str], int]:
    """Return the titles of the boxes and the number of links in the picture that a notebook displays."""
    root = ElementTree.fromstring(graph._repr_mimebundle_()["image/svg+xml"])
    groups = root.findall(f".//{SVG}g")
    nodes = [g.findtext(f"{SVG}title", "") for g in groups if (g.get("class") or "").startswith("node")]
    links = [g for g in groups if (g.get("class") or "").startswith("link")]
    return [title.splitlines()[0] for title in nodes], len(links)


def test_the_graph_for_networkx_is_displayed_as_a_picture() -> None:
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
def test_copies_are_displayed_alike(copied: Any) -> None:
    graph = chain().digraph
    again = copied(graph)
    assert again._repr_mimebundle_() == graph._repr_mimebundle_()
    assert nx.utils.graphs_equal(nx.DiGraph(again.edges), nx.DiGraph(graph.edges))
    assert again.edges["Writer()", "Passer()"]["reasons"] == ("Writer writes `cbstate.a`, Passer reads it",)


def test_parts_of_a_graph_are_displayed_as_parts() -> None:
    graph = chain().digraph
    assert picture(graph) == (["Reader()", "Passer()", "Writer()"], 3)
    assert picture(graph.subgraph(["Writer()", "Reader()"])) == (["Reader()", "Writer()"], 1)
    assert picture(graph.edge_subgraph([("Writer()", "Passer()")])) == (["Passer()", "Writer()"], 1)
    smaller = graph.copy()
    smaller.remove_edge("Writer()", "Reader()")
    assert picture(smaller) == (["Reader()", "Passer()", "Writer()"], 2)


def test_a_graph_that_is_no_longer_of_callbacks_has_no_picture() -> None:
    graph = chain().digraph
    reversed_ = graph.reverse()
    other = graph.copy()
    other.add_edge("Reader()", "mine")
    for changed in (reversed_, other, nx.relabel_nodes(graph, {"Writer()": "w"}), type(graph)([(1, 2)])):
        assert list(changed._repr_mimebundle_()) == ["text/plain"]
    assert list(nx.transitive_reduction(graph).edges) == [("Passer()", "Reader()"), ("Writer()", "Passer()")]
    assert set(graph.to_undirected()["Writer()"]) == {"Passer()", "Reader()"}


def test_rendered_graphs_are_strings_that_display_themselves() -> None:
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


def test_the_picture_of_a_set_that_is_wrong_shows_the_conflict() -> None:
    graph = derive_graph([Writer(), Writer()], (TrainingPhase,)).digraph
    assert re.findall('class="link ([a-z]+)', graph._repr_mimebundle_()["image/svg+xml"]) == ["conflict"]
