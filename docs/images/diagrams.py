"""The drawings of the pages about concepts, as SVG."""

from __future__ import annotations

from html import escape

import fluxcb
from fluxcb import events, phases
from fluxcb._declare.events import BUILTIN_EVENTS, TracedEvent
from fluxcb._declare.state import emits

DEVICE = ("#e0e7ff", "#6366f1")  # fill and stroke
HOST = ("#fef3c7", "#d97706")
PLAIN = ("#f8fafc", "#94a3b8")
INK, MUTED = "#0f172a", "#64748b"
CODE = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"
PROSE = "system-ui,-apple-system,'Segoe UI',Helvetica,Arial,'DejaVu Sans','Liberation Sans',sans-serif"


class Drawing:
    """Shapes and texts on a white sheet."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size, self.title = (width, height), title
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, colors: tuple[str, str], label: str = "") -> None:
        """Draw a rectangle with an optional label at its top left corner."""
        fill, stroke = colors
        place = f'x="{x}" y="{y}" width="{width}" height="{height}" rx="6"'
        self.parts.append(f'<rect {place} fill="{fill}" stroke="{stroke}"/>')
        if label:
            self.prose(x + 10, y + 18, label)

    def code(self, x: float, y: float, text: str, color: str = INK, anchor: str = "start") -> None:
        self._text(x, y, text, CODE, color, anchor)

    def prose(self, x: float, y: float, text: str, color: str = MUTED, anchor: str = "start") -> None:
        self._text(x, y, text, PROSE, color, anchor)

    def _text(self, x: float, y: float, text: str, font: str, color: str, anchor: str) -> None:
        style = f'font-family="{font}" fill="{color}" text-anchor="{anchor}"'
        self.parts.append(f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>')

    def line(
        self, points: list[tuple[float, float]], color: str = MUTED, dashed: bool = False, arrow: bool = True
    ) -> None:
        """Draw a line through points, with an arrowhead at its end."""
        way = " ".join(f"{x},{y}" for x, y in points)
        extra = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(f'<polyline points="{way}" fill="none" stroke="{color}" stroke-width="1.5"{extra}/>')
        if arrow:
            self._arrowhead(*points[-2:], color)

    def _arrowhead(self, before: tuple[float, float], tip: tuple[float, float], color: str) -> None:
        # Lines end horizontally or vertically, so the direction is a sign per axis.
        dx, dy = ((end > start) - (end < start) for start, end in zip(before, tip, strict=True))
        x, y = tip
        back = (x - 7 * dx, y - 7 * dy)
        sides = [(back[0] + side * 4 * dy, back[1] + side * 4 * dx) for side in (1, -1)]
        corners = " ".join(f"{px},{py}" for px, py in [tip, *sides])
        self.parts.append(f'<polygon points="{corners}" fill="{color}"/>')

    def svg(self) -> str:
        width, height = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-size="12" role="img">'
        )
        sheet = f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>'  # readable in dark mode as well
        return "\n".join([head, f"<title>{escape(self.title)}</title>", sheet, *self.parts, "</svg>\n"])


# -- events and phases --------------------------------------------------------------------------

# What the default steps do after an event.
WORK = {
    events.ForwardBegin: "apply the model",
    events.LossBegin: "compute the loss",
    events.BackwardBegin: "compute the gradients",
    events.BackwardEnd: "update the parameters",
}


def events_svg() -> str:
    """Return the events of a fit, nested as they are emitted."""
    traced = [event for event in BUILTIN_EVENTS if issubclass(event, TracedEvent)]
    drawing = Drawing(640, 556, "The events of a fit")
    drawing.code(30, 32, events.FitBegin.__name__)
    drawing.box(20, 46, 600, 446, PLAIN, "each epoch")
    for x, phase in ((36, phases.TrainingPhase), (334, phases.ValidationPhase)):
        drawing.box(x, 74, 270, 378, PLAIN, phase.__name__)
        drawing.code(x + 16, 116, events.EpochBegin.__name__)
        drawing.box(x + 16, 128, 238, 286, HOST, "each step")
        drawing.code(x + 30, 168, events.StepBegin.__name__)
        drawing.box(x + 30, 178, 210, 202, DEVICE, "compiled, on the device")
        y = 198
        for event in (event for event in traced if emits(event, phase)):
            y += 18
            drawing.code(x + 46, y, event.__name__)
            if event in WORK:
                y += 14
                drawing.prose(x + 62, y, WORK[event])
        drawing.code(x + 30, 402, events.StepEnd.__name__)
        drawing.code(x + 16, 438, events.EpochEnd.__name__)
    drawing.code(36, 476, events.Trigger.__name__)
    drawing.code(30, 516, events.FitStopping.__name__)
    drawing.code(30, 540, events.FitEnd.__name__)
    return drawing.svg()


# -- state and access ---------------------------------------------------------------------------


def state_svg() -> str:
    """Return the parts of the training state, and what one callback sees of it."""
    drawing = Drawing(700, 330, "The training state, and what a callback sees of it")
    drawing.box(16, 16, 400, 298, PLAIN, "Learner")
    drawing.box(32, 46, 368, 96, DEVICE, "carry: stays on the device from step to step")
    drawing.code(46, 84, "params, model_state, opt_state")
    drawing.code(46, 104, "hyperparams")
    drawing.code(46, 124, "cbstate (arrays of traced handlers)")
    drawing.box(32, 152, 368, 72, DEVICE, "values of one step")
    drawing.code(46, 190, "step.batch, step.xs, step.ys, step.outputs")
    drawing.code(46, 210, "step.loss")
    drawing.code(130, 210, "step.grads, step.updates")
    drawing.box(32, 234, 368, 68, HOST, "on the host")
    drawing.code(46, 272, "cbstate (other entries), progress, data")
    drawing.code(46, 292, "model, loss_fn, optimizer, callbacks")
    drawing.box(480, 76, 204, 172, PLAIN, "what Example can access")
    rows = (
        (110, "hyperparams.learning_rate", "Read()"),
        (158, "cbstate.total", "Write()"),
        (206, "step.loss", "Read()"),
    )
    for y, path, permission in rows:
        drawing.code(494, y + 4, path)
        drawing.code(494, y + 20, permission, DEVICE[1])
    drawing.line([(132, 100), (440, 100), (440, 110), (486, 110)])
    drawing.line([(486, 158), (440, 158), (440, 120), (302, 120)])
    drawing.line([(112, 206), (122, 206), (122, 216), (440, 216), (440, 206), (486, 206)])
    return drawing.svg()


# -- order and conflicts ------------------------------------------------------------------------


def order_svg(callbacks: list[fluxcb.Callback]) -> str:
    """Return the graph of callbacks at one moment."""
    graph = fluxcb.check(callbacks, default_callbacks=False)
    return graph.render("svg", event=events.BackwardEnd, phase=phases.TrainingPhase)


# -- host and traced handlers -------------------------------------------------------------------


def host_and_traced_svg() -> str:
    """Return a step with a traced handler and a host handler, and the one value that is copied."""
    drawing = Drawing(700, 250, "A traced handler and a host handler")
    drawing.box(16, 16, 668, 112, DEVICE, "device: the compiled step")
    x = 30
    for text, width, handler in (
        ("model", 70, ""),
        ("loss", 60, ""),
        ("gradients", 90, ""),
        ("add_noise", 170, "traced handler at BackwardEnd"),
        ("update", 80, ""),
    ):
        y, height = (44, 68) if handler else (58, 40)
        drawing.box(x, y, width, height, ("#ffffff", DEVICE[1]))
        (drawing.code if handler else drawing.prose)(x + width / 2, 82, text, INK, "middle")
        if handler:
            drawing.prose(x + width / 2, 102, "at BackwardEnd", MUTED, "middle")
            drawing.prose(x + width / 2, 62, "traced handler", MUTED, "middle")
            copied = x + width / 2
        x += width + 36
        if text != "update":
            drawing.line([(x - 34, 78), (x - 2, 78)])
    drawing.box(16, 176, 668, 58, HOST, "host: Python")
    drawing.box(copied - 85, 184, 170, 42, ("#ffffff", HOST[1]))
    drawing.code(copied, 202, "show", INK, "middle")
    drawing.prose(copied, 218, "host handler at StepEnd", MUTED, "middle")
    drawing.line([(copied, 112), (copied, 183)])
    drawing.code(copied + 10, 150, "step.grad_norm")
    drawing.prose(copied + 10, 166, "copied, because show declares it")
    drawing.prose(30, 158, "all other values stay on the device")
    return drawing.svg()


# -- windows ------------------------------------------------------------------------------------


def windows_svg() -> str:
    """Return what host and device do at the same time."""
    drawing = Drawing(700, 190, "Windows on the device and on the host")
    drawing.prose(16, 62, "device", INK)
    drawing.prose(16, 132, "host", INK)
    for number, x in enumerate((130, 310, 490), 1):
        drawing.box(x, 36, 176, 42, DEVICE)
        drawing.prose(x + 88, 61, f"window {number}", INK, "middle")
    x = 74
    for width, first, second in (
        (52, "batches", "of 1"),
        (68, "batches", "of 2"),
        (0, "", ""),
        (84, "handlers", "of 1"),
        (68, "batches", "of 3"),
        (0, "", ""),
        (84, "handlers", "of 2"),
    ):
        if not width:  # the host waits for the device here
            x = 314 if x < 314 else 494
            continue
        drawing.box(x, 106, width, 42, HOST)
        drawing.prose(x + width / 2, 124, first, INK, "middle")
        drawing.prose(x + width / 2, 139, second, INK, "middle")
        x += width + 4
    drawing.line([(74, 170), (680, 170)])
    drawing.prose(670, 164, "time", MUTED, "end")
    return drawing.svg()


# -- resume -------------------------------------------------------------------------------------


def resume_svg() -> str:
    """Return a run that is killed and resumed, below the same run without an interruption."""
    drawing = Drawing(700, 200, "A run that is killed and resumed")

    def at(step: float) -> float:
        return 150 + 7 * step

    for y, text in ((40, "uninterrupted"), (100, "killed at step 37"), (150, "started again")):
        drawing.prose(16, y + 4, text, INK)
    drawing.line([(at(0), 40), (at(69), 40)], DEVICE[1])
    drawing.line([(at(0), 100), (at(37), 100)], DEVICE[1], arrow=False)
    drawing.line([(at(30), 150), (at(69), 150)], DEVICE[1])
    drawing.line([(at(30), 108), (at(30), 144)], HOST[1], dashed=True)
    for step in (10, 20, 30):
        drawing.box(at(step) - 6, 94, 12, 12, HOST)
        drawing.prose(at(step), 86, str(step), MUTED, "middle")
    drawing.prose(at(37), 105, "✕", "#dc2626", "middle")
    drawing.prose(at(30) - 8, 130, "restore", MUTED, "end")
    drawing.prose(at(69), 28, "step 69", MUTED, "end")
    drawing.prose(at(69), 138, "step 69, same numbers", MUTED, "end")
    drawing.box(150, 180, 12, 12, HOST)
    drawing.prose(168, 190, "checkpoint")
    return drawing.svg()
