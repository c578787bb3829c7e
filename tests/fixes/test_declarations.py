"""The suggested fixes in the messages of checkpoints and of callback declarations."""

import pytest

from fluxcb import (
    CheckpointError,
)
from fluxcb._errors import ResumeError
from tests.fixes.programs import check_row, row

ROWS = [
    # checkpoints
    row(
        "has no average 'emma'",
        """
        fit(ParameterEMA(0.9), Checkpointer("a"))
        load_params("a", average="emma")
        """,
        """
        fit(ParameterEMA(0.9), Checkpointer("a"))
        load_params("a", average="ema")
        """,
        """
        fit(ParameterEMA(0.9), Checkpointer("a"))
        load_params("a", average=None)
        """,
        kind=CheckpointError,
    ),
    row(
        "There is no checkpoint in",
        'load_params("a")',
        'fit(Checkpointer("a")), load_params("a")',
        kind=CheckpointError,
    ),
    row(
        "do not match",
        """
        fit(Checkpointer("a"))
        load_params("a", like={"v": jnp.zeros((1, 1))})
        """,
        'fit(Checkpointer("a")), load_params("a", like={"w": jnp.zeros((1, 1))})',
        kind=ResumeError,
    ),
    # _check
    # _declare/access
    row(
        "must return a mapping of state to permissions",
        """
        class Mine(Tick):
            def stateaccess(self): return "loss"

        fluxcb.check([Mine()])
        """,
        """
        class Mine(Tick):
            def stateaccess(self): return {"step": {"loss": Read()}}

        class Nothing(Tick):
            def stateaccess(self): return {}

        fluxcb.check([Mine(), Nothing()])
        """,
    ),
    row(
        "keys are single names",
        """
        class Mine(Tick):
            def stateaccess(self): return {"step.loss": Read()}

        fluxcb.check([Mine()])
        """,
        """
        class Mine(Tick):
            def stateaccess(self): return {"step": {"loss": Read()}}

        fluxcb.check([Mine()])
        """,
    ),
    row(
        "which is not a permission",
        """
        class Mine(Tick):
            def stateaccess(self): return {"step": {"loss": "read"}}

        fluxcb.check([Mine()])
        """,
        """
        class Mine(Tick):
            def stateaccess(self): return {"step": {"loss": Read()}}

        fluxcb.check([Mine()])
        """,
    ),
    row(
        "which is not a permission",
        """
        class Mine(Tick):
            def stateaccess(self): return {"step": {"loss": Write}}

        fluxcb.check([Mine()])
        """,
        """
        class Mine(Tick):
            def stateaccess(self): return {"step": {"loss": Write()}}

        fluxcb.check([Mine()])
        """,
    ),
    # _declare/chief
    row(
        "is traced into the step",
        """
        class Mine(Callback):
            chief_only = True
            @on
            def scale(self, event: BackwardEnd, phase: TrainingPhase, learner): ...

        fluxcb.check([Mine()])
        """,
        """
        class Scales(Callback):
            @on
            def scale(self, event: BackwardEnd, phase: TrainingPhase, learner): ...

        class Mine(Callback):
            chief_only = True

        fluxcb.check([Mine(), Scales()])
        """,
        """
        class Mine(Callback):
            @on
            def scale(self, event: BackwardEnd, phase: TrainingPhase, learner): ...
            @on
            def show(self, event: StepEnd, phase: TrainingPhase, learner):
                if jax.process_index() == 0:
                    print("step")

        fit(Mine())
        """,
    ),
    row(
        "may write `params`",
        """
        class Mine(Tick):
            chief_only = True
            def stateaccess(self): return {"params": Write()}

        fluxcb.check([Mine()])
        """,
        """
        class Mine(Tick):
            def stateaccess(self): return {"params": Write()}

        fluxcb.check([Mine()])
        """,
        """
        class Mine(Tick):
            chief_only = True
            def stateaccess(self): return {"params": Read()}

        fluxcb.check([Mine()])
        """,
    ),
    row(
        "which Reads() reads on every process",
        """
        class Mine(Tick):
            chief_only = True
            def stateaccess(self): return {"cbstate": {"total": Write()}}
            def init(self, learner): learner.cbstate.total = 0

        class Reads(Tick):
            def stateaccess(self): return {"cbstate": {"total": Read()}}

        fluxcb.check([Mine(), Reads()])
        """,
        """
        class Mine(Tick):
            def stateaccess(self): return {"cbstate": {"total": Write()}}
            def init(self, learner): learner.cbstate.total = 0

        class Reads(Tick):
            def stateaccess(self): return {"cbstate": {"total": Read()}}

        fluxcb.check([Mine(), Reads()])
        """,
        """
        class Mine(Tick):
            chief_only = True
            def stateaccess(self): return {"cbstate": {"total": Write()}}
            def init(self, learner): learner.cbstate.total = 0

        class Reads(Tick):
            chief_only = True
            def stateaccess(self): return {"cbstate": {"total": Read()}}

        fluxcb.check([Mine(), Reads()])
        """,
    ),
    # _declare/declared
    row(
        "must be a list of callback instances",
        "Learner(PAIR, loss_fn, optax.sgd(0.1), callbacks=Tick())",
        "Learner(PAIR, loss_fn, optax.sgd(0.1), callbacks=[Tick()])",
    ),
    row(
        "`Mine.runafter` must return a tuple",
        """
        class Mine(Tick):
            def runafter(self): return Recorder

        fluxcb.check([Mine()])
        """,
        """
        class Mine(Tick):
            def runafter(self): return (Recorder,)

        fluxcb.check([Mine()])
        """,
    ),
    row(
        "which is not a callback class",
        """
        class Mine(Tick):
            def runafter(self): return (Recorder(),)

        fluxcb.check([Mine()])
        """,
        """
        class Mine(Tick):
            def runafter(self): return (Recorder,)

        fluxcb.check([Mine()])
        """,
    ),
    row("which is not a callback instance", "learner(Tick)", "learner(Tick())"),
    row(
        "which is not a callback instance",
        "learner(EarlyStopping)",
        "learner(Metrics(), EarlyStopping(3), data=(BATCHES, BATCHES))",
    ),
    row(
        "which is not a callback instance",
        "learner(print)",
        "def function(outputs, ys): return abs(outputs - ys).mean()\nlearner(Metrics(function))",
        "function = print; learner(CustomCallback(function, StepEnd))",
    ),
    row(
        "which is not a callback instance",
        "learner(accuracy)",
        "def function(outputs, ys): return abs(outputs - ys).mean()\nlearner(Metrics(function))",
        "function = print; learner(CustomCallback(function, StepEnd))",
    ),
    row(
        "which is not a callback instance",
        """
        class Tick:
            @on
            def show(self, event: StepEnd, phase: TrainingPhase, learner): ...

        learner(Tick())
        """,
        """
        class Tick(Callback):
            @on
            def show(self, event: StepEnd, phase: TrainingPhase, learner): ...

        learner(Tick())
        """,
    ),
    row(
        "which is not a callback instance",
        """
        @on
        def show(self, event: StepEnd, phase: TrainingPhase, learner): ...

        learner(show)
        """,
        """
        class MyCallback(Callback):
            @on
            def show(self, event: StepEnd, phase: TrainingPhase, learner): ...

        learner(MyCallback())
        """,
    ),
    row(
        "show(event, phase, learner)` must take (self, event, phase, learner).",
        """
        @on(StepEnd, TrainingPhase)
        def show(event, phase, learner): ...
        """,
        """
        class MyCallback(Callback):
            @on(StepEnd, TrainingPhase)
            def show(self, event: StepEnd, phase: Phase, learner): ...

        learner(MyCallback())
        """,
    ),
    row("must be a list of callback instances", "learner(callbacks={Tick()})", "learner(callbacks=[Tick()])"),
    row("must be a list of callback instances", "learner(callbacks={1: Tick()})", "learner(callbacks=[Tick()])"),
    row("appears twice in the list", "tick = Tick(); learner(tick, tick)", "learner(Tick(), Tick())"),
    row(
        "is wider than that of its class",
        """
        class Mine(Callback):
            @on(access={"step": {"loss": Read()}})
            def show(self, event: StepEnd, phase, learner): ...

        fluxcb.check([Mine()])
        """,
        """
        class Mine(Callback):
            def stateaccess(self): return {"step": {"loss": Read()}}
            @on(access={"step": {"loss": Read()}})
            def show(self, event: StepEnd, phase, learner): ...

        Mine.stateaccess, fluxcb.check([Mine()])
        """,
    ),
    # _declare/dispatch, handlers
    row("`At` takes an event class and a phase class", "At[StepEnd]", "At[StepEnd, TrainingPhase]"),
    row(
        "so its handlers would never run",
        """
        class Saved(Event): ...

        class Mine(Callback):
            @on(Saved, TrainingPhase)
            def show(self, event, phase, learner): ...
        """,
        """
        class Saved(HostEvent): ...

        class Mine(Callback):
            @on(Saved, TrainingPhase)
            def show(self, event, phase, learner): ...

        fit(Mine())
        """,
    ),
    row(
        "`access` of a handler must be a mapping",
        """
        class Mine(Callback):
            @on(StepEnd, TrainingPhase, access="loss")
            def show(self, event, phase, learner): ...
        """,
        """
        class Mine(Callback):
            def stateaccess(self): return {"step": {"loss": Read()}}
            @on(StepEnd, TrainingPhase, access={"step": {"loss": Read()}})
            def show(self, event, phase, learner): ...

        fit(Mine())
        """,
    ),
    row(
        "`when` of a handler must be a schedule",
        """
        class Mine(Callback):
            @on(StepEnd, TrainingPhase, when=10)
            def show(self, event, phase, learner): ...
        """,
        """
        class Mine(Callback):
            @on(StepEnd, TrainingPhase, when=EverySteps(10))
            def show(self, event, phase, learner): ...

        fit(Mine())
        """,
    ),
    row(
        "takes an event and a phase, not 3",
        """
        class Mine(Callback):
            @on(StepBegin, StepEnd, TrainingPhase)
            def show(self, event, phase, learner): ...
        """,
        """
        class Mine(Callback):
            @on(StepBegin | StepEnd, TrainingPhase)
            def show(self, event, phase, learner): ...

        fit(Mine())
        """,
    ),
    row(
        "cannot be scheduled by",
        """
        class Mine(Callback):
            @on(BackwardEnd, TrainingPhase, when=EverySeconds(10))
            def scale(self, event, phase, learner): ...
        """,
        """
        class Mine(Callback):
            @on(BackwardEnd, TrainingPhase, when=EverySteps(10))
            def scale(self, event, phase, learner): ...

            @on(StepEnd, TrainingPhase, when=EverySeconds(10))
            def show(self, event, phase, learner): ...

        class Epochs(Callback):
            @on(BackwardEnd, TrainingPhase, when=EveryEpochs(1))
            def scale(self, event, phase, learner): ...

        fit(Mine(), Epochs())
        """,
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=[row.says for row in ROWS])
def test_each_fix_works(row, tmp_path):
    check_row(row, tmp_path)
