"""`FitSummary`: the last lines of a fit show how it ended, where its files are, and what to do next."""

import contextlib
import io
import math
import os
import re
import signal

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Append, Callback, CancelFitting, PauseFitting, RewindFitting, Write, on
from fluxcb.callbacks import (
    Checkpointer,
    CustomCallback,
    DynamicLossScale,
    EarlyStopping,
    FitSummary,
    LossSpikeGuard,
    Metric,
    Metrics,
    MinSaver,
    Monitors,
    SkipNonFinite,
    StopOnNaNLoss,
)
from fluxcb.events import EpochBegin, EpochEnd, FitBegin, FitEnd, StepEnd
from fluxcb.logging import CSVBackend, JSONLinesBackend
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner

PARAMS = "Next: `learner.params` has the trained parameters, `learner.fit(n)` trains further."
TRAINED = "Next: `learner.predict(data)` applies the model, `learner.fit(n)` trains further."
EXACTLY = "with a `Checkpointer` among the callbacks, `learner.fit(..., resume=True)` continues exactly"
WITHIN_EPOCH = (
    "Next: `learner.fit(n)` begins epoch 2 in this process, without the remaining batches of epoch 1; "
    f"{EXACTLY}, also in a new process."
)
RESUMABLE = "Next: `learner.fit(..., resume=True)` continues from the last checkpoint, also in a new process."
DIVERGED = (
    "Next: check the batch of that step for NaN and infinite values. If it has none, lower the learning rate, or limit "
    "the norm of the gradients with `ClipGradients`, to a smaller value if it is in the callbacks already. "
    "`CheckNumerics` names a gradient that is not finite. The parameters are those after the last good step."
)


@pytest.fixture
def file():
    return io.StringIO()


def lines(file):
    """Return what was printed, with `(0.0 s)` for any time."""
    return re.sub(r"\(\d+\.\d s\)", "(0.0 s)", file.getvalue()).splitlines()


def raising(error, event, when=lambda learner: True):
    """Return a callback that raises an error at an event of the training."""

    def act(learner):
        if when(learner):
            raise error

    return CustomCallback(act, event, TrainingPhase, access={"control": Append()})


class Ends(Callback):
    """Note the FitEnd events."""

    def __init__(self):
        self.seen = []

    @on
    def note(self, event: FitEnd, phase, learner):
        self.seen.append((event.outcome, event.reason, event.advice, type(event.error).__name__))


def test_a_fit_that_runs_to_its_end(file):
    ends = Ends()
    learner = testlearner(FitSummary(file), ends)
    learner.fit(2)
    learner.fit(1)
    assert lines(file) == [
        "Training finished after epoch 2, step 8 (0.0 s).",
        TRAINED,
        "Training finished after epoch 3, step 12 (0.0 s).",
        TRAINED,
    ]
    assert ends.seen == [("finished", None, "", "NoneType")] * 2
    assert repr(learner) == "<Learner at epoch 3, step 12, with 2 callbacks>"


def test_a_learner_without_a_model(file):
    fluxcb.Learner.from_loss(
        {"w": jnp.ones(())},
        lambda params, batch, key: jnp.mean(params["w"] * batch),
        optax.sgd(0.1),
        data=[np.ones(2, np.float32)],
        callbacks=[FitSummary(file)],
        default_callbacks=False,
    ).fit(1)
    assert lines(file)[-1] == PARAMS


def test_a_saver_without_a_checkpoint_is_not_named(file, tmp_path):
    learner = fluxcb.Learner.from_loss(
        {"w": jnp.ones(())},
        lambda params, batch, key: jnp.nan * jnp.mean(params["w"] * batch),
        optax.sgd(0.0),
        data=([np.ones(2, np.float32)],) * 2,
        callbacks=[Metrics(), MinSaver(tmp_path), FitSummary(file)],
        default_callbacks=False,
    )
    with pytest.warns(RuntimeWarning, match="loss was nan"):
        learner.fit(1)
    assert not [line for line in lines(file) if line.startswith("Wrote")]


def test_a_saver_is_named_if_it_has_written_in_the_fit(file, tmp_path):
    learner = testlearner(Metrics(), MinSaver(tmp_path), FitSummary(file))
    wrote = f"Wrote {tmp_path / 'min-validation-loss'} (MinSaver)."
    learner.fit(1)
    assert wrote in lines(file)
    learner.hyperparams.learning_rate = 0.0
    learner.fit(1)  # the loss stays as it is
    assert lines(file).count(wrote) == 1
    learner.hyperparams.learning_rate = 0.1
    learner.fit(1)
    assert lines(file).count(wrote) == 2


def test_a_callback_stops_the_fit(file):
    ends = Ends()
    stop = raising(CancelFitting("enough"), EpochEnd, lambda learner: learner.progress.epoch == 2)
    learner = testlearner(stop, FitSummary(file), ends)
    assert learner.fit(5).stop_reason == "enough"
    assert lines(file) == ["Training stopped in epoch 2 of 5, after step 8: enough.", TRAINED]
    assert ends.seen == [("stopped", "enough", "", "NoneType")]
    assert repr(learner) == "<Learner at epoch 2, step 8, with 3 callbacks; the last fit stopped: enough>"


def test_a_callback_gives_advice(file):
    testlearner(raising(CancelFitting("no disk space", advice="delete old runs"), EpochEnd), FitSummary(file)).fit(5)
    assert lines(file) == ["Training stopped in epoch 1 of 5, after step 4: no disk space.", "Next: delete old runs."]


def test_early_stopping_is_the_reason(file):
    learner = testlearner(Metrics(), EarlyStopping(1), FitSummary(file), learning_rate=1.5)  # diverges from epoch 1 on
    learner.fit(5)
    best = learner.history["validation/loss"][0]
    assert lines(file)[0] == (
        f"Training stopped in epoch 2 of 5, after step 8: validation/loss: no improvement on {best:.6g} for 1 epoch."
    )


@pytest.mark.parametrize(
    ("callback", "reason", "skipped"),
    [
        (StopOnNaNLoss, "the loss was inf at step 2", []),
        (
            lambda: SkipNonFinite(2),
            "loss or gradients were not finite at 2 steps in a row, up to step 3",
            ["SkipNonFinite skipped 2 of 3 steps."],
        ),
    ],
)
def test_a_non_finite_loss_also_warns(file, callback, reason, skipped):
    learner = testlearner(callback(), FitSummary(file), learning_rate=1e30)
    with pytest.warns(RuntimeWarning, match=f"^Training stopped: {reason}.$") as caught:
        learner.fit(5)
    assert [warning.filename for warning in caught] == [__file__]  # it points at the call of `fit`
    step = reason.split()[-1]
    assert lines(file) == [f"Training stopped in epoch 1 of 5, after step {step}: {reason}.", *skipped, DIVERGED]
    assert learner.stop_reason == reason


def with_validation(value, *callbacks, **keywords):
    """Return a Learner whose validation loss is a given value, or that of a batch; its training loss is finite."""
    return fluxcb.Learner.from_loss(
        {"w": jnp.ones(())},
        lambda params, batch, key: jnp.mean(params["w"] * batch),
        optax.sgd(0.1),
        data=([np.ones(2, np.float32)], [value if isinstance(value, np.ndarray) else np.full(2, value, np.float32)]),
        callbacks=list(callbacks),
        default_callbacks=False,
        **keywords,
    )


@pytest.mark.parametrize(("value", "shown"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_a_non_finite_validation_loss_is_printed_and_warns(file, value, shown):
    learner = with_validation(value, Metrics(), FitSummary(file))
    with pytest.warns(RuntimeWarning) as caught:
        learner.fit(1)
    text = f"validation/loss was {shown} in epoch 1."
    assert [(str(warning.message), warning.filename) for warning in caught] == [(text, __file__)]
    end = "Training finished after epoch 1, step 1 (0.0 s)."
    assert lines(file) == [end, f"Warning: {text}", PARAMS]


def test_non_finite_epochs_are_counted_per_fit(file):
    batch = np.ones(2, np.float32)
    learner = with_validation(batch, Metrics(), FitSummary(file))
    learner.fit(2)
    batch[:] = math.nan
    with pytest.warns(RuntimeWarning, match=r"^validation/loss was not finite in 3 of 3 epochs, first in epoch 3\.$"):
        learner.fit(3)
    batch[:] = 1.0
    learner.fit(1)
    assert [line for line in lines(file) if line.startswith("Warning")] == [
        "Warning: validation/loss was not finite in 3 of 3 epochs, first in epoch 3."
    ]


def test_skipped_steps_are_counted_per_fit(file):
    good, bad = np.ones(2, np.float32), np.full(2, np.inf, np.float32)
    data = [good, bad, good]
    learner = fluxcb.Learner.from_loss(
        {"w": jnp.ones(())},
        lambda params, batch: jnp.mean(params["w"] * batch),
        optax.sgd(0.1),
        data=data,
        callbacks=[SkipNonFinite(), DynamicLossScale(), LossSpikeGuard(window=5), FitSummary(file)],
        default_callbacks=False,
    )
    learner.fit(2)
    data[1] = good
    learner.fit(1)
    assert [line for line in lines(file) if "skipped" in line] == [
        "DynamicLossScale skipped 2 of 6 steps.",
        "SkipNonFinite skipped 2 of 6 steps.",
    ]


def test_entry_of_a_user_with_the_name_of_a_count_is_ignored(file):
    class Own(Callback):
        def stateaccess(self):
            return {"cbstate": {"loss_scale": Write()}}

        def init(self, learner):
            learner.cbstate.loss_scale = 2.0

    testlearner(Own(), FitSummary(file)).fit(1)
    assert lines(file)[0].startswith("Training finished")


def test_another_non_finite_metric_is_printed_without_a_warning(file):
    metric = Metric(lambda loss: loss * math.nan, name="undefined", needs=("loss",))
    with_validation(1.0, Metrics(metric), FitSummary(file)).fit(1)
    told = [line for line in lines(file) if line.startswith("Warning")]
    assert told == [
        "Warning: training/undefined was nan in epoch 1.",
        "Warning: validation/undefined was nan in epoch 1.",
    ]


def test_a_learner_without_metrics_has_no_such_line(file):
    with_validation(math.nan, FitSummary(file)).fit(1)
    assert lines(file) == ["Training finished after epoch 1, step 1 (0.0 s).", PARAMS]


def test_reading_the_metrics_fetches_nothing():
    learner = with_validation(1.0, Metrics(), FitSummary(io.StringIO()))
    learner.callbacks.measure()
    learner.fit(2)
    rows = [row for row in learner.callbacks.timings() if row.handler.startswith("FitSummary")]
    assert [dict(row.reads) for row in rows] == [{}, {}]


def test_a_handler_pauses_the_fit(file):
    pause = raising(PauseFitting("the machine is needed"), StepEnd, lambda learner: learner.progress.step == 3)
    testlearner(pause, FitSummary(file), steps_per_call=1).fit(5)
    assert lines(file) == [
        "Training was interrupted in epoch 1 of 5, after step 3: the machine is needed.",
        WITHIN_EPOCH,
    ]


@pytest.mark.parametrize(
    ("number", "shown", "outcome"),
    [(signal.SIGTERM, "SIGTERM", "NoneType"), (signal.SIGINT, "Ctrl-C", "KeyboardInterrupt")],
)
def test_a_signal_ends_the_fit(file, number, shown, outcome):
    ends = Ends()
    kill = CustomCallback(lambda learner: os.kill(os.getpid(), number), EpochBegin, TrainingPhase)
    learner = testlearner(kill, FitSummary(file), ends)
    if number == signal.SIGINT:
        with pytest.raises(KeyboardInterrupt):
            learner.fit(5)
    else:
        learner.fit(5)
    assert lines(file) == [f"Training was interrupted in epoch 1 of 5, after step 0: {shown}.", WITHIN_EPOCH]
    assert [(seen[0], seen[3]) for seen in ends.seen] == [("interrupted", outcome)]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("boom"), PauseFitting("later")])
def test_next_fit_begins_next_epoch_as_announced(file, error):
    learner = testlearner(
        fails := raising(error, StepEnd, lambda learner: learner.progress.step == 2), FitSummary(file)
    )
    with contextlib.suppress(KeyboardInterrupt, ValueError):
        learner.fit(1)
    assert lines(file)[-1] == WITHIN_EPOCH
    learner.callbacks.remove(fails)
    learner.fit(1)
    assert (learner.epoch, learner.step) == (2, 2 + 4)  # the other two batches of epoch 1 were skipped


@pytest.mark.parametrize("stops_earlier", [False, True])
def test_failed_second_fit_continues_as_announced(file, tmp_path, stops_earlier):
    # The newest checkpoint is that of the first fit, which may have stopped early.
    stop = raising(CancelFitting("enough"), EpochEnd, lambda learner: stops_earlier and learner.progress.step == 8)
    fails = raising(ValueError("boom"), StepEnd, lambda learner: learner.progress.step == 10)
    learner = testlearner(Checkpointer(tmp_path), stop, fails, FitSummary(file))
    learner.fit(2)
    learner.callbacks.remove(stop)
    with pytest.raises(ValueError, match="boom"):
        learner.fit(1)
    assert lines(file)[-1] == "Next: `learner.fit(..., resume=True)` continues from the last checkpoint."
    learner.callbacks.remove(fails)
    learner.fit(1, resume=True, allow=("callbacks",))
    assert (learner.epoch, learner.step) == (3, 12)
    learner.fit(1, resume=True, allow=("callbacks",))  # the fit is complete
    assert learner.step == 12


@pytest.mark.parametrize(("length_is_known", "event"), [(True, EpochEnd), (False, StepEnd)])
def test_next_fit_after_all_batches_or_an_unknown_number(file, length_is_known, event):
    batch = np.ones(2, np.float32)
    learner = fluxcb.Learner.from_loss(
        {"w": jnp.ones(())},
        lambda params, batch, key: jnp.mean(params["w"] * batch),
        optax.sgd(0.1),
        data=[batch] * 2 if length_is_known else (batch for _ in range(2)),
        callbacks=[raising(ValueError("boom"), event), FitSummary(file)],
        default_callbacks=False,
    )
    with pytest.raises(ValueError, match="boom"):
        learner.fit(1)
    known = "continues with epoch 2 in this process"
    unknown = "begins epoch 2 in this process, without any remaining batches of epoch 1"
    assert (
        lines(file)[-1]
        == f"Next: `learner.fit(n)` {known if length_is_known else unknown}; {EXACTLY}, also in a new process."
    )


def test_a_handler_fails(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fails = raising(ValueError("boom\nand more"), EpochEnd)
    with pytest.raises(ValueError, match="boom"):
        testlearner(fails, FitSummary(file), Checkpointer("run", steps=2)).fit(5)
    assert lines(file) == [
        "Training failed in epoch 1 of 5, after step 4: ValueError: boom.",
        "Wrote run (Checkpointer).",
        RESUMABLE,
    ]


@pytest.mark.parametrize("event", [FitBegin, EpochBegin])
def test_a_fit_that_fails_before_its_first_step_has_one_line(file, event):
    with pytest.raises(ValueError, match="boom"):
        testlearner(raising(ValueError("boom"), event), FitSummary(file)).fit(5)
    assert lines(file) == ["Training failed before its first step: ValueError: boom."]


def test_a_reason_that_is_a_question_has_no_period(file):
    fails = raising(ValueError("no `w`. Did you mean `ww`?"), FitBegin)
    with pytest.raises(ValueError, match="no `w`"):
        testlearner(fails, FitSummary(file)).fit(5)
    assert lines(file) == ["Training failed before its first step: ValueError: no `w`. Did you mean `ww`?"]


def test_it_lists_the_written_files(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    learner = testlearner(
        Metrics(),
        Monitors(JSONLinesBackend("log.jsonl"), CSVBackend(tmp_path / "logs" / "log.csv")),
        raising(CancelFitting("enough"), EpochEnd),
        Checkpointer("run"),
        FitSummary(file),
        default_callbacks=True,
    )
    learner.fit(5)
    written = [line for line in lines(file) if line.startswith("Wrote")]
    (line,) = written
    places = line.removeprefix("Wrote ").removesuffix(".").split(", ")
    assert set(places) == {
        f"{name} ({owner})"
        for name, owner in [("log.jsonl", "Monitors"), ("logs/log.csv", "Monitors"), ("run", "Checkpointer")]
        if (tmp_path / name).exists()
    }
    assert "run (Checkpointer)" in places


def test_a_resumed_run_that_is_complete_is_reported(file, tmp_path):
    def learner():
        return testlearner(Checkpointer(tmp_path), FitSummary(file))

    learner().fit(2, resume=True)
    learner().fit(2, resume=True)
    assert [line for line in lines(file) if line.startswith("Training")] == [
        "Training finished after epoch 2, step 8 (0.0 s).",
        "Training was complete at epoch 2, step 8.",
    ]


def test_a_rewind_is_reported_and_the_run_continues(file, tmp_path):
    asked = []

    def rewind(learner):
        if learner.progress.epoch == 2 and not asked:
            asked.append(True)
            raise RewindFitting("a spike", before=4)

    ends = Ends()
    callbacks = (
        CustomCallback(rewind, EpochEnd, TrainingPhase, access={"control": Append()}),
        Checkpointer(tmp_path, epochs=1),
        FitSummary(file),
        ends,
    )
    with pytest.warns(UserWarning, match="a spike"):
        testlearner(*callbacks).fit(3)
    assert [line for line in lines(file) if line.startswith("Training")] == [
        "Training rewinds in epoch 2 of 3, after step 8: a spike.",
        "Training finished after epoch 3, step 12 (0.0 s).",
    ]
    assert [seen[:2] for seen in ends.seen] == [("rewinding", "a spike"), ("finished", None)]


def test_it_is_printed_after_the_table():
    order = fluxcb.check([FitSummary()]).order(FitEnd, TrainingPhase)
    assert isinstance(order[-1], FitSummary)


def test_long_lines_are_wrapped_between_words_in_a_terminal():
    from rich.console import Console

    from fluxcb.callbacks.progress.console import show_block

    words = ["parameters", "`fit(n)`", "learning-rate", "of"] * 10
    for terminal in (True, False):
        console = Console(file=io.StringIO(), width=40, force_terminal=terminal, color_system=None)
        show_block(console, ["short", " ".join(words)])
        first, *rest = console.file.getvalue().splitlines()
        assert first == "short"
        assert " ".join(line.strip() for line in rest) == " ".join(words)
        assert (len(rest) > 1, max(map(len, rest)) <= 40) == ((True, True) if terminal else (False, False))


@pytest.mark.filterwarnings("ignore:.* class numbers:UserWarning")  # `fit` itself warns about those of lists
def test_advice_for_a_first_loss_that_is_not_finite_names_the_data_and_not_the_learning_rate(file):
    def train(labels):
        learner = fluxcb.Learner(
            (lambda key, xs: {"w": jnp.ones((4, 3))}, lambda params, xs: xs @ params["w"]),
            lambda outputs, ys: optax.softmax_cross_entropy_with_integer_labels(outputs, ys).mean(),
            optax.sgd(0.1),
            data=[(np.ones((3, 4), np.float32), labels)],
            callbacks=[StopOnNaNLoss(), FitSummary(file=file)],
            default_callbacks=False,
        )
        learner.fit(1)
        return learner.stop_reason

    with pytest.warns(RuntimeWarning, match="Training stopped: the loss was nan at step 1"):
        train(np.array([1, 2, 3]))
    assert lines(file)[-1] == (
        "Next: check the first batch for NaN, infinite values, and class numbers for which the model has no output, "
        "and check the initial parameters. No update has been applied, so the learning rate is not the cause."
    )
    assert train(np.array([0, 1, 2])) is None
