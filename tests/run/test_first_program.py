"""Phases with cheap steps begin with the window program, and compile no program for single steps."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import Callback, EverySteps, Learner, Read, on
from fluxcb._run import program_runner
from fluxcb._run.program_runner import AHEAD, LONGEST
from fluxcb.data import ArrayLoader
from fluxcb.events import StepEnd
from fluxcb.phases import TrainingPhase


def mean(params, batch):
    return jnp.mean(params["w"] * batch)


def trained(data, loss=mean, **options):
    learner = Learner.from_loss({"w": jnp.ones(2)}, loss, optax.sgd(0.1), data=data, default_callbacks=False, **options)
    learner.fit(2)
    return learner


def buffers(learner):
    """Return the lengths of the programs, in the order in which they were compiled."""
    return [program.steps for program in learner._core.engine.programs.compiled]


def ones(count, size=2):
    return [np.ones(size, np.float32)] * count


@pytest.mark.parametrize(
    ("data", "lengths"),
    [
        (ones(20), [AHEAD]),
        (ones(50), [50]),
        (ones(300), [LONGEST]),
        ([*ones(50), *ones(1, 1)], [51, 1]),  # the last batch has another shape
        ((ones(50), ones(7)), [50, AHEAD]),
        ((ones(50), ones(1)), [50, 2]),  # validation has one step
        (ArrayLoader(np.ones((64, 2), np.float32), 8, device=True), [AHEAD]),
    ],
    ids=[
        "short epochs",
        "epochs",
        "long epochs",
        "smaller batch",
        "validation",
        "validation of one step",
        "resident data",
    ],
)
def test_cheap_steps_need_one_program_per_shape(cpu_rules, data, lengths):
    assert buffers(trained(data)) == lengths


class Reader(Callback):
    def __init__(self, period):
        self.period = period

    def stateaccess(self):
        return {"params": Read(borrow=True)}

    def handlers(self):
        return [replace(handler, when=EverySteps(self.period)) for handler in super().handlers()]

    @on(StepEnd, TrainingPhase)
    def read(self, event, phase, learner):
        _ = learner.params


def multiplied(params, batch):
    """Return a loss that needs at least 2 * 1024**3 operations."""
    square = jnp.full((1024, 1024), params["w"][0])
    return jnp.mean(square @ square) + jnp.mean(batch)


def printed(params, batch):
    jax.debug.callback(lambda: None)
    return mean(params, batch)


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (ones(20), {"steps_per_call": 1}),
        (ones(20), {"callbacks": [Reader(1)]}),
        (ones(20), {"loss": multiplied}),
        (ones(20), {"loss": printed}),
        ([np.ones((program_runner._CHEAP_BYTES // 8 + 1, 2), np.float32)] * 4, {}),
        ([jnp.ones(2)] * 20, {}),
        (ones(20), {"program": "straight"}),
        (ones(20), {"window_bytes": 1}),
    ],
    ids=["asked", "handlers", "operations", "effects", "large batches", "on device", "straight", "memory"],
)
def test_other_phases_begin_with_single_steps(cpu_rules, data, options):
    assert buffers(trained(data, **options))[0] == 1


def test_rare_handlers_do_not_prevent_windows(cpu_rules):
    assert buffers(trained(ones(20), callbacks=[Reader(5)])) == [AHEAD]


@pytest.mark.parametrize("count", [1, 2, 5, 20])
def test_window_program_gives_the_bits_of_single_steps(cpu_rules, count):
    xs = np.random.default_rng(0).normal(size=(count, 8, 2)).astype(np.float32)
    first, second = (
        trained(list(xs), lambda params, batch: jnp.mean(jnp.tanh(params["w"] * batch) ** 2), **options)
        for options in ({}, {"steps_per_call": 1})
    )
    assert first.step == second.step == 2 * count
    assert np.asarray(first.params["w"]).tobytes() == np.asarray(second.params["w"]).tobytes()
