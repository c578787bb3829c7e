"""learner.evaluate: metrics over any data, compared with NumPy; training is not changed."""

import io

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fluxcb
from fluxcb import Append, Callback, DataError, DeclarationError, Learner, on
from fluxcb.callbacks import (
    AbstractMetric,
    Loss,
    Metric,
    Metrics,
    ParameterEMA,
    ProgressBar,
    Recorder,
    SmoothLoss,
    StochasticWeightAveraging,
    accuracy,
)
from fluxcb.data import ArrayLoader
from fluxcb.events import LossBegin
from fluxcb.phases import AbstractTrainingPhase, AbstractValidationPhase, TrainingPhase, ValidationPhase

RNG = np.random.default_rng(0)
XS = RNG.normal(size=(10, 4)).astype(np.float32)
YS = RNG.integers(0, 3, 10).astype(np.int32)
W = RNG.normal(size=(4, 3)).astype(np.float32)
TRAIN = [(XS[:4], YS[:4]), (XS[4:8], YS[4:8])]
BATCHES = [(XS[:4], YS[:4]), (XS[4:8], YS[4:8]), (XS[8:], YS[8:])]


def cross_entropy(outputs, ys):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, ys).mean()


def by_hand(params, xs=XS, ys=YS):
    """Return the mean cross-entropy and the accuracy over all examples, in float64."""
    logits = np.asarray(xs, np.float64) @ np.asarray(params["w"], np.float64)
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return {"loss": -logs[np.arange(len(ys)), ys].mean(), "accuracy": (logits.argmax(1) == ys).mean()}


def linear(*callbacks, **options):
    options = {"data": (TRAIN, BATCHES), "default_callbacks": False, **options}
    return Learner(
        (lambda key, xs: {"w": jnp.asarray(W)}, lambda params, xs: xs @ params["w"]),
        cross_entropy,
        optax.sgd(0.5),
        callbacks=callbacks,
        **options,
    )


def assert_close(found, expected):
    assert list(found) == list(expected)
    assert all(type(value) is float for value in found.values())
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)


def assert_same(before, after):
    assert jax.tree.structure(before) == jax.tree.structure(after)

    def same(a, b):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)

    jax.tree.map(same, before, after)


# -- the numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        (XS, YS),
        (jnp.asarray(XS), jnp.asarray(YS)),
        BATCHES,
        ArrayLoader((XS, YS), 4),
        ArrayLoader((XS, YS), 3, device=True),
        fluxcb.data.place(ArrayLoader((XS, YS), 7), jax.devices()[0]),
        iter(BATCHES),
        None,
    ],
    ids=["arrays", "on the device", "a list", "a loader", "a resident loader", "a placed one", "an iterator", "own"],
)
def test_every_data_format_counts_each_example_once(data):
    learner = linear(Metrics(accuracy))
    learner.fit(1)
    found = learner.evaluate() if data is None else learner.evaluate(data)
    assert_close(found, by_hand(learner.params))


@pytest.mark.parametrize("size", [1, 3, 10, 99])
def test_batch_size_does_not_change_result(size):
    assert_close(linear(Metrics(accuracy)).evaluate((XS, YS), batch_size=size), by_hand({"w": W}))


def test_single_batch():
    assert_close(linear(Metrics(accuracy)).evaluate(BATCHES[0]), by_hand({"w": W}, XS[:4], YS[:4]))


class Largest(AbstractMetric):
    """Compute the largest input, with its own state."""

    name = "largest"
    needs = ("xs",)

    def init(self):
        return np.float32(-np.inf)

    def update(self, state, step, samples):
        return jnp.maximum(state, step.xs.max())

    def compute(self, state):
        return state


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (accuracy, ["loss", "accuracy"]),
        ([accuracy], ["loss", "accuracy"]),
        ((Metric(accuracy, name="top1"), Largest()), ["loss", "top1", "largest"]),
        ([accuracy, Loss()], ["accuracy", "loss"]),
        ([], ["loss"]),
    ],
)
def test_metrics_are_named_as_in_callback(metrics, expected):
    values = {**by_hand({"w": W}), "largest": XS.max()}
    values["top1"] = values["accuracy"]
    assert_close(linear(Metrics()).evaluate(BATCHES, metrics), {name: values[name] for name in expected})


def test_default_metric_is_loss():
    assert_close(linear().evaluate(), {"loss": by_hand({"w": W})["loss"]})


def test_stateful_metric_gets_steps_in_order():
    losses = [by_hand({"w": W}, xs, ys)["loss"] for xs, ys in BATCHES]
    smooth = 0.0
    for loss in losses:
        smooth = 0.9 * smooth + 0.1 * loss
    found = linear().evaluate(metrics=SmoothLoss(0.9))
    np.testing.assert_allclose(found["smooth_loss"], smooth / (1 - 0.9**3), rtol=1e-5)


def test_evaluate_matches_validation():
    learner = linear(Metrics(accuracy, SmoothLoss()), ParameterEMA(0.9))
    history = learner.fit(3)
    names = ("loss", "accuracy", "smooth_loss")
    assert_close(learner.evaluate(), {name: history[f"validation/{name}"][-1] for name in names})


def test_from_loss_learner_can_evaluate():
    def loss(params, batch, key):
        return jnp.mean((batch[0] @ params["w"]) ** 2), {"sum": jnp.sum(batch[0])}

    learner = Learner.from_loss({"w": jnp.asarray(W)}, loss, optax.sgd(0.1), data=TRAIN, default_callbacks=False)
    found = learner.evaluate(BATCHES, [Metric(lambda aux: aux["sum"], name="sum", needs=("aux",))])
    sums = [xs.sum(dtype=np.float64) * len(xs) for xs, _ in BATCHES]
    assert_close(found, {"loss": np.mean((XS.astype(np.float64) @ W) ** 2), "sum": sum(sums) / 10})


def test_batches_without_examples_have_weight_one():
    def loss(params, batch, key):
        return params["w"] * batch

    data = [np.float32(value) for value in (1, 2, 6)]
    learner = Learner.from_loss(
        {"w": jnp.float32(2)}, loss, optax.sgd(0.0), data=(data, data), default_callbacks=False
    )  # fmt: skip
    assert learner.evaluate() == {"loss": 6.0}
    assert learner.evaluate([np.float32(4)]) == {"loss": 8.0}


# -- phases ------------------------------------------------------------------------------------------------------------


class Doubled(AbstractValidationPhase):
    name = "doubled"

    def step(self, learner, emit):
        xs, ys = learner.step.batch
        learner.step.loss = 2 * learner.loss_fn(learner.forward(learner.params, xs), ys)


class NoLoss(AbstractValidationPhase):
    name = "nothing"

    def step(self, learner, emit):
        learner.step.outputs = learner.forward(learner.params, learner.step.batch[0])


def test_phase_argument_selects_phase():
    loss = by_hand({"w": W})["loss"]
    assert_close(linear().evaluate(BATCHES, phase=Doubled()), {"loss": 2 * loss})
    learner = linear(phases=(TrainingPhase(), Doubled()), data={"training": TRAIN, "doubled": BATCHES[:1]})
    assert_close(learner.evaluate(), {"loss": 2 * by_hand({"w": W}, XS[:4], YS[:4])["loss"]})
    assert_close(learner.evaluate(BATCHES, phase=ValidationPhase()), {"loss": loss})


def test_phase_without_loss_raises(refused):
    learner = linear()
    with refused(
        DeclarationError,
        "There is nothing to measure: NoLoss computes no loss, and there is no other metric.\n"
        "  fix:   pass metrics: `learner.evaluate(data, metrics=[...])`",
    ):
        learner.evaluate(BATCHES, phase=NoLoss())
    mean = Metric(lambda outputs: outputs.mean(), name="mean", needs=("outputs",))
    found = learner.evaluate(BATCHES, mean, phase=NoLoss())
    assert_close(found, {"mean": (XS.astype(np.float64) @ W).mean()})


def test_metric_with_missing_value_raises(refused):
    learner = linear()
    with refused(
        DeclarationError,
        "The metric `accuracy` needs `step.ys`, which NoLoss does not compute.\n"
        "  why:   its step has outputs, batch\n"
        "  fix:   pass metrics that need only these values: `learner.evaluate(data, metrics=[...])`\n"
        "     or: pass another phase: `learner.evaluate(data, phase=...)`",
    ):
        learner.evaluate(BATCHES, accuracy, phase=NoLoss())
    assert list(learner.evaluate(BATCHES, accuracy, phase=ValidationPhase())) == ["loss", "accuracy"]


class Shifts(Callback):
    """Double the outputs of validation inside the step."""

    def stateaccess(self):
        return {"step": {"outputs": fluxcb.Write()}}

    @on(LossBegin, AbstractValidationPhase)
    def shift(self, event, phase, learner):
        learner.step.outputs = 2 * learner.step.outputs


def test_traced_handlers_of_phase_run():
    assert_close(linear(Shifts(), Metrics(accuracy)).evaluate(), by_hand({"w": 2 * W}))


class SkipSecond(Callback):
    def stateaccess(self):
        return {"step": {"skip": Append(), "batch": fluxcb.Read()}}

    @on(LossBegin, AbstractValidationPhase)
    def skip(self, event, phase, learner):
        learner.step.skip = learner.step.batch[0][0, 0] == XS[4, 0]  # the second batch


def test_skipped_steps_do_not_count():
    xs, ys = np.concatenate([XS[:4], XS[8:]]), np.concatenate([YS[:4], YS[8:]])
    assert_close(linear(SkipSecond()).evaluate(metrics=accuracy), by_hand({"w": W}, xs, ys))


# -- what stays as it was ----------------------------------------------------------------------------------------------


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(self.norm(self.first(x))))


MODELS = {
    "pair": lambda: (lambda key, xs: {"w": jnp.asarray(W)}, lambda params, xs: xs @ params["w"]),
    "nnx": lambda: NNXNet(nnx.Rngs(0)),
    "equinox": lambda: eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0)),
}


@pytest.mark.parametrize("kind", list(MODELS))
def test_evaluate_does_not_change_training(kind):
    def made():
        data = ArrayLoader((XS, YS), 4, drop_last=True), ArrayLoader((XS, YS), 4)
        callbacks = [Metrics(accuracy), Recorder(), ParameterEMA(0.5)]
        return Learner(
            MODELS[kind](), cross_entropy, optax.adam(0.01), data=data, callbacks=callbacks, default_callbacks=False
        )

    learner, plain = made(), made()
    learner.fit(2)
    state, history = learner.state, learner.history.to_dict()
    step_in_epoch, reason = learner._core.state.progress.step_in_epoch, learner.stop_reason
    first = learner.evaluate()
    learner.evaluate((XS, YS), batch_size=3)
    learner.evaluate(learner._core.streams["training"].source, [SmoothLoss()])
    assert learner.evaluate() == first
    assert_same(state, learner.state)
    assert learner.history.to_dict() == history
    assert (learner._core.state.progress.step_in_epoch, learner.stop_reason) == (step_in_epoch, reason)
    learner.fit(2)
    plain.fit(4)
    assert_same(plain.state, learner.state)
    assert learner.history.to_dict() == plain.history.to_dict()


def test_evaluate_keeps_position_of_stream():
    def made():
        return linear(Metrics(), data=ArrayLoader((XS, YS), 2))

    learner, plain = made(), made()
    for each in (learner, plain):
        each.fit(1, steps_per_epoch=3)
    learner.evaluate(learner._core.streams["training"].source)
    for each in (learner, plain):
        each.fit(3, steps_per_epoch=3)
    assert_same(plain.state, learner.state)


def test_programs_are_compiled_once_per_shape():
    calls = []

    def loss(outputs, ys):
        calls.append(outputs.shape)
        return cross_entropy(outputs, ys)

    seen = []

    def counted(outputs, ys):
        seen.append(outputs.shape)
        return accuracy(outputs, ys)

    learner = Learner(
        (lambda key, xs: {"w": jnp.asarray(W)}, lambda params, xs: xs @ params["w"]),
        loss, optax.sgd(0.5), data=(TRAIN, BATCHES), callbacks=[Metrics()], default_callbacks=False,
    )  # fmt: skip
    learner.fit(1)
    calls.clear()
    for _ in range(3):
        learner.evaluate(BATCHES, counted)
    assert calls == []  # the steps that validation traced
    assert seen == [(4, 3), (2, 3)]
    learner.evaluate((XS, YS), counted, batch_size=5)
    assert calls == [(5, 3)]
    assert seen == [(4, 3), (2, 3), (5, 3)]


# -- averages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("callbacks", "average", "entry"),
    [
        ([ParameterEMA(0.5)], "validated", "ema"),
        ([ParameterEMA(0.5)], None, None),
        ([ParameterEMA(0.5, validate=False)], "validated", None),
        ([ParameterEMA(0.5, validate=False)], "ema", "ema"),
        ([StochasticWeightAveraging(1), ParameterEMA(0.5, validate=False)], "validated", "swa"),
    ],
)
def test_average_selects_parameters(callbacks, average, entry):
    learner = linear(*callbacks, Metrics(accuracy))
    learner.fit(2)
    params = learner.params if entry is None else learner.cbstate[entry]["params"]
    assert_close(learner.evaluate(average=average), by_hand(params))


# -- what cannot be meant ----------------------------------------------------------------------------------------------


def test_missing_data_raises(refused):
    learner = linear(data=TRAIN)
    with refused(
        DataError,
        "`learner.evaluate()` has no data: `data.validation` is not set.\n"
        "  fix:   pass data: `learner.evaluate(data)`\n"
        '     or: pass `data={"validation": batches, ...}` to the Learner',
    ):
        learner.evaluate()
    assert list(learner.evaluate(BATCHES)) == ["loss"]
    assert list(linear(data={"validation": BATCHES, "training": TRAIN}).evaluate()) == ["loss"]


def test_one_shot_learner_data_raises(refused):
    learner = linear(data=(TRAIN, iter(BATCHES)))
    with refused(
        DataError,
        "`data.validation` of the Learner is a one-shot iterator (list_iterator).\n"
        "  why:   `learner.evaluate()` would consume batches that the next epoch needs\n"
        "  fix:   pass other data, `learner.evaluate(data)`, or build the Learner with data that can be iterated again",
    ):
        learner.evaluate()
    assert list(learner.evaluate(BATCHES)) == ["loss"]


def test_training_phase_raises(refused):
    learner = linear()
    with refused(
        DeclarationError,
        "`learner.evaluate` needs a phase that does not train, but TrainingPhase trains.\n"
        "  fix:   pass a phase that does not train: `learner.evaluate(data, phase=ValidationPhase())`",
    ):
        learner.evaluate(BATCHES, phase=TrainingPhase())
    assert list(learner.evaluate(BATCHES, phase=ValidationPhase())) == ["loss"]


def test_learner_with_only_training_phase_raises(refused):
    class Own(AbstractTrainingPhase):
        def step(self, learner, emit):
            learner.step.grads = learner.grad(lambda params: learner.loss_fn(learner.forward(params, XS), YS))
            learner.apply_updates()

    learner = linear(phases=(Own(),), data=TRAIN)
    with refused(
        DeclarationError,
        "None of this Learner's phases validates, so `learner.evaluate` has no step to compute.\n"
        "  fix:   pass a phase that does not train: `learner.evaluate(data, phase=ValidationPhase())`",
    ):
        learner.evaluate(BATCHES)
    assert list(learner.evaluate(BATCHES, phase=ValidationPhase())) == ["loss"]


def test_invalid_metric_raises():
    with pytest.raises(DeclarationError):
        linear().evaluate(BATCHES, "accuracy")


@pytest.mark.parametrize(("data", "rows"), [(XS, 4), ([XS, YS], 10)])
def test_inputs_without_targets_raise(data, rows, refused):
    learner = linear()
    with refused(
        DataError,
        f"`data` of `learner.evaluate` has batches that are float32[{rows}, 4], and those of ValidationPhase are tuple "
        "of float32[4, 4], int32[4].\n"
        "  why:   all batches of a phase must have the same structure\n"
        "  fix:   for arrays of inputs and targets, or one batch, write a tuple: `learner.evaluate((xs, ys))`\n"
        "     or: for several batches, write a list: `learner.evaluate([(xs1, ys1), (xs2, ys2)])`",
    ):
        learner.evaluate(data)
    assert learner.evaluate((XS, YS)).keys() == learner.evaluate([(XS, YS), (XS, YS)]).keys()


def test_data_without_batches_raises(refused):
    with refused(
        DataError,
        "`data` of `learner.evaluate` yields no batches.\n"
        "  fix:   check its length and filters; an iterator that is used up yields nothing the second time",
    ):
        linear().evaluate([])


def test_batch_size_for_batched_data_raises(refused):
    with refused(
        DeclarationError,
        "`batch_size` of `learner.evaluate` is only for arrays, but the data is of type `list`.\n"
        "  why:   a loader or a list of batches already determines the batch size\n"
        "  fix:   leave out `batch_size`\n"
        "     or: pass the examples as arrays: `(xs, ys)`",
    ):
        linear().evaluate(BATCHES, batch_size=4)


def test_model_error_names_batch():
    with pytest.raises(TypeError) as caught:
        linear().evaluate([BATCHES[0], (XS[:, :3], YS)])
    assert caught.value.__notes__[-1] == "raised when `learner.evaluate` computed batch 2 of its data"


def test_failing_source_is_named():
    def batches():
        yield BATCHES[0]
        raise OSError("no disk")

    with pytest.raises(OSError, match="no disk") as caught:
        linear().evaluate(batches())
    assert caught.value.__notes__[-1] == "raised by `data` of `learner.evaluate`, when batch 2 was pulled from it"


# -- progress ----------------------------------------------------------------------------------------------------------


def test_long_evaluation_prints_progress_lines(monkeypatch):
    times = iter(range(0, 1000, 6))
    monkeypatch.setattr("fluxcb._run.batch_progress.monotonic", lambda: next(times))
    learner = linear(ProgressBar(file := io.StringIO()))
    learner.evaluate()
    assert file.getvalue() == "evaluate: 2/3 batches, 0 batches/s\n"


def test_metric_is_measured_only_in_its_phases():
    def first_output(outputs, ys):
        return outputs[:, 0].mean()

    metrics = Metrics(
        Metric(accuracy, "shared", phase=ValidationPhase), Metric(first_output, "shared", phase=TrainingPhase)
    )
    learner = linear(metrics)
    expected = by_hand(learner.params)
    assert_close(learner.evaluate(), {"loss": expected["loss"], "shared": expected["accuracy"]})
    only_training = Metric(accuracy, phase=TrainingPhase)
    assert_close(learner.evaluate(metrics=only_training), {"loss": expected["loss"]})
