"""Class numbers for which the model has no output are a warning before the first step."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import Learner
from fluxcb.callbacks import Metric, Metrics, accuracy
from fluxcb.data import ArrayLoader, place

CLASSES = 3
XS = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)


def of_optax(outputs, ys):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, ys).mean()


def by_one_hot(outputs, ys):
    return optax.softmax_cross_entropy(outputs, jax.nn.one_hot(ys, CLASSES)).mean()


def masked(outputs, ys):
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs, jnp.clip(ys, 0, CLASSES - 1))
    return jnp.where((ys >= 0) & (ys < CLASSES), losses, 0).mean()


def mean_of_unmasked(outputs, ys):
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs, jnp.clip(ys, 0, CLASSES - 1))
    used = (ys >= 0) & (ys < CLASSES)
    return jnp.where(used, losses, 0).sum() / used.sum()


def of_counts(outputs, ys):
    """The Poisson likelihood of counts under a mixture: the targets are integers, but no class numbers."""
    rates = jnp.exp(outputs)
    return jnp.mean(rates - ys[:, None] * outputs)


def learner(loss_fn, ys, data=lambda xs, ys: ArrayLoader((xs, ys), 4), callbacks=()):
    def init(key, xs):
        return {"w": 0.1 * jax.random.normal(key, (xs.shape[-1], CLASSES))}

    source = data(XS, np.asarray(ys, np.int32))
    model = (init, lambda params, xs: xs @ params["w"])
    return Learner(model, loss_fn, optax.sgd(0.1), data=source, callbacks=callbacks, default_callbacks=False)


def as_list(xs, ys):
    return [(xs, ys)]


def on_the_device(xs, ys):
    return ArrayLoader((xs, ys), 4, device=True)


def as_generator_function(xs, ys):
    def batches():
        yield xs, ys

    return batches


def as_iterator(xs, ys):
    return iter([(xs, ys)])


class Source:
    """An iterable that counts the batches that are pulled from it."""

    def __init__(self, xs, ys):
        self.batch, self.pulled = (xs, ys), 0

    def __iter__(self):
        for _ in range(3):
            self.pulled += 1
            yield self.batch


class SourceWithSpec(Source):
    @property
    def element_spec(self):
        return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.batch)


def as_placed(xs, ys):
    return place(Source(xs, ys), jax.devices()[0])


FROM_0, FROM_1, NEGATIVE, IGNORED = np.arange(12) % 4, np.arange(12) % 3 + 1, np.arange(12) % 3 - 1, [0, 1, 2, 255] * 3
ADD = "Give the model an output for each class, or correct the targets."
SUBTRACT = "Subtract 1 from the targets, so that they begin at 0."
LARGE = "If 255 marks examples to ignore, let the loss function mask them."
MASK = "If negative numbers mark examples to ignore, let the loss function mask them."


@pytest.mark.parametrize(
    "data",
    [
        lambda xs, ys: ArrayLoader((xs, ys), 4),
        on_the_device,
        as_list,
        as_generator_function,
        as_iterator,
        Source,
        as_placed,
    ],
)
@pytest.mark.parametrize(
    ("loss_fn", "ys", "numbers", "effect", "fix"),
    [
        (of_optax, FROM_0, "0 to 3", "the loss is NaN", ADD),
        (of_optax, FROM_1, "1 to 3", "the loss is NaN", SUBTRACT),
        (of_optax, IGNORED, "0 to 255", "the loss is NaN", f"{ADD} {LARGE}"),
        (of_optax, NEGATIVE, "-1 to 1", "the loss counts negative ones from the last class", MASK),
        (by_one_hot, FROM_0, "0 to 3", "the loss leaves out class 3", ADD),
        (by_one_hot, FROM_1, "1 to 3", "the loss leaves out class 3", SUBTRACT),
    ],
)
def test_class_numbers_out_of_range_are_a_warning(loss_fn, ys, numbers, effect, fix, data):
    with pytest.warns(UserWarning, match="class numbers") as caught:
        learner(loss_fn, ys, data).fit(1)
    assert [str(warning.message) for warning in caught] == [
        f"The targets in `data.training` are class numbers from {numbers}, but the model has 3 outputs, for the "
        f"classes 0 to 2: {effect}. {fix}"
    ]


@pytest.mark.parametrize(
    ("loss_fn", "ys"),
    [
        (of_optax, np.arange(12) % 3),
        (masked, NEGATIVE),
        (masked, IGNORED),
        (mean_of_unmasked, [-1] * 9 + [0, 1, 2]),
        (mean_of_unmasked, [255] * 9 + [0, 1, 2]),
        (by_one_hot, NEGATIVE),
        (by_one_hot, IGNORED),
        (of_counts, np.arange(12)),
    ],
)
def test_class_numbers_in_range_ignored_ones_and_counts_are_no_warning(loss_fn, ys):
    with warnings.catch_warnings(action="error"):
        learner(loss_fn, ys).fit(1)


def test_the_check_pulls_no_batch():
    source, ys = Source(XS, np.asarray(FROM_0, np.int32)), np.arange(12) % 3
    with pytest.warns(UserWarning, match="class numbers from 0 to 3"):
        learner(of_optax, ys, lambda *_: source).fit(2)
    assert source.pulled == 6
    # The shapes are known without a batch, and so the targets are not.
    source = SourceWithSpec(XS, np.asarray(FROM_0, np.int32))
    with warnings.catch_warnings(action="error"):
        learner(of_optax, ys, lambda *_: source).fit(2)
    assert source.pulled == 6


def test_validation_data_of_a_generator_function_is_checked():
    good, bad = np.arange(12) % 3, FROM_0
    both = learner(of_optax, good, lambda xs, ys: (Source(xs, ys), as_generator_function(xs, bad.astype(np.int32))))
    with pytest.warns(UserWarning, match=r"The targets in `data.validation` are class numbers from 0 to 3"):
        both.fit(1)


def test_the_fix_for_class_numbers_from_1_works():
    trained = learner(of_optax, FROM_1 - 1)
    trained.fit(1)
    assert np.isfinite(trained.params["w"]).all()


def test_validation_data_is_checked_and_later_fits_are_not():
    good, bad = np.arange(12) % 3, FROM_0
    both = learner(of_optax, good, lambda xs, ys: (as_list(xs, ys), as_list(xs, bad.astype(np.int32))))
    with pytest.warns(UserWarning, match=r"The targets in `data.validation` are class numbers from 0 to 3"):
        both.fit(1)
    with warnings.catch_warnings(action="error"):
        both.fit(1)


def weighted_accuracy(**weight):
    return Metric(lambda outputs, ys: outputs.argmax(-1) == ys, "accuracy", **weight)


@pytest.mark.parametrize("loss_fn", [masked, mean_of_unmasked])
@pytest.mark.parametrize(
    ("ys", "numbers", "weight", "used"),
    [
        ([0, 1, 2, -100] * 3, "-100", lambda ys: ys != -100, "!= -100"),
        ([0, -1, 2, -2] * 3, "-2 or -1", lambda ys: ys >= 0, ">= 0"),
        (IGNORED, "255", lambda ys: ys != 255, "!= 255"),
        ([0, 1, 5, 255] * 3, "5 or 255", lambda ys: ys < 3, "< 3"),
        ([0, -1, -2, -3] * 3, "not in the range 0 to 2", lambda ys: ys >= 0, ">= 0"),
    ],
)
def test_metrics_that_count_what_the_loss_leaves_out_are_a_warning_whose_fix_works(loss_fn, ys, numbers, weight, used):
    with pytest.warns(UserWarning, match="leaves out") as caught:
        learner(loss_fn, ys, callbacks=[Metrics(accuracy)]).fit(1)
    assert [str(warning.message) for warning in caught] == [
        f"The loss leaves out targets in `data.training` that are {numbers}, but the metric `accuracy` counts them. "
        "Let its function return one value per target, and pass `weight`. For the accuracy, write "
        '`Metric(lambda outputs, ys: outputs.argmax(-1) == ys, "accuracy", weight=lambda ys: '
        f'ys {used}, weight_needs=("ys",))`.'
    ]
    fixed = learner(loss_fn, ys, callbacks=[Metrics(weighted_accuracy(weight=weight, weight_needs=("ys",)))])
    with warnings.catch_warnings(action="error"):
        history = fixed.fit(1)
    outputs = XS @ np.asarray(fixed.params["w"])
    used_rows = weight(np.asarray(ys))
    expected = (outputs.argmax(-1) == ys)[used_rows].mean()
    assert fixed.evaluate((XS, np.asarray(ys, np.int32)))["accuracy"] == pytest.approx(expected)
    assert "training/accuracy" in history


def accuracy_of_used(outputs, ys):
    return jnp.sum((outputs.argmax(-1) == ys) & (ys >= 0)) / jnp.maximum(jnp.sum(ys >= 0), 1)


def test_metrics_that_leave_out_the_same_targets_are_no_warning():
    with warnings.catch_warnings(action="error"):
        learner(masked, NEGATIVE, callbacks=[Metrics(accuracy_of_used)]).fit(1)
