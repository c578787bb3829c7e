"""A declared part of the carry, or of state that is kept by phase, must exist when the Learner is built."""

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fluxcb
from fluxcb import Append, CheckError, MissingStateError, Read, UnknownStateError, Write, on
from fluxcb.callbacks import CustomCallback, Freeze, InferenceRunner, Metric, Metrics, ParameterEMA, ScalarStats
from fluxcb.callbacks.by_phase import ByPhase
from fluxcb.events import EpochEnd, UpdateEnd
from fluxcb.phases import AbstractValidationPhase, TrainingPhase

BATCH = jnp.ones(2)


def reader(access, event=EpochEnd, read=lambda learner: None):
    return CustomCallback(read, event, TrainingPhase, access=access, name="reader")


def built(*callbacks, params=None, optimizer=None, **keywords):
    params = {"w": jnp.ones(()), "b": jnp.ones(())} if params is None else params
    return fluxcb.Learner.from_loss(
        params,
        lambda params, batch, key: sum(jnp.sum(x) for x in jax.tree.leaves(params)) * jnp.mean(batch),
        optax.sgd(0.1) if optimizer is None else optimizer,
        data=([BATCH], [BATCH]),
        callbacks=list(callbacks),
        **keywords,
    )


@pytest.fixture
def where():
    """Return where CustomCallback declares its access."""
    return fluxcb._declare.dispatch.source_of(CustomCallback.stateaccess)


def whole(access, event="EpochEnd"):
    return f"add `{access}` to the argument `access`: `CustomCallback(fn, {event}, TrainingPhase, access={{...}})`"


@pytest.mark.parametrize("event", [EpochEnd, UpdateEnd])
@pytest.mark.parametrize(
    ("access", "path", "what", "why", "fix"),
    [
        (
            {"params": {"ww": Read()}},
            "params.ww",
            "`params` has no `ww`. Did you mean `w`?",
            "the structure of `params` is fixed when the Learner is built",
            "name one of b, w",
        ),
        (
            {"params": {"ww": Write()}},
            "params.ww",
            "`params` has no `ww`. Did you mean `w`?",
            "the structure of `params` is fixed when the Learner is built",
            "name one of b, w",
        ),
        (
            {"params": {"w": {"kernel": Read()}}},
            "params.w.kernel",
            "`params.w` is an array, float32[], which has no parts.",
            "the structure of `params` is fixed when the Learner is built",
            'declare all of `params.w` instead: {whole({"params": {"w": Read()}})}',
        ),
        (
            {"model_state": {"batch_stats": Read()}},
            "model_state.batch_stats",
            "`model_state` is empty.",
            "the structure of `model_state` is fixed when the Learner is built",
            'declare all of `model_state` instead: {whole({"model_state": Read()})}',
        ),
        (
            {"opt_state": {"count": Read()}},  # also a method of tuples
            "opt_state.count",
            "`opt_state` is a tuple, whose parts have no names.",
            "the structure of `opt_state` is fixed when the Learner is built",
            'declare all of `opt_state` instead: {whole({"opt_state": Read()})}',
        ),
        (
            {"cbstate": {"metrics_epoch": {"valid": Read()}}},
            "cbstate.metrics_epoch.valid",
            "no phase is named `valid`. Did you mean `validation`?",
            "`cbstate.metrics_epoch` has one entry for each phase",
            "name one of training, validation",
        ),
        (
            {"cbstate": {"history": {"train": Read()}}},
            "cbstate.history.train",
            "no phase is named `train`. Did you mean `training`?",
            "`cbstate.history` has one entry for each phase",
            "name one of training, validation",
        ),
        (
            {"cbstate": {"history": {"training": {"stepz": Read()}}}},
            "cbstate.history.training.stepz",
            "`cbstate.history.training` has no `stepz`. Did you mean `steps`?",
            "`cbstate.history.training` has only these attributes",
            "name one of epochs, steps, steps_in_epoch, samples",
        ),
    ],
)
def test_unknown_part_raises(access, path, what, why, fix, event, where, refused):
    if "{whole(" in fix:
        start, _, wanted = fix.partition("{whole(")
        wanted = wanted.removesuffix(")}")
        fix = start + whole(wanted, event.__name__)
    with refused(
        UnknownStateError,
        f"CustomCallback(reader, {event.__name__}, TrainingPhase) declares access to `{path}`, but {what}\n"
        f"  where: CustomCallback.stateaccess  {where}\n  why:   {why}\n  fix:   {fix}",
    ):
        built(reader(access, event))


@pytest.mark.parametrize(
    ("access", "path", "meant"),
    [
        ({"metrics_epoch": {"validation": {"los": Read()}}}, "metrics_epoch.validation.los", "validation.loss"),
        ({"metrics_epoch": {"valid": {"loss": Read()}}}, "metrics_epoch.valid.loss", "validation.loss"),
        ({"metrics_step": {"training": {"los": Read()}}}, "metrics_step.training.los", "training.loss"),
    ],
)
def test_metric_without_provider_raises(access, path, meant, where, refused):
    hub, _, metric = path.split(".")
    with refused(
        MissingStateError,
        f"CustomCallback(reader, EpochEnd, TrainingPhase) reads `cbstate.{path}`, a metric that no callback provides. "
        f"Did you mean `cbstate.{hub}.{meant}`?\n"
        f"  where: CustomCallback.stateaccess  {where}\n"
        "         the callbacks provide `training/loss`, `validation/loss`\n"
        "  why:   reading a metric that has no values is an error\n"
        f"  fix:   declare access to `cbstate.{hub}.{meant}` instead\n"
        f'     or: add the metric: `Metrics(Metric(fn, name="{metric}"))`',
    ):
        built(reader({"cbstate": access}))


def test_both_fixes_of_missing_metric_work():
    access = {"cbstate": {"metrics_epoch": {"validation": {"los": Read()}}}}
    built(reader({"cbstate": {"metrics_epoch": {"validation": {"loss": Read()}}}}))
    built(reader(access), Metrics(Metric(jnp.mean, name="los", needs=("loss",))))


def test_all_problems_are_reported_together():
    with pytest.raises(CheckError) as caught:
        built(reader({"params": {"ww": Read(), "bb": Read()}, "cbstate": {"history": {"valid": Read()}}}))
    paths = ("params.ww", "params.bb", "cbstate.history.valid")
    assert [problem.what.split("`")[1] for problem in caught.value.problems] == list(paths)


def test_carried_state_parts_are_checked():
    ema = ParameterEMA(0.9)
    built(ema, reader({"cbstate": {"ema": {"params": {"w": Read()}}}}))
    with pytest.raises(UnknownStateError, match=r"`cbstate.ema` has no `parms`. Did you mean `params`\?"):
        built(ParameterEMA(0.9), reader({"cbstate": {"ema": {"parms": Read()}}}))
    with pytest.raises(UnknownStateError, match=r"`cbstate.ema.params` has no `ww`. Did you mean `w`\?"):
        built(ParameterEMA(0.9), reader({"cbstate": {"ema": {"params": {"ww": Read()}}}}))


class OwnPhase(AbstractValidationPhase):
    """A phase that is run by a user's loop and is not one of the Learner's phases."""

    name = "declared_parts_own"


@pytest.mark.parametrize(
    "access",
    [
        {"cbstate": {"metrics_epoch": {"inference": Read()}}},
        {"cbstate": {"metrics_epoch": {"inference": {"loss": Read()}}}},
        {"cbstate": {"history": {"declared_parts_own": Read()}}},
        {"cbstate": {"metrics_epoch": {"declared_parts_own": {"loss": Read()}}}},
        {"cbstate": {"traces": {"added": Read()}}},
        {"cbstate": {"own": {"any": {"thing": Read()}}}},
        {"params": {"w": Write()}},
    ],
)
def test_part_created_during_training_is_accepted(access):
    class Creates(fluxcb.Callback):
        def stateaccess(self):
            return {"cbstate": {"own": Write(), "traces": Write()}}

        def init(self, learner):
            learner.cbstate.own = {}
            learner.cbstate.traces = ByPhase(dict)

    built(Creates(), InferenceRunner([BATCH], ScalarStats("loss")), reader(access))


def test_metrics_with_unknown_names_are_accepted():
    class Adds(fluxcb.Callback):
        def stateaccess(self):
            return {"cbstate": {"metrics_epoch": {"training": {"own": Append()}}}}

        def runafter(self):
            return (Metrics,)

        @on
        def add(self, event: EpochEnd, phase: TrainingPhase, learner):
            learner.cbstate.metrics_epoch["training"].add("own", learner.progress.epoch, 1.0)

    built(Adds(), reader({"cbstate": {"metrics_epoch": {"training": {"own": Read()}}}}))


class Perceptron(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.dense = nnx.Linear(1, 1, rngs=rngs)
        self.norm = nnx.BatchNorm(1, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(1, 1, rngs=rngs)])

    def __call__(self, xs):
        return self.layers[0](self.norm(self.dense(xs)))


PAIR = (np.ones((2, 1), np.float32), np.ones((2, 1), np.float32))


def of_model(model, *callbacks, optimizer=None):
    return fluxcb.Learner(
        model,
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optimizer or optax.sgd(0.1),
        data=([PAIR], [PAIR]),
        callbacks=list(callbacks),
    )


@pytest.mark.parametrize(
    ("access", "wrong"),
    [
        ({"params": {"dense": {"kernel": Read()}}}, None),
        ({"model_state": {"norm": {"mean": Read()}}}, None),
        ({"params": {"dens": {"kernel": Read()}}}, "`params` has no `dens`. Did you mean `dense`?"),
        ({"params": {"dense": {"weight": Read()}}}, "`params.dense` has no `weight`."),
        ({"model_state": {"norm": {"median": Read()}}}, "`model_state.norm` has no `median`. Did you mean `mean`?"),
        ({"params": {"layers": {"0": Read()}}}, "`params.layers` has no `0`."),  # its key is a number
    ],
)
def test_parts_of_nnx_module(access, wrong):
    if wrong is None:
        of_model(Perceptron(), reader(access)).fit(1)
    else:
        with pytest.raises(UnknownStateError) as caught:
            of_model(Perceptron(), reader(access))
        assert caught.value.what.endswith(f", but {wrong}")


@pytest.mark.parametrize(
    ("access", "wrong"),
    [
        ({"params": {"layers": Read()}}, None),
        ({"params": {"layer": Read()}}, "`params` has no `layer`. Did you mean `layers`?"),
        ({"params": {"layers": {"0": Read()}}}, "`params.layers` is a tuple, whose parts have no names."),
    ],
)
def test_parts_of_equinox_module(access, wrong):
    model = equinox.nn.MLP(1, 1, 2, 1, key=jax.random.key(0))
    if wrong is None:
        of_model(model, reader(access, read=lambda learner: learner.params.layers[0].weight)).fit(1)
    else:
        with pytest.raises(UnknownStateError) as caught:
            of_model(model, reader(access))
        assert caught.value.what.endswith(f", but {wrong}")


def test_parts_of_frozen_and_labeled_parameters():
    optimizer = optax.multi_transform({"a": optax.sgd(0.1), "b": optax.adam(0.1)}, {"w": "a", "b": "b"})
    seen = []
    read = {"params": {"w": Read(), "b": Read()}, "opt_state": {"inner_states": {"a": Read(), "b": Read()}}}
    learner = built(
        Freeze("b"),
        reader(read, read=lambda learner: seen.append((float(learner.params.w), float(learner.params.b)))),
        optimizer=optimizer,
    )
    learner.fit(1)
    assert seen == [(pytest.approx(0.9), 1.0)]
    with pytest.raises(UnknownStateError) as caught:
        built(reader({"opt_state": {"inner_states": {"c": Read()}}}), optimizer=optimizer)
    assert caught.value.fix == ("name one of a, b",)


def test_rejected_set_keeps_old_callbacks():
    learner = built()
    with pytest.raises(UnknownStateError):
        learner.callbacks.add(reader({"params": {"ww": Read()}}))
    assert "reader" not in {callback.name for callback in learner.callbacks}
    learner.callbacks.add(reader({"params": {"w": Read()}}))
    assert "reader" in {callback.name for callback in learner.callbacks}
