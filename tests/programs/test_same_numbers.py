"""The two versions of each program in benchmarks/programs compute the same numbers."""

import importlib
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[2] / "benchmarks" / "programs"
NAMES = sorted(path.stem for path in PROGRAMS.glob("*.py") if path.stem not in ("data", "in_turns", "run"))
# The short suite runs the first one.
FASTEST_FIRST = sorted(NAMES, key=lambda name: name != "mnist")

# Less data, fewer steps, and smaller networks than in the measurements.
CONSTANTS = {"EPOCHS": 2, "STEPS": 4}
OWN_CONSTANTS = {
    "dqn": {"STEPS": 150, "TARGET_EVERY": 40},
    "gpt": {"STEPS": 6, "LAYERS": 1},  # the second epoch begins in the middle of an update
    "nanolm": {"LAYERS": 1},
    "resnet": {"BLOCKS": ((16, 2),)},
    "transformer": {"WIDTH": 64, "LAYERS": 2, "HEADS": 4},
}


@pytest.fixture
def program(request, monkeypatch):
    """Return a program with small constants."""
    monkeypatch.syspath_prepend(str(PROGRAMS))
    before = set(sys.modules)
    module = importlib.import_module(request.param)
    for name, value in {**CONSTANTS, **OWN_CONSTANTS.get(request.param, {})}.items():
        monkeypatch.setattr(module, name, value)
    yield module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == PROGRAMS:
            del sys.modules[name]


@pytest.mark.parametrize("program", FASTEST_FIRST, indirect=True)
def test_both_versions_compute_same_numbers(program):
    """Both run the same float32 operations. XLA may sum in another order, which changes only the last bits."""
    ticks = {"by_hand": 0, "with_fluxcb": 0}

    def run(version):
        def tick():
            ticks[version] += 1

        return getattr(program, version)(tick)

    by_hand, with_fluxcb = run("by_hand"), run("with_fluxcb")
    assert ticks == {"by_hand": program.EPOCHS, "with_fluxcb": program.EPOCHS}
    # A few roundings of 6e-8 each, which several steps of training amplify.
    assert with_fluxcb == pytest.approx(by_hand, rel=1e-4)


def test_command_runs_every_program(monkeypatch):
    monkeypatch.syspath_prepend(str(PROGRAMS))
    run = importlib.import_module("run")
    monkeypatch.delitem(sys.modules, "run")
    assert sorted(run.PROGRAMS) == NAMES
