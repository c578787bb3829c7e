"""Fixtures that run one training with windows of many lengths and compare the results byte by byte."""

import io
from collections.abc import Mapping
from types import FunctionType

import jax
import numpy as np
import pytest

from fluxcb import Callback, Read, on
from fluxcb._run import program_runner, step_loop
from fluxcb.events import StepEnd
from fluxcb.phases import Phase

LENGTHS = (2, 7, 50, "auto")


@pytest.fixture(autouse=True)
def windows(monkeypatch, no_clock, cpu_rules):
    """Let "auto" compile windows immediately and without time limits; return (steps, buffer length) of each window."""
    seen, look, pays = [], step_loop.StepLoop._finish_window, program_runner.ProgramRunner._windows_pay_off

    def spy(self, window, stream, **others):
        seen.append((window.length, window.program.steps))
        look(self, window, stream, **others)

    def pays_at_once(self, batch):
        programs = self._programs
        if programs.steps_per_call == "auto" and self.main_program is not None:
            return programs.kind_of(self.main_program.step, self._train.platform) == "loop"
        return pays(self, batch)

    monkeypatch.setattr(step_loop.StepLoop, "_finish_window", spy)
    monkeypatch.setattr(program_runner.ProgramRunner, "_windows_pay_off", pays_at_once)
    return seen


@pytest.fixture
def same(windows):
    """Return a function that asserts that `run(steps_per_call)` returns the same bytes for every length.

    `windows_used=False` means that this run has no window of two steps, and `None` that it may have some.
    """

    def check(run, lengths=LENGTHS, *, windows_used=True):
        windows.clear()
        expected = facts(run(1))
        assert {steps for _, steps in windows} == {1}
        for length in lengths:
            windows.clear()
            found = facts(run(length))
            wrong = [
                f"{name}: {expected.get(name)!r:.200} became {found.get(name)!r:.200}"
                for name in {**expected, **found}
                if expected.get(name) != found.get(name)
            ]
            assert not wrong, f"steps_per_call={length}: {len(wrong)} differ\n" + "\n".join(wrong[:8])
            used = [count for count, steps in windows if steps > 1]
            assert windows_used in (bool(used), None)
            # With "auto", a phase with cheap steps has only a window program, which then runs single steps too.
            least, most = (1, program_runner.LONGEST) if length == "auto" else (2, length)
            assert all(least <= count <= most for count in used)
        return expected

    return check


@pytest.fixture
def tell():
    """Return a function that returns the complete observable result of a training."""

    def told(learner, *callbacks):
        return {
            "state": learner.state,
            "cbstate": learner.cbstate,
            "progress": [learner.step, learner.epoch, learner.stop_reason],
            "callbacks": [{k: v for k, v in vars(c).items() if not k.startswith("_fluxcb")} for c in callbacks],
        }

    return told


@pytest.fixture
def bits():
    """Return a function that converts any value to comparable plain data, with arrays as bytes."""
    return frozen


@pytest.fixture
def keep():
    return Keeps


class Keeps(Callback):
    """Keep the bytes of the declared values, and the counters, at each StepEnd.

    Args:
        *paths: `step.loss`, `params`, ...
        event: The event.
        phase: The phase.
        when: A schedule, or None for every occurrence.
    """

    def __init__(self, *paths, event=StepEnd, phase=Phase, when=None):
        self.paths = paths

        @on(event, phase, when=when)
        def keep(self, event, phase, learner):
            progress = learner.progress
            counters = progress.step, progress.epoch, progress.step_in_epoch, progress.batch_size
            self.seen.append((type(phase).name, *counters, *(frozen(read(learner, path)) for path in self.paths)))

        # Each instance has a class of its own, because handlers are found in classes.
        self.__class__ = type("Keeps", (Keeps,), {"keep": keep})
        self.seen = []

    def stateaccess(self):
        access = {}
        for path in self.paths:
            *outer, last = path.split(".")
            inner = access
            for name in outer:
                inner = inner.setdefault(name, {})
            inner[last] = Read()
        return access

    def values(self, index=0):
        """Return (step, value) of one path."""
        return [(entry[1], entry[5 + index]) for entry in self.seen]


def read(learner, path):
    value = learner
    for name in path.split("."):
        value = getattr(value, name)
    return value


def frozen(value):
    if hasattr(value, "dtype"):
        key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(value) if key else value)
        return str(array.dtype), array.shape, array.tobytes()
    if isinstance(value, io.StringIO):
        return value.getvalue()
    if isinstance(value, Mapping):
        return {str(name): frozen(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [frozen(item) for item in value]
    if hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        held = {name: item for name, item in vars(value).items() if not isinstance(item, FunctionType)}
        return {"": type(value).__name__, **frozen(held)}  # a function is named by its address
    return repr(value)


def facts(value):
    """Return the leaves of the result of `frozen`, by path."""
    return dict(leaves(frozen(value), ""))


def leaves(held, path):
    if isinstance(held, list):
        held = dict(enumerate(held))
    if not isinstance(held, dict):
        yield path, held
        return
    yield f"{path}#", len(held)
    for name, item in held.items():
        yield from leaves(item, f"{path}.{name}")
