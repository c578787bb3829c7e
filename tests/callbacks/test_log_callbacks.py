"""LogMetrics, LogHyperParams, LogHistograms and LogVisualization: names, steps and numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import (
    DeclarationError,
    MissingStateError,
    Read,
    every,
    inject,
)
from fluxcb._declare.signatures import shown_path
from fluxcb.callbacks import (
    CustomCallback,
    HyperParamSetterWithFunc,
    LearningRate,
    LogHistograms,
    LogHyperParams,
    LogMetrics,
    LogVisualization,
    Metric,
    Metrics,
    Monitors,
    ProcessArrays,
    Scheduler,
)
from fluxcb.events import Trigger
from fluxcb.logging import Histogram, JSONLinesBackend, LoggerBackend, Text
from fluxcb.phases import TrainingPhase, ValidationPhase
from fluxcb.testing import testlearner

BACKEND = "pass the backend to `Monitors(...)`, and write `LogMetrics()`"

PERIODS = "\n  why:   periods and counts are whole numbers of steps or epochs\n  fix:   pass a positive int"
FUSING = pytest.mark.parametrize("steps_per_call", [1, 7, "auto"])


def still(params, *callbacks, gradient=None, batches=4, **kwargs):
    """Build a Learner whose parameters stay, with these gradients."""
    gradient = jax.tree.map(jnp.copy, params if gradient is None else gradient)

    def loss(params, batch, key):
        terms = [jnp.sum(params[name] * gradient[name]) for name in gradient]
        return sum(terms)

    return fluxcb.Learner.from_loss(
        params,
        loss,
        optax.sgd(0.0),
        data=[jnp.float32(i + 1) for i in range(batches)],
        callbacks=list(callbacks),
        default_callbacks=False,
        **kwargs,
    )


def history(learner, name):
    return learner.cbstate["monitors"].history(name)


# --- LogMetrics -------------------------------------------------------------------------------------------------------


def bias(outputs, ys):
    return jnp.mean(outputs - ys)


@FUSING
def test_each_metric_is_logged_once_per_step_and_per_epoch(steps_per_call):
    learner = testlearner(Metrics(bias), LogMetrics(), Monitors(), steps_per_call=steps_per_call)
    learner.fit(2)
    epoch, step = learner.cbstate["metrics_epoch"], learner.cbstate["metrics_step"]["training"]
    assert learner.cbstate["monitors"].names() == [
        "training/step/bias", "training/step/loss", "training/loss", "training/bias", "validation/loss",
        "validation/bias",
    ]  # fmt: skip
    for name in ("loss", "bias"):
        assert history(learner, f"training/step/{name}") == list(zip(range(1, 9), step[name], strict=True))
        for phase in ("training", "validation"):
            (_, first), (_, second) = epoch[phase][name]
            assert history(learner, f"{phase}/{name}") == [(4, first), (8, second)]


def test_a_period_applies_to_steps_and_not_to_epochs():
    learner = testlearner(Metrics(), every(LogMetrics(), steps=3), Monitors())
    learner.fit(2)
    assert [step for step, _ in history(learner, "training/step/loss")] == [3, 6]
    assert [step for step, _ in history(learner, "training/loss")] == [4, 8]


def test_only_epochs_are_logged_without_steps():
    learner = testlearner(Metrics(), LogMetrics(steps=False), Monitors())
    learner.fit(1)
    assert learner.cbstate["monitors"].names() == ["training/loss", "validation/loss"]
    assert "metrics" not in LogMetrics(steps=False).stateaccess().get("step", {})


def test_a_separate_validation_run_is_logged_separately():
    learner = testlearner(Metrics(), LogMetrics(), Monitors())
    learner.fit(1)
    before = len(history(learner, "training/loss"))
    learner.run_epoch(ValidationPhase())
    assert len(history(learner, "training/loss")) == before
    assert len(history(learner, "validation/loss")) == 2


def test_the_last_step_and_its_epoch_are_one_record(tmp_path):
    path = tmp_path / "log.jsonl"
    learner = testlearner(LogMetrics(), Metrics(), Monitors(JSONLinesBackend(path)), batches=2)
    learner.fit(1)
    lines = path.read_text().splitlines()
    assert len(lines) == 2
    assert '"training/step/loss"' in lines[0]
    assert '"training/loss"' not in lines[0]
    assert all(f'"{name}"' in lines[1] for name in ("training/step/loss", "training/loss", "validation/loss"))


def test_log_metrics_names_the_missing_callback(refused):
    with refused(
        MissingStateError,
        "LogMetrics(steps=False) appends to `cbstate.monitors`, which no callback creates.\n"
        f"  where: LogMetrics.stateaccess  {place(LogMetrics)}\n"
        "  why:   it would fail at the first handler that appends to it\n"
        "  fix:   add `Monitors()` to the callbacks, which creates it",
    ):
        testlearner(LogMetrics(steps=False), Metrics())
    with refused(
        MissingStateError,
        "LogMetrics(steps=False) reads `cbstate.metrics_epoch`, which no callback creates.\n"
        f"  where: LogMetrics.stateaccess  {place(LogMetrics)}\n"
        "  why:   it would fail at the first handler that reads it\n"
        "  fix:   add `Metrics()` to the callbacks, which creates it",
    ):
        testlearner(LogMetrics(steps=False), Monitors())


def place(cls):
    code = cls.stateaccess.__code__
    return f"{shown_path(code.co_filename)}:{code.co_firstlineno}"


def test_any_callback_can_read_step_metrics():
    seen = []
    metric = Metric(lambda ys: jnp.max(ys), name="largest", needs=("ys",))
    learner = testlearner(
        Metrics(metric), ProcessArrays("step.metrics.largest", lambda value: seen.append(float(value)))
    )
    learner.fit(1)
    assert seen == [float(ys.max()) for _, ys in learner._state.data["training"]]


# --- LogHyperParams ---------------------------------------------------------------------------------------------------


@FUSING
def test_hyperparameters_are_logged_when_they_change(steps_per_call):
    schedule = optax.piecewise_constant_schedule(0.5, {3: 0.5, 6: 0.5})  # counts finished steps
    learner = testlearner(
        Scheduler({LearningRate: schedule}), LogHyperParams(), Monitors(), steps_per_call=steps_per_call
    )
    learner.fit(2)
    assert history(learner, "hyperparams/learning_rate") == [(1, 0.5), (4, 0.25), (7, 0.125)]


def test_a_value_set_at_trigger_is_logged_at_the_step_that_uses_it():
    halve = HyperParamSetterWithFunc(LearningRate, lambda epoch, rate: rate / 2 if epoch else None)
    learner = testlearner(halve, LogHyperParams(LearningRate), Monitors(), learning_rate=0.5)
    learner.fit(3)
    assert history(learner, "hyperparams/learning_rate") == [(1, 0.5), (5, 0.25), (9, 0.125)]


def test_a_resumed_run_does_not_log_values_again():
    first = LogHyperParams()
    learner = testlearner(first, Monitors(), learning_rate=0.5)
    learner.fit(1)
    second = LogHyperParams()
    second.load_state_dict(first.state_dict())
    resumed = testlearner(second, Monitors(), learning_rate=0.5)
    resumed.state = learner.state
    resumed.fit(1)
    assert resumed.cbstate["monitors"].names() == []


def test_all_hyperparameters_or_the_named_ones_are_logged():
    optimizer = inject(optax.adamw, learning_rate=0.5, weight_decay=0.25)
    for params, expected in (((), ["learning_rate", "weight_decay"]), (("weight_decay",), ["weight_decay"])):
        learner = testlearner(LogHyperParams(*params), Monitors(), optimizer=optimizer)
        learner.fit(1)
        assert sorted(learner.cbstate["monitors"]) == [f"hyperparams/{name}" for name in expected]


def test_missing_hyperparameters_are_errors(refused):
    with refused(
        DeclarationError,
        "`LogHyperParams` has nothing to log: this optimizer has no hyperparameters.\n"
        "  why:   only hyperparameters injected by Optax are stored in the optimizer state, where they can change\n"
        "  fix:   build the optimizer with `fluxcb.inject`, e.g. `fluxcb.inject(optax.adam, learning_rate=1e-3)`\n"
        "     or: remove `LogHyperParams`",
    ):
        testlearner(LogHyperParams(), Monitors(), optimizer=optax.sgd(0.1))
    with pytest.raises(MissingStateError, match=r"needs `hyperparams.momentum`, which this optimizer does not have"):
        testlearner(LogHyperParams("momentum"), Monitors())
    both = optax.chain(inject(optax.sgd, learning_rate=0.1), inject(optax.sgd, learning_rate=0.2))
    with pytest.raises(MissingStateError, match=r"needs `hyperparams.learning_rate`, which this optimizer has 2 times"):
        testlearner(LogHyperParams(), Monitors(), optimizer=both)
    with refused(DeclarationError, "`LogHyperParams` received `learning_rate` twice.\n  fix:   name it once"):
        LogHyperParams(LearningRate, "learning_rate")


# --- LogHistograms ----------------------------------------------------------------------------------------------------


class Kept(LoggerBackend):
    loggables = (Histogram,)
    name = "Kept()"

    def __init__(self):
        self.puts = []

    def log(self, name, loggable, *, step, epoch, seconds):
        self.puts.append((step, name))


@FUSING
def test_counts_of_parameters_and_gradients_at_due_steps(steps_per_call):
    params = {"dense": {"w": jnp.array([0.0, 1.0, 1.5, 3.5, 4.0])}, "b": jnp.array([[-1.0, 1.0]])}
    kept = Kept()
    learner = fluxcb.Learner.from_loss(
        params,
        lambda params, batch, key: batch * jnp.sum(params["dense"]["w"]) + jnp.sum(params["b"] ** 2),
        optax.sgd(0.0),
        data=[jnp.float32(i + 1) for i in range(5)],
        callbacks=[LogHistograms(freq=2, bins=4), Monitors(kept)],
        default_callbacks=False,
        steps_per_call=steps_per_call,
    )
    learner.fit(1)
    names = ["params/b", "params/dense/w", "grads/b", "grads/dense/w"]
    assert kept.puts == [(step, name) for step in (2, 4) for name in names]
    hub = learner.cbstate["monitors"]
    found = {name: (hub.latest(name).counts.tolist(), hub.latest(name).edges.tolist()) for name in names}
    assert found["params/dense/w"] == ([1, 2, 0, 2], [0, 1, 2, 3, 4])
    assert found["params/b"] == ([1, 0, 0, 1], [-1, -0.5, 0, 0.5, 1])
    assert found["grads/b"] == ([1, 0, 0, 1], [-2, -1, 0, 1, 2])  # 2 b
    counts, (low, high) = found["grads/dense/w"]
    assert counts == [5]  # all are the batch of step 4
    assert low < 4 < high


def test_counts_are_equal_to_those_of_numpy():
    values = np.random.default_rng(0).normal(size=(30, 40)).astype(np.float32)
    learner = still({"w": jnp.asarray(values)}, LogHistograms("params", freq=1, bins=32), Monitors())
    learner.fit(1)
    found = learner.cbstate["monitors"].latest("params/w")
    counts, edges = np.histogram(values.astype(np.float64), 32)
    np.testing.assert_allclose(found.edges, edges, atol=1e-6)
    assert np.abs(np.cumsum(found.counts) - np.cumsum(counts)).max() <= 1  # a number at an edge may fall to either side
    assert found.counts.sum() == values.size


@pytest.mark.parametrize(
    ("values", "counts", "inside"),
    [
        ([1.0, np.nan, 2.0, np.inf, 2.0], [1, 2], 1.5),  # numbers that are not finite are left out
        ([np.nan, np.inf], [0], None),
        ([7.0, 7.0], [2], 7.0),
        ([-3e38, 3e38, 2e38], [1, 2], 0.0),  # farther apart than the largest float32
    ],
)
def test_special_values_are_counted_correctly(values, counts, inside):
    learner = still(
        {"w": jnp.array(values)}, LogHistograms("params", freq=1, bins=2), Monitors(), gradient={"w": jnp.zeros(())}
    )
    learner.fit(1)
    found = learner.cbstate["monitors"].latest("params/w")
    assert found.counts.tolist() == counts
    assert inside is None or found.edges[0] < inside < found.edges[-1]


def test_half_precision_arrays_have_histograms_and_other_types_do_not():
    params = {"half": jnp.array([0.0, 1.0, 1.0], jnp.bfloat16)}
    learner = still(params, LogHistograms(["grads", "updates"], freq=4, bins=2), Monitors())
    learner.fit(1)
    hub = learner.cbstate["monitors"]
    assert hub.names() == ["grads/half", "updates/half"]
    assert hub.latest("grads/half").counts.tolist() == [1, 2]
    assert hub.latest("updates/half").counts.tolist() == [3]  # 0 times the gradient


def test_a_window_ends_at_due_steps_only_and_the_next_step_does_not_wait():
    learner = still({"w": jnp.zeros((4, 4))}, LogHistograms(freq=50), Monitors())
    plan = learner._core.window_plan(learner.phases[0])
    assert [(bound.call.handler.name, bound.blocks, bound.why) for bound in plan.bounds] == [
        ("log", False, "reads `cbstate.histograms`, 528 bytes of the carry")  # 2 * (64 + 2) numbers
    ]


SOME_OF = "`of` of LogHistograms must name some of `params`, `grads`, `updates`, each once, not "
ONE_OF = '\n  fix:   write e.g. `LogHistograms("grads")`'


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"of": "weights"}, f"{SOME_OF}'weights'.{ONE_OF}"),
        ({"of": ["param"]}, f"{SOME_OF}['param']. Did you mean `params`?{ONE_OF}"),
        ({"of": ()}, f"{SOME_OF}().{ONE_OF}"),
        ({"of": ("grads", "grads")}, f"{SOME_OF}('grads', 'grads').{ONE_OF}"),
        ({"freq": 0}, f"`freq` of LogHistograms (steps) must be a whole number of at least 1, not 0.{PERIODS}"),
        ({"bins": 2.5}, f"`bins` of LogHistograms must be a whole number of at least 1, not 2.5.{PERIODS}"),
    ],
)  # fmt: skip
def test_log_histograms_rejects_invalid_arguments(arguments, text, refused):
    with refused(DeclarationError, text):
        LogHistograms(**arguments)


# --- LogVisualization -------------------------------------------------------------------------------------------------


@FUSING
def test_images_are_computed_from_the_values_of_due_steps(steps_per_call):
    seen = []

    def show(xs, loss):
        seen.append(xs.copy())
        return np.clip(xs, 0, 1)

    callback = LogVisualization(show, ["step.xs", "step.loss"], freq=3, name="inputs")
    learner = testlearner(callback, Monitors(), batches=7, steps_per_call=steps_per_call)
    learner.fit(1)
    data = learner._state.data["training"]
    assert [xs.tolist() for xs in seen] == [data[2][0].tolist(), data[5][0].tolist()]
    pixels = learner.cbstate["monitors"].latest("inputs").data
    np.testing.assert_array_equal(pixels[0, ..., 0], np.rint(np.clip(data[5][0], 0, 1) * 255))


def test_paths_into_the_train_state_are_logged_at_trigger_with_any_loggable():
    callback = LogVisualization(lambda w: Text(f"w is {float(w):.0f}"), "params.w", name="text")
    learner = testlearner(callback, Monitors())
    learner.fit(25)
    assert learner.cbstate["monitors"].latest("text") == Text("w is 3")
    assert [handler.title() for handler in callback.handlers()] == ["(Trigger, AbstractTrainingPhase)"]


def test_a_result_that_is_not_an_image_is_rejected():
    learner = testlearner(LogVisualization(lambda loss: loss, "step.loss", freq=1), Monitors())
    with pytest.raises(DeclarationError, match=r"^An image has the shape .*\n  where: put as `visualization`"):
        learner.fit(1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"fn": 3}, "`LogVisualization` calls its function with 1 value, one per name; 3 does not take them.\n"
         "  why:   3 is not a callable object\n"
         "  fix:   write a function that takes one argument per name, in the same order"),
        ({"freq": 0}, f"`freq` of LogVisualization (steps) must be a whole number of at least 1, not 0.{PERIODS}"),
        ({"name": " "}, "`name` of LogVisualization must be a name to log under, not ' '.\n"
         '  fix:   write e.g. `name="kernels"`'),
    ],
)  # fmt: skip
def test_log_visualization_rejects_invalid_arguments(arguments, text, refused):
    with refused(DeclarationError, text):
        LogVisualization(**{"fn": abs, "names": "step.ys", **arguments})


def test_readers_at_trigger_see_the_values_of_the_epoch():
    found = []

    def look(learner):
        found.append(learner.cbstate.monitors.latest("training/loss"))

    reader = CustomCallback(look, Trigger, TrainingPhase, access={"cbstate": {"monitors": Read()}})
    learner = testlearner(reader, LogMetrics(), Metrics(), Monitors())
    learner.fit(2)
    assert found == [value for _, value in learner.cbstate["metrics_epoch"]["training"]["loss"]]


@pytest.mark.parametrize(
    ("arguments", "named", "what", "fix"),
    [
        ((JSONLinesBackend("log.jsonl"),), {}, "takes no arguments by position, and was given 1.", BACKEND),
        ((10,), {}, "takes no arguments by position, and was given 1.", "write `every(LogMetrics(), steps=10)`"),
        ((), {"freq": 10}, "has no argument `freq`.", "write `every(LogMetrics(), steps=10)`"),
        ((), {"loggers": []}, "has no argument `loggers`.", BACKEND),
    ],
)
def test_log_metrics_with_invalid_arguments_raises(arguments, named, what, fix):
    with pytest.raises(DeclarationError) as error:
        LogMetrics(*arguments, **named)
    assert str(error.value) == f"`LogMetrics` {what}\n  why:   it takes steps\n  fix:   {fix}"


@pytest.mark.parametrize(
    ("steps", "fix"), [(5, "write `every(LogMetrics(), steps=5)`"), (JSONLinesBackend("log.jsonl"), BACKEND)]
)
def test_log_metrics_with_steps_that_are_no_bool_raises(steps, fix):
    with pytest.raises(DeclarationError) as error:
        LogMetrics(steps=steps)
    assert str(error.value) == f"`steps` of `LogMetrics` must be True or False, not {steps!r}.\n  fix:   {fix}"
