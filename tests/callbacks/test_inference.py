"""`InferenceRunner` and the inferencers: exact statistics on other data, without any effect on training."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import (
    Append,
    Callback,
    ConflictError,
    DataError,
    DeclarationError,
    Learner,
    MissingStateError,
    Read,
    Write,
    every,
    in_order,
    inject,
    on,
)
from fluxcb.callbacks import (
    BinaryClassificationStats,
    ClassificationError,
    EarlyStopping,
    Inferencer,
    InferenceRunner,
    LearningRate,
    Metrics,
    Monitors,
    ParameterEMA,
    ScalarStats,
    StatMonitorParamSetter,
    accuracy,
)
from fluxcb.data import ArrayLoader
from fluxcb.events import ComputeEnd, ForwardBegin, LossBegin, StepEnd, Trigger
from fluxcb.phases import AbstractTrainingPhase, AbstractValidationPhase, Phase, TrainingPhase, ValidationPhase
from fluxcb.testing import testlearner

SIZES = (8, 8, 3)


def pairs(sizes=SIZES, seed=7):
    """Return batches that no line fits, so that their losses differ."""
    rng = np.random.default_rng(seed)
    return [tuple(rng.normal(size=(2, n, 1)).astype(np.float32)) for n in sizes]


def mean_loss(params, batches):
    """Return the mean squared error over all samples, in float64."""
    xs, ys = (np.concatenate([batch[i] for batch in batches]).astype(np.float64) for i in (0, 1))
    return float(np.mean((float(params["w"]) * xs + float(params["b"]) - ys) ** 2))


def last(learner, statistic="loss", name="inference"):
    return learner.cbstate["metrics_epoch"][name].last(statistic)


class Unsized:
    """Batches without a length."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


class Claiming(Unsized):
    """Batches with a length."""

    def __init__(self, batches, length):
        super().__init__(batches)
        self.length = length

    def __len__(self):
        return self.length


class Gather(Inferencer):
    """Record all values, and the names of the methods that were called."""

    def __init__(self, *names):
        self.names, self.calls, self.values, self.samples = names, [], [], []

    def fetches(self):
        return self.names

    def before(self):
        self.calls.append("before")

    def on_fetches(self, values, samples):
        self.calls.append("on_fetches")
        self.values.append(values)
        self.samples.append(samples)

    def after(self):
        self.calls.append("after")
        return {}

    def abandon(self):
        self.calls.append("abandon")


# -- statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [pairs(), Unsized(pairs()), Claiming(pairs(), 3)], ids=["list", "unsized", "sized"])
def test_the_mean_is_over_all_samples_if_the_last_batch_is_smaller(data):
    learner = testlearner(InferenceRunner(data, ScalarStats("loss")))
    for _ in range(2):
        learner.fit(1)
        assert last(learner) == pytest.approx(mean_loss(learner.params, pairs()), rel=1e-6)
    by_batch = np.mean([mean_loss(learner.params, [batch]) for batch in pairs()])
    assert abs(by_batch - last(learner)) > 0.01  # the mean of the batch means is different


def test_a_round_calls_before_then_each_batch_in_order_then_after():
    gather = Gather("outputs", "batch")
    learner = testlearner(InferenceRunner(pairs(), [gather]))
    learner.fit(2)
    assert gather.calls == ["before", "on_fetches", "on_fetches", "on_fetches", "after"] * 2
    assert gather.samples == [8, 8, 3] * 2
    outputs = np.concatenate([values["outputs"] for values in gather.values[3:]])
    expected = np.concatenate([float(learner.params["w"]) * xs + float(learner.params["b"]) for xs, _ in pairs()])
    np.testing.assert_allclose(outputs, expected, atol=1e-6)
    assert isinstance(gather.values[0]["outputs"], np.ndarray)
    np.testing.assert_array_equal(gather.values[2]["batch"][1], pairs()[2][1])


def test_classification_errors_are_counted_over_all_samples():
    # 3 of 4 and 0 of 1 are wrong: that is 3 / 5, not the mean of 0.75 and 0.
    right, wrong = [0.0, 1.0], [1.0, 0.0]
    batches = [(np.float32([wrong, right, wrong, wrong]), np.int32([1, 1, 1, 1])), (np.float32([right]), np.int32([1]))]
    learner = Learner(
        (lambda key, xs: {"s": jnp.ones(())}, lambda params, xs: params["s"] * xs),
        lambda outputs, ys: jnp.mean(outputs) * 0,
        optax.sgd(0.1),
        data=batches[:1],
        callbacks=[InferenceRunner(batches, ClassificationError(summary_name="wrong"))],
        default_callbacks=False,
    )
    learner.fit(1)
    assert last(learner, "wrong") == 3 / 5


def test_binary_stats_are_computed_over_all_data():
    stats = BinaryClassificationStats("pred", "label", prefix="val")
    stats.before()
    # The example of tensorpack, in two batches: predictions 1100, labels 1010.
    stats.on_fetches({"pred": np.array([1, 1, 0]), "label": np.array([1, 0, 1])}, 3)
    stats.on_fetches({"pred": np.array([False]), "label": np.array([False])}, 1)
    assert stats.after() == {"val_precision": 0.5, "val_recall": 0.5}
    stats.before()  # 2 of 3 predicted positives are correct; 2 of 5 positives are found
    stats.on_fetches({"pred": np.array([1, 1, 1, 0, 0, 0]), "label": np.array([1, 1, 0, 1, 1, 1])}, 6)
    assert stats.after() == {"val_precision": 2 / 3, "val_recall": 2 / 5}


@pytest.mark.parametrize(
    ("predicted", "labels", "expected"),
    [([0, 0], [1, 0], (0.0, 0.0)), ([1, 0], [0, 0], (0.0, 0.0)), ([0, 0], [0, 0], (0.0, 0.0))],
)
def test_precision_and_recall_of_nothing_are_0(predicted, labels, expected):
    stats = BinaryClassificationStats("pred", "label")
    stats.before()
    stats.on_fetches({"pred": np.array(predicted), "label": np.array(labels)}, 2)
    assert tuple(stats.after().values()) == expected


def test_a_threshold_makes_predictions_of_scores():
    stats = BinaryClassificationStats("outputs", threshold=0.5)
    stats.before()
    stats.on_fetches({"outputs": np.array([0.5, 0.6, 0.9]), "ys": np.array([1, 1, 0])}, 3)
    assert stats.after() == {"precision": 0.5, "recall": 0.5}  # 0.5 is not above the threshold


def test_parts_of_a_loss_functions_aux_are_fetched():
    def loss(params, batch, key):
        distance = params["w"] - batch
        return jnp.mean(distance**2), {"wrong": distance > 0.5, "least": jnp.min(distance)}

    learner = Learner.from_loss(
        {"w": jnp.float32(1.0)},
        loss,
        optax.sgd(0.0),
        data=[np.zeros(2, np.float32)],
        callbacks=[
            InferenceRunner(
                [np.float32([0.0, 1.0]), np.float32([0.0])],
                [ClassificationError("aux.wrong"), ScalarStats(["aux.least", "loss"])],
            )
        ],
        default_callbacks=False,
    )
    learner.fit(1)
    values = learner.cbstate["metrics_epoch"]["inference"].at(1)
    # Distances (1, 0) and (1): 2 of 3 are wrong. The minimum is 0 for two samples and 1 for one. Squares: (1, 0, 1).
    assert values == pytest.approx({"error": 2 / 3, "aux.least": 1 / 3, "loss": 2 / 3})


class Doubled(Callback):
    """Double the inputs of validation, and mark outputs that are too large."""

    def stateaccess(self):
        return {"step": {"xs": Write(), "outputs": Read(), "large": Write()}}

    @on(ForwardBegin, ValidationPhase, access={"step": {"xs": Write()}})
    def double(self, event, phase, learner):
        learner.step.xs = 2 * learner.step.xs

    @on(LossBegin, ValidationPhase, access={"step": {"outputs": Read(), "large": Write()}})
    def judge(self, event, phase, learner):
        learner.step.large = (learner.step.outputs > 1.0)[:, 0]


def test_traced_handlers_of_the_phase_run():
    gather = Gather("outputs", "large")
    learner = testlearner(Doubled(), InferenceRunner(pairs(), [gather, ClassificationError("large")]))
    learner.fit(1)
    w, b = (float(learner.params[name]) for name in "wb")
    expected = np.concatenate([w * 2 * xs + b for xs, _ in pairs()])
    np.testing.assert_allclose(np.concatenate([v["outputs"] for v in gather.values]), expected, atol=1e-6)
    assert last(learner, "error") == np.mean(expected > 1)


def test_a_custom_phase():
    class Squares(ValidationPhase):
        name = "squares"

        def step(self, learner, emit):
            learner.step.square = learner.params["w"] ** 2

    learner = testlearner(InferenceRunner(pairs(), ScalarStats("square"), phase=Squares()))
    learner.fit(1)
    assert last(learner, "square") == pytest.approx(float(learner.params["w"]) ** 2, rel=1e-6)
    counts = learner.compile_counts
    learner.fit(2)
    assert learner.compile_counts == counts


def test_an_average_of_the_parameters_can_be_used():
    runners = [InferenceRunner(pairs(), ScalarStats("loss"), name=n, average=a) for n, a in (("x", None), ("y", "ema"))]
    learner = testlearner(ParameterEMA(0.9), *runners)
    learner.fit(1)
    assert last(learner, name="x") == pytest.approx(mean_loss(learner.params, pairs()), rel=1e-6)
    assert last(learner, name="y") == pytest.approx(mean_loss(learner.cbstate["ema"]["params"], pairs()), rel=1e-6)
    assert last(learner, name="x") != last(learner, name="y")


def test_a_nan_is_a_statistic():
    batches = [(np.float32([[np.nan]]), np.float32([[0.0]]))]
    learner = testlearner(InferenceRunner(batches, ScalarStats("loss")))
    learner.fit(1)
    assert np.isnan(last(learner))


# -- where statistics go ---------------------------------------------------------------------------------------------


class Sees(Callback):
    """Record the available error values of the runner at each Trigger."""

    def __init__(self):
        self.seen = []

    def stateaccess(self):
        return {"cbstate": {"metrics_epoch": Read()}}

    @on(Trigger, AbstractTrainingPhase)
    def see(self, event, phase, learner):
        epoch = learner.progress.epoch
        self.seen.append(learner.cbstate.metrics_epoch["test"].at(epoch).get("loss"))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_readers_of_statistics_run_later_in_any_list_order(order):
    sees = Sees()
    items = [Metrics(), sees, InferenceRunner(pairs(), ScalarStats("loss"), name="test")]
    learner = testlearner(*(items[i] for i in order))
    learner.fit(2)
    values = [value for _, value in learner.cbstate["metrics_epoch"]["test"]["loss"]]
    assert sees.seen == values
    assert values[1] == pytest.approx(mean_loss(learner.params, pairs()), rel=1e-6)


def test_a_runner_needs_no_metrics_and_no_monitors():
    sees = Sees()
    learner = testlearner(sees, InferenceRunner(pairs(), ScalarStats("loss"), name="test"))
    learner.fit(1)
    assert sees.seen == [last(learner, name="test")]
    assert set(learner.cbstate) == {"metrics_epoch", "inference"}


def test_early_stopping_and_setters_watch_a_runner():
    class Worse(Inferencer):
        def __init__(self):
            self.rounds = 0

        def fetches(self):
            return ("loss",)

        def after(self):
            self.rounds += 1
            return {"badness": [3.0, 1.0, 2.0, 2.0, 2.0, 2.0][self.rounds - 1]}

    learner = testlearner(
        EarlyStopping(2, metric="badness", phase="test", mode="min"),
        StatMonitorParamSetter(LearningRate, "badness", lambda rate: rate / 10, 0.0, 2, phase="test"),
        InferenceRunner(pairs(), Worse(), name="test"),
    )
    learner.fit(6)
    assert learner.stop_reason == "test/badness: no improvement on 1 for 2 epochs (low values count as good)"
    assert learner.epoch == 4
    assert learner.hyperparams["learning_rate"] == pytest.approx(0.01)  # 2 is no improvement on 1


def test_statistics_go_to_the_monitors_with_their_steps():
    learner = testlearner(
        Monitors(), every(InferenceRunner(pairs(), ScalarStats("loss"), name="test"), steps=3), Metrics()
    )
    learner.fit(2)  # 8 steps
    history = learner.cbstate["monitors"].history("test/loss")
    log = learner.cbstate["inference"]["test"]
    assert [step for step, _ in history] == log.steps == [3, 6]
    assert [value for _, value in history] == log["loss"]
    assert learner.cbstate["metrics_epoch"]["test"]["loss"] == [(1, log["loss"][0]), (2, log["loss"][1])]


def test_later_values_are_dropped_if_the_learner_returns_to_an_earlier_state():
    learner = testlearner(Metrics(), InferenceRunner(pairs(), ScalarStats("loss"), name="test"))
    learner.fit(1)
    before = learner.state
    learner.fit(2)
    straight = learner.cbstate["inference"]["test"]["loss"], learner.cbstate["metrics_epoch"]["test"]["loss"]
    learner.state = before
    learner.fit(2)
    log = learner.cbstate["inference"]["test"]
    assert log.steps == [4, 8, 12]
    assert (log["loss"], learner.cbstate["metrics_epoch"]["test"]["loss"]) == straight


def test_two_runners_with_the_same_name_conflict():
    def runner(name):
        return InferenceRunner(pairs(), ScalarStats("loss"), name=name)

    with pytest.raises(ConflictError) as caught:
        testlearner(runner("a"), runner("a"))
    assert caught.value.what == (
        "InferenceRunner('a') and InferenceRunner('a') #2 both keep their values in `cbstate.inference.a`."
    )
    assert caught.value.fix == (
        "remove one of the two from the callbacks list",
        "pass another `name` to one of the two",
    )
    learner = testlearner(runner("a"), runner("b"))
    learner.fit(1)
    assert last(learner, name="a") == last(learner, name="b")


# -- training does not change ----------------------------------------------------------------------------------------


def noisy(callbacks, loader, **kwargs):
    """Build a Learner whose loss depends on random keys, in training and validation."""
    rng = np.random.default_rng(3)
    validation = [tuple(rng.normal(size=(2, 4, 1)).astype(np.float32))]
    return Learner.from_loss(
        {"w": jnp.zeros((1, 1))},
        lambda params, batch, key: jnp.mean((batch[0] @ params["w"] - batch[1] + jax.random.normal(key)) ** 2),
        inject(optax.adam, learning_rate=0.1),
        data=(loader, validation),
        callbacks=callbacks,
        key=5,
        **kwargs,
    )


def loader():
    xs = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]
    return ArrayLoader((xs, 3 * xs), batch_size=4, seed=1)


@pytest.mark.parametrize(
    "wrap",
    [lambda runner: runner, lambda runner: every(runner, steps=3), lambda runner: every(runner, epochs=2)],
    ids=["epochs", "every 3 steps", "every 2 epochs"],
)
@pytest.mark.parametrize("shared", [False, True], ids=["other data", "the training's own loader"])
def test_training_does_not_change_to_the_last_bit(wrap, shared, capsys):
    alone = noisy([Metrics()], loader())
    alone.fit(3)
    alone.fit(steps=7, steps_per_epoch=5)
    data = loader()
    runner = InferenceRunner(data if shared else loader(), ScalarStats("loss"))
    beside = noisy([Metrics(), wrap(runner)], data)
    beside.fit(3)
    beside.fit(steps=7, steps_per_epoch=5)
    assert beside.cbstate["inference"]["inference"].steps
    state, expected = (dict(learner.state) for learner in (beside, alone))
    same = jax.tree.map(lambda a, b: a.dtype == b.dtype and bool(jnp.all(a == b)), state, expected)
    assert all(jax.tree.leaves(same))
    for name in ("training", "validation"):
        for kept in ("metrics_epoch", "metrics_step", "history"):
            assert beside.cbstate[kept][name] == alone.cbstate[kept][name]


def test_random_keys_differ_by_batch_and_repeat_at_the_same_step():
    gather = Gather("loss")
    batch = (np.zeros((4, 1), np.float32), np.zeros((4, 1), np.float32))
    learner = noisy([every(InferenceRunner([batch, batch], gather), steps=10)], loader(), default_callbacks=False)
    before = learner.state
    learner.fit(1)
    learner.state = before
    learner.fit(1)
    first, second, again, _ = (float(values["loss"]) for values in gather.values)
    assert first != second
    assert first == again


def test_a_shape_is_compiled_once():
    compiled = []

    def note(name, seconds, **kwargs):
        if name == "/jax/core/compile/backend_compile_duration":
            compiled.append(kwargs)

    learner = testlearner(InferenceRunner(pairs(), ScalarStats("loss")))
    learner.fit(1)
    counts = learner.compile_counts
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        learner.fit(3)
        jax.jit(lambda x: x * 3.25)(1.5)  # the listener works
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert len(compiled) == 1
    assert learner.compile_counts == counts


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("declared", "what"), [(4, "there are 3"), (2, "there are more than 2")])
def test_a_declared_length_that_does_not_match_is_an_error(declared, what):
    gather = Gather("loss")
    learner = testlearner(InferenceRunner(Claiming(pairs(), declared), gather, name="test"))
    with pytest.raises(DataError) as caught:
        learner.fit(1)
    assert str(caught.value) == (
        f"The data of InferenceRunner('test') has length {declared}, but {what}.\n"
        "  where: Claiming.__len__\n"
        "  why:   the statistics would cover another number of batches than the length declares\n"
        "  fix:   correct `__len__`, or remove it; data of unknown length is read to its end"
    )
    assert gather.calls[0] == "before"
    assert gather.calls[-1] == "abandon"
    assert "after" not in gather.calls
    assert len(learner.cbstate["inference"]["test"]) == 0


def test_data_without_batches_is_an_error():
    message = (
        "The data of InferenceRunner('inference') has no batches.\n"
        "  why:   a statistic over no samples, such as an error rate of 0, would look like a real result\n"
        "  fix:   check its length and filters; with `drop_last=True`, the batch size may exceed the data"
    )
    with pytest.raises(DataError) as caught:
        InferenceRunner([], ScalarStats("loss"))
    assert str(caught.value) == message
    with pytest.raises(DataError) as caught:
        testlearner(InferenceRunner(Unsized([]), ScalarStats("loss"))).fit(1)
    assert str(caught.value) == message


def test_pair_of_arrays_is_an_error_whose_fix_works():
    xs, ys = np.zeros((4, 1), np.float32), np.zeros(4, np.int32)
    with pytest.raises(DeclarationError) as caught:
        InferenceRunner((xs, ys), ScalarStats("loss"), name="test")
    assert str(caught.value) == (
        "The data of InferenceRunner('test') is a pair of arrays, which is not a data source.\n"
        "  why:   a data source is something that yields batches\n"
        "  fix:   for inputs and targets, write `fluxcb.data.ArrayLoader((xs, ys), batch_size=32, shuffle=False)`"
    )
    InferenceRunner(fluxcb.data.ArrayLoader((xs, ys), batch_size=32, shuffle=False), ScalarStats("loss"), name="test")


@pytest.mark.parametrize(("data", "kind"), [(iter([1]), "is a one-shot iterator"), (3, "cannot be iterated")])
def test_data_must_be_iterable_again(data, kind):
    with pytest.raises(DeclarationError) as caught:
        InferenceRunner(data, ScalarStats("loss"))
    assert str(caught.value) == (
        f"The data of InferenceRunner('inference') {kind} ({type(data).__name__}).\n"
        "  why:   each round iterates over the data again\n"
        "  fix:   pass a list of batches, an `ArrayLoader`, or a class with `__iter__`"
    )


def test_an_error_of_the_data_names_the_runner_and_the_batch():
    class Failing:
        def __iter__(self):
            yield pairs()[0]
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone") as caught:
        testlearner(InferenceRunner(Failing(), ScalarStats("loss"))).fit(1)
    assert caught.value.__notes__[0] == (
        "raised by the data of InferenceRunner('inference'), when batch 2 was pulled from it"
    )


def test_an_error_of_the_model_names_the_runner_and_the_batch():
    good, bad = pairs()[0], (np.zeros((3, 2), np.float32), np.zeros((4, 1), np.float32))
    with pytest.raises(TypeError) as caught:
        testlearner(InferenceRunner([good, bad], ScalarStats("loss"))).fit(1)
    assert "raised when InferenceRunner('inference') computed batch 2 of its data" in caught.value.__notes__


def test_an_error_of_an_inferencer_names_the_inferencer_and_the_runner():
    class Failing(Inferencer):
        def fetches(self):
            return ("loss",)

        def on_fetches(self, values, samples):
            raise ZeroDivisionError("of my own")

    with pytest.raises(ZeroDivisionError) as caught:
        testlearner(InferenceRunner(pairs(), Failing())).fit(1)
    note = "raised in `on_fetches` of Failing(), an inferencer of InferenceRunner('inference')"
    assert caught.value.__notes__[0] == note


def test_a_failed_round_keeps_the_previous_statistics():
    batches = pairs()
    data = Claiming(batches, 3)
    learner = testlearner(InferenceRunner(data, ScalarStats("loss")))
    learner.fit(1)
    before = last(learner)
    data.length = 4
    with pytest.raises(DataError):
        learner.fit(1)
    data.length = 3
    assert learner.cbstate["metrics_epoch"]["inference"]["loss"] == [(1, before)]
    learner.fit(1)  # training can continue
    assert last(learner) == pytest.approx(mean_loss(learner.params, batches), rel=1e-6)


@pytest.mark.parametrize("value", ["text", None, np.ones(2)])
def test_a_statistic_must_be_a_number(value):
    class Odd(Inferencer):
        def fetches(self):
            return ("loss",)

        def after(self):
            return {"odd": value}

    with pytest.raises(DeclarationError) as caught:
        testlearner(InferenceRunner(pairs(), Odd())).fit(1)
    assert str(caught.value) == (
        f"The statistic `odd` of Odd() must be one number, not {value!r}.\n"
        "  where: Odd.after\n"
        "  fix:   return a number, or leave the statistic out"
    )


def test_two_statistics_with_the_same_name_are_an_error():
    with pytest.raises(DeclarationError) as caught:
        testlearner(InferenceRunner(pairs(), [ScalarStats("loss"), ScalarStats("loss")])).fit(1)
    assert str(caught.value) == (
        "Two inferencers of InferenceRunner('inference') return a statistic called `loss`.\n"
        "  why:   statistics are stored by name\n"
        "  fix:   rename one, or move one to its own `InferenceRunner` with another `name`"
    )


def test_metric_as_a_statistic_is_an_error_whose_fixes_work():
    def spread(outputs, ys):
        return abs(outputs - ys).max()

    class Spread(Callback):
        def stateaccess(self):
            return {"step": {"outputs": Read(), "ys": Read(), "spread": Write()}}

        @on(ComputeEnd, AbstractValidationPhase)
        def assign(self, event, phase, learner):
            learner.step.spread = spread(learner.step.outputs, learner.step.ys)

    def learner(name, *others):
        return testlearner(Metrics(spread), InferenceRunner(pairs(), ScalarStats(name), name="test"), *others)

    with pytest.raises(MissingStateError) as caught:
        learner("spread")
    assert caught.value.fix == (
        'for the metric, write "metrics.spread"',
        'if a loss function of the batch returns it in its aux, write "aux.spread"',
        "assign `learner.step.spread` in a traced handler",
    )
    learner("metrics.spread").fit(1)
    learner("spread", Spread()).fit(1)


def test_missing_values_are_an_error():
    with pytest.raises(MissingStateError) as caught:
        testlearner(InferenceRunner(pairs(), ScalarStats("lose")))
    assert re.sub(r":\d+", ":1", str(caught.value)) == (
        "InferenceRunner('inference') fetches `step.lose`, which ValidationPhase does not compute. Did you mean "
        "`loss`?\n"
        "  where: InferenceRunner.stateaccess  fluxcb/callbacks/inference/inference.py:1\n"
        "  why:   statistics are computed from step values, such as aux, loss, outputs, xs, ys\n"
        '  fix:   if a loss function of the batch returns it in its aux, write "aux.lose"\n'
        "     or: assign `learner.step.lose` in a traced handler"
    )
    # The loss function of this Learner returns no aux, which only its step shows.
    with pytest.raises(MissingStateError) as caught:
        testlearner(InferenceRunner(pairs(), ScalarStats("aux.lose"))).fit(1)
    assert str(caught.value) == (
        "An evaluation of ValidationPhase requested `step.aux`, which the phase does not compute.\n"
        "  why:   the step has loss, outputs, xs, ys, batch\n"
        "  fix:   assign `learner.step.aux` in the phase's `step` or in a traced handler\n"
        "     or: return it from a loss function of the batch: `return loss, aux`"
    )
    with pytest.raises(DeclarationError) as caught:
        testlearner(InferenceRunner(pairs(), ScalarStats("outputs.logit"))).fit(1)
    assert caught.value.what == "ScalarStats('outputs.logit') fetches `outputs.logit`, but `outputs` has no `logit`."


@pytest.mark.parametrize(
    ("values", "inferencer", "message"),
    [
        (
            {"x": np.ones(3)},
            ScalarStats("x"),
            "`x` has shape (3,), but `ScalarStats` averages one number per batch.\n"
            "  fix:   reduce the value in the step that computes it, or write your own `Inferencer`",
        ),
        (
            {"x": np.float32(0)},
            ClassificationError("x"),
            "`x` has shape (), but `ClassificationError` takes a vector, one number per sample.\n"
            "  fix:   return one number per sample from the step, without reducing over the batch",
        ),
        (
            {"x": np.array([0.0, 0.5])},
            ClassificationError("x"),
            "`x` has the value 0.5, but `ClassificationError` takes 0 and 1, or false and true.\n"
            "  fix:   compute it with a comparison, e.g. `predicted != ys`",
        ),
        (
            {"outputs": np.ones((2, 3)), "ys": np.ones((2, 1))},
            ClassificationError(),
            "`ClassificationError` compares predictions and labels element by element, but their shapes differ: "
            "(2,) of the largest `outputs`, (2, 1) of `ys`.\n"
            "  fix:   change the model or the data so that both have the same shape",
        ),
        (
            {"p": np.array([2.5]), "ys": np.array([1])},
            BinaryClassificationStats("p"),
            "`p` has the value 2.5, but `BinaryClassificationStats` takes 0 and 1, or false and true.\n"
            "  fix:   pass the number above which a prediction is positive: `threshold=0` for logits",
        ),
        (
            {"p": np.array([1, 0]), "ys": np.array([1])},
            BinaryClassificationStats("p"),
            "`BinaryClassificationStats` compares predictions and labels element by element, but their shapes differ: "
            "(2,) of `p`, (1,) of `ys`.\n"
            "  fix:   change the model or the data so that both have the same shape",
        ),
    ],
)
def test_invalid_values_are_an_error(values, inferencer, message):
    inferencer.before()
    with pytest.raises(DeclarationError) as caught:
        inferencer.on_fetches(values, 2)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ScalarStats([]), "`ScalarStats` takes the names of step values, not None."),
        (lambda: ScalarStats(["loss", 3]), "`ScalarStats` takes the names of step values, not 3."),
        (lambda: ClassificationError(""), "`ClassificationError` takes the name of a step value, not ''."),
        (lambda: ClassificationError("x", ""), "`ClassificationError` takes the name of its statistic, not ''."),
        (
            lambda: BinaryClassificationStats("x", threshold="high"),
            "`threshold` of `BinaryClassificationStats` must be a number, not 'high'.",
        ),
        (
            lambda: InferenceRunner(pairs(), []),
            "Each inferencer of `InferenceRunner` must be an `Inferencer`, not None.",
        ),
        (
            lambda: InferenceRunner(pairs(), accuracy),
            "`InferenceRunner` received the function `accuracy`, which is not an `Inferencer`.",
        ),
        (
            lambda: InferenceRunner(pairs(), [ClassificationError]),
            "`InferenceRunner` received the class `ClassificationError`, not an instance of it.",
        ),
        (
            lambda: InferenceRunner(pairs(), ["loss"]),
            "Each inferencer of `InferenceRunner` must be an `Inferencer`, not 'loss'.",
        ),
        (
            lambda: InferenceRunner(pairs(), ScalarStats("loss"), name="a.b"),
            "`name` of `InferenceRunner` must be a name without `.` and `/`, not 'a.b'.",
        ),
        (
            lambda: InferenceRunner(pairs(), ScalarStats("loss"), name="a/b"),
            "`name` of `InferenceRunner` must be a name without `.` and `/`, not 'a/b'.",
        ),
        (
            lambda: InferenceRunner(pairs(), ScalarStats("loss"), phase=TrainingPhase()),
            "`phase` of `InferenceRunner` must be an instance of a phase that does not train, not TrainingPhase().",
        ),
    ],
)
def test_bad_arguments_are_errors_at_construction(make, message):
    with pytest.raises(DeclarationError) as caught:
        make()
    assert caught.value.what == message


def test_names_can_be_a_tuple():
    assert ScalarStats(("loss", "aux.a")).names == ("loss", "aux.a")


# -- the extension point ---------------------------------------------------------------------------------------------


class Evaluates(Callback):
    """Evaluate at a given moment."""

    def __init__(self, phase, names=("loss",)):
        self.phase, self.names, self.losses = phase, names, []

    def stateaccess(self):
        return {"evaluation": Read(), "params": Read(borrow=True), "model_state": Read(borrow=True)}

    @on(Trigger, Phase)
    def evaluate(self, event, phase, learner):
        evaluation = learner.evaluation(self.phase, learner.params, learner.model_state, self.names)
        self.losses += [float(evaluation(batch)["loss"]) for batch in pairs()]


def test_a_custom_callback_can_evaluate():
    callback = Evaluates(ValidationPhase())
    learner = testlearner(callback)
    learner.fit(1)
    assert callback.losses == pytest.approx([mean_loss(learner.params, [batch]) for batch in pairs()], rel=1e-6)


def test_an_evaluation_does_not_train():
    with pytest.raises(DeclarationError) as caught:
        testlearner(Evaluates(TrainingPhase())).fit(1)
    assert str(caught.value) == (
        "`learner.evaluation` needs a phase that does not train, but TrainingPhase trains.\n"
        "  fix:   pass a phase such as `ValidationPhase()`"
    )


def test_a_handler_that_does_not_end_the_window_cannot_evaluate():
    class Hasty(Callback):
        def stateaccess(self):
            return {"evaluation": Read()}

        @on(StepEnd, TrainingPhase)
        def look(self, event, phase, learner):
            learner.evaluation(ValidationPhase(), {}, {}, ("loss",))

    with pytest.raises(DeclarationError) as caught:
        testlearner(Hasty()).fit(1)
    assert str(caught.value) == (
        "A step's handler requested an evaluation of ValidationPhase, "
        "but the next steps do not wait for this handler.\n"
        "  why:   the device has run further steps, so the train state is not that of the handler's step\n"
        '  fix:   declare `{"params": Read(borrow=True)}` for this handler; the next steps then wait for it'
    )


class Notes(Callback):
    """Log the epoch if there is a `Monitors`."""

    def stateaccess(self):
        return {"cbstate": {"monitors": Append(optional=True)}}

    @on(Trigger, Phase)
    def note(self, event, phase, learner):
        if "monitors" in learner.cbstate:
            learner.cbstate.monitors.put_scalar("noted", learner.progress.epoch)


def test_an_optional_entry_can_be_missing():
    testlearner(Notes()).fit(1)
    learner = testlearner(Notes(), Monitors())
    learner.fit(2)
    assert learner.cbstate["monitors"].history("noted") == [(4, 1.0), (8, 2.0)]


def test_an_optional_entry_does_not_satisfy_readers():
    class Reads(Callback):
        def stateaccess(self):
            return {"cbstate": {"monitors": Read()}}

    with pytest.raises(MissingStateError):
        testlearner(Notes(), Reads())


def test_checking_a_set_with_a_runner_needs_no_learner():
    fluxcb.check([in_order(InferenceRunner(pairs(), ScalarStats("loss")), Sees())], default_callbacks=False)
