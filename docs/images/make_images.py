"""Make the pictures of the documentation: `python docs/images/make_images.py [FOLDER]`.

`demo.svg` is what `fluxcb demo` prints; `graph.svg` is drawn from the graph of a set of callbacks. A test compares them
with the committed pictures, apart from numbers that depend on the machine.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from pathlib import Path

import rich
import rich.live
from rich.console import Console
from rich.text import Text

import fluxcb
from fluxcb import Append, Callback, Read, Write, on
from fluxcb.callbacks import ClipGradients, LearningRate, Metrics, ParameterEMA, Scheduler, accuracy
from fluxcb.events import BackwardEnd, EpochEnd
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase

# -- the demo -----------------------------------------------------------------------------------


def demo_svg() -> str:
    """Return a picture of what a terminal shows of the demo once it is done."""
    from fluxcb._tools.demo import run_demo

    rich.reconfigure(record=True, force_terminal=True, width=120, file=io.StringIO(), color_system="truecolor")
    nothing = dict.fromkeys(("start", "refresh", "stop"), lambda self, *args, **kwargs: None)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), _patched(rich.live.Live, nothing):
        run_demo(epochs=10, out="runs", seed=0)
    lines = rich.get_console().export_text(styles=True).splitlines()
    console = Console(record=True, file=io.StringIO(), width=120, force_terminal=True)
    for line in ["$ fluxcb demo --epochs 10", *lines]:
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


def graph_svg() -> str:
    """Return the picture of a set of callbacks."""
    callbacks = [
        EpochLine(),
        SkipSpikes(),
        fluxcb.in_order(GradientNorm(), ClipGradients(1.0)),
        Scheduler({LearningRate: abs}),
        ParameterEMA(0.98),
        Metrics(accuracy),
    ]
    return fluxcb.check(callbacks).render("svg")


if __name__ == "__main__":
    os.environ.setdefault("TERM", "xterm-256color")
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    (folder / "graph.svg").write_text(graph_svg(), encoding="utf-8")
    (folder / "demo.svg").write_text(demo_svg(), encoding="utf-8")
