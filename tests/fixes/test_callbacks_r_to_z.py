"""The suggested fixes in the messages of callbacks, by module, from R to Z."""

import pytest

from fluxcb import CheckpointError, ConflictError
from tests.fixes.programs import check_row, row

ROWS = [
    # run_function, sanity_check, sanity_checks
    row(
        "`run_step` of `RunFunction`",
        "RunFunction(lambda learner: ..., run_step=3)",
        "RunFunction(lambda learner: ..., run_step=True), RunFunction(lambda learner: ..., run_step=StepEnd)",
    ),
    row(
        "would never run",
        "RunFunction(lambda learner: ..., False, False)",
        """
        RunFunction(lambda learner: ..., run_before=True, run_as_trigger=False)
        RunFunction(lambda learner: ..., run_before=False, run_as_trigger=True)
        RunFunction(lambda learner: ..., False, False, run_step=True)
        """,
    ),
    row(
        "1 of 1 sanity checks failed",
        'fit(SanityCheck([Check(lambda learner: False, "never", "it never holds")]))',
        """
        fit(SanityCheck([Check(lambda learner: True, "always", "it holds")]))
        fit()
        """,
    ),
    row(
        "must be a `Check`, not 3",
        "SanityCheck([3])",
        'function = lambda learner: True; Check(function, "name", "message")',
    ),
    row(
        "The function of a `Check` must be a function",
        'Check(3, "name", "message")',
        'fit(SanityCheck([Check(lambda learner: learner.data.validation is not None, "name", "message")]), '
        "data=(BATCHES, BATCHES))",
    ),
    row(
        "of a `Check` must be a string",
        'Check(lambda learner: True, "name", 3)',
        'Check(lambda learner: True, "name", "There is no validation data.")',
    ),
    # scheduled_setter, scheduler
    row(
        "must be a list of pairs",
        "ScheduledHyperParamSetter(LearningRate, 3)",
        "ScheduledHyperParamSetter(LearningRate, [(0, 0.1), (30, 0.01)])",
    ),
    row(
        "`interp` of `ScheduledHyperParamSetter`",
        "ScheduledHyperParamSetter(LearningRate, [(0, 0.1)], 'cubic')",
        'ScheduledHyperParamSetter(LearningRate, [(0, 0.1)], "linear")',
    ),
    row(
        "cannot be set after steps",
        """
        tick = Tick(); tick.x = 1.0
        ScheduledHyperParamSetter(ObjAttrParam(tick, "x"), [(0, 0.1)], step_based=True)
        """,
        """
        tick = Tick(); tick.x = 1.0
        ScheduledHyperParamSetter(ObjAttrParam(tick, "x"), [(0, 0.1)])
        """,
        """
        tick = Tick(); tick.x = 1.0
        param, func = ObjAttrParam(tick, "x"), lambda epoch, current: 0.5
        fit(every(HyperParamSetterWithFunc(param, func), steps=100))
        """,
    ),
    row(
        "A point of the schedule of",
        "ScheduledHyperParamSetter(LearningRate, [(-1, 0.1)])",
        "ScheduledHyperParamSetter(LearningRate, [(0, 0.1), (30, 0.01)])",
    ),
    row(
        "must increase, but",
        "ScheduledHyperParamSetter(LearningRate, [(3, 0.1), (1, 0.2)])",
        "ScheduledHyperParamSetter(LearningRate, [(1, 0.2), (3, 0.1)])",
    ),
    row(
        "takes a mapping of hyperparameters",
        "Scheduler(optax.cosine_decay_schedule(1e-3, 1000))",
        "fit(Scheduler({LearningRate: optax.cosine_decay_schedule(1e-3, 1000)}))",
    ),
    row(
        "has two schedules for",
        "Scheduler({LearningRate: 0.1, 'learning_rate': 0.2})",
        "Scheduler({LearningRate: 0.1})",
    ),
    row(
        "must be a number or a function of the step, not",
        "Scheduler({LearningRate: 'cosine'})",
        "fit(Scheduler({LearningRate: optax.cosine_decay_schedule(1e-3, 1000)}))",
    ),
    row(
        "must be a number or a function of the step; `<lambda>` takes",
        "Scheduler({LearningRate: lambda: 0.1})",
        "fit(Scheduler({LearningRate: lambda step: 0.1 + 0 * step}))",
    ),
    row(
        "at every step, so the value that",
        "fluxcb.check([Scheduler({LearningRate: 0.1}), ReduceLROnPlateau()])",
        "fluxcb.check([Scheduler({LearningRate: 0.1})]), fluxcb.check([ReduceLROnPlateau()])",
        """
        warmup = ScheduledHyperParamSetter(LearningRate, [(0, 0.0), (500, 0.1)], "linear", step_based=True)
        fluxcb.check([warmup, ReduceLROnPlateau()])
        """,
        kind=ConflictError,
    ),
    # send_data, setters
    row(
        "sends to a URL or a function",
        'SendMonitorData(3, "loss")',
        'SendMonitorData("https://example.org/losses", "loss")',
        'SendMonitorData(print, "loss")',
    ),
    row(
        "has no `next_value(self, learner)`",
        """
        class Sets(HyperParamSetter): ...

        fit(Sets(LearningRate))
        """,
        """
        class Sets(HyperParamSetter):
            def next_value(self, learner): return 0.1 if learner.progress.epoch else None

        fit(Sets(LearningRate))
        """,
    ),
    row(
        "which is not a finite float32 number",
        "fit(HyperParamSetterWithFunc(LearningRate, lambda epoch, current: float('inf')))",
        """
        fit(HyperParamSetterWithFunc(LearningRate, lambda epoch, current: 0.1))
        fit(HyperParamSetterWithFunc(LearningRate, lambda epoch, current: None))
        """,
    ),
    row(
        "must be a function of the epoch and the current value, not 0.1",
        "HyperParamSetterWithFunc(LearningRate, 0.1)",
        "fit(HyperParamSetterWithFunc(LearningRate, lambda epoch, current: 0.9 * current))",
    ),
    row(
        "must be a function of the epoch and the current value; `<lambda>` takes",
        "HyperParamSetterWithFunc(LearningRate, lambda epoch: 0.1)",
        "fit(HyperParamSetterWithFunc(LearningRate, lambda epoch, current_value: 0.9 * current_value))",
    ),
    # snapshot_saver
    row("takes a directory, not 3", "Checkpointer(3)", 'Checkpointer("runs/1")'),
    row(
        "writes to a directory, but",
        'open("a", "w").close(); Checkpointer("a")',
        'Checkpointer("runs/1")',
    ),
    row(
        "contains checkpoints of another run",
        'fit(Checkpointer("a")), fit(Checkpointer("a"))',
        """
        fit(Checkpointer("a"))
        learner = learner(Checkpointer("a"))
        learner.fit(2, resume=True)
        assert learner.epoch == 2
        """,
        """
        import shutil
        fit(Checkpointer("a")), fit(Checkpointer("b"))
        shutil.rmtree("a")
        fit(Checkpointer("a"))
        """,
        kind=CheckpointError,
    ),
    row(
        "but their run is unknown",
        """
        from pathlib import Path
        fit(Checkpointer("a"))
        for manifest in Path("a").glob("*/fluxcb-manifest.json"):
            manifest.write_text("{")
        fit(Checkpointer("a"))
        """,
        """
        import shutil
        fit(Checkpointer("a")), fit(Checkpointer("b"))
        shutil.rmtree("a")
        fit(Checkpointer("a"))
        """,
        kind=CheckpointError,
    ),
    # stat_setter, statistics_sent
    row(
        "`value_func` of `StatMonitorParamSetter`",
        'StatMonitorParamSetter(LearningRate, "loss", 3, 0.01, 2)',
        'StatMonitorParamSetter(LearningRate, "loss", lambda rate: rate / 10, 0.01, 2)',
    ),
    row(
        "`threshold` of `StatMonitorParamSetter`",
        'StatMonitorParamSetter(LearningRate, "loss", lambda rate: rate / 10, -1, 2)',
        'StatMonitorParamSetter(LearningRate, "loss", lambda rate: rate / 10, 0.01, 2)',
    ),
    row(
        "must be the names of logged values",
        "SendMonitorData(print, [])",
        'SendMonitorData(print, ["validation/loss", "accuracy"])',
    ),
    row("contains 'loss' twice", "SendMonitorData(print, ['loss', 'loss'])", "SendMonitorData(print, ['loss'])"),
    # step_scalars, step_timeout, stop_after
    row(
        "takes single real numbers",
        'fit(Monitors(), MovingAverage("step.outputs"))',
        """
        def loss(params, batch, key):
            return loss_fn(batch[0] @ params["w"], batch[1]), {"size": jnp.mean(params["w"])}

        from_loss(loss, Monitors(), MovingAverage("step.aux.size")).fit(1)
        """,
    ),
    row("`action` of `StepTimeout`", 'StepTimeout(1, action="stop")', 'StepTimeout(1, action="warn")'),
    row("`seconds` of `StopAfter`", "StopAfter(seconds=-1)", "StopAfter(seconds=3600)"),
    # traces
    row(
        "must be functions of the learner by name",
        "Traces({}, access={})",
        'fit(Traces({"squared": lambda learner: learner.step.loss**2}, access={"step": {"loss": Read()}}))',
    ),
    row(
        "The trace `sq` must be a function",
        'Traces({"sq": 3}, access={})',
        'Traces({"sq": lambda learner: 3}, access={})',
    ),
    row(
        "`access` of `Traces` declares all of `step`",
        'Traces({"sq": lambda learner: learner.step.loss**2}, access={"step": Read()})',
        'fit(Traces({"squared": lambda learner: learner.step.loss**2}, access={"step": {"loss": Read()}}))',
    ),
    row(
        "but its functions only read",
        'Traces({"sq": lambda learner: learner.step.loss**2}, access={"step": {"loss": Write()}})',
        'fit(Traces({"squared": lambda learner: learner.step.loss**2}, access={"step": {"loss": Read()}}))',
    ),
    row(
        "a trace must be a number or an array",
        'fit(Traces({"sq": lambda learner: {"a": learner.step.loss}}, access={"step": {"loss": Read()}}))',
        'fit(Traces({"a": lambda learner: learner.step.loss}, access={"step": {"loss": Read()}}))',
    ),
    # watched
    row(
        "takes a phase class with a name",
        "EarlyStopping(3, phase=3)",
        "EarlyStopping(3, phase=ValidationPhase)",
    ),
    row(
        "`mode` of `EarlyStopping` must be",
        'EarlyStopping(3, metric="score", mode="maximum")',
        """EarlyStopping(3, metric="score", mode="max"), EarlyStopping(3, metric="score", mode="min")""",
        'EarlyStopping(3, metric="score")',
    ),
    row(
        "takes the name of a metric",
        "EarlyStopping(3, metric=3)",
        """
        EarlyStopping(3, metric="loss")
        EarlyStopping(3, metric="training/loss")
        learner(Metrics(accuracy), EarlyStopping(3, metric="accuracy"), data=(BATCHES, BATCHES))
        """,
    ),
    row(
        "and the phase validation",
        'EarlyStopping(3, metric="training/loss", phase=ValidationPhase)',
        'EarlyStopping(3, metric="training/loss"), EarlyStopping(3, metric="validation/loss", phase=ValidationPhase)',
        'EarlyStopping(3, metric="validation/training/loss")',
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=[row.says for row in ROWS])
def test_each_fix_works(row, tmp_path):
    check_row(row, tmp_path)
