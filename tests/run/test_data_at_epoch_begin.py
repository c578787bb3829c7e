"""A data source is iterated after EpochBegin, also if a batch was read before to find its shape."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import Callback, CancelEpoch, Learner, on
from fluxcb.callbacks import Metrics, ObjAttrParam, ScheduledHyperParamSetter
from fluxcb.data import map as mapped
from fluxcb.events import EpochBegin, EpochEnd
from fluxcb.phases import InTurn, LossTrainingPhase, LossValidationPhase, TrainingPhase, ValidationPhase


def batch(value):
    return np.full(2, value, np.float32)


def losses(data, *callbacks, epochs=3, phase="training", **options):
    """Return the mean of each epoch's batches, because the loss is the mean of a batch."""
    learner = Learner.from_loss(
        {"w": jnp.ones(())},
        lambda params, batch, key: jnp.mean(batch + 0 * params["w"]),
        optax.sgd(0.1),
        data=data,
        callbacks=[*callbacks, Metrics()],
        default_callbacks=False,
        **options,
    )
    return learner.fit(epochs)[f"{phase}/loss"]


class Collects(Callback):
    """Replace the batches at EpochBegin: in epoch n, n + 1 batches of n."""

    def __init__(self):
        self.epoch, self.batches = 0, [batch(0)] * 2

    @on
    def collect(self, event: EpochBegin, phase: TrainingPhase, learner):
        self.epoch += 1
        self.batches = [batch(self.epoch)] * (self.epoch + 1)

    def state_dict(self):
        return {}

    def __iter__(self):
        return iter(self.batches)

    def function(self):
        return self.batches


def closure(collects):
    return lambda: list(collects.batches)


def helper(collects):
    return collects.batches


SOURCES = {
    "object": lambda collects: collects,
    "method": lambda collects: collects.function,
    "function": closure,
    "partial": lambda collects: functools.partial(helper, collects),
    "map of an object": lambda collects: mapped(lambda batch: batch, collects),
    "map of a list": lambda collects: mapped(lambda batch: batch + np.float32(collects.epoch), [batch(0)] * 2),
}


@pytest.mark.parametrize("form", list(SOURCES))
def test_handler_of_epoch_begin_determines_batches_of_the_epoch(form):
    collects = Collects()
    assert losses(SOURCES[form](collects), collects) == [1, 2, 3]


def test_handler_of_epoch_begin_determines_batches_of_validation():
    class Counts(Callback):
        count = 0

        @on
        def add(self, event: EpochBegin, phase: ValidationPhase, learner):
            self.count += 1

        def state_dict(self):
            return {}

    counts = Counts()
    found = losses(([batch(0)], lambda: [batch(counts.count)]), counts, phase="validation")
    assert found == [1, 2, 3]


def test_setter_of_fluxcb_acts_on_the_first_epoch():
    class Noise:
        level = 0.0

    noise = Noise()
    setter = ScheduledHyperParamSetter(ObjAttrParam(noise, "level"), [(0, 1.0), (1, 2.0), (2, 3.0)])
    assert losses(mapped(lambda b: b + np.float32(noise.level), [batch(0)] * 3), setter) == [1, 2, 3]


def test_value_that_is_set_after_construction_acts_on_the_first_epoch():
    config = {"level": 0.0}
    learner = Learner.from_loss(
        {"w": jnp.ones(())},
        lambda params, batch, key: jnp.mean(batch + 0 * params["w"]),
        optax.sgd(0.1),
        data=lambda: [batch(config["level"])] * 3,
        callbacks=[Metrics()],
        default_callbacks=False,
    )
    config["level"] = 5.0
    assert learner.fit(1)["training/loss"] == [5]


def test_source_that_has_not_changed_is_started_once():
    started = []

    class Source:
        def __iter__(self):
            started.append(1)
            rng = np.random.default_rng(len(started))
            return iter([batch(rng.normal()) for _ in range(2)])

    expected = [np.mean([np.float32(rng.normal()) for _ in range(2)]) for rng in map(np.random.default_rng, (1, 2))]
    assert losses(Source(), epochs=2) == pytest.approx(expected, rel=1e-6)
    assert len(started) == 2  # not another time for the shape of a batch


def test_phases_in_turn_read_their_data_after_all_of_their_epochs_have_begun():
    class Second(LossTrainingPhase):
        name = "second"

    class Sets(Callback):
        def __init__(self):
            self.value = 0

        @on
        def set(self, event: EpochBegin, phase: Second, learner):
            self.value += 1

        def state_dict(self):
            return {}

    sets = Sets()
    turns = InTurn(LossTrainingPhase(), Second())
    data = {"training": lambda: [batch(sets.value)] * 2, "second": lambda: [batch(sets.value)] * 2}
    assert losses(data, sets, phases=(turns,)) == [1, 2, 3]


def test_epoch_that_is_cancelled_at_its_begin_reads_nothing():
    read = []

    def source():
        read.append(1)
        return [batch(1)] * 2

    class Cancels(Callback):
        @on
        def cancel(self, event: EpochBegin, phase: TrainingPhase, learner):
            if learner.progress.epoch == 2:
                raise CancelEpoch("not this one")

    assert len(losses(source, Cancels(), epochs=3)) == 2
    assert len(read) == 2  # in epochs 1 and 3


def test_length_of_the_epoch_is_that_of_the_new_batches():
    lengths = []

    class Shows(Callback):
        @on
        def show(self, event: EpochEnd, phase: TrainingPhase, learner):
            lengths.append(learner.progress.steps_in_epoch)

    class WithLength(Collects):
        def __len__(self):
            return len(self.batches)

    collects = WithLength()
    losses(collects, collects, Shows())
    assert lengths == [2, 3, 4]


def test_source_that_uses_the_learner_has_a_note():
    with pytest.raises(NameError, match="name 'later' is not defined") as raised:
        Learner.from_loss(
            {"w": jnp.ones(())},
            lambda params, batch, key: jnp.mean(batch + 0 * params["w"]),
            optax.sgd(0.1),
            data=([batch(0)], lambda: [batch(later.step)]),  # noqa: F821
            phases=(LossTrainingPhase(), LossValidationPhase()),
            default_callbacks=False,
        )
    assert raised.value.__notes__ == [
        "The first batch is read when the Learner is built, to find its shape. If the source uses the Learner, assign "
        "it afterwards: `learner.data = (training, validation)`."
    ]
