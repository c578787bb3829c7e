"""Mistakes in arguments, by users of Keras, PyTorch and Optax: each one is an error, and its fix works."""

import copy
import io
import json
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import (
    Callback,
    CheckpointError,
    DataError,
    DeclarationError,
    Learner,
    ResumeError,
    TraceError,
)
from fluxcb.callbacks import (
    Checkpointer,
    ClassificationError,
    LearningRate,
    Metrics,
    Monitors,
    Scheduler,
)
from fluxcb.checkpoints import load_model, load_model_state, load_params
from fluxcb.data import ArrayLoader
from fluxcb.logging import JSONLinesBackend
from fluxcb.phases import TrainingPhase, ValidationPhase
from fluxcb.testing import testlearner

BATCH = (np.ones((8, 1), np.float32), np.ones((8, 1), np.float32))


def refuses(kind: type[fluxcb.FluxcbError], what: str, fix: tuple[str, ...], function: Any) -> Any:
    with pytest.raises(kind) as caught:
        function()
    assert (caught.value.what, tuple(caught.value.fix)) == (what, fix)
    return caught.value


# -- arguments of fit ------------------------------------------------------------------------------


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


def test_tuple_of_one_loader_is_an_error_whose_fixes_work():
    loader = ArrayLoader(BATCH, batch_size=4)
    refuses(
        DataError,
        "`data` is a tuple of 1, which is neither batches nor `(training, validation)`.",
        ("write `data=training`, or `data=(training, validation)`",),
        lambda: testlearner(data=(loader,)),
    )
    testlearner(data=loader).fit(1)
    testlearner(data=(loader, loader)).fit(1)


class OtherName(TrainingPhase):
    name = "other"


@pytest.mark.parametrize(
    ("phase", "fix", "data"),
    [
        (TrainingPhase(), "pass only the training data: `data=training`", lambda loader: loader),
        (
            OtherName(),
            'write a mapping by the names of the phases: `data={"other": ...}`',
            lambda loader: {"other": loader},
        ),
    ],
)
def test_validation_data_without_a_validation_phase_is_an_error(phase, fix, data):
    loader = ArrayLoader(BATCH, batch_size=4)
    added = (
        "add `ValidationPhase()` to the phases, e.g. `phases=(TrainingPhase(), ValidationPhase())`, or, without a "
        "`loss_fn`, a subclass of `AbstractValidationPhase` with a `step` of your own"
    )
    refuses(
        DataError,
        "`data` is a pair `(training, validation)`, but no phase is named 'validation'.",
        (added, fix),
        lambda: testlearner(data=(loader, loader), phases=(phase,)),
    )
    testlearner(data=data(loader), phases=(phase,)).fit(1)
    testlearner(data=(loader, None), phases=(TrainingPhase(),)).fit(1)
    learner = testlearner(Metrics(), data=(loader, loader), phases=(TrainingPhase(), ValidationPhase()))
    assert "validation/loss" in learner.fit(1)


# -- arguments in another order --------------------------------------------------------------------


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


# -- resuming another program ----------------------------------------------------------------------


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
    tmp_path /= "{lr}"  # braces have no meaning in messages
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


def test_allow_is_suggested_in_the_form_of_the_call_that_resumes(tmp_path):
    path = str(tmp_path)
    falling(2, Checkpointer(path)).fit(1)
    changed = falling(2, Checkpointer(path), Metrics())
    fix = (
        "build the Learner as it was when the run began",
        "if the differences are intended, write `fit(..., resume=True, allow=('callbacks',))`",
        f"load only the parameters: `fluxcb.checkpoints.load_params({str(tmp_path / '2')!r})`",
    )
    what = f"{tmp_path / '2'} is a checkpoint of a different run."
    refuses(ResumeError, what, fix, lambda: changed.fit(3, resume=True))
    changed.fit(3, resume=True, allow=("callbacks",))
    assert changed.step == 6


def test_two_savers_of_one_learner_are_not_called_another_run(tmp_path):
    refuses(
        CheckpointError,
        f"Checkpointer({str(tmp_path)!r}) and Checkpointer({str(tmp_path)!r}) write checkpoints to the same directory.",
        ("use a separate directory for each of them", "remove one of them"),
        lambda: testlearner(Checkpointer(tmp_path), Checkpointer(tmp_path, steps=2)),
    )
    testlearner(Checkpointer(tmp_path / "one"), Checkpointer(tmp_path / "two", steps=2)).fit(1)


def test_two_paths_of_one_directory_are_the_same_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refuses(
        CheckpointError,
        "Checkpointer('runs') and Checkpointer('runs/../runs') write checkpoints to the same directory.",
        ("use a separate directory for each of them", "remove one of them"),
        lambda: testlearner(Checkpointer("runs"), Checkpointer("runs/../runs", steps=2)),
    )
    testlearner(Checkpointer("runs"), Checkpointer("others", steps=2)).fit(1)


@pytest.mark.parametrize(
    "callback",
    [
        "Checkpointer('runs')",
        "ModelSaver('runs')",
        "MinSaver('runs', 'validation/loss')",
        "MaxSaver('runs', 'validation/accuracy')",
        "BadSteps('runs')",
        "ControlFile('runs')",
    ],
)
def test_labels_show_the_directory_as_it_was_passed(callback):
    assert repr(eval(callback, vars(fluxcb.callbacks))) == callback  # noqa: S307 - of the list above


# -- the list of callbacks -------------------------------------------------------------------------


def test_nested_list_of_callbacks_names_the_star():
    group = [Metrics()]
    refuses(
        DeclarationError,
        "The callbacks list contains [Metrics()], which is not a callback instance.",
        ("unpack its callbacks into the list: `callbacks=[*group, ...]`",),
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


# -- the optimizer ---------------------------------------------------------------------------------

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


# -- what fit returns, and the loss ----------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (lambda loss: f"{loss:.3f}", "unsupported format string passed to a traced array"),
        (lambda loss: list(range(loss.astype(int))), ""),
    ],
)
def test_loss_that_formats_or_counts_a_traced_value_is_a_trace_error(use, reason):
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
    assert caught.value.what.startswith(f"`TrainingPhase.step` needs a value in Python: {reason}")
    assert "Tracer" not in str(caught.value)
    assert caught.value.fix == (
        "use only jax.numpy: write `jnp.where(condition, a, b)` instead of `if`, and do not call float() or numpy, or "
        "format values",
    )


def test_explaining_a_pair_names_the_command():
    with pytest.raises(DeclarationError) as error:
        testlearner().explain("Metrics", "ClipGradients")
    assert str(error.value) == (
        "`Learner.explain` takes no arguments by position, and was given 2.\n"
        "  why:   it takes costs\n"
        "  fix:   call it without arguments, which explains all callbacks; "
        "the command `fluxcb explain A B` explains a pair"
    )
