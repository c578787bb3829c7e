"""Naming a metric with its phase, as in logs."""

import numpy as np
import pytest

from fluxcb import Callback, CheckError, DeclarationError, Read, callbacks_as_hook, every, on
from fluxcb.callbacks import (
    ByPhase,
    Checkpointer,
    EarlyStopping,
    EpochValues,
    InferenceRunner,
    LogMetrics,
    MaxSaver,
    Metric,
    Metrics,
    MinSaver,
    Monitors,
    PeriodicTrigger,
    ReduceLROnPlateau,
    ScalarStats,
    Watched,
)
from fluxcb.events import Trigger
from fluxcb.phases import AbstractTrainingPhase, AbstractValidationPhase, TrainingPhase
from fluxcb.stopping import GL, NumberLimit, NumberSinceBest
from fluxcb.testing import testlearner

BATCHES = [(np.ones((4, 1), np.float32), np.full((4, 1), 2, np.float32))]  # a point on the line that `testlearner` fits


class Named(AbstractValidationPhase):
    name = "test"


class Look(Callback):
    """Record the watched value of each epoch."""

    def __init__(self, *watched):
        self.watched, self.seen = watched, []

    def stateaccess(self):
        return {"cbstate": {"metrics_epoch": Read()}}

    @on(Trigger, AbstractTrainingPhase)
    def look(self, event, phase, learner):
        metrics, epoch = learner.cbstate.metrics_epoch, learner.progress.epoch
        self.seen.append([watched.at(metrics, epoch) for watched in self.watched])


class Watches(Look):
    def watched_metrics(self):
        return self.watched


def of(**phases):
    """Return a `cbstate.metrics_epoch` with a value in epoch 1 for each of the given metrics."""
    metrics = ByPhase(EpochValues)
    for phase, names in phases.items():
        entry = metrics.entry(phase)
        for name in names:
            entry.add(name, 1, 0.5)
    return metrics


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        (
            "max",
            "accuracy acc Accuracy top5_acc top-5-accuracy accuracy_top5 auc auroc f1 f1_macro recall@10 precision",
        ),
        ("max", "mAP mean_iou miou r2 r2_score validation/accuracy test/loss/accuracy dice bleu ndcg@5"),
        ("min", "loss error mse perplexity brier_score fid_score accuracy/loss inaccuracy mse_2 val_mae2 ce kl_div"),
        ("min", "cross_entropy categorical_crossentropy bits_per_dim_loss wer cer ppl nll bpd regret top1_error"),
        ("min", "cosine_distance edit-distance step_time generalization_gap cost false_positive_rate divergence"),
        ("max", "kappa cohen_kappa mcc auprc psnr ssim hit_rate hits@10 reward log_likelihood 1-shot_acc mrr"),
        (
            "max",
            "top1 top5 top-5 top_1 validation/top/5 acc1 prec1 score val_score",
        ),
        ("max", "exact_match exact-match em EM success_rate"),
        ("max", "win_rate pass@1 pass@k pass_at_10 pass_rate snr si_snr correlation pearson spearman bleu4 mAP50"),
        ("max", "cosine_similarity inception_score throughput"),
        ("min", "1-accuracy 1-acc_top5 one_minus_accuracy negative_log_likelihood neg_accuracy incorrect miss_rate"),
        ("min", "dice_loss iou_loss map_error recall_err accuracy_loss validation/loss 損失"),
    ],
)
def test_the_name_implies_whether_high_values_are_good(mode, names):
    names = names.split()
    assert {name: Watched.named(name, None, "Look").default_mode for name in names} == dict.fromkeys(names, mode)


UNKNOWN = """
    sharpness elbo entropy accelerate mapping f10 stop_1 laptop5 passing matching distance_correlation accuracy_gap
    time_to_accuracy neg_mean_squared_error neg_log_loss
"""


@pytest.mark.parametrize("name", UNKNOWN.split())
def test_low_values_count_as_good_for_a_name_that_implies_no_mode(name):
    watched = Watched.named(name, None, "Look")
    assert (watched.known_mode, watched.certain_mode, watched.default_mode) == (None, None, "min")


def test_a_word_with_a_usual_direction_does_not_contradict_a_mode():
    for name, usual in {"score": "max", "similarity": "max", "distance": "min", "survival_time": "min"}.items():
        watched = Watched.named(name, None, "Look")
        assert (watched.known_mode, watched.certain_mode) == (usual, None)
        for mode in ("min", "max"):
            ReduceLROnPlateau(metric=name, mode=mode)
        MinSaver("never-written", name)
        MaxSaver("never-written", name)


UNCLEAR = (
    "The name of `validation/sharpness` does not say whether low or high values are good, so low values count as good "
    "in `{}`. Write `{}` if high values are good, or `{}` if low values are good."
)


def sharpness(*callbacks):
    metric = Metric(lambda outputs, ys: outputs.mean(), name="sharpness")
    return testlearner(Metrics(metric), *callbacks)


@pytest.mark.parametrize(
    ("make", "owner"),
    [
        (lambda folder, **how: EarlyStopping(3, metric="sharpness", **how), "EarlyStopping"),
        (lambda folder, **how: EarlyStopping(patience=3, metric="sharpness", **how), "EarlyStopping"),
        (lambda folder, **how: EarlyStopping(GL(5), metric="sharpness", **how), "EarlyStopping"),
        (lambda folder, **how: EarlyStopping(3, GL(5), metric="sharpness", **how), "EarlyStopping"),
        (lambda folder, **how: every(EarlyStopping(3, metric="sharpness", **how), epochs=2), "EarlyStopping"),
        (lambda folder, **how: ReduceLROnPlateau(metric="sharpness", **how), "ReduceLROnPlateau"),
        (lambda folder, **how: Checkpointer(folder, keep_best=1, metric="sharpness", **how), "Checkpointer"),
    ],
)
def test_a_name_that_implies_no_mode_is_one_warning_whose_fixes_work(make, owner, tmp_path):
    for how in ({}, {"mode": "auto"}):
        callback = make(tmp_path, **how)
        with pytest.warns(UserWarning, match="low values count as good") as caught:
            learner = sharpness(callback)
        [found] = caught
        high, low = (f'{owner}(..., mode="{mode}")' for mode in ("max", "min"))
        assert str(found.message) == UNCLEAR.format(owner, high, low)
        assert found.filename == __file__
        learner.callbacks.add(EarlyStopping(3))  # another change of the list does not warn again
    for mode in ("min", "max"):
        sharpness(make(tmp_path, mode=mode))


def test_the_fix_for_a_pair_gives_its_criterion_a_mode():
    with pytest.warns(UserWarning, match="low values count as good") as caught:
        sharpness(EarlyStopping(("sharpness", 3), mode=None))
    [found] = caught
    high, low = (f"EarlyStopping((\"sharpness\", NumberSinceBest(mode='{mode}', n=3)))" for mode in ("max", "min"))
    assert str(found.message) == UNCLEAR.format("EarlyStopping", high, low)
    for code in (high, low):
        sharpness(eval(code, {"EarlyStopping": EarlyStopping, "NumberSinceBest": NumberSinceBest}))  # noqa: S307


def test_callbacks_that_guess_no_mode_give_no_warning(tmp_path):
    sharpness(
        MinSaver(tmp_path, "sharpness"),
        MaxSaver(tmp_path, "sharpness"),
        Checkpointer(tmp_path),
        EarlyStopping(("sharpness", NumberLimit(3)), ("sharpness", GL(3, mode="min"))),
        EarlyStopping(NumberLimit(3), GL(3, mode="min"), metric="sharpness"),
    )


def test_a_name_that_does_not_exist_is_only_an_error():
    with pytest.raises(CheckError, match="Did you mean `validation/sharpness`"):
        sharpness(EarlyStopping(3, metric="sharpnes"))


def test_the_hook_of_a_loop_warns_as_well():
    metric = Metric(lambda sharpness: sharpness, name="sharpness", needs=("sharpness",))
    callbacks = [Metrics(metric), EarlyStopping(3, metric="training/sharpness")]
    with pytest.warns(UserWarning, match=r"name of `training/sharpness` does not say"):
        callbacks_as_hook(callbacks, {"loss": 0.0, "sharpness": 0.0})


@pytest.mark.parametrize(
    ("text", "phase", "expected"),
    [
        ("loss", None, "validation/loss"),
        ("loss", TrainingPhase, "training/loss"),
        ("loss", Named(), "test/loss"),
        ("training/loss", None, "training/loss"),
        ("training/loss", TrainingPhase(), "training/loss"),
        ("inference/loss", "inference", "inference/loss"),
        ("validation/top/5", None, "validation/top/5"),
    ],
)
def test_a_name_with_or_without_its_phase(text, phase, expected):
    watched = Watched.named(text, phase, "Mine")
    assert str(watched) == expected
    assert Watched.named(str(watched), None, "Mine") == watched
    assert watched.metric == expected.removeprefix(f"{watched.phase}/")


def test_the_default_is_for_names_without_a_phase():
    assert str(Watched.named("loss", None, "Mine", default=TrainingPhase)) == "training/loss"
    assert str(Watched.named("test/loss", None, "Mine", default=TrainingPhase)) == "test/loss"
    assert str(Watched.named("loss", "test", "Mine", default=TrainingPhase)) == "test/loss"


@pytest.mark.parametrize("text", ["", "/", "/loss", "training/", 3, None, Metrics])
def test_invalid_names(text):
    with pytest.raises(DeclarationError) as error:
        Watched.named(text, None, "Mine")
    assert str(error.value) == (
        f"`Mine` takes the name of a metric, not {text!r}.\n"
        '  fix:   write e.g. `"loss"`, `"training/loss"`, or `"accuracy"` with a `Metrics(accuracy)`'
    )


def test_two_different_phases_for_one_metric_are_an_error():
    with pytest.raises(DeclarationError) as error:
        Watched.named("training/loss", "validation", "Mine")
    assert str(error.value) == (
        '`Mine` was given the metric "training/loss" and the phase validation.\n'
        "  why:   the part before the first slash is a phase, so two different phases are named\n"
        '  fix:   name only one phase: leave out `phase=`, or write `"validation/loss"`\n'
        '     or: write `"validation/training/loss"` if the metric itself is called "training/loss"'
    )


def test_every_logged_epoch_value_can_be_watched_by_its_logged_name():
    slashed = Metric(lambda outputs, ys: (outputs > ys).mean(), name="over/all")
    watched = [
        Watched.named(f"{phase}/{name}", None, "Look")
        for phase in ("training", "validation")
        for name in ("loss", "over/all")
    ]
    watched.append(Watched.named("test/loss", None, "Look"))
    look = Look(*watched)
    runner = InferenceRunner(BATCHES, ScalarStats("loss"), name="test")
    learner = testlearner(Metrics(slashed), LogMetrics(steps=False), runner, look, Monitors())
    learner.fit(2)
    monitors = learner.cbstate["monitors"]
    assert sorted(monitors.names()) == sorted(map(str, watched))
    assert look.seen[-1] == [monitors.latest(str(one)) for one in watched]


@pytest.mark.filterwarnings("ignore:`EarlyStopping:UserWarning")
def test_a_runner_that_is_not_yet_due_has_no_value():
    stop = EarlyStopping(1, metric="inference/loss", mode="max")
    learner = testlearner(every(InferenceRunner(BATCHES, ScalarStats("loss")), epochs=2), stop)
    learner.fit(10)
    # With `max`, a decreasing loss is no improvement. The second value is that of epoch 4.
    assert learner.epoch == 4
    assert learner.stop_reason.startswith("inference/loss: no improvement on ")


def test_a_missing_statistic_is_reported_after_the_runner_has_run():
    class Unknown(ScalarStats):
        def after(self):
            return dict(super().after())

    stop = EarlyStopping(1, metric="inference/los", mode="min")
    learner = testlearner(every(InferenceRunner(BATCHES, Unknown("loss")), epochs=2), stop)
    with pytest.raises(DeclarationError) as error:
        learner.fit(10)
    assert error.value.what == (
        "EarlyStopping watches `inference/los`, which has no value in epoch 2. Did you mean `loss`?"
    )


@pytest.mark.parametrize(
    ("text", "metrics", "message"),
    [
        (
            "validaton/loss",
            of(training=["loss"], validation=["loss"]),
            "Mine watches `validaton/loss`, which has no value in epoch 1. Did you mean `validation`?\n"
            "  where: available metrics: `training/loss`, `validation/loss`\n"
            "  why:   without a value of its metric, the callback would do nothing\n"
            "  fix:   name one of these\n"
            '     or: add a callback for it: `InferenceRunner(data, ScalarStats("loss"), name="validaton")`',
        ),
        (
            "top/5",
            of(training=["loss"], validation=["top/5"]),
            "Mine watches `top/5`, which has no value in epoch 1. Did you mean `validation/top/5`?\n"
            "  where: available metrics: `training/loss`, `validation/top/5`\n"
            "  why:   without a value of its metric, the callback would do nothing\n"
            "  fix:   name one of these\n"
            '     or: add a callback for it: `InferenceRunner(data, ScalarStats("loss"), name="top")`',
        ),
        (
            "training/step/loss",
            of(training=["loss"]),
            "Mine watches `training/step/loss`, which has no value in epoch 1. Did you mean `loss`?\n"
            "  where: available metrics: `training/loss`\n"
            "  why:   without a value of its metric, the callback would do nothing\n"
            "  fix:   name one of these\n"
            '     or: add it: `Metrics(Metric(fn, name="step/loss"))`',
        ),
    ],
)
def test_a_metric_without_values_is_an_error(text, metrics, message):
    with pytest.raises(DeclarationError) as error:
        Watched.named(text, None, "Mine").at(metrics, 1)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("wrap", "when"),
    [
        (lambda callback: every(callback, steps=4), "every 4 steps"),
        (lambda callback: every(callback, seconds=1), "every second"),
        (lambda callback: every(every(callback, epochs=1), steps=3), "every 3 steps"),
        (lambda callback: PeriodicTrigger(callback, every_k_steps=2), "every 2 steps"),
    ],
)
def test_a_watcher_that_never_runs_after_an_epoch_is_an_error(wrap, when):
    with pytest.raises(DeclarationError) as error:
        testlearner(wrap(EarlyStopping(2)), Metrics())
    assert error.value.what.endswith(f" watches `validation/loss`, and runs only within epochs ({when}).")
    assert error.value.fix == ("give the period in epochs, e.g. `every(callback, epochs=1)`",)


def test_watchers_that_run_after_some_epochs_or_beside_a_runner_are_accepted():
    testlearner(every(EarlyStopping(2), epochs=2), Metrics())
    testlearner(PeriodicTrigger(EarlyStopping(2), every_k_steps=2, every_k_epochs=1), Metrics())
    runner = InferenceRunner(BATCHES, ScalarStats("loss"), name="held_out")
    testlearner(every(runner, steps=2), every(Watches(Watched.named("held_out/loss", None, "Look")), steps=2))


def test_an_epoch_that_has_not_ended():
    assert Watched.named("loss", None, "Mine").at(of(), 1) is None
    assert Watched.named("valid/loss", None, "Mine").at(of(training=["loss"]), 2) is None


def test_an_epoch_without_a_value():
    watched = Watched.named("validation/loss", None, "Mine")
    assert [watched.at(of(validation=["loss"]), epoch) for epoch in (1, 2)] == [0.5, None]
