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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.failing_processes import CAUSES, Try, check, check_lost, check_stopped, latest_stop, random_try, run

CASES = {"failures": list(CAUSES), "SIGTERM": ["SIGTERM"], "lost": ["SIGKILL", "SIGSTOP"]}


def attempt(one: Try, folder: Path) -> tuple[float, int | None, str]:
    """Run a try, and return the time to its end (s), the steps after a signal, and what was wrong with its output."""
    ended = run(folder, one.case, at=one.at, count=one.count, failing=one.failing)
    finished = time.time()
    output = "\n".join(f"-- process {number}: {code}\n{text}" for number, (code, text) in enumerate(ended))
    failed = [float(line.split()[2]) for line in output.splitlines() if line.startswith("fails at ")]
    steps, problem = None, ""
    try:
        if one.case in CAUSES:
            check(ended, one.case, one.failing)
        elif one.case == "SIGTERM":
            stopped = check_stopped(ended)
            steps = stopped - one.at
            assert one.at <= stopped <= latest_stop(one.at), f"stopped at step {stopped}"
        else:
            check_lost(ended, one.failing)
    except (AssertionError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}\n{output}"
    if not failed:
        problem = problem or f"the process did not get to its failure\n{output}"
    return finished - min(failed, default=finished), steps, problem


def main() -> None:
    """Run the tries, and print what they took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kinds", nargs="*", default=list(CASES))
    parser.add_argument("--tries", type=int, default=100, help="tries of each kind (100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first try (0)")
    parser.add_argument("--folder", type=Path, default=None, help="where to write the output of failed tries")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="failures-"))
    folder.mkdir(exist_ok=True)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    wrong = 0
    for kind in arguments.kinds:
        times, steps = [], []
        for seed in range(arguments.seed, arguments.seed + arguments.tries):
            one = random_try(seed, CASES[kind])
            seconds, stopped, problem = attempt(one, folder)
            times.append(seconds)
            steps += [stopped] if stopped is not None else []
            if problem:
                wrong += 1
                (folder / f"{kind}-{seed}.txt").write_text(problem)
            told = f", {stopped} steps later" if stopped is not None else ""
            name = f"process {one.failing} of {one.count}: {one.case} at {one.at}"
            print(f"seed {seed}, {name}: {seconds:.1f} s{told}{', WRONG' if problem else ''}", flush=True)
        print(f"{kind}: {len(times)} tries; {statistics.median(times):.1f} s in the median, at most {max(times):.1f} s")
        if steps:
            print(f"  steps between the signal's handler and the end: {min(steps)} to {max(steps)}")
    if wrong:
        raise SystemExit(f"{wrong} tries did not end as documented; see {folder}")


if __name__ == "__main__":
    main()
