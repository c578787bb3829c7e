"""The suggested fixes in the messages about names and values that handlers use: one application is enough."""

import pytest

from fluxcb import AccessError, ConflictError, DataError, DeclarationError, TraceError
from tests.fixes.programs import check_row, row


def uses(event: str, body: str, access: str = "{}") -> str:
    """Return a program that trains with one callback, whose only handler has one line."""
    return (
        "class Uses(Callback):\n"
        f"    def stateaccess(self): return {access}\n"
        "    @on\n"
        f"    def use(self, event: {event}, phase: TrainingPhase, learner):\n"
        f"        {body}\n"
        "fit(Uses())\n"
    )


def with_monitors(body: str, access: str) -> str:
    """Return such a program for EpochEnd, with a `Monitors`."""
    return uses("EpochEnd", body, access).replace("Uses())", "Uses(), Monitors())")


FLAG = '{"step": {"skip": Append()}}'
CONTROL = '{"control": Append()}'
GRADS = '{"step": {"grads": Write()}}'
LOSS = '{"step": {"loss": Write()}}'
MINE = '{"step": {"my_loss": Write()}}'
ADD_ONE = "class Adds(Callback):\n    def stateaccess(self): return {0}\n    @on\n" + (
    "    def add(self, event: BackwardEnd, phase: TrainingPhase, learner):\n        learner.step.{1} = jnp.ones(())\n"
)
SEVERAL = "scores, ys = jnp.zeros((2, 3)), jnp.zeros(2, int)\n"


def provided(name: str) -> str:
    """Return a program in which another callback provides a value of the step."""
    access = '{"step": {"NAME": Read()}}'.replace("NAME", name)
    other = ADD_ONE.format(access.replace("Read", "Write"), name)
    return other + uses("StepEnd", f"learner.step.{name}", access).replace("Uses())", "Adds(), Uses())")


PUT = 'learner.cbstate.monitors.put_scalar("my/loss", 1.0)'
SKIP = "learner.step.skip = learner.step.loss > 100"
SKIPS = '{"step": {"loss": Read(), "skip": Append()}}'
GAP = '{"cbstate": {"monitors": {"gap": Append()}}}'
LOGS = '{"cbstate": {"monitors": Append()}}'

ROWS = [
    # flags and logged values, to which several callbacks add
    row(
        "may not read `cbstate.monitors`",
        uses("StepEnd", PUT).replace("Uses())", "Uses(), Monitors(), Metrics(), LogMetrics())"),
        uses("StepEnd", PUT, LOGS).replace("Uses())", "Uses(), Monitors(), Metrics(), LogMetrics())"),
        kind=AccessError,
    ),
    row(
        "declares only to read `cbstate.monitors`",
        uses("StepEnd", PUT, LOGS.replace("Append", "Read")).replace("Uses())", "Uses(), Monitors())"),
        uses("StepEnd", PUT, LOGS).replace("Uses())", "Uses(), Monitors(), Metrics(), LogMetrics())"),
        kind=AccessError,
    ),
    row(
        "may not write `step.skip`",
        uses("BackwardEnd", SKIP, '{"step": {"loss": Read()}}').replace("Uses())", "Uses(), StopOnNaNLoss())"),
        # As `stateaccess` would have it: the parts of `step` together.
        uses("BackwardEnd", SKIP, SKIPS).replace("Uses())", "Uses(), StopOnNaNLoss())") + f"# {FLAG}",
        kind=AccessError,
    ),
    row(
        "A value was assigned to `gap` of `learner.cbstate.monitors`",
        with_monitors("learner.cbstate.monitors.gap = 1.0", LOGS),
        with_monitors('value = 1.0; learner.cbstate.monitors.put_scalar("gap", value)', LOGS),
        kind=AccessError,
    ),
    row(
        "assigns `cbstate.monitors.gap`",
        with_monitors("learner.cbstate.monitors.gap = 1.0", GAP),
        with_monitors('value = 1.0; learner.cbstate.monitors.put_scalar("gap", value)', GAP),
        kind=AccessError,
    ),
    row(
        "uses `cbstate.monitors.log`, which is not a method. Did you mean `put_scalar`?",
        with_monitors('learner.cbstate.monitors.log("gap", 1.0)', GAP),
        with_monitors('learner.cbstate.monitors.put_scalar("gap", 1.0)', GAP),
        with_monitors("learner.cbstate.monitors.log.put_scalar(1.0)", GAP.replace("gap", "log")),
        kind=AccessError,
    ),
    row(
        "both write `step.skip`",
        uses("BackwardEnd", SKIP, SKIPS.replace("Append", "Write")).replace("Uses())", "Uses(), StopOnNaNLoss())"),
        uses("BackwardEnd", SKIP, SKIPS).replace("Uses())", "Uses(), StopOnNaNLoss())") + "# step.skip",
        uses("BackwardEnd", SKIP, SKIPS.replace("Append", "Write")).replace(
            "fit(Uses())", "fit(in_order(Uses(), StopOnNaNLoss()))"
        ),
        uses("BackwardEnd", SKIP, SKIPS.replace("Append", "Write"))
        .replace("class Uses(Callback):\n", "class Uses(Callback):\n    def runafter(self): return (StopOnNaNLoss,)\n")
        .replace("Uses())", "Uses(), StopOnNaNLoss())")
        + "# Uses.runafter()",
        kind=ConflictError,
    ),
    # names of other libraries
    row(
        "reads `progress.global_step`, which is not a counter. Did you mean `step`?",
        uses("StepEnd", "learner.progress.global_step"),
        uses("StepEnd", "learner.progress.step"),
        kind=AccessError,
    ),
    row(
        "reads `progress.iteration`, which is not a counter. Did you mean `step`?",
        uses("BackwardBegin", "learner.progress.iteration"),
        uses("BackwardBegin", "learner.progress.step"),
        kind=AccessError,
    ),
    row(
        "reads `progress.weather`, which is not a counter.",
        uses("StepEnd", "learner.progress.weather"),
        uses("StepEnd", "learner.progress.epoch"),
        kind=AccessError,
    ),
    row(
        "reads `iteration`, which is not part of the state",
        uses("StepEnd", "learner.iteration"),
        uses("StepEnd", "learner.progress.step"),
        kind=AccessError,
    ),
    row(
        "may not read `step.index`",
        uses("StepEnd", "learner.step.index"),
        uses("StepEnd", "learner.progress.step"),
        "# stateaccess\n" + provided("index"),
        kind=AccessError,
    ),
    row(
        "may not read `step.weather`",
        uses("StepEnd", "learner.step.weather"),
        "# stateaccess\n" + provided("weather"),
        uses("StepEnd", "learner.step.grads", '{"step": {"grads": Read()}}'),
        kind=AccessError,
    ),
    row(
        "writes `epoch`, which only the engine may write",
        uses("StepEnd", "learner.epoch = 3"),
        """
        class Counts(Callback):
            def stateaccess(self): return {"cbstate": {"own": Write()}}
            def init(self, learner): learner.cbstate.own = 0
            @on
            def count(self, event: StepEnd, phase: TrainingPhase, learner): learner.cbstate.own += 1
        fit(Counts())
        """,
        kind=AccessError,
    ),
    # values of the step that a host handler cannot write
    row(
        "writes `step.loss`, which the step has computed",
        uses("StepEnd", "learner.step.loss = 1.0"),
        uses("BackwardBegin", "learner.step.loss = 2 * learner.step.loss", LOSS),
        uses("StepEnd", "learner.step.my_loss = 1.0", MINE),
        kind=AccessError,
    ),
    row(
        "writes `step.loss`, which the step has computed",
        uses("StepEnd", "learner.step.loss = 1.0", LOSS),
        uses("BackwardBegin", "learner.step.loss = 2 * learner.step.loss", LOSS),
        uses("StepEnd", "learner.step.my_loss = 1.0", MINE),
        kind=AccessError,
    ),
    row(
        "writes `loss`, which is not part of the state",
        uses("StepEnd", "learner.loss = 1.0"),
        uses("BackwardBegin", "learner.step.loss = 2 * learner.step.loss", LOSS),
        uses("StepEnd", "learner.step.my_loss = 1.0", MINE),
        kind=AccessError,
    ),
    row(
        "writes `step.updates`, which the step has computed",
        uses("StepEnd", "learner.step.updates = 1.0"),
        uses("StepEnd", "learner.step.my_updates = 1.0", '{"step": {"my_updates": Write()}}'),
        kind=AccessError,
    ),
    row(
        "writes `step.grads` at BackwardBegin, but it can only be written at BackwardEnd",
        uses("BackwardBegin", "learner.step.grads = None"),
        uses("BackwardEnd", "learner.step.grads = learner.step.grads", GRADS),
        kind=AccessError,
    ),
    row(
        "writes `step.skip` in a host handler",
        uses("StepEnd", "learner.step.skip = True"),
        uses("BackwardEnd", "learner.step.skip = True", FLAG),
        uses("StepBegin", "if learner.progress.step == 1: raise CancelStep  # `CancelStep`", CONTROL),
        uses("StepEnd", "raise CancelFitting", CONTROL),
        kind=AccessError,
    ),
    row(
        "writes `step.skip`, but it has no traced handler",
        uses("StepEnd", "learner.step.skip = True", FLAG),
        uses("BackwardEnd", "learner.step.skip = True", FLAG),
        uses("StepBegin", "if learner.progress.step == 1: raise CancelStep  # `CancelStep`", CONTROL),
        uses("StepEnd", "raise CancelFitting", CONTROL),
        kind=AccessError,
    ),
    # values of the wrong form
    row(
        'changes the structure, shape or dtype of `step.grads`: expected {"w": float32[1, 1]}, got float 1.0.',
        uses("BackwardEnd", "learner.step.grads = 1.0", GRADS),
        uses("BackwardEnd", "learner.step.grads = jax.tree.map(lambda old: 0.5 * old, learner.step.grads)", GRADS),
        kind=TraceError,
    ),
    row(
        'changes the structure, shape or dtype of `params`: expected {"w": float32[1, 1]}, got float 1.0.',
        uses("EpochEnd", "learner.params = 1.0", '{"params": Write()}'),
        uses("EpochEnd", "learner.params = jax.tree.map(lambda old: 0.5 * old, learner.params)", '{"params": Write()}'),
        kind=DeclarationError,
    ),
    row(
        "changes the structure, shape or dtype of `step.loss`",
        uses("BackwardBegin", "learner.step.loss = learner.step.loss[None]", LOSS),
        uses("BackwardBegin", "learner.step.loss = jnp.mean(learner.step.loss[None])", LOSS),
        kind=TraceError,
    ),
    row(
        "writes str 'yes' to `step.skip`, which is bool[]",
        uses("BackwardEnd", "learner.step.skip = 'yes'", FLAG),
        uses("BackwardEnd", "learner.step.skip = True", FLAG),
        kind=TraceError,
    ),
    row(
        "sets `hyperparams.learning_rate` to str '0.1'",
        "fit(Scheduler({LearningRate: lambda step: '0.1'}))",
        "fit(Scheduler({LearningRate: lambda step: 0.1}))",
        kind=TraceError,
    ),
    row(
        "`hyperparams.learning_rate`: expected float32[], got str '0.1'",
        uses("StepEnd", "learner.hyperparams.learning_rate = '0.1'", '{"hyperparams": {"learning_rate": Write()}}'),
        uses("StepEnd", "learner.hyperparams.learning_rate = 0.1", '{"hyperparams": {"learning_rate": Write()}}'),
        kind=DeclarationError,
    ),
    # objects of the host in traced handlers
    row(
        "uses `cbstate.monitors` in a traced handler",
        uses(
            "BackwardBegin",
            'learner.cbstate.monitors.put_scalar("my_value", learner.step.loss)',
            '{"step": {"loss": Read()}, "cbstate": {"monitors": Append()}}',
        ).replace("Uses()", "Monitors(), Uses()"),
        """
        class Logs(Callback):
            def stateaccess(self):
                declared = {"step": {"my_value": Write()}}
                return {"step": {"loss": Read(), **declared["step"]}, "cbstate": {"monitors": Append()}}
            @on
            def keep(self, event: BackwardBegin, phase: TrainingPhase, learner):
                value = learner.step.loss
                learner.step.my_value = value
            @on
            def log(self, event: StepEnd, phase: TrainingPhase, learner):
                learner.cbstate.monitors.put_scalar("my_value", learner.step.my_value)
        fit(Monitors(), Logs())
        """,
        kind=TraceError,
    ),
    row(
        "uses `cbstate.history` in a traced handler",
        uses("BackwardBegin", "learner.cbstate.history", '{"cbstate": {"history": Read()}}').replace(
            "Uses()", "Recorder(), Uses()"
        ),
        uses("StepEnd", "learner.cbstate.history", '{"cbstate": {"history": Read()}}').replace(
            "Uses()", "Recorder(), Uses()"
        ),
        kind=TraceError,
    ),
]


ROWS += [
    # data, and outputs that are no array
    row(
        "is a one-shot iterator (generator), and it is used up",
        "def batches(): yield from BATCHES\nfit(data=batches(), epochs=2)",
        "def batches(): yield from BATCHES\nfit(data=batches, epochs=2)",
        "class Batches:\n    def __iter__(self): return iter(BATCHES)\nfit(data=Batches(), epochs=2)",
        "import itertools\nlearner(data=itertools.cycle(BATCHES)).fit(2, steps_per_epoch=100)",
        kind=DataError,
    ),
    row(
        "is a one-shot iterator (generator), and it is used up",
        "def batches(n): yield from BATCHES[:n]\nfit(data=batches(2), epochs=2)",
        "def batches(n): yield from BATCHES[:n]\nfit(data=lambda: batches(2), epochs=2)",
        "class Batches:\n    def __iter__(self): return iter(BATCHES)\nfit(data=Batches(), epochs=2)",
        "import itertools\nlearner(data=itertools.cycle(BATCHES)).fit(2, steps_per_epoch=100)",
        kind=DataError,
    ),
    row(
        "`accuracy` was given outputs that are a tuple of 2.",
        SEVERAL + "fluxcb.callbacks.accuracy((scores, scores), ys)",
        SEVERAL + 'Metrics(Metric(lambda outputs, ys: accuracy(outputs[0], ys), name="accuracy"))',
    ),
    row(
        "`accuracy` was given outputs that are a dict with 'logits', 'hidden'.",
        SEVERAL + "fluxcb.callbacks.accuracy({'logits': scores, 'hidden': scores}, ys)",
        SEVERAL + "Metrics(Metric(lambda outputs, ys: accuracy(outputs['logits'], ys), name=\"accuracy\"))",
    ),
    row(
        "`like` has 1 at `like['w']`, which is not an array.",
        "fit(Checkpointer('runs'))\nload_params('runs', like={'w': 1})",
        "fit(Checkpointer('runs'))\nload_params('runs', like={'w': jax.ShapeDtypeStruct((1, 1), jnp.float32)})"
        "  # jax.ShapeDtypeStruct((3,), jnp.float32)",
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=[row.says for row in ROWS])
def test_one_application_of_each_fix_works(row, tmp_path):
    check_row(row, tmp_path)
