"""The suggested fixes in the messages of callbacks, by module, from M to P."""

import pytest

from fluxcb import ConflictError, TraceError
from tests.fixes.programs import check_row, row

ROWS = [
    # metric
    row(
        "has no `compute(self, state)`",
        """
        class Mine(AbstractMetric):
            name = "mine"
            def init(self): return jnp.zeros(())
            def update(self, state, step, samples): return state

        fit(Metrics(Mine()))
        """,
        """
        class Mine(AbstractMetric):
            name = "mine"
            def init(self): return jnp.zeros(())
            def update(self, state, step, samples): return state
            def compute(self, state): return state

        assert fluxcb.callbacks.AbstractMetric is AbstractMetric
        fit(Metrics(Mine()))
        """,
    ),
    row("must be a phase class, or a tuple", "Metric(accuracy, phase=3)", "Metric(accuracy, phase=ValidationPhase)"),
    row("must be a function of outputs and targets, not 3", "Metric(3)", "Metric(accuracy)"),
    row(
        "The function of this metric has no name",
        "Metric(lambda outputs, ys: 0.0)",
        'fn = lambda outputs, ys: 0.0; Metric(fn, name="top5_accuracy")',
    ),
    row("`name` of `Metric` must be", "Metric(accuracy, name=3)", 'Metric(accuracy, name="top5_accuracy")'),
    row("`needs` of `Metric` must be", 'Metric(accuracy, needs="ys")', 'Metric(accuracy, needs=("outputs", "ys"))'),
    row(
        "The function of the metric `size` takes",
        """
        def size(outputs): return jnp.mean(outputs)

        Metric(size)
        """,
        """
        def size(outputs): return jnp.mean(outputs)
        def size2(outputs, ys): return jnp.mean(outputs)

        fit(Metrics(Metric(size, needs=("outputs",)), size2))
        """,
    ),
    row(
        "returned str",
        """
        def size(outputs, ys): return "large"

        fit(Metrics(size))
        """,
        """
        def size(outputs, ys): return jnp.mean(outputs)

        fit(Metrics(size))
        """,
    ),
    row(
        "returned an array of shape",
        """
        def size(outputs, ys): return outputs

        fit(Metrics(size))
        """,
        """
        def size(outputs, ys): return jnp.mean(outputs)

        fit(Metrics(size))
        """,
    ),
    # metrics
    row("takes metrics and functions", "Metrics(3)", "Metrics(accuracy)"),
    row(
        "changed the structure or shapes of its state",
        """
        class Mine(AbstractMetric):
            name = "mine"
            def init(self): return jnp.zeros(())
            def update(self, state, step, samples): return jnp.zeros(2)
            def compute(self, state): return state

        fit(Metrics(Mine()))
        """,
        """
        class Mine(AbstractMetric):
            name = "mine"
            def init(self): return jnp.zeros(())
            def update(self, state, step, samples): return state + 1
            def compute(self, state): return state

        Mine.update, fit(Metrics(Mine()))
        """,
    ),
    row(
        "needs `step.margin`",
        """
        class Margins(TrainingPhase):
            provides = {**TrainingPhase.provides, ForwardBegin: ("margin",)}
            def step(self, learner, emit):
                learner.step.margin = jnp.zeros(())
                super().step(learner, emit)

        metric = Metric(lambda margin: margin, "margin", needs=("margin",))
        fit(Metrics(metric), phases=[Margins(), ValidationPhase()], data=(BATCHES, BATCHES))
        """,
        """
        class Margins(TrainingPhase):
            provides = {**TrainingPhase.provides, ForwardBegin: ("margin",)}
            def step(self, learner, emit):
                learner.step.margin = jnp.zeros(())
                super().step(learner, emit)

        class AlsoMargins(ValidationPhase):
            provides = {**ValidationPhase.provides, ForwardBegin: ("margin",)}
            def step(self, learner, emit):
                learner.step.margin = jnp.zeros(())
                super().step(learner, emit)

        metric = Metric(lambda margin: margin, "margin", needs=("margin",))
        fit(Metrics(metric), phases=[Margins(), AlsoMargins()], data=(BATCHES, BATCHES))
        """,
        """
        class Margins(TrainingPhase):
            provides = {**TrainingPhase.provides, ForwardBegin: ("margin",)}
            def step(self, learner, emit):
                learner.step.margin = jnp.zeros(())
                super().step(learner, emit)

        metric = Metric(lambda margin: margin, "margin", needs=("margin",), phase=Margins)
        fit(Metrics(metric), phases=[Margins(), ValidationPhase()], data=(BATCHES, BATCHES))
        """,
    ),
    row("takes metrics, not the class", "Metrics(SmoothLoss)", "Metrics(SmoothLoss())"),
    row("takes metrics, not the class", "Metrics(ConfusionMatrix)", "Metrics(ConfusionMatrix(classes=1))"),
    row(
        "contains `aux.mae`, a part of a step value",
        """Metric(lambda mae: mae, "mae", needs=("aux.mae",))""",
        """Metric(lambda aux: aux["mae"], "mae", needs=("aux",))""",
    ),
    row(
        "contains more than one `Metrics`",
        "learner(Metrics(accuracy), Metrics(SmoothLoss()))",
        "learner(Metrics(accuracy, SmoothLoss(0.98)))",
        kind=ConflictError,
    ),
    row(
        "must be a tuple of phase classes, not",
        """
        class Mine(SmoothLoss):
            phases = 3

        Metrics(Mine())
        """,
        """
        class Mine(SmoothLoss):
            phases = (ValidationPhase,)

        fit(Metrics(Mine()), data=(BATCHES, BATCHES))
        """,
    ),
    row(
        "Two metrics are called",
        "Metrics(accuracy, accuracy)",
        'fn = accuracy; Metrics(Metric(fn, name="..."), accuracy)',
    ),
    row(
        "is an array of shape (2,), not one number",
        """
        class Mine(SmoothLoss):
            def compute(self, state): return jnp.zeros(2)

        fit(Metrics(Mine()))
        """,
        """
        class Mine(SmoothLoss):
            shape = (2,)
            def compute(self, state): return jnp.zeros(2)

        fit(Metrics(Mine()))
        """,
        """
        class Mine(SmoothLoss):
            def compute(self, state): return jnp.zeros(())

        Mine.compute, fit(Metrics(Mine()))
        """,
    ),
    # mixing
    row(
        "cannot mix `step.xs`: it contains int32",
        "fit(MixUp(), data=[(np.arange(4)[:, None], y) for _, y in BATCHES])",
        """
        source = [(np.arange(4)[:, None], y) for _, y in BATCHES]
        fit(MixUp(), data=fluxcb.data.map(lambda batch: (np.float32(batch[0]), batch[1]), source))
        model = (PAIR[0], lambda params, xs: xs[:, 0, 0] @ params["w"])
        images = [(np.zeros((4, 8, 8, 1), int), y) for _, y in BATCHES]
        fit(CutMix(), data=images, model=model)
        """,
        kind=TraceError,
    ),
    row("`axes` of CutMix must be", "CutMix(axes=(0, 1))", "CutMix(axes=(1, 2)), CutMix(axes=(2, 3))"),
    row(
        "cannot cut `step.xs`, which contains",
        "fit(CutMix())",
        """
        data = [(np.zeros((4, 8, 8, 1), np.float32), y) for _, y in BATCHES]
        model = (PAIR[0], lambda params, xs: xs[:, 0, 0] @ params["w"])
        fit(CutMix(axes=(1, 2)), data=data, model=model), fit(MixUp())
        """,
        kind=TraceError,
    ),
    # monitors
    row(
        "contains more than one `Monitors`",
        'fit(Metrics(), LogMetrics(), Monitors(JSONLinesBackend("a.jsonl")), Monitors(JSONLinesBackend("b.jsonl")))',
        "fit(Metrics(), LogMetrics(), Monitors(JSONLinesBackend('a.jsonl'), JSONLinesBackend('b.jsonl')))",
        kind=ConflictError,
    ),
    row(
        "Another callback has replaced the `cbstate.monitors`",
        """
        class Replaces(Callback):
            def stateaccess(self):
                return {"cbstate": {"monitors": Append()}}

            def init(self, learner):
                learner.cbstate.monitors = {}

        fit(Metrics(), LogMetrics(), Monitors(), Replaces())
        """,
        "fit(Metrics(), LogMetrics(), Monitors())  # `learner.cbstate.monitors`",
    ),
    # named_values
    row(
        "expects paths that begin with",
        'LogSummaries("loss")',
        'LogSummaries("step.loss")',
        'LogSummaries("hyperparams.learning_rate")',
    ),
    row("received the path `step.loss` twice", 'LogSummaries(["step.loss", "step.loss"])', 'LogSummaries("step.loss")'),
    row("`params` has no `v`", 'fit(PrintArrays("params.v"))', 'fit(PrintArrays("params"))'),
    # numbered_files
    row("`folder` of `DumpArrays` must be a path", 'DumpArrays("params", 3)', 'DumpArrays("params", "runs/1/dumps")'),
    row(
        "`prefix` of `DumpArrays`",
        'DumpArrays("params", "dumps", prefix="a/b")',
        'DumpArrays("params", "dumps", prefix="samples")',
    ),
    row(
        "cannot write to the folder",
        """
        open("file", "w").close()
        DumpArrays("params", "file/dumps")
        """,
        'DumpArrays("params", "dumps")',
    ),
    row(
        "which contains files of another run",
        'fit(DumpArrays("params", "dumps")), fit(DumpArrays("params", "dumps"))',
        'fit(DumpArrays("params", "1/dumps")), fit(DumpArrays("params", "2/dumps"))',
        """
        import os
        fit(DumpArrays("params", "dumps"))
        os.rename("dumps", "old")
        fit(DumpArrays("params", "dumps"))
        """,
    ),
    # numerics, periodic, plateau
    row("`at` of CheckNumerics", 'CheckNumerics(at="epoch")', 'CheckNumerics(at="step")'),
    row(
        "`PeriodicTrigger` requires",
        "PeriodicTrigger(Tick())",
        "callback = Tick(); PeriodicTrigger(callback, every_k_epochs=5)",
    ),
    row(
        "has no handler of Trigger",
        "PeriodicTrigger(Recorder(), every_k_epochs=5)",
        "callback = Recorder(); every(callback, steps=100), every(callback, epochs=5)",
    ),
    row(
        "`PeriodicCallback` requires",
        "PeriodicCallback(Tick())",
        "callback = Tick(); PeriodicCallback(callback, every_k_epochs=5)",
    ),
    row(
        "`pred` of `EnableCallbackIf` must be a function",
        "EnableCallbackIf(Tick(), 3)",
        "callback = Tick(); fit(EnableCallbackIf(callback, lambda learner: learner.progress.epoch > 3))",
    ),
    row(
        "which already has a period",
        "PeriodicTrigger(PeriodicTrigger(Tick(), every_k_steps=5), every_k_epochs=1)",
        "fit(PeriodicTrigger(Tick(), every_k_steps=5, every_k_epochs=1))",
    ),
    row("of `ReduceLROnPlateau` must be", "ReduceLROnPlateau(2.0)", "ReduceLROnPlateau(0.5, patience=5)"),
    # prediction_writer
    row(
        "`PredictionWriter` cannot write to",
        'PredictionWriter(".npz/a.npz"); open("a", "w").close(); PredictionWriter("a/b.npz")',
        'PredictionWriter("b.npz")',
    ),
    row("`path` of `PredictionWriter` must be a path", "PredictionWriter(3)", 'PredictionWriter("predictions.npz")'),
    row(
        "writes .npz and .jsonl files",
        'PredictionWriter("outputs.csv")',
        'PredictionWriter("outputs.npz"), PredictionWriter("outputs.jsonl")',
    ),
    row(
        "writes one value per sample",
        'fit(InferenceRunner(BATCHES, PredictionWriter("a.npz", ["loss"])))',
        'fit(InferenceRunner(BATCHES, PredictionWriter("a.npz", ["outputs"])))',
    ),
    # proc_or_thread
    row(
        "received an empty list",
        "StartProcOrThread([])",
        "import threading; StartProcOrThread([threading.Thread()], stop_at_last=False)",
    ),
    row(
        "must be callable without arguments",
        """
        def start(seconds): ...

        StartProcOrThread(start)
        """,
        """
        import threading

        def start(seconds): return threading.Thread(target=lambda: None)

        fit(StartProcOrThread(lambda: start(1), stop_at_last=False))
        """,
    ),
    row(
        "which is already running",
        """
        import subprocess, sys
        with subprocess.Popen([sys.executable, "-c", ""]) as process:
            StartProcOrThread(process)
        """,
        """
        import subprocess, sys
        fit(StartProcOrThread(lambda: subprocess.Popen([sys.executable, "-c", ""])))
        """,
    ),
    row(
        "accepts threads, processes and functions",
        "StartProcOrThread(3)",
        """
        import multiprocessing, subprocess, sys, threading
        threading.Thread, multiprocessing.Process
        StartProcOrThread(threading.Thread(), stop_at_last=False)
        StartProcOrThread(multiprocessing.get_context("spawn").Process())
        StartProcOrThread(lambda: subprocess.Popen([sys.executable, "-c", ""]))
        """,
    ),
    row(
        "because it has no method `stop()`",
        "import threading; StartProcOrThread(threading.Thread())",
        """
        import threading

        class Worker(threading.Thread):
            def __init__(self):
                super().__init__()
                self.stopped = threading.Event()
            def run(self): self.stopped.wait()
            def stop(self): self.stopped.set()

        assert Worker.stop and Worker.run
        fit(StartProcOrThread(Worker()))
        """,
        """
        import threading
        StartProcOrThread(threading.Thread(), stop_at_last=False)
        """,
    ),
    row(
        "has already been started",
        """
        from threading import Thread
        made = fit(StartProcOrThread(Thread(target=lambda: None), stop_at_last=False))
        made.fit(1)
        """,
        """
        from threading import Thread
        made = fit(StartProcOrThread(lambda: Thread(target=lambda: None), stop_at_last=False))
        made.fit(1)
        """,
    ),
    # process_arrays, profiler, progress
    row(
        "one per name",
        'ProcessArrays("params.w", lambda: None)',
        'fit(ProcessArrays("params.w", lambda w: None))',
    ),
    row("of `Profiler` must be a pair of", "Profiler('p', steps=3)", "Profiler('p', steps=(10, 20))"),
    row("of `Profiler` is after the last", "Profiler('p', steps=(20, 10))", "Profiler('p', steps=(10, 20))"),
    row("takes exactly one of `steps` and `epochs`", "Profiler('p')", "Profiler('profile', steps=(100, 120))"),
    row("`interval` of `ProgressBar`", "ProgressBar(interval=0)", "ProgressBar(interval=0.1)"),
]


@pytest.mark.parametrize("row", ROWS, ids=[row.says for row in ROWS])
def test_each_fix_works(row, tmp_path):
    check_row(row, tmp_path)
