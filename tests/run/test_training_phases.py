"""Several training phases in one fit: each epoch runs an epoch of each, in order."""

import io
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import (
    Append,
    Callback,
    CancelEpoch,
    CancelFitting,
    DataError,
    DeclarationError,
    Learner,
    RewindFitting,
    ThreadExecutor,
    every,
    on,
)
from fluxcb._declare.signatures import source_of
from fluxcb.callbacks import (
    Checkpointer,
    CustomCallback,
    EarlyStopping,
    LearningRate,
    Metrics,
    MetricsPrinter,
    ProgressBar,
    Recorder,
    Scheduler,
)
from fluxcb.checkpoints import ResumeWarning
from fluxcb.checkpoints.run_folder import RunFolder
from fluxcb.events import BackwardBegin, BackwardEnd, ComputeEnd, EpochBegin, ForwardBegin, HostEvent, StepEnd
from fluxcb.phases import AbstractTrainingPhase, AbstractValidationPhase
from fluxcb.testing import assert_resumes_exactly, testlearner
from tests.changed_callbacks import changes_arguments

RATE = 0.125


class First(AbstractTrainingPhase):
    """Move `w` towards the mean of the batch."""

    name = "first"
    provides = {ForwardBegin: (), BackwardBegin: ("loss",), BackwardEnd: ("grads",)}
    weight = 1.0

    def step(self, learner, emit):
        emit(ForwardBegin())

        def loss(params):
            noise = jax.random.normal(learner.key)
            learner.step.loss = self.weight * jnp.mean((params["w"] - learner.step.batch - 0.1 * noise) ** 2)
            emit(BackwardBegin())
            return learner.step.loss

        learner.step.grads = learner.grad(loss)
        emit(BackwardEnd())
        learner.apply_updates()


class Second(First):
    """Like `First`, with another weight and batches of another shape."""

    name = "second"
    weight = 0.5


class Check(AbstractValidationPhase):
    provides = {ComputeEnd: ("loss",)}

    def step(self, learner, emit):
        learner.step.loss = jnp.mean((learner.params["w"] - learner.step.batch) ** 2)


def batches(count, size, seed):
    return list(np.random.default_rng(seed).normal(size=(count, size)).astype(np.float32))


def source():
    return {"first": batches(3, 4, 1), "second": batches(5, 2, 2), "validation": batches(2, 4, 3)}


def learner_of(*callbacks, data=None, phases=None, **kwargs):
    return Learner.from_loss(
        {"w": jnp.float32(1)},
        None,
        kwargs.pop("optimizer", None) or fluxcb.inject(optax.sgd, learning_rate=RATE),
        data=data or source(),
        phases=phases or (First(), Second(), Check()),
        callbacks=callbacks,
        default_callbacks=False,
        **kwargs,
    )


def assert_same(a, b):
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))


class Log(Callback):
    def __init__(self):
        self.lines = []

    @on(HostEvent)
    def log(self, event, phase, learner):
        now = learner.progress
        self.lines.append((repr(event), phase.name, now.epoch, now.step, now.step_in_epoch, now.steps_in_epoch))


def runs(name, epoch, before, count, trains=True):
    """Return the log entries of an epoch of a phase."""
    lines = [("EpochBegin", name, epoch, before, 0, count)]
    for i in range(count):
        counted = before + i if trains else before
        lines.append(("StepBegin", name, epoch, counted, i, count))
        lines.append(("StepEnd", name, epoch, counted + trains, i + 1, count))
    return [*lines, ("EpochEnd", name, epoch, before + count * trains, count, count)]


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_every_epoch_runs_each_phase_in_order(steps_per_call):
    log = Log()
    learner = learner_of(log, steps_per_call=steps_per_call)
    learner.fit(2)
    assert (learner.step, learner.epoch) == (16, 2)
    expected = [("FitBegin", "first", 0, 0, 0, 0)]
    for epoch in (1, 2):
        before = 8 * (epoch - 1)
        expected += runs("first", epoch, before, 3)
        expected += runs("second", epoch, before + 3, 5)
        expected += runs("validation", epoch, before + 8, 2, trains=False)
        expected.append(("Trigger", "first", epoch, before + 8, 5, 5))
    expected += [(name, "first", 2, 16, 5, 5) for name in ("FitStopping", "FitEnd")]
    assert log.lines == expected


def test_phases_run_in_list_order():
    log = Log()
    learner_of(log, phases=(Check(), Second(), First())).fit(1)
    assert [phase for event, phase, *_ in log.lines if event == "EpochBegin"] == ["second", "first", "validation"]
    assert log.lines[0][1] == "second"


def test_event_shows_whether_epoch_is_shared():
    told = []

    class Tell(Callback):
        @on
        def tell(self, event: EpochBegin, phase, learner):
            told.append((phase.name, event.shares_epoch))

    learner_of(Tell()).fit(2)
    assert told == [("first", False), ("second", True), ("validation", False)] * 2


class Plain(First):
    """A phase without random numbers."""

    name = "plain"

    def step(self, learner, emit):
        emit(ForwardBegin())

        def loss(params):
            learner.step.loss = self.weight * jnp.mean((params["w"] - learner.step.batch) ** 2)
            emit(BackwardBegin())
            return learner.step.loss

        learner.step.grads = learner.grad(loss)
        emit(BackwardEnd())
        learner.apply_updates()


class Weighted(Plain):
    name, weight = "weighted", 0.5


def by_hand(plain, weighted, epochs, w=1.0, rates=None):
    losses, step = {"plain": [], "weighted": []}, 0
    for _ in range(epochs):
        for name, data, weight in (("plain", plain, 1.0), ("weighted", weighted, 0.5)):
            for batch in data:
                losses[name].append(weight * np.mean((w - batch) ** 2))
                w = w - (rates(step) if rates else RATE) * weight * 2 * np.mean(w - batch)
                step += 1
    return w, losses


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_training_matches_hand_written_loop(steps_per_call):
    data = {"plain": batches(3, 4, 1), "weighted": batches(5, 2, 2)}
    learner = learner_of(Metrics(), Recorder(), data=data, phases=(Plain(), Weighted()), steps_per_call=steps_per_call)
    history = learner.fit(3)
    w, losses = by_hand(data["plain"], data["weighted"], 3)
    assert float(learner.params["w"]) == pytest.approx(w, rel=1e-5)
    assert history["plain/loss"] == pytest.approx(np.mean(np.reshape(losses["plain"], (3, 3)), axis=1), rel=1e-5)
    assert history["weighted/loss"] == pytest.approx(np.mean(np.reshape(losses["weighted"], (3, 5)), axis=1), rel=1e-5)
    steps = {"plain": [8 * e + i for e in range(3) for i in (1, 2, 3)]}
    steps["weighted"] = [n for n in range(1, 25) if n not in steps["plain"]]
    for name, numbers in steps.items():
        assert [step for step, _ in history.per_step[name]["loss"]] == numbers
        assert [value for _, value in history.per_step[name]["loss"]] == pytest.approx(losses[name], rel=1e-5)
    assert {name: kept.steps for name, kept in learner.cbstate.history.items()} == {"plain": 9, "weighted": 15}


def test_schedule_counts_steps_of_all_phases():
    data = {"plain": batches(3, 4, 1), "weighted": batches(5, 2, 2)}
    learner = learner_of(
        Scheduler({LearningRate: lambda step: 0.01 * (step + 1)}), data=data, phases=(Plain(), Weighted())
    )
    learner.fit(2)
    w, _ = by_hand(data["plain"], data["weighted"], 2, rates=lambda step: 0.01 * (step + 1))
    assert float(learner.params["w"]) == pytest.approx(w, rel=1e-5)


def test_periods_count_steps_of_all_phases():
    seen = []

    def tell(name):
        return CustomCallback(lambda learner: seen.append((name, learner.progress.step)), StepEnd, name=name)

    phases = (First(), Second())
    learner_of(
        every(tell("steps"), steps=5),
        every(tell("epochs"), epochs=2),
        phases=phases,
        data={"first": batches(3, 4, 1), "second": batches(5, 2, 2)},
    ).fit(2)
    assert [step for name, step in seen if name == "steps"] == [5, 10, 15]
    assert [step for name, step in seen if name == "epochs"] == list(range(9, 17))


@pytest.mark.parametrize(
    ("steps", "counts"),
    [
        (2, [("first", 2), ("validation", 2)]),
        (3, [("first", 3), ("validation", 2)]),
        (4, [("first", 3), ("second", 1), ("validation", 2)]),
        (8, [("first", 3), ("second", 5), ("validation", 2)]),
        (10, [("first", 3), ("second", 5), ("validation", 2), ("first", 2), ("validation", 2)]),
    ],
)
def test_step_counters_include_all_phases(steps, counts):
    log = Log()
    learner = learner_of(log)
    learner.fit(steps=steps)
    assert learner.step == steps
    assert [(phase, at[-2]) for event, phase, *at in log.lines if event == "EpochEnd"] == counts


def test_steps_per_epoch_applies_to_each_phase():
    log = Log()
    learner_of(log).fit(2, steps_per_epoch=4)
    assert [(p, at[-2]) for e, p, *at in log.lines if e == "EpochEnd"] == [
        ("first", 4),
        ("second", 4),
        ("validation", 2),
    ] * 2


def test_windows_and_executors_do_not_change_bits():
    results = []
    for kwargs in ({"steps_per_call": 1}, {"steps_per_call": 4}, {"executor": ThreadExecutor(2)}):
        learner = learner_of(Metrics(), **kwargs)
        learner.fit(3)
        results.append(learner.state)
    for other in results[1:]:
        assert_same(results[0], other)


# -- cancelling --------------------------------------------------------------------------------


def cancels(error, step):
    def cancel(learner):
        if learner.progress.step == step:
            raise error("enough")

    return CustomCallback(cancel, StepEnd, AbstractTrainingPhase, access={"control": Append()})


@pytest.mark.parametrize(
    ("error", "step", "phases"),
    [
        (CancelEpoch, 1, [("first", 1), ("second", 5), ("validation", 2)]),
        (CancelEpoch, 5, [("first", 3), ("second", 2), ("validation", 2)]),
        (CancelFitting, 1, [("first", 1)]),
        (CancelFitting, 5, [("first", 3), ("second", 2)]),
    ],
)
def test_cancels_end_step_epoch_or_fit(error, step, phases):
    log = Log()
    learner = learner_of(log, cancels(error, step))
    learner.fit(1)
    assert [(phase, at[-2]) for event, phase, *at in log.lines if event == "EpochEnd"] == phases
    assert learner.stop_reason == (None if error is CancelEpoch else "enough")


def test_early_stopping_watches_any_phase():
    learner = learner_of(Metrics(), EarlyStopping(1, metric="loss", phase="second"))
    history = learner.fit(100)
    values = history["second/loss"]
    assert learner.stop_reason is not None
    assert learner.stop_reason.startswith("second/loss: no improvement")
    assert len(values) == learner.epoch
    assert values[-1] >= min(values[:-1])
    assert all(a > b for a, b in itertools.pairwise(values[:-1]))


def test_printers_show_each_phase():
    bar, table = io.StringIO(), io.StringIO()
    learner = learner_of(Metrics(), ProgressBar(bar), MetricsPrinter(table))
    history = learner.fit(2)
    shown = [line.split(":")[0] for line in bar.getvalue().splitlines() if "steps/s" in line]
    assert shown == [f"epoch {e}/2 {name}" for e in (1, 2) for name in ("first", "second")]
    lines = table.getvalue().splitlines()
    assert lines[0].split() == ["epoch", "first", "loss", "second", "loss", "valid", "loss", "time"]
    rows = [line.split() for line in lines if line.split()[0] in ("1", "2")]
    values = zip(*(history[f"{name}/loss"] for name in ("first", "second", "validation")), strict=True)
    assert [row[1:4] for row in rows] == [[f"{value:.4f}" for value in row] for row in values]


# -- checkpoints -------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [{"epochs": 3}, {"steps": 13}])
@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_resumes_exactly_from_every_step(length, steps_per_call):
    def make():
        return learner_of(
            Metrics(),
            Recorder(),
            Scheduler({LearningRate: lambda step: 0.01 * (step + 1)}),
            optimizer=fluxcb.inject(optax.adam, learning_rate=0.1),
            steps_per_call=steps_per_call,
        )

    assert_resumes_exactly(make, **length)


class Shuffled(list):
    """Yield batches in an order that depends on the epoch."""

    def set_epoch(self, number):
        self.order = np.random.default_rng(number).permutation(len(self))

    def __iter__(self):
        return (list.__getitem__(self, i) for i in self.order)


def test_resumes_exactly_with_shuffled_data():
    def make():
        data = {name: Shuffled(batches) for name, batches in source().items()}
        return learner_of(Metrics(), data=data)

    assert_resumes_exactly(make, epochs=3)


@pytest.mark.parametrize("at", [2, 4, 7, 8, 9, 13, 16, 20])
@changes_arguments("callbacks.Checkpointer")
def test_streams_resume_exactly(tmp_path, at):
    whole = learner_of(every(Checkpointer(tmp_path, keep_last=100), steps=1))
    whole.fit(steps=21, steps_per_epoch=4)
    again = learner_of(every(Checkpointer(tmp_path / "again"), steps=100))
    again.restore(next(entry.path for entry in RunFolder(tmp_path).entries() if entry.step == at))
    again.fit(steps=21 - at, steps_per_epoch=4)
    assert_same(whole.state, again.state)


@pytest.mark.parametrize("at", [2, 3, 4, 8, 9, 13])
@changes_arguments("callbacks.Checkpointer")
def test_restored_checkpoint_continues_by_epochs(tmp_path, at):
    whole = learner_of(every(Checkpointer(tmp_path, keep_last=100), steps=1))
    whole.fit(2)
    again = learner_of(every(Checkpointer(tmp_path / "again"), steps=100))
    again.restore(next(entry.path for entry in RunFolder(tmp_path).entries() if entry.step == at))
    again.fit(2 - (at - 1) // 8)
    assert_same(whole.state, again.state)


def test_rewinding_keeps_positions_of_all_data(tmp_path):
    class Back(Callback):
        def stateaccess(self):
            return {"control": Append()}

        @on
        def back(self, event: StepEnd, phase: AbstractTrainingPhase, learner):
            if learner.progress.step == 6 and not went:
                went.append(phase.name)
                raise RewindFitting("astray", 4, 1)

    class Sums(AbstractTrainingPhase):
        """Add the batches to `w`."""

        name = "first"
        provides = {BackwardBegin: ("loss",), BackwardEnd: ("grads",)}

        def step(self, learner, emit):
            def loss(params):
                learner.step.loss = -params["w"] * learner.step.batch
                emit(BackwardBegin())
                return learner.step.loss

            learner.step.grads = learner.grad(loss)
            emit(BackwardEnd())
            learner.apply_updates()

    class More(Sums):
        name = "second"

    went = []
    data = {"first": [np.float32(2**i) for i in range(3)], "second": [np.float32(2**i) for i in range(3, 8)]}
    learner = learner_of(
        Back(), Checkpointer(tmp_path, steps=1), data=data, phases=(Sums(), More()), optimizer=optax.sgd(1.0)
    )
    with pytest.warns(ResumeWarning, match="goes back from step 6"):
        learner.fit(1)
    # The batches of the steps 5 and 6, which are 2 ** 4 and 2 ** 5, are not used again.
    assert went == ["second"]
    assert (learner.epoch, int(learner.params["w"])) == (1, 1 + 2**8 - 1 - 2**4 - 2**5)


# -- what is refused ---------------------------------------------------------------------------


class Twin(First):
    weight = 2.0


def test_two_phases_with_same_name_raise(refused):
    with refused(
        DeclarationError,
        "`phases` contains First() and Twin(), which have the same `name`, 'first'.\n"
        f"  where: {__name__}.Twin\n"
        "  why:   the name selects the data and the metrics of a phase, so the two would share them\n"
        '  fix:   give each class a name of its own: `name = "first_2"` in the body of `Twin`',
    ):
        learner_of(phases=(First(), Twin()), data={"first": batches(3, 4, 1)})
    with refused(
        DeclarationError,
        "`phases` contains First() and First(), which have the same `name`, 'first'.\n"
        f"  where: {__name__}.First\n"
        "  why:   the name selects the data and the metrics of a phase, so the two would share them\n"
        '  fix:   derive a class with another name: `class Second(First): name = "first_2"`',
    ):
        learner_of(phases=(First(), First()), data={"first": batches(3, 4, 1)})

    class Named(Twin):
        name = "first_2"

    data = {"first": batches(3, 4, 1), "first_2": batches(3, 4, 1)}
    learner = learner_of(phases=(First(), Named()), data=data)
    learner.fit(1)
    assert learner.step == 6


def test_training_phase_without_data_raises(refused):
    def build(phases, **more):
        return learner_of(phases=phases, data={"first": batches(3, 4, 1), **more})

    learner = build((First(), Second()))
    with refused(
        DataError,
        "There is no data for Second: `data.second` is not set.\n"
        '  fix:   pass `data={"second": batches}` to the Learner\n'
        "     or: if only `run_step` runs it, leave `Second()` out of `phases`",
    ):
        learner.fit(1)
    learner.run_step(Second(), batches(1, 2, 2)[0])
    build((First(), Second()), second=batches(5, 2, 2)).fit(1)
    left_out = build((First(),))
    left_out.fit(1)
    left_out.run_step(Second(), batches(1, 2, 2)[0])
    assert left_out.step == 4


def test_missing_data_of_single_training_phase_raises():
    learner = testlearner()
    with pytest.raises(DataError) as error:
        testlearner(data=None, example_batch=learner.data.training[0]).fit(1)
    assert str(error.value) == (
        "There is no data for TrainingPhase: `data.training` is not set.\n"
        '  fix:   pass `data={"training": batches}` to the Learner'
    )


def test_manually_run_epochs_have_separate_numbers():
    log = Log()
    learner = learner_of(log)
    learner.run_epoch(First())
    learner.run_epoch(Second())
    assert [at[0] for event, _, *at in log.lines if event == "EpochEnd"] == [1, 2]


def test_phase_whose_step_takes_other_arguments_is_refused():
    class OneArgument(AbstractTrainingPhase):
        def step(self, learner): ...

    with pytest.raises(DeclarationError) as raised:
        fluxcb.Learner.from_loss({"w": jnp.zeros(())}, None, optax.sgd(0.1), phases=(OneArgument(),))
    assert str(raised.value) == (
        f"`{OneArgument.__qualname__}.step` takes (learner), and is called as `step(learner, emit)`.\n"
        f"  where: {source_of(OneArgument.step)}\n"
        "  fix:   write `def step(self, learner, emit):`"
    )
