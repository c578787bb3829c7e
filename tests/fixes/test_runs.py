"""The suggested fixes in the messages of Learners: arguments, data, and running handlers."""

import pytest

from fluxcb import (
    AccessError,
    CheckpointError,
    DataError,
    DeclarationError,
    MissingStateError,
    TraceError,
    UnknownStateError,
)
from tests.fixes.programs import check_row, row

SETS_RATE = """
class Sets(Callback):
    def stateaccess(self): return {{"hyperparams": {{"learning_rate": Write()}}}}
    @on
    def act(self, event: {event}, phase: TrainingPhase, learner): learner.hyperparams.learning_rate = {value}

fit(Sets())
"""

ROWS = [
    # the arguments of a Learner
    row("which is not a phase instance", "learner(phases=[TrainingPhase])", "learner(phases=[TrainingPhase()])"),
    row("`phases` must be a list", "learner(phases=TrainingPhase())", "learner(phases=[TrainingPhase()])"),
    row(
        "`optimizer` must be",
        "learner(optimizer=0.1)",
        "learner(optimizer=fluxcb.inject(optax.adam, learning_rate=1e-3))",
    ),
    row("`key` must be an int", "learner(key='0')", "learner(key=0), learner(key=jax.random.key(0))"),
    row("`key` must be a seed", "learner(key=2**70)", "learner(key=0), learner(key=jax.random.key(0))"),
    row(
        "and is called as `loss_fn(outputs, ys)`",
        "learner(loss_fn=lambda outputs: 0.0)",
        """
        def loss_fn(outputs, ys): return jnp.mean((outputs - ys) ** 2)
        learner(loss_fn=loss_fn)
        """,
        """
        def loss_fn(model, batch, *, key, train): return jnp.mean((model(batch[0]) - batch[1]) ** 2)
        learner(loss_fn=loss_fn)
        """,
    ),
    row(
        "The two functions of a model pair are in the wrong order.",
        """
        def init(key, xs): return PAIR[0](key, xs)
        def apply(params, xs): return PAIR[1](params, xs)
        learner(model=(apply, init))
        """,
        """
        def init(key, xs): return PAIR[0](key, xs)
        def apply(params, xs): return PAIR[1](params, xs)
        learner(model=(init, apply)).fit(1)
        """,
    ),
    row(
        "`loss_fn` takes (params, batch, is_training), and is called as `loss_fn(params, batch, key)`.",
        "from_loss(lambda params, batch, is_training: jnp.mean(params['w']) * (2.0 if is_training else 1.0))",
        "from_loss(lambda params, batch, train: jnp.mean(params['w']) * (2.0 if train else 1.0)).fit(1)",
        """
        def loss_fn(params, batch, key): return jnp.mean(params["w"])
        from_loss(loss_fn).fit(1)
        """,
    ),
    row(
        "`loss_fn` must be a function",
        "learner(loss_fn='mse')",
        "loss = lambda outputs, ys: loss_fn(outputs, ys)  # loss(outputs, ys)\nlearner(loss_fn=loss)",
    ),
    row("`executor` must be an executor", "learner(executor=4)", "learner(executor=fluxcb.ThreadExecutor(4))"),
    row("`program` is", "learner(program='fast')", "learner()"),
    row("`steps_per_call` is", "learner(steps_per_call='all')", "learner(steps_per_call='auto')"),
    row(
        "it must be floating-point",
        "learner(model=(lambda key, xs: {'w': jnp.zeros((1, 1)), 'n': jnp.zeros((), int)}, PAIR[1]))",
        "n = 3; learner(model=(PAIR[0], lambda params, xs: n * PAIR[1](params, xs)))",
    ),
    row(
        "`data` is a pair of arrays",
        "learner(data=(XS, XS))",
        "xs, ys = XS, XS; learner(data=fluxcb.data.ArrayLoader((xs, ys), batch_size=32))",
        'a, b = [(XS, XS)], [(XS, XS)]; learner(data={"training": a, "validation": b})',
        kind=DataError,
    ),
    row(
        "`data` contains a pair of arrays",
        "learner(data=((XS, XS[:, 0]), (XS, XS[:, 0])))",
        """
        xs, ys = XS, XS
        training, validation = (fluxcb.data.ArrayLoader((xs, ys), batch_size=32) for _ in range(2))
        learner(data=(training, validation))
        """,
        kind=DataError,
    ),
    row(
        "but no phase has this name",
        "learner(data={'train': BATCHES})",
        "learner(data={'training': BATCHES, 'validation': BATCHES})",
        kind=DataError,
    ),
    row(
        "`data` has 'x', but no phase has this name",
        "learner(data={'x': XS, 'y': XS})",
        "learner(data={'training': BATCHES, 'validation': BATCHES})",
        'x, y = XS, XS; learner(data=fluxcb.data.ArrayLoader({"x": x, "y": y}, batch_size=32), '
        'inputs=lambda batch: batch["x"], targets=lambda batch: batch["y"])',
        kind=DataError,
    ),
    *(
        row(
            f"`{flag}` of `Learner` must be True or False, not 'no'.",
            f"learner({flag}='no')",
            f"learner({flag}=True), learner({flag}=False)",
        )
        for flag in ("default_callbacks", "exact_observers")
    ),
    row(
        "`costs` of `learner.explain` must be True or False",
        "learner().explain(costs='yes')",
        "learner().explain(costs=True), learner().explain(costs=False)",
    ),
    row(
        "`default_callbacks` of `Population` must be True or False",
        "Population(lambda key: learner(key=key), key=[0, 1], default_callbacks='no')",
        "for flag in (True, False): Population(lambda key: learner(key=key), key=[0, 1], default_callbacks=flag)",
    ),
    row(
        "`shuffle` of `ArrayLoader` must be True or False",
        "ArrayLoader((XS, XS), batch_size=4, shuffle='no')",
        "ArrayLoader((XS, XS), batch_size=4, shuffle=True)",
    ),
    # hyperparameters that are not finite numbers
    row(
        "`inject` was given `learning_rate` as nan.",
        "fluxcb.inject(optax.sgd, learning_rate=float('nan'))",
        "fluxcb.inject(optax.sgd, learning_rate=1e-3)",
    ),
    row(
        "`learner.hyperparams.learning_rate` was assigned nan",
        "made = learner(); made.hyperparams['learning_rate'] = float('nan')",
        "learner = learner(); learner.hyperparams['learning_rate'] = 1e-3; learner.fit(1)",
    ),
    *(
        row(
            "sets `hyperparams.learning_rate` to nan.",
            SETS_RATE.format(event=event, value="float('nan')"),
            SETS_RATE.format(event=event, value="0.5"),
            kind=kind,
        )
        for event, kind in (("StepEnd", DeclarationError), ("BackwardEnd", TraceError))
    ),
    row(
        "writes `hyperparams.learning_rate`, which is an integer.",
        """
        learner = learner(optimizer=optax.inject_hyperparams(optax.sgd)(learning_rate=1))
        learner.hyperparams["learning_rate"] = 0.1
        """,
        """
        learner = learner(optimizer=optax.inject_hyperparams(optax.sgd)(learning_rate=1.0))
        learner.hyperparams["learning_rate"] = 0.1
        learner.fit(1)
        """,
        kind=MissingStateError,
    ),
    # data
    row(
        "cannot be iterated",
        "learner(data=3)",
        "xs, ys = XS, XS; learner(data=BATCHES), learner(data=fluxcb.data.ArrayLoader((xs, ys), batch_size=32))",
        kind=DataError,
    ),
    row(
        "which has `__getitem__`, but no `__iter__`",
        "dataset = type('Batches', (), {'__getitem__': lambda self, i: BATCHES[i], '__len__': lambda self: 2})()\n"
        "learner(data=dataset)",
        "dataset = BATCHES\nlearner(data=[dataset[i] for i in range(len(dataset))])",
        "xs, ys = XS, XS; learner(data=fluxcb.data.ArrayLoader((xs, ys), batch_size=32))",
        kind=DataError,
    ),
    row(
        "yields no batches",
        "fit(data=[])",
        "fit(data=ArrayLoader((XS, XS), batch_size=4, drop_last=True))",
        kind=DataError,
    ),
    row(
        "differs from the one the step was compiled for",
        "fit(data=[*BATCHES, (XS[:4].astype(np.float16), XS[:4])])",
        "fit(data=[*BATCHES, (XS[:4].astype(np.float32), XS[:4])])",
        kind=DataError,
    ),
    row(
        "`T` runs the step of `TrainingPhase`, which calls `loss_fn(outputs, ys)`, but the loss function",
        """
        class T(TrainingPhase):
            def step(self, learner, emit):
                super().step(learner, emit)

        learner(loss_fn=lambda model, batch: jnp.mean((model(batch[0]) - batch[1]) ** 2), phases=[T()])
        """,
        """
        from fluxcb.phases import LossTrainingPhase

        class T(LossTrainingPhase):
            def step(self, learner, emit):
                super().step(learner, emit)

        learner(loss_fn=lambda model, batch: jnp.mean((model(batch[0]) - batch[1]) ** 2), phases=[T()]).fit(1)
        """,
        kind=TraceError,
    ),
    row(
        "expected float32[2, 1], got float32[4, 1]",
        "fit(data=[(XS[:2], XS[:2]), (XS[:4], XS[:4])])",
        "fit(data=[(XS[:4], XS[:4]), (XS[:2], XS[:2])])",
        """
        Learner, batch = learner, (XS[:4], XS[:4])
        Learner(data=[(XS[:2], XS[:2]), batch], example_batch=batch).fit(1)
        """,
        kind=DataError,
    ),
    row(
        "There is no data for ValidationPhase",
        "learner().run_epoch(ValidationPhase())",
        'batches = BATCHES; learner(data={"training": BATCHES, "validation": batches}).run_epoch(ValidationPhase())',
        "learner(phases=[TrainingPhase()]).run_step(ValidationPhase(), BATCHES[0])",
        kind=DataError,
    ),
    row(
        "is not a phase instance",
        "learner().run_epoch(ValidationPhase)",
        "learner = learner(data=(BATCHES, BATCHES)); learner.run_epoch(fluxcb.phases.ValidationPhase())",
    ),
    row(
        "`run_step` was given the batch first.",
        "learner().run_step(BATCHES[0], TrainingPhase())",
        "phase, batch = TrainingPhase(), BATCHES[0]; learner = learner(); learner.run_step(phase, batch)",
    ),
    # hooks
    row(
        "Metrics() reads `step.loss`, which the loop does not report.",
        "fluxcb.callbacks_as_hook([Metrics()], {'train_loss': 0.0})",
        """
        from fluxcb import callbacks_as_hook
        callbacks = [Metrics()]
        with callbacks_as_hook(callbacks, {"train_loss": 0.0, "loss": 0.0}) as hook:
            hook.after_step(1, {"train_loss": 1.0, "loss": 2.0})
            hook.after_epoch()
        """,
        kind=UnknownStateError,
    ),
    row(
        "watches `validation/loss`, and a hand-written loop has only metrics of `training`.",
        "fluxcb.callbacks_as_hook([Metrics(), EarlyStopping(2)], {'loss': 0.0})",
        """
        with fluxcb.callbacks_as_hook([Metrics(), EarlyStopping(2, metric="training/loss")], {"loss": 0.0}) as hook:
            hook.after_step(1, {"loss": 1.0})
            hook.after_epoch()
        """,
        """
        learner = learner(Metrics(), EarlyStopping(2), data=(BATCHES, BATCHES))
        learner.run_epoch(TrainingPhase())
        learner.run_epoch(ValidationPhase())
        learner.trigger()
        """,
        kind=MissingStateError,
    ),
    row(
        "`after_step` was given float32[] as `loss`; int32[] was announced.",
        """
        with fluxcb.callbacks_as_hook([Metrics()], {"loss": 0}) as hook:
            hook.after_step(1, {"loss": 1.5})
        """,
        """
        from fluxcb import callbacks_as_hook
        callbacks = [Metrics()]
        with callbacks_as_hook(callbacks, {'loss': 0.0}) as hook:
            hook.after_step(1, {"loss": 1.5})
        """,
    ),
    # callbacks of a Learner
    row(
        "This Learner has no Recorder",
        "learner(Tick()).callbacks.get(Recorder)",
        "learner = learner(Tick()); learner.callbacks.add(Recorder()); learner.callbacks.get(Recorder)",
    ),
    row(
        "takes a callback class",
        "learner(Recorder()).callbacks.get('Recorder')",
        "learner = learner(Recorder()); learner.callbacks.get(Recorder)",
    ),
    row(
        "takes a list of callback instances",
        "learner().callbacks.set(Tick())",
        "learner = learner(); learner.callbacks.set([Tick()]); learner.callbacks.add(Recorder())",
    ),
    row(
        "`learner.callbacks.replace` takes",
        "learner(Tick()).callbacks.replace(Tick)",
        "learner = learner(Tick()); learner.callbacks.replace(Tick())",
    ),
    row(
        "already belongs to another Learner",
        "tick = Tick(); learner(tick), learner(tick)",
        """
        def make_learner():
            return learner(Tick())

        make_learner(), make_learner()  # as `fluxcb check` does
        """,
        "callback = Tick(); other = learner(callback); other.callbacks.remove(callback); learner(callback)",
    ),
    row(
        "cannot be replaced while it is fitting",
        "made = learner(); made.callbacks.add(CustomCallback(lambda _: made.callbacks.add(Tick()), Trigger)); "
        "made.fit(1)",
        "made = learner(); made.fit(1); made.callbacks.add(Tick()); made.fit(1)",
    ),
    # a fit
    row(
        "`fit` takes exactly one of",
        "learner().fit()",
        "made = learner(); learner = made; learner.fit(10); learner.fit(steps=10_000)",
    ),
    row(
        "continues the run of a Checkpointer",
        "learner().fit(1, resume=True)",
        'learner(Checkpointer("runs/1")).fit(1, resume=True)',
        'fit(Checkpointer("a")); path, learner = "a", learner(Checkpointer("a")); learner.restore(path); '
        "learner.fit(1)",
        kind=CheckpointError,
    ),
    row(
        "`allow` takes some of",
        'fit(Checkpointer("a")).restore("a", allow="optimizer")',
        'learner, path = fit(Checkpointer("a")), "a"; learner.restore(path, allow=("data",))',
    ),
    row(
        "The assigned state does not fit",
        "made = learner(); made.state = {}",
        "learner = learner(); learner.state = jax.tree.map(lambda x: x, learner.state)",
    ),
    row(
        "`learner.emit` emits host events",
        "learner().emit(BackwardEnd(), TrainingPhase())",
        "class Mine(TrainingPhase):\n    def step(self, learner, emit):\n        super().step(learner, emit)\n"
        "learner(phases=[Mine()]).fit(1)",
    ),
    row(
        "`learner.emit` emits host events",
        "learner().emit(3, TrainingPhase())",
        "class Saved(HostEvent): ...\nlearner().emit(Saved(), TrainingPhase())",
    ),
    row(
        "no callback of this Learner keeps such an average",
        "learner().model_for('x') if hasattr(learner(), 'model_for') else learner().predict(XS, average='x')",
        "learner().predict(XS, average=None)",
        'learner(ParameterEMA()).predict(XS, average="ema")',
    ),
    # handlers
    row(
        "without declaring `control`",
        "class Ends(Callback):\n    @on\n    def end(self, event: StepEnd, phase: TrainingPhase, learner):\n"
        "        raise CancelFitting\nfit(Ends())",
        'class Ends(Callback):\n    def stateaccess(self): return {"control": Append()}\n    @on\n'
        "    def end(self, event: StepEnd, phase: TrainingPhase, learner):\n        raise CancelFitting\nfit(Ends())",
        kind=AccessError,
    ),
    # tracing
    row(
        "The loss must be one real floating-point number",
        "fit(loss_fn=lambda outputs, ys: (outputs - ys)[:, 0])",
        "fit(loss_fn=lambda outputs, ys: (loss := (outputs - ys)[:, 0], jnp.mean(loss))[1])",
        kind=TraceError,
    ),
    row(
        "`inject` takes a factory of optimizers",
        "fluxcb.inject(optax.adam(1e-3))",
        "# not fluxcb.inject(optax.adam(1e-3))\nfluxcb.inject(optax.adam, learning_rate=1e-3)",
    ),
    row(
        "needs `learning_rate`, which was not passed to `inject`",
        "fluxcb.inject(optax.adam)",
        "fluxcb.inject(optax.adam, learning_rate=1e-3)",
    ),
    row(
        "`inject` takes numbers and schedules",
        "fluxcb.inject(optax.adam, learning_rate='fast')",
        "import functools\nfactory, fast = optax.adam, 1e-3\n"
        "fluxcb.inject(functools.partial(factory, b1=0.9), learning_rate=1e-3)\n"
        "# functools.partial(factory, learning_rate='fast')",
    ),
    row(
        "`inject` takes numbers and schedules",
        "fluxcb.inject(optax.adam, learning_rate='1e-3')",
        "fluxcb.inject(optax.adam, learning_rate=1e-3)",
    ),
    # stopping, plots, data
    row("`n` of", "NumberSinceBest(0)", "NumberSinceBest(5)"),
    row(
        "`mode` of `NumberSinceBest`",
        "NumberSinceBest(3, mode='maximum')",
        'NumberSinceBest(3), NumberSinceBest(3, mode="max")',
    ),
    row("takes criteria, not", "Disjunction(3)", "Disjunction(GL(2), TimeLimit(60))"),
    row("`value` of `Threshold`", "Threshold('low')", "Threshold(0.1)"),
    row("`stopping_time` takes a criterion", "stopping_time(3, [1.0])", "stopping_time(NumberSinceBest(3), [1.0])"),
    row(
        "takes a list of losses",
        "stopping_time(NumberSinceBest(3), 1.0)",
        "stopping_time(NumberSinceBest(3), [3.0, 2.0, 2.5])",
    ),
    row("an int of 1 or more", "ArrayLoader((XS, XS), batch_size=0)", "ArrayLoader((XS, XS), batch_size=32)"),
    row(
        "The arrays do not have the same number",
        "ArrayLoader((XS, XS[1:]), batch_size=4)",
        "ArrayLoader((XS, XS), batch_size=4)",
        kind=DataError,
    ),
    row(
        "An epoch would have no batches",
        "ArrayLoader((XS, XS), batch_size=32, drop_last=True)",
        "batch_size = 16; ArrayLoader((XS, XS), batch_size=16, drop_last=True)",
        "ArrayLoader((XS, XS), batch_size=32)",
        kind=DataError,
    ),
    row(
        "`fn` must be a function of a batch",
        "fluxcb.data.map(BATCHES, lambda batch: batch)",
        "fluxcb.data.map(lambda batch: batch, BATCHES)",
    ),
    row(
        "`placement` must be a device",
        "fluxcb.data.place(BATCHES, 0)",
        "fluxcb.data.place(BATCHES, jax.devices()[0])",
        'mesh, spec = jax.sharding.Mesh(np.array(jax.devices()[:1]), "d"), jax.sharding.PartitionSpec()\n'
        "fluxcb.data.place(BATCHES, jax.sharding.NamedSharding(mesh, spec))",
    ),
    # logging
    row("`Monitors` takes backends", "Monitors('log.jsonl')", 'Monitors(JSONLinesBackend("log.jsonl"))'),
    row(
        "Two backends are called",
        "Monitors(JSONLinesBackend('a'), JSONLinesBackend('a'))",
        "Monitors(JSONLinesBackend('a'), JSONLinesBackend('b'))",
    ),
    row(
        "A value to log must be one number",
        "Value([1, 2])",
        "Value(1), Value(0.5)",
    ),
    row(
        "An image has the shape",
        "Image(np.zeros((2, 2, 2, 7)))",
        "images = np.zeros((3, 8, 8)); Image(images[..., None])",
    ),
    row(
        "An image is uint8",
        "Image(np.zeros((2, 2), int))",
        "import numpy\nimage = np.zeros((2, 2), int); Image(image.astype(numpy.uint8))",
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=[row.says for row in ROWS])
def test_each_fix_works(row, tmp_path):
    check_row(row, tmp_path)
