"""Values that a checkpoint cannot hold (cycles, deep nesting, huge integers) raise an error when they are saved."""

import numpy as np
import pytest

from fluxcb import Callback, DeclarationError
from fluxcb.callbacks import Checkpointer
from fluxcb.testing import testlearner
from tests.changed_callbacks import changes_arguments


class Keeps(Callback):
    """A callback with this state."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Part:
    """An object with its own state, which contains the object."""

    def state_dict(self):
        return {"part": self}

    def load_state_dict(self, state):
        pass


class Source:
    """A source of four batches whose iterator returns the given position."""

    def __init__(self, position):
        self.position = position

    def __iter__(self):
        return Batches(self.position)


class Batches:
    def __init__(self, position):
        self.position, self.left = position, 4

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        self.left -= 1
        return np.ones((8, 1), np.float32), np.ones((8, 1), np.float32)

    def get_state(self):
        return self.position

    def set_state(self, state):
        pass


def dict_with_itself():
    state = {"a": {}}
    state["a"]["back"] = state
    return state


def list_with_itself():
    state = [0]
    state.append(state)
    return {"a": state}


def nested(levels):
    state = {}
    for _ in range(levels - 1):
        state = {"a": state}
    return state


CYCLE = (
    "{} is a {} that contains itself, so a checkpoint cannot hold it.\n"
    "  why:   a checkpoint stores these values as JSON, which has no references\n"
    "  fix:   store a name or an index instead of the reference"
)
DEEP = (
    "{} has more than 100 levels of nested containers, so a checkpoint cannot hold it.\n"
    "  why:   a checkpoint stores these values as JSON, which is read recursively\n"
    "  fix:   store a flat list, e.g. one of `(parent, value)` pairs"
)
HUGE = (
    "{} is an int of 14001 bits, and a checkpoint holds ints of at most 14000 bits.\n"
    "  why:   a checkpoint stores ints as decimal text, and Python limits the length of such text\n"
    '  fix:   store the bytes: `value.to_bytes((value.bit_length() + 8) // 8, "big", signed=True)`'
)


@pytest.mark.parametrize(
    ("make", "template", "place"),
    [
        (dict_with_itself, CYCLE, ("['a']['back']", "dict")),
        (list_with_itself, CYCLE, ("['a'][1]", "list")),
        (lambda: {"a": Part()}, CYCLE, ("['a']['part']", "Part")),
        (lambda: nested(101), DEEP, ("",)),
        (lambda: nested(10_000), DEEP, ("",)),
        (lambda: {"a": 2**14_000}, HUGE, ("['a']",)),
    ],
    ids=["dict", "list", "object", "deep", "very deep", "huge"],
)
class TestRefused:
    def test_unsavable_callback_state_raises(self, make, template, place, refused, tmp_path):
        learner = testlearner(Keeps(make()), Checkpointer(tmp_path / "run"))
        with refused(DeclarationError, template.format(f"The state of Keeps(){place[0]}", *place[1:])):
            learner.fit(1)

    def test_unsavable_data_position_raises(self, make, template, place, refused, tmp_path):
        learner = testlearner(Checkpointer(tmp_path / "run"), data=(Source(make()), None))
        of = "The position of `data.training`" + ("['state']" if place[0] else "") + place[0]
        with refused(DeclarationError, template.format(of, *place[1:])):
            learner.fit(1)


@pytest.mark.parametrize(
    "state", [nested(100), {"a": 2**14_000 - 1}, {"a": 1 - 2**14_000}], ids=["deep", "huge", "low"]
)
@changes_arguments("callbacks.Keeps.state")
def test_largest_savable_values_are_restored(state, tmp_path):
    testlearner(Keeps(state), Checkpointer(tmp_path / "run")).fit(1)
    restored = Keeps(None)
    testlearner(restored, Checkpointer(tmp_path / "run")).restore(tmp_path / "run")
    assert restored.state == state


@changes_arguments("callbacks.Keeps.state")
def test_shared_value_is_not_cycle(tmp_path):
    shared = [1, 2]
    testlearner(Keeps({"a": shared, "b": [shared, shared]}), Checkpointer(tmp_path / "run")).fit(1)
    restored = Keeps(None)
    testlearner(restored, Checkpointer(tmp_path / "run")).restore(tmp_path / "run")
    assert restored.state == {"a": [1, 2], "b": [[1, 2], [1, 2]]}


@pytest.mark.parametrize("value", [2**14_000, -(2**14_000)])
@changes_arguments("callbacks.Keeps.state")
def test_fix_for_huge_integer_works(value, tmp_path):
    state = {"a": value.to_bytes((value.bit_length() + 8) // 8, "big", signed=True)}
    testlearner(Keeps(state), Checkpointer(tmp_path / "run")).fit(1)
    restored = Keeps(None)
    testlearner(restored, Checkpointer(tmp_path / "run")).restore(tmp_path / "run")
    assert int.from_bytes(restored.state["a"], "big", signed=True) == value
