"""The time per step of both versions of a program in one process, where they take turns after each epoch.

    uv run python benchmarks/programs/in_turns.py PROGRAM [--epochs N] [--rounds N]

Two processes of the same program differ by several percent in the time per step, because their memory lies elsewhere
and because other processes run beside them. In turns, both versions meet the same conditions, so fewer runs are needed
for a difference of one or two percent. Each version runs in a thread, and only one of the two threads runs at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import statistics
import sys
import threading
import time
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parent.parent))
from fresh import in_fresh_process

VERSIONS = ("by_hand", "with_fluxcb")
WARM_UP = 2
"""Epochs that are not timed, because programs are compiled in them."""


class Turns:
    """Threads that run one at a time, and the length of their turns.

    Attributes:
        lengths: The lengths of the turns of each thread (seconds).
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.lengths: dict[str, list[float]] = {name: [] for name in names}
        self._changed = threading.Condition()
        self._waiting = list(names)  # the first one runs
        self._began = time.perf_counter()

    def wait(self, name: str) -> None:
        """Wait until a thread may run."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting[0] == name)
            self._began = time.perf_counter()

    def end(self, name: str, *, forever: bool = False) -> None:
        """End the turn of a thread, and let the next one run."""
        with self._changed:
            self.lengths[name].append(time.perf_counter() - self._began)
            self._waiting = [*self._waiting[1:], *[name] * (not forever)]
            self._changed.notify_all()


def ratio(program: str, epochs: int) -> float:
    """Return the time per step with fluxcb, relative to that by hand: the median over the epochs of this process."""
    module = importlib.import_module(program)
    module.EPOCHS = epochs
    turns = Turns(VERSIONS)

    def tick(name: str) -> None:
        turns.end(name)
        turns.wait(name)

    def run(name: str) -> None:
        turns.wait(name)
        try:
            getattr(module, name)(lambda: tick(name))
        finally:
            turns.end(name, forever=True)

    by_hand, with_fluxcb = VERSIONS
    other = threading.Thread(target=run, args=(by_hand,))
    with contextlib.redirect_stdout(io.StringIO()):
        other.start()
        run(with_fluxcb)  # in the main thread, which receives signals
        other.join()
    pairs = zip(turns.lengths[with_fluxcb][WARM_UP:epochs], turns.lengths[by_hand][WARM_UP:epochs], strict=True)
    return statistics.median(one / reference for one, reference in pairs)


def main() -> None:
    """Print the ratio of each process, and their median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5, help="number of processes")
    arguments = parser.parse_args()
    ratios = []
    for _ in range(arguments.rounds):
        ratios.append(in_fresh_process(ratio, arguments.program, arguments.epochs))
        print(f"{ratios[-1]:.3f}", flush=True)
    print(f"{arguments.program}: {statistics.median(ratios):.3f} (median of {arguments.rounds} processes)")


if __name__ == "__main__":
    main()
