"""Positions of batches, and streams that leave batches out, against a list of all batches in order."""

import random

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import Append, Callback, Learner, Read, on
from fluxcb._run.batch_stream import BatchStream
from fluxcb._run.pulling import pull_batches, return_batches
from fluxcb.callbacks import Checkpointer
from fluxcb.events import BackwardEnd, StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import assert_resumes_exactly


class Source:
    """Yields pairs of the number of the pass and the position in it, and knows its position if asked to."""

    def __init__(self, length, has_state):
        self.length, self.has_state, self.number = length, has_state, 0

    def set_epoch(self, epoch):
        self.number = epoch

    def __iter__(self):
        items = Items(self.number, self.length)
        return items if self.has_state else iter(list(items))


class Items:
    def __init__(self, number, length):
        self.number, self.length, self.at = number, length, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        return np.array([self.number, self.at - 1])

    def get_state(self):
        return {"at": self.at, "number": self.number}

    def set_state(self, state):
        self.at, self.number = state["at"], state["number"]


def new_stream(length, has_state, left_out):
    stream = BatchStream(Source(length, has_state), "data.training")
    stream.marks_positions = True
    stream.leave_out(left_out)
    return stream


@pytest.mark.parametrize("seed", range(60))
def test_stream_agrees_with_a_list(seed):
    rng = random.Random(seed)
    length, has_state, continues = rng.randint(2, 7), rng.random() < 0.5, rng.random() < 0.7
    everything = [(number, at) for number in range(1, 500) for at in range(length)]
    left_out = rng.sample([place for place in everything[:150] if place[1]], rng.choice([0, 10, 60]))
    rest = [place for place in everything if place not in left_out]
    stream = new_stream(length, has_state, left_out)
    done, epoch = 0, 1  # batches of `rest` that steps have used
    stream.begin_epoch(epoch, continues_stream=continues)
    for _ in range(25):
        # Two windows are pulled; the handlers of the first one run after the second one was pulled.
        windows = []
        for _ in range(rng.choice([1, 2])):
            first = stream.consumed
            windows.append((first, pull_batches(stream, rng.randint(1, 9), continues, seconds=1e9)))
        pulled = [tuple(batch.tolist()) for _, batches in windows for batch in batches]
        assert pulled == rest[done : done + len(pulled)]
        assert [stream.locate(first, at) for first, batches in windows for at in range(len(batches))] == pulled
        # A stop at some step returns the batches after it.
        used = rng.randint(0, len(pulled)) if rng.random() < 0.6 else len(pulled)
        unused = [batch for _, batches in windows for batch in batches][used:]
        return_batches(stream, unused)
        done += used
        position = stream.position()
        ends = not continues and not unused and (done == len(rest) or rest[done][0] > position["pass"])
        if not ends and rng.random() < 0.4:  # resume in another process
            stream = new_stream(length, has_state, ())
            stream.seek(position)
        if ends:
            stream.end_epoch(continues_stream=False)
            epoch += 1
            stream.begin_epoch(epoch, continues_stream=False)


def test_expected_length_of_an_epoch_lacks_the_batches_left_out():
    stream = BatchStream([np.zeros(1)] * 5, "data.training")
    stream.leave_out([(1, 0), (1, 3), (2, 4)])
    lengths = []
    for epoch in (1, 2, 3):
        stream.begin_epoch(epoch, continues_stream=False)
        lengths.append(stream.batches)
        assert len(pull_batches(stream, 10, False, seconds=1e9)) == lengths[-1]
        stream.end_epoch(continues_stream=False)
    assert lengths == [3, 4, 5]


class LeavesOut(Callback):
    """Leaves out batches that its constructor names, which any callback can do."""

    def __init__(self, *places):
        self.places = places

    def left_out_batches(self):
        return {"training": self.places}


class Places(Callback):
    def stateaccess(self):
        return {"step": {"data_position": Read(), "batch": Read()}, "cbstate": {"places": Append()}}

    def init(self, learner):
        if "places" not in learner.cbstate:
            learner.cbstate.places = []

    @on
    def add(self, event: StepEnd, phase: TrainingPhase, learner):
        place = learner.step.data_position
        learner.cbstate.places.append((place["pass"], place["batch"], float(learner.step.batch)))


class StopsWindows(Callback):
    """Ends a window at every third batch, so that the next batches return to the stream."""

    def stateaccess(self):
        return {"step": {"batch": Read(), "stop": Append()}}

    @on
    def stop(self, event: BackwardEnd, phase: TrainingPhase, learner):
        learner.step.stop = learner.step.batch % 3 == 0


def make(folder, **options):
    left_out = LeavesOut((1, 1), (1, 2), (2, 0), (2, 6), (3, 3))
    return Learner.from_loss(
        {"w": jnp.float32(1)},
        lambda params, batch, key: params["w"] * batch,
        optax.sgd(2.0**-8),
        data=[jnp.float32(value) for value in range(7)],
        callbacks=[left_out, Places(), StopsWindows(), Checkpointer(folder, steps=3, keep_last=99)],
        default_callbacks=False,
        **options,
    )


EXPECTED = [
    (number, at, float(at))
    for number in (1, 2, 3)
    for at in range(7)
    if (number, at) not in {(1, 1), (1, 2), (2, 0), (2, 6), (3, 3)}
]


@pytest.mark.parametrize("steps_per_call", [1, pytest.param(5, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "length", [{"epochs": 3}, pytest.param({"steps": 16, "steps_per_epoch": 6}, marks=pytest.mark.long)]
)
def test_fit_leaves_out_batches(tmp_path, steps_per_call, length):
    learner = make(tmp_path, steps_per_call=steps_per_call)
    learner.fit(**length)
    assert learner.cbstate["places"] == EXPECTED
    weight = 1 - 2.0**-8 * sum(value for *_, value in EXPECTED)
    np.testing.assert_allclose(learner.params["w"], weight, rtol=1e-6)
    if "epochs" in length:
        assert (learner.step, learner.epoch) == (16, 3)


@pytest.mark.long
@pytest.mark.parametrize("steps_per_call", [1, 5])
def test_fit_that_leaves_out_batches_resumes_exactly(steps_per_call):
    assert_resumes_exactly(lambda run: make(run, steps_per_call=steps_per_call), epochs=3)
