"""Make the pictures of the documentation anew: `python docs/images/make_images.py`.

`demo.svg` is what `fluxcb demo` prints; `graph.svg` is drawn from the graph of a set of callbacks.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from collections.abc import Iterable
from html import escape
from pathlib import Path

import networkx as nx
import rich
import rich.live
from rich.console import Console
from rich.text import Text

import fluxcb
from fluxcb import Append, Callback, Read, Write, on
from fluxcb.callbacks import ClipGradients, LearningRate, Metrics, ParameterEMA, Scheduler, accuracy
from fluxcb.events import BackwardEnd, EpochEnd
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase

FOLDER = Path(__file__).parent
SHOWN = 25  # lines of the demo's list of handlers that the picture has room for


# -- the demo -----------------------------------------------------------------------------------


def demo_svg() -> str:
    """Return a picture of what a terminal shows of the demo once it is done."""
    from fluxcb._tools.demo import run_demo

    rich.reconfigure(record=True, force_terminal=True, width=120, file=io.StringIO(), color_system="truecolor")
    nothing = dict.fromkeys(("start", "refresh", "stop"), lambda self, *args, **kwargs: None)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), _patched(rich.live.Live, nothing):
        run_demo(epochs=10, out="runs", seed=0)
    lines = rich.get_console().export_text(styles=True).splitlines()
    first = next(i for i, line in enumerate(lines) if "parameter" in line and "shape" in line)
    shown = ["$ fluxcb demo --epochs 10", *lines[:SHOWN], "...", "", *lines[first:]]
    console = Console(record=True, file=io.StringIO(), width=120, force_terminal=True)
    for line in shown:
        console.print(Text.from_ansi(line), soft_wrap=True)
    return console.export_svg(title="fluxcb demo", unique_id="demo")


@contextlib.contextmanager
def _patched(cls: type, methods: dict):
    """Keep the live bar out of the record: a terminal does not keep it either."""
    held = {name: getattr(cls, name) for name in methods}
    for name, method in methods.items():
        setattr(cls, name, method)
    try:
        yield
    finally:
        for name, method in held.items():
            setattr(cls, name, method)


# -- the graph ----------------------------------------------------------------------------------


class GradientNorm(Callback):
    """Compute the norm of the gradients."""

    def stateaccess(self):
        return {"step": {"grads": Read(), "grad_norm": Write()}}

    @on(BackwardEnd, AbstractTrainingPhase)
    def measure(self, event, phase, learner): ...


class SkipSpikes(Callback):
    """Skip the update where the norm is large."""

    def stateaccess(self):
        return {"step": {"grad_norm": Read(), "skip": Append()}}

    @on(BackwardEnd, AbstractTrainingPhase)
    def skip(self, event, phase, learner): ...


class EpochLine(Callback):
    """Write a line about each epoch."""

    def stateaccess(self):
        return {"cbstate": {"history": Read(), "metrics_epoch": Read()}}

    @on(EpochEnd, TrainingPhase)
    def write(self, event, phase, learner): ...


def example_graph() -> nx.DiGraph:
    """Return the graph that the picture shows."""
    callbacks = [
        EpochLine(),
        SkipSpikes(),
        fluxcb.in_order(GradientNorm(), ClipGradients(1.0)),
        Scheduler({LearningRate: abs}),
        ParameterEMA(0.98),
        Metrics(accuracy),
    ]
    return fluxcb.check(callbacks).digraph


Point = tuple[float, float]

BOX, GAP_X, GAP_Y, LEFT, TOP = (190, 38), 200, 22, 20, 64
LABEL = 140  # room for an edge's label
FILL = {"traced": "#dbeafe", "host": "#fef3c7", "both": "url(#both)"}


def graph_svg(graph: nx.DiGraph) -> str:
    """Return a layered drawing: what runs first stands to the left; edges say why."""
    linked = [node for node in graph if graph.degree(node)]
    alone = [node for node in graph if not graph.degree(node)]
    groups = sorted(nx.weakly_connected_components(graph.subgraph(linked)), key=sorted)
    at: dict[str, Point] = {}
    y = float(TOP)
    for group in groups:
        layers = list(nx.topological_generations(graph.subgraph(group)))
        height = max(len(layer) for layer in layers)
        for x, layer in enumerate(layers):
            start = y + (height - len(layer)) * (BOX[1] + GAP_Y) / 2
            for i, node in enumerate(sorted(layer)):
                at[node] = LEFT + x * (BOX[0] + GAP_X), start + i * (BOX[1] + GAP_Y)
        y += height * (BOX[1] + GAP_Y) + 16
    columns = 4
    y += 24
    caption = y - 10
    for i, node in enumerate(alone):
        at[node] = LEFT + i % columns * (BOX[0] + 24), y + i // columns * (BOX[1] + 14)
    width = max(x for x, _ in at.values()) + BOX[0] + LEFT
    bottom = max(v for _, v in at.values()) + BOX[1] + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {bottom:g}" width="{width:g}" '
        f'height="{bottom:g}" font-family="sans-serif" font-size="13">',
        '<defs><linearGradient id="both"><stop offset="50%" stop-color="#dbeafe"/><stop offset="50%" '
        'stop-color="#fef3c7"/></linearGradient><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="9" '
        'markerHeight="9" orient="auto"><path d="M0 0L8 4L0 8z" fill="#475569"/></marker></defs>',
        f'<rect width="{width:g}" height="{bottom:g}" fill="white"/>',
        *_legend(),
    ]
    for earlier, later, edge in graph.edges(data=True):
        parts += _arrow(at[earlier], at[later], edge, label_at_start=graph.in_degree(later) > 1)
    if alone:
        parts.append(f'<text x="{LEFT}" y="{caption:g}" fill="#475569">no order with anybody:</text>')
    for node, (x, top) in at.items():
        fill = FILL[_kind(graph.nodes[node]["callback"])]
        parts.append(
            f'<rect x="{x:g}" y="{top:g}" width="{BOX[0]}" height="{BOX[1]}" rx="6" fill="{fill}" stroke="#475569"/>'
        )
        middle, line = x + BOX[0] / 2, top + BOX[1] / 2 + 4.5
        parts.append(f'<text x="{middle:g}" y="{line:g}" text-anchor="middle">{escape(node)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _legend() -> Iterable[str]:
    x = LEFT
    for kind, words in (("traced", "traced into the step"), ("host", "runs on the host"), ("both", "both")):
        yield f'<rect x="{x}" y="18" width="26" height="16" rx="3" fill="{FILL[kind]}" stroke="#475569"/>'
        yield f'<text x="{x + 34}" y="31">{words}</text>'
        x += 190


def _kind(callback: Callback) -> str:
    kinds = {"traced" if entry.traced else "host" for entry in callback.handlers()}
    return kinds.pop() if len(kinds) == 1 else "both"


def _arrow(start: Point, end: Point, edge: dict, *, label_at_start: bool) -> Iterable[str]:
    """Draw an edge that is straight where its label stands, and bends on the other half of its way."""
    x1, y1 = start[0] + BOX[0], start[1] + BOX[1] / 2
    x2, y2 = end[0], end[1] + BOX[1] / 2
    straight = LABEL if label_at_start else x2 - x1 - LABEL
    bend_from, bend_to = (x1 + straight, x2) if label_at_start else (x1, x1 + straight)
    middle = (bend_from + bend_to) / 2
    yield (
        f'<path d="M{x1:g} {y1:g}H{bend_from:g}C{middle:g} {y1:g} {middle:g} {y2:g} {bend_to:g} {y2:g}H{x2:g}" '
        'fill="none" stroke="#475569" stroke-width="1.3" marker-end="url(#tip)"/>'
    )
    path = re.search(r"`(.+?)`", edge["reasons"][0])
    moment = edge["moments"][0].split(" x ")[0]
    x, y = (x1 + 8, y1) if label_at_start else (x2 - LABEL + 4, y2)
    words = escape(path[1] if path else edge["reasons"][0])
    yield f'<text x="{x:g}" y="{y - 5:g}" font-size="11" fill="#334155">{words}</text>'
    yield f'<text x="{x:g}" y="{y + 14:g}" font-size="10" fill="#64748b">at {escape(moment)}</text>'


if __name__ == "__main__":
    os.environ.setdefault("TERM", "xterm-256color")
    (FOLDER / "graph.svg").write_text(graph_svg(example_graph()), encoding="utf-8")
    (FOLDER / "demo.svg").write_text(demo_svg(), encoding="utf-8")
