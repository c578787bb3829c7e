"""The tests and the figures that depend on the device, in one command.

    uv run --group test python benchmarks/accelerator.py [--rounds N] [--only tests,figures] [--write]

It runs on JAX's default device. On a machine without an accelerator it says so, and checks only that everything runs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import run
from figures import Figure, Table
from fresh import in_fresh_process
from rich.console import Console

PARTS = "tests", "figures"
TESTS = (
    "tests/windows",
    "tests/compile",
    "tests/contract",
    "tests/run/test_accelerators.py",
    "tests/run/test_ahead.py",
    "tests/run/test_numerics.py",
    "tests/run/test_stacking.py",
    "tests/run/test_window_compilation.py",
    "tests/run/test_windows.py",
)
"""Tests of compiled programs, windows and numerics. The other tests do not depend on the device."""

PROCESSES = 14
"""Maximum number of processes that run the tests."""

DETERMINISTIC = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
"""Flags for tests that compare bits. Otherwise, XLA chooses the algorithms of each program by measuring them."""

GROUPS = "step_lengths", "models", "per_step", "windows", "first_step", "dispatch"
MOST = 1.02
"""Largest ratio to the hand-written loop that is aimed at for the steps of `step_lengths`."""

BEGIN, END = "<!-- accelerator:begin -->", "<!-- accelerator:end -->"
ROOT = Path(__file__).parent.parent


def _device() -> tuple[str, str]:
    import jax

    devices = jax.devices()
    return devices[0].platform, f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"


def run_tests(platform: str) -> bool:
    """Run the tests, and return whether all passed."""
    environment = dict(os.environ)
    if platform == "gpu":
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {DETERMINISTIC}"
    # The processes share the accelerator, and each takes about 0.5 GiB of its memory; see tests/conftest.py.
    command = [sys.executable, "-m", "pytest", "-n", str(min(os.cpu_count() or 1, PROCESSES)), "-q", *TESTS]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def measure(rounds: int, platform: str, console: Console) -> Iterator[list[Table]]:
    """Measure one group after the other, and yield the tables of all groups so far."""
    tables = []
    for name in GROUPS:
        console.rule(run.GROUPS[name], align="left")
        for table in in_fresh_process(run.measure_group, name, rounds):
            table.title = f"{table.title}, on {platform}"
            if name == "step_lengths":
                table.notes.append(_verdict(table))
            table.print(console)
            tables.append(table)
        yield tables


def _verdict(table: Table) -> str:
    """Return which rows of fluxcb take more than the time that is aimed at."""
    ratios = {name: cells["ratio"] for name, cells in table.rows.items() if "callbacks" in name}
    above = [
        f"{name} ({ratio.median:.3f})"
        for name, ratio in ratios.items()
        if isinstance(ratio, Figure) and ratio.median > MOST
    ]
    return f"More than {MOST} times the hand-written loop: {', '.join(above) or 'none'}."


def main() -> None:
    """Run the tests and the groups, and write the figures if `--write` is given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each comparison (15)")
    parser.add_argument("--only", help=f"parts, separated by commas: {','.join(PARTS)}")
    parser.add_argument("--write", action="store_true", help="write the figures into docs/performance.md")
    arguments = parser.parse_args()
    parts = arguments.only.split(",") if arguments.only else list(PARTS)
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")

    console = Console(width=170)
    platform, device = in_fresh_process(_device)
    head = f"{device}; {run.headline(run.machine(), arguments.rounds)}"
    if platform == "cpu":
        head = f"No accelerator: these are the figures of a CPU. {head}"
    console.print(head, highlight=False)
    passed = run_tests(platform) if "tests" in parts else True
    if "figures" in parts:
        for tables in measure(arguments.rounds, platform, console):
            # After each group, so that a run that is interrupted leaves the figures so far.
            if arguments.write:
                text = "\n".join([head, "", *[table.markdown() for table in tables]])
                run.write(run.PAGE, text, BEGIN, END)
    if not passed:
        raise SystemExit("Some tests failed; see above.")


if __name__ == "__main__":
    main()
