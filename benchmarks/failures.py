"""How long the processes of a training take to end after one of them fails, in random tries.

    uv run python benchmarks/failures.py [failures SIGTERM lost] [--tries 100] [--seed 0] [--folder FOLDER]

Each try is a training of two or four processes on this machine. One of them fails at a random step: an error in a
handler or in its data, `sys.exit`, too few batches, a batch of another size (`failures`), SIGTERM, or SIGKILL and
SIGSTOP (`lost`). Prints one line per try, and the largest time from the failure until all processes had ended. The
output of tries that did not end as the documentation says is written to the folder.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.failing_processes import (
    CAUSES,
    check,
    check_lost,
    check_stopped,
    latest_stop,
    random_try,
    run,
    seconds_to_stop,
)

KINDS = "failures", "SIGTERM", "lost"
TOGETHER = 10
"""Trainings with SIGTERM that the same processes run, because they survive it."""


class Campaign:
    """A series of tries.

    Args:
        folder: Where the output of wrong tries is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wrong = 0

    def run(self, kind: str, seeds: range) -> None:
        """Run tries of a kind, and print what they took."""
        tries = self._signals(seeds) if kind == "SIGTERM" else self._failures(kind, seeds)
        times = []
        for name, seconds in tries:
            times.append(seconds)
            print(f"{name}: {seconds:.1f} s", flush=True)
        print(f"{kind}: {len(times)} tries; {statistics.median(times):.1f} s in the median, at most {max(times):.1f} s")

    def _failures(self, kind: str, seeds: range) -> Iterator[tuple[str, float]]:
        for seed in seeds:
            case, at, count, failing = random_try(seed, list(CAUSES) if kind == "failures" else ["SIGKILL", "SIGSTOP"])
            ended = run(self.folder, case, at=at, count=count, failing=failing)
            finished = time.time()
            try:
                if case in CAUSES:
                    check(ended, case, failing)
                else:
                    check_lost(ended, failing)
            except AssertionError as error:
                self._report(f"{kind}-{seed}", error, ended)
            lines = [line for _, output in ended for line in output.splitlines() if line.startswith("fails at ")]
            began = min((float(line.split()[2]) for line in lines), default=float("nan"))
            yield f"seed {seed}, process {failing} of {count}: {case} at {at}", finished - began

    def _signals(self, seeds: range) -> Iterator[tuple[str, float]]:
        for count in (2, 4):
            tries = [one for seed in seeds if (one := random_try(seed, ["SIGTERM"])).count == count]
            for first in range(0, len(tries), TOGETHER):
                signals = [(one.at, one.failing) for one in tries[first : first + TOGETHER]]
                (at, failing), *more = signals
                ended = run(self.folder, "SIGTERM", at=at, failing=failing, count=count, more=more)
                try:
                    stopped = check_stopped(ended)
                    late = [
                        (at, step) for (at, _), step in zip(signals, stopped, strict=True) if step > latest_stop(at)
                    ]
                    assert not late, f"signal at, stopped at: {late}"
                except (AssertionError, ValueError) as error:
                    self._report(f"SIGTERM-{count}-{first}", error, ended)
                    continue
                for (at, failing), step, seconds in zip(signals, stopped, seconds_to_stop(ended), strict=True):
                    yield f"process {failing} of {count}: SIGTERM at {at}, stopped at {step}", seconds

    def _report(self, name: str, error: Exception, ended: list[tuple[int, str]]) -> None:
        self.wrong += 1
        output = "\n".join(f"-- process {number}: {code}\n{text}" for number, (code, text) in enumerate(ended))
        (self.folder / f"{name}.txt").write_text(f"{error}\n{output}")
        print(f"{name}: WRONG", flush=True)


def main() -> None:
    """Run the tries, and print what they took."""
    parser: Any = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--tries", type=int, default=100, help="tries of each kind (100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first try (0)")
    parser.add_argument("--folder", type=Path, default=None, help="where to write the output of wrong tries")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="failures-"))
    folder.mkdir(exist_ok=True)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    campaign = Campaign(folder)
    for kind in arguments.kinds:
        campaign.run(kind, range(arguments.seed, arguments.seed + arguments.tries))
    if campaign.wrong:
        raise SystemExit(f"{campaign.wrong} tries did not end as documented; see {folder}")


if __name__ == "__main__":
    main()
