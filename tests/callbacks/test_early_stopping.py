"""EarlyStopping: the epoch at which a fit ends, and the reason."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Callback, CancelEpoch, CancelFitting, DeclarationError, MissingStateError, Write, every, on
from fluxcb.callbacks import (
    Checkpointer,
    EarlyStopping,
    Loss,
    Metric,
    Metrics,
    MetricsPrinter,
    ReduceLROnPlateau,
)
from fluxcb.events import EpochBegin, FitEnd, Trigger
from fluxcb.phases import AbstractTrainingPhase, Phase, TrainingPhase, ValidationPhase
from fluxcb.populations import PopulationTable, SuccessiveHalving
from fluxcb.stopping import GL, PQ, InvalidValue, Never, NumberLimit, NumberSinceBest, Patience, Threshold, TimeLimit


def series(validation, training=None):
    """Return data for which the loss of epoch n is the n-th number. The loss of a batch is its mean."""

    class Numbers:
        fresh_batches = True

        def __init__(self, numbers):
            self.numbers, self.epoch = numbers, 0

        @property
        def element_spec(self):
            return np.zeros(1, np.float32)

        def __iter__(self):
            yield np.array([self.numbers[self.epoch]], np.float32)
            self.epoch += 1

    training = training or [1.0] * len(validation)
    return Numbers(training), Numbers(validation)


def learner(validation, *callbacks, training=None, metrics=None):
    metrics = metrics or Metrics(Metric(lambda batch: batch.mean(), name="score", needs=("batch",)))
    return fluxcb.Learner.from_loss(
        {"w": jnp.zeros(())},
        lambda params, batch, key: jnp.mean(batch) + 0 * params["w"],
        fluxcb.inject(optax.sgd, learning_rate=0.1),
        data=series(validation, training),
        callbacks=[metrics, *callbacks],
        default_callbacks=False,
    )


ZIGZAG = [10.0, 9, 8, 9, 10, 7, 10, 10, 10, 10, 10]


@pytest.mark.parametrize(
    ("criterion", "epoch", "said"),
    [
        (2, 5, "validation/loss: no improvement on 8 for 2 epochs"),
        (NumberSinceBest(3), 9, "validation/loss: no improvement on 7 for 3 epochs"),
        (Patience(2), 5, "validation/loss: worse than the previous epoch for 2 epochs; the last value is 10"),
        (GL(24), 5, "validation/loss: 10 is 25 % worse than the best, 8 (limit 24 %)"),
        (NumberLimit(4), 4, "validation/loss: 4 epochs with a value (limit 4)"),
        (Threshold(8.5), 3, "validation/loss: 8 is below 8.5"),
        (Never(), 11, None),
        (
            GL(24) | NumberLimit(5),
            5,
            "validation/loss: 10 is 25 % worse than the best, 8 (limit 24 %); 5 epochs with a value (limit 5)",
        ),
    ],
    ids=repr,
)
def test_the_fit_ends_at_the_epoch_of_the_criterion(criterion, epoch, said):
    trained = learner(ZIGZAG, EarlyStopping(criterion))
    trained.fit(len(ZIGZAG))
    assert (trained.epoch, trained.stop_reason) == (epoch, said)


def test_training_losses_precede_validation_values():
    # Progress 1000 (3.5 - 3) / 3 = 166.7 and GL 0; then 1000 (3 - 3) / 3 = 0: a stall.
    trained = learner([5.0, 5.0, 5.0, 9.0], EarlyStopping(PQ(0.1, k=2)), training=[4.0, 3.0, 3.0, 3.0])
    trained.fit(4)
    assert trained.stop_reason == "validation/loss: training makes no progress: its last 2 values are [3.0, 3.0]"
    assert trained.epoch == 3


def test_the_quotient_of_prechelt():
    # GL 100 (6 - 5) / 5 = 20, progress 1000 (3.75 - 3.5) / 3.5 = 71.43: 0.28
    trained = learner([5.0, 5.0, 6.0], EarlyStopping(PQ(0.27, k=2)), training=[5.0, 4.0, 3.5])
    trained.fit(3)
    assert trained.stop_reason == (
        "validation/loss: generalization loss over training progress is 0.28 at 6 (limit 0.27)"
    )


def test_a_nan_training_loss_is_seen_by_criteria_that_check_it():
    trained = learner([1.0] * 4, EarlyStopping(InvalidValue()), training=[1.0, np.nan, 1.0, 1.0])
    trained.fit(4)
    assert (trained.epoch, trained.stop_reason) == (2, "validation/loss: the value is nan")


def test_high_values_can_be_good():
    trained = learner([0.1, 0.5, 0.4, 0.5, 0.6], EarlyStopping(2, metric="score", mode="max"))
    trained.fit(5)
    assert (trained.epoch, trained.stop_reason) == (4, "validation/score: no improvement on 0.5 for 2 epochs")
    assert EarlyStopping(GL(2) | Threshold(0.9), metric="score", mode="max").criteria == (
        GL(2, mode="max") | Threshold(0.9, mode="max"),
    )


ACCURACY = Metric(lambda batch: batch.mean(), name="accuracy", needs=("batch",))


@pytest.mark.parametrize(
    ("stop", "epoch", "best"),
    [
        (lambda: EarlyStopping(patience=2, metric="accuracy"), 4, "0.5"),
        (lambda: EarlyStopping(2, metric="validation/accuracy"), 4, "0.5"),
        (lambda: EarlyStopping(2, metric="accuracy", mode="auto"), 4, "0.5"),
        (lambda: EarlyStopping(("accuracy", 2)), 4, "0.5"),
        (lambda: EarlyStopping(("accuracy", 2), NumberLimit(5), mode="min"), 4, "0.5"),  # the mode of the loss
        (lambda: EarlyStopping(2, metric="accuracy", mode="max"), 4, "0.5"),
        (lambda: EarlyStopping(2, metric="accuracy", mode="min"), 3, "0.25"),
        (lambda: EarlyStopping(("accuracy", NumberSinceBest(2, mode="min"))), 3, "0.25"),
        (lambda: EarlyStopping(NumberSinceBest(2), metric="accuracy"), 4, "0.5"),
        (lambda: EarlyStopping(("accuracy", NumberSinceBest(2))), 4, "0.5"),
        (lambda: EarlyStopping(NumberSinceBest(2, mode="min"), metric="accuracy"), 3, "0.25"),
        (lambda: EarlyStopping(Never() | NumberSinceBest(2), metric="accuracy"), 4, "0.5"),
    ],
)
@pytest.mark.filterwarnings("ignore:.* values are good:UserWarning")  # the mode contradicts the name
def test_high_accuracies_are_good_unless_a_mode_is_given(stop, epoch, best):
    trained = learner([0.25, 0.5, 0.375, 0.3125, 0.75], stop(), metrics=Metrics(ACCURACY))
    trained.fit(5)
    assert (trained.epoch, trained.stop_reason) == (
        epoch,
        f"validation/accuracy: no improvement on {best} for 2 epochs",
    )


def test_each_criterion_without_a_mode_follows_the_name_of_its_metric():
    stop = EarlyStopping(3, ("accuracy", 4), ("training/auc", 5), GL(5), ("f1", GL(5)))
    assert stop.criteria == (
        NumberSinceBest(3, mode="min"),
        NumberSinceBest(4, mode="max"),
        NumberSinceBest(5, mode="max"),
        GL(5, mode="min"),
        GL(5, mode="max"),
    )
    assert EarlyStopping(3, ("loss", 4), metric="score", mode="min").criteria == (
        NumberSinceBest(3, mode="min"),
        NumberSinceBest(4, mode="min"),
    )
    assert EarlyStopping(3, ("loss", 4), metric="score", mode="max").criteria == (
        NumberSinceBest(3, mode="max"),
        NumberSinceBest(4, mode="min"),
    )


def test_a_mode_that_applies_to_no_criterion_is_an_error_whose_fixes_work(refused):
    with refused(
        DeclarationError,
        '`EarlyStopping` was given `mode="min"`, which applies to none of its criteria.\n'
        "  why:   it is the mode of `metric`, but every criterion is in a pair with its own metric\n"
        '  fix:   give the criterion a mode: `EarlyStopping(("score", NumberSinceBest(3, mode="min")))`\n'
        '     or: name the metric outside the pair: `EarlyStopping(3, metric="score", mode="min")`',
    ):
        EarlyStopping(("score", 3), mode="min")
    first = EarlyStopping(("score", NumberSinceBest(3, mode="min")))
    second = EarlyStopping(3, metric="score", mode="min")
    assert first.criteria == second.criteria == (NumberSinceBest(3, mode="min"),)
    assert EarlyStopping(("accuracy", 3), mode="auto").criteria == (NumberSinceBest(3, mode="max"),)


@pytest.mark.parametrize(
    ("make", "owner"),
    [
        (lambda **how: EarlyStopping(3, **how), "EarlyStopping"),
        (lambda **how: ReduceLROnPlateau(**how), "ReduceLROnPlateau"),
        (lambda **how: Checkpointer("never-written", keep_best=1, **how), "Checkpointer"),
        (lambda **how: SuccessiveHalving(**{"metric": "loss", **how}), "SuccessiveHalving"),
        (lambda **how: PopulationTable(**how), "PopulationTable"),
    ],
)
def test_a_mode_that_the_name_of_the_metric_contradicts_is_a_warning(make, owner):
    def warning(**how):
        with pytest.warns(UserWarning, match="values are good") as caught:
            make(**how)
        [found] = caught
        return str(found.message)

    assert warning(mode="max") == (
        f'`{owner}(..., mode="max")` treats high values of `validation/loss` as good, but according to its name, low '
        'values are good. Leave out `mode`, or name another metric, e.g. `metric="accuracy"`.'
    )
    assert warning(mode="min", metric="training/top5_acc") == (
        f'`{owner}(..., mode="min")` treats low values of `training/top5_acc` as good, but according to its name, high '
        'values are good. Leave out `mode`, or name another metric, e.g. `metric="loss"`.'
    )
    assert "low values are good" in warning(metric="reconstruction_loss", mode="max")
    make(metric="accuracy", mode="max")
    make(metric="score", mode="max")  # a name that does not say which values are good
    make(metric="score", mode="min")
    make(mode="min")
    make(metric="accuracy")
    make(metric="accuracy", mode="auto")
    make()


def test_an_unknown_mode_is_an_error_whose_fixes_work(refused):
    with refused(
        DeclarationError,
        '`mode` of `EarlyStopping` must be "min", "max" or "auto", not \'best\'.\n'
        "  why:   it says whether low or high values of the metric are good\n"
        '  fix:   write `mode="max"` if high values are good, or `mode="min"` if low values are good\n'
        "     or: leave it out, so that the name of the metric decides",
    ):
        EarlyStopping(1, mode="best")
    EarlyStopping(1, metric="score", mode="max")
    EarlyStopping(1, mode="min")
    EarlyStopping(1)


def test_several_metrics_each_with_its_criterion():
    half = Metric(lambda batch: -batch.mean() / 2, name="half", needs=("batch",))
    stop = EarlyStopping(
        ("half", NumberSinceBest(2, mode="max")), ("half", NumberSinceBest(4, mode="min")), NumberLimit(6)
    )
    trained = learner([1.0, 2.0, 3.0, 2.0, 1.0, 1.0], stop, metrics=Metrics(half))
    trained.fit(6)  # half: -0.5, -1, -1.5
    assert (trained.epoch, trained.stop_reason) == (3, "validation/half: no improvement on -0.5 for 2 epochs")
    assert repr(stop) == (
        "EarlyStopping(('validation/half', NumberSinceBest(mode='max', n=2)), "
        "('validation/half', NumberSinceBest(n=4)), NumberLimit(n=6))"
    )
    trained.fit(1)  # the criteria keep their state
    assert trained.stop_reason is not None


def test_all_reasons_of_an_epoch_are_reported():
    trained = learner([1.0, 2.0], EarlyStopping(1, ("score", NumberLimit(2))))
    trained.fit(2)
    assert trained.stop_reason == (
        "validation/loss: no improvement on 1 for 1 epoch; validation/score: 2 epochs with a value (limit 2)"
    )


def test_a_training_metric_can_be_watched():
    trained = learner([1.0] * 4, EarlyStopping(1, phase=TrainingPhase), training=[3.0, 2.0, 2.5, 1.0])
    trained.fit(4)
    assert (trained.epoch, trained.stop_reason) == (3, "training/loss: no improvement on 2 for 1 epoch")


@pytest.mark.parametrize("phase", [ValidationPhase, ValidationPhase(), "validation"])
def test_a_phase_is_a_class_an_instance_or_a_name(phase):
    assert repr(EarlyStopping(1, phase=phase)) == "EarlyStopping(NumberSinceBest(n=1))"


@pytest.mark.parametrize(
    "stop", [EarlyStopping(1, metric="training/loss"), EarlyStopping(("training/loss", 1))], ids=["metric", "pair"]
)
def test_a_metric_can_be_named_as_in_logs(stop):
    trained = learner([1.0] * 4, stop, training=[3.0, 2.0, 2.5, 1.0])
    trained.fit(4)
    assert (trained.epoch, trained.stop_reason) == (3, "training/loss: no improvement on 2 for 1 epoch")
    assert repr(stop) == "EarlyStopping(('training/loss', NumberSinceBest(n=1)))"


def test_each_criterion_can_watch_another_phase():
    # The best validation value is the last one, and the best training value is the second one.
    stop = EarlyStopping(3, ("training/loss", 2))
    trained = learner([5.0, 4, 3, 2, 1], stop, training=[3.0, 2.0, 2.5, 2.5, 1.0])
    trained.fit(5)
    assert (trained.epoch, trained.stop_reason) == (4, "training/loss: no improvement on 2 for 2 epochs")


def test_training_losses_can_be_named_as_in_logs():
    # The generalization loss is 100 (8 / 4 - 1) percent at the third value. The last two training losses are 4 and 2:
    # the progress is 1000 (3 / 2 - 1) per mille, and 100 / 500 = 0.2.
    for arguments in ({}, {"train_metric": "training/loss"}, {"train_metric": "loss", "train_phase": "training"}):
        trained = learner([8.0, 4, 8], EarlyStopping(PQ(0.15, k=2), **arguments), training=[6.0, 4.0, 2.0])
        trained.fit(3)
        assert trained.stop_reason == (
            "validation/loss: generalization loss over training progress is 0.2 at 8 (limit 0.15)"
        )


def test_other_handlers_at_trigger_run_first(capsys):
    class Seen(Callback):
        def __init__(self):
            self.epochs = []

        @on
        def note(self, event: Trigger, phase: AbstractTrainingPhase, learner):
            self.epochs.append(learner.progress.epoch)

    seen = Seen()
    trained = learner([1.0, 2.0, 3.0], EarlyStopping(1), MetricsPrinter(), seen)
    trained.fit(3)
    assert seen.epochs == [1, 2]
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_later_fit_continues_from_the_state_of_the_criteria():
    trained = learner([3.0, 4.0, 5.0, 6.0, 1.0, 2.0, 3.0], EarlyStopping(2))
    trained.fit(7)
    assert trained.epoch == 3
    trained.fit(7)  # 6 is not an improvement
    assert (trained.epoch, trained.stop_reason) == (
        4,
        "validation/loss: no improvement on 3 for 3 epochs, counted since an earlier fit",
    )
    trained.fit(3)  # 1 is an improvement
    assert (trained.epoch, trained.stop_reason) == (7, "validation/loss: no improvement on 1 for 2 epochs")


def test_a_new_instance_starts_over_in_a_later_fit():
    trained = learner([3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 3.0], EarlyStopping(2))
    trained.fit(7)
    trained.callbacks.replace(EarlyStopping(2))
    trained.fit(7)
    assert (trained.epoch, trained.stop_reason) == (6, "validation/loss: no improvement on 6 for 2 epochs")


@pytest.mark.parametrize("saved_at", range(1, 9))
def test_a_resumed_run_ends_at_the_same_epoch(saved_at):
    make = lambda: EarlyStopping(3, GL(1000), PQ(1e9, k=2), ("score", Patience(4)))  # noqa: E731
    falling = [20.0 - n for n in range(11)]
    straight = learner(ZIGZAG, make(), training=falling)
    straight.fit(11)
    first = make()
    learner(ZIGZAG, first, training=falling).fit(saved_at)
    second = make()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    resumed = learner(ZIGZAG[saved_at:], second, training=falling[saved_at:])
    resumed.fit(11 - saved_at)
    assert straight.epoch == 9
    # To the second Learner, this is another fit, and not the rest of one.
    reason = (resumed.stop_reason or "").removesuffix(", counted since an earlier fit")
    assert (saved_at + resumed.epoch, reason) == (straight.epoch, straight.stop_reason)


def test_epochs_without_a_validation_do_not_count():
    class Skip(Callback):
        @on
        def skip(self, event: EpochBegin, phase: ValidationPhase, learner):
            if learner.progress.epoch in (2, 3):
                raise CancelEpoch

    trained = learner([1.0, 2.0, 3.0, 4.0], EarlyStopping(1), Skip())
    trained.fit(4)
    assert (trained.epoch, trained.stop_reason) == (4, "validation/loss: no improvement on 1 for 1 epoch")


def test_a_period_makes_checks_less_frequent():
    trained = learner([3.0, 1.0, 2.0, 0.5, 3.0, 0.7, 0.1, 0.1], every(EarlyStopping(1), epochs=2))
    trained.fit(8)
    assert (trained.epoch, trained.stop_reason) == (6, "validation/loss: no improvement on 0.5 for 1 epoch")


def test_a_hand_written_loop_gets_the_cancel():
    trained = learner([1.0, 2.0, 3.0], EarlyStopping(1))
    training, validation = trained.phases
    trained.run_epoch(training)
    trained.run_epoch(validation)
    trained.trigger()
    trained.run_epoch(training)
    trained.run_epoch(validation)
    with pytest.raises(CancelFitting, match="validation/loss: no improvement on 1 for 1 epoch"):
        trained.trigger()


def test_the_clock_of_a_time_limit_starts_with_the_fit(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("fluxcb.stopping.limits.monotonic", lambda: now[0])

    class Slow(Callback):
        @on
        def wait(self, event: EpochBegin, phase: AbstractTrainingPhase, learner):
            now[0] += 10

        @on
        def pause(self, event: FitEnd, phase: Phase, learner):
            now[0] += 1000

    trained = learner([1.0] * 9, EarlyStopping(TimeLimit(35)), Slow())
    trained.fit(2)
    assert trained.stop_reason is None
    trained.fit(7)
    assert (trained.epoch, trained.stop_reason) == (
        4,
        "validation/loss: 40.0 s have passed (limit 35 s), counted since an earlier fit",
    )


# --- errors ---------------------------------------------------------------------------------------------------------


def test_a_metric_that_does_not_exist_is_an_error_at_construction(refused):
    with refused(
        MissingStateError,
        "EarlyStopping(('validation/scor', NumberSinceBest(n=1))) watches `validation/scor`, which no callback "
        "provides. Did you mean `validation/score`?\n"
        "  where: the callbacks provide `training/loss`, `training/score`, `validation/loss`, `validation/score`\n"
        "  why:   the metric would never have a value, so the callback would have no effect\n"
        '  fix:   write "validation/score" as the metric\n'
        '     or: add the metric: `Metrics(score, Metric(fn, name="scor"))`',
    ):
        learner([1.0, 2.0], EarlyStopping(1, metric="scor"))


def test_a_phase_without_data_is_an_error_at_construction(refused):
    def build(metric, *callbacks, data):
        return fluxcb.Learner.from_loss(
            {"w": jnp.zeros(())},
            lambda params, batch, key: jnp.mean(batch) + 0 * params["w"],
            optax.sgd(0.1),
            data=data,
            callbacks=[Metrics(), EarlyStopping(3, metric=metric), *callbacks],
            default_callbacks=False,
        )

    class GivesData(Callback):
        def stateaccess(self):
            return {"data": {"validation": Write()}}

        @on
        def give(self, event: EpochBegin, phase: TrainingPhase, learner):
            learner.data.validation = batches

    batches = [np.ones(1, np.float32)]
    with refused(
        MissingStateError,
        "EarlyStopping(NumberSinceBest(n=3)) watches `validation/loss`, but the Learner has no data for validation.\n"
        "  why:   the metric would never have a value, so the callback would have no effect\n"
        "  fix:   pass data for it to the Learner: `data=(training, validation)`\n"
        '     or: write "training/loss" as the metric, without `phase=`',
    ):
        build("loss", data=batches)
    # each fix, and callbacks that provide the data themselves
    build("loss", data=(batches, batches)).fit(1)
    build("training/loss", data=batches).fit(1)
    build("loss", GivesData(), data=batches).fit(2)
    build("loss", data=None)  # for hand-written loops


def test_a_learner_without_metrics_is_an_error():
    with pytest.raises(MissingStateError, match=r"`cbstate\.metrics_epoch`"):
        fluxcb.testing.testlearner(EarlyStopping(1))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: EarlyStopping(), "`EarlyStopping` has no criterion."),
        (lambda: EarlyStopping(0), "`patience` of EarlyStopping (epochs) must be a whole number of at least 1, not 0."),
        (lambda: EarlyStopping(True), "`EarlyStopping` takes criteria and numbers of epochs, not True."),
        (lambda: EarlyStopping("loss"), "`EarlyStopping` takes criteria and numbers of epochs, not 'loss'."),
        (lambda: EarlyStopping(Patience), f"`EarlyStopping` takes criteria and numbers of epochs, not {Patience!r}."),
        (lambda: EarlyStopping(("loss", 1.5)), "`EarlyStopping` takes criteria and numbers of epochs, not 1.5."),
        (
            lambda: EarlyStopping(("loss", 1, 2)),
            "`EarlyStopping` takes criteria and numbers of epochs, not ('loss', 1, 2).",
        ),
        (lambda: EarlyStopping(1, metric=""), "`EarlyStopping` takes the name of a metric, not ''."),
        (lambda: EarlyStopping(1, metric=Loss), f"`EarlyStopping` takes the name of a metric, not {Loss!r}."),
        (lambda: EarlyStopping(1, phase=3), "`EarlyStopping` takes a phase class with a name, not 3."),
        (lambda: EarlyStopping((3, 1)), "`EarlyStopping` takes criteria and numbers of epochs, not (3, 1)."),
        (lambda: EarlyStopping(()), "`EarlyStopping` takes criteria and numbers of epochs, not ()."),
        (
            lambda: EarlyStopping(1, mode=["max"]),
            '`mode` of `EarlyStopping` must be "min", "max" or "auto", not [\'max\'].',
        ),
        (
            lambda: EarlyStopping(PQ(), phase=TrainingPhase),
            "PQ() needs training losses in addition to the values that it watches, but `EarlyStopping` watches "
            "the training phase itself.",
        ),
        (
            lambda: EarlyStopping(PQ(), metric="training/loss"),
            "PQ() needs training losses in addition to the values that it watches, but `EarlyStopping` watches "
            "the training phase itself.",
        ),
        (
            lambda: EarlyStopping(("training/loss", 1), phase=ValidationPhase),
            '`EarlyStopping` was given the metric "training/loss" and the phase validation.',
        ),
        (
            lambda: EarlyStopping(1, train_metric="validation/loss", train_phase=TrainingPhase),
            '`EarlyStopping` was given the metric "validation/loss" and the phase training.',
        ),
        (
            lambda: EarlyStopping(1, 2).load_state_dict({"states": [None]}),
            "EarlyStopping(NumberSinceBest(n=1), NumberSinceBest(n=2)) has 2 criteria, but the saved state has 1.",
        ),
    ],
)
def test_bad_arguments(make, said):
    with pytest.raises(DeclarationError) as caught:
        make()
    assert caught.value.what == said
    assert caught.value.fix


def test_a_missing_training_metric_is_an_error_if_a_criterion_needs_it():
    stop = EarlyStopping(PQ(k=2), train_metric="los")
    match = r"EarlyStopping\(PQ\(k=2\)\) watches `training/los`, .* Did you mean `training/loss`\?"
    with pytest.raises(MissingStateError, match=match):
        learner([1.0], stop)
    learner([1.0], EarlyStopping(2, train_metric="los")).fit(1)  # this criterion needs no training losses


def test_writers_of_metrics_run_first():
    class Late(Callback):
        def stateaccess(self):
            return {"cbstate": {"metrics_epoch": Write()}}

        @on
        def add(self, event: Trigger, phase: AbstractTrainingPhase, learner):
            learner.cbstate.metrics_epoch.entry(ValidationPhase).add("late", learner.progress.epoch, 1.0)

    trained = learner([1.0] * 5, EarlyStopping(2, metric="late", mode="min"), Late())
    trained.fit(5)
    assert trained.epoch == 3
    assert trained.stop_reason == "validation/late: no improvement on 1 for 2 epochs (low values count as good)"
