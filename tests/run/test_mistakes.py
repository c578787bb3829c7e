"""Mistakes that users of Keras, PyTorch and Optax make: each one is an error, and its fix works."""

import copy
import io
import json
import pickle
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
    CheckpointError,
    DataError,
    DeclarationError,
    Learner,
    Read,
    ResumeError,
    TraceError,
    on,
)
from fluxcb._declare.signatures import shown_path
from fluxcb.callbacks import (
    AbstractMetric,
    Checkpointer,
    ClassificationError,
    LearningRate,
    Metrics,
    Monitors,
    Scheduler,
)
from fluxcb.checkpoints import load_model, load_model_state, load_params
from fluxcb.data import ArrayLoader
from fluxcb.events import BackwardEnd, EpochEnd, StepEnd
from fluxcb.logging import JSONLinesBackend
from fluxcb.phases import TrainingPhase, ValidationPhase
from fluxcb.testing import testlearner

BATCH = (np.ones((8, 1), np.float32), np.ones((8, 1), np.float32))


def refuses(kind: type[fluxcb.FluxcbError], what: str, fix: tuple[str, ...], function: Any) -> Any:
    with pytest.raises(kind) as caught:
        function()
    assert (caught.value.what, tuple(caught.value.fix)) == (what, fix)
    return caught.value


# -- arguments of fit ---------------------------------------------------------------------------


def test_resume_takes_no_path(tmp_path):
    testlearner(Checkpointer(tmp_path / "one")).fit(1)
    learner = testlearner(Checkpointer(tmp_path / "two"))
    fix = ("write `resume=True`", "to continue from another checkpoint, call `learner.restore(path)` before `fit`")
    refuses(
        DeclarationError,
        "`resume` must be True or False, not 'one'.",
        fix,
        lambda: learner.fit(2, resume="one"),  # pyright: ignore[reportArgumentType]
    )
    assert learner.step == 0
    learner.restore(tmp_path / "one")
    learner.fit(1)
    assert learner.step == 8


def test_iterator_with_fewer_batches_than_steps_per_epoch_is_an_error():
    learner = testlearner(data=iter([BATCH] * 5))
    with pytest.raises(
        DataError, match=r"^`data.training` is a one-shot iterator \(list_iterator\), and it is used up"
    ):
        learner.fit(1, steps_per_epoch=6)
    assert learner.step == 5
    learner = testlearner(data=iter([BATCH] * 12))  # exactly as many as needed
    learner.fit(2, steps_per_epoch=6)
    assert (learner.step, learner.epoch) == (12, 2)


def test_test_data_beside_training_and_validation_is_an_error():
    loader = ArrayLoader(BATCH, batch_size=4)
    refuses(
        DataError,
        "`data` is a tuple of 3, which is neither batches nor `(training, validation)`.",
        (
            "write `data=(training, validation)`, and `learner.evaluate(test)` after `fit`",
            'measure on the other data in training: `InferenceRunner(test, ScalarStats("loss"), name="test")`',
        ),
        lambda: testlearner(data=(loader, loader, loader)),
    )
    assert list(testlearner(Metrics(), data=(loader, loader)).evaluate(loader)) == ["loss"]


# -- arguments in another order -----------------------------------------------------------------


def squared(outputs, ys):
    return jnp.mean((outputs - ys) ** 2)


PAIR = (lambda key, xs: {"w": jnp.zeros((1, 1))}, lambda params, xs: xs @ params["w"])


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (
            "(model, optimizer, loss_fn)",
            "`loss_fn` and `optimizer` of `Learner` are swapped: `loss_fn` is an optimizer and `optimizer` is the "
            "function `squared`.",
        ),
        (
            "(loss_fn, model, optimizer)",
            "`model` and `loss_fn` of `Learner` are swapped: `model` is the function `squared` and `loss_fn` is of "
            "type `tuple`.",
        ),
        (
            "(optimizer, model, loss_fn)",
            "`model`, `loss_fn` and `optimizer` of `Learner` are swapped: `model` is an optimizer, `loss_fn` is of "
            "type `tuple` and `optimizer` is the function `squared`.",
        ),
    ],
)
@pytest.mark.parametrize("loss_fn", [squared, jax.jit(squared)], ids=["plain", "jit"])
def test_swapped_arguments_of_a_learner_are_named(wrong, what, loss_fn):
    names = {"Learner": Learner, "model": PAIR, "loss_fn": loss_fn, "optimizer": {"w": optax.sgd(0.1)}}
    code = "Learner(model, loss_fn, optimizer)"
    error = refuses(DeclarationError, what, (f"write `{code}`",), lambda: eval(f"Learner{wrong}", names))  # noqa: S307 - of this file
    assert error.why == "it takes model, loss_fn, optimizer, in this order"
    eval(code, names)  # noqa: S307 - of the message's own text


def test_swapped_arguments_of_from_loss_are_named():
    def loss_fn(params, batch):
        return jnp.mean(params["w"] * batch)

    names = {"Learner": Learner, "params": {"w": jnp.ones(())}, "loss_fn": loss_fn, "optimizer": optax.sgd(0.1)}
    code = "Learner.from_loss(params, loss_fn, optimizer)"
    refuses(
        DeclarationError,
        "`loss_fn` and `optimizer` of `Learner.from_loss` are swapped: `loss_fn` is an optimizer and `optimizer` is "
        "the function `loss_fn`.",
        (f"write `{code}`",),
        lambda: eval("Learner.from_loss(params, optimizer, loss_fn)", names),  # noqa: S307 - of this file
    )
    eval(code, names)  # noqa: S307 - of the message's own text


def test_swapped_arguments_of_load_functions_are_named(tmp_path):
    learner = Learner(PAIR, squared, optax.sgd(0.1), data=[BATCH], callbacks=[Checkpointer(tmp_path)])
    learner.fit(1)
    like = learner.params
    for call, name, value, wrong in (
        (load_model, "model", PAIR, lambda: load_model(PAIR, tmp_path)),  # pyright: ignore[reportArgumentType]
        (load_params, "like", like, lambda: load_params(like, str(tmp_path))),
        (load_model_state, "like", {}, lambda: load_model_state({}, tmp_path)),  # pyright: ignore[reportArgumentType]
    ):
        code = f"{call.__name__}({str(tmp_path)!r}, {name})"
        what = f"`path` and `{name}` of `{call.__name__}` are swapped: `{name}` is the path {str(tmp_path)!r}."
        refuses(DeclarationError, what, (f"write `{code}`",), wrong)
        eval(code, {call.__name__: call, name: value})  # noqa: S307 - of the message's own text


# -- resuming another program -------------------------------------------------------------------


def falling(size: int, *callbacks: Callback) -> Learner:
    return Learner.from_loss(
        {"w": jnp.ones(size)},
        lambda params, batch: jnp.mean(params["w"] * batch),
        optax.sgd(0.1),
        data=[np.ones(1, np.float32)] * 2,
        callbacks=callbacks,
        default_callbacks=False,
    )


def test_allow_is_suggested_only_if_it_helps(tmp_path):
    path = str(tmp_path)
    falling(2, Checkpointer(path)).fit(1)
    build = "build the Learner as it was when the run began"
    params = f"load only the parameters: `fluxcb.checkpoints.load_params({path!r})`"
    what = f"{tmp_path / '2'} is a checkpoint of a different run."
    refuses(ResumeError, what, (build, params), lambda: falling(3).restore(path))  # other shapes
    learner = falling(2)
    call = f"learner.restore({path!r}, allow=('callbacks',))"
    fix = (build, f"if the differences are intended, call `{call}`", params)
    refuses(ResumeError, what, fix, lambda: learner.restore(path))
    eval(call)  # noqa: S307 - of the message's own text
    assert learner.step == 2


def test_two_savers_of_one_learner_are_not_called_another_run(tmp_path):
    learner = testlearner(Checkpointer(tmp_path), Checkpointer(tmp_path, steps=2))
    refuses(
        CheckpointError,
        f"Checkpointer({str(tmp_path)!r}) and Checkpointer({str(tmp_path)!r}) write checkpoints to the same directory.",
        ("use a separate directory for each of them", "remove one of them"),
        lambda: learner.fit(1),
    )
    testlearner(Checkpointer(tmp_path / "one"), Checkpointer(tmp_path / "two", steps=2)).fit(1)


# -- the list of callbacks ------------------------------------------------------------------------


def test_nested_list_of_callbacks_names_the_star():
    group = [Metrics()]
    refuses(
        DeclarationError,
        "The callbacks list contains [Metrics()], which is not a callback instance.",
        ("put its callbacks into the list itself: `callbacks=[*group, ...]`",),
        lambda: testlearner(group),
    )
    testlearner(*group)


def test_logging_backend_in_the_list_names_monitors(tmp_path):
    backend = JSONLinesBackend(tmp_path / "log.jsonl")
    refuses(
        DeclarationError,
        f"The callbacks list contains {backend!r}, which is not a callback instance.",
        ("write `Monitors(backend)`",),
        lambda: testlearner(backend),
    )
    testlearner(Monitors(backend), Metrics(), default_callbacks=True)


def test_scheduler_by_keyword_names_the_mapping():
    fix = "Scheduler({LearningRate: optax.cosine_decay_schedule(1e-3, 1000)})"
    for name in ("learning_rate", "lr", "schedule", "scheduler"):
        with pytest.raises(DeclarationError) as caught:
            Scheduler(**{name: optax.constant_schedule(0.1)})  # pyright: ignore[reportArgumentType]
        assert caught.value.fix == (f"write `{fix}`",)
    assert repr(eval(fix)) == "Scheduler(learning_rate)"  # noqa: S307 - of the message's own text
    assert LearningRate is not None


def test_classification_error_of_one_output_is_an_error():
    for shape in ((4, 1), (4,)):
        refuses(
            DeclarationError,
            f"`ClassificationError` was given `outputs` of shape {shape}.",
            (
                "return one number per sample from the step, 1 for a wrong prediction, and pass its name: "
                '`ClassificationError("aux.wrong")`',
            ),
            lambda shape=shape: ClassificationError().on_fetches({"outputs": np.ones(shape), "ys": np.ones(4)}, 4),
        )
    counted = ClassificationError("aux.wrong")
    counted.on_fetches({"aux.wrong": np.array([1, 0])}, 2)
    assert counted.after() == {"error": 0.5}


# -- functions of metrics -------------------------------------------------------------------------


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


# -- exceptions of the model with validation data -------------------------------------------------


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


# -- the optimizer --------------------------------------------------------------------------------

GOOD = "fluxcb.inject(optax.adam, learning_rate=1e-3)"
CHAIN = (
    "fluxcb.inject(lambda learning_rate: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate)), "
    "learning_rate=1e-3)"
)


@pytest.mark.parametrize(
    ("wrong", "what", "words", "code"),
    [
        (
            "fluxcb.inject(optax.adam, 1e-3)",
            "`inject` takes 1 argument by position, and was given 2.",
            "pass its arguments by name",
            GOOD,
        ),
        (
            "fluxcb.inject(optax.chain, learning_rate=1e-3)",
            "`chain` has no argument `learning_rate`.",
            "pass a function of the hyperparameters",
            CHAIN,
        ),
    ],
)
def test_wrong_inject_names_a_call_that_works(wrong, what, words, code):
    refuses(DeclarationError, what, (f"{words}: `{code}`",), lambda: eval(wrong))  # noqa: S307 - of the message's own text
    assert testlearner(optimizer=eval(code)).hyperparams.learning_rate == pytest.approx(1e-3)  # noqa: S307 - of the message's own text


# -- classes of callbacks -------------------------------------------------------------------------


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


def test_stop_training_in_a_handler_names_cancel_fitting():
    class Stops(Callback):
        @on
        def stop(self, event: EpochEnd, phase: TrainingPhase, learner):
            learner.stop_training = True

    refuses(
        AccessError,
        "Stops() writes `stop_training`, which is not part of the state.",
        ('to end the fit, write `raise CancelFitting("reason")`, and add `{"control": Append()}` to `stateaccess`',),
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


def test_warning_about_a_phase_without_the_event_names_the_phase_that_emits_it():
    class Wrong(Callback):
        @on
        def look(self, event: BackwardEnd, phase: ValidationPhase, learner): ...

    class Fixed(Callback):
        @on
        def look(self, event: BackwardEnd, phase: TrainingPhase, learner): ...

    with pytest.warns(UserWarning, match="does not call") as caught:
        testlearner(Wrong())
    assert [str(warning.message) for warning in caught] == [
        "fluxcb does not call Wrong().look, because ValidationPhase does not emit BackwardEnd. Annotate the parameter "
        "as `phase: TrainingPhase`, which emits it."
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        testlearner(Fixed())


# -- what fit returns, and the loss ---------------------------------------------------------------


def test_history_of_a_history_names_the_mapping():
    history = testlearner(Metrics()).fit(1)
    with pytest.raises(AttributeError) as caught:
        _ = history.history  # pyright: ignore[reportAttributeAccessIssue]
    assert str(caught.value) == (
        "A History has no attribute `history`, because it is the mapping itself.\n"
        '  fix:   write e.g. `history["training/loss"]`'
    )
    assert len(history["training/loss"]) == 1
    with pytest.raises(AttributeError, match="'History' object has no attribute 'qqq'"):
        _ = history.qqq  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("name", "hint", "fix", "code"),
    [
        ("loss", "", 'write `history["training/loss"]`', 'history["training/loss"]'),
        ("val_loss", "", 'write `history["validation/loss"]`', 'history["validation/loss"]'),
        ("losses", "", 'write `history["training/loss"]`', 'history["training/loss"]'),
        ("training", "", 'write `history["training/loss"]`', 'history["training/loss"]'),
        ("metrics", "", 'write e.g. `history["training/loss"]`', 'history["training/loss"]'),
        (
            "best",
            "",
            'write e.g. `min(history["validation/loss"])`, or `max(...)` for a metric such as the accuracy',
            'min(history["validation/loss"])',
        ),
        ("save", "", "write e.g. `json.dump(history.per_epoch, file)`", "json.dump(history.per_epoch, io.StringIO())"),
        ("epochs", "", "read `history.epoch`", "history.epoch"),
        ("global_step", "", "read `history.step`", "history.step"),
        ("per_epochs", " Did you mean `per_epoch`?", "write `history.per_epoch`", "history.per_epoch"),
    ],
)
def test_attribute_that_a_history_lacks_names_code_that_works(name, hint, fix, code):
    history = testlearner(Metrics()).fit(1)
    with pytest.raises(AttributeError) as caught:
        getattr(history, name)
    assert str(caught.value) == f"A History has no attribute `{name}`.{hint}\n  fix:   {fix}"
    eval(code, {"history": history, "json": json, "io": io})  # noqa: S307 - of this file
    copied = pickle.loads(pickle.dumps(copy.copy(history)))
    assert dict(copied) == dict(history)


def test_load_weights_names_an_assignment_that_works(tmp_path):
    learner = testlearner(Checkpointer(tmp_path))
    learner.fit(1)
    again = testlearner()
    again.params = load_params(tmp_path)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, again.params, learner.params))


@pytest.mark.parametrize("use", [lambda loss: f"{loss:.3f}", lambda loss: list(range(loss.astype(int)))])
def test_loss_that_formats_or_counts_a_traced_value_is_a_trace_error(use):
    def loss_fn(outputs, ys):
        loss = jnp.mean((outputs - ys) ** 2)
        use(loss)
        return loss

    with pytest.raises(TraceError) as caught:
        Learner(
            (lambda key, xs: {"w": jnp.ones((1, 1))}, lambda params, xs: xs @ params["w"]),
            loss_fn,
            optax.sgd(0.1),
            data=[BATCH],
            default_callbacks=False,
        )
    assert caught.value.what.startswith("`TrainingPhase.step` needs a value in Python: ")
    assert caught.value.fix == (
        "use only jax.numpy: write `jnp.where(condition, a, b)` instead of `if`, and do not call float() or numpy, or "
        "format values",
    )
