"""10,000 steps with every compatible built-in callback: memory and other resources do not grow.

With `FLUXCB_LONG=4`, 40,000 steps.
"""

import itertools
import json
import os
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest

import fluxcb
import fluxcb.callbacks as library

pytestmark = pytest.mark.long

RUN = Path(__file__).with_name("soak_run.py")
CHECKPOINTS = ("run", "models", "best")
OBJECTS_OF_A_SAVE = 400  # orbax leaves four for each array, of which this run has about forty (0.12.8)
WARM = 2  # of ten checkpoints; programs, caches and the histories that are bounded are there then


@pytest.fixture(scope="module")
def run():
    """Return the module of the run."""
    return types.SimpleNamespace(**runpy.run_path(str(RUN), run_name="soak_run"))


def built_in():
    found = (getattr(library, name) for name in library.__all__)
    return {value.__name__ for value in found if isinstance(value, type) and issubclass(value, fluxcb.Callback)}


def test_every_built_in_callback_is_used_or_excluded(run, tmp_path):
    assert set(run.makers(tmp_path, sys.stdout, [])) == built_in()


@pytest.mark.parametrize(
    ("name", "reason"),
    {
        "MixUp": r"^CutMix.* and MixUp.* can never be used together.",
        "StopOnNaNLoss": r"^SkipNonFinite.* and StopOnNaNLoss.* can never be used together.",
        "StochasticWeightAveraging": r"^ParameterEMA.* and StochasticWeightAveraging.* both replace the parameters",
    }.items(),
    ids=lambda text: text if text.isidentifier() else "",
)
def test_excluded_callbacks_conflict(run, tmp_path, name, reason):
    make = run.makers(tmp_path, sys.stdout, [])
    others = run.callbacks_of(make, exchanged=False)
    fluxcb.check(others, default_callbacks=False)
    assert name in run.EXCLUDED
    with pytest.raises(fluxcb.ConflictError, match=reason):
        fluxcb.check([*others, make[name]()], default_callbacks=False)


def soak(steps, *arguments):
    """Return ten measurements of the resources of a training process."""
    # Every save has threads of its own, and glibc would give each of them an arena of its own, with its own remains.
    done = subprocess.run(
        [sys.executable, RUN, str(steps), *arguments],
        # Compiling leaves free memory, which the training uses later. With programs from the cache, the memory would
        # grow by this amount when it is first used.
        env={**os.environ, "MALLOC_ARENA_MAX": "1", "JAX_ENABLE_COMPILATION_CACHE": "false"},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize(("steps", "arguments"), [(10_000, []), (10_000, ["exchanged"])], ids=["all", "exchanged"])
def test_memory_and_resources_do_not_grow(steps, arguments, times):
    steps *= times
    held = soak(steps, *arguments)
    assert [at["step"] for at in held] == [steps * tenth // 10 for tenth in range(1, 11)]
    begin, end = held[WARM - 1], held[-1]

    # A program that is compiled stays: it is no leak, but there are few of them.
    assert end["compiles"] <= 4
    quiet = [(a, b) for a, b in itertools.pairwise(held[WARM - 1 :]) if a["compiles"] == b["compiles"]]
    # The C library divides freed memory differently in each run: 11.1 MiB were seen on a busy machine.
    assert sum(b["bytes"] - a["bytes"] for a, b in quiet) < 16 * 2**20
    # Values of epochs are kept; what is left behind at each step, or each fifth, would be seen.
    saves = sum(b["saves"] - a["saves"] for a, b in quiet)
    assert sum(b["objects"] - a["objects"] for a, b in quiet) < steps / 5 + saves * OBJECTS_OF_A_SAVE

    assert begin["arrays"] == end["arrays"]
    assert begin["threads"] == end["threads"]
    assert begin["descriptors"] == end["descriptors"]

    assert end["files"].keys() == begin["files"].keys()
    for name, (count, size) in end["files"].items():
        before, size_before = begin["files"][name]
        if name in CHECKPOINTS:  # orbax spreads the same arrays over some files more or less
            assert count < 1.2 * before, name
        else:
            assert count == before, name
        if name.startswith(("log", "tensorboard")) or name in CHECKPOINTS:  # in proportion to what was logged
            assert size < 1.5 * size_before * end["step"] / begin["step"], name
        else:
            assert size < 1.5 * size_before, name
    assert {name: end["files"][name][0] for name in ("arrays", "images", "log.jsonl", "log.csv")} == {
        "arrays": 3,  # the newest, as many as asked for
        "images": 2 * 8,  # one for each image of the batch
        "log.jsonl": 1,
        "log.csv": 1,
    }
