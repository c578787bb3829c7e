"""Going back to an earlier checkpoint during a fit: what is undone, and what continues."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Append, Callback, RewindFitting, ThreadExecutor, on
from fluxcb.callbacks import Checkpointer, LogMetrics, LossSpikeGuard, Metrics, Monitors, Recorder, SkipNonFinite
from fluxcb.checkpoints import ResumeWarning
from fluxcb.events import StepEnd, Trigger
from fluxcb.logging import JSONLinesBackend
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase
from fluxcb.testing import EventLog

thrown_away = pytest.mark.filterwarnings("ignore:.*read and discarded")


class Passes:
    """Yield batches that identify themselves: batch i of pass p (from 1) is 2 ** (i + length * (p - 1))."""

    def __init__(self, length: int) -> None:
        self.length, self.number, self.begun = length, 0, []

    def set_epoch(self, number: int) -> None:
        self.number = number

    def __iter__(self):
        self.begun.append(self.number)
        return (np.float32(2.0 ** (i + self.length * (self.number - 1))) for i in range(self.length))

    def __len__(self) -> int:
        return self.length


class Back(Callback):
    """Rewind at some steps, at each only the first time."""

    def __init__(self, asked: dict[int, int], at_most: int = 3, event: str = "StepEnd") -> None:
        self.asked, self.at_most, self.event = asked, at_most, event

    def stateaccess(self) -> dict[str, Any]:
        return {"control": Append()}

    @on(StepEnd, AbstractTrainingPhase)
    def at_step(self, event, phase, learner):
        self.ask(event, learner)

    @on(Trigger, AbstractTrainingPhase, access={})
    def at_trigger(self, event, phase, learner):
        self.ask(event, learner)

    def ask(self, event, learner):
        step = learner.progress.step
        if step in self.asked and type(event).__name__ == self.event:
            raise RewindFitting("it went astray", self.asked.pop(step), self.at_most)


def summing(folder: Path | None, data: Any, *callbacks: Callback, **options: Any) -> fluxcb.Learner:
    """Return a Learner whose parameter is the sum of the batches that it was trained on."""
    savers = [] if folder is None else [Checkpointer(folder, steps=3, keep_last=10)]
    return fluxcb.Learner.from_loss(
        {"w": jnp.float32(0.0)},
        lambda params, batch, key: -params["w"] * batch,
        optax.sgd(1.0),
        data=data,
        callbacks=[*callbacks, *savers],
        default_callbacks=False,
        **options,
    )


def batches(learner: fluxcb.Learner) -> list[int]:
    """Return the batches that were used for training, counted from 0 over all passes."""
    total = int(learner.params["w"])
    return [i for i in range(total.bit_length()) if total >> i & 1]


@pytest.mark.parametrize("options", [{}, {"steps_per_call": 4}, {"executor": ThreadExecutor(2)}], ids=str)
def test_rewind_continues_from_earlier_checkpoint_with_next_batches(tmp_path, options):
    log = EventLog()
    learner = summing(tmp_path / "run", Passes(10), Back({8: 7}), log, Recorder(), **options)
    with pytest.warns(ResumeWarning) as warned:
        learner.fit(1)
    assert [str(w.message) for w in warned] == [
        f"The run goes back from step 8 to the checkpoint {tmp_path / 'run' / '6'}: it went astray"
    ]
    # Six steps are kept; the batches 6 and 7 are left out.
    assert batches(learner) == [0, 1, 2, 3, 4, 5, 8, 9]
    assert (learner.step, learner.epoch, learner.stop_reason) == (8, 1, None)
    assert learner.cbstate["history"]["training"].steps == 8
    steps = ["StepBegin", "StepEnd"]
    assert log.names() == [  # it went back, too
        *("FitBegin", "EpochBegin", *steps * 6),
        *("FitBegin", *steps * 2, "EpochEnd", "Trigger", "FitStopping", "FitEnd"),
    ]


def test_fit_has_requested_epochs_and_repeats_no_batch(tmp_path):
    data = Passes(4)
    learner = summing(tmp_path, data, Back({10: 7}))  # in the third epoch; the checkpoint of step 6 is in the second
    with pytest.warns(ResumeWarning):
        learner.fit(4)
    # Of the second epoch, two batches are left out, and the first two of the third.
    assert batches(learner) == [*range(6), *range(10, 16)]
    assert (learner.step, learner.epoch) == (12, 4)
    assert data.begun == [1, 2, 3, 4]


def test_rewind_between_two_epochs(tmp_path):
    data = Passes(3)
    learner = summing(tmp_path, data, Back({6: 3}, event="Trigger"))
    with pytest.warns(ResumeWarning, match="from step 6 to the checkpoint .*/3"):
        learner.fit(3)
    assert batches(learner) == [0, 1, 2, *range(6, 12)]
    assert (learner.step, learner.epoch) == (9, 3)
    assert data.begun == [1, 2, 3, 4]


def test_rewind_in_stream(tmp_path):
    learner = summing(tmp_path, Passes(1000), Back({8: 6}))
    with pytest.warns(ResumeWarning):
        learner.fit(steps=12, steps_per_epoch=4)
    assert batches(learner) == [0, 1, 2, 3, 4, 5, *range(8, 14)]
    assert (learner.step, learner.epoch) == (12, 3)


def test_second_rewind_goes_further_back(tmp_path):
    # The first time to 6, and without another checkpoint, then to 3.
    learner = summing(tmp_path, Passes(100), Back({8: 7, 7: 7}))
    with pytest.warns(ResumeWarning) as warned:
        learner.fit(steps=9)
    assert [str(w.message).split(": ")[0].split("/")[-1] for w in warned] == ["6", "3"]
    assert batches(learner) == [0, 1, 2, *range(9, 15)]


@thrown_away
def test_later_checkpoints_are_deleted_and_rewritten(tmp_path):
    learner = summing(tmp_path, Passes(100), Back({10: 5}))
    with pytest.warns(ResumeWarning):
        learner.fit(steps=10)
    assert batches(learner) == [0, 1, 2, *range(10, 17)]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["0", "10", "3", "6", "9"]
    again = summing(tmp_path, Passes(100))
    again.callbacks.add(Back({}))
    again.restore(tmp_path / "6")
    assert batches(again) == [0, 1, 2, 10, 11, 12]


@pytest.mark.parametrize(
    ("folder", "asked", "at_most", "reason"),
    [
        (False, {8: 7}, 3, "it went astray (there is not exactly one Checkpointer to go back with)"),
        (True, {8: -1}, 3, "it went astray (there is no good checkpoint of step -1 or before)"),
        (True, {8: 7, 7: 6}, 1, "it went astray (the run has gone back 1 times before)"),
    ],
)
@pytest.mark.filterwarnings("ignore:The run goes back")
def test_impossible_rewind_ends_fit(tmp_path, folder, asked, at_most, reason):
    log = EventLog()
    learner = summing(tmp_path if folder else None, Passes(100), Back(asked, at_most), log)
    learner.fit(steps=20)
    assert learner.stop_reason == reason
    assert log.names()[-4:] == ["StepEnd", "EpochEnd", "FitStopping", "FitEnd"]


def test_damaged_checkpoint_is_skipped(tmp_path):
    class Breaks(Callback):
        @on(StepEnd, AbstractTrainingPhase)
        def damage(self, event, phase, learner):
            if learner.progress.step == 8:
                saver.wait()
                (tmp_path / "6" / "host.json").write_text("{}")

    learner = summing(tmp_path, Passes(100), fluxcb.in_order(Breaks(), Back({8: 7})))
    saver = learner.callbacks.get(Checkpointer)
    with pytest.warns(ResumeWarning, match="to the checkpoint .*/3:"):
        learner.fit(steps=9)
    assert batches(learner) == [0, 1, 2, *range(8, 14)]


def test_run_epoch_and_run_step_raise_rewind_fitting(tmp_path):
    log = EventLog()
    learner = summing(tmp_path, Passes(10), Back({2: 1}), log)
    with pytest.raises(RewindFitting, match=r"^it went astray$"):
        learner.run_epoch(TrainingPhase())
    assert log.names()[-1] == "EpochEnd"


def test_logs_contain_no_undone_steps(tmp_path):
    def trained(name: str, data: Any, *asked: Callback) -> list[dict[str, Any]]:
        folder = tmp_path / name
        logged = Monitors(JSONLinesBackend(folder / "log.jsonl"))
        learner = summing(folder / "run", data, Metrics(), LogMetrics(), logged, *asked)
        learner.fit(steps=6, steps_per_epoch=2)
        assert batches(learner) == [0, 1, 2, 5, 6, 7]
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        return [{k: v for k, v in line.items() if "time" not in k} for line in lines]

    with pytest.warns(ResumeWarning):
        found = trained("back", Passes(100), Back({5: 4}))
    others = [np.float32(2.0**i) for i in range(8) if i not in (3, 4)]
    assert found == trained("straight", others)


@thrown_away
@pytest.mark.filterwarnings("ignore:The run goes back")
def test_rewound_run_resumes_exactly(tmp_path):
    def make(folder: Path, *more: Callback) -> fluxcb.Learner:
        return summing(folder, Passes(7), Back({5: 4}), *more)

    class Copies(Callback):
        @on(Trigger, AbstractTrainingPhase)
        def copy(self, event, phase, learner):
            learner_.callbacks.get(Checkpointer).wait()
            shutil.copytree(tmp_path / "run", tmp_path / f"killed{learner.progress.epoch}")

    learner_ = make(tmp_path / "run", Copies())
    learner_.fit(3)
    for killed in (1, 2):  # before there is a checkpoint behind the return, and after
        resumed = make(tmp_path / f"killed{killed}", Copies())
        resumed.callbacks.remove(Copies)
        resumed.restore(tmp_path / f"killed{killed}", allow=("callbacks",))
        resumed.fit(3, resume=True)
        assert batches(resumed) == batches(learner_) == [0, 1, 2, *range(5, 21)]
        assert (resumed.step, resumed.epoch) == (learner_.step, learner_.epoch) == (19, 3)


# --- callbacks that ask for it ----------------------------------------------------------------------------------------


def astray(guard: Callback, folder: Path, losses: list[float], lost: int, **options: Any) -> fluxcb.Learner:
    """Return a Learner with these losses, whose parameters are bad from batch `lost` on."""

    def loss(params, batch, key):
        value, bad = batch
        return value + params["w"] - jax.lax.stop_gradient(params["w"]) + bad * params["lost"]

    return fluxcb.Learner.from_loss(
        {"w": jnp.float32(0.0), "lost": jnp.float32(0.0)},
        loss,
        optax.sgd(1.0),
        data=[(jnp.float32(x), jnp.float32(-1.0 if i == lost else 0.0)) for i, x in enumerate(losses)],
        callbacks=[guard, Checkpointer(folder, steps=4, keep_last=10)],
        default_callbacks=False,
        **options,
    )


@pytest.mark.filterwarnings("ignore:Training stopped:RuntimeWarning")
@pytest.mark.parametrize("steps_per_call", [1, 5, "auto"])
def test_rewind_after_non_finite_steps(tmp_path, steps_per_call):
    losses = [1.0] * 10 + [float("nan")] * 3 + [1.0] * 7
    learner = astray(SkipNonFinite(3, rewinds=1), tmp_path, losses, 9, steps_per_call=steps_per_call)
    with pytest.warns(ResumeWarning, match="from step 13 to the checkpoint .*/8: loss or gradients were not finite"):
        learner.fit(1)
    # Of 20 batches, 8 before and the last 7 are trained on; batch 9, which changed `lost`, is taken back.
    assert (learner.step, float(learner.params["w"]), float(learner.params["lost"])) == (15, -15.0, 0.0)
    assert learner.stop_reason is None
    learner = astray(SkipNonFinite(3), tmp_path / "other", losses, 9)
    learner.fit(1)
    assert learner.stop_reason == "loss or gradients were not finite at 3 steps in a row, up to step 13"


@pytest.mark.parametrize("steps_per_call", [1, 5, "auto"])
def test_rewind_after_high_losses(tmp_path, steps_per_call):
    usual = [1.0, 1.1, 0.9, 1.05, 0.95]
    losses = usual * 2 + [9.0, 9.1, 8.9] + usual
    guard = LossSpikeGuard(6.0, window=6, rewind_after=3)
    learner = astray(guard, tmp_path, losses, 9, steps_per_call=steps_per_call)
    with pytest.warns(ResumeWarning, match="from step 13 to the checkpoint .*/8: the loss spiked at 3 steps in a"):
        learner.fit(1)
    assert (learner.step, float(learner.params["w"]), float(learner.params["lost"])) == (13, -13.0, 0.0)
    assert learner.cbstate["loss_spikes"]["skipped"] == 0  # the guard went back, too


@pytest.mark.parametrize(
    ("make", "first"),
    [
        (lambda: SkipNonFinite(rewinds=-1), "`rewinds` of SkipNonFinite must be a whole number of at least 1, not -1."),
        (
            lambda: LossSpikeGuard(window=10, rewind_after=6),
            "`rewind_after` of LossSpikeGuard is 6 steps, more than half of its `window`, 10.",
        ),
    ],
)
def test_invalid_numbers_raise(make, first):
    with pytest.raises(fluxcb.DeclarationError) as raised:
        make()
    assert str(raised.value).splitlines()[0] == first
