"""Setters of hyperparameters on the host, with the values of tensorpack's setters, but without their bugs."""

import inspect
import math
import os
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Callback, ConflictError, DeclarationError, MissingStateError, Read, Write, every, in_order, on
from fluxcb.callbacks import (
    HumanHyperParamSetter,
    HyperParameter,
    HyperParamSetter,
    HyperParamSetterWithFunc,
    LearningRate,
    Metrics,
    ObjAttrParam,
    ReduceLROnPlateau,
    ScheduledHyperParamSetter,
    Scheduler,
    StatMonitorParamSetter,
)
from fluxcb.events import EpochBegin, EpochEnd, FitBegin, ForwardBegin, StepBegin, StepEnd, Trigger
from fluxcb.phases import TrainingPhase, ValidationPhase
from fluxcb.testing import testlearner


class Rates(Callback):
    """Record the learning rate of each step."""

    def __init__(self):
        self.rates = []

    def stateaccess(self):
        return {"hyperparams": {"learning_rate": Read()}}

    @on
    def keep(self, event: StepEnd, phase: TrainingPhase, learner):
        self.rates.append(round(float(learner.hyperparams.learning_rate), 6))


def rates_of(*callbacks, epochs, batches=1, rate=9.0, fits=None):
    """Return the rate of each step, and the Learner."""
    rates = Rates()
    learner = testlearner(*callbacks, rates, batches=batches, learning_rate=rate, validation_batches=0)
    for more in fits or [epochs]:
        learner.fit(more)
    return rates.rates, learner


class Augmentation:
    strength = 1.0
    size = 32


# --- a table of epochs or steps -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "interp", "epochs", "expected"),
    [
        ([(1, 0.1), (3, 0.01)], None, 4, [9, 0.1, 0.1, 0.01]),
        ([(0, 0.5), (2, 0.05)], None, 3, [0.5, 0.5, 0.05]),
        ([(1, 1), (3, 3)], "linear", 5, [9, 1, 2, 3, 3]),
        ([(0, 4), (2, 2), (3, 0)], "linear", 5, [4, 3, 2, 0, 0]),
        ([(7, 0.1)], "linear", 2, [9, 9]),
    ],
)
def test_a_point_applies_from_the_next_epoch(schedule, interp, epochs, expected):
    setter = ScheduledHyperParamSetter(LearningRate, schedule, interp)
    assert rates_of(setter, epochs=epochs)[0] == expected
    one_by_one = ScheduledHyperParamSetter(LearningRate, schedule, interp)
    assert rates_of(one_by_one, epochs=0, fits=[1] * epochs)[0] == expected


@pytest.mark.parametrize(
    ("schedule", "interp", "expected"),
    [
        ([(0, 0), (4, 1)], "linear", [0, 0.25, 0.5, 0.75, 1, 1]),
        ([(2, 0.2), (5, 0.5)], None, [9, 9, 0.2, 0.2, 0.2, 0.5]),
        ([(2, 0.2), (4, 0.4)], "linear", [9, 9, 0.2, 0.3, 0.4, 0.4]),
    ],
)
def test_steps_are_counted_across_fits(schedule, interp, expected):
    def setter():
        return ScheduledHyperParamSetter(LearningRate, schedule, interp, step_based=True)

    assert rates_of(setter(), epochs=2, batches=3)[0] == expected
    assert rates_of(setter(), epochs=0, fits=[1, 1], batches=3)[0] == expected
    learner = testlearner(setter(), batches=30)
    assert "ScheduledHyperParamSetter" not in learner.explain_windows()


@pytest.mark.parametrize(
    ("schedule", "interp", "epoch", "expected"),
    [
        ([(1, 0.1), (3, 0.01)], None, 4, 0.01),
        ([(1, 0.1), (3, 0.01)], None, 3, 0.01),
        ([(1, 0.1), (3, 0.0)], None, 4, 0.0),  # tensorpack treats 0 as no value, and sets 0.1
        ([(1, 1), (5, 5)], "linear", 2, 2.0),
        ([(1, 1), (3, 3)], "linear", 4, 3.0),
        ([(9, 0.1)], None, 4, 1.0),
    ],
)
def test_a_new_instance_starts_with_the_value_of_the_current_epoch(schedule, interp, epoch, expected):
    before = testlearner(batches=1, learning_rate=1.0, validation_batches=0)
    before.fit(epoch)
    for step_based in (False, True):  # an epoch has one step
        rates = Rates()
        learner = testlearner(
            ScheduledHyperParamSetter(LearningRate, schedule, interp, step_based),
            rates,
            batches=1,
            validation_batches=0,
        )
        learner.state = before.state
        learner.fit(1)
        assert rates.rates == [expected], step_based


def test_nothing_is_set_after_the_last_point_even_after_a_resume():
    def setters():
        warmup = ScheduledHyperParamSetter(LearningRate, [(0, 0.5), (2, 1.0)], "linear")
        return in_order(
            warmup, HyperParamSetterWithFunc(LearningRate, lambda epoch, rate: rate / 2 if epoch > 2 else None)
        )

    expected = [0.5, 0.75, 1.0, 0.5, 0.25]
    rates, learner = rates_of(setters(), epochs=5)
    assert rates == expected
    first, halfway = rates_of(setters(), epochs=3)
    saved = halfway.state, [callback.state_dict() for callback in halfway.callbacks]
    group, rates = setters(), Rates()
    resumed = testlearner(group, rates, batches=1, validation_batches=0)
    resumed.state = saved[0]
    for callback, state in zip(resumed.callbacks, saved[1], strict=True):
        callback.load_state_dict(state)
    resumed.fit(2)
    assert first + rates.rates == expected
    np.testing.assert_array_equal(resumed.params["w"], learner.params["w"])
    assert resumed.hyperparams == learner.hyperparams


def test_a_learner_in_an_earlier_state_gets_the_value_of_its_epoch():
    setter, rates = ScheduledHyperParamSetter(LearningRate, [(0, 1.0), (2, 0.5)]), Rates()
    learner = testlearner(setter, rates, batches=1, validation_batches=0)
    start = learner.state
    learner.fit(3)
    learner.state = start
    learner.fit(3)
    assert rates.rates == [1.0, 1.0, 0.5] * 2


def test_a_missed_point_is_set_later():
    setter = every(ScheduledHyperParamSetter(LearningRate, [(1, 0.5), (3, 0.25)]), epochs=2)
    assert rates_of(setter, epochs=5)[0] == [9, 9, 0.5, 0.5, 0.25]


def test_an_attribute_follows_a_table_and_keeps_its_type():
    augmentation = Augmentation()
    sizes = []

    class Sizes(Callback):
        @on
        def keep(self, event: StepEnd, phase: TrainingPhase, learner):
            sizes.append(augmentation.size)

    table = ScheduledHyperParamSetter(ObjAttrParam(augmentation, "size"), [(1, 48), (2, 64)])
    learner = testlearner(table, Sizes(), batches=1, validation_batches=0)
    learner.fit(3)
    assert (sizes, type(augmentation.size)) == ([32, 48, 64], int)
    assert learner.cbstate["attributes"] == {"Augmentation_size": 64}
    restarted = Augmentation()
    again = ScheduledHyperParamSetter(ObjAttrParam(restarted, "size"), [(1, 48), (2, 64)])
    again.load_state_dict(table.state_dict())
    assert restarted.size == 64


# --- functions ------------------------------------------------------------------------------------------------------


def test_a_function_is_called_before_the_first_epoch_and_after_each():
    calls = []

    def every_second(epoch, current):
        calls.append((epoch, current))
        return current / 2 if epoch % 2 == 0 else None

    setter = HyperParamSetterWithFunc(LearningRate, every_second)
    rates, learner = rates_of(setter, epochs=0, fits=[2, 1, 1], rate=1.0)
    assert calls == [(0, 1.0), (1, 0.5), (2, 0.5), (3, 0.25), (4, 0.25)]
    assert rates == [0.5, 0.5, 0.25, 0.25]
    assert learner.hyperparams == {"learning_rate": 0.125}


def test_a_function_is_not_applied_again_at_a_resume():
    def setter():
        return HyperParamSetterWithFunc(LearningRate, lambda epoch, current: current / 2 if epoch else None)

    _, uninterrupted = rates_of(setter(), epochs=4, rate=1.0)
    _, half = rates_of(setter(), epochs=2, rate=1.0)
    for saved in (True, False):  # whether or not its own state is restored with the Learner's
        again = setter()
        if saved:
            again.load_state_dict(next(iter(half.callbacks)).state_dict())
        resumed = testlearner(again, batches=1, validation_batches=0)
        resumed.state = half.state
        resumed.fit(2)
        assert resumed.hyperparams == uninterrupted.hyperparams == {"learning_rate": 1 / 16}


def test_setting_does_not_recompile():
    learner = testlearner(HyperParamSetterWithFunc(LearningRate, lambda epoch, current: 1), batches=40)
    learner.fit(1)
    counts = learner.compile_counts
    learner.fit(5)
    assert learner.compile_counts == counts
    assert learner.state["opt_state"].hyperparams["learning_rate"].dtype == jnp.float32


@pytest.mark.parametrize("value", ["0.1", math.nan, math.inf, True, [1.0], complex(1)])
def test_an_invalid_value_is_an_error(value):
    learner = testlearner(HyperParamSetterWithFunc(LearningRate, lambda epoch, current: value))
    with pytest.raises(DeclarationError) as error:
        learner.fit(1)
    assert str(error.value) == (
        f"HyperParamSetterWithFunc(learning_rate) would set `hyperparams.learning_rate` to {value!r}, which is not a "
        "finite float32 number.\n"
        "  why:   the next step would fail or make every parameter NaN\n"
        "  fix:   return a finite number, or None to keep the current value"
    )


def test_a_custom_setter_needs_next_value():
    class Forgot(HyperParamSetter):
        pass

    with pytest.raises(DeclarationError) as error:
        testlearner(Forgot(LearningRate)).fit(1)
    assert str(error.value) == (
        "`Forgot` has no `next_value(self, learner)`, so it sets nothing.\n"
        "  fix:   define it, and return the new value, or None to keep the current one"
    )


# --- text files -----------------------------------------------------------------------------------------------------


def test_a_file_sets_the_rate_until_the_line_is_removed(tmp_path):
    file = tmp_path / "hyper.txt"
    setter, rates = HumanHyperParamSetter(LearningRate, file), Rates()
    learner = testlearner(setter, rates, batches=1, learning_rate=9.0, validation_batches=0)
    for text in (None, "learning_rate: 0.5", "# momentum: 0.9", "", "learning_rate:0.25\nlearning_rate :0.125", "#"):
        if text is not None:
            file.write_text(text)
        learner.fit(1)
    assert rates.rates == [9.0, 0.5, 0.5, 0.5, 0.125, 0.125]


def test_the_file_is_read_after_each_epoch(tmp_path):
    file = tmp_path / "hyper.txt"

    class Human(Callback):
        @on
        def edit(self, event: EpochEnd, phase: TrainingPhase, learner):
            file.write_text(f"learning_rate: {2.0**-learner.progress.epoch}")

    assert rates_of(HumanHyperParamSetter(LearningRate, file), Human(), epochs=3)[0] == [9.0, 0.5, 0.25]


def test_bad_lines_are_skipped_with_a_warning(tmp_path):
    file = tmp_path / "hyper.txt"
    lines = [
        "",
        "  # by hand",
        "a:b:c",
        "learning_rate: fast",
        "learning_rate: nan",
        "two words: 1",
        "-",
        "learning_rate:  0.5 ",
    ]
    file.write_text("\n".join(lines))
    learner = testlearner(HumanHyperParamSetter(LearningRate, file))
    with pytest.warns(UserWarning, match="is skipped") as caught:
        learner.fit(1)
    messages = [str(warning.message) for warning in caught]
    assert messages[: len(messages) // 2] == [
        f"{file}:{number} is skipped: {lines[number - 1]!r} is not `name: value` with a finite number"
        for number in (3, 4, 5, 6, 7)
    ]
    assert learner.hyperparams == {"learning_rate": 0.5}


def test_a_file_that_cannot_be_read_changes_nothing(tmp_path):
    file = tmp_path / "hyper.txt"
    setter = HumanHyperParamSetter(LearningRate, file)
    file.write_bytes(b"learning_rate: \xff")
    learner = testlearner(setter, learning_rate=0.5)
    with pytest.warns(
        UserWarning, match=r"^HumanHyperParamSetter\(learning_rate, .*\) cannot read .*hyper.txt: 'utf-8'"
    ):
        learner.fit(1)
    assert learner.hyperparams == {"learning_rate": 0.5}


@pytest.mark.parametrize(("writes", "expected"), [(1, 0.25), (9, 0.5)])
def test_a_file_that_changes_during_a_read_is_read_again_or_later(tmp_path, monkeypatch, writes, expected):
    file = tmp_path / "hyper.txt"
    file.write_text("learning_rate: 0.")  # the first half of a write
    read, left = os.read, [writes]

    def reading(handle, size):
        content = read(handle, size)
        if left[0]:
            left[0] -= 1
            file.write_text("learning_rate: 0.25" + " " * left[0])
        return content

    monkeypatch.setattr("fluxcb.callbacks.inspect.own_file.os.read", reading)
    setter = HumanHyperParamSetter(LearningRate, file)
    assert (setter.next_value(None) or 0.5) == expected


# --- a metric stops improving ---------------------------------------------------------------------------------------


class Fed(Callback):
    """Set the validation values of a list, one per epoch; None for no value."""

    def __init__(self, values):
        self.values = values

    def stateaccess(self):
        return {"cbstate": {"metrics_epoch": Write()}}

    def runafter(self):
        return (Metrics,)

    @on
    def feed(self, event: EpochEnd, phase: TrainingPhase, learner):
        epoch = learner.progress.epoch
        if self.values[epoch - 1] is not None:
            learner.cbstate.metrics_epoch.entry("validation").add("score", epoch, self.values[epoch - 1])


def changes(values, threshold=0.0, last_k=3, reverse=False, resume_at=None):
    """Return the epochs after which the rate was halved."""

    def build():
        setter = StatMonitorParamSetter(LearningRate, "score", lambda rate: rate / 2, threshold, last_k, reverse)
        learner = testlearner(Metrics(), Fed(values), setter, batches=1, validation_batches=0, learning_rate=1.0)
        return setter, learner

    found, (setter, learner) = [], build()
    for epoch in range(1, len(values) + 1):
        before = learner.hyperparams["learning_rate"]
        learner.fit(1)
        if learner.hyperparams["learning_rate"] != before:
            assert learner.hyperparams["learning_rate"] == before / 2
            found.append(epoch)
        if epoch == resume_at:
            state, own = learner.state, setter.state_dict()
            setter, learner = build()
            learner.state = state
            setter.load_state_dict(own)
    return found


@pytest.mark.parametrize(
    ("values", "arguments", "expected"),
    [
        ([5, 4, 3, 3, 3, 3, 3, 3], {}, [5, 8]),
        ([1] * 9, {}, [3, 6, 9]),
        ([3, 2, 1, 2, 3, 4, 5], {}, [5]),
        ([1, 2, 3, 0.5, 0.6, 0.7, 0.8], {}, [3, 6]),
        ([1, 0.95, 0.95, 0.95, 0.8, 0.75, 0.72], {"threshold": 0.1}, [3, 7]),
        ([0.1, 0.1, 0.1, 0.5, 0.4, 0.3, 0.3], {"reverse": True}, [3, 6]),
        ([3, 2, 1], {"last_k": 1}, [1, 2, 3]),
        ([1, None, 1, None, None, 1, 2], {}, [6]),
    ],
)
def test_the_rate_is_reduced_if_the_metric_stops_improving(values, arguments, expected):
    assert changes(values, **arguments) == expected
    for epoch in (2, 4):
        assert changes(values, **arguments, resume_at=epoch) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [([math.nan, 3, 2, 1, 0.5], []), ([1, math.nan, 0.5, 0.4, 0.3], []), ([1, math.inf, 1, math.nan, 1], [5])],
)
def test_values_that_are_not_finite_are_ignored(values, expected):
    with pytest.warns(
        UserWarning, match=r"^StatMonitorParamSetter\(learning_rate, 'validation/score'\) ignores the value"
    ):
        assert changes(values) == expected


def test_a_metric_can_be_named_as_in_logs():
    setter = StatMonitorParamSetter(LearningRate, "training/loss", lambda rate: rate / 2, 1e9, 2)
    assert repr(setter) == "StatMonitorParamSetter(learning_rate, 'training/loss')"
    learner = testlearner(Metrics(), setter, validation_batches=0)
    before = learner.hyperparams["learning_rate"]
    learner.fit(2)  # no loss improves by 1e9
    assert learner.hyperparams["learning_rate"] == pytest.approx(before / 2)


def test_a_metric_that_does_not_exist_is_an_error_at_construction():
    setter = StatMonitorParamSetter(LearningRate, "acuracy", abs, 0, 3, phase=ValidationPhase)
    with pytest.raises(MissingStateError) as error:
        testlearner(Metrics(), setter)
    assert str(error.value).splitlines()[0] == (
        "StatMonitorParamSetter(learning_rate, 'validation/acuracy') watches `validation/acuracy`, which no callback "
        "provides."
    )
    with pytest.raises(MissingStateError):
        testlearner(StatMonitorParamSetter(LearningRate, "loss", abs, 0, 3))


# --- two setters ----------------------------------------------------------------------------------------------------


def test_two_setters_of_one_hyperparameter_conflict_until_ordered(refused):
    def warmup():
        return ScheduledHyperParamSetter(LearningRate, [(0, 0.1), (2, 1.0)])

    def human():
        return HyperParamSetterWithFunc(LearningRate, lambda epoch, current: 0.7 if epoch in (0, 2) else None)

    with refused(
        ConflictError,
        "ScheduledHyperParamSetter(learning_rate) and HyperParamSetterWithFunc(learning_rate) both write "
        "`hyperparams.learning_rate` and no order is declared.\n"
        f"  where: TriggerSetter.stateaccess  {place()}\n"
        "  why:   both run at FitBegin x TrainingPhase, Trigger x TrainingPhase, and the result depends on which one "
        "is last\n"
        "  fix:   put them in the list as `in_order(ScheduledHyperParamSetter(...), HyperParamSetterWithFunc(...))`",
    ):
        testlearner(warmup(), human())
    assert rates_of(in_order(warmup(), human()), epochs=3)[0] == [0.7, 0.7, 0.7]
    assert rates_of(in_order(human(), warmup()), epochs=3)[0] == [0.1, 0.1, 1.0]


def place(function=ScheduledHyperParamSetter.stateaccess):
    function = inspect.unwrap(function)
    return f"{os.path.relpath(inspect.getfile(function))}:{function.__code__.co_firstlineno}"


def test_a_step_based_warmup_and_a_scheduler_are_ordered(build):
    def both():
        cosine = Scheduler({LearningRate: optax.cosine_decay_schedule(1.0, 6)})
        return cosine, ScheduledHyperParamSetter(LearningRate, [(0, 0.25), (2, 0.5)], "linear", step_based=True)

    with pytest.raises(ConflictError) as error:
        testlearner(*both())
    assert error.value.what == (
        "Scheduler(learning_rate) and ScheduledHyperParamSetter(learning_rate) both write `hyperparams.learning_rate` "
        "and no order is declared."
    )
    assert error.value.why == "both run at ForwardBegin x TrainingPhase, and the result depends on which one is last"
    cosine = [round((1 + math.cos(math.pi * step / 6)) / 2, 6) for step in range(6)]
    scheduler, warmup = both()
    rates, learner = rates_of(in_order(scheduler, warmup), epochs=2, batches=3)
    assert rates == pytest.approx([0.25, 0.375, 0.5, *cosine[3:]], abs=2e-6)
    assert learner.compile_counts == rates_of(epochs=2, batches=3)[1].compile_counts
    # resumed after one epoch
    scheduler, warmup = both()
    rates, half = rates_of(in_order(scheduler, warmup), epochs=1, batches=3)
    scheduler, again = both()
    again.load_state_dict(warmup.state_dict())
    resumed_rates = Rates()
    resumed = testlearner(in_order(scheduler, again), resumed_rates, batches=3, validation_batches=0)
    resumed.state = half.state
    resumed.fit(1)
    assert rates + resumed_rates.rates == pytest.approx([0.25, 0.375, 0.5, *cosine[3:]], abs=2e-6)


def test_a_step_based_warmup_and_an_epoch_setter_alternate():
    warmup = ScheduledHyperParamSetter(LearningRate, [(0, 0.25), (3, 1.0)], "linear", step_based=True)
    halve = StatMonitorParamSetter(LearningRate, "loss", lambda rate: rate / 2, 0, 1, phase=TrainingPhase)
    assert rates_of(warmup, halve, Metrics(), epochs=3, batches=2)[0] == [0.25, 0.5, 0.75, 1.0, 0.5, 0.5]


@pytest.mark.parametrize("order", [lambda a, b: [a, b], lambda a, b: [in_order(a, b)], lambda a, b: [in_order(b, a)]])
def test_a_setter_that_a_scheduler_would_override_is_refused(order):
    setter = HyperParamSetterWithFunc(LearningRate, lambda epoch, current: current / 2)
    with pytest.raises(ConflictError) as error:
        testlearner(*order(Scheduler({LearningRate: 0.1, "momentum": 0.9}), setter))
    assert str(error.value) == (
        "Scheduler(learning_rate, momentum) sets `hyperparams.learning_rate` at every step, so the value that "
        "HyperParamSetterWithFunc(learning_rate) sets at Trigger has no effect.\n"
        f"  where: Scheduler.stateaccess  {place(Scheduler.stateaccess)}\n"
        f"         TriggerSetter.set_at_trigger  {place(HyperParamSetterWithFunc.set_at_trigger)}\n"
        "  why:   each step sets the hyperparameter again before its update, so no order would help\n"
        "  fix:   leave one of the two out of the callbacks list\n"
        "     or: for a warm-up, write `ScheduledHyperParamSetter(LearningRate, [(0, 0.0), (500, 0.1)], "
        '"linear", step_based=True)`, which sets nothing after its last step'
    )


@pytest.mark.parametrize("event", [FitBegin, EpochBegin, StepBegin, StepEnd, EpochEnd, Trigger])
def test_a_scheduler_refuses_host_handlers_that_set_the_same_hyperparameter(event):
    class Mine(Callback):
        def stateaccess(self):
            return {"hyperparams": {"learning_rate": Write()}}

        @on(event, TrainingPhase)
        def halve(self, event, phase, learner):
            learner.hyperparams.learning_rate = learner.hyperparams.learning_rate / 2

    class After(Mine):
        def runafter(self):
            return (Scheduler,)

        def handlers(self):
            return [handler for handler in super().handlers() if handler.traced]

        @on(ForwardBegin, TrainingPhase)
        def halve_each(self, event, phase, learner):
            learner.hyperparams.learning_rate = learner.hyperparams.learning_rate / 2

    scheduler = Scheduler({LearningRate: 0.1})
    with pytest.raises(ConflictError) as error:
        fluxcb.check([scheduler, Mine()])
    assert error.value.what == (
        "Scheduler(learning_rate) sets `hyperparams.learning_rate` at every step, so the value that Mine() sets at "
        f"{event.__name__} has no effect."
    )
    assert error.value.fix == (
        "leave one of the two out of the callbacks list",
        "set it in a handler of ForwardBegin, which is traced, and let `Mine.runafter()` return `(Scheduler,)`",
    )
    assert rates_of(scheduler, After(), epochs=1, batches=2)[0] == pytest.approx([0.05, 0.05])
    fluxcb.check([Scheduler({"momentum": 0.1}), Mine()])


def test_a_scheduler_refuses_a_plateau_callback():
    with pytest.raises(ConflictError, match="has no effect"):
        fluxcb.check([Scheduler({LearningRate: 0.1}), ReduceLROnPlateau(), Metrics()])


class WarmUp(Callback):
    """Set the learning rate of the first two steps, within the step."""

    def stateaccess(self):
        return {"hyperparams": {"learning_rate": Write()}, "progress": Read()}

    @on(ForwardBegin, TrainingPhase)
    def warm(self, event, phase, learner):
        rate = learner.hyperparams.learning_rate
        learner.hyperparams.learning_rate = jnp.where(learner.progress.step < 2, 0.5, rate)


def warm_up_by_table():
    return ScheduledHyperParamSetter(LearningRate, [(0, 0.5), (1, 0.5)], "linear", step_based=True)


@pytest.mark.parametrize("first", ["scheduler", "warm-up"])
@pytest.mark.parametrize(("make", "call"), [(warm_up_by_table, "ScheduledHyperParamSetter(...)"), (WarmUp, "WarmUp()")])
def test_the_fix_of_a_warm_up_and_a_scheduler_is_the_order_that_works(make, call, first):
    scheduler, warm_up = Scheduler({LearningRate: 0.1}), make()
    with pytest.raises(ConflictError, match="no order is declared") as error:
        testlearner(*((scheduler, warm_up) if first == "scheduler" else (warm_up, scheduler)))
    assert error.value.fix[0] == f"put them in the list as `in_order(Scheduler(...), {call})`"
    assert len(error.value.fix) == 1 or error.value.fix[1] == "make `WarmUp.runafter()` return `(Scheduler,)`"
    rates, _ = rates_of(in_order(scheduler, warm_up), epochs=1, batches=4)
    assert rates == pytest.approx([0.5, 0.5, 0.1, 0.1])


@pytest.mark.parametrize("make", [warm_up_by_table, WarmUp])
def test_a_scheduler_after_a_warm_up_is_refused(make):
    scheduler, warm_up = Scheduler({LearningRate: 0.1}), make()
    with pytest.raises(ConflictError) as error:
        testlearner(in_order(warm_up, scheduler))
    assert error.value.what == (
        f"Scheduler(learning_rate) sets `hyperparams.learning_rate` at every step, so the value that {warm_up!r} sets "
        "before it at ForwardBegin x TrainingPhase has no effect."
    )
    assert error.value.fix == (
        f"state the other order: put them in the list as `in_order(Scheduler(...), {type(warm_up).__name__}"
        f"({'...' if make is warm_up_by_table else ''}))`",
    )
    # A schedule of another hyperparameter, or one that is only sometimes set, has no such effect.
    fluxcb.check([in_order(make(), Scheduler({"momentum": 0.1}))])
    fluxcb.check([in_order(make(), every(Scheduler({LearningRate: 0.1}), steps=2, traced=True))])


# --- arguments ------------------------------------------------------------------------------------------------------


class Frozen:
    @property
    def rate(self):
        return 1.0


TABLE = "The schedule of `ScheduledHyperParamSetter` must be a list of pairs (epochs, value), not {}.\n"
POINT = (
    "A point of the schedule of `ScheduledHyperParamSetter` must be a number of finished {}, 0 or more, and a finite "
    "value, not {}.\n"
)
EXAMPLE = "  fix:   write e.g. `[(0, 0.1), (30, 0.01)]`"


def table(schedule: Any, *args: Any, **kwargs: Any):
    return lambda: ScheduledHyperParamSetter(LearningRate, schedule, *args, **kwargs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (table([]), TABLE.format("[]") + EXAMPLE),
        (table({0: 0.1}), TABLE.format("{0: 0.1}") + EXAMPLE),
        (table(3), TABLE.format("3") + EXAMPLE),
        (table([(-1, 0.1)]), POINT.format("epochs", (-1, 0.1)) + EXAMPLE),
        (table([(1.5, 0.1)]), POINT.format("epochs", (1.5, 0.1)) + EXAMPLE),
        (
            table([(0, math.nan)], step_based=True),
            POINT.format("steps", "(0, nan)") + EXAMPLE,
        ),
        (table([(0, "1")]), POINT.format("epochs", (0, "1")) + EXAMPLE),
        (
            table([(2, 0.1), (1, 0.2)]),
            "The epochs of the schedule of `ScheduledHyperParamSetter` must increase, but 1 comes after 2.\n"
            "  fix:   sort the points, and use each number once",
        ),
        (
            table([(2, 0.1), (2, 0.2)], step_based=True),
            "The steps of the schedule of `ScheduledHyperParamSetter` must increase, but 2 comes after 2.\n"
            "  fix:   sort the points, and use each number once",
        ),
        (
            table([(0, 0.1)], "cosine"),
            "`interp` of `ScheduledHyperParamSetter` must be \"linear\" or None, not 'cosine'.\n"
            '  fix:   write `"linear"`',
        ),
        (
            lambda: ScheduledHyperParamSetter(ObjAttrParam(Augmentation(), "size"), [(0, 1)], step_based=True),
            "ObjAttrParam(Augmentation_size) cannot be set after steps.\n"
            "  why:   steps run inside a compiled program, which cannot change Python objects\n"
            "  fix:   leave out `step_based=True` to set it after epochs\n"
            "     or: write `every(HyperParamSetterWithFunc(param, func), steps=100)`, which shortens windows",
        ),
        (
            lambda: ObjAttrParam(Augmentation(), "strenght"),
            "`ObjAttrParam` was given a `Augmentation`, which has no attribute `strenght`. Did you mean `strength`?\n"
            "  why:   a misspelled attribute would be created and never read\n"
            "  fix:   set the attribute first, or correct its name",
        ),
        (
            lambda: ObjAttrParam(Augmentation(), 3),  # pyright: ignore[reportArgumentType]
            "`attribute` of `ObjAttrParam` must be the name of an attribute, not 3.\n"
            '  fix:   write e.g. `ObjAttrParam(augmentation, "strength")`',
        ),
        (
            lambda: ObjAttrParam(Frozen(), "rate"),
            "The attribute `rate` of the `Frozen` given to `ObjAttrParam` cannot be set (AttributeError: property "
            "'rate' of 'Frozen' object has no setter).\n"
            "  fix:   name an attribute that can be assigned",
        ),
        (
            lambda: ObjAttrParam(Augmentation(), "size", "a size"),
            "`name` of `ObjAttrParam` must be an identifier, not 'a size'.\n  fix:   write e.g. `name=\"flip_rate\"`",
        ),
        (
            lambda: HyperParamSetterWithFunc(LearningRate, lambda epoch: 0.1),  # pyright: ignore[reportArgumentType]
            "`func` of `HyperParamSetterWithFunc` must be a function of the epoch and the current value; `<lambda>` "
            "takes (epoch).\n"
            "  fix:   write `lambda epoch, current_value: ...`",
        ),
        (
            lambda: HyperParamSetterWithFunc(LearningRate, 0.1),  # pyright: ignore[reportArgumentType]
            "`func` of `HyperParamSetterWithFunc` must be a function of the epoch and the current value, not 0.1.\n"
            "  fix:   write e.g. `lambda epoch, current: 0.9 * current`",
        ),
        (
            lambda: HyperParamSetterWithFunc(HyperParameter, lambda epoch, current: None),
            "The class `HyperParameter` does not name a hyperparameter.\n"
            '  fix:   use LearningRate, a subclass of HyperParameter with a `name`, or a name such as "weight_decay"',
        ),
        (
            lambda: HumanHyperParamSetter(LearningRate, 3),  # pyright: ignore[reportArgumentType]
            '`file` of `HumanHyperParamSetter` must be a path, not 3.\n  fix:   write e.g. `file="hyper.txt"`',
        ),
        (
            lambda: HumanHyperParamSetter(LearningRate, "."),
            "`file` of `HumanHyperParamSetter` is a folder: ..\n  fix:   name a file in it",
        ),
        (
            lambda: StatMonitorParamSetter(LearningRate, "loss", 0.1, 0, 3),  # pyright: ignore[reportArgumentType]
            "`value_func` of `StatMonitorParamSetter` must be a function of the value, not 0.1.\n"
            "  fix:   write e.g. `lambda rate: rate / 10`",
        ),
        (
            lambda: StatMonitorParamSetter(LearningRate, "loss", abs, -1, 3),
            "`threshold` of `StatMonitorParamSetter` must be a number of at least 0, not -1.\n"
            "  fix:   give a finite number of at least 0",
        ),
        (
            lambda: StatMonitorParamSetter(LearningRate, "loss", abs, 0, 0),
            "`last_k` of `StatMonitorParamSetter` must be a whole number of at least 1, not 0.\n"
            "  why:   periods and counts are whole numbers of steps or epochs\n"
            "  fix:   pass a positive int",
        ),
        (
            lambda: StatMonitorParamSetter(LearningRate, "", abs, 0, 3),
            "`StatMonitorParamSetter` takes the name of a metric, not ''.\n"
            '  fix:   write e.g. `"loss"`, `"training/loss"`, or `"accuracy"` with a `Metrics(accuracy)`',
        ),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(DeclarationError) as error:
        make()
    assert str(error.value) == message


def test_the_optimizer_must_have_the_hyperparameter():
    with pytest.raises(MissingStateError) as error:
        testlearner(ScheduledHyperParamSetter("momentum", [(0, 0.9)]))
    assert error.value.what == (
        "ScheduledHyperParamSetter(momentum) needs `hyperparams.momentum`, which this optimizer does not have. "
        "It has `learning_rate`."
    )


def test_schedule_of_epochs_is_a_warning():
    with pytest.warns(UserWarning, match="takes `epoch`") as caught:
        Scheduler({LearningRate: lambda epoch: 0.1 * 0.5**epoch})
    assert str(caught[0].message) == (
        "The schedule of `learning_rate` takes `epoch`, but `Scheduler` calls it with the number of finished steps. "
        "For a function of the epoch, write `HyperParamSetterWithFunc(LearningRate, lambda epoch, current: ...)`."
    )
    Scheduler({LearningRate: lambda step: 0.1 * 0.5**step})


def test_function_that_takes_the_epoch_second_is_a_warning():
    text = (
        "The function of `HyperParamSetterWithFunc` gets the number of the epoch as `rate`, and the current value as "
        "`epoch`. Swap the parameters: `epoch, rate`."
    )
    with pytest.warns(UserWarning, match="Swap the parameters") as record:
        HyperParamSetterWithFunc(LearningRate, lambda rate, epoch: rate * 0.5**epoch)
    assert [str(warning.message) for warning in record] == [text]
    learner = testlearner(
        HyperParamSetterWithFunc(LearningRate, lambda epoch, rate: rate * 0.5),
        optimizer=fluxcb.inject(optax.sgd, learning_rate=1.0),
    )
    learner.fit(2)
    assert learner.hyperparams["learning_rate"] == 0.5**3  # before the first epoch, and after both
