"""PauseFitting: a handler ends a fit between two steps, and a resumed fit continues from there."""

import signal
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import pytest

import fluxcb
from fluxcb import AccessError, Append, Callback, PauseFitting, ThreadExecutor, on
from fluxcb._tools.resume_proof import state_of
from fluxcb.callbacks import Checkpointer, CustomCallback, Metrics, StopAfter
from fluxcb.events import HostEvent, StepEnd
from fluxcb.phases import Phase, TrainingPhase
from fluxcb.testing import EventLog
from tests.changed_callbacks import changes_arguments


class Pauses(Callback):
    """Pause at one moment: the name of an event and a phase, and the step."""

    def __init__(self, *at: Any) -> None:
        self.at = at

    def stateaccess(self) -> dict[str, Any]:
        return {"control": Append()}

    @on(HostEvent, Phase)
    def look(self, event, phase, learner):
        if (type(event).__name__, type(phase).name, learner.progress.step) == self.at:
            raise PauseFitting("the queue's time is over")


class Late(Callback):
    """Count the training steps; it runs after `Pauses`."""

    def __init__(self) -> None:
        self.seen = 0

    def runafter(self) -> tuple[type[Callback], ...]:
        return (Pauses,)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]

    @on(StepEnd, TrainingPhase)
    def count(self, event, phase, learner):
        self.seen += 1


def made(folder: Path, *callbacks: Callback, **options: Any) -> fluxcb.Learner:
    return fluxcb.Learner.from_loss(
        {"w": jnp.ones(())},
        lambda params, batch, key: jnp.mean((params["w"] - batch) ** 2),
        optax.adam(0.1),
        data=([jnp.full(2, float(i)) for i in range(4)], [jnp.zeros(1), jnp.ones(1)]),
        callbacks=[*callbacks, Metrics(), Checkpointer(folder)],
        default_callbacks=False,
        **options,
    )


MOMENTS = [
    ("StepEnd", "training", 2),
    ("StepEnd", "training", 8),
    ("StepBegin", "training", 5),
    ("StepEnd", "validation", 4),
    ("EpochEnd", "training", 4),
    ("EpochBegin", "training", 4),
    ("Trigger", "training", 8),
    ("FitBegin", "training", 0),
]


OPTIONS = {"one": {}, "windows": {"steps_per_call": 3}, "threads": {"executor": ThreadExecutor(2)}}


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> dict[str, str]:
    """Return the final state of the uninterrupted run, as text."""
    states = {}
    for name, options in OPTIONS.items():
        learner = made(tmp_path_factory.mktemp(name), Pauses(), Late(), **options)
        learner.fit(3)
        states[name] = repr(state_of(learner, ("Checkpointer",)))
    return states


@pytest.mark.parametrize(
    ("at", "name"),
    [*((at, "one") for at in MOMENTS), *((MOMENTS[i], name) for name in ("windows", "threads") for i in (0, 3, 6))],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value)),
)
@changes_arguments("callbacks.Pauses.at")
def test_paused_run_matches_uninterrupted_run(tmp_path, straight, at, name):
    options = OPTIONS[name]
    paused = made(tmp_path / "paused", Pauses(*at), Late(), **options)
    paused.fit(3)
    assert paused.stop_reason == "the queue's time is over"
    assert paused.step <= 8
    resumed = made(tmp_path / "paused", Pauses(), Late(), **options)
    resumed.fit(3, resume=True)
    assert resumed.stop_reason is None
    assert resumed.callbacks.get(Late).seen == 12
    assert repr(state_of(resumed, ("Checkpointer",))) == straight[name]


@changes_arguments("callbacks.Pauses.at")
def test_interrupted_validation_has_no_value_until_a_resumed_fit_completes_it(tmp_path):
    paused = made(tmp_path, Pauses("StepEnd", "validation", 4))
    history = paused.fit(3)
    assert [epoch for epoch, _ in paused.cbstate["metrics_epoch"]["training"]["loss"]] == [1]
    assert "validation/loss" not in history
    resumed = made(tmp_path, Pauses())
    resumed.fit(1, resume=True)
    ((epoch, loss),) = resumed.cbstate["metrics_epoch"]["validation"]["loss"]
    w = float(resumed.params["w"])
    assert (epoch, loss) == (1, pytest.approx((w**2 + (w - 1) ** 2) / 2))


def test_interrupted_training_epoch_keeps_the_mean_over_its_steps(tmp_path):
    paused = made(tmp_path, Pauses("StepEnd", "training", 2))
    history = paused.fit(3)
    steps = history.per_step["training"]["loss"]
    assert history["training/loss"] == [pytest.approx(sum(loss for _, loss in steps) / 2)]


def test_pause_still_emits_closing_events(tmp_path):
    log = EventLog()
    made(tmp_path, Pauses("StepEnd", "training", 2), log).fit(3)
    assert log.names() == [
        *("FitBegin", "EpochBegin", "StepBegin", "StepEnd", "StepBegin", "StepEnd"),
        *("FitStopping", "EpochEnd", "FitEnd"),
    ]


def test_pause_at_step_requires_control(tmp_path):
    asks = CustomCallback(lambda learner: (_ for _ in ()).throw(PauseFitting()), StepEnd, name="asks")
    with pytest.raises(AccessError, match="raises a Cancel at StepEnd without declaring `control`"):
        made(tmp_path, asks).fit(1)


def test_run_epoch_raises_pause_fitting(tmp_path):
    learner = made(tmp_path, Pauses("StepEnd", "training", 2))
    with pytest.raises(PauseFitting, match=r"^the queue's time is over$"):
        learner.run_epoch(TrainingPhase())
    assert learner.step == 2


def test_sigterm_together_with_pause_sets_stop_reason(tmp_path):
    class Sends(Callback):
        @on(StepEnd, TrainingPhase)
        def send(self, event, phase, learner):
            if learner.progress.step == 2:
                signal.raise_signal(signal.SIGTERM)

    learner = made(tmp_path, fluxcb.in_order(Pauses("StepEnd", "training", 2), Sends()))
    with pytest.warns(RuntimeWarning, match="SIGTERM ended the fit"):
        learner.fit(3)
    assert (learner.stop_reason, learner.step) == ("preempted", 2)


@changes_arguments("callbacks.StopAfter")
def test_run_ended_by_stop_after_resumes(tmp_path):
    learner = made(tmp_path, StopAfter(0.05))
    learner.fit(100_000)
    assert learner.stop_reason is not None
    assert learner.stop_reason.startswith("the fit has taken")
    again = made(tmp_path, StopAfter(1e6))
    again.fit(learner.epoch + 1, resume=True)
    assert (again.step, again.stop_reason) == (4 * (learner.epoch + 1), None)
