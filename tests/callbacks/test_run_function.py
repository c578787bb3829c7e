"""RunFunction: how often it runs compared with RunOp of tensorpack, on the host and traced, and the target of a DQN."""

import jax.numpy as jnp
import numpy as np
import pytest

from fluxcb import Callback, DeclarationError, MissingStateError, Read, Write, every, on
from fluxcb.callbacks import PeriodicTrigger, RunFunction
from fluxcb.events import EpochEnd, Event, StepBegin, StepEnd, TracedEvent
from fluxcb.phases import TrainingPhase, ValidationPhase
from fluxcb.testing import testlearner


def create(learner):
    learner.cbstate.count = jnp.int32(0)


def count(learner):
    learner.cbstate.count = learner.cbstate.count + 1


COUNT = {"cbstate": {"count": Write()}}


class Looks(Callback):
    """Notes the count after steps, after epochs and validation, whenever it is not being changed."""

    def __init__(self):
        self.seen = []

    def stateaccess(self):
        return {"cbstate": {"count": Read()}}

    def runafter(self):
        return (RunFunction,)

    @on
    def begin(self, event: StepBegin, phase: TrainingPhase, learner):
        if learner.progress.step_in_epoch == 0:
            self.seen.append(("begin", int(learner.cbstate.count)))

    @on
    def step_end(self, event: StepEnd, phase: TrainingPhase, learner):
        self.seen.append(("step", int(learner.cbstate.count)))

    @on
    def validated(self, event: EpochEnd, phase: ValidationPhase, learner):
        self.seen.append(("validated", int(learner.cbstate.count)))


def counting(*flags, **kwargs):
    return RunFunction(count, *flags, init=create, access=COUNT, **kwargs)


def counts(callback, *, steps_per_call="auto"):
    """Return the counts of two epochs of two steps: before training, after each step, at the end of the fit."""
    looks = Looks()
    learner = testlearner(callback, looks, batches=2, validation_batches=0, steps_per_call=steps_per_call)
    learner.fit(2)
    begins = [number for what, number in looks.seen if what == "begin"]
    steps = [number for what, number in looks.seen if what == "step"]
    return begins[0], steps[:2], begins[1], steps[2:], int(learner.cbstate["count"])


@pytest.mark.parametrize("steps_per_call", [1, 2, "auto"])
@pytest.mark.parametrize("event", [True, StepEnd])
def test_the_number_of_calls_matches_tensorpack(event, steps_per_call):
    """Before training | steps of epoch 1 | after its Trigger | steps of epoch 2 | after its Trigger."""

    def of(*flags):
        return counts(counting(*flags), steps_per_call=steps_per_call)

    assert of() == (1, [1, 1], 2, [2, 2], 3)
    assert of(False) == (0, [0, 0], 1, [1, 1], 2)
    assert of(True, True, event) == (1, [2, 3], 4, [5, 6], 7)
    assert of(False, False, event) == (0, [1, 2], 2, [3, 4], 4)


def test_run_before_runs_once_per_training():
    first = counting(True, False, True)  # 1 before training, and 1 in each step
    learner = testlearner(first, batches=4)
    learner.fit(1)
    learner.fit(1)
    assert int(learner.cbstate["count"]) == 9
    # RunOp runs again before training after each resume, whatever was restored.
    second = counting(True, False, True)
    resumed = testlearner(second, batches=4)
    resumed.state = learner.state
    assert second.state_dict() == {"ran_before": False}
    second.load_state_dict(first.state_dict())
    resumed.fit(1)
    assert int(resumed.cbstate["count"]) == 13


def test_a_traced_function_only_runs_in_python_during_tracing():
    calls = []

    def noted(learner):
        calls.append(type(learner.progress.step).__name__)
        count(learner)

    learner = testlearner(RunFunction(noted, False, False, True, init=create, access=COUNT), batches=8)
    learner.fit(2)
    assert int(learner.cbstate["count"]) == 16
    assert len(calls) == 1
    assert calls[0] != "int"


def test_a_host_function_of_each_step_sees_numbers():
    steps = []
    fn = RunFunction(lambda learner: steps.append(learner.progress.step), False, False, StepBegin)
    testlearner(fn, batches=3, validation_batches=2).fit(1)
    assert steps == [0, 1, 2]


# --- the target network of a DQN --------------------------------------------------------------------------------------


def update_target(learner):
    learner.cbstate.target = learner.params


TARGET = {"params": Read(), "cbstate": {"target": Write()}}


def weights(batches=4, epochs=3):
    """Return the parameter `w` after each step, from none."""
    seen = [0.0]

    class Weights(Callback):
        def stateaccess(self):
            return {"params": Read()}

        @on
        def note(self, event: StepEnd, phase: TrainingPhase, learner):
            seen.append(float(learner.params["w"]))

    testlearner(Weights(), batches=batches).fit(epochs)
    return seen


@pytest.mark.parametrize("steps_per_call", [1, 5, "auto"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: PeriodicTrigger(RunFunction(update_target, init=update_target, access=TARGET), every_k_steps=5),
        lambda: every(
            RunFunction(update_target, False, False, True, init=update_target, access=TARGET), steps=5, traced=True
        ),
    ],
    ids=["host", "traced"],
)
def test_the_target_has_the_parameters_of_the_last_period(make, steps_per_call):
    learner = testlearner(make(), batches=4, steps_per_call=steps_per_call)
    seen = weights()
    assert float(learner.cbstate["target"]["w"]) == 0.0
    learner.fit(1)
    assert float(learner.cbstate["target"]["w"]) == 0.0  # 4 steps
    learner.fit(1)
    assert float(learner.cbstate["target"]["w"]) == pytest.approx(seen[5])
    learner.fit(1)
    assert float(learner.cbstate["target"]["w"]) == pytest.approx(seen[10])
    assert float(learner.params["w"]) == pytest.approx(seen[12])


def test_host_and_traced_updates_agree_to_the_last_bit():
    host = testlearner(PeriodicTrigger(RunFunction(update_target, init=update_target, access=TARGET), 5), batches=4)
    fn = RunFunction(update_target, False, False, True, init=update_target, access=TARGET)
    traced = testlearner(every(fn, steps=5, traced=True), batches=4)
    for learner in (host, traced):
        learner.fit(3)
    assert all(
        np.array_equal(host.cbstate["target"][name], traced.cbstate["target"][name], equal_nan=False)
        for name in ("w", "b")
    )


def test_state_that_no_callback_creates_is_an_error_when_the_learner_is_built(refused):
    callback = RunFunction(update_target, access=TARGET)
    with pytest.raises(MissingStateError) as caught:
        testlearner(callback)
    assert str(caught.value).startswith(
        "RunFunction(update_target) declares `cbstate.target`, which no callback's `init` creates.\n"
    )


def test_init_creates_once():
    calls = []

    def made(learner):
        calls.append(1)
        create(learner)

    callback = RunFunction(count, init=made, access=COUNT)
    learner = testlearner(callback)
    learner.fit(1)
    learner.callbacks.set([callback])
    assert calls == [1]
    assert int(learner.cbstate["count"]) == 2


# --- what cannot be meant ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: RunFunction(count, False, False),
            "`RunFunction(count, ...)` would never run.\n"
            "  fix:   write `run_before=True`, `run_as_trigger=True` or `run_step=True`",
        ),
        (
            lambda: RunFunction(3),
            "`fn` of `RunFunction` must be a function of the learner, not 3.\n"
            "  fix:   write e.g. `lambda learner: ...`",
        ),
        (
            lambda: RunFunction(count, init=lambda: None),
            "`init` of `RunFunction` must be a function of the learner; `<lambda>` takes ().\n"
            "  fix:   write `lambda learner: ...`",
        ),
        (
            lambda: RunFunction(count, "yes"),
            "`run_before` of `RunFunction` must be True or False, not 'yes'.\n  fix:   pass True or False",
        ),
        (
            lambda: RunFunction(count, True, 1),
            "`run_as_trigger` of `RunFunction` must be True or False, not 1.\n  fix:   pass True or False",
        ),
        *[
            (
                lambda given=given: RunFunction(count, run_step=given),
                f"`run_step` of `RunFunction` must be True, False or an event of a step, not {given!r}.\n"
                "  fix:   write `run_step=True` for UpdateEnd, or an event such as `run_step=StepEnd`",
            )
            for given in (EpochEnd, TracedEvent, Event, StepEnd(), 1)
        ],
    ],
)
def test_invalid_arguments_are_rejected(build, text, refused):
    with refused(DeclarationError, text):
        build()


def test_the_name_is_that_of_the_function():
    assert repr(RunFunction(count)) == "RunFunction(count)"
    assert repr(RunFunction(lambda learner: None, name="sync")) == "RunFunction(sync)"
