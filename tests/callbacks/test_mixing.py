"""MixUp, CutMix and LabelSmoothing: the mixed batches and the resulting losses."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Callback, ConflictError, DeclarationError, Read, TraceError, on
from fluxcb.callbacks import CutMix, LabelSmoothing, MixUp
from fluxcb.events import StepEnd
from fluxcb.phases import TrainingPhase, ValidationPhase
from fluxcb.testing import testlearner


class Keep(Callback):
    def __init__(self):
        self.steps, self.validated = [], []

    def stateaccess(self):
        return {"step": {name: Read() for name in ("batch", "xs", "ys", "outputs", "loss")}}

    @on
    def train(self, event: StepEnd, phase: TrainingPhase, learner):
        step = learner.step
        self.steps.append([(np.array(step.batch[0]), np.array(step.batch[1])), *map(np.array, self._parts(step))])

    @on
    def validate(self, event: StepEnd, phase: ValidationPhase, learner):
        self.validated.append([np.array(part) for part in self._parts(learner.step)])

    def _parts(self, step):
        return step.xs, step.ys, step.outputs, step.loss


class Shares(Callback):
    def __init__(self):
        self.seen = []

    def stateaccess(self):
        return {"step": {"mixed": Read()}}

    @on
    def keep(self, event: StepEnd, phase: TrainingPhase, learner):
        self.seen.append((float(learner.step.mixed["share"]), np.array(learner.step.mixed["ys"])))


def log_softmax(outputs):
    outputs = outputs.astype(np.float64)
    return outputs - np.log(np.exp(outputs).sum(axis=-1, keepdims=True))


def of_classes(callbacks, *, soft=False, shape=(5,), steps=3, size=8, classes=4, dtype: type = np.float32, **options):
    """Return a linear classifier on noise, with class indices or one-hot labels."""
    rng = np.random.default_rng(0)

    def batch():
        ys = rng.integers(0, classes, size)
        return rng.normal(size=(size, *shape)).astype(dtype), np.eye(classes, dtype=np.float32)[ys] if soft else ys

    def loss_fn(outputs, ys):
        cross_entropy = optax.softmax_cross_entropy if soft else optax.softmax_cross_entropy_with_integer_labels
        return cross_entropy(outputs, ys).mean()

    weights = jnp.asarray(rng.normal(size=(int(np.prod(shape)), classes)), jnp.float32)
    return fluxcb.Learner(
        (lambda key, xs: {"w": weights}, lambda params, xs: xs.reshape(len(xs), -1) @ params["w"]),
        loss_fn,
        optax.sgd(0.1),
        data=([batch() for _ in range(steps)], [batch()]),
        callbacks=callbacks,
        default_callbacks=False,
        **options,
    )


def partner_of(mixed, xs, share):
    """Return the index of the example that each example is mixed with, found by trying all of them."""
    tried = share * xs[:, None] + (1 - share) * xs[None]
    distance = np.abs(tried - mixed[:, None]).reshape(len(xs), len(xs), -1).max(axis=-1)
    assert (distance.min(axis=1) < 1e-5).all()
    return distance.argmin(axis=1)


@pytest.mark.parametrize("steps_per_call", [1, 7, "auto"])
def test_mixup_of_class_indices_mixes_inputs_and_losses(steps_per_call):
    keep, shares = Keep(), Shares()
    learner = of_classes([MixUp(1.0), keep, shares], steps_per_call=steps_per_call)
    learner.fit(1)
    for ((xs, ys), mixed, seen_ys, outputs, loss), (share, other_ys) in zip(keep.steps, shares.seen, strict=True):
        partner = partner_of(mixed, xs, share)
        assert sorted(partner) == list(range(8))  # a permutation
        np.testing.assert_array_equal(seen_ys, ys)
        np.testing.assert_array_equal(other_ys, ys[partner])
        logs, rows = log_softmax(outputs), np.arange(8)
        expected = -(share * logs[rows, ys] + (1 - share) * logs[rows, ys[partner]]).mean()
        assert loss == pytest.approx(expected, rel=1e-5)
    assert len({share for share, _ in shares.seen}) == 3


def test_mixup_of_one_hot_labels_trains_like_mixup_of_classes():
    keep, shares = Keep(), Shares()
    soft, hard = of_classes([MixUp(1.0), keep, shares], soft=True), of_classes([MixUp(1.0)])
    soft.fit(2)
    hard.fit(2)
    for ((xs, ys), mixed, seen_ys, _, _), (share, _) in zip(keep.steps, shares.seen, strict=True):
        partner = partner_of(mixed, xs, share)
        np.testing.assert_allclose(seen_ys, share * ys + (1 - share) * ys[partner], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(soft.params["w"], hard.params["w"], rtol=1e-4, atol=1e-6)


def test_weights_follow_the_beta_distribution():
    shares = Shares()
    of_classes([MixUp(0.5), shares], steps=400).fit(1)
    seen = np.array([share for share, _ in shares.seen])
    # Beta(a, a) has mean 1/2 and variance 1 / (4 (2 a + 1)) = 1/8; the standard error of the mean is 0.018 here.
    assert seen.mean() == pytest.approx(0.5, abs=0.06)
    assert seen.var() == pytest.approx(1 / 8, abs=0.02)


def test_validation_does_not_mix():
    for mixing in (MixUp(1.0), LabelSmoothing(0.5)):
        keep, plain = Keep(), Keep()
        mixed = of_classes([mixing, keep])
        mixed.fit(1)
        other = of_classes([plain])
        other.state = mixed.state
        other.run_epoch(ValidationPhase())
        for one, two in zip(keep.validated[0], plain.validated[0], strict=True):
            np.testing.assert_array_equal(one, two)
        assert len(keep.validated) == len(plain.validated) == 1


def test_mixup_refuses_integers(refused):
    with refused(
        TraceError,
        "MixUp(0.2) cannot mix `step.xs`: it contains uint8[8, 5], expected floating-point numbers.\n"
        "  why:   the weighted mean of two integers is not an integer, and the mean of two token ids has no meaning\n"
        "  fix:   convert images to floating point in the data source, e.g. with `fluxcb.data.map(lambda batch: "
        "..., source)`, or use CutMix",
    ):
        of_classes([MixUp()], dtype=np.uint8)


def boxes(keep, shares, axes):
    """Return the weight, and the height and width of the box, for each step, found in the images."""
    for ((xs, ys), mixed, _, outputs, loss), (share, _) in zip(keep.steps, shares.seen, strict=True):
        changed = (mixed != xs).any(axis=tuple(a for a in range(xs.ndim) if a not in axes))
        rows, columns = changed.any(axis=1), changed.any(axis=0)
        assert (changed == rows[:, None] & columns[None]).all()  # a box
        yield xs, ys, mixed, outputs, loss, share, changed


@pytest.mark.parametrize(("shape", "axes"), [((6, 9, 2), (1, 2)), ((2, 6, 9), (2, 3))])
def test_cutmix_replaces_a_box_by_another_image(shape, axes):
    keep, shares = Keep(), Shares()
    of_classes([CutMix(1.0, axes=axes), keep, shares], shape=shape, steps=12).fit(1)
    areas = []
    for xs, ys, mixed, outputs, loss, share, box in boxes(keep, shares, axes):
        areas.append(box.sum())
        assert share == pytest.approx(1 - box.sum() / 54, rel=1e-6)
        inside = box[None, :, :, None] if axes == (1, 2) else box[None, None]
        candidates = np.where(inside, xs[None], xs[:, None])  # [example, other, ...]
        same = (candidates == mixed[:, None]).all(axis=(2, 3, 4))
        assert same.any(axis=1).all()
        if box.any():
            partner = same.argmax(axis=1)
            logs, rows = log_softmax(outputs), np.arange(8)
            expected = -(share * logs[rows, ys] + (1 - share) * logs[rows, ys[partner]]).mean()
            assert loss == pytest.approx(expected, rel=1e-5)
    assert len(set(areas)) > 4


def test_cutmix_accepts_integers_and_requires_image_axes(refused):
    of_classes([CutMix()], shape=(4, 4, 1), dtype=np.uint8).fit(1)
    with refused(
        TraceError,
        "CutMix(1.0, axes=(1, 2)) cannot cut `step.xs`, which contains float32[8, 5].\n"
        "  why:   the axes (1, 2) should be height and width, but the array does not have them\n"
        "  fix:   pass the axes of height and width as `axes=`, or use MixUp",
    ):
        of_classes([CutMix()])


def test_mixup_and_cutmix_together_are_refused(refused):
    with refused(
        ConflictError,
        "MixUp(0.2) and CutMix(1.0, axes=(1, 2)) can never be used together.\n"
        "  where: MixUp.resolveconflict returns Unresolvable()\n"
        "  fix:   remove one of the two from the callbacks list",
    ):
        fluxcb.check([MixUp(), CutMix()])


@pytest.mark.parametrize("steps_per_call", [1, 7, "auto"])
@pytest.mark.parametrize("soft", [False, True])
def test_smoothing_matches_optax(soft, steps_per_call):
    keep = Keep()
    of_classes([LabelSmoothing(0.3), keep], soft=soft, steps_per_call=steps_per_call).fit(1)
    for (_, ys), _, seen_ys, outputs, loss in keep.steps:
        one_hot = ys if soft else np.eye(4)[ys]
        smooth = np.asarray(optax.smooth_labels(jnp.asarray(one_hot), 0.3))
        np.testing.assert_allclose(seen_ys, smooth if soft else ys, rtol=1e-6)
        assert loss == pytest.approx(-(smooth * log_softmax(outputs)).sum(axis=-1).mean(), rel=1e-5)


def of_targets(ys, outputs, loss_fn):
    """Return a Learner with label smoothing whose outputs have a shape and do not depend on the inputs."""
    return fluxcb.Learner(
        (lambda key, xs: {"b": jnp.zeros(outputs)}, lambda params, xs: params["b"] + 0 * xs.sum()),
        loss_fn,
        optax.sgd(0.1),
        data=[(np.zeros(6, np.float32), ys)],
        callbacks=[LabelSmoothing(0.25)],
        default_callbacks=False,
    )


def binary_loss(outputs, ys):
    return optax.sigmoid_binary_cross_entropy(outputs, ys).mean()


WITHOUT_CLASSES = (
    "  why:   the classes are the last axis of one-hot targets [..., classes], or of the outputs [..., classes] of "
    "class numbers [...], and there are at least 2\n"
    "  fix:   for a binary loss, remove LabelSmoothing and smooth in the loss function: "
    "`ys = ys * (1 - 0.25) + 0.25 / 2`\n"
    "     or: for targets that are not classes, such as those of a regression, remove LabelSmoothing"
)


@pytest.mark.parametrize(
    ("ys", "outputs", "what"),
    [
        (np.zeros(6, np.int32), (6,), "`step.ys` contains int32[6] and `step.outputs` is float32[6]"),
        (np.zeros(6, np.int32), (6, 1), "`step.ys` contains int32[6] and `step.outputs` is float32[6, 1]"),
        (np.zeros((6, 1), np.int32), (6, 1), "`step.ys` contains int32[6, 1] and `step.outputs` is float32[6, 1]"),
        (np.zeros(6, np.float32), (6,), "`step.ys` contains float32[6]"),
        (np.zeros((6, 1), np.float32), (6, 1), "`step.ys` contains float32[6, 1]"),
    ],
)
def test_targets_without_classes_are_not_smoothed(ys, outputs, what, refused):
    def loss_fn(outputs, ys):
        return binary_loss(outputs.reshape(6), ys.reshape(6))

    with refused(TraceError, f"LabelSmoothing(0.25) finds no classes in the targets: {what}.\n{WITHOUT_CLASSES}"):
        of_targets(ys, outputs, loss_fn)


@pytest.mark.parametrize(
    ("ys", "outputs"), [(np.zeros((6, 3), np.int32), (6, 3)), (np.zeros((6, 5, 4), np.int32), (6, 3, 5, 4))]
)
def test_class_numbers_whose_classes_are_not_the_last_axis_are_refused(ys, outputs, refused):
    what = f"`step.ys` contains int32{list(ys.shape)} and `step.outputs` is float32{list(outputs)}"
    text = (
        f"LabelSmoothing(0.25) finds no classes in the targets: {what}.\n{WITHOUT_CLASSES}\n"
        "     or: for one-hot targets, pass floating-point numbers: `ys.astype(np.float32)`\n"
        "     or: for classes along another axis, let the model return outputs with the classes as last axis"
    )
    with refused(TraceError, text):
        of_targets(ys, outputs, lambda outputs, ys: outputs.mean() + 0 * ys.sum())


@pytest.mark.parametrize(
    ("ys", "outputs"),
    [((6,), (6, 3)), ((6, 1), (6, 3)), ((6, 4), (6, 4, 3)), ((6, 4, 4), (6, 4, 4, 4)), ((6, 2), (6, 5, 3))],
)
def test_class_numbers_of_any_form_are_smoothed(ys, outputs):
    learner = of_targets(np.zeros(ys, np.int32), outputs, lambda outputs, ys: outputs[..., 0].mean() * ys.mean())
    learner.fit(1)
    learner.predict(np.zeros(6, np.float32))


@pytest.mark.parametrize("ignored", [-1, 255])
def test_examples_that_the_loss_ignores_are_not_smoothed(ignored):
    def loss_fn(outputs, ys):
        used = (ys >= 0) & (ys < 3)
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, jnp.where(used, ys, 0))
        return (losses * used).sum() / used.sum()

    ys = np.array([0, ignored, 2, ignored, 1, 1])
    rng = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    kept = []
    for rows in (np.arange(6), np.flatnonzero(ys != ignored)):
        learner = fluxcb.Learner(
            (lambda key, xs: {"w": jnp.ones((3, 3))}, lambda params, xs: xs @ params["w"]),
            loss_fn,
            optax.sgd(1.0),
            data=[(rng[rows], ys[rows])],
            callbacks=[LabelSmoothing(0.5)],
            default_callbacks=False,
        )
        learner.fit(5)
        kept.append(np.array(learner.params["w"]))
    np.testing.assert_allclose(kept[0], kept[1], rtol=1e-5)


def test_smoothed_mixtures_agree_for_class_indices_and_one_hot_labels():
    kept = {}
    for soft in (False, True):
        keep = Keep()
        learner = of_classes([LabelSmoothing(0.3), MixUp(1.0), keep], soft=soft)
        learner.fit(2)
        kept[soft] = [loss for *_, loss in keep.steps], np.array(learner.params["w"])
    np.testing.assert_allclose(kept[False][0], kept[True][0], rtol=1e-4)
    np.testing.assert_allclose(kept[False][1], kept[True][1], rtol=1e-4, atol=1e-6)


def test_a_loss_function_of_the_batch_cannot_be_mixed():
    with pytest.raises(fluxcb.FluxcbError) as error:
        fluxcb.Learner.from_loss(
            {"w": jnp.ones(())},
            lambda params, batch, key: params["w"] * batch.mean(),
            optax.sgd(0.1),
            data=[jnp.ones(4)],
            callbacks=[MixUp()],
            default_callbacks=False,
        )
    text = str(error.value)
    for name in ("xs", "ys"):
        assert f"MixUp(0.2) uses `step.{name}` at ForwardBegin x LossTrainingPhase, where it does not exist." in text
    assert "fix:   use it in a phase that provides it; those of `Learner(model, loss_fn)` with" in text


def test_regression_targets_are_mixed():
    keep, shares = Keep(), Shares()
    testlearner(MixUp(1.0), keep, shares).fit(1)
    for (_, xs, ys, outputs, loss), _ in zip(keep.steps, shares.seen, strict=True):
        np.testing.assert_allclose(ys, 3 * xs - 1, rtol=1e-5, atol=1e-5)  # a line of mixtures is the same line
        assert loss == pytest.approx(((outputs - ys) ** 2).mean(), rel=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MixUp(0), "`alpha` of MixUp must be a number above 0, not 0.\n  fix:   give a finite number above 0"),
        (
            lambda: CutMix(-1),
            "`alpha` of CutMix must be a number above 0, not -1.\n  fix:   give a finite number above 0",
        ),
        (
            lambda: CutMix(axes=(0, 1)),
            "`axes` of CutMix must be the axes of height and width, not (0, 1).\n"
            "  why:   axis 0 is the axis of the examples\n"
            "  fix:   write `axes=(1, 2)` for images [n, h, w, c], and `axes=(2, 3)` for images [n, c, h, w]",
        ),
        (
            lambda: CutMix(axes=(2, 2)),
            "`axes` of CutMix must be the axes of height and width, not (2, 2).\n"
            "  why:   axis 0 is the axis of the examples\n"
            "  fix:   write `axes=(1, 2)` for images [n, h, w, c], and `axes=(2, 3)` for images [n, c, h, w]",
        ),
        (
            lambda: LabelSmoothing(1),
            "`alpha` of LabelSmoothing must be a number of at least 0 and below 1, not 1.\n"
            "  fix:   give a finite number of at least 0 and below 1",
        ),
    ],
)
def test_bad_arguments(make, message, refused):
    with refused(DeclarationError, message):
        make()
