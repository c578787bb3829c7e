"""Mistakes in functions and classes of users: metrics, models and handlers. Each is an error, and its fix works."""

import traceback
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import (
    AccessError,
    Append,
    Callback,
    CancelFitting,
    DeclarationError,
    Learner,
    MissingStateError,
    Read,
    TraceError,
    Write,
    on,
)
from fluxcb._declare.signatures import shown_path
from fluxcb.callbacks import (
    AbstractMetric,
    CustomCallback,
    Metrics,
)
from fluxcb.events import BackwardEnd, EpochEnd, FitBegin, FitEnd, FitStopping, StepEnd, Trigger
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase, ValidationPhase
from fluxcb.testing import testlearner

BATCH = (np.ones((8, 1), np.float32), np.ones((8, 1), np.float32))


PAIR = (lambda key, xs: {"w": jnp.zeros((1, 1))}, lambda params, xs: xs @ params["w"])


def squared(outputs, ys):
    return jnp.mean((outputs - ys) ** 2)


def refuses(kind: type[fluxcb.FluxcbError], what: str, fix: tuple[str, ...], function: Any) -> Any:
    with pytest.raises(kind) as caught:
        function()
    assert (caught.value.what, tuple(caught.value.fix)) == (what, fix)
    return caught.value


# -- functions of metrics --------------------------------------------------------------------------


def far(outputs, ys):
    return float(jnp.mean(jnp.abs(outputs - ys) > 0.5))


def far_fixed(outputs, ys):
    return jnp.mean(jnp.abs(outputs - ys) > 0.5)


def times_seven(outputs, ys):
    return jnp.mean(outputs @ jnp.ones((7, 1)))


MEASURE = {
    "Metrics": lambda metric: testlearner(Metrics(metric)),
    "evaluate": lambda metric: testlearner().evaluate(metrics=[metric]),
}


@pytest.mark.parametrize("measure", MEASURE)
def test_metric_that_needs_a_value_is_named(measure):
    error = refuses(
        TraceError,
        "The metric `far` needs a value in Python: Abstract tracer value encountered where concrete value is expected: "
        "traced array with shape float32[]",
        (
            "use only jax.numpy: write `jnp.where(condition, a, b)` instead of `if`, and do not call float() or format "
            "values",
        ),
        lambda: MEASURE[measure](far),
    )
    assert error.where == (f"far  {shown_path(__file__)}:{far.__code__.co_firstlineno + 1}",)
    assert error.why == "metrics are computed by the compiled step, and values are not known yet while it is traced"
    assert not {frame.name for frame in traceback.extract_tb(error.__traceback__)} & {"__exit__", "inner"}
    MEASURE[measure](far_fixed)


@pytest.mark.parametrize("measure", MEASURE)
def test_metric_that_raises_is_named(measure):
    with pytest.raises(TypeError, match="contracting dim") as caught:
        MEASURE[measure](times_seven)
    assert caught.value.__notes__[0] == "while computing the metric `times_seven`"


def test_metric_that_raises_on_the_host_is_named():
    class Bad(AbstractMetric):
        name = "bad"

        def init(self):
            return jnp.float32(0)

        def update(self, state, step, samples):
            return state + step.loss

        def compute(self, state):
            if not isinstance(state, jax.core.Tracer):
                raise ZeroDivisionError
            return state

    with pytest.raises(ZeroDivisionError) as caught:
        testlearner(Metrics(Bad())).fit(1)
    assert caught.value.__notes__[0] == "while computing the metric `bad`"


def test_handler_that_calls_a_function_names_its_line():
    def positive(loss):
        return bool(loss > 0)

    class Asks(Callback):
        def stateaccess(self):
            return {"step": {"loss": Read()}}

        @on
        def ask(self, event: BackwardEnd, phase: TrainingPhase, learner):
            positive(learner.step.loss)

    with pytest.raises(TraceError) as caught:
        testlearner(Asks())
    assert caught.value.where[1:] == (f"positive  {shown_path(__file__)}:{positive.__code__.co_firstlineno + 1}",)


@pytest.mark.parametrize("metrics", ["accuracy", ["accuracy"]])
def test_names_of_metrics_are_not_metrics(metrics):
    data = (np.ones((8, 3), np.float32), np.zeros(8, int))
    learner = Learner(
        (lambda key, xs: {"w": jnp.ones((3, 2))}, lambda params, xs: xs @ params["w"]),
        lambda outputs, ys: optax.softmax_cross_entropy_with_integer_labels(outputs, ys).mean(),
        optax.sgd(0.1),
        example_batch=data,
        default_callbacks=False,
    )
    code = "learner.evaluate(data, metrics=[fluxcb.callbacks.accuracy])"
    what = "`metrics` of `learner.evaluate` must be metrics or functions of outputs and targets, not 'accuracy'."
    refuses(DeclarationError, what, (f"write e.g. `{code}`",), lambda: learner.evaluate(data, metrics=metrics))
    assert set(eval(code)) == {"loss", "accuracy"}  # noqa: S307 - of the message's own text
    fix = ("write `learner.evaluate(data)`, which always measures the loss",)
    refuses(DeclarationError, what.replace("accuracy", "loss"), fix, lambda: learner.evaluate(data, metrics="loss"))


# -- exceptions of the model with validation data --------------------------------------------------


def test_exception_of_the_model_with_validation_data_names_the_phase():
    def apply(params, xs):
        if xs.shape[0] == 3:
            raise ValueError("three")
        return xs @ params["w"]

    def build(training, validation):
        data = ([tuple(part[:training] for part in BATCH)], [tuple(part[:validation] for part in BATCH)])
        return Learner((PAIR[0], apply), squared, optax.sgd(0.1), data=data, default_callbacks=False)

    note = "while calling the model on float32[3, 1]"
    phase = "in the step of ValidationPhase, which does not train, for a batch (float32[3, 1], float32[3, 1])"
    for training, validation, notes in ((8, 3, [note, phase]), (3, 8, [note])):
        with pytest.raises(ValueError, match="three") as caught:
            build(training, validation).fit(1)
        assert [text for text in caught.value.__notes__ if text in (note, phase)] == notes
    learner = build(8, 8)
    with pytest.raises(ValueError, match="three") as caught:
        learner.evaluate(tuple(part[:3] for part in BATCH))
    assert [text for text in caught.value.__notes__ if text in (note, phase)] == [note, phase]


# -- classes of callbacks --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "method", "fixed"),
    [
        ("init", lambda self: None, "(self, learner)"),
        ("stateaccess", lambda: {"step": {}}, "(self)"),
        ("runafter", lambda self, other: (), "(self)"),
        ("load_state_dict", lambda self: None, "(self, state)"),
    ],
)
def test_declaration_with_wrong_parameters_is_an_error(name, method, fixed):
    refuses(
        DeclarationError,
        f"`Bad.{name}` must take {fixed}.",
        (f"write `def {name}{fixed}:`",),
        lambda: type("Bad", (Callback,), {name: method}),
    )
    type("Good", (Callback,), {name: eval(f"lambda {fixed[1:-1]}: None")})  # noqa: S307 - of the message's own text


def test_runafter_that_is_a_tuple_names_code_that_works():
    code = "def runafter(self): return (Metrics,)"
    with pytest.raises(DeclarationError) as caught:
        type("Bad", (Callback,), {"runafter": (Metrics,)})
    assert caught.value.fix == (f"write `{code}`",)
    scope: dict[str, Any] = {"Metrics": Metrics}
    exec(code, scope)
    assert type("Good", (Callback,), {"runafter": scope["runafter"]})().runafter() == (Metrics,)


def test_handler_with_parameters_in_another_order_names_the_order():
    def make() -> None:
        class Bad(Callback):
            @on
            def show(self, learner, event: StepEnd, phase: TrainingPhase): ...

    name = f"{test_handler_with_parameters_in_another_order_names_the_order.__name__}.<locals>.make.<locals>.Bad.show"
    refuses(
        DeclarationError,
        f"The handler `{name}` takes (self, learner, event, phase), but the third parameter must be the phase.",
        ("write `def show(self, event: StepEnd, phase: TrainingPhase, learner):`",),
        make,
    )


@pytest.mark.parametrize("name", ["stop_training", "should_stop", "stop_reason"])
def test_stopping_in_a_handler_names_cancel_fitting(name):
    class Stops(Callback):
        @on
        def stop(self, event: EpochEnd, phase: TrainingPhase, learner):
            setattr(learner, name, True)

    refuses(
        AccessError,
        f"Stops() writes `{name}`, which is not part of the state.",
        (
            'to end the fit, write `raise CancelFitting("reason")` in a host handler, and add '
            '`{"control": Append()}` to `stateaccess`',
        ),
        lambda: testlearner(Stops()).fit(2),
    )

    class Fixed(Callback):
        def stateaccess(self):
            return {"control": Append()}

        @on
        def stop(self, event: EpochEnd, phase: TrainingPhase, learner):
            raise CancelFitting("reason")

    learner = testlearner(Fixed())
    learner.fit(2)
    assert (learner.epoch, learner.stop_reason) == (1, "reason")


@pytest.mark.parametrize("name", ["stop", "stop_training", "should_stop"])
def test_calling_or_reading_a_stop_of_another_library_names_cancel_fitting(name):
    callback = CustomCallback(lambda learner: getattr(learner, name), EpochEnd, TrainingPhase, access={}, name="f")
    with pytest.raises(AccessError) as caught:
        testlearner(callback).fit(1)
    assert caught.value.what == f"{callback!r} uses `learner.{name}`, which handlers do not have."
    (fix,) = caught.value.fix
    assert fix.startswith('to end the fit, write `raise CancelFitting("reason")` in a host handler, and ')


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("history", "cbstate.metrics_epoch"),
        ("step_in_epoch", "progress.step_in_epoch"),
        ("global_epoch", "progress.epoch"),
    ],
)
def test_names_of_the_learner_are_found_elsewhere_in_a_handler(name, path):
    callback = CustomCallback(
        lambda learner: getattr(learner, name), EpochEnd, TrainingPhase, access={"cbstate": {"metrics_epoch": Read()}}
    )
    with pytest.raises(AccessError) as caught:
        testlearner(Metrics(), callback).fit(1)
    assert caught.value.fix[0].startswith(f"write `learner.{path}` instead of `learner.{name}`")
    values = []
    fixed = CustomCallback(
        lambda learner: values.append(eval(f"learner.{path}", {"learner": learner})),  # noqa: S307 - a row of this test
        EpochEnd,
        TrainingPhase,
        access={"cbstate": {"metrics_epoch": Read()}},
    )
    testlearner(Metrics(), fixed).fit(1)
    assert len(values) == 1


def test_reading_the_stop_reason_in_a_handler_names_the_event():
    class Looks(Callback):
        @on
        def look(self, event: FitEnd, phase: TrainingPhase, learner):
            assert learner.stop_reason

    refuses(
        AccessError,
        "Looks() reads `stop_reason`, which is not part of the state.",
        ("read `event.reason` in a handler of FitEnd",),
        lambda: testlearner(Looks()).fit(1),
    )


@pytest.mark.parametrize("emitted", [BackwardEnd, FitBegin, Trigger, FitStopping, FitEnd])
def test_warning_about_a_phase_without_the_event_names_the_phase_that_emits_it(emitted):
    class Wrong(Callback):
        @on(emitted, ValidationPhase)
        def look(self, event, phase, learner): ...

    class Fixed(Callback):
        @on(emitted, TrainingPhase)
        def look(self, event, phase, learner): ...

    with pytest.warns(UserWarning, match="does not call") as caught:
        testlearner(Wrong())
    assert [str(warning.message) for warning in caught] == [
        f"fluxcb does not call Wrong().look, because ValidationPhase does not emit {emitted.__name__}. Annotate the "
        "parameter as `phase: TrainingPhase`, which emits it."
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        testlearner(Fixed())


class OwnTraining(AbstractTrainingPhase):
    provides = TrainingPhase.provides
    step = TrainingPhase.step


class Second(TrainingPhase):
    name = "second"


class ForTheDefault(Callback):
    @on
    def look(self, event: EpochEnd, phase: TrainingPhase, learner): ...

    @on
    def clip(self, event: BackwardEnd, phase: TrainingPhase, learner): ...


class ForAny(Callback):
    @on
    def look(self, event: EpochEnd, phase: AbstractTrainingPhase, learner): ...


class ForEach(ForTheDefault):
    @on
    def look_at_own(self, event: EpochEnd, phase: OwnTraining, learner): ...

    @on
    def clip_own(self, event: BackwardEnd, phase: OwnTraining, learner): ...


def test_handlers_for_another_training_phase_than_that_of_the_learner_are_a_warning():
    phases = (OwnTraining(), ValidationPhase())
    function = CustomCallback(lambda learner: None, EpochEnd, TrainingPhase, name="function")
    with pytest.warns(UserWarning, match="does not call") as caught:
        testlearner(ForTheDefault(), function, phases=phases)
    because = (
        "because it is for TrainingPhase, and the training phase of this Learner is OwnTraining. Write "
        "`AbstractTrainingPhase` instead of `TrainingPhase`, which includes all training phases."
    )
    assert sorted(str(warning.message) for warning in caught) == [
        f"fluxcb does not call CustomCallback(function, EpochEnd, TrainingPhase).run, {because}",
        f"fluxcb does not call ForTheDefault().clip, {because}",
        f"fluxcb does not call ForTheDefault().look, {because}",
    ]
    testlearner(ForAny(), ForEach(), phases=phases)
    testlearner(ForEach())
    testlearner(ForTheDefault(), phases=(OwnTraining(), Second()))


def test_a_handler_that_reads_and_assigns_a_value_needs_one_declaration():
    class Doubles(Callback):
        @on
        def double(self, event: BackwardEnd, phase: TrainingPhase, learner):
            learner.step.grads = jax.tree.map(lambda g: 2 * g, learner.step.grads)

    class Fixed(Doubles):
        def stateaccess(self):
            return {"step": {"grads": Write()}}

    with pytest.raises(AccessError) as raised:
        testlearner(Doubles())
    assert raised.value.fix == ('add `{"step": {"grads": Write()}}` to `stateaccess`',)
    testlearner(Fixed())


def test_methods_of_dicts_that_state_lacks_are_replaced_by_assignments():
    class Sets(Callback):
        def stateaccess(self):
            return {"cbstate": {"x": Write()}}

        def init(self, learner):
            learner.cbstate.setdefault("x", 0)

    class Fixed(Sets):
        def init(self, learner):
            if "x" not in learner.cbstate:
                learner.cbstate.x = 0

    with pytest.raises(AccessError) as raised:
        testlearner(Sets())
    assert raised.value.fix == ('assign each entry, e.g. `if "x" not in learner.cbstate: learner.cbstate.x = 0`',)
    assert testlearner(Fixed()).cbstate["x"] == 0


def test_reading_an_entry_before_it_exists_suggests_a_check():
    class Reads(Callback):
        def stateaccess(self):
            return {"cbstate": {"x": Write()}}

        def init(self, learner):
            if not hasattr(learner.cbstate, "x"):
                learner.cbstate.x = 0

    with pytest.raises(MissingStateError) as raised:
        testlearner(Reads())
    assert raised.value.fix[1] == 'check first: `if "x" in learner.cbstate`'
