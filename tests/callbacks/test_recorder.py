import re

import numpy as np
import pytest

from fluxcb import AccessError, Append, Callback, CancelEpoch, DeclarationError, Read, on
from fluxcb.callbacks import ByPhase, CustomCallback, Metrics, PhaseHistory, Recorder
from fluxcb.callbacks.metrics.metric_values import EpochValues
from fluxcb.callbacks.metrics.recorder import leading_axis
from fluxcb.events import EpochEnd, StepEnd, Trigger
from fluxcb.phases import TrainingPhase, ValidationPhase
from fluxcb.testing import testlearner


class Watch(Callback):
    """Record the history at each training step."""

    def __init__(self):
        self.seen = []

    def stateaccess(self):
        return {"cbstate": {"history": Read()}}

    @on
    def look(self, event: StepEnd, phase: TrainingPhase, learner):
        h = learner.cbstate.history[phase]
        self.seen.append(
            (h.epochs, h.steps, h.steps_in_epoch, h.samples, learner.cbstate.history[ValidationPhase].steps)
        )


def test_each_step_sees_its_own_counts(build, make_batches):
    watch = Watch()
    learner = build([watch, Recorder()], data=(make_batches([4, 4, 2]), make_batches([5, 3])))
    learner.fit(2)
    assert watch.seen == [
        (0, 1, 1, 4, 0),
        (0, 2, 2, 8, 0),
        (0, 3, 3, 10, 0),
        (1, 4, 1, 14, 2),
        (1, 5, 2, 18, 2),
        (1, 6, 3, 20, 2),
    ]
    history = learner.cbstate["history"]
    assert history[TrainingPhase()] == history["training"] == PhaseHistory(2, 6, 3, 20)
    assert history[ValidationPhase] == PhaseHistory(2, 4, 2, 16)
    assert history["never"] == PhaseHistory() == PhaseHistory(0, 0, 0, 0)
    assert list(history) == ["training", "validation"]


def test_a_cancelled_epoch_counts(build):
    class Stop(Callback):
        def stateaccess(self):
            return {"control": Append()}

        @on
        def stop(self, event: StepEnd, phase: TrainingPhase, learner):
            if learner.progress.step_in_epoch == 2:
                raise CancelEpoch

    learner = build([Recorder(), Stop()])
    learner.fit(3)
    assert learner.cbstate["history"]["training"] == PhaseHistory(epochs=3, steps=6, steps_in_epoch=2, samples=24)


def test_the_history_is_read_only_for_readers(build):
    class Meddle(Watch):
        @on
        def look(self, event: StepEnd, phase: TrainingPhase, learner):
            learner.cbstate.history[phase].steps = 0

    with pytest.raises(AccessError, match=r"declares only to read `cbstate.history`, but writes to it"):
        build([Recorder(), Meddle()]).fit(1)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ((np.zeros((3, 2)), np.zeros(3)), 3),
        ([np.zeros((4, 2))], 4),
        (((np.zeros((5, 2)), np.zeros(1)), np.zeros(1)), 5),
        ({"x": np.zeros((6, 1)), "y": np.zeros(6)}, 6),
        ({"edges": np.zeros((9, 2)), "x": np.zeros((6, 1)), "y": np.zeros(6)}, 6),
        ({"edges": np.zeros((9, 2)), "x": np.zeros((6, 1)), "y": np.float32(1.0)}, 9),
        (np.zeros((7,)), 7),
        ((None, np.zeros(8)), 8),
        (np.float32(1.0), 1),
        ((), 0),
    ],
)
def test_samples_are_the_leading_axis(batch, samples):
    assert leading_axis(batch) == samples


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("trainin", "training"),
        ("validation/loss", 'cbstate.metrics_epoch["validation"]["loss"]'),
        ("train_loss", 'cbstate.metrics_epoch["training"]["loss"]'),
    ],
)
def test_name_that_is_almost_a_phase_is_an_error(name, meant):
    with pytest.raises(KeyError, match=re.escape(f"`{name}` has no entry yet. Did you mean `{meant}`?")):
        testlearner(Recorder()).cbstate["history"][name]
    kept = ByPhase(PhaseHistory)
    kept.entry(name).steps = 3  # an `InferenceRunner` may be called anything
    assert kept[name].steps == 3
    assert kept["on the test set"] == PhaseHistory()


def test_value_of_an_epoch_that_is_missing_is_an_error_that_names_the_others():
    values = EpochValues()
    values.add("loss", 1, 0.5)
    for read in (values.__getitem__, values.last):
        with pytest.raises(KeyError, match=r"`los` has no values yet. Did you mean `loss`\? Recorded so far: 'loss'."):
            read("los")
        with pytest.raises(KeyError, match=r"so far: 'loss'\. `Metrics\(function\)` records further metrics, such as"):
            read("f1")


def test_reading_by_phase_adds_no_entry_and_refuses_other_keys():
    kept = ByPhase(PhaseHistory)
    assert kept["training"] == PhaseHistory()
    assert len(kept) == 0
    kept.entry(TrainingPhase).steps = 3
    assert kept["training"].steps == 3
    assert TrainingPhase() in kept
    assert ValidationPhase not in kept
    with pytest.raises(DeclarationError) as error:
        kept[3]
    assert str(error.value) == (
        "3 is not a phase.\n  fix:   use a phase instance, a phase class or a name such as 'training'"
    )


def test_value_before_the_end_of_its_phase_names_the_event_to_handle():
    def show(learner):
        seen.append(learner.cbstate.metrics_epoch["validation"].last("loss"))

    seen = []

    def trained(event):
        callback = CustomCallback(show, event, TrainingPhase, access={"cbstate": {"metrics_epoch": Read()}})
        return testlearner(Metrics(), callback).fit(1)

    text = (
        "`loss` has no values yet. Recorded so far: nothing. Epoch values are recorded at EpochEnd of their phase. "
        "Trigger comes after the validation."
    )
    with pytest.raises(KeyError, match=re.escape(text)):
        trained(EpochEnd)
    trained(Trigger)


def test_metric_in_the_history_of_counts_is_an_error_that_names_its_place():
    history = testlearner(Recorder()).cbstate["history"]
    with pytest.raises(KeyError, match=re.escape('Did you mean `cbstate.metrics_epoch["validation"]["loss"]`?')):
        history["validation/loss"]
    with pytest.raises(KeyError, match=re.escape('Did you mean `["validation"]["loss"]`?')):
        ByPhase(EpochValues)["validation/loss"]
