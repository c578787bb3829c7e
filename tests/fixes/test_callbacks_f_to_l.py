"""The suggested fixes in the messages of callbacks, by module, from F to L."""

import pytest

from fluxcb import DataError
from tests.fixes.programs import check_row, row

ROWS = [
    # functions, garbage
    row(
        "`fn` of `RunFunction` must be a function of the learner",
        "RunFunction(3)",
        "RunFunction(lambda learner: ...)",
    ),
    row(
        "`fn` of `RunFunction` must run when it is called",
        """
        def show(learner):
            yield

        RunFunction(show)
        """,
        """
        def show(learner): ...

        RunFunction(show)
        """,
    ),
    row(
        "`fn` of `RunFunction` must be a function of the learner; `show` takes ()",
        """
        def show(): ...

        RunFunction(show)
        """,
        """
        def show(learner): ...

        RunFunction(show)
        """,
    ),
    row("was given steps and epochs", "GarbageCollect(100, epochs=1)", "GarbageCollect(100)"),
    # gpu_utilization, without a GPU
    row(
        "must be a list of GPU numbers",
        "GPUUtilizationTracker([0.5])",
        'GPUUtilizationTracker([0, 1]); GPUUtilizationTracker(["GPU-8d6b..."])  # nvidia-smi -L',
    ),
    # hooks
    row(
        "requires a function of the step number",
        "HookToCallback(3)",
        "HookToCallback(lambda step: ...)",
    ),
    row(
        "requires a function of the step number, or an object with methods, not <class",
        """
        class Hook:
            def after_step(self, step): ...

        HookToCallback(Hook)
        """,
        """
        class Hook:
            def after_step(self, step): ...

        fit(HookToCallback(Hook()))
        """,
    ),
    row(
        "must be a list of names",
        'HookToCallback(lambda step, values: ..., values="loss")',
        'hook = lambda step, values: ...; fit(HookToCallback(hook, values=["loss"]))',
    ),
    row(
        "cannot receive `values`",
        """
        class Hook:
            def after_epoch(self, epoch): ...

        HookToCallback(Hook(), values=["loss"])
        """,
        """
        class Hook:
            def after_epoch(self, epoch): ...

        class Watching(Hook):
            def after_step(self, step, values): ...

        fit(HookToCallback(Hook()), HookToCallback(Watching(), values=["loss"]))
        """,
    ),
    row(
        "cannot be called as",
        "HookToCallback(lambda: ...)",
        """
        def wrapped(step): (lambda: ...)()

        fit(HookToCallback(wrapped))
        """,
    ),
    # human_setter, hyperparameter
    row(
        "`file` of `HumanHyperParamSetter` must be a path",
        "HumanHyperParamSetter(LearningRate, file=3)",
        'HumanHyperParamSetter(LearningRate, file="hyper.txt")',
    ),
    row(
        "`file` of `HumanHyperParamSetter` is a folder",
        'HumanHyperParamSetter(LearningRate, file=".")',
        'HumanHyperParamSetter(LearningRate, file="./hyper.txt")',
    ),
    row(
        "does not name a hyperparameter",
        "Scheduler({3: 0.1})",
        """
        class WeightDecay(HyperParameter):
            name = "weight_decay"

        [Scheduler({key: 0.1}) for key in (LearningRate, WeightDecay, "weight_decay")]
        """,
    ),
    row(
        "must be the name of an attribute",
        "ObjAttrParam(Tick(), 3)",
        'augmentation = Tick(); augmentation.strength = 1; ObjAttrParam(augmentation, "strength")',
    ),
    row("which has no attribute", "ObjAttrParam(Tick(), 'tik')", "t = Tick(); t.tik = 1; ObjAttrParam(t, 'tik')"),
    row(
        "must be an identifier",
        "t = Tick(); t.x = 1; ObjAttrParam(t, 'x', name='flip rate')",
        """t = Tick(); t.x = 1; ObjAttrParam(t, 'x', name="flip_rate")""",
    ),
    row(
        "cannot be set",
        'ObjAttrParam(Read(), "previous")',
        "t = Tick(); t.previous = 1; ObjAttrParam(t, 'previous')",
    ),
    # inference
    row(
        "received inferencers as its data",
        'InferenceRunner(ScalarStats("loss"), BATCHES)',
        'data, inferencers = BATCHES, ScalarStats("loss"); fit(InferenceRunner(data, inferencers))',
    ),
    row(
        "must be a name without `.` and `/`",
        'InferenceRunner(BATCHES, ScalarStats("loss"), name="a/b")',
        'fit(InferenceRunner(BATCHES, ScalarStats("loss"), name="test"))',
    ),
    row(
        "of a phase that does not train",
        'InferenceRunner(BATCHES, ScalarStats("loss"), phase=TrainingPhase())',
        'fit(InferenceRunner(BATCHES, ScalarStats("loss"), phase=ValidationPhase()))',
    ),
    row(
        "must be the name of averaged parameters",
        'InferenceRunner(BATCHES, ScalarStats("loss"), average=3)',
        'fit(ParameterEMA(0.9), InferenceRunner(BATCHES, ScalarStats("loss"), average="ema"))',
    ),
    row(
        "must be an `Inferencer`",
        'InferenceRunner(BATCHES, ["loss"])',
        'InferenceRunner(BATCHES, [ScalarStats("loss")])',
    ),
    row(
        "received the class `ScalarStats`, not an instance of it",
        "InferenceRunner(BATCHES, [ScalarStats])",
        'fit(InferenceRunner(BATCHES, [ScalarStats("loss")]))',
    ),
    row(
        "received the function `accuracy`, which is not an `Inferencer`",
        "InferenceRunner(BATCHES, accuracy)",
        """
        def make_params(key, xs): return {"w": jnp.ones((1, 2))}
        def loss(outputs, ys): return optax.softmax_cross_entropy_with_integer_labels(outputs, ys).mean()
        data = [(x, np.zeros(4, int)) for x, _ in BATCHES]
        runner = InferenceRunner(data, ClassificationError())
        learner(runner, model=(make_params, PAIR[1]), loss_fn=loss, data=data).fit(1)
        """,
        """
        class Largest(Inferencer):
            def fetches(self): return ("outputs",)
            def before(self): self.value = -np.inf
            def on_fetches(self, values, samples): self.value = max(self.value, float(values["outputs"].max()))
            def after(self): return {"largest": self.value}

        fit(InferenceRunner(BATCHES, Largest()))
        """,
    ),
    row(
        "but `outputs` has no `probs`",
        """
        model = (PAIR[0], lambda params, xs: {"logits": xs @ params["w"]})
        loss = lambda outputs, ys: loss_fn(outputs["logits"], ys)
        stats = BinaryClassificationStats("outputs.probs", threshold=0)
        fit(InferenceRunner(BATCHES, stats), model=model, loss_fn=loss)
        """,
        """
        model = (PAIR[0], lambda params, xs: {"logits": xs @ params["w"]})
        loss = lambda outputs, ys: loss_fn(outputs["logits"], ys)
        data = [(x, y > 0) for x, y in BATCHES]
        stats = BinaryClassificationStats("outputs.logits", threshold=0)
        fit(InferenceRunner(data, stats), model=model, loss_fn=loss)
        """,
    ),
    row(
        "Two inferencers of",
        'fit(InferenceRunner(BATCHES, [ScalarStats("loss"), ScalarStats("loss")]))',
        """
        fit(
            InferenceRunner(BATCHES, ScalarStats("loss")),
            InferenceRunner(BATCHES, ScalarStats("loss"), name="other"),
        )
        """,
    ),
    row(
        "must be one number, not",
        """
        class Stats(Inferencer):
            def fetches(self): return ("loss",)
            def after(self): return {"loss": [1, 2]}

        fit(InferenceRunner(BATCHES, Stats()))
        """,
        """
        class Stats(Inferencer):
            def fetches(self): return ("loss",)
            def after(self): return {"loss": 1.0}

        fit(InferenceRunner(BATCHES, Stats()))
        """,
    ),
    # inference_data, inference_parallel
    row(
        "has no batches",
        'InferenceRunner([], ScalarStats("loss"))',
        'fit(InferenceRunner(ArrayLoader((XS, XS), batch_size=4, drop_last=True), ScalarStats("loss")))',
        kind=DataError,
    ),
    row(
        "has length 5",
        """
        class Data(list):
            def __len__(self): return 5

        fit(InferenceRunner(Data(BATCHES), ScalarStats("loss")))
        """,
        """
        class Right(list):
            def __len__(self): return 4

        class Unknown:
            def __iter__(self): return iter(BATCHES)

        for data in (Right(BATCHES), Unknown()):
            fit(InferenceRunner(data, ScalarStats("loss")))
        """,
        kind=DataError,
    ),
    row(
        "is a one-shot iterator",
        'InferenceRunner(iter(BATCHES), ScalarStats("loss"))',
        """
        class Data:
            def __iter__(self): return iter(BATCHES)

        for data in (BATCHES, ArrayLoader((XS, XS), batch_size=4), Data()):
            fit(InferenceRunner(data, ScalarStats("loss")))
        """,
    ),
    row(
        "must be different devices",
        'DataParallelInferenceRunner(BATCHES, ScalarStats("loss"), [0])',
        """
        DataParallelInferenceRunner(BATCHES, ScalarStats("loss"))
        DataParallelInferenceRunner(BATCHES, ScalarStats("loss"), jax.devices()[:4])
        """,
    ),
    # inferencer
    row("takes the names of step values", "ScalarStats(3)", 'ScalarStats("loss")'),
    row(
        "has no `fetches(self)`",
        """
        class Stats(Inferencer): ...

        fit(InferenceRunner(BATCHES, Stats()))
        """,
        """
        class Stats(Inferencer):
            def fetches(self): return ("outputs", "ys")

        fit(InferenceRunner(BATCHES, Stats()))
        """,
    ),
    row(
        "`ys` has the value -3.0",
        'fit(InferenceRunner(BATCHES, BinaryClassificationStats("outputs", threshold=0)))',
        """
        data = [(xs, ys > 0) for xs, ys in BATCHES]
        fit(InferenceRunner(data, BinaryClassificationStats("outputs", threshold=0)))
        """,
    ),
    row(
        "`outputs` has the value",
        """
        data = [(xs, ys > 0) for xs, ys in BATCHES]
        fit(InferenceRunner(data, BinaryClassificationStats("outputs")))
        """,
        """
        data = [(xs, ys > 0) for xs, ys in BATCHES]
        fit(InferenceRunner(data, BinaryClassificationStats("outputs", threshold=0)))
        """,
    ),
    row(
        "`aux.wrong` has the value",
        """
        def loss(params, batch, key):
            predicted, ys = batch[0] @ params["w"], batch[1]
            return loss_fn(predicted, ys), {"wrong": (predicted - ys)[:, 0]}

        from_loss(loss, InferenceRunner(BATCHES, ClassificationError("aux.wrong"))).fit(1)
        """,
        """
        def loss(params, batch, key):
            predicted, ys = batch[0] @ params["w"], batch[1]
            return loss_fn(predicted, ys), {"wrong": (predicted != ys)[:, 0]}

        from_loss(loss, InferenceRunner(BATCHES, ClassificationError("aux.wrong"))).fit(1)
        """,
    ),
    row(
        "compares predictions and labels element by element",
        """
        data = [(x, (y > 0)[:, 0]) for x, y in BATCHES]
        fit(InferenceRunner(data, BinaryClassificationStats("outputs", threshold=0)))
        """,
        """
        data = [(x, y > 0) for x, y in BATCHES]
        fit(InferenceRunner(data, BinaryClassificationStats("outputs", threshold=0)))
        """,
    ),
    row(
        "`ScalarStats` averages one number per batch",
        'fit(InferenceRunner(BATCHES, ScalarStats("outputs")))',
        """
        class Largest(Inferencer):
            def fetches(self): return ("outputs",)
            def before(self): self.largest = -np.inf
            def on_fetches(self, values, samples): self.largest = max(self.largest, values["outputs"].max())
            def after(self): return {"largest": self.largest}

        model = (PAIR[0], lambda params, xs: jnp.mean(xs @ params["w"]))
        fit(InferenceRunner(BATCHES, ScalarStats("outputs")), model=model)
        fit(InferenceRunner(BATCHES, Largest()))
        """,
    ),
    row(
        "takes a vector, one number per sample",
        """
        data = [(x, jnp.any(y > 0)) for x, y in BATCHES]
        fit(InferenceRunner(data, ClassificationError("ys")))
        """,
        """
        data = [(x, (y > 0)[:, 0]) for x, y in BATCHES]
        fit(InferenceRunner(data, ClassificationError("ys")))
        """,
    ),
    row(
        "must be a number, not 'high'",
        'BinaryClassificationStats("outputs", threshold="high")',
        'BinaryClassificationStats("outputs", threshold=0.5)',
    ),
    # inject_shell, log_histograms, log_hyperparams, loss_spikes
    row("`file` of `InjectShell` must be a path", "InjectShell(3)", 'InjectShell(file="INJECT_SHELL.tmp")'),
    row("`file` of `InjectShell` is a folder", 'InjectShell(".")', 'InjectShell("./INJECT_SHELL.tmp")'),
    row("`shell` of `InjectShell` must be", 'InjectShell(shell="zsh")', 'InjectShell(shell="pdb")'),
    row("`of` of LogHistograms", 'LogHistograms("gradients")', 'LogHistograms("grads")'),
    row(
        "has nothing to log",
        "learner(Monitors(), LogHyperParams(), optimizer=optax.adam(1e-3))",
        """
        assert fluxcb.inject
        learner(Monitors(), LogHyperParams(), optimizer=fluxcb.inject(optax.adam, learning_rate=1e-3))
        """,
        "learner(Monitors(), optimizer=optax.adam(1e-3))",
    ),
    row(
        "received `learning_rate` twice",
        'LogHyperParams("learning_rate", LearningRate)',
        "LogHyperParams(LearningRate)",
    ),
    row("`window` of LossSpikeGuard", "LossSpikeGuard(window=2)", "LossSpikeGuard(window=100)"),
    row(
        "more than half of its `window`",
        "LossSpikeGuard(window=10, rewind_after=6)",
        "LossSpikeGuard(window=10, rewind_after=5), LossSpikeGuard(window=12, rewind_after=6)",
    ),
    # lr_finder
    row("takes a Learner, not 3", "find_learning_rate(3)", "learner = learner(); find_learning_rate(learner)"),
    row(
        "`steps` of `find_learning_rate` must be a whole number of at least 2",
        "find_learning_rate(learner(), steps=1)",
        "find_learning_rate(learner(), steps=100)",
    ),
    row(
        "needs a training phase that emits ForwardBegin",
        """
        class Bare(TrainingPhase):
            provides = {LossBegin: ("outputs",)}
            def step(self, learner, emit):
                learner.params = jax.tree.map(jnp.zeros_like, learner.params)

        find_learning_rate(learner(phases=[Bare()]))
        """,
        """
        class Bare(TrainingPhase):
            provides = {ForwardBegin: (), ComputeEnd: ("loss",)}
            def step(self, learner, emit):
                emit(ForwardBegin())
                learner.step.grads = learner.grad(
                    lambda params: loss_fn(PAIR[1](params, learner.step.batch[0]), learner.step.batch[1]), wrt="params"
                )
                learner.step.loss = jnp.zeros(())
                learner.apply_updates()
                emit(ComputeEnd())

        find_learning_rate(learner(phases=[Bare()]))
        """,
    ),
    row(
        "`find_learning_rate` has no batches",
        "find_learning_rate(learner(data=None, example_batch=BATCHES[0]))",
        """
        batches = BATCHES
        find_learning_rate(learner(data=None, example_batch=BATCHES[0]), data=batches)
        find_learning_rate(learner(data=batches))
        """,
        kind=DataError,
    ),
    row(
        "which cannot be iterated",
        "find_learning_rate(learner(), data=3)",
        "find_learning_rate(learner(), data=BATCHES)",
        kind=DataError,
    ),
    row(
        "would use up a one-shot iterator",
        "find_learning_rate(learner(data=iter(BATCHES)))",
        "list_of_batches, learner = BATCHES, learner(data=iter(BATCHES))\n"
        "find_learning_rate(learner, data=list_of_batches)",
        kind=DataError,
    ),
    row(
        "yields no batches",
        "find_learning_rate(learner(), data=[])",
        "find_learning_rate(learner(), data=BATCHES[:1])",
        kind=DataError,
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=[row.says for row in ROWS])
def test_each_fix_works(row, tmp_path):
    check_row(row, tmp_path)
