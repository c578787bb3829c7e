"""Metrics with weights: padded and masked batches."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import DeclarationError
from fluxcb.callbacks import AUROC, ConfusionMatrix, Loss, Metric, Metrics, PerClassAccuracy, accuracy


def padded(sizes, length=4, seed=0):
    """Return batches of `length` rows. The first `size` rows are examples, and the others have mask 0."""
    rng = np.random.default_rng(seed)
    return [
        {
            "x": rng.normal(size=(length, 3)).astype(np.float32),
            "y": rng.integers(0, 4, length).astype(np.int32),
            "mask": (np.arange(length) < size).astype(np.float32),
        }
        for size in sizes
    ]


def correct(aux, batch):
    """Return whether each example is predicted correctly."""
    return jnp.argmax(aux, axis=-1) == batch["y"]


def masked_accuracy(aux, batch):
    """Return the fraction of correct predictions in a batch; NaN if all of it is padding."""
    return jnp.sum(correct(aux, batch) * batch["mask"]) / jnp.sum(batch["mask"])


def mask(batch):
    return batch["mask"]


def learner_of(*metrics, training=(4,), validation=(4, 4, 1)):
    def loss(params, batch, key):
        logits = batch["x"] @ params["w"]
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return jnp.sum(each * batch["mask"]) / jnp.maximum(jnp.sum(batch["mask"]), 1), logits

    return fluxcb.Learner.from_loss(
        {"w": jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)},
        loss,
        optax.sgd(0.0),
        data=(padded(training), padded(validation, seed=1)),
        callbacks=[Metrics(*metrics)],
        default_callbacks=False,
    )


def expected(batches):
    """Return the loss and the accuracy over all examples, in float64."""
    xs, ys, kept = (np.concatenate([batch[name] for batch in batches]) for name in ("x", "y", "mask"))
    logits = xs[kept > 0].astype(np.float64) @ np.linspace(-1.0, 1.0, 12).reshape(3, 4)
    ys = ys[kept > 0]
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(ys)), ys]
    return losses.mean(), (logits.argmax(1) == ys).mean()


NEEDS = {"needs": ("aux", "batch")}


@pytest.mark.parametrize(
    "metric",
    [
        pytest.param(Metric(correct, "right", **NEEDS, weight=mask), id="values and weights of examples"),
        pytest.param(Metric(masked_accuracy, "right", **NEEDS, weight=mask), id="mean, and weights of examples"),
        pytest.param(
            Metric(masked_accuracy, "right", **NEEDS, weight=lambda batch: jnp.sum(batch["mask"])),
            id="mean, and the weight of the batch",
        ),
    ],
)
@pytest.mark.parametrize("sizes", [(4, 4, 1), (4, 0, 1), (0, 4, 3)])
def test_means_over_padded_batches_are_exact(metric, sizes):
    learner = learner_of(metric, Loss(weight=mask), validation=sizes)
    learner.fit(1)
    found = learner.cbstate["metrics_epoch"]["validation"].at(1)
    loss, right = expected(padded(sizes, seed=1))
    assert found == {"right": pytest.approx(right, rel=1e-6), "loss": pytest.approx(loss, rel=1e-6)}
    assert learner.evaluate(padded(sizes, seed=1)) == pytest.approx(found, rel=1e-6)


def test_without_weights_padding_counts():
    learner = learner_of(Metric(masked_accuracy, "right", **NEEDS))
    learner.fit(1)
    unweighted = learner.cbstate["metrics_epoch"]["validation"].last("right")
    assert unweighted != pytest.approx(expected(padded((4, 4, 1), seed=1))[1], rel=1e-3)


def test_an_epoch_with_zero_weights_is_nan():
    learner = learner_of(Metric(correct, **NEEDS, weight=mask), validation=(0, 0))
    learner.fit(1)
    assert np.isnan(learner.cbstate["metrics_epoch"]["validation"].last("correct"))


def test_nan_with_weight_zero_does_not_count():
    metric = Metric(lambda aux: aux, "value", ("aux",), weight=lambda batch: batch)
    values, weights = jnp.array([1.0, jnp.nan, 3.0, jnp.inf]), jnp.array([3.0, 0.0, 1.0, 0.0])
    state = metric.update(metric.init(), SimpleNamespace(aux=values, batch=weights), 4)
    assert float(metric.compute(state)) == 1.5
    state = metric.update(metric.init(), SimpleNamespace(aux=jnp.nan, batch=jnp.zeros(4)), 4)
    state = metric.update(state, SimpleNamespace(aux=2.0, batch=jnp.ones(4)), 4)
    assert float(metric.compute(state)) == 2.0
    state = metric.update(state, SimpleNamespace(aux=jnp.nan, batch=jnp.ones(4)), 4)
    assert np.isnan(metric.compute(state))


def test_weights_of_tokens():
    metric = Metric(lambda aux: aux, "value", ("aux",), weight=lambda batch: batch)
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=(2, 5, 7)).astype(np.float32), rng.integers(0, 2, (2, 5, 7)).astype(np.float32)
    state = metric.init()
    for value, weight in zip(values, weights, strict=True):
        state = metric.update(state, SimpleNamespace(aux=value, batch=weight), 5)
    assert float(metric.compute(state)) == pytest.approx((values * weights).sum() / weights.sum(), rel=1e-6)


def test_sums_of_weights_are_compensated():
    metric = Metric(lambda aux: aux, "value", ("aux",), weight=lambda batch: batch)
    state = metric.update(metric.init(), SimpleNamespace(aux=1.0, batch=jnp.float32(1e8)), 1)
    for _ in range(100):  # each of these is lost in a plain float32 sum
        state = metric.update(state, SimpleNamespace(aux=0.0, batch=jnp.float32(1.0)), 1)
    assert float(state[2]) == pytest.approx(1e8 + 100, abs=4)  # neighbors are 8 apart


def test_a_metric_with_a_shape_is_averaged_by_element():
    def top_k(outputs, ys):
        order = jnp.argsort(-outputs, axis=-1)
        hits = order == ys[:, None]
        return jnp.cumsum(hits, axis=-1)[:, :3].astype(jnp.float32)

    plain = Metric(lambda outputs, ys: top_k(outputs, ys).mean(0), "top", shape=(3,))
    masked = Metric(top_k, "top", shape=(3,), weight=mask)
    rng = np.random.default_rng(0)
    outputs, ys = rng.normal(size=(3, 4, 5)).astype(np.float32), rng.integers(0, 5, (3, 4))
    kept = rng.integers(0, 2, (3, 4)).astype(np.float32)
    ranks = (np.take_along_axis(outputs, ys[..., None], -1) < outputs).sum(-1)
    hits = ranks[..., None] <= np.arange(3)
    state, state_masked = plain.init(), masked.init()
    for i in range(3):
        step = SimpleNamespace(outputs=outputs[i], ys=ys[i], batch={"mask": kept[i]})
        state, state_masked = plain.update(state, step, 4), masked.update(state_masked, step, 4)
    np.testing.assert_allclose(plain.value_of(state), hits.mean((0, 1)), rtol=1e-6)
    np.testing.assert_allclose(masked.value_of(state_masked), hits[kept > 0].mean(0), rtol=1e-6)


# --- negative weights -----------------------------------------------------------------------------------------------


def signed_mask(batch):
    """Return a mistake: -1 in place of 0."""
    return 2 * batch["mask"] - 1


def nan_by_weights(name):
    return (
        f"The metric `{name}` is NaN, because some of its weights are negative or NaN. Let `weight` return a mask of "
        "zeros and ones, or other numbers of at least 0."
    )


SIGNED = {"needs": ("aux", "batch"), "weight": signed_mask}


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        (Metric(correct, "right", **SIGNED), "right"),
        (Metric(masked_accuracy, "right", **SIGNED), "right"),
        (Loss(weight=signed_mask), "loss"),
        (AUROC(lambda aux, batch: (aux[:, 0], batch["y"] == 0), **SIGNED), "auroc"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_negative_weights_are_a_warning_and_nan(metric, name):
    metrics = [metric]
    if not isinstance(metric, Loss):
        metrics.append(Loss(weight=mask))
    learner = learner_of(*metrics, validation=(4, 4, 1))
    with pytest.warns(UserWarning, match="weights") as caught:
        learner.fit(1)
    assert [str(warning.message) for warning in caught] == [nan_by_weights(name)]
    epoch = learner.cbstate["metrics_epoch"]["validation"]
    assert np.isnan(epoch.last(name)).any()
    if name != "loss":
        assert np.isfinite(epoch.last("loss"))
    with pytest.warns(UserWarning, match="weights") as caught:
        learner.evaluate(padded((2,)))
    assert [str(warning.message) for warning in caught] == [nan_by_weights(name)]


@pytest.mark.parametrize("kind", [ConfusionMatrix, PerClassAccuracy])
def test_negative_weights_of_class_counts_are_a_warning_and_nan(kind):
    metric = kind(2, weight=lambda batch: batch)
    step = SimpleNamespace(outputs=jnp.eye(2), ys=jnp.array([0, 1]), batch=jnp.array([1.0, -1.0]))
    state = metric.update(metric.init(), step, 2)
    with pytest.warns(UserWarning, match="weights") as caught:
        value = metric.value_of(state)
    assert [str(warning.message) for warning in caught] == [nan_by_weights(metric.name)]
    expected = [[1, 0], [0, np.nan]] if kind is ConfusionMatrix else [1, np.nan]
    np.testing.assert_array_equal(value, expected)


def test_steps_with_negative_weights_are_nan():
    learner = learner_of(Loss(weight=signed_mask), training=(4, 3, 4))
    with pytest.warns(UserWarning, match="The metric `loss` is NaN"):
        learner.fit(1)
    assert [np.isnan(value) for _, value in learner.history.per_step["training"]["loss"]] == [False, True, False]


# --- errors ---------------------------------------------------------------------------------------------------------


def test_weights_of_the_wrong_shape_are_an_error(refused):
    metric = Metric(lambda aux: aux, "value", ("aux",), weight=lambda batch: batch)
    with refused(
        DeclarationError,
        "The metric `value` returned an array of shape (4,) for one batch, but its weights have shape (3,).\n"
        "  why:   the values must have shape (), the mean over the batch, or (3,), one value per weight\n"
        "  fix:   take the mean over the batch, with the mask: `jnp.sum(values * mask) / jnp.sum(mask)`\n"
        "     or: return an array with one weight per value from `weight`",
    ):
        metric.update(metric.init(), SimpleNamespace(aux=jnp.ones(4), batch=jnp.ones(3)), 4)


def test_a_value_of_the_wrong_shape_is_an_error(refused):
    metric = Metric(lambda aux: aux, "value", ("aux",), shape=(3,))
    with refused(
        DeclarationError,
        "The metric `value` returned an array of shape (4,) for one batch, but its `shape` is (3,).\n"
        "  why:   the values of batches are averaged element by element\n"
        "  fix:   return the means over the batch, or pass `shape=(4,)`",
    ):
        metric.update(metric.init(), SimpleNamespace(aux=jnp.ones(4)), 4)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: Metric(accuracy, weight=3),
            "`weight` of `Metric` must be a function of step values, not 3.\n"
            '  fix:   write e.g. `weight=lambda batch: batch["mask"]`',
        ),
        (
            lambda: Loss(weight=lambda: 1.0),
            "The weight of the metric `loss` takes (), but is called with batch.\n"
            "  fix:   change the parameters of the function, or pass the names of its arguments as `weight_needs=`",
        ),
        (
            lambda: Metric(accuracy, weight=mask, weight_needs="batch"),
            "`weight_needs` of `Metric` must be a tuple of names of step values, not 'batch'.\n"
            '  fix:   write e.g. `weight_needs=("batch",)`',
        ),
        (
            lambda: Metric(accuracy, shape=5),
            "`shape` of `Metric` must be a tuple of positive integers, not 5.\n  fix:   write e.g. `shape=(5,)`",
        ),
    ],
)
def test_bad_arguments(make, text, refused):
    with refused(DeclarationError, text):
        make()


def test_reprs_are_code():
    assert repr(Loss(weight=mask)) == "Loss(weight=mask)"
    assert repr(Metric(accuracy, weight=mask, weight_needs=("aux",))) == (
        "Metric(accuracy, weight=mask, weight_needs=('aux',))"
    )
    with pytest.raises(fluxcb.ConflictError, match=r"use one: `Metrics\(Metric\(accuracy, weight=mask\), Loss\(weight"):
        fluxcb.check([Metrics(Metric(accuracy, weight=mask)), Metrics(Loss(weight=mask))])


def test_check_callback():
    def make():
        needs = ("outputs", "ys")
        auroc = AUROC(lambda outputs, ys: (outputs[:, 0], ys[:, 0] > 0), needs=needs)
        means = Metric(lambda outputs, ys: jnp.stack([outputs.mean(), ys.mean()]), "means", shape=(2,))
        return Metrics(auroc, means)

    fluxcb.testing.check_callback(make)


def test_scalars_in_a_batch_do_not_count_as_samples():
    # "seed" comes first in the order of the keys. The mean of 3 samples with 1 and 1 sample with 5 is 2.
    batches = [
        {"seed": np.int32(0), "x": np.ones((3, 1), np.float32)},
        {"seed": np.int32(1), "x": np.full((1, 1), 5.0)},
    ]
    learner = fluxcb.Learner.from_loss(
        {"w": jnp.zeros(())},
        lambda params, batch, key: jnp.mean(batch["x"]) + 0 * params["w"],
        optax.sgd(0.1),
        data=([batches[0]], batches),
        callbacks=[Metrics()],
        default_callbacks=False,
    )
    assert learner.fit(1)["validation/loss"] == [2.0]
