"""Data on the device gives the same training as data from the host, with windows of every length."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import CancelEpoch, EverySteps
from fluxcb.callbacks import Metrics, Recorder
from fluxcb.data import ArrayLoader
from fluxcb.phases import AbstractTrainingPhase
from fluxcb.testing import EventLog, testlearner


def arrays(kind, count):
    rng = np.random.default_rng(0)
    xs, ys = rng.normal(size=(2, count, 3)).astype(np.float32)
    return {
        "pair": (xs, ys),
        "dict": {"b": xs, "a": {"n": rng.integers(0, 9, count).astype(np.int32), "flag": ys > 0}},
        "bfloat16": [xs.astype(jnp.bfloat16), ys.astype(np.float16)],
        "images": rng.integers(0, 255, (count, 4, 4, 1)).astype(np.uint8),
    }[kind]


def total(params, batch, key):
    import jax

    values = [jnp.mean(jnp.tanh(0.1 * leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(batch)]
    return jnp.sum((jnp.stack(values) - params["w"][: len(values)]) ** 2)


FITS = {
    "epochs": [{"epochs": 3}],
    "steps": [{"steps": 15}, {"steps": 8}, {"epochs": 1}],
    "stream": [{"epochs": 3, "steps_per_epoch": 9}],
}


@pytest.mark.parametrize(
    ("kind", "count", "fits", "options"),
    [
        ("pair", 84, "epochs", {}),
        ("pair", 80, "steps", {"seed": 3}),
        ("pair", 83, "stream", {"drop_last": True}),
        ("pair", 83, "steps", {"shuffle": False}),
        ("dict", 83, "epochs", {}),
        ("bfloat16", 80, "stream", {}),
        ("images", 41, "epochs", {}),
    ],
)
def test_resident_data_gives_same_training(kind, count, fits, options, same, tell, keep):
    def run(length, resident):
        kept = keep("step.loss", "step.batch", "params", phase=AbstractTrainingPhase)
        callbacks = [kept, EventLog(), Recorder(), Metrics()]
        learner = fluxcb.Learner.from_loss(
            {"w": jnp.ones(3)},
            total,
            fluxcb.inject(optax.adam, learning_rate=0.1),
            data=(ArrayLoader(arrays(kind, count), 8, device=resident, **options), None),
            callbacks=callbacks,
            default_callbacks=False,
            steps_per_call=length,
        )
        for fit in FITS[fits]:
            learner.fit(**fit)
        return tell(learner, *callbacks)

    given = same(lambda length: run(length, resident=False), ())
    assert same(lambda length: run(length, resident=True), (2, 7, "auto")) == given


def test_epochs_without_step_handlers_are_one_window(windows, bits):
    """Without handlers between the steps, windows end only with the epoch."""
    data = arrays("pair", 1600)
    states = []
    for resident in (True, False):
        learner = testlearner(data=(ArrayLoader(data, 8, device=resident), None))
        learner.fit(3)
        states.append(bits(learner.state))
    assert states[0] == states[1]
    assert max(windows) == (200, 200)


def test_handlers_of_resident_data_see_their_batches(same, tell, keep):
    """Handlers run at every ninth step. The rows of other steps are never gathered on the host."""

    def run(length):
        kept = keep("step.batch", "step.grads", phase=AbstractTrainingPhase, when=EverySteps(9))
        data = arrays("pair", 330)
        learner = testlearner(kept, data=(ArrayLoader(data, 8, device=True), None), steps_per_call=length)
        learner.fit(2)
        order = [np.random.default_rng((0, epoch)).permutation(330) for epoch in (1, 2)]
        for step, (xs, ys) in [(entry[1], entry[5]) for entry in kept.seen]:
            epoch, at = divmod(step - 1, 42)
            chosen = order[epoch][8 * at : 8 * at + 8]
            assert (xs[2], ys[2]) == (data[0][chosen].tobytes(), data[1][chosen].tobytes())
        assert [entry[1] for entry in kept.seen] == list(range(9, 85, 9))
        return tell(learner, kept)

    same(run)


def test_stops_return_resident_data(same, tell, keep):
    from fluxcb import Append, Callback, on
    from fluxcb.events import BackwardEnd, StepEnd
    from fluxcb.phases import TrainingPhase

    class Stops(Callback):
        def stateaccess(self):
            return {"step": {"stop": Append()}, "control": Append()}

        @on(BackwardEnd, TrainingPhase, access={"step": {"stop": Append()}})
        def flag(self, event, phase, learner):
            learner.step.stop = (learner.progress.step % 5 == 3) | (learner.progress.step == 17)

        @on
        def end(self, event: StepEnd, phase: TrainingPhase, learner):
            if learner.step.stop and learner.progress.step == 18:
                raise CancelEpoch

    def run(length, resident=True):
        kept = keep("step.loss", "step.batch", phase=AbstractTrainingPhase)
        loader = ArrayLoader(arrays("pair", 100), 8, device=resident)
        learner = testlearner(Stops(), kept, data=(loader, None), steps_per_call=length)
        learner.fit(3, steps_per_epoch=11)
        return tell(learner, kept)

    given = same(lambda length: run(length, resident=False), ())
    assert same(run, (7, "auto")) == given
