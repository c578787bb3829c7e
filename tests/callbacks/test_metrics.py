import math
import re
from types import SimpleNamespace
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Append, Callback, CancelEpoch, CancelFitting, DeclarationError, on
from fluxcb.callbacks import AbstractMetric, Loss, Metric, Metrics, SmoothLoss, StepValues, accuracy
from fluxcb.callbacks.metrics.metrics import FLUSH_EVERY
from fluxcb.callbacks.metrics.packing import Packing
from fluxcb.data import ArrayLoader
from fluxcb.events import BackwardEnd, ComputeEnd, StepEnd
from fluxcb.phases import AbstractTrainingPhase, AbstractValidationPhase, TrainingPhase, ValidationPhase
from fluxcb.testing import testlearner


def test_epoch_values_are_means_over_samples(build, reference, make_batches):
    training, validation = make_batches([4, 4, 2]), make_batches([3, 1], seed=1)
    learner = build([Metrics(accuracy)], data=(training, validation))
    learner.fit(2)
    epochs = learner.cbstate["metrics_epoch"]
    for epoch in (1, 2):
        seen = [(*reference.train(*batch), len(batch[1])) for batch in training]
        looked = [(*reference.look(*batch)[:2], len(batch[1])) for batch in validation]
        for phase, rows in (("training", seen), ("validation", looked)):
            loss, right, n = (np.array(column) for column in zip(*rows, strict=True))
            found = epochs[phase].at(epoch)
            assert found["loss"] == pytest.approx((loss * n).sum() / n.sum(), rel=1e-6)
            assert found["accuracy"] == pytest.approx((right * n).sum() / n.sum(), rel=1e-6)
    assert [epoch for epoch, _ in epochs[TrainingPhase]["loss"]] == [1, 2]
    assert epochs[ValidationPhase()].last("loss") == epochs["validation"]["loss"][-1][1]


def test_step_values_are_complete_and_do_not_shorten_windows(build, reference, make_batches):
    data = make_batches([2] * (FLUSH_EVERY + 70))
    learner = build([Metrics(SmoothLoss(0.9))], data=data)
    learner.fit(2)
    log = learner.cbstate["metrics_step"]["training"]
    assert log.steps == list(range(1, 2 * len(data) + 1))
    losses, smooth = [], []
    for _ in range(2):
        average = 0.0
        for n, batch in enumerate(data, 1):
            losses.append(reference.train(*batch)[0])
            average = 0.9 * average + 0.1 * losses[-1]
            smooth.append(average / (1 - 0.9**n))
    np.testing.assert_allclose(log["loss"], losses, rtol=2e-5)
    np.testing.assert_allclose(log["smooth_loss"], smooth, rtol=2e-5)
    assert learner.cbstate["metrics_epoch"]["training"].last("smooth_loss") == pytest.approx(smooth[-1], rel=2e-5)
    bounds = learner._core.engine.step_loop(learner.phases[0]).runner.plan.bounds
    assert [(bound.call.handler.name, bound.call.schedules, bound.blocks) for bound in bounds] == [
        ("fetch_step_values", (fluxcb.EverySteps(FLUSH_EVERY),), False)
    ]
    assert [leaf.shape for leaf in learner.state["cbstate"]["metrics_now"].values()] == [(2 * 9 + 2 * FLUSH_EVERY * 2,)]


@pytest.mark.parametrize("cancel", [CancelEpoch, CancelFitting])
def test_step_values_of_a_cancelled_epoch_are_complete(build, make_batches, cancel):
    class Stop(Callback):
        def stateaccess(self):
            return {"control": Append()}

        @on
        def stop(self, event: StepEnd, phase: TrainingPhase, learner):
            if learner.progress.step == 5:
                raise cancel

    learner = build([Stop(), Metrics()], data=make_batches([2] * 9))
    learner.fit(1)
    log = learner.cbstate["metrics_step"]["training"]
    assert log.steps == [1, 2, 3, 4, 5]
    assert np.mean(log["loss"]) == pytest.approx(learner.cbstate["metrics_epoch"]["training"].last("loss"), rel=1e-6)


def test_skipped_steps_have_step_values_only(build, make_batches):
    class SkipSecond(Callback):
        def stateaccess(self):
            return {"step": {"skip": Append()}}

        @on
        def skip(self, event: BackwardEnd, phase: AbstractTrainingPhase, learner):
            learner.step.skip = learner.progress.step == 1

    learner = build([Metrics(), SkipSecond()], data=make_batches([2, 2, 2]))
    learner.fit(1)
    losses = learner.cbstate["metrics_step"]["training"]["loss"]
    assert len(losses) == 3
    assert learner.cbstate["metrics_epoch"]["training"].last("loss") == pytest.approx((losses[0] + losses[2]) / 2)


def test_an_epoch_without_a_step_has_no_values(build):
    class Stop(Callback):
        @on
        def stop(self, event: fluxcb.events.EpochBegin, phase: TrainingPhase, learner):
            if learner.progress.epoch == 2:
                raise CancelEpoch

    learner = build([Metrics(), Stop()])
    learner.fit(3)
    assert [epoch for epoch, _ in learner.cbstate["metrics_epoch"]["training"]["loss"]] == [1, 3]


def test_learners_from_a_loss_have_only_the_loss():
    def build(metrics):
        return fluxcb.Learner.from_loss(
            {"w": jnp.float32(1.0)},
            lambda params, batch, key: (jnp.mean(params["w"] * batch), {"mean": jnp.mean(batch)}),
            optax.sgd(0.5),
            data=([jnp.ones(4), 2 * jnp.ones(2)], [jnp.ones(3)]),
            callbacks=[metrics],
            default_callbacks=False,
        )

    learner = build(Metrics(Metric(lambda aux: aux["mean"], name="mean", needs=("aux",))))
    learner.fit(1)
    # w: 1, then 1 - 0.5 * 1, then 0.5 - 0.5 * 2
    assert learner.cbstate["metrics_step"]["training"].values == {"loss": [1.0, 1.0], "mean": [1.0, 2.0]}
    assert learner.cbstate["metrics_epoch"]["training"].at(1) == {"loss": 1.0, "mean": pytest.approx(8 / 6)}
    assert learner.cbstate["metrics_epoch"]["validation"].at(1) == {"loss": -0.5, "mean": 1.0}
    with pytest.raises(DeclarationError) as error:
        build(Metrics(accuracy))  # the loss could return the missing values in aux
    assert (
        error.value.what
        == "The metric `accuracy` needs `step.outputs` and `step.ys`, which LossTrainingPhase does not compute."
    )


class Summing(AbstractValidationPhase):
    name = "summing"
    provides = {fluxcb.events.LossBegin: ("total",)}

    def step(self, learner, emit):
        learner.step.total = jnp.sum(learner.step.batch[0])


def test_a_phase_without_a_needed_step_value_is_an_error(build, make_batches):
    data = {"training": make_batches([2]), "summing": make_batches([2])}
    with pytest.raises(DeclarationError) as error:
        build([Metrics(accuracy)], data=data, phases=(TrainingPhase(), Summing()))
    assert str(error.value) == (
        "The metric `accuracy` needs `step.outputs` and `step.ys`, which Summing does not compute.\n"
        "  why:   metrics are updated at the end of each step of every phase, from the step values in their `needs`\n"
        "  fix:   assign `learner.step.outputs` and `learner.step.ys` in the phase's `step`\n"
        "     or: compute the metric only in other phases: `Metric(..., phase=...)`"
    )
    learner = build([Metrics()], data=data, phases=(TrainingPhase(), Summing()))  # no Loss() in Summing
    learner.fit(1)
    assert list(learner.cbstate["metrics_epoch"]) == ["training", "summing"]
    assert learner.cbstate["metrics_epoch"]["summing"].at(1) == {}
    with pytest.raises(DeclarationError, match=r"The metric `loss` needs `step.loss`, which Summing does not compute"):
        build([Metrics(Loss())], data=data, phases=(TrainingPhase(), Summing()))


class Largest(AbstractMetric):
    """A metric with an integer and a float in its state."""

    name = "largest"
    needs = ("ys",)

    def init(self):
        return {"largest": np.int32(-1), "batches": np.float32(0)}

    def update(self, state, step, samples):
        return {"largest": jnp.maximum(state["largest"], step.ys.max()), "batches": state["batches"] + 1}

    def compute(self, state):
        return state["largest"] + state["batches"] / 10


def test_a_custom_metric(build, make_batches):
    data = make_batches([4, 4, 2])
    learner = build([Metrics(Largest())], data=data)
    learner.fit(2)
    largest = max(int(ys.max()) for _, ys in data)
    assert learner.cbstate["metrics_epoch"]["training"]["largest"] == [
        (e, pytest.approx(largest + 0.3)) for e in (1, 2)
    ]
    alone = [int(ys.max()) + 0.1 for _, ys in data]
    assert learner.cbstate["metrics_step"]["training"]["largest"] == pytest.approx(alone * 2)
    assert {d: v.shape for d, v in learner.state["cbstate"]["metrics_now"].items()} == {
        "int32": (2,),
        "float32": (2 * 8 + 4 * FLUSH_EVERY,),
    }


def test_a_metric_that_changes_the_shapes_of_its_state_is_an_error(build):
    class Growing(Largest):
        def update(self, state, step, samples):
            return {**state, "batches": jnp.ones(2)}

    with pytest.raises(DeclarationError) as error:
        build([Metrics(Growing())])
    assert str(error.value) == (
        "The metric `largest` changed the structure or shapes of its state: "
        "{'batches': (), 'largest': ()} became {'batches': (2,), 'largest': ()}.\n"
        "  why:   the state is part of the carry of a compiled step, whose structure and shapes cannot change\n"
        "  fix:   let `Growing.update` return the structure and shapes that `init` returned"
    )


def test_a_metric_that_returns_an_array_is_an_error(build):
    with pytest.raises(DeclarationError) as error:
        build([Metrics(Metric(lambda outputs, ys: outputs.mean(1), name="rows"))])
    assert str(error.value) == (
        "The metric `rows` returned an array of shape (4,) for one batch.\n"
        "  why:   the values of batches are averaged, so each must be one number, the mean over the batch\n"
        "  fix:   take the mean over the batch: `jnp.mean(...)`"
    )


def test_sums_are_compensated():
    metric, step = Loss(), SimpleNamespace(loss=jnp.float32(1e8))
    state = metric.update(metric.init(), step, 1)
    for _ in range(100):  # each of these is lost in a plain float32 sum
        state = metric.update(state, SimpleNamespace(loss=jnp.float32(1.0)), 1)
    assert float(state[0]) == pytest.approx(1e8 + 100, abs=4)  # neighbors are 8 apart
    assert math.isinf(metric.compute(metric.update(state, SimpleNamespace(loss=jnp.float32(np.inf)), 1)))


def test_accuracy_accepts_class_indices_and_one_hot_labels():
    scores = jnp.array([[0.1, 0.9, 0.0], [0.8, 0.1, 0.1], [0.2, 0.3, 0.5], [1.0, 0.0, 0.0]])
    ids = jnp.array([1, 0, 1, 0])
    assert float(accuracy(scores, ids)) == float(accuracy(scores, jnp.eye(3)[ids])) == 0.75
    assert float(accuracy(scores[None], ids[None])) == 0.75


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_accuracy_of_one_output_is_an_error_whose_fix_works(shape):
    outputs = jnp.array([2.0, -1.0, 0.5, -0.5, 3.0, -2.0]).reshape(6, 1)
    ys = jnp.array([1.0, 0.0, 0.0, 1.0, 1.0, 0.0]).reshape(shape)
    with pytest.raises(DeclarationError) as error:
        accuracy(outputs, ys)  # the class with the largest output would always be class 0
    metric = 'Metric(lambda outputs, ys: ((outputs > 0).reshape(ys.shape) == ys).mean(), name="accuracy")'
    assert str(error.value) == (
        f"`accuracy` was given outputs of shape (6, 1) and targets of shape {shape}.\n"
        "  why:   it needs scores float[batch, ..., classes] of two or more classes, and classes int[batch, ...] or "
        "one-hot\n"
        f"  fix:   for two classes and one logit per sample, write `Metrics({metric})`"
    )
    fixed = eval(metric)  # noqa: S307 - of the message's own text
    assert float(fixed.fn(outputs, ys)) == pytest.approx(4 / 6)


def test_accuracy_of_targets_with_an_additional_axis_is_an_error_whose_fix_works():
    outputs, ys = jnp.eye(3)[jnp.array([0, 1, 2, 1])], jnp.array([[0], [1], [1], [1]])
    with pytest.raises(DeclarationError) as error:
        accuracy(outputs, ys)  # `argmax` of these targets would be 0 for each sample
    metric = 'Metric(lambda outputs, ys: accuracy(outputs, ys.squeeze(-1)), name="accuracy")'
    assert str(error.value) == (
        "`accuracy` was given outputs of shape (4, 3) and targets of shape (4, 1).\n"
        "  why:   it needs scores float[batch, ..., classes] of two or more classes, and classes int[batch, ...] or "
        "one-hot\n"
        f"  fix:   write `Metrics({metric})`"
    )
    assert float(eval(metric).fn(outputs, ys)) == 0.75  # noqa: S307 - of the message's own text


def test_a_step_value_is_the_metric_of_one_batch(build, make_batches):
    class Root(Metric):
        def compute(self, state):
            return jnp.sqrt(super().compute(state))

    def squares(outputs, ys):
        return jnp.mean(outputs**2)

    learner = build([Metrics(Root(squares, name="root"), Metric(squares, name="mean"))], data=make_batches([4, 2, 3]))
    learner.fit(1)
    values = learner.cbstate["metrics_step"][TrainingPhase]
    np.testing.assert_allclose(values["root"], np.sqrt(values["mean"]), rtol=1e-6)
    assert len(set(values["mean"])) == 3


def concatenated(jaxpr):
    """Return how many arrays are concatenated in a jaxpr and in those that it calls. `stack` is new in JAX 0.10."""
    count = 0
    for equation in jaxpr.eqns:
        inner = [getattr(value, "jaxpr", value) for value in equation.params.values()]
        count += len(equation.invars) if equation.primitive.name in ("concatenate", "stack") else 0
        count += sum(concatenated(value) for value in inner if hasattr(value, "eqns"))
    return count


def test_plain_mean_is_one_operand_of_concatenation():
    """XLA compiles a kernel for each operand of a long concatenation, so the states of plain means are vectors."""

    def operands(count):
        metrics = [Metric(lambda aux, i=i: aux[i], f"m{i}", needs=("aux",)) for i in range(count)]
        learner = fluxcb.Learner.from_loss(
            {"w": jnp.ones(())},
            lambda params, batch: (jnp.mean(params["w"] * batch), [jnp.max(batch) + i for i in range(count)]),
            optax.sgd(0.1),
            data=([np.ones(2, np.float32)], [np.ones(2, np.float32)]),
            callbacks=[Metrics(*metrics)],
            default_callbacks=False,
        )
        return [concatenated(learner._core.traced(phase).jaxpr) for phase in learner.phases]

    few, many = operands(2), operands(7)
    assert [b - a for a, b in zip(few, many, strict=True)] == [5, 5]


def test_means_keep_values_and_order_among_other_metrics(build, make_batches):
    class Doubled(Metric):
        def update(self, state, step, samples):
            return super().update(state, step, 2 * samples)

    def largest(outputs, ys):
        return jnp.max(outputs)

    def weight(batch):
        return jnp.float32(len(batch[1]))

    metrics = [
        Doubled(largest, "doubled"),
        Metric(largest, "plain"),
        SmoothLoss(0.5),
        Metric(largest, "validation_only", phase=ValidationPhase),
        Metric(largest, "weighted", weight=weight),
        Metric(lambda outputs, ys: jnp.max(outputs, axis=0), "array", shape=(4,)),
        accuracy,
    ]
    learner = build([Metrics(*metrics)], data=(make_batches([4, 4, 3]), make_batches([3, 1], seed=1)))
    history = learner.fit(2)
    steps, epochs = learner.cbstate["metrics_step"]["training"], learner.cbstate["metrics_epoch"]
    assert list(steps) == ["loss", "doubled", "plain", "smooth_loss", "weighted", "accuracy"]
    names = ["loss", "doubled", "plain", "smooth_loss", "validation_only", "weighted", "array", "accuracy"]
    assert list(epochs["validation"]) == names
    assert "validation_only" not in epochs["training"].at(2)
    for phase in ("training", "validation"):
        found = epochs[phase].at(2)
        assert found["plain"] == pytest.approx(found["doubled"], rel=1e-6)
        assert found["plain"] == pytest.approx(found["weighted"], rel=1e-6)
    assert epochs["validation"].at(2)["validation_only"] == epochs["validation"].at(2)["plain"]
    last = np.array(steps["plain"][3:])
    assert epochs["training"].at(2)["plain"] == pytest.approx((last * [4, 4, 3]).sum() / 11, rel=1e-6)
    assert history["training/loss"][-1] == pytest.approx((np.array(steps["loss"][3:]) * [4, 4, 3]).sum() / 11, rel=1e-6)


def test_unpacking_inverts_packing():
    tree = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": (np.int32(7), np.float32(2.5))}
    packing = Packing(tree)
    assert packing.sizes == {"float32": 7, "int32": 1}
    for packed in packing.template, packing.pack(tree):
        assert {dtype: (vector.shape, vector.dtype) for dtype, vector in packed.items()} == {
            "float32": ((7,), np.float32),
            "int32": ((1,), np.int32),
        }
        back = packing.unpack(packed)
        np.testing.assert_array_equal(back["a"], tree["a"])
        assert (int(back["b"][0]), float(back["b"][1])) == (7, 2.5)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ((Loss,), "`Metrics` takes metrics, not the class Loss.\n  fix:   write `Loss()`"),
        (
            (3,),
            "`Metrics` takes metrics and functions of outputs and targets, not 3.\n"
            "  fix:   write e.g. `Metrics(accuracy)`",
        ),
        (
            (accuracy, accuracy),
            "Two metrics are called `accuracy`.\n  why:   their values are stored by name\n"
            '  fix:   rename one: `Metric(fn, name="...")`',
        ),
        (
            (lambda outputs, ys: 0.0,),
            'The function of this metric has no name.\n  fix:   name it: `Metric(fn, name="top5_accuracy")`',
        ),
    ],
)
def test_wrong_metrics_are_refused(metrics, message):
    with pytest.raises(DeclarationError) as error:
        Metrics(*metrics)
    assert str(error.value) == message


class Test(AbstractValidationPhase):
    name = "test"


@pytest.mark.parametrize("phase", [ValidationPhase, ValidationPhase(), (ValidationPhase, Test)])
def test_a_metric_for_one_phase_is_computed_and_reported_there_only(build, reference, make_batches, phase):
    calls = []

    def counted(outputs, ys):
        calls.append(outputs.shape[0])
        return accuracy(outputs, ys)

    training, validation = make_batches([4, 4]), make_batches([3, 3], seed=1)
    learner = build([Metrics(Metric(counted, name="right", phase=phase))], data=(training, validation))
    learner.fit(1)
    for batch in training:
        reference.train(*batch)
    right = [reference.look(*batch)[1] for batch in validation]
    epochs = learner.cbstate["metrics_epoch"]
    assert {name: list(of) for name, of in epochs.items()} == {"training": ["loss"], "validation": ["loss", "right"]}
    assert epochs["validation"].last("right") == pytest.approx(np.mean(right), rel=1e-6)
    assert list(learner.cbstate["metrics_step"]["training"]) == ["loss"]
    assert set(calls) == {3}  # never traced with a training batch


def test_phases_that_do_not_overlap_may_share_a_name(build, reference, make_batches):
    of_training = Metric(lambda outputs, ys: 1.0, name="right", phase=TrainingPhase)
    of_validation = Metric(accuracy, name="right", phase=ValidationPhase)
    training, validation = make_batches([4, 4]), make_batches([3, 3], seed=1)
    learner = build([Metrics(of_validation, of_training)], data=(training, validation))
    learner.fit(1)
    for batch in training:
        reference.train(*batch)
    right = [reference.look(*batch)[1] for batch in validation]
    epochs = learner.cbstate["metrics_epoch"]
    assert epochs["training"].last("right") == 1.0
    assert epochs["validation"].last("right") == pytest.approx(np.mean(right), rel=1e-6)
    assert learner.cbstate["metrics_step"]["training"]["right"] == [1.0, 1.0]


@pytest.mark.parametrize("phase", [AbstractValidationPhase, (TrainingPhase, ValidationPhase)])
def test_phases_that_overlap_may_not_share_a_name(phase, refused):
    with refused(
        DeclarationError,
        "Two metrics are called `accuracy`.\n  why:   their values are stored by name\n"
        '  fix:   rename one: `Metric(fn, name="...")`',
    ):
        Metrics(Metric(accuracy, phase=ValidationPhase), Metric(accuracy, phase=phase))


def test_a_metric_for_one_phase_can_need_values_of_that_phase_only(build, make_batches):
    class Checks(ValidationPhase):
        provides: ClassVar = {**ValidationPhase.provides, ComputeEnd: ("loss", "checked")}

        def step(self, learner, emit):
            super().step(learner, emit)
            learner.step.checked = learner.step.loss + 1

    checked = Metric(lambda checked: checked, name="checked", needs=("checked",), phase=Checks)
    data = make_batches([2]), make_batches([2])
    learner = build([Metrics(checked)], data=data, phases=(TrainingPhase(), Checks()))
    learner.fit(1)
    values = learner.cbstate["metrics_epoch"]["validation"]
    assert values.last("checked") == pytest.approx(values.last("loss") + 1, rel=1e-6)


@pytest.mark.parametrize("phase", ["validation", 3, None, (), (ValidationPhase, "test")])
def test_invalid_phases_of_a_metric(phase, refused):
    with refused(
        DeclarationError,
        f"`phase` of `Metric` must be a phase class, or a tuple of phase classes, not {phase!r}.\n"
        "  fix:   write e.g. `Metric(accuracy, phase=ValidationPhase)`",
    ):
        Metric(accuracy, phase=phase)


def test_phases_of_a_metric_class(refused):
    class Smooth(SmoothLoss):
        phases = ValidationPhase

    with refused(
        DeclarationError,
        "`phases` of the metric `smooth_loss` must be a tuple of phase classes, not "
        f"{ValidationPhase!r}.\n"
        "  fix:   write e.g. `phases = (ValidationPhase,)`",
    ):
        Metrics(Smooth())
    Smooth.phases = (ValidationPhase,)
    assert list(Metrics(Smooth()).provided_metrics(TrainingPhase)) == ["loss"]


def test_a_metric_shows_its_phases():
    assert repr(Metric(accuracy, phase=ValidationPhase())) == "Metric(accuracy, phase=ValidationPhase)"
    assert repr(Metric(accuracy, phase=(Test, TrainingPhase))) == "Metric(accuracy, phase=(Test, TrainingPhase))"


def test_an_explicit_loss_replaces_the_default_loss():
    assert [m.name for m in Metrics().metrics] == ["loss"]
    assert [m.name for m in Metrics(accuracy, Loss()).metrics] == ["accuracy", "loss"]
    with pytest.raises(
        DeclarationError, match=r"`beta` of SmoothLoss must be a number of at least 0 and below 1, not 1\.0\."
    ):
        SmoothLoss(1.0)


def test_exchanging_metrics_between_fits(build):
    learner = build([Metrics()])
    learner.fit(1)
    learner.callbacks.replace(Metrics(accuracy))
    learner.fit(1)
    log = learner.cbstate["metrics_step"]["training"]
    assert log.steps == [1, 2, 3, 4, 5, 6]
    assert [math.isnan(value) for value in log["accuracy"]] == [True] * 3 + [False] * 3
    assert not any(math.isnan(value) for value in log["loss"])
    assert [epoch for epoch, _ in learner.cbstate["metrics_epoch"]["training"]["accuracy"]] == [2]


def test_metrics_added_later_keep_their_order():
    values = StepValues()
    values.add([1], {"loss": [1.0]})
    names = [f"m{i}" for i in (3, 1, 2, 9, 5)]
    values.add([2], {"loss": [2.0], **{name: [0.5] for name in names}})
    assert list(values) == ["loss", *names]
    assert str(values["m3"]) == "[nan, 0.5]"


@pytest.mark.parametrize(
    ("wrong", "right", "width", "ys", "shapes"),
    [
        (
            lambda outputs, ys: ((outputs > 0) == ys).mean(),
            lambda outputs, ys: ((outputs[:, 0] > 0) == ys).mean(),
            1,
            np.arange(16) > 7,
            "outputs float32[8, 1] and targets bool[8]",
        ),
        (
            lambda outputs, ys: (jnp.argmax(outputs, -1) == ys).mean(),
            lambda outputs, ys: (jnp.argmax(outputs, -1) == ys[:, 0]).mean(),
            3,
            np.arange(16)[:, None] % 3,
            "outputs float32[8, 3] and targets int32[8, 1]",
        ),
    ],
)
def test_metric_that_compares_all_pairs_gives_warning(wrong, right, width, ys, shapes):
    xs = np.linspace(-1, 1, 16, dtype=np.float32)[:, None]
    model = (lambda key, xs: {"w": jnp.ones((1, width))}, lambda params, xs: xs @ params["w"])

    def train(fn):
        data = ArrayLoader((xs, ys), batch_size=8)
        metrics = Metrics(Metric(fn, "right"))
        return fluxcb.Learner(model, lambda outputs, ys: outputs.sum(), optax.sgd(0.1), data=data, callbacks=[metrics])

    with pytest.warns(UserWarning, match="The metric") as caught:
        train(wrong)
    assert [str(warning.message) for warning in caught] == [
        f"The metric `right` broadcasts {shapes} to [8, 8], so that each output is compared with every target. Write "
        "`[:, 0]` after the value whose last axis has size 1. If all pairs are intended, write `[None, :]` after the "
        "other one."
    ]
    train(right)


class CountsItself(AbstractMetric):
    name = "seen"

    def __init__(self):
        self.seen = 0

    def init(self):
        return jnp.zeros(())

    def update(self, state, step, samples):
        self.seen += 1
        return jnp.float32(self.seen)

    def compute(self, state):
        return state


class Counts(CountsItself):
    def update(self, state, step, samples):
        return state + samples


def test_metric_that_changes_a_field_is_a_warning():
    with pytest.warns(UserWarning, match="changed") as record:
        testlearner(Metrics(CountsItself()))
    assert {str(warning.message) for warning in record} == {
        "The metric `seen` changed `self.seen`. The change happens once, while the step is traced, and not at each "
        "step. Keep the value in the state of the metric: `init` creates it, and `update` returns the next one."
    }
    learner = testlearner(Metrics(Counts()))
    history = learner.fit(1)
    examples = sum(len(batch[0]) for batch in learner.data.training)
    assert history["training/seen"] == [examples]


def test_number_of_correct_examples_is_a_warning_whose_fixes_work():
    def correct(outputs, ys):
        return jnp.sum(outputs > ys)

    text = (
        "The metric `correct` is an integer for each batch, such as a number of correct examples, and its values are "
        "averaged over the batches. Return the mean over the batch, e.g. `jnp.mean(...)`. If the average of the "
        "integers is intended, return `jnp.float32(...)`."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        testlearner(Metrics(correct))
    testlearner(Metrics(Metric(lambda outputs, ys: jnp.mean(outputs > ys), "share")))
    testlearner(Metrics(Metric(lambda outputs, ys: jnp.float32(correct(outputs, ys)), "count")))
