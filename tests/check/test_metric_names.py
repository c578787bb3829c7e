"""Metric names are checked at construction: watched metrics must exist, and names must be unique."""

import numpy as np
import pytest

import fluxcb
from fluxcb import (
    Append,
    Callback,
    ConflictError,
    DeclarationError,
    MissingStateError,
    Read,
    Write,
    every,
    in_order,
    on,
)
from fluxcb._declare.state import METRICS
from fluxcb.callbacks import (
    ByPhase,
    Checkpointer,
    ClassificationError,
    EarlyStopping,
    EpochValues,
    HostMemoryTracker,
    InferenceRunner,
    LearningRate,
    LogMetrics,
    LogVisualization,
    MaxSaver,
    Metric,
    Metrics,
    MinSaver,
    Monitors,
    ReduceLROnPlateau,
    ScalarStats,
    SendMonitorData,
    SendStat,
    StatMonitorParamSetter,
    ThroughputTracker,
    Watched,
)
from fluxcb.events import EpochEnd, StepEnd, Trigger
from fluxcb.phases import AbstractTrainingPhase, AbstractValidationPhase, Phase, TrainingPhase, ValidationPhase
from fluxcb.testing import testlearner


def accuracy(outputs, ys):
    """Return the fraction of outputs near the target; the metric of fluxcb needs two or more classes."""
    return (abs(outputs - ys) < 0.5).mean()


BATCHES = [(np.ones((4, 1), np.float32), np.full((4, 1), 2, np.float32))]
WHY = "  why:   the metric would never have a value, so the callback would have no effect\n"


class Watches(Callback):
    def __init__(self, metric, phase=None):
        self.watched = Watched.named(metric, phase, "Watches")

    def stateaccess(self):
        return {"cbstate": {"metrics_epoch": Read()}}

    def watched_metrics(self):
        return (self.watched,)

    @on
    def look(self, event: Trigger, phase: TrainingPhase, learner): ...

    def __repr__(self):
        return f"Watches({self.watched})"


class Provides(Callback):
    """Provide a metric for one phase, without declaring its name."""

    def stateaccess(self):
        return {"cbstate": {"metrics_epoch": Write()}}

    def init(self, learner):
        learner.cbstate.metrics_epoch = ByPhase(EpochValues)

    @on
    def add(self, event: EpochEnd, phase: AbstractTrainingPhase, learner):
        learner.cbstate.metrics_epoch.entry(phase).add("mine", learner.progress.epoch, 1.0)


class Declares(Provides):
    def provided_metrics(self, phase):
        return ["mine"] if issubclass(phase, AbstractTrainingPhase) else []


class PhaseOfMine(AbstractValidationPhase):
    name = "mine"


def check(*callbacks, phases=(TrainingPhase, ValidationPhase)):
    return fluxcb.check(callbacks, phases=phases, default_callbacks=False)


# --- what is watched ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("present", "metric", "added", "written"),
    [
        ([], "val_accuracy", "Metrics(accuracy)", "validation/accuracy"),
        ([], "accuracy", "Metrics(accuracy)", None),
        ([], "acc", "Metrics(accuracy)", "validation/accuracy"),
        ([accuracy], "val_auroc", "Metrics(accuracy, AUROC())", "validation/auroc"),
        ([], "train_smooth_loss", "Metrics(SmoothLoss())", "training/smooth_loss"),
    ],
)
def test_fix_adds_metric_of_the_library(present, metric, added, written, refused):
    callback = EarlyStopping(3, metric=metric)
    names = [*("loss",), *(function.__name__ for function in present)]
    provided = [f"`{phase}/{name}`" for phase in ("training", "validation") for name in names]
    write = "" if written is None else f', and write "{written}" as the metric'
    with refused(
        MissingStateError,
        f"{callback!r} watches `validation/{metric}`, which no callback provides.\n"
        f"  where: the callbacks provide {', '.join(provided)}\n"
        f"{WHY}"
        f"  fix:   add the metric: `{added}`{write}\n"
        "     or: watch one of these metrics instead",
    ):
        check(Metrics(*present), callback)
    check(eval(added, vars(fluxcb.callbacks)), EarlyStopping(3, metric=written or metric))  # noqa: S307


def test_known_metrics_are_those_of_the_library():
    names = {code: Metrics(eval(code, vars(fluxcb.callbacks))).metrics[-1].name for code in METRICS.values()}  # noqa: S307
    assert names == {code: name for name, code in METRICS.items()}


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: EarlyStopping(3, metric="acuracy"),
        lambda folder: ReduceLROnPlateau(metric="acuracy"),
        lambda folder: StatMonitorParamSetter(LearningRate, "acuracy", lambda rate: rate, 0, 3),
        lambda folder: MinSaver(folder, "acuracy"),
        lambda folder: MaxSaver(folder, "acuracy"),
        lambda folder: Checkpointer(folder, keep_best=1, metric="acuracy"),
        lambda folder: every(EarlyStopping(3, metric="acuracy"), epochs=2),
    ],
    ids=[
        "EarlyStopping",
        "ReduceLROnPlateau",
        "StatMonitorParamSetter",
        "MinSaver",
        "MaxSaver",
        "Checkpointer",
        "every",
    ],
)
def test_misspelled_metric_raises_at_construction(make, tmp_path, refused):
    callback = make(tmp_path)
    text = (
        f"{callback!r} watches `validation/acuracy`, which no callback provides. "
        "Did you mean `validation/accuracy`?\n"
        "  where: the callbacks provide `training/loss`, `training/accuracy`, `validation/loss`, "
        "`validation/accuracy`\n"
        f"{WHY}"
        '  fix:   write "validation/accuracy" as the metric\n'
        '     or: add the metric: `Metrics(accuracy, Metric(fn, name="acuracy"))`'
    )
    with refused(MissingStateError, text):
        check(Metrics(accuracy), callback)
    with refused(MissingStateError, text):
        testlearner(Metrics(accuracy), callback)
    learner = testlearner(Metrics(accuracy))
    with refused(MissingStateError, text):
        learner.callbacks.add(callback)
    with refused(MissingStateError, text):
        learner.callbacks.set([Metrics(accuracy), callback])
    assert len(learner.callbacks) == 1
    # the second fix
    check(Metrics(accuracy, Metric(accuracy, name="acuracy")), callback)


def test_checkpointer_without_keep_best_watches_no_metric(tmp_path):
    check(Checkpointer(tmp_path))


@pytest.mark.parametrize(
    ("metric", "nearest"),
    [
        ("los", "validation/loss"),
        ("val_loss", "validation/loss"),  # the names of Keras
        ("train_loss", "training/loss"),
        ("test_error", "test/error"),
        ("trainig/loss", "training/loss"),
        ("training/accuracy", "validation/accuracy"),  # measured in validation only
        ("over/all", "validation/over/all"),  # a slash in the metric's own name
    ],
)
def test_error_suggests_nearest_metric(metric, nearest):
    of_validation = Metric(accuracy, phase=ValidationPhase)
    others = [
        Metrics(of_validation, Metric(accuracy, name="over/all", phase=ValidationPhase)),
        InferenceRunner(BATCHES, ClassificationError(), name="test"),
    ]
    with pytest.raises(MissingStateError) as caught:
        check(*others, Watches(metric))
    assert f" Did you mean `{nearest}`?" in caught.value.what
    alone = "" if str(Watched.named(metric, None, "")).split("/")[0] == nearest.split("/")[0] else ", without `phase=`"
    assert caught.value.fix[0] == f'write "{nearest}" as the metric{alone}'
    check(*others, Watches(nearest))


def test_metric_of_phase_that_does_not_run_raises(refused):
    with refused(
        MissingStateError,
        "Watches(mine/loss) watches `mine/loss`, which no callback provides. Did you mean `training/loss`?\n"
        "  where: the callbacks provide `training/loss`, `validation/loss`\n"
        f"{WHY}"
        '  fix:   write "training/loss" as the metric, without `phase=`\n'
        '     or: add a callback that provides it, e.g. `InferenceRunner(data, ScalarStats("loss"), name="mine")`',
    ):
        check(Metrics(), Watches("loss", PhaseOfMine))
    check(Metrics(), Watches("loss", PhaseOfMine), phases=(TrainingPhase, PhaseOfMine))
    check(Metrics(), Watches("mine/loss"), InferenceRunner(BATCHES, ScalarStats("loss"), name="mine"))


def test_callback_without_provided_metrics_may_provide_any_metric():
    check(fluxcb.in_order(Metrics(), Provides()), Watches("training/mine"), Watches("test/anything"))


def test_callback_with_provided_metrics_provides_only_these():
    check(Declares(), Watches("training/mine"))
    for wrong in ("validation/mine", "training/other", "test/mine"):
        with pytest.raises(MissingStateError, match="which no callback provides"):
            check(Declares(), Watches(wrong))


def test_wrapper_forwards_metric_names():
    wrapped = every(InferenceRunner(BATCHES, ScalarStats("loss"), name="test"), epochs=2)
    check(wrapped, every(Watches("test/loss"), epochs=2))
    with pytest.raises(MissingStateError, match=r"watches `test/los`, .* Did you mean `test/loss`"):
        check(wrapped, every(Watches("test/los"), epochs=2))


def test_inferencer_without_declared_statistics_may_provide_any():
    class Unknown(ScalarStats):
        def after(self):
            return {"anything": 1.0}

    check(Metrics(), InferenceRunner(BATCHES, Unknown("loss"), name="test"), Watches("test/anything"))
    with pytest.raises(MissingStateError, match="watches `validation/anything`"):
        check(Metrics(), InferenceRunner(BATCHES, Unknown("loss"), name="test"), Watches("anything"))


def test_all_misspelled_metrics_are_reported_together():
    with pytest.raises(fluxcb.CheckError, match=r"^2 problems were found") as caught:
        check(Metrics(), Watches("los"), Watches("lss"))
    assert [problem.what.split(",")[0] for problem in caught.value.problems] == [
        "Watches(validation/los) watches `validation/los`",
        "Watches(validation/lss) watches `validation/lss`",
    ]


def test_error_suggests_adding_metrics_callback():
    with pytest.raises(MissingStateError, match=r"reads `cbstate\.metrics_epoch`, which no callback creates"):
        check(Watches("los"))


def test_statistic_does_not_need_phase_data():
    runner = InferenceRunner(BATCHES, ScalarStats("loss"), name="validation")
    testlearner(runner, EarlyStopping(3), validation_batches=0)


@pytest.mark.parametrize(
    ("method", "returned", "text"),
    [
        ("provided_metrics", "loss", "must return a collection of names or None, not 'loss'."),
        ("provided_metrics", [3], "must return a collection of names or None, not [3]."),
        ("logged_names", "loss", "must return a collection of names or None, not 'loss'."),
        ("watched_metrics", ["loss"], "returned 'loss', which is not a `Watched`."),
    ],
)
def test_provided_metrics_of_wrong_type_raises(method, returned, text):
    cls = type("Wrong", (Provides,), {method: lambda self, *_: returned})
    with pytest.raises(DeclarationError) as caught:
        check(cls(), Metrics())
    assert caught.value.what == f"`Wrong.{method}` {text}"


def test_metric_names_of_built_in_callbacks():
    metrics = Metrics(accuracy, Metric(accuracy, name="top", phase=ValidationPhase))
    runner = InferenceRunner(BATCHES, [ScalarStats("loss"), ClassificationError()], name="test")
    assert list(metrics.provided_metrics(TrainingPhase)) == ["loss", "accuracy"]
    assert list(metrics.provided_metrics(ValidationPhase)) == ["loss", "accuracy", "top"]
    assert [list(runner.provided_metrics(phase)) for phase in runner.metric_phases()] == [["loss", "error"]]
    assert list(runner.provided_metrics(ValidationPhase)) == []
    assert Watches("loss").provided_metrics(Phase) == ()
    assert Provides().provided_metrics(Phase) is None
    assert Monitors().logged_names({}) == ()
    assert LogMetrics().logged_names({TrainingPhase: ["loss"], ValidationPhase: ["loss"]}) == [
        "training/loss",
        "training/step/loss",
        "validation/loss",
    ]


# --- names that two callbacks use -----------------------------------------------------------------------------------


def test_two_inference_runners_with_same_name_raise(refused):
    class Other(InferenceRunner):
        def stateaccess(self):
            return {**super().stateaccess(), "cbstate": {"metrics_epoch": Write()}}

    one, other = (cls(BATCHES, ScalarStats("loss"), name="test") for cls in (InferenceRunner, Other))
    with pytest.raises(ConflictError, match="both"):
        check(one, InferenceRunner(BATCHES, ScalarStats("loss"), name="test"))
    with refused(
        ConflictError,
        "InferenceRunner('test') and Other('test') both provide the metric `test/loss`.\n"
        "  why:   values are stored by name, so the values of both would be mixed\n"
        "  fix:   rename the values of one of the two",
    ):
        check(fluxcb.in_order(one, other))
    check(one, InferenceRunner(BATCHES, ScalarStats("loss"), name="other"))


def test_inference_runner_named_like_measured_phase_raises(refused):
    runner = InferenceRunner(BATCHES, ScalarStats("loss"), name="validation")
    with refused(
        ConflictError,
        "Metrics() and InferenceRunner('validation') both provide the metric `validation/loss`.\n"
        "  why:   values are stored by name, so the values of both would be mixed\n"
        "  fix:   rename the values of one of the two",
    ):
        check(Metrics(), runner)
    check(Metrics(), InferenceRunner(BATCHES, ScalarStats("loss"), name="test"))
    errors = InferenceRunner(BATCHES, ClassificationError(), name="validation")
    check(Metrics(), errors, Watches("validation/error"), LogMetrics(), Monitors())


def test_two_log_metrics_raise(refused):
    text = (
        "LogMetrics() and LogMetrics() #2 both log `training/loss` and `training/step/loss` and 1 more.\n"
        "  why:   values are stored by name, so the values of both would be mixed\n"
        "  fix:   remove one `LogMetrics` from the callbacks\n"
        "     or: use another name for one of the two, if it accepts a name"
    )
    with refused(ConflictError, text):
        check(Metrics(), Monitors(), LogMetrics(), LogMetrics())
    with refused(ConflictError, text):
        testlearner(Metrics(), Monitors(), LogMetrics(), LogMetrics())
    check(Metrics(), Monitors(), LogMetrics())


# --- names of logged values -----------------------------------------------------------------------------------------


def sending(name):
    return [SendStat(["echo", "{" + name + "}"], name), SendMonitorData(print, [name])]


@pytest.mark.parametrize(
    ("name", "near"),
    [("validation/acuracy", "validation/accuracy"), ("loss", "training/loss"), ("something else", None)],
)
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("wrap", [lambda callback: callback, lambda callback: every(callback, epochs=2)])
def test_watched_log_value_without_logger_raises(name, near, which, wrap, refused):
    callback = wrap(sending(name)[which])
    label = repr(callback) if not hasattr(callback, "callback") else f"{callback.callback!r} at EveryEpochs(epochs=2)"
    hint = f" Did you mean `{near}`?" if near else ""
    write = f'write "{near}" as the name\n     or: ' if near else ""
    with refused(
        MissingStateError,
        f"{label} reads the logged value `{name}`, which no callback logs.{hint}\n"
        "  where: the callbacks log `training/loss`, `training/accuracy`, `validation/loss`, `validation/accuracy`\n"
        "  why:   the value would never exist\n"
        f"  fix:   {write}log the value in a callback of your own: "
        f'`learner.cbstate.monitors.put_scalar("{name}", value)`',
    ):
        check(Metrics(accuracy), Monitors(), LogMetrics(steps=False), callback)
    if near:
        check(Metrics(accuracy), Monitors(), LogMetrics(steps=False), wrap(sending(near)[which]))


def test_error_suggests_log_metrics_for_unlogged_metric():
    callbacks = [Metrics(), Monitors(), ThroughputTracker(), *sending("validation/loss")[:1]]
    with pytest.raises(MissingStateError) as caught:
        check(*callbacks)
    assert caught.value.fix[0] == "add `LogMetrics()` to the callbacks"
    check(*callbacks, LogMetrics())


class Logs(Callback):
    """Log a value, without declaring its name."""

    def stateaccess(self):
        return {"cbstate": {"monitors": Append()}}

    @on
    def log(self, event: EpochEnd, phase: AbstractTrainingPhase, learner):
        learner.cbstate.monitors.put_scalar("own", 1.0)


class LogsNamed(Logs):
    def logged_names(self, metrics):
        return ["own"]


def test_callback_with_logged_names_provides_value():
    check(Metrics(), Monitors(), LogsNamed(), *sending("own"))


@pytest.mark.parametrize(
    "callbacks",
    [
        lambda: [Metrics(), Monitors(), LogMetrics(), Logs()],
        lambda: [in_order(Metrics(), Provides()), Monitors(), LogMetrics()],
    ],
)
def test_watched_names_may_be_logged_by_callback_with_unknown_names(callbacks):
    check(*callbacks(), *sending("any name"))


def test_trackers_declare_logged_names():
    names = ["Throughput (steps/sec)", "Throughput now (samples/sec)", "HostFreeMemory (GB)", "a picture"]
    trackers = [ThroughputTracker(), ThroughputTracker(2), HostMemoryTracker()]
    visualize = LogVisualization(lambda loss: loss, ["step.loss"], name="a picture")
    check(Metrics(), Monitors(), *trackers, visualize, SendMonitorData(print, names))


class LogsDeclaredName(Callback):
    def stateaccess(self):
        return {"step": {"loss": Read()}, "cbstate": {"monitors": {"own/loss": Append()}}}

    @on
    def log(self, event: StepEnd, phase: TrainingPhase, learner):
        learner.cbstate.monitors.put_scalar("own/loss", learner.step.loss)


class LogsItAsWell(LogsDeclaredName):
    pass


def test_two_callbacks_that_declare_one_logged_name_raise(refused):
    text = (
        "LogsDeclaredName() and LogsItAsWell() both log `own/loss`.\n"
        "  why:   values are stored by name, so the values of both would be mixed\n"
        "  fix:   rename the values of one of the two"
    )
    with refused(ConflictError, text):
        check(LogsDeclaredName(), LogsItAsWell(), Monitors())
    check(LogsDeclaredName(), Monitors())
