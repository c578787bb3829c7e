"""Real training programs, each written by hand in JAX and again with fluxcb, side by side.

    uv run python benchmarks/programs/run.py [--rounds N] [--only mnist,vae,...] [--json FILE] [--write]

Every run has a process of its own. Printed are the lines of code of both versions, the time per step, the time to the
end of the first step beyond that (construction, tracing and compilation), and the peak of the process's memory in the
training, with the ratio of the fluxcb version to the one by hand. Medians over the rounds; the two versions take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import inspect
import io
import itertools
import json
import os
import resource
import statistics
import sys
import time
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(1, str(Path(__file__).parent.parent))
from fresh import in_fresh_process

import fluxcb

PROGRAMS = (
    "mnist",
    "resnet",
    "vae",
    "sam",
    "nanolm",
    "rnn",
    "diffusion",
    "dcgan",
    "gpt",
    "dqn",
    "transformer",
)
VERSIONS = ("by_hand", "with_fluxcb")
COLUMNS = ("program", "lines", "step, ms", "", "first step, s", "", "peak memory, MiB", "")

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
BEGIN, END = "<!-- programs:begin -->", "<!-- programs:end -->"


def run(program: str, version: str) -> dict[str, float]:
    """Run one version of a program in this process.

    Returns:
        Seconds per step, seconds to the first step, the peak of the resident memory in the training (MiB).
    """
    module = importlib.import_module(program)
    import jax

    jax.config.update("jax_enable_compilation_cache", False)  # what earlier runs compiled
    jax.block_until_ready(jax.numpy.zeros(()) + 1)  # the backend's start belongs to neither
    if version == "with_fluxcb":  # neither do imports; `import fluxcb` loads the Learner when it is first used (0.15 s)
        _ = fluxcb.Learner, fluxcb.callbacks_as_hook
    ticks, peaks = [time.perf_counter()], []

    def tick() -> None:
        ticks.append(time.perf_counter())
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

    with contextlib.redirect_stdout(io.StringIO()):
        getattr(module, version)(tick)
    epochs = [end - begin for begin, end in itertools.pairwise(ticks)]
    per_step = statistics.median(epochs[1:]) / module.STEPS
    return {
        "per_step": per_step,
        "first_step": epochs[0] - per_step * (module.STEPS - 1),
        "memory": peaks[-1] / (2**20 if sys.platform == "darwin" else 2**10),
    }


def lines(program: str, version: str) -> int:
    """Return the lines of code of one version, without blank lines and the calls that take its times."""
    source = inspect.getsource(getattr(importlib.import_module(program), version))
    return sum(bool(line.strip()) and line.strip() != "tick()" for line in source.splitlines())


def compare(program: str, rounds: int) -> dict[str, Any]:
    """Return the figures of both versions of a program, and the medians of their ratios."""
    runs: dict[str, list[dict[str, float]]] = {version: [] for version in VERSIONS}
    for number in range(rounds):
        for version in VERSIONS if number % 2 == 0 else reversed(VERSIONS):
            runs[version].append(in_fresh_process(run, program, version))
    by_hand, with_fluxcb = (runs[version] for version in VERSIONS)
    return {
        "lines": [lines(program, version) for version in VERSIONS],
        **{
            figure: {
                "by_hand": statistics.median(one[figure] for one in by_hand),
                "with_fluxcb": statistics.median(one[figure] for one in with_fluxcb),
                "ratio": statistics.median(b[figure] / a[figure] for a, b in zip(by_hand, with_fluxcb, strict=True)),
            }
            for figure in ("per_step", "first_step", "memory")
        },
    }


def row(program: str, found: dict[str, Any]) -> list[str]:
    """Return the cells of one program's row."""
    cells = [program, "{} → {}".format(*found["lines"])]
    for figure, unit, digits in (("per_step", 1e3, 3), ("first_step", 1, 2), ("memory", 1, 0)):
        pair = found[figure]
        cells.append(f"{unit * pair['by_hand']:.{digits}f} → {unit * pair['with_fluxcb']:.{digits}f}")
        cells.append(f"{pair['ratio']:.2f}x")
    return cells


def write(head: str, rows: list[list[str]]) -> None:
    """Replace what stands between the markers in docs/performance.md."""
    lines = [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in (COLUMNS, *rows)]
    lines.insert(1, "|---|" + "--:|" * (len(COLUMNS) - 1))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text("\n".join([f"{before}{BEGIN}", "", head, "", *lines, "", f"{END}{after}"]))


def main() -> None:
    """Run the programs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(PROGRAMS), help="names of programs, with commas")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--write", action="store_true", help="write the table into docs/performance.md")
    arguments = parser.parse_args()
    head = (
        f"{datetime.date.today()}, {os.cpu_count()} CPU cores (load {os.getloadavg()[0]:.1f} at the start), "
        f"{arguments.rounds} rounds; jax {installed('jax')}, flax {installed('flax')}, equinox {installed('equinox')}."
    )
    table = Table(*COLUMNS, title="By hand → with fluxcb, and their ratio")
    for column in table.columns[1:]:
        column.justify = "right"
    figures = {}
    for program in arguments.only.split(","):
        figures[program] = found = compare(program, arguments.rounds)
        table.add_row(*row(program, found))
        print(*row(program, found), flush=True)
    Console(width=120).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))
    if arguments.write:
        write(head, [row(program, found) for program, found in figures.items()])


if __name__ == "__main__":
    main()
