"""Make the summary of the measurements: `python docs/images/make_performance.py`.

It reads the tables of docs/performance.md, which `benchmarks/run.py --write` writes. From them it draws
`performance.svg`, and writes the figures at the top of docs/performance.md and in docs/why.md. A test compares all
three with what this script would write.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
PAGE, WHY, PICTURE = DOCS / "performance.md", DOCS / "why.md", Path(__file__).with_name("performance.svg")
BEGIN, END = "<!-- summary: made by make_performance.py -->\n", "<!-- end of summary -->\n"

PEERS = "JAX: the 64-64-10 network, the loss of each step kept"
STEPS = "Each step, against a hand-written loop that never reads the loss"
WINDOWS = "Windows, against a hand-written `lax.scan` over stacked batches"
HANDLERS = "One more handler, each step"
FIRST = "The first step, in fresh processes"
LARGER = ("Convolutional network: a step that dominates", "Small transformer: a step that dominates")

# Rows of the table of peers, and what the picture and the pages call them.
BARS = {
    'fluxcb, default callbacks, "auto"': "fluxcb",
    "fluxcb, default callbacks, steps_per_call=1": "fluxcb, one step per call",
    "by hand, history": "hand-written loop",
    "CLU in a hand-written loop": "hand-written loop with CLU",
    "Keras, steps_per_execution=50": "Keras, 50 steps per call",
    "Keras": "Keras, one step per call",
    "Flax NNX, nnx.jit, cached_partial": "Flax NNX loop, cached_partial",
    "Flax NNX, nnx.jit": "Flax NNX loop, nnx.jit",
}


def tables(text: str) -> dict[str, dict[str, dict[str, float]]]:
    """Return the numbers of all tables: by heading, row and column. Other text, such as quartiles, is left out."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for heading, body in re.findall(r"^### (.+)\n\n((?:\|.*\n)+)", text, re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in body.splitlines()]
        found[heading] = {
            row[0]: {
                column: float(number[0])
                for column, cell in zip(head[1:], row[1:], strict=True)
                if (number := re.match(r"-?\d+(\.\d+)?(?= |$)", cell))
            }
            for row in rows
        }
    return found


def bars(measured: dict[str, dict[str, dict[str, float]]]) -> dict[str, float]:
    """Return the time of a step (us) for each bar of the picture, fastest first."""
    times = {shown: measured[PEERS][row]["us/step"] for row, shown in BARS.items()}
    return dict(sorted(times.items(), key=lambda item: item[1]))


def picture(times: dict[str, float]) -> str:
    """Return a bar chart as SVG."""
    left, width, row, top = 225, 430, 28, 44
    height = top + row * len(times) + 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" width="720" height="{height}" '
        'font-family="sans-serif" font-size="13" role="img">',
        "<title>Time per training step of a small network, in microseconds</title>",
        f'<rect width="720" height="{height}" fill="white"/>',
        '<text x="12" y="24" font-weight="bold">Time per training step of a small network (µs)</text>',
    ]
    for number, (name, time) in enumerate(times.items()):
        y = top + row * number
        length = max(2.0, width * time / max(times.values()))
        color = "#1d4ed8" if name.startswith("fluxcb") else "#94a3b8"
        parts += [
            f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{left}" y="{y}" width="{length:.1f}" height="20" fill="{color}"/>',
            f'<text x="{left + length + 6:.1f}" y="{y + 15}">{time:.0f}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def rows(times: dict[str, float]) -> str:
    """Return the times as a table, with ratios to the hand-written loop."""
    base = times["hand-written loop"]
    lines = [f"| {name} | {time:.0f} | {time / base:.2f} |\n" for name, time in times.items()]
    return "| | µs per step | relative to the hand-written loop |\n|---|--:|--:|\n" + "".join(lines)


def summary(measured: dict[str, dict[str, dict[str, float]]], machine: str) -> str:
    """Return the summary at the top of the page of measurements."""

    def ratio(table: str, row: str) -> str:
        return f"{measured[table][row]['ratio']:.2f}"

    default = 'default callbacks, "auto"'
    handler = measured[HANDLERS]["host handler that does nothing, steps_per_call=1"]["adds, us/step"]
    traced = measured[HANDLERS]["traced handler, a scalar to the history, steps_per_call=1"]["adds, us/step"]
    first = measured[FIRST]["default callbacks"]["difference, s"]
    convolution, transformer = (ratio(table, "default callbacks") for table in LARGER)
    return f"""
Measured on {machine}. The picture shows a network with one hidden layer of 64 units, because overhead is largest for
small models. All variants in the picture record the loss of every step.

![Time per training step for fluxcb, hand-written loops, CLU, Keras and Flax NNX](images/performance.svg)

- **Default settings:** {ratio(STEPS, default)} times the time of a hand-written loop that calls a jitted step and never
  reads the loss. The gain comes from [windows](concepts/windows.md): fluxcb runs many steps in one call if no callback
  has to run in between.
- **One step per call:** {ratio(STEPS, "default callbacks, steps_per_call=1")} times the time of the same loop.
- **Against a hand-written `lax.scan` of 100 steps:** {ratio(WINDOWS, "default callbacks, steps_per_call=100")} times,
  with the default callbacks.
- **Larger models:** {convolution} times for a convolutional network and {transformer} times for a small transformer.
  Their steps take so long that overhead does not matter.
- **One more host handler:** {handler:.2f} µs per step. **One more traced handler** that logs a scalar: {traced:.1f} µs.
- **First step:** {first:.2f} s more than by hand, because the default callbacks add code to compile.
- **Other libraries, against a hand-written loop:** Keras takes {ratio(PEERS, "Keras")} times as long, CLU
  {ratio(PEERS, "CLU in a hand-written loop")} times.

"""


def made() -> dict[Path, str]:
    """Return the text of each file that this script writes."""
    text = PAGE.read_text(encoding="utf-8")
    measured, times = tables(text), bars(tables(text))
    machine = re.search(r"^(\S+), cpu, (\d+ CPU cores)", text, re.MULTILINE)
    assert machine, f"{PAGE.name} does not say where the figures were measured"
    return {
        PICTURE: picture(times),
        PAGE: _with_summary(text, summary(measured, f"{machine[1]} with {machine[2]}")),
        WHY: _with_summary(WHY.read_text(encoding="utf-8"), f"\n{rows(times)}\n"),
    }


def _with_summary(text: str, block: str) -> str:
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + block + END + rest.partition(END)[2]


if __name__ == "__main__":
    for path, content in made().items():
        path.write_text(content, encoding="utf-8")
