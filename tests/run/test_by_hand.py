"""callbacks_as_hook: callbacks in a loop that is not fluxcb's see what they see in a Learner, or are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluxcb
from fluxcb import (
    Append,
    Callback,
    CancelEpoch,
    CancelFitting,
    DeclarationError,
    Read,
    UnknownStateError,
    Write,
    callbacks_as_hook,
    every,
    on,
)
from fluxcb.callbacks import (
    ClipGradients,
    CustomCallback,
    EarlyStopping,
    HookToCallback,
    LearningRate,
    Metric,
    Metrics,
    ParameterEMA,
    Recorder,
    Scheduler,
    SmoothLoss,
    StopOnNaNLoss,
)
from fluxcb.events import ComputeEnd, EpochEnd, FitBegin, FitEnd, HostEvent, StepBegin, StepEnd
from fluxcb.phases import TrainingPhase, ValidationPhase
from fluxcb.testing import EventLog


class Log(EventLog):
    """Records every event of a loop written by hand."""

    @on(HostEvent)
    def record(self, event, phase, learner):
        if not isinstance(event, StepBegin):
            super().record(event, phase, learner)


def train(hook, losses, *, epochs, first=1):
    """Hand over these losses, as many to each epoch."""
    per_epoch = len(losses) // epochs
    for number, loss in enumerate(losses, first):
        hook.after_step(number, {"loss": loss})
        if (number - first + 1) % per_epoch == 0:
            hook.after_epoch()


def test_the_events_are_those_of_a_fit_and_the_counters_the_loops():
    log = Log()
    with callbacks_as_hook([log], {"loss": 0.0}) as hook:
        train(hook, [3.0, 2.0, 1.0, 0.0], epochs=2)
    assert log.entries == [
        ("FitBegin", "training", 0, 0, 0),
        ("EpochBegin", "training", 0, 1, 0),
        ("StepEnd", "training", 1, 1, 1),
        ("StepEnd", "training", 2, 1, 2),
        ("EpochEnd", "training", 2, 1, 2),
        ("Trigger", "training", 2, 1, 2),
        ("EpochBegin", "training", 2, 2, 0),
        ("StepEnd", "training", 3, 2, 1),
        ("StepEnd", "training", 4, 2, 2),
        ("EpochEnd", "training", 4, 2, 2),
        ("Trigger", "training", 4, 2, 2),
        ("FitEnd", "training", 4, 2, 2),
    ]


def test_a_loop_may_tell_every_third_step_only_and_go_on_where_another_ended():
    log = Log()
    hook = callbacks_as_hook([log, every(log2 := Log(), steps=6)], {"loss": 0.0})
    hook.before_training(step=300, epoch=10)
    hook.before_epoch()
    for step in (303, 306, 309, 312):
        hook.after_step(step, {"loss": 1.0})
    hook.after_epoch()
    hook.after_training()
    assert [entry[2:] for entry in log.entries if entry[0] == "StepEnd"] == [
        (303, 11, 3),
        (306, 11, 6),
        (309, 11, 9),
        (312, 11, 12),
    ]
    assert log.entries[0] == ("FitBegin", "training", 300, 10, 0)
    assert [entry[2] for entry in log2.entries if entry[0] in ("StepEnd", "Trigger")] == [306, 306, 312, 312]


def test_metrics_of_a_loop():
    losses = [8.0, 4.0, 2.0, 1.0]
    hook = callbacks_as_hook([Metrics(SmoothLoss(0.5)), Recorder()], {"loss": 0.0})
    with hook:
        train(hook, losses, epochs=2)
    metrics = hook.cbstate["metrics_epoch"]["training"]
    assert metrics["loss"] == [(1, 6.0), (2, 1.5)]
    history = hook.cbstate["history"]["training"]
    assert (history.epochs, history.steps) == (2, 4)
    # m = 0.5 m + 0.5 loss from 0, over 1 - 0.5**2 (Kingma and Ba, 2015), anew in each epoch.
    assert [value for _, value in metrics["smooth_loss"]] == pytest.approx(
        [(0.5 * 4 + 2) / 0.75, (0.5 * 1 + 0.5) / 0.75]
    )


def test_arrays_and_values_of_any_name():
    def right(logits, labels):
        return jnp.mean(logits.argmax(-1) == labels)

    accuracy = Metric(right, name="accuracy", needs=("logits", "labels"))
    example = {"loss": 0.0, "logits": jax.ShapeDtypeStruct((4, 3), jnp.float32), "labels": np.zeros(4, np.int32)}
    hook = callbacks_as_hook([Metrics(accuracy)], example)
    logits = np.eye(4, 3, dtype=np.float32)  # the last row's largest is the first of equals
    with hook:
        hook.after_step(1, {"labels": np.array([0, 1, 2, 2]), "logits": logits, "loss": 1})
        hook.after_epoch()
    assert hook.cbstate["metrics_epoch"]["training"]["accuracy"] == [(1, 0.75)]


def test_a_cancel_leaves_the_block_and_training_has_ended():
    log, stop = Log(), EarlyStopping(1, metric="loss", phase="training")
    hook = callbacks_as_hook([Metrics(), stop, log], {"loss": 0.0})
    with hook:
        train(hook, [3.0, 2.0, 2.5, 1.0], epochs=4)
        raise AssertionError
    assert hook.stop_reason is not None
    assert "loss" in hook.stop_reason
    assert log.entries[-1][:4] == ("FitEnd", "training", 3, 3)


class Cancels(Callback):
    def __init__(self, event, kind, step):
        self.event, self.kind, self.step = event, kind, step

    def stateaccess(self):
        return {"control": Append()}

    @on
    def cancel(self, event: FitBegin | StepEnd | EpochEnd, phase: TrainingPhase, learner):
        if type(event) is self.event and learner.progress.step == self.step:
            raise self.kind("enough")


def test_a_loop_without_a_block_gets_the_cancels():
    hook = callbacks_as_hook([Cancels(StepEnd, CancelEpoch, 1)], {"loss": 0.0})
    hook.before_training()
    with pytest.raises(CancelEpoch, match="enough"):
        hook.after_step(1, {"loss": 0.0})
    hook.after_epoch()
    hook = callbacks_as_hook([Cancels(EpochEnd, CancelFitting, 1)], {"loss": 0.0})
    hook.before_training()
    hook.after_step(1, {"loss": 0.0})
    with pytest.raises(CancelFitting, match="enough"):
        hook.after_epoch()
    hook.after_training()


def test_a_cancel_before_training_ends_it_and_others_skip_the_moment():
    hook = callbacks_as_hook([Cancels(FitBegin, CancelEpoch, 0)], {"loss": 0.0})
    with hook:
        hook.after_step(1, {"loss": 0.0})
    log = Log()
    hook = callbacks_as_hook([Cancels(FitBegin, CancelFitting, 0), log], {"loss": 0.0})
    with pytest.raises(CancelFitting, match="enough"), hook:
        raise AssertionError
    assert log.entries[-1][0] == "FitEnd"


class FailsAtEnd(Callback):
    def __init__(self, text):
        self.text = text

    @on
    def end(self, event: FitEnd, phase: TrainingPhase, learner):
        raise ValueError(self.text)


def test_the_end_comes_to_all_whatever_happened():
    log = Log()
    with pytest.raises(ValueError, match="one"), callbacks_as_hook([FailsAtEnd("one"), log], {}):
        pass
    assert log.entries[-1][0] == "FitEnd"
    with pytest.raises(ExceptionGroup) as caught, callbacks_as_hook([FailsAtEnd("one"), FailsAtEnd("two")], {}):
        pass
    assert [str(error) for error in caught.value.exceptions] == ["one", "two"]
    with pytest.raises(OSError, match="loop"), callbacks_as_hook([log], {}):
        raise OSError("loop")
    assert [entry[0] for entry in log.entries].count("FitEnd") == 2


def test_traced_handlers_are_compiled_once():
    calls = []

    class Largest(Callback):
        def stateaccess(self):
            return {"step": {"loss": Read()}, "cbstate": {"largest": Write()}}

        def init(self, learner):
            if "largest" not in learner.cbstate:
                learner.cbstate.largest = jnp.float32(-jnp.inf)

        @on
        def look(self, event: ComputeEnd, phase: TrainingPhase, learner):
            calls.append(1)
            learner.cbstate.largest = jnp.maximum(learner.cbstate.largest, learner.step.loss)

    with callbacks_as_hook([Largest()], {"loss": 0.0}) as hook:
        train(hook, [jnp.float32(3), np.float64(5), 1, np.float16(2)], epochs=1)
    assert float(hook.cbstate["largest"]) == 5.0
    assert calls == [1]


def test_there_and_back_again():
    seen = []
    hook = callbacks_as_hook(
        [HookToCallback(lambda step, values: seen.append((step, values)), ["loss"])], {"loss": 0.0}
    )
    with hook:
        train(hook, [3.0, 2.0], epochs=1)
    assert seen == [(1, {"loss": 3.0}), (2, {"loss": 2.0})]


# --- what cannot be supported -----------------------------------------------------------------------------------------


LOOP = (
    "  why:   `callbacks_as_hook` sees the values that the loop hands over, and changes nothing of its training\n"
    "  fix:   train with a `Learner`, or do in the loop what this callback does"
)


@pytest.mark.parametrize(
    ("callback", "what"),
    [
        (lambda: ParameterEMA(0.9), "ParameterEMA(0.9) writes `params`"),
        (lambda: Scheduler({LearningRate: abs}), "Scheduler(learning_rate) writes `hyperparams.learning_rate`"),
        (lambda: StopOnNaNLoss(), "StopOnNaNLoss() writes `step.skip`"),
        (lambda: CustomCallback(print, StepEnd, access={"opt_state": Read()}), "reads `opt_state`"),
        (lambda: CustomCallback(print, StepEnd, access={"step": {"loss": Write()}}), "writes `step.loss`"),
        (lambda: CustomCallback(print, StepEnd, access={"*": Read()}), "reads `*`"),
    ],
)
def test_what_stays_with_the_loop_is_refused(callback, what):
    with pytest.raises(DeclarationError) as caught:
        callbacks_as_hook([callback()], {"loss": 0.0})
    first, _, rest = str(caught.value).partition("\n")
    assert first.endswith(f"{what}, which stays with the hand-written loop.")
    assert rest.partition("\n")[2] == LOOP  # behind the line that says where


class Begins(Callback):
    @on
    def begin(self, event: StepBegin, phase: TrainingPhase, learner): ...  # begin


class Validates(Callback):
    @on
    def begin(self, event: StepBegin, phase: ValidationPhase, learner): ...


@pytest.mark.parametrize(
    ("callback", "what"),
    [
        (lambda: ClipGradients(1.0), "ClipGradients(1.0) has a handler of BackwardEnd"),
        (lambda: Begins(), "Begins() has a handler of StepBegin"),
    ],
)
def test_what_acts_inside_the_loops_step_is_refused(callback, what):
    with pytest.raises(DeclarationError) as caught:
        callbacks_as_hook([callback()], {"loss": 0.0})
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{what}, which no hand-written loop emits."
    assert lines[2:] == [
        "  why:   the loop tells what it has done after its step; there are StepEnd and, traced, ComputeEnd",
        "  fix:   train with a `Learner`, or do in the loop what this callback does",
    ]


def test_handlers_of_other_phases_never_run_and_are_not_refused():
    callbacks_as_hook([Validates()], {"loss": 0.0})


def test_values_that_nobody_hands_over_are_unknown():
    with pytest.raises(
        UnknownStateError, match=r"^Metrics\(\) declares access to `step.loss`, which no phase provides"
    ):
        callbacks_as_hook([Metrics()], {"cost": 0.0})


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            ["loss"],
            "`values` of `callbacks_as_hook` must map names to examples of their values, not ['loss'].\n"
            '  fix:   write e.g. `callbacks_as_hook(callbacks, {"loss": 0.0})`',
        ),
        (
            {"train/loss": 0.0},
            "`values` of `callbacks_as_hook` must map names to examples of their values, not {'train/loss': 0.0}.\n"
            '  fix:   write e.g. `callbacks_as_hook(callbacks, {"loss": 0.0})`',
        ),
        (
            {"loss": "low"},
            "The value `loss` of `callbacks_as_hook` must be an array, a number or a pytree of them, not 'low'.\n"
            '  fix:   write e.g. `callbacks_as_hook(callbacks, {"loss": 0.0})`',
        ),
        (
            {"batch": 0.0},
            "`callbacks_as_hook` cannot hand over a value called `batch`.\n"
            "  why:   `step.batch` is the batch\n"
            "  fix:   give it another name",
        ),
    ],
)
def test_values_that_cannot_be_announced(values, text, refused):
    with refused(DeclarationError, text):
        callbacks_as_hook([], values)


OTHERS = (
    "  why:   callbacks were checked, and traced handlers compiled, for the values that were announced\n"
    "  fix:   announce what the loop hands over: `callbacks_as_hook(callbacks, {...})`"
)
STEPS = (
    "  why:   steps are numbered from 1, and periods of callbacks speak of these numbers\n"
    "  fix:   give the number of finished steps, e.g. `hook.after_step(index + 1, values)`"
)


@pytest.mark.parametrize(
    ("step", "values", "text"),
    [
        (5, {"loss": 0.0}, f"`after_step` was called with step 5 after step 5.\n{STEPS}"),
        (True, {"loss": 0.0}, f"`after_step` was called with step True after step 5.\n{STEPS}"),
        (6.0, {"loss": 0.0}, f"`after_step` was called with step 6.0 after step 5.\n{STEPS}"),
        (
            6,
            0.5,
            "`after_step` takes a mapping of values by name, not 0.5.\n"
            "  fix:   write e.g. `hook.after_step(step, {'loss': loss})`",
        ),
        (6, {}, f"`after_step` was given the values none, not `loss`.\n{OTHERS}"),
        (6, {"los": 0.0}, f"`after_step` was given the values `los`, not `loss`. Did you mean `loss`?\n{OTHERS}"),
        (
            6,
            {"loss": np.zeros(3)},
            "`after_step` was given float32[3] as `loss`; float32[] was announced.\n"
            "  fix:   announce what the loop hands over: `callbacks_as_hook(callbacks, {'loss': ...})`",
        ),
        (
            6,
            {"loss": 1j},
            "`after_step` was given complex64[] as `loss`; float32[] was announced.\n"
            "  fix:   announce what the loop hands over: `callbacks_as_hook(callbacks, {'loss': ...})`",
        ),
        (
            6,
            {"loss": [0.0]},
            "`after_step` was given ['float32[]'] as `loss`; float32[] was announced.\n"
            "  fix:   announce what the loop hands over: `callbacks_as_hook(callbacks, {'loss': ...})`",
        ),
    ],
)
def test_what_a_loop_cannot_hand_over(step, values, text, refused):
    hook = callbacks_as_hook([], {"loss": 0.0})
    hook.before_training()
    hook.after_step(5, {"loss": 0.0})
    with refused(DeclarationError, text):
        hook.after_step(step, values)
    hook.after_step(6, {"loss": 0.0})


def test_an_announced_int_is_no_float(refused):
    hook = callbacks_as_hook([], {"loss": 0})
    with refused(
        DeclarationError,
        "`after_step` was given float32[] as `loss`; int32[] was announced.\n"
        "  fix:   announce what the loop hands over: `callbacks_as_hook(callbacks, {'loss': ...})`",
    ):
        hook.after_step(1, {"loss": 0.5})


def test_the_public_name():
    assert fluxcb.callbacks_as_hook is callbacks_as_hook
