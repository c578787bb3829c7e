"""Make the pictures of the documentation: `python docs/images/make_images.py [FOLDER]`.

`terminal.svg` and `graph.svg` show the example of the README, `demo.svg` is what `fluxcb demo` prints, `sweep.svg` is
made by the page about populations, and the others are the drawings of the pages about concepts. A test compares them
with the committed pictures, apart from numbers that depend on the machine.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from pathlib import Path

import rich
import rich.live
from diagrams import events_svg, host_and_traced_svg, order_svg, resume_svg, state_svg, windows_svg
from rich.console import Console
from rich.text import Text

import fluxcb
from fluxcb import Append, Callback, Read, Write, on
from fluxcb.callbacks import ClipGradients, Metrics, ParameterEMA, accuracy
from fluxcb.events import BackwardEnd
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase

README = Path(__file__).resolve().parents[2] / "README.md"
POPULATIONS = README.parent / "docs/how-to/populations.md"

# -- terminals ----------------------------------------------------------------------------------


def demo_svg() -> str:
    """Return a picture of what a terminal shows of the demo once it is done."""
    from fluxcb._tools.demo import run_demo

    os.environ.pop("UV_RUN_RECURSION_DEPTH", None)  # `uv run` sets it, and the picture shows `fluxcb demo` without it
    return _terminal_svg("fluxcb demo --epochs 10", lambda: run_demo(epochs=10, out="runs", seed=0), "demo", width=120)


def example_svg() -> str:
    """Return a picture of what a terminal shows of the README's example once it is done."""
    return _terminal_svg("python example.py", _example, "terminal", width=84)


def _example() -> dict:
    """Run the README's example, and return its names."""
    return _run(README)


def _run(page: Path) -> dict:
    """Run the first example of a page, and return its names."""
    code = re.search(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert code
    names: dict = {"__name__": "example"}
    exec(code[1], names)
    return names


def sweep_svg() -> str:
    """Return the picture that the page about populations saves."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        _run(POPULATIONS)
        return Path("sweep.svg").read_text(encoding="utf-8")


def _terminal_svg(command: str, function, name: str, width: int) -> str:
    rich.reconfigure(record=True, force_terminal=True, width=width, file=io.StringIO(), color_system="truecolor")
    nothing = dict.fromkeys(("start", "refresh", "stop"), lambda self, *args, **kwargs: None)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), _patched(rich.live.Live, nothing):
        function()
    lines = rich.get_console().export_text(styles=True).splitlines()
    console = Console(record=True, file=io.StringIO(), width=width, force_terminal=True)
    for line in [f"$ {command}", *lines]:
        console.print(Text.from_ansi(line), soft_wrap=True)
    return console.export_svg(title=command.split(" --")[0], unique_id=name)


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
    """Skip the update if the norm is large."""

    def stateaccess(self):
        return {"step": {"grad_norm": Read(), "skip": Append()}}

    @on(BackwardEnd, AbstractTrainingPhase)
    def skip(self, event, phase, learner): ...


def graph_svg() -> str:
    """Return the graph of the README's callbacks, without the default ones."""
    skip_spikes = _example()["SkipSpikes"]()
    callbacks = [Metrics(accuracy), ParameterEMA(0.98), fluxcb.in_order(skip_spikes, ClipGradients(1.0))]
    return fluxcb.check(callbacks, default_callbacks=False).render("svg", phase=TrainingPhase)


if __name__ == "__main__":
    os.environ.setdefault("TERM", "xterm-256color")
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    pictures = {
        "terminal": example_svg,
        "graph": graph_svg,
        "sweep": sweep_svg,
        "demo": demo_svg,
        "events": events_svg,
        "state": state_svg,
        "order": lambda: order_svg([SkipSpikes(), GradientNorm(), ClipGradients(1.0)]),
        "host-and-traced": host_and_traced_svg,
        "windows": windows_svg,
        "resume": resume_svg,
    }
    for name, make in pictures.items():
        (folder / f"{name}.svg").write_text(make(), encoding="utf-8")
