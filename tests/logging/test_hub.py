import copy
import json
import pickle
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from fluxcb import AccessError, DeclarationError, MissingStateError
from fluxcb._run.encoding import Decoder, Encoder
from fluxcb._run.views import read_only
from fluxcb.logging import Audio, File, Graph, Histogram, Image, Loggable, MonitorHub, Text, Value


@dataclass(frozen=True)
class Figure(Loggable):
    data: str


class Clock:
    def __init__(self):
        self.now = (0, 0)

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def hub(clock):
    hub = MonitorHub()
    hub.follow(clock)
    return hub


def test_what_is_put_is_found(hub, clock):
    hub.put_scalar("loss", jnp.float32(0.5))
    clock.now = (3, 1)
    hub.put_scalar("loss", 0.25)
    hub.put_scalar("loss", np.float64(0.125))
    hub.put_text("note", "warm")
    assert hub.latest("loss") == 0.125
    assert hub.latest("note") == Text("warm")
    assert hub.history("loss") == [(0, 0.5), (3, 0.25), (3, 0.125)]
    assert (hub.names(), list(hub), len(hub)) == (["loss", "note"], ["loss", "note"], 2)
    assert "loss" in hub
    assert "los" not in hub


def test_what_is_taken_is_what_was_put_since(hub, clock, monkeypatch):
    monkeypatch.setattr("fluxcb.logging.hub.time.time", lambda: 9.0)
    hub.put_scalar("a", 1)
    assert hub.take() == [("a", Value(1.0), 0, 0, 9.0)]
    assert hub.take() == []
    clock.now = (4, 2)
    hub.put_scalar("a", 2)
    clock.now = (5, 2)
    hub.put_scalar("a", 3)
    assert hub.take(whole_steps=True) == [("a", Value(2.0), 4, 2, 9.0)]
    assert hub.take(whole_steps=True) == []
    assert hub.take() == [("a", Value(3.0), 5, 2, 9.0)]


def test_other_kinds_are_made_and_kept(hub):
    hub.put_image("digit", np.zeros((2, 2)))
    hub.put_histogram("weights", np.arange(4), bins=2)
    assert isinstance(hub.latest("digit"), Image)
    found = hub.latest("weights")
    assert isinstance(found, Histogram)
    assert found.counts.tolist() == [2, 2]
    assert [put.name for put in hub.take()] == ["digit", "weights"]


def test_a_history_is_the_callers_own(hub):
    hub.put_scalar("a", 1)
    hub.history("a").clear()
    hub.names().clear()
    assert hub.history("a") == [(0, 1.0)]
    assert hub.names() == ["a"]


@pytest.mark.parametrize("ask", [MonitorHub.latest, MonitorHub.history])
def test_an_unknown_name_is_an_error_and_leaves_no_trace(hub, ask):
    hub.put_scalar("validation/accuracy", 0.5)
    with pytest.raises(MissingStateError) as error:
        ask(hub, "validation/acuracy")
    assert str(error.value) == (
        "No value has been logged as `validation/acuracy` yet. Did you mean `validation/accuracy`?\n"
        "  why:   logged so far: `validation/accuracy`\n"
        '  fix:   check first: `if "validation/acuracy" in learner.cbstate.monitors`'
    )
    assert hub.names() == ["validation/accuracy"]


def test_only_numbers_have_a_history(hub):
    hub.put_text("note", "warm")
    with pytest.raises(DeclarationError, match=r"^`note` is a Text; only numbers have a history\."):
        hub.history("note")


def test_a_history_is_bounded(clock):
    hub = MonitorHub(limit=10)
    hub.follow(clock)
    for step in range(1, 101):
        clock.now = (step, 1)
        hub.put_scalar("a", step)
        kept = hub.history("a")
        assert kept == [(s, float(s)) for s in range(step - len(kept) + 1, step + 1)]
        assert min(step, 10) <= len(kept) < 20
    with pytest.raises(DeclarationError, match=r"must be a whole number of at least 1, not 0\."):
        MonitorHub(limit=0)


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (
            lambda hub: hub.put_scalar("loss", np.ones(3)),
            "A value to log must be one number, not an array of shape (3,).\n"
            "  where: put as `loss`\n"
            "  fix:   reduce it, e.g. with `.mean()`, or log it with `put_histogram`",
        ),
        (
            lambda hub: hub.put_text("note", 3),
            "`Text` takes a str, not int 3.\n  where: put as `note`\n  fix:   write `str(...)` of it",
        ),
        (
            lambda hub: hub.put("loss", 0.5),
            "`put` takes a Value, Text, Image or another loggable, not float 0.5.\n"
            "  where: put as `loss`\n"
            "  fix:   for numbers, `put_scalar(name, value)`",
        ),
        (
            lambda hub: hub.put_text("old", "x"),
            "`old` is a Value so far, and a Text now.\n"
            "  why:   backends store values of only one kind under a name\n"
            "  fix:   use another name",
        ),
        (
            lambda hub: hub.put_scalar("step", 1),
            "No value can be logged as `step`.\n"
            "  why:   `step`, `epoch`, `time` are recorded with every value\n"
            '  fix:   use another name, e.g. "train/step"',
        ),
        (
            lambda hub: hub.put_scalar("a\nb", 1),
            "The name of a logged value must be a printable str, not 'a\\nb'.\n  fix:   write e.g. "
            '"validation/accuracy"',
        ),
        (
            lambda hub: hub.put_scalar(3, 1),
            'The name of a logged value must be a printable str, not 3.\n  fix:   write e.g. "validation/accuracy"',
        ),
        (
            lambda hub: hub.put_scalar(" ", 1),
            "The name of a logged value must be a printable str, not ' '.\n  fix:   write e.g. \"validation/accuracy\"",
        ),
    ],
)
def test_what_cannot_be_put_leaves_no_trace(hub, put, message):
    hub.put_scalar("old", 1)
    hub.take()
    with pytest.raises(DeclarationError) as error:
        put(hub)
    assert str(error.value) == message
    assert hub.names() == ["old"]
    assert hub.take() == []


def test_what_was_put_later_is_forgotten(hub, clock):
    for step in (1, 2, 3):
        clock.now = (step, 1)
        hub.put_scalar("a", step)
    hub.put_scalar("late", 1)
    hub.put_text("note", "x")
    hub.cut(2)
    assert hub.history("a") == [(1, 1.0), (2, 2.0)]
    assert hub.latest("a") == 2.0
    assert hub.names() == ["a", "note"]


def test_saved_and_loaded_it_is_the_same(hub, clock):
    clock.now = (3, 1)
    hub.put_scalar("a", float("nan"))
    hub.put_scalar("a", 2)
    hub.put_text("note", "x")
    saved, waiting = hub.state_dict(), hub.pending_state()
    other = MonitorHub()
    other.put_scalar("gone", 1)
    other.load_state_dict(saved)
    assert other.names() == ["a", "note"]
    assert repr(other.history("a")) == "[(3, nan), (3, 2.0)]"
    assert (other.latest("a"), other.latest("note")) == (2.0, Text("x"))
    assert other.take() == []
    assert other == hub
    other.load_pending(waiting)
    assert repr(other.take()) == repr(hub.take())  # NaN is not equal to itself


def test_all_kinds_of_things_are_saved_but_those_of_others(hub, tmp_path):
    """A checkpoint names no class that would have to be imported."""
    (tmp_path / "model.txt").write_text("x")
    things = {
        "graph": Graph("digraph {}"),
        "image": Image(np.array([[0, 255]], np.uint8)),
        "sound": Audio(np.array([0.5, -0.5]), 8000),
        "histogram": Histogram.of(np.array([0.0, 1.0, 1.0]), 2),
        "file": File(tmp_path / "model.txt"),
        "figure": Figure("drawn"),
    }
    for name, thing in things.items():
        hub.put(name, thing)
    encoder = Encoder()
    written = json.dumps(encoder.encode([hub.state_dict(), hub.pending_state()], "the hub"))
    other = MonitorHub()

    def read():
        saved = Decoder(encoder.arrays).decode(json.loads(written), None, "the hub")
        other.load_state_dict(saved[0])
        other.load_pending(saved[1])
        return [put.name for put in other.take()]

    assert read() == other.names() == ["graph", "image", "sound", "histogram", "file"]
    assert other.latest("image").data.tolist() == [[[[0], [255]]]]
    assert (other.latest("sound").data.tolist(), other.latest("sound").rate) == ([[0.5], [-0.5]], 8000)
    found = other.latest("histogram")
    assert (found.counts.tolist(), found.edges.tolist()) == ([1.0, 2.0], [0.0, 0.5, 1.0])
    assert (other.latest("graph"), other.latest("file")) == (things["graph"], things["file"])
    (tmp_path / "model.txt").unlink()
    assert read() == other.names() == ["graph", "image", "sound", "histogram"]


def test_copies_belong_to_no_run(hub, clock):
    clock.now = (3, 1)
    hub.put_scalar("a", 1)
    for other in (copy.deepcopy(hub), pickle.loads(pickle.dumps(hub))):
        assert other == hub
        other.put_scalar("a", 2)
        assert other.history("a") == [(3, 1.0), (0, 2.0)]
    assert hub.history("a") == [(3, 1.0)]
    with pytest.raises(TypeError):
        hash(hub)


def test_who_may_only_read_can_look_up_and_cannot_put(hub):
    hub.put_scalar("a", 1)
    view = read_only(hub, lambda: AccessError("no"))
    assert (view.latest("a"), view.history("a"), view.names(), "a" in view) == (1.0, [(0, 1.0)], ["a"], True)
    for put in (
        lambda: view.put_scalar("a", 2),
        lambda: view.put_text("b", "x"),
        view.take,
        lambda: view.load_state_dict({}),
    ):
        with pytest.raises(AccessError):
            put()
    assert hub.history("a") == [(0, 1.0)]
    assert len(hub.take()) == 1
