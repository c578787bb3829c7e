"""A run with many callbacks is killed or preempted at each of its events, and still ends with the same result."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
import fluxcb.callbacks as library
from fluxcb import Append, Callback, Read, every, on, when
from fluxcb.events import EpochBegin, EpochEnd, HostEvent, StepEnd, Trigger
from fluxcb.logging import CSVBackend, JSONLinesBackend
from fluxcb.phases import Phase
from tests.reliability.interrupted import Interrupted

pytestmark = pytest.mark.long


class Seen(Callback):
    """Record the moments, without those that an interruption adds."""

    def __init__(self, name):
        self.name, self.seen = name, []

    def state_dict(self):
        return {"seen": list(self.seen)}

    def load_state_dict(self, state):
        self.seen = list(state["seen"])

    @on(HostEvent, Phase)
    def see(self, event, phase, learner):
        if not type(event).__name__.startswith("Fit"):
            self.seen.append(f"{type(event).__name__} {type(phase).name} {learner.progress.step}")


class PutsEverywhere(Callback):
    """Log a number at each step and each end, so that the record of the last step of an epoch is written in parts."""

    def stateaccess(self):
        return {"step": {"loss": Read()}, "cbstate": {"monitors": Append()}}

    @on(StepEnd, Phase)
    def put_step(self, event, phase, learner):
        name = f"{type(phase).name}/{learner.progress.step_in_epoch}"
        learner.cbstate.monitors.put_scalar(name, learner.step.loss)

    @on(EpochBegin | EpochEnd | Trigger, Phase, access={"cbstate": {"monitors": Append()}})
    def put(self, event, phase, learner):
        monitors, name = learner.cbstate.monitors, f"{type(event).__name__}/{type(phase).name}"
        monitors.put_scalar(name, learner.progress.epoch)
        monitors.put_text(f"{name}/text", f"epoch {learner.progress.epoch}")


def batches(count, size, seed):
    rng = np.random.default_rng(seed)
    classes = rng.integers(0, 3, (count, size))
    images = rng.normal(size=(count, size, 12)) + 2 * (np.arange(12) // 4 == classes[..., None])
    return list(zip(images.astype(np.float32), classes.astype(np.int32), strict=True))


def apply(params, xs, *, key, train):
    hidden = jnp.tanh(xs @ params["w1"])
    kept = jax.random.bernoulli(key, 0.8, hidden.shape) if train else True
    return jnp.where(kept, hidden, 0) @ params["w2"] + params["frozen"]


def cross_entropy(outputs, ys):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, ys).mean()


def init(key, xs):
    k1, k2 = jax.random.split(key)
    return {"w1": jax.random.normal(k1, (12, 8)), "w2": jax.random.normal(k2, (8, 3)), "frozen": jnp.zeros(3)}


def learner(run, steps_per_call):
    trigger = library.CallbackFactory(
        trigger=lambda learner: learner.cbstate.monitors.put_scalar("triggered", learner.progress.step),
        access={"cbstate": {"monitors": Append()}},
        name="triggered",
    )
    callbacks = [
        library.Checkpointer(run / "saved", steps=2, keep_last=1),
        library.Monitors(JSONLinesBackend(run / "log.jsonl"), CSVBackend(run / "log.csv")),
        PutsEverywhere(),
        library.LogMetrics(),
        library.LogHyperParams(library.LearningRate),
        library.LogHistograms(freq=2),
        library.MovingAverage("step.loss"),
        library.SimpleMovingAverage("step.loss", 4),
        library.InferenceRunner(batches(2, 4, 3), [library.ScalarStats("loss")]),
        library.ParameterEMA(0.9),
        library.EarlyStopping(50),
        library.Scheduler({"b1": optax.cosine_decay_schedule(0.9, 6)}),
        library.StatMonitorParamSetter("weight_decay", "loss", lambda value: value / 2, 1e6, 1),
        library.ReduceLROnPlateau(0.5, patience=0, threshold=1e6),
        library.MixUp(),
        library.AccumulateGradients(2),
        library.ClipGradients(0.5),
        library.GradientNoise(0.1),
        library.Freeze("frozen", epochs=1),
        library.PeriodicTrigger(trigger, every_k_steps=2, before_train=True),
        when(Seen("while"), lambda learner: learner.progress.step < 2),
        every(Seen("every other step"), steps=2),
        every(Seen("every other epoch"), epochs=2),
    ]
    return fluxcb.Learner(
        (init, apply),
        cross_entropy,
        fluxcb.inject(optax.adamw, learning_rate=0.1, b1=0.9, weight_decay=1e-3),
        data=(batches(3, 4, 1), batches(2, 4, 2)),
        callbacks=callbacks,
        default_callbacks=True,
        steps_per_call=steps_per_call,
        key=5,
    )


# Each of the four combinations takes a minute. These two cover both kinds of interruption and both kinds of programs.
# No backend takes the values of LogHistograms. The test needs only that it runs.
@pytest.mark.filterwarnings("ignore:`params/frozen` is a Histogram")
@pytest.mark.parametrize(("how", "steps_per_call"), [("killed_at", 2), ("preempted_at", 1)])
def test_training_resumes_exactly_from_each_event(how, steps_per_call, tmp_path):
    training = Interrupted(lambda run: learner(run, steps_per_call), {"epochs": 2}, tmp_path)
    epoch = [
        *["EpochBegin training", *["StepBegin training", "StepEnd training"] * 3, "EpochEnd training"],
        *["EpochBegin validation", *["StepBegin validation", "StepEnd validation"] * 2, "EpochEnd validation"],
        "Trigger training",
    ]
    assert [moment.rpartition(" ")[0] for moment in training.moments] == [
        "FitBegin training",
        *epoch * 2,
        "FitStopping training",
        "FitEnd training",
    ]
    # A line for the fit's beginning, and for each epoch one at its beginning and one a step.
    lines = [json.loads(line) for line in training.expected["log.jsonl"].splitlines()]
    assert [(line["step"], line["epoch"]) for line in lines] == [
        (0, 0),
        *[(0, 1), (1, 1), (2, 1), (3, 1)],
        *[(3, 2), (4, 2), (5, 2), (6, 2)],
    ]
    differs = {f"{n}, {moment}": getattr(training, how)(n) for n, moment in enumerate(training.moments)}
    assert {where: lines for where, lines in differs.items() if lines} == {}
