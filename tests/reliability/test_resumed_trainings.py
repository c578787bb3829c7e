"""All kinds of data, models and engines, and several lengths of a fit, resume exactly."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Learner, ThreadExecutor
from fluxcb.callbacks import Checkpointer, LearningRate, LogMetrics, Metrics, Monitors, ParameterEMA, Scheduler
from fluxcb.data import ArrayLoader
from fluxcb.logging import JSONLinesBackend
from tests.reliability.interrupted import Interrupted

RNG = np.random.default_rng(0)
XS, YS = RNG.normal(size=(20, 5)).astype(np.float32), RNG.normal(size=(20, 2)).astype(np.float32)
BATCHES = [(XS[i : i + 4], YS[i : i + 4]) for i in range(0, 20, 4)]

# --- data: five batches an epoch --------------------------------------------------------------------------------------


class Iterable:
    """An iterable without a position, so that a resume counts batches."""

    def __iter__(self):
        return iter(BATCHES)


def grain_dataset():
    grain = pytest.importorskip("grain")
    return grain.MapDataset.source([*zip(XS, YS, strict=True)]).seed(1).shuffle().batch(4).to_iter_dataset()


DATA = {
    "list": lambda: BATCHES,
    "loader": lambda: ArrayLoader((XS, YS), 4, seed=3),
    "loader on the device": lambda: ArrayLoader((XS, YS), 4, seed=3, device=True),
    "iterable": Iterable,
    "grain": grain_dataset,
    "iterator": lambda: itertools.cycle(BATCHES),
}

# --- models, with dropout ---------------------------------------------------------------------------------------------


def squared_error(outputs, ys):
    return jnp.mean((outputs - ys) ** 2)


def of_params(optimizer, **given):
    def loss(params, batch, key):
        xs, ys = batch
        kept = jax.random.bernoulli(key, 0.5, xs.shape)
        return squared_error(jnp.where(kept, xs, 0) @ params["w"], ys)

    return Learner.from_loss({"w": jnp.ones((5, 2))}, loss, optimizer, **given)


def of_nnx(optimizer, **given):
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(5, 2, rngs=rngs)
            self.norm = nnx.BatchNorm(2, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(self.linear(x)))

    return Learner(Net(nnx.Rngs(0)), squared_error, optimizer, **given)


def of_equinox(optimizer, **given):
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        linear: Any
        dropout: Any

        def __call__(self, x, *, key=None):
            return self.dropout(self.linear(x), key=key)

    made = Net(eqx.nn.Linear(5, 2, key=jax.random.key(0)), eqx.nn.Dropout(0.5))
    return Learner(made, squared_error, optimizer, **given)


MODELS = {"params": of_params, "nnx": of_nnx, "equinox": of_equinox}
LENGTHS = ({"epochs": 2}, {"steps": 8}, {"steps": 8, "steps_per_epoch": 3})
ENGINES = {"serial": lambda: None, "threads": lambda: ThreadExecutor(2)}

CASES = [
    *[(data, length, "serial", "params") for data in DATA for length in LENGTHS if data != "iterator"],
    ("iterator", LENGTHS[2], "serial", "params"),  # it never ends
    *[(data, LENGTHS[0], "threads", "params") for data in DATA if data != "iterator"],
    *[("loader", length, "serial", model) for model in ("nnx", "equinox") for length in LENGTHS],
]
# How many batches are pulled again by those whose position can only be counted: one that can be iterated again is read
# from the beginning of its pass, after 7 and after 3 steps in passes of 5; an iterator has no other beginning.
READ_AGAIN = {("iterable", 0): [2], ("iterable", 1): [2], ("iterable", 2): [2, 3, 3], ("iterator", 2): [7, 3, 3]}


# Sources without a length are read to their end in each epoch.
@pytest.mark.filterwarnings("ignore:`data.training` has no length:UserWarning")
@pytest.mark.parametrize(("data", "length", "engine", "model"), CASES)
def test_training_resumes_exactly(data, length, engine, model, tmp_path):
    def learner(run):
        return MODELS[model](
            fluxcb.inject(optax.adam, learning_rate=0.1),
            data=(DATA[data](), BATCHES[:2]),
            callbacks=[
                Checkpointer(run / "saved", steps=7),
                Metrics(),
                ParameterEMA(0.9),
                Scheduler({LearningRate: optax.cosine_decay_schedule(0.1, 10)}),
                Monitors(JSONLinesBackend(run / "log.jsonl")),
                LogMetrics(),
            ],
            default_callbacks=False,
            executor=ENGINES[engine](),
        )

    between = "StepBegin training 7"  # in the second epoch, or the third one
    training = Interrupted(learner, length, tmp_path, lambda number, moment: moment == between)
    moments = training.moments
    assert f"StepEnd training {length.get('steps', 10)}" in moments
    assert training.killed_at(moments.index(between)) == []
    for event in ("StepEnd validation", "EpochEnd training"):
        number = next(n for n, moment in enumerate(moments) if moment.startswith(event))
        assert training.preempted_at(number) == [], moments[number]
    assert [text.partition("with differences: ")[2] for text in training.told] == [
        f"data.training: read and discarded {count} batches to reach the position"
        for count in READ_AGAIN.get((data, LENGTHS.index(length)), [])
    ]
