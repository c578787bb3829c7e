"""When "auto" compiles the program for windows, depending on the cost of past and future calls."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import Learner
from fluxcb._run import program_runner, programs

COMPILING, CALLING = 1.0, 1e-3  # what a program, and a call of it, are said to take (s)
# A thousand calls cost as much as compiling; two thousand that are to come would pay for it twice.


@pytest.fixture
def singles(monkeypatch, cpu_rules):
    """`singles(batches, **fit)` returns how many single steps a fit runs before the first window.

    The steps are said not to be cheap.
    """
    monkeypatch.setattr(program_runner, "_CHEAP_FLOPS", -1)
    compile_program, took = programs.compile_program, program_runner.ProgramRunner.record_duration

    def took_long(self, window, seconds):
        window.call_seconds = CALLING * window.length
        took(self, window, window.call_seconds)

    monkeypatch.setattr(program_runner.ProgramRunner, "record_duration", took_long)
    monkeypatch.setattr(
        programs, "compile_program", lambda *of, **how: replace(compile_program(*of, **how), seconds=COMPILING)
    )

    def run(batches, **fit):
        called = []
        call_single, call_window = program_runner.ProgramRunner._call_single, program_runner.ProgramRunner._call_window

        def single(self, window, stream, **how):
            call_single(self, window, stream, **how)
            called.append(len(window.calls))

        def several(self, window, stream):
            found = call_window(self, window, stream)
            if found:
                called.append(0)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(program_runner.ProgramRunner, "_call_single", single)
            patch.setattr(program_runner.ProgramRunner, "_call_window", several)
            learner = Learner.from_loss(
                {"w": jnp.ones(2)},
                lambda params, batch, key: jnp.mean(params["w"] * batch),
                optax.sgd(0.1),
                data=[np.ones(2, np.float32)] * batches,
                default_callbacks=False,
            )
            learner.fit(**fit)
        return sum(called[: called.index(0)]) if 0 in called else sum(called)

    return run


SOON = range(program_runner._MIN_TIMED_STEPS, program_runner._MIN_TIMED_STEPS + 2 * program_runner.AHEAD + 1)


@pytest.mark.parametrize(
    ("batches", "fit"),
    [(3000, {"epochs": 1}), (900, {"epochs": 3}), (900, {"steps": 2700}), (30, {"epochs": 90})],
    ids=["an epoch", "epochs", "steps", "short epochs"],
)
def test_long_fit_uses_windows_almost_from_start(singles, batches, fit):
    assert singles(batches, **fit) in SOON


@pytest.mark.parametrize(
    ("batches", "fit"),
    [(1500, {"epochs": 1}), (500, {"epochs": 3}), (500, {"steps": 1500})],
    ids=["an epoch", "epochs", "steps"],
)
def test_shorter_fit_uses_windows_after_break_even(singles, batches, fit):
    assert singles(batches, **fit) in range(1000, 1000 + 2 * program_runner.AHEAD + 1)


def test_short_fit_uses_no_windows(singles):
    assert singles(900, epochs=1) == 900
