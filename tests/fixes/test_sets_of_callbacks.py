"""The suggested fixes in the messages of phases, wrappers and checks of callback lists."""

import pytest

from fluxcb import (
    ConflictError,
    MissingStateError,
    TraceError,
    UnknownStateError,
)
from tests.fixes.programs import check_row, row

ROWS = [
    # _declare/phases
    row(
        "so it has nothing to run",
        """
        class Mine(AbstractTrainingPhase): ...

        learner(phases=[Mine()]).fit(1)
        """,
        """
        class Mine(TrainingPhase): ...

        class Steps(AbstractTrainingPhase):
            step = TrainingPhase.step
            provides = TrainingPhase.provides

        learner(phases=[Mine()]).fit(1), learner(phases=[Steps()]).fit(1)
        """,
    ),
    row(
        "The loss function returned a tuple of 3",
        "from_loss(lambda params, batch, key: (jnp.mean(params['w']), 1.0, 2.0)).fit(1)",
        """
        def loss(params, batch, key):
            loss, kl, norm = jnp.mean(params['w']), 1.0, 2.0
            return loss, {"kl": kl, "norm": norm}

        from_loss(loss).fit(1)
        """,
        kind=TraceError,
    ),
    row(
        "has no loss function",
        "Learner(PAIR, None, optax.sgd(0.1), data=BATCHES, default_callbacks=False).fit(1)",
        "Learner(PAIR, loss_fn, optax.sgd(0.1), data=BATCHES, default_callbacks=False).fit(1)",
        """
        class Mine(TrainingPhase):
            def step(self, learner, emit):
                learner.params = jax.tree.map(jnp.zeros_like, learner.params)

        class Measured(AbstractValidationPhase):
            name = "validation"

            def step(self, learner, emit):
                pass

        phases = [Mine(), Measured()]
        data = (BATCHES, BATCHES)
        Learner(PAIR, None, optax.sgd(0.1), data=data, default_callbacks=False, phases=phases).fit(1)
        """,
        kind=TraceError,
    ),
    row(
        "must map traced events to tuples of step names",
        """
        class Mine(TrainingPhase):
            provides = {LossBegin: "outputs"}
        """,
        """
        class Mine(TrainingPhase):
            provides = {LossBegin: ("outputs",), BackwardBegin: ("loss",)}
        """,
    ),
    # _declare/proxy, resolution, schedules, wrappers
    row("wraps a callback instance, not", "every(Tick, steps=10)", "every(Recorder(), steps=10)"),
    row("wraps a callback instance, not", "PeriodicCallback(Tick, 3)", "PeriodicCallback(Tick(), 3)"),
    row(
        "takes two or more callbacks",
        "in_order(Tick())",
        "first, second = Tick(), Tick(); fluxcb.check([in_order(first, second)])",
    ),
    row(
        "takes callbacks as arguments, not a list",
        "in_order([Tick(), Tick()])",
        "first, second = Tick(), Tick(); fluxcb.check([in_order(first, second)])",
        "callbacks = [Tick(), Tick()]; fluxcb.check([in_order(*callbacks)])",
    ),
    row("was given Tick() twice", "tick = Tick(); in_order(tick, tick)", "in_order(Tick(), Tick())"),
    row(
        "takes two callback classes",
        "resolveconflict.register(Tick(), Tick())(print)",
        "first, second = Tick(), Tick(); fluxcb.check([in_order(first, second)])",
    ),
    row("must be a whole number of at least 1", "EverySteps(0)", "EverySteps(1)"),
    row("The period of `EverySeconds`", "EverySeconds(0)", "EverySeconds(1.0)"),
    row(
        "`when` takes a function of the learner",
        "when(Tick(), 3)",
        "callback = Tick(); fit(when(callback, lambda learner: learner.progress.epoch > 3))",
    ),
    row(
        "The function of `when` must take one argument",
        "when(Tick(), lambda: True)",
        "callback = Tick(); fit(when(callback, lambda learner: learner.progress.epoch > 3))",
    ),
    row(
        "must return a bool, not",
        "fit(when(Tick(), lambda learner: np.array([True, False])))",
        "callback, values = Tick(), np.array([True]); fit(when(callback, lambda learner: bool(values.any())))",
    ),
    row(
        "The function of `when` returned None",
        """
def late(learner):
    learner.progress.epoch > 3
fit(when(Tick(), late))
""",
        """
def late(learner):
    return learner.progress.epoch > 3
fit(when(Tick(), late))
""",
    ),
    row(
        "has no handler that `every` schedules",
        "every(CustomCallback(print, EpochEnd), steps=10)",
        "callback = CustomCallback(print, EpochEnd); every(callback, epochs=10)",
        "CustomCallback(print, EpochEnd)",
    ),
    row(
        "has no handler of StepEnd",
        "throttle(CustomCallback(print, EpochEnd), StepEnd, freq=10)",
        "callback = CustomCallback(print, EpochEnd); throttle(callback, EpochEnd, freq=10)",
        "CustomCallback(print, EpochEnd)",
    ),
    row(
        "`every` would skip steps of Metrics().",
        "every(Metrics(), steps=10)",
        "callback = Metrics(); fit(callback)",
        "callback = Metrics(); fit(every(callback, epochs=2))",
    ),
    row("`every` takes exactly one of", "every(Tick())", "every(Recorder(), steps=100)"),
    row("`throttle` takes an event class", "throttle(Tick(), 3, freq=10)", "throttle(Recorder(), StepEnd, freq=10)"),
    row("`throttle` takes exactly one of", "throttle(Tick(), StepEnd)", "throttle(Recorder(), StepEnd, freq=10)"),
    row(
        "has no host handlers",
        "every(ClipGradients(1.0), steps=10)",
        """
        callback = ClipGradients(1.0)
        every(callback, steps=10, traced=True), every(callback, epochs=10, traced=True)
        """,
    ),
    row(
        "cannot be scheduled by EverySeconds",
        "every(ClipGradients(1.0), seconds=10, traced=True)",
        "every(ClipGradients(1.0), steps=10, traced=True), every(ClipGradients(1.0), epochs=10, traced=True)",
    ),
    # _check
    row(
        "have contradictory resolutions",
        """
        def pair(first, second):
            access = {"cbstate": {"total": Write()}}
            class One(Tick):
                def stateaccess(self): return access
                def init(self, learner): learner.cbstate.total = 0
                def resolveconflict(self, other): return first(self, other)
            class Other(Tick):
                def stateaccess(self): return access
                def resolveconflict(self, other): return second(self, other)
            return [One(), Other()]

        fluxcb.check(pair(lambda me, other: RunFirst(me), lambda me, other: RunFirst(me)))
        """,
        """
        def pair(first, second):
            access = {"cbstate": {"total": Write()}}
            class One(Tick):
                def stateaccess(self): return access
                def init(self, learner): learner.cbstate.total = 0
                def resolveconflict(self, other): return first(self, other)
            class Other(Tick):
                def stateaccess(self): return access
                def resolveconflict(self, other): return second(self, other)
            return [One(), Other()]

        fluxcb.check(pair(lambda me, other: RunFirst(me), lambda me, other: RunFirst(other)))
        fluxcb.check(pair(lambda me, other: RunFirst(me), lambda me, other: NotDefined()))
        """,
        kind=ConflictError,
    ),
    row(
        "can never be used together",
        "fluxcb.check([MixUp(), CutMix()])",
        "fluxcb.check([MixUp()]), fluxcb.check([CutMix()])",
        kind=ConflictError,
    ),
    row(
        "which is not a phase",
        "fluxcb.check([Tick()], phases=[int])",
        """
        class Mine(Phase): ...

        fluxcb.check([Tick()], phases=[Mine], default_callbacks=False)
        """,
    ),
    row(
        "where it does not exist",
        """
        class Mine(Callback):
            def stateaccess(self): return {"step": {"grads": Read()}}
            @on
            def show(self, event: LossBegin, phase: TrainingPhase, learner): ...

        fluxcb.check([Mine()])
        """,
        """
        class Mine(Callback):
            def stateaccess(self): return {"step": {"grads": Read()}}
            @on
            def show(self, event: BackwardEnd, phase: TrainingPhase, learner): ...

        fluxcb.check([Mine()])
        """,
        kind=MissingStateError,
    ),
    row(
        "which no callback can write",
        """
        class Mine(Tick):
            def stateaccess(self): return {"progress": {"step": Write()}}

        fluxcb.check([Mine()])
        """,
        """
        class Mine(Tick):
            def stateaccess(self): return {}

        Mine.stateaccess, fluxcb.check([Mine()])
        """,
        kind=UnknownStateError,
    ),
    row(
        "which no callback can write",
        """
        class Mine(Tick):
            def stateaccess(self): return {"*": Write()}

        fluxcb.check([Mine()], default_callbacks=False)
        """,
        """
        class Mine(Tick):
            def stateaccess(self): return {"*": Read(), "params": Write()}

        fluxcb.check([Mine()])
        """,
        kind=UnknownStateError,
    ),
    row(
        "declares access to `control.a`",
        """
        class Mine(Tick):
            def stateaccess(self): return {"control": {"a": Append()}}

        fluxcb.check([Mine()])
        """,
        """
        class Mine(Tick):
            def stateaccess(self): return {"control": Append()}

        fluxcb.check([Mine()])
        """,
        kind=UnknownStateError,
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=[row.says for row in ROWS])
def test_each_fix_works(row, tmp_path):
    check_row(row, tmp_path)
