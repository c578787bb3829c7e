"""What fluxcb costs, beside the same training written by hand and by others.

    uv run --with-requirements benchmarks/peers.txt python benchmarks/run.py
        [--rounds N] [--only per_step,windows,...] [--json FILE] [--write]

Each group of measurements runs in a process of its own. Every ratio is one of figures that were taken in turns, in one
process and one round; medians with quartiles over the rounds. Machines are noisy: read the quartiles.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from figures import Table
from fresh import in_fresh_process
from rich.console import Console

GROUPS = {
    "per_step": "Each step",
    "windows": "Windows",
    "dispatch": "Dispatch",
    "construction": "Construction and checking",
    "first_step": "First step",
    "memory": "Memory",
    "models": "Larger models",
    "step_lengths": "Steps of 5 ms and 200 ms",
    "peers": "Other libraries",
}

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
BEGIN, END = "<!-- benchmark:begin -->", "<!-- benchmark:end -->"

PACKAGES = "jax", "optax", "numpy", "flax", "keras", "clu", "torch", "lightning", "pytorch-ignite"


def measure_group(name: str, rounds: int) -> list[Table]:
    """Return the tables of one group."""
    return importlib.import_module(name).measure(rounds)


def machine() -> dict[str, str]:
    """Return what the figures depend on."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "platform": in_fresh_process(_backend),
        "CPUs": str(os.cpu_count()),
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "Python": platform.python_version(),
        "fluxcb": in_fresh_process(_fluxcb_version),
        **versions,
    }


def _backend() -> str:
    import jax

    return jax.default_backend()


def _fluxcb_version() -> str:
    import fluxcb

    return fluxcb.__version__


def headline(about: dict[str, str], rounds: int) -> str:
    """Return when, where and with what the figures were taken."""
    versions = ", ".join(f"{name} {about[name]}" for name in ("fluxcb", "Python", *PACKAGES) if name in about)
    return (
        f"{about['date']}, {about['platform']}, {about['CPUs']} CPU cores (load {about['load']} at the start), "
        f"{rounds} rounds; {versions}."
    )


def write(page: Path, text: str, begin_marker: str = BEGIN, end_marker: str = END) -> None:
    """Replace the text between two markers of a page.

    Raises:
        SystemExit: The page has no markers.
    """
    before, begin, rest = page.read_text().partition(begin_marker)
    _, end, after = rest.partition(end_marker)
    if not (begin and end):
        raise SystemExit(f"{page} has no lines `{begin_marker}` and `{end_marker}`.")
    page.write_text(f"{before}{begin}\n\n{text}\n{end}{after}")


def markdown(head: str, tables: dict[str, list[Table]]) -> str:
    """Return all tables as a page shows them."""
    parts = [head, ""]
    for name, group in tables.items():
        parts += [f"## {GROUPS[name]}", ""]
        parts += [table.markdown() for table in group]
    return "\n".join(parts)


def main() -> None:
    """Run the groups, print their tables, and write them where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each comparison (15)")
    parser.add_argument("--only", help=f"groups, separated by commas: {','.join(GROUPS)}")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--write", type=Path, nargs="?", const=PAGE, help="write the figures into docs/performance.md")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else list(GROUPS)
    if unknown := [name for name in names if name not in GROUPS]:
        parser.error(f"no group {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    if arguments.write and not (BEGIN in (page := arguments.write.read_text()) and END in page):
        parser.error(f"{arguments.write} has no lines `{BEGIN}` and `{END}`")

    console = Console(width=170)
    about = machine()
    head = headline(about, arguments.rounds)
    console.print(head, highlight=False)
    tables: dict[str, list[Table]] = {}
    for name in names:
        began = time.perf_counter()
        tables[name] = in_fresh_process(measure_group, name, arguments.rounds)
        console.rule(f"{GROUPS[name]} ({time.perf_counter() - began:.0f} s)", align="left")
        for table in tables[name]:
            table.print(console)
    if arguments.json:
        groups: dict[str, Any] = {name: [table.as_json() for table in group] for name, group in tables.items()}
        arguments.json.write_text(json.dumps({"about": about, "rounds": arguments.rounds, **groups}, indent=2))
    if arguments.write:
        write(arguments.write, markdown(head, tables))


if __name__ == "__main__":
    main()
