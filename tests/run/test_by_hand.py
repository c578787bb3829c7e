"""callbacks_as_hook: callbacks in a hand-written loop get the same values as in a Learner, or raise an error."""

import re

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
from fluxcb.events import ComputeEnd, EpochBegin, EpochEnd, FitBegin, FitEnd, HostEvent, StepBegin, StepEnd
from fluxcb.phases import Phase, TrainingPhase, ValidationPhase
from fluxcb.testing import EventLog


class Log(EventLog):
    """Record every event of a hand-written loop."""

    @on(HostEvent)
    def record(self, event, phase, learner):
        if not isinstance(event, StepBegin):
            super().record(event, phase, learner)


def train(hook, losses, *, epochs, first=1):
    """Report these losses in each epoch."""
    per_epoch = len(losses) // epochs
    for number, loss in enumerate(losses, first):
        hook.after_step(number, {"loss": loss})
        if (number - first + 1) % per_epoch == 0:
            hook.after_epoch()


def test_events_match_fit_and_counters_match_loop():
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


def test_loop_may_report_every_third_step_and_continue():
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


def test_metrics_of_loop():
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


def test_samples_are_counted_without_program():
    hook = callbacks_as_hook([Recorder()], {"losses": jax.ShapeDtypeStruct((4,), jnp.float32)})
    with hook:
        for step in (1, 2):
            hook.after_step(step, {"losses": jnp.zeros(4)})
    history = hook.cbstate["history"]["training"]
    assert (history.steps, history.samples) == (2, 8)
    assert hook._learner.compile_counts == {"traces": 1, "compiles": 0}


def test_arrays_and_values_with_any_name():
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


def test_cancel_leaves_with_block_and_ends_training():
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


def test_cancel_is_raised_without_with_block():
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


def test_cancel_at_fit_begin_ends_training():
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


def test_all_callbacks_get_fit_end_after_any_error():
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

    text = r"^The traced handler Largest\(\).look changed the variable `calls`"
    with pytest.warns(UserWarning, match=text), callbacks_as_hook([Largest()], {"loss": 0.0}) as hook:
        train(hook, [jnp.float32(3), np.float64(5), 1, np.float16(2)], epochs=1)
    assert float(hook.cbstate["largest"]) == 5.0
    assert calls == [1]


class AtEpochEnd(Callback):
    @on(EpochEnd, TrainingPhase)
    def report(self, event, phase, learner):
        pass


def test_loop_without_after_epoch_is_a_warning():
    text = (
        "The loop has not called `hook.after_epoch()`, so these handlers of EpochEnd and Trigger have not run: "
        "AtEpochEnd().report. Call `hook.after_epoch()` at the end of each epoch."
    )
    hook = callbacks_as_hook([AtEpochEnd(), Log(), every(Recorder(), steps=2)], {"loss": 0.0})
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"), hook:
        hook.after_step(1, {"loss": 1.0})
    # The second training of the hook ends its first epoch and leaves its second one.
    with hook:
        train(hook, [3.0, 2.0], epochs=1, first=2)
        hook.after_step(4, {"loss": 1.0})
    with callbacks_as_hook([Log(), every(Recorder(), steps=2)], {"loss": 0.0}) as hook:
        hook.after_step(1, {"loss": 1.0})
    with pytest.raises(ZeroDivisionError), callbacks_as_hook([AtEpochEnd()], {"loss": 0.0}) as hook:
        hook.after_step(1, {"loss": 1 / 0})


class OfValidation(Callback):
    @on(EpochEnd, ValidationPhase)
    def report(self, event, phase, learner):
        pass


class OfBoth(OfValidation):
    @on(EpochBegin, Phase)
    def begin(self, event, phase, learner):
        pass


def test_callback_for_other_phases_is_a_warning():
    with pytest.warns(UserWarning, match="hand-written") as caught:
        callbacks_as_hook([OfValidation(), OfBoth()], {"loss": 0.0})
    assert [str(warning.message) for warning in caught] == [
        "OfValidation() does nothing in a hand-written loop, because it has handlers only for ValidationPhase. All "
        "steps and epochs of the loop belong to one training phase. Write `Phase` instead in the handlers that should "
        "run."
    ]
    assert caught[0].filename == __file__


def test_period_that_falls_into_a_gap_is_a_warning():
    recorder = Recorder()
    text = (
        "Recorder() at EverySteps(steps=10) is due at step 10, but the loop has reported step 14 after step 7, so it "
        "does not run. Report each step, or each multiple of 10."
    )
    with callbacks_as_hook([every(recorder, steps=10)], {"loss": 0.0}) as hook:
        hook.after_step(7, {"loss": 1.0})
        with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
            hook.after_step(14, {"loss": 1.0})
        hook.after_step(20, {"loss": 2.0})
        hook.after_step(26, {"loss": 1.0})  # a step without a gap that is due, and a second gap: no further warning
        hook.after_step(33, {"loss": 1.0})
        hook.after_epoch()


def test_hook_to_callback_in_hook():
    seen = []
    hook = callbacks_as_hook(
        [HookToCallback(lambda step, values: seen.append((step, values)), ["loss"])], {"loss": 0.0}
    )
    with hook:
        train(hook, [3.0, 2.0], epochs=1)
    assert seen == [(1, {"loss": 3.0}), (2, {"loss": 2.0})]


# --- what cannot be supported -----------------------------------------------------------------------------------------


WITH_STATE = "  fix:   write `callbacks_as_hook(callbacks, values, state=get, set_state=put)`\n"
LOOP = (
    "  why:   `callbacks_as_hook` can read the values that the loop reports, and cannot change its training\n"
    "  fix:   train with a `Learner`, or implement this callback in the loop"
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
def test_callback_that_needs_state_raises(callback, what):
    with pytest.raises(DeclarationError) as caught:
        callbacks_as_hook([callback()], {"loss": 0.0})
    first, _, rest = str(caught.value).partition("\n")
    assert first.endswith(f"{what}, which belongs to the hand-written loop.")
    needs_state = not what.endswith("`step.loss`")
    expected = LOOP.replace("  fix:   ", WITH_STATE + "     or: ") if needs_state else LOOP
    assert rest.partition("\n")[2] == expected  # behind the line that says where


class Begins(Callback):
    @on
    def begin(self, event: StepBegin, phase: TrainingPhase, learner): ...  # begin


class Validates(Callback):
    @on
    def begin(self, event: StepBegin, phase: ValidationPhase, learner): ...

    @on
    def end(self, event: EpochEnd, phase: Phase, learner): ...


@pytest.mark.parametrize(
    ("callback", "what"),
    [
        (lambda: ClipGradients(1.0), "ClipGradients(1.0) has a handler of BackwardEnd"),
        (lambda: Begins(), "Begins() has a handler of StepBegin"),
    ],
)
def test_callback_inside_step_raises(callback, what):
    with pytest.raises(DeclarationError) as caught:
        callbacks_as_hook([callback()], {"loss": 0.0})
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{what}, which a hand-written loop does not emit."
    assert lines[2:] == [
        "  why:   the loop reports a step after it has finished; it emits StepEnd and, traced, ComputeEnd",
        "  fix:   train with a `Learner`, or implement this callback in the loop",
    ]


def test_handlers_of_other_phases_are_accepted():
    callbacks_as_hook([Validates()], {"loss": 0.0})


def test_undeclared_values_raise():
    with pytest.raises(UnknownStateError, match=r"^Metrics\(\) reads `step.loss`, which the loop does not report"):
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
            "`callbacks_as_hook` cannot take a value with the name `batch`.\n"
            "  why:   `step.batch` is the batch\n"
            "  fix:   use another name",
        ),
    ],
)
def test_invalid_example_values_raise(values, text, refused):
    with refused(DeclarationError, text):
        callbacks_as_hook([], values)


OTHERS = (
    "  why:   callbacks were checked, and traced handlers compiled, for the values that were announced\n"
    "  fix:   announce the reported values: `callbacks_as_hook(callbacks, {...})`"
)
STEPS = (
    "  why:   steps are numbered from 1, and the periods of callbacks refer to these numbers\n"
    "  fix:   count the steps of all epochs: `hook.after_step(hook.step + 1, values)`"
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
            "  fix:   announce such a value: `callbacks_as_hook(callbacks, "
            "{'loss': jax.ShapeDtypeStruct((3,), 'float32')})`",
        ),
        (
            6,
            {"loss": 1j},
            "`after_step` was given complex64[] as `loss`; float32[] was announced.\n"
            "  fix:   announce such a value: `callbacks_as_hook(callbacks, "
            "{'loss': jax.ShapeDtypeStruct((), 'complex64')})`",
        ),
        (
            6,
            {"loss": [0.0]},
            "`after_step` was given ['float32[]'] as `loss`; float32[] was announced.\n"
            "  fix:   announce such a value: `callbacks_as_hook(callbacks, {'loss': ...})`",
        ),
    ],
)
def test_invalid_reported_values_raise(step, values, text, refused):
    hook = callbacks_as_hook([], {"loss": 0.0})
    hook.before_training()
    hook.after_step(5, {"loss": 0.0})
    with refused(DeclarationError, text):
        hook.after_step(step, values)
    hook.after_step(6, {"loss": 0.0})


def test_float_for_declared_int_raises(refused):
    hook = callbacks_as_hook([], {"loss": 0})
    hook.before_training()
    with refused(
        DeclarationError,
        "`after_step` was given float32[] as `loss`; int32[] was announced.\n"
        "  fix:   announce such a value: `callbacks_as_hook(callbacks, {'loss': 0.0})`",
    ):
        hook.after_step(1, {"loss": 0.5})


def test_public_name():
    assert fluxcb.callbacks_as_hook is callbacks_as_hook


NOT_BEGUN = (
    "`hook.{}` was called before FitBegin or after FitEnd.\n"
    "  why:   callbacks open files and restore state at FitBegin, and write their last values at FitEnd\n"
    "  fix:   put the loop inside a block: `with hook:`\n"
    "     or: call `hook.before_training()` before the loop, and `hook.after_training()` after it, also after an error"
)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [("before_epoch", ()), ("before_step", ()), ("after_step", (1, {"loss": 0.0})), ("after_epoch", ())],
)
def test_reporting_before_training_raises(method, arguments, refused):
    log = Log()
    hook = callbacks_as_hook([log], {"loss": 0.0})
    with refused(DeclarationError, NOT_BEGUN.format(method)):
        getattr(hook, method)(*arguments)
    with hook:
        getattr(hook, method)(*arguments)
    hook.before_training(step=hook.step, epoch=hook.epoch)
    hook.after_step(2, {"loss": 0.0})
    hook.after_training()
    assert [entry[0] for entry in log.entries if entry[0].startswith("Fit")] == ["FitBegin", "FitEnd"] * 2
    with refused(DeclarationError, NOT_BEGUN.format(method)):
        getattr(hook, method)(*arguments)
