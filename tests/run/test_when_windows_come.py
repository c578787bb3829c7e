"""When "auto" compiles the program of windows: what calls have cost, and what those to come will cost."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import Learner
from fluxcb._run import calling, programs

COMPILING, CALLING = 1.0, 1e-3  # what a program, and a call of it, are said to take (s)
# A thousand calls cost as much as compiling; two thousand that are to come would pay for it twice.


@pytest.fixture
def singles(monkeypatch):
    """`singles(batches, **fit)`: return how many single steps a fit has called before the first window."""
    compile_program, took = programs.compile_program, calling.Caller.took

    def took_long(self, window, seconds):
        window.calling = CALLING * window.length
        took(self, window, window.calling)

    monkeypatch.setattr(calling.Caller, "took", took_long)
    monkeypatch.setattr(
        programs, "compile_program", lambda *of, **how: replace(compile_program(*of, **how), seconds=COMPILING)
    )

    def run(batches, **fit):
        called = []
        call_single, call_window = calling.Caller._call_single, calling.Caller._call_window

        def single(self, window, feed, **how):
            call_single(self, window, feed, **how)
            called.append(len(window.calls))

        def several(self, window, feed):
            found = call_window(self, window, feed)
            if found:
                called.append(0)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(calling.Caller, "_call_single", single)
            patch.setattr(calling.Caller, "_call_window", several)
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


SOON = range(calling._TELLING, calling._TELLING + 2 * calling.AHEAD + 1)  # two windows are under way


@pytest.mark.parametrize(
    ("batches", "fit"),
    [(3000, {"epochs": 1}), (900, {"epochs": 3}), (900, {"steps": 2700}), (30, {"epochs": 90})],
    ids=["an epoch", "epochs", "steps", "short epochs"],
)
def test_a_long_fit_has_windows_almost_from_the_beginning(singles, batches, fit):
    assert singles(batches, **fit) in SOON


@pytest.mark.parametrize(
    ("batches", "fit"),
    [(1500, {"epochs": 1}), (500, {"epochs": 3}), (500, {"steps": 1500})],
    ids=["an epoch", "epochs", "steps"],
)
def test_a_shorter_one_when_calls_have_cost_as_much_as_compiling(singles, batches, fit):
    assert singles(batches, **fit) in range(1000, 1000 + 2 * calling.AHEAD + 1)


def test_a_short_one_has_none(singles):
    assert singles(900, epochs=1) == 900
