"""Callbacks and model state, with batches that `Sharding(ragged="pad")` has filled up."""

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fluxcb
from fluxcb import DeclarationError
from fluxcb.callbacks import AccumulateGradients, ConfusionMatrix, Metric, Metrics, accuracy

RNG = np.random.default_rng(0)
XS = RNG.normal(size=(21, 3)).astype(np.float32) + 2
YS = RNG.normal(size=(21, 3)).astype(np.float32)
LABELS = RNG.integers(-1, 3, 21).astype(np.int32)
W = RNG.normal(size=(3, 3)).astype(np.float32)
RATE = 0.1


def masked_loss(model, batch):
    outputs = model(batch[0])
    losses = jnp.mean((outputs - YS[0]) ** 2, axis=-1)
    mask = getattr(batch, "mask", jnp.ones(len(losses)))
    return jnp.sum(losses * mask) / jnp.sum(mask), {"outputs": outputs, "ys": batch[1]}


def learner(*callbacks, ys=YS, model=None, sizes=(16, 5), pad=True, rate=RATE, loss_fn=masked_loss):
    ends = np.cumsum(sizes)
    data = [(XS[end - size : end], ys[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    sharding = {"mesh": fluxcb.mesh(), "sharding": fluxcb.Sharding(ragged="pad")} if pad else {}
    return fluxcb.Learner(
        model or (lambda key, xs: {"w": jnp.asarray(W)}, lambda params, xs: xs @ params["w"]),
        loss_fn,
        optax.sgd(rate),
        data=(data, data),
        callbacks=callbacks,
        default_callbacks=False,
        **sharding,
    )


def test_accumulated_gradients_have_the_weights_of_the_given_examples():
    trained = learner(AccumulateGradients(2))
    trained.fit(1)
    # The gradient of the mean over all 21 examples, by the chain rule.
    gradient = XS.T @ (2 / 3 * (XS @ W - YS[0])) / 21
    np.testing.assert_allclose(trained.params["w"], W - RATE * gradient, rtol=1e-4)


def test_metric_of_a_mean_leaves_out_added_examples():
    def error(outputs, ys):
        return jnp.mean(jnp.abs(outputs - ys))

    history = learner(Metrics(error), rate=0.0).fit(1)
    np.testing.assert_allclose(history["validation/error"], [np.abs(XS @ W - YS).mean()], rtol=1e-5)


def retrieval(outputs, ys):
    return jnp.mean(jnp.argmax(outputs @ ys.T, axis=1) == jnp.arange(len(outputs)))


def rmse(outputs, ys):
    return jnp.sqrt(jnp.mean((outputs - ys) ** 2))


def count(outputs, ys):
    return jnp.sum(jnp.float32(outputs[:, 0] > 0))


def share_of_known(outputs, ys):
    return jnp.sum((outputs.argmax(-1) == ys) * (ys >= 0)) / jnp.maximum(jnp.sum(ys >= 0), 1)


@pytest.mark.parametrize(
    ("metric", "ys"),
    [(retrieval, YS), (rmse, YS), (count, YS), (share_of_known, LABELS)],
    ids=lambda m: getattr(m, "__name__", ""),
)
def test_metric_that_is_no_mean_is_an_error_whose_fixes_work(metric, ys):
    with pytest.raises(DeclarationError) as caught:
        learner(Metrics(metric), ys=ys)
    assert str(caught.value) == (
        f"The metric `{metric.__name__}` is not the mean of its values for single examples.\n"
        "  why:   `ragged='pad'` adds examples to batches, and they can only be left out of a mean over examples\n"
        "  fix:   if the metric is a mean with weights, return one value per example, and pass `weight=`\n"
        '     or: let the function use `batch.mask`: `Metric(fn, needs=("outputs", "batch"), weight=lambda batch: '
        "batch.mask.sum())`\n"
        "     or: write `ragged='drop'`"
    )


def test_mean_with_weights_leaves_out_added_examples():
    # As the message of the loss function about targets of -1 suggests.
    known = Metric(
        lambda outputs, ys: outputs.argmax(-1) == ys, "known", weight=lambda ys: ys != -1, weight_needs=("ys",)
    )
    history = learner(Metrics(known), ys=LABELS, rate=0.0).fit(1)
    right = (XS @ W).argmax(-1) == LABELS
    np.testing.assert_allclose(history["training/known"], [right[LABELS != -1].mean()], rtol=1e-6)


def test_function_with_mask_leaves_out_added_examples():
    def squares(outputs, batch):
        losses = jnp.mean((outputs - batch[1]) ** 2, axis=-1)
        return jnp.sqrt(jnp.sum(losses * batch.mask) / jnp.sum(batch.mask))

    metric = Metric(squares, "rmse", needs=("outputs", "batch"), weight=lambda batch: batch.mask.sum())
    history = learner(Metrics(metric), rate=0.0).fit(1)
    squared = ((XS @ W - YS) ** 2).mean(axis=-1)
    expected = (16 * np.sqrt(squared[:16].mean()) + 5 * np.sqrt(squared[16:].mean())) / 21
    np.testing.assert_allclose(history["validation/rmse"], [expected], rtol=1e-5)


def test_values_that_the_loss_function_has_computed_stay_as_they_are():
    def loss_fn(model, batch):
        loss, _ = masked_loss(model, batch)
        return loss, {"twice": 2 * loss, "outputs": batch[0]}

    history = learner(Metrics(Metric(lambda aux: aux["twice"], "twice", needs=("aux",))), loss_fn=loss_fn).fit(1)
    np.testing.assert_allclose(history["training/twice"], 2 * np.asarray(history["training/loss"]), rtol=1e-6)


def test_weights_of_a_table_leave_out_added_examples():
    ones = ConfusionMatrix(3, weight=lambda batch: jnp.ones(len(batch[1])))
    labels = LABELS % 3
    trained = learner(Metrics(ones), ys=labels, rate=0.0)
    trained.fit(1)
    table = trained.cbstate["metrics_epoch"]["validation"].last("confusion_matrix")
    assert table.sum() == 21


def unmasked(what):
    return "^" + re.escape(
        f"{what} of the metric `m` returns one number for a batch without using `batch.mask`, so it includes the "
        'examples that `ragged="pad"` has added. Return one number per example, or use the mask, for example '
        "`batch.mask.sum()`."
    )


def test_numbers_for_whole_batches_without_the_mask_are_a_warning():
    def masked(batch):
        return batch.mask.mean()

    with pytest.warns(UserWarning, match=unmasked("`weight`")):
        learner(Metrics(Metric(masked, "m", ("batch",), weight=lambda batch: jnp.float32(len(batch[1])))))
    with pytest.warns(UserWarning, match=unmasked("The function")):
        learner(Metrics(Metric(lambda outputs, ys: jnp.mean(outputs), "m", weight=lambda batch: batch.mask)))
    learner(Metrics(Metric(masked, "m", ("batch",), weight=lambda batch: batch.mask.sum())))


class Normalized(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(3, momentum=0.0, rngs=nnx.Rngs(0))
        self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(1))

    def __call__(self, xs, mask=None):
        return self.linear(self.norm(xs, mask=None if mask is None else mask[:, None] > 0))


def test_batch_normalization_of_added_examples_is_a_warning_whose_fix_works():
    text = (
        "The model computes its state, such as the running averages of batch normalization, from all examples of a "
        'batch, including those that `ragged="pad"` has added. Pass `batch.mask` to the model, and call its batch '
        'normalization with `mask=mask[:, None] > 0`, or write `ragged="drop"`.'
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        learner(model=Normalized())

    def loss_fn(model, batch):
        return masked_loss(lambda xs: model(xs, mask=batch.mask), batch)

    trained = learner(model=Normalized(), loss_fn=loss_fn)
    trained.fit(1)
    np.testing.assert_allclose(trained.model.norm.mean[...], XS[16:].mean(axis=0), rtol=1e-5)


def test_padded_batches_of_one_size_give_the_same_results():
    plain, padded = (learner(Metrics(accuracy), ys=LABELS % 3, sizes=(7, 7, 7), pad=pad) for pad in (False, True))
    one, other = dict(plain.fit(2)), dict(padded.fit(2))
    assert one.keys() == other.keys()
    for name, values in one.items():
        np.testing.assert_allclose(values, other[name], rtol=1e-5)
