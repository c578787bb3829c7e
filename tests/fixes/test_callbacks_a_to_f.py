"""The suggested fixes in the messages of callbacks, by module, from A to F."""

import pytest

from fluxcb import AccessError, ConflictError
from tests.fixes.programs import check_row, row

ROWS = [
    # arguments: numbers, one for each function that checks them
    row("must be a number above 0", "ClipGradients(-1.0)", "ClipGradients(1.0)"),
    row("must be a number of at least 0 and below 1", "ParameterEMA(1.0)", "ParameterEMA(0.99)"),
    # average, best_saver, by_phase, checkpointer
    row(
        "both replace the parameters for validation",
        "fluxcb.check([ParameterEMA(0.9, validate=True), StochasticWeightAveraging(1, validate=True)])",
        "fluxcb.check([ParameterEMA(0.9, validate=True), StochasticWeightAveraging(1, validate=False)])",
        kind=ConflictError,
    ),
    row(
        "ParameterEMA(0.9) and ParameterEMA(0.99) both keep their average in `cbstate.ema`.",
        "fluxcb.check([ParameterEMA(0.9), ParameterEMA(0.99)])",
        "fluxcb.check([ParameterEMA(0.9)])",
        """
        class SecondParameterEMA(ParameterEMA): entry = "second_ema"
        fluxcb.check([ParameterEMA(0.9), SecondParameterEMA(0.99, validate=False)])
        """,
        kind=ConflictError,
    ),
    row(
        "DynamicLossScale(32768.0, period=2000) and DynamicLossScale(8.0, period=2000) can never be used together",
        "fluxcb.check([DynamicLossScale(), DynamicLossScale(8.0)])",
        "fluxcb.check([DynamicLossScale()])",
        kind=ConflictError,
    ),
    row(
        "Recorder() and Recorder() #2 both keep their values in `cbstate.history`.",
        "fluxcb.check([Recorder(), Recorder()])",
        "fluxcb.check([Recorder()])",
        kind=ConflictError,
    ),
    row(
        "InferenceRunner('test') and InferenceRunner('test') #2 both keep their values in `cbstate.inference.test`.",
        """
        one, other = [InferenceRunner(BATCHES, ScalarStats("loss"), name="test") for _ in range(2)]
        fluxcb.check([one, other])
        """,
        'fluxcb.check([InferenceRunner(BATCHES, ScalarStats("loss"), name="test")])',
        """
        one, other = [InferenceRunner(BATCHES, ScalarStats("loss"), name=name) for name in ("test", "other")]
        fluxcb.check([one, other])
        """,
        kind=ConflictError,
    ),
    row(
        "`name` of MinSaver must begin with a letter",
        """MinSaver("runs/1", 'loss', name="3")""",
        """MinSaver("runs/1", 'loss', name="best")""",
    ),
    row(
        "3 is not a phase", "ByPhase(int)[3]", "values = ByPhase(int); values.entry('training'); values[TrainingPhase]"
    ),
    row(
        "takes one period, not",
        'Checkpointer("runs/1", steps=10, epochs=1)',
        'Checkpointer("runs/1", steps=1000)',
    ),
    row(
        "`keep_best` of Checkpointer",
        'Checkpointer("runs/1", steps=10, keep_best=2)',
        'fit(Metrics(), Checkpointer("runs/1", keep_best=2), data=(BATCHES, BATCHES))',
        """
        folder = "runs/1"
        fit(Metrics(), Checkpointer(folder, steps=1), MinSaver(folder, "loss"), data=(BATCHES, BATCHES))
        """,
    ),
    row(
        "without `keep_best`",
        'Checkpointer("runs/1", metric="accuracy")',
        'Checkpointer("runs/1", keep_best=1, metric="accuracy")',
        'Checkpointer("runs/1")',
    ),
    # command, see SendStat
    row(
        "must be a list of arguments, not the string",
        'SendStat("echo {loss}", ["loss"])',
        "SendStat(['echo', '{loss}'], ['loss'])",
        'SendStat("echo {loss}", ["loss"], shell=True)',
    ),
    row(
        "must be a list of arguments that begins",
        'SendStat([], "loss")',
        'SendStat(["notify-send", "loss {loss:.3f}"], "loss")',
    ),
    row(
        "` in the command of `SendStat` is not in `names`",
        "SendStat(['echo', '{loss} {los}'], 'loss')",
        "SendStat(['echo', '{loss} {los}'], ['loss', 'los'])",
        "SendStat(['echo', '{loss} {{los}}'], 'loss')  # }}",
    ),
    row(
        "must be a string, not",
        "SendStat(['echo', '{loss}'], 'loss', shell=True)",
        'SendStat("echo {loss} >> losses.txt", "loss", shell=True)',
    ),
    row(
        "does not use the statistic 'size'",
        "SendStat(['echo', '{loss}'], ['loss', 'size'])",
        "SendStat(['echo', '{loss} {size}'], ['loss', 'size'])",
        "SendStat(['echo', '{loss}'], ['loss'])",
    ),
    row(
        "does not use the statistic 'loss'",
        "SendStat(['echo'], 'loss')",
        "SendStat(['echo', '{loss}'], 'loss')",
    ),
    row(
        "has an invalid format for a number",
        "SendStat(['echo', '{loss:s}'], 'loss')",
        "SendStat(['echo', '{loss:.3f}'], 'loss')",
    ),
    row(
        "is inside single quotes",
        """SendStat("echo '{loss}'", "loss", shell=True)""",
        """SendStat("echo {loss}", "loss", shell=True)""",
        """SendStat('echo "{loss}"', "loss", shell=True)""",
    ),
    row("has an unmatched `{`", "SendStat(['echo', '{loss} {'], 'loss')", "SendStat(['echo', '{loss} {{'], 'loss')"),
    # conditional, custom, debugger
    row("takes an event class", "FrequencyThrottle(10, 3)", "FrequencyThrottle(10, StepEnd)"),
    row(
        "requires a host event",
        "TimeThrottle(10, BackwardEnd)",
        "freq, event = 10, BackwardEnd; FrequencyThrottle(freq, event); TimeThrottle(10, StepEnd)",
    ),
    row(
        "requires a `CallbackCondition`",
        "ConditionalCallback(Tick(), 3)",
        """
        class Always(CallbackCondition):
            def shouldrun(self, event, phase, learner): return True

        fit(ConditionalCallback(Tick(), FrequencyThrottle(10, StepEnd)), ConditionalCallback(Tick(), Always()))
        """,
        "callback, function = Tick(), lambda learner: True; fit(when(callback, function))",
    ),
    row(
        "may not read `step.loss`",
        "fit(CustomCallback(lambda learner: print(learner.step.loss), EpochEnd))",
        """
        fn = lambda learner: print(learner.step.loss)
        fit(CustomCallback(fn, StepEnd, access={"step": {"loss": Read()}}))
        """,
        kind=AccessError,
    ),
    row(
        "`fn` of `CustomCallback` must be a function of the learner, not 3",
        "CustomCallback(3, StepEnd)",
        "fit(CustomCallback(lambda learner: ..., StepEnd))",
    ),
    row(
        "`fn` of `CustomCallback` must run when it is called",
        """
        async def fn(learner): ...

        CustomCallback(fn, StepEnd)
        """,
        """
        def fn(learner): ...

        fit(CustomCallback(fn, StepEnd))
        """,
    ),
    row(
        "stands for several",
        "CustomCallback(lambda learner: ..., Event)",
        "fit(CustomCallback(lambda learner: ..., StepEnd))",
    ),
    row(
        "`fn` of `CustomCallback` must be a function of the learner; `<lambda>` takes",
        "CustomCallback(lambda event, learner: ..., StepEnd)",
        "fit(CustomCallback(lambda learner: ..., StepEnd))",
    ),
    row(
        "`condition` of `Debugger` must be a function",
        "Debugger(3)",
        "Debugger(lambda learner: learner.step.loss > 100)",
    ),
    row("must be JAX devices", "DeviceMemoryTracker([3])", "DeviceMemoryTracker(jax.local_devices())"),
    # dump_images
    row(
        "takes the path of one value",
        'DumpImages(["params.w", "params.b"], "images")',
        '[DumpImages("params.w", "images"), DumpImages("params.b", "images")]',
    ),
    row(
        "`map_fn` of `DumpImages` must be a function",
        'DumpImages("params.w", "images", map_fn=3)',
        'DumpImages("params.w", "images", map_fn=lambda kernel: kernel.transpose(3, 0, 1, 2))',
    ),
    row(
        "returned no images",
        'fit(DumpImages("params.w", "images", map_fn=lambda w: []))',
        'fit(DumpImages("params.w", "images", map_fn=lambda w: [w]))',
    ),
    # early_stopping, factory, freeze
    row(
        "takes criteria and numbers of epochs",
        'EarlyStopping("three")',
        'EarlyStopping(3), EarlyStopping(GL(5), TimeLimit(3600)), EarlyStopping(("accuracy", 3))',
    ),
    row(
        "`EarlyStopping` has no criterion",
        "EarlyStopping()",
        'EarlyStopping(3), EarlyStopping(GL(5), TimeLimit(3600)), EarlyStopping(("accuracy", 3))',
    ),
    row(
        "`EarlyStopping` has no attribute `patience`, so an assignment to it would have no effect.",
        """
        learner = fit(Metrics(), EarlyStopping(3), data=(BATCHES, BATCHES))
        learner.callbacks.get(EarlyStopping).patience = 50
        """,
        """
        learner = fit(Metrics(), EarlyStopping(3), data=(BATCHES, BATCHES))
        learner.callbacks.replace(EarlyStopping(patience=50))
        learner.fit(1)
        """,
    ),
    row(
        "`StopAfter` has no attribute `steps`, so an assignment to it would have no effect.",
        "learner = fit(StopAfter(3600)); learner.callbacks.get(StopAfter).steps = 50",
        "learner = fit(StopAfter(3600)); learner.callbacks.get(StopAfter)",
    ),
    row(
        "`patience` of `EarlyStopping`",
        'EarlyStopping(patience="3")',
        'EarlyStopping(3), EarlyStopping(GL(5), TimeLimit(3600)), EarlyStopping(("accuracy", 3))',
    ),
    row(
        "which applies to none of its criteria",
        'EarlyStopping(("accuracy", 3), mode="max")',
        'EarlyStopping(("accuracy", NumberSinceBest(3, mode="max")))',
        'EarlyStopping(3, metric="accuracy", mode="max")',
    ),
    row(
        "needs training losses in addition to the values that it watches",
        "EarlyStopping(PQ(2), phase=TrainingPhase)",
        "EarlyStopping(PQ(2)); EarlyStopping(3, phase=TrainingPhase)",
    ),
    row("`CallbackFactory` requires at least one", "CallbackFactory()", "CallbackFactory(trigger=lambda learner: ...)"),
    row("must be paths of parameters", "Freeze()", 'Freeze("encoder", "*.bias")'),
    row("was given epochs and steps", 'Freeze("encoder", epochs=3, steps=3)', 'Freeze("encoder", epochs=3)'),
    row("no parameter matches", 'learner(Freeze("v", steps=1))', 'learner(Freeze("w", steps=1))'),
]


@pytest.mark.parametrize("row", ROWS, ids=[row.says for row in ROWS])
def test_each_fix_works(row, tmp_path):
    check_row(row, tmp_path)
