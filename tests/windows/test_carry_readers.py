"""Readers of the carry at StepEnd see the state of their own step, and later steps see writes."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Callback, EveryEpochs, EverySteps, Read, Write, every, in_order, on, when
from fluxcb.callbacks import LearningRate, Scheduler
from fluxcb.events import StepBegin, StepEnd, Trigger, UpdateEnd
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase

# float32 numbers: fetched for each step; fetched where a reader is due at each; copied; waited for.
SIZES = {"tiny": 4, "small": 1000, "middling": 5000, "large": 20_000}
EPOCH = 19


class Counts(Callback):
    """Add one to each number of `cbstate.held` in each step."""

    def __init__(self, size):
        self.size = size

    def stateaccess(self):
        return {"cbstate": {"held": Write()}}

    def init(self, learner):
        if "held" not in learner.cbstate:
            learner.cbstate.held = jnp.zeros(self.size)

    @on
    def count(self, event: UpdateEnd, phase: TrainingPhase, learner):
        learner.cbstate.held = learner.cbstate.held + 1


def counting(size, *callbacks, length, epoch=EPOCH):
    """Return a Learner whose parameters are minus the number of steps if every learning rate is 1."""
    return fluxcb.Learner.from_loss(
        {"w": jnp.zeros(size)},
        lambda params, batch, key: jnp.mean(batch) * jnp.sum(params["w"]),
        fluxcb.inject(optax.sgd, learning_rate=1.0),
        data=[np.ones((2, 1), np.float32)] * epoch,
        callbacks=[Counts(size), *callbacks],
        default_callbacks=False,
        steps_per_call=length,
    )


SCHEDULES = {
    "always": (None, range(1, 2 * EPOCH + 1)),
    "every third": (EverySteps(3), range(3, 2 * EPOCH + 1, 3)),
    "second epoch": (EveryEpochs(2), range(EPOCH + 1, 2 * EPOCH + 1)),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("size", SIZES)
def test_each_reader_sees_its_own_step(size, name, same, tell, keep, bits):
    schedule, due = SCHEDULES[name]
    size = SIZES[size]

    def run(length):
        kept = keep("params", "cbstate.held", when=schedule)
        part = keep("params.w", when=schedule)
        learner = counting(size, kept, part, length=length)
        learner.fit(2)
        ones = np.ones(size, np.float32)
        assert kept.values(0) == [(n, bits({"w": -n * ones})) for n in due]
        assert kept.values(1) == [(n, bits(n * ones)) for n in due]
        assert part.values() == [(n, bits(-n * ones)) for n in due]
        return tell(learner, kept)

    # What is too large to be fetched for each step, or to be copied, ends windows wherever it is read.
    always = name == "always" and size > 1024
    same(run, (7, "auto"), windows_used=not always)


def test_readers_with_different_sizes_and_schedules(same, tell, keep, bits):
    def run(length):
        kept = {n: keep("params", when=EverySteps(n) if n > 1 else None) for n in (1, 4, 5)}
        kept["whole"] = keep("cbstate.held", "hyperparams.learning_rate", when=EverySteps(6))
        kept["end"] = keep("params", "cbstate.held", event=Trigger)
        learner = counting(
            100, *kept.values(), Scheduler({LearningRate: lambda step: 2.0 ** -(step % 3)}), length=length
        )
        learner.fit(2)
        rates = np.array([2.0 ** -(n % 3) for n in range(2 * EPOCH)], np.float32)
        params = [bits({"w": np.full(100, -rates[: n + 1].sum(), np.float32)}) for n in range(2 * EPOCH)]
        for n in (1, 4, 5):
            assert kept[n].values() == [(s, params[s - 1]) for s in range(n, 2 * EPOCH + 1, n)]
        assert kept["whole"].values(1) == [(s, bits(rates[s - 1])) for s in range(6, 2 * EPOCH + 1, 6)]
        assert kept["end"].values() == [(s, params[s - 1]) for s in (EPOCH, 2 * EPOCH)]
        assert kept["end"].values(1) == [(s, bits(np.full(100, s, np.float32))) for s in (EPOCH, 2 * EPOCH)]
        return tell(learner, *kept.values())

    same(run)


class Writes(Callback):
    """Replace the parameters with ten times the number of steps at one event."""

    def __init__(self, event, schedule):
        @on(event, TrainingPhase, when=schedule)
        def write(self, event, phase, learner):
            learner.params = {"w": jnp.full(self.size, 10.0 * learner.progress.step)}

        self.__class__ = type("Writes", (Writes,), {"write": write})
        self.size = 0

    def stateaccess(self):
        return {"params": Write()}


@pytest.mark.filterwarnings("ignore:`in_order` has no effect")  # at events that the readers do not handle
@pytest.mark.parametrize("event", [StepBegin, StepEnd, Trigger])
@pytest.mark.parametrize("period", [1, 3, 8])
@pytest.mark.parametrize("size", ["tiny", "large"])
def test_writes_are_visible_to_later_readers_and_steps(event, period, size, same, tell, keep, bits):
    size = SIZES[size]

    def run(length):
        writes = Writes(event, EverySteps(period))
        writes.size = size
        before, after = keep("params"), keep("params")
        learner = counting(size, in_order(before, writes, after), length=length)
        learner.fit(2)
        value, seen = 0.0, []
        for step in range(1, 2 * EPOCH + 1):
            due = step % period == 0
            value = 10.0 * (step - 1) if event is StepBegin and due else value
            value -= 1
            written = 10.0 * step if event is not StepBegin and due else value
            seen.append((value, written if event is StepEnd else value))
            value = written
        ones = np.ones(size, np.float32)
        assert [v for _, v in before.values()] == [bits({"w": b * ones}) for b, _ in seen]
        assert [v for _, v in after.values()] == [bits({"w": a * ones}) for _, a in seen]
        np.testing.assert_array_equal(learner.params["w"], value * ones)
        return tell(learner, before, after)

    same(run, (7, "auto"), windows_used=period > 1 and size < 1000)


class Halves(Callback):
    def stateaccess(self):
        return {"hyperparams": {"learning_rate": Write()}}

    @on
    def halve(self, event: StepEnd, phase: TrainingPhase, learner):
        learner.hyperparams.learning_rate = learner.hyperparams.learning_rate / 2


@pytest.mark.parametrize(
    ("wrap", "due"),
    [
        (lambda cb: every(cb, steps=4), lambda n: n % 4 == 0),
        (lambda cb: when(cb, lambda learner: learner.progress.step_in_epoch == 7), lambda n: n % EPOCH == 7),
        (lambda cb: every(every(cb, steps=5), epochs=2), lambda n: n > EPOCH and n % 5 == 0),
    ],
    ids=["steps", "predicate", "both"],
)
def test_hyperparameter_changes_after_its_step(wrap, due, same, tell, keep, bits):
    def run(length):
        before, after = (keep("hyperparams.learning_rate", "params", phase=AbstractTrainingPhase) for _ in range(2))
        learner = counting(3, in_order(before, wrap(Halves()), after), length=length)
        learner.fit(2)
        rate, w, rates, params = np.float32(1), np.float32(0), [], []
        for n in range(1, 2 * EPOCH + 1):
            w -= rate
            changed = rate / 2 if due(n) else rate
            rates.append((rate, changed))
            params.append(bits({"w": np.full(3, w, np.float32)}))
            rate = np.float32(changed)
        for callback, which in ((before, 0), (after, 1)):
            assert [v for _, v in callback.values()] == [bits(np.float32(r[which])) for r in rates]
            assert [v for _, v in callback.values(1)] == params
        return tell(learner, before, after)

    same(run, (7, "auto"), windows_used=wrap(Halves()).schedule.__class__ is not fluxcb.Predicate)


class Keys(Callback):
    """Keep the random key of the host, and the random numbers of a traced handler."""

    def __init__(self):
        self.seen = []

    def stateaccess(self):
        return {"step": {"drawn": Write()}}

    @on
    def draw(self, event: UpdateEnd, phase: TrainingPhase, learner):
        import jax

        learner.step.drawn = jax.random.normal(learner.key, (2,))

    @on(StepEnd, TrainingPhase, access={"step": {"drawn": Read()}})
    def keep(self, event, phase, learner):
        self.seen.append((learner.progress.step, learner.step.drawn, learner.key))


def test_random_keys_match_their_step(same, tell):
    def run(length):
        keys = Keys()
        learner = counting(3, keys, length=length)
        learner.fit(2)
        assert len({key.tobytes() for _, key, _ in keys.seen}) == 2 * EPOCH
        return tell(learner, keys)

    same(run)
