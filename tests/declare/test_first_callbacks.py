"""Mistakes in a first callback: each message names the mistake, and its fix works."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluxcb
from fluxcb import (
    Append,
    Callback,
    CancelFitting,
    DeclarationError,
    EverySteps,
    Predicate,
    Read,
    Write,
    on,
    throttle,
    when,
)
from fluxcb.callbacks import AUROC, Checkpointer, CustomCallback, Metric, Metrics
from fluxcb.events import BackwardEnd, StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner


def error_of(call):
    with pytest.raises(DeclarationError) as raised:
        call()
    return raised.value


# --- a forgotten `raise` ---------------------------------------------------------------------------------------------


def test_cancel_that_is_not_raised_is_an_error():
    def define():
        class Stops(Callback):
            @on
            def stop(self, event: StepEnd, phase: TrainingPhase, learner):
                if self is not None:
                    CancelFitting("done")

    error = error_of(define)
    assert error.what == "`stop` has a statement `CancelFitting('done')`, which does not end anything."
    assert error.fix == ("write `raise CancelFitting('done')`",)

    class Stops(Callback):
        @on
        def stop(self, event: StepEnd, phase: TrainingPhase, learner):
            if self is not None:
                raise CancelFitting("done")

        def stateaccess(self):
            return {"control": Append()}

    assert testlearner(Stops()).fit(1).stop_reason == "done"


def test_cancel_that_a_function_does_not_raise_is_an_error():
    def stop(learner):
        fluxcb.CancelEpoch  # noqa: B018 - the mistake

    error = error_of(lambda: CustomCallback(stop, StepEnd, TrainingPhase))
    assert error.what == "`stop` has a statement `fluxcb.CancelEpoch`, which does not end anything."
    assert error.fix == ("write `raise fluxcb.CancelEpoch`",)


def test_cancel_that_is_used_otherwise_is_no_error():
    class Stops(Callback):
        @on
        def stop(self, event: StepEnd, phase: TrainingPhase, learner):
            reason = CancelFitting("done")
            self.stops(CancelFitting)
            raise reason

        def stops(self, kind):
            assert issubclass(kind, CancelFitting)

        def stateaccess(self):
            return {"control": Append()}

    assert testlearner(Stops()).fit(1).stop_reason == "done"


# --- other decorators -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("explicit", [False, True])
def test_a_jitted_method_is_no_handler(explicit):
    def define():
        @jax.jit
        def zero(self, event: BackwardEnd, phase: TrainingPhase, learner):
            learner.step.grads = jax.tree.map(jnp.zeros_like, learner.step.grads)

        return (on(BackwardEnd, TrainingPhase) if explicit else on)(zero)

    error = error_of(define)
    assert error.what.startswith("`@on` marks methods, and `test_a_jitted_method_is_no_handler.")
    assert error.what.endswith("zero` has another decorator, which made a `PjitFunction` of it.")
    assert error.fix == (
        "remove the other decorator; handlers of traced events, such as BackwardEnd, are compiled with the step",
    )


def test_a_jitted_handler_is_an_error():
    def define():
        class Zero(Callback):
            @jax.jit
            @on
            def zero(self, event: StepEnd, phase: TrainingPhase, learner): ...

    assert "Zero.zero` has another decorator, which made a `PjitFunction` of it." in error_of(define).what


def test_without_the_other_decorator_the_handler_runs():
    class Zero(Callback):
        def stateaccess(self):
            return {"step": {"grads": Write()}}

        @on
        def zero(self, event: BackwardEnd, phase: TrainingPhase, learner):
            learner.step.grads = jax.tree.map(jnp.zeros_like, learner.step.grads)

    learner = testlearner(Zero())
    before = learner.params
    learner.fit(1)
    jax.tree.map(np.testing.assert_array_equal, before, learner.params)


# --- schedules --------------------------------------------------------------------------------------------------------


def scheduled(**options):
    class Steps(Callback):
        def __init__(self):
            self.steps = []

        @on(StepEnd, TrainingPhase, **options)
        def note(self, event, phase, learner):
            self.steps.append(learner.progress.step)

    callback = Steps()
    testlearner(callback, batches=10).fit(1)
    return callback.steps


def test_a_number_as_a_schedule_is_every_so_many_steps():
    assert error_of(lambda: scheduled(when=3)).fix == ("write `when=EverySteps(3)`",)
    assert scheduled(when=EverySteps(3)) == [3, 6, 9]


def test_a_function_as_a_schedule_is_a_predicate():
    third = lambda learner: learner.progress.step % 3 == 0  # noqa: E731
    assert error_of(lambda: scheduled(when=third)).fix == (
        "write `when=Predicate(function)` with this function, which gets the learner",
    )
    assert scheduled(when=Predicate(third)) == [3, 6, 9]


@pytest.mark.parametrize("name", ["every", "steps", "freq"])
def test_arguments_of_other_schedules_name_when(name):
    assert error_of(lambda: scheduled(**{name: 3})).fix == (
        "write it as a schedule, e.g. `when=EverySteps(10)` or `when=EveryEpochs(2)`",
    )


# --- cancelling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cancel", [CancelFitting("enough"), CancelFitting])
@pytest.mark.parametrize("declares", [True, False])
def test_a_returned_cancel_has_to_be_raised(cancel, declares):
    class Stops(Callback):
        def stateaccess(self):
            return {"control": Append()} if declares else {"step": {"loss": Read()}}

        @on
        def stop(self, event: StepEnd, phase: TrainingPhase, learner):
            return cancel

    error = error_of(lambda: testlearner(Stops()).fit(1))
    declare = "" if declares else ', and add `{"control": Append()}` to `stateaccess`'
    assert error.fix == (f"write `raise` instead of `return`{declare}", "write `return` without a value")


# --- saved state ------------------------------------------------------------------------------------------------------


class Counts(Callback):
    def __init__(self):
        self.count = 0

    @on
    def add(self, event: StepEnd, phase: TrainingPhase, learner):
        self.count += 1


class OnlySaves(Counts):
    def state_dict(self):
        return {"count": self.count}


class SavesAndLoads(OnlySaves):
    def load_state_dict(self, state):
        self.count = state["count"]


class ReturnsNothing(SavesAndLoads):
    def state_dict(self):
        {"count": self.count}  # noqa: B018


class SavesNothing(Counts):
    def state_dict(self):
        return {}


@pytest.mark.parametrize("cls", [Counts, SavesNothing])
def test_a_wrapper_saves_its_state_around_a_callback_without_state(cls, tmp_path):
    learner = testlearner(when(cls(), lambda learner: True), throttle(cls(), StepEnd, freq=2), Checkpointer(tmp_path))
    learner.fit(1)
    assert learner.step > 0


@pytest.mark.parametrize("wrapped", [lambda callback: callback, lambda callback: throttle(callback, StepEnd, freq=1)])
def test_state_dict_without_load_state_dict_is_an_error_at_the_first_save(wrapped, tmp_path):
    counts = OnlySaves()
    counts.count = 1
    learner = testlearner(wrapped(counts), Checkpointer(tmp_path))
    error = error_of(lambda: learner.fit(1))
    assert learner.step == 0  # a run saves its initial state, so it does not train in vain
    assert error.what == "`OnlySaves` has `state_dict`, but no `load_state_dict`."
    assert error.fix == ("define `load_state_dict(self, state)`, which restores what `state_dict(self)` returns",)


def test_state_dict_without_return_is_an_error_at_the_first_save(tmp_path):
    error = error_of(lambda: testlearner(ReturnsNothing(), Checkpointer(tmp_path)).fit(1))
    assert error.what == "`ReturnsNothing.state_dict` returned None."
    assert error.fix == ("return a dict, `{}` if there is nothing to save",)


def test_with_both_methods_a_run_resumes(tmp_path):
    testlearner(SavesAndLoads(), Checkpointer(tmp_path)).fit(1)
    learner = testlearner(SavesAndLoads(), Checkpointer(tmp_path))
    learner.fit(3, resume=True)
    assert learner.callbacks.get(SavesAndLoads).count == learner.step


# --- metrics with weights ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda weight: Metric(lambda outputs, ys: abs(outputs - ys)[:, 0], "error", weight=weight),
        lambda weight: AUROC(weight=weight),
    ],
)
def test_a_weight_without_return_is_an_error(make):
    def weight(batch):
        jnp.ones(len(batch[0]))

    metric = make(weight)
    error = error_of(lambda: testlearner(Metrics(metric)).fit(1))
    assert error.what == f"The weight of the metric `{metric.name}` returned None for one batch."
    assert error.fix == ('return a number or an array, e.g. `batch["mask"]`',)


def test_a_weight_of_one_per_example_is_the_mean():
    error = Metric(lambda outputs, ys: abs(outputs - ys)[:, 0], "error", weight=lambda batch: jnp.ones(len(batch[0])))
    mean = Metric(lambda outputs, ys: abs(outputs - ys).mean(), "mean")
    history = testlearner(Metrics(error, mean)).fit(2)
    np.testing.assert_allclose(history["training/error"], history["training/mean"], rtol=1e-6)
