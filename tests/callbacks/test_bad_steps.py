"""BadSteps against a hand-written loop, and its file."""

import json
import shutil
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Append, Callback, CheckpointError, DeclarationError, Read, RewindFitting, Write, on
from fluxcb.callbacks import (
    AccumulateGradients,
    BadSteps,
    Checkpointer,
    DynamicLossScale,
    LossSpikeGuard,
    SkipNonFinite,
)
from fluxcb.checkpoints import ResumeWarning
from fluxcb.events import BackwardBegin, BackwardEnd, ForwardBegin, StepEnd, UpdateEnd
from fluxcb.phases import AbstractTrainingPhase, InTurn, TrainingPhase

RATE = 2.0**-10
NAN = float("nan")


class SkipLarge(Callback):
    """Skips steps whose loss is above a bound, which it halves at each of them."""

    def __init__(self, bound=40.0, *, event=BackwardEnd):
        self.bound, self.event = bound, event

    def stateaccess(self):
        return {"step": {"loss": Read(), "skip": Append(), "excess": Write()}, "cbstate": {"bound": Write()}}

    def init(self, learner):
        if "bound" not in learner.cbstate:
            learner.cbstate.bound = jnp.float32(self.bound)

    @on
    def judge(self, event: BackwardEnd, phase: AbstractTrainingPhase, learner):
        bound = learner.cbstate.bound
        learner.step["excess"] = learner.step.loss - bound
        large = learner.step.loss > bound
        learner.step.skip = large
        learner.cbstate.bound = jnp.where(large, bound / 2, bound)


class SkipNegative(Callback):
    """Skips batches that begin with a negative number, before their loss is computed."""

    def stateaccess(self):
        return {"step": {"batch": Read(), "skip": Append()}}

    @on
    def judge(self, event: ForwardBegin, phase: AbstractTrainingPhase, learner):
        learner.step.skip = learner.step.batch[0] < 0


BATCHES = [(1, 2), (4, 8), (NAN, 1), (-2, 2), (60, 4), (2, 2), (-90, 300), (8, 2), (1, 1)]


def make(*callbacks, batches=BATCHES, **options):
    """Return a Learner whose loss is the parameter times the mean of the batch."""
    return fluxcb.Learner.from_loss(
        {"w": jnp.float32(1.0)},
        lambda params, batch, key: params["w"] * jnp.mean(batch),
        optax.sgd(RATE),
        data=[jnp.asarray(batch, jnp.float32) for batch in batches],
        callbacks=callbacks,
        default_callbacks=False,
        **options,
    )


def expected_records(batches, steps):
    """Return step, pass, batch, loss, gradient and writers of each bad step, from a loop in NumPy."""
    w, bound, found = np.float32(1), np.float32(40), []
    for step in range(1, steps + 1):
        number, at = divmod(step - 1, len(batches))
        batch = np.asarray(batches[at], np.float32)
        gradient = np.mean(batch)
        loss = w * gradient
        writers = {
            "SkipLarge": loss > bound,
            "SkipNegative": batch[0] < 0,
            "SkipNonFinite": not np.isfinite(loss),
        }
        if any(writers.values()):
            names = {name for name, skips in writers.items() if skips}
            found.append((step, number + 1, at, loss, abs(gradient), names, bound))
        else:
            w -= np.float32(RATE) * gradient
        if writers["SkipLarge"]:
            bound /= 2
    return found, w


@pytest.mark.parametrize(
    ("steps_per_call", "steps_per_epoch"),
    [(4, 13), *(pytest.param(*values, marks=pytest.mark.long) for values in [(1, None), (4, None), ("auto", 7)])],
)
def test_records_are_those_of_a_hand_written_loop(steps_per_call, steps_per_epoch):
    learner = make(SkipLarge(), SkipNegative(), SkipNonFinite(), BadSteps(), steps_per_call=steps_per_call, key=3)
    learner.fit(steps=27, steps_per_epoch=steps_per_epoch)
    expected, w = expected_records(BATCHES, 27)
    records = learner.cbstate["bad_steps"]
    np.testing.assert_allclose(learner.params["w"], w, rtol=1e-5)
    assert len(expected) > 8
    assert {frozenset(names) for *_, names, _ in expected} >= {
        frozenset({"SkipLarge"}),
        frozenset({"SkipLarge", "SkipNegative"}),
        frozenset({"SkipNonFinite"}),
    }
    length = steps_per_epoch or len(BATCHES)
    for record, (step, number, at, loss, gradient, names, bound) in zip(records, expected, strict=True):
        assert (record["step"], record["phase"]) == (step, "training")
        assert (record["epoch"], record["step_in_epoch"]) == ((step - 1) // length + 1, (step - 1) % length + 1)
        assert record["data"] == {"source": "training", "pass": number, "batch": at}
        array = np.asarray(BATCHES[at], np.float32)
        assert record["checksum"] == zlib.crc32(array.tobytes(), zlib.crc32(b"float32(2,)"))
        assert record["key"] == jax.random.key_data(jax.random.fold_in(jax.random.key(3), step - 1)).tolist()
        assert set(record["by"]) == names
        for values in record["by"].values():
            np.testing.assert_allclose(values["step.loss"], loss, rtol=1e-5)
            np.testing.assert_allclose(values["norm of step.grads"], gradient, rtol=1e-6)
        if "SkipLarge" in names:
            assert record["by"]["SkipLarge"]["cbstate.bound"] == bound
            np.testing.assert_allclose(record["by"]["SkipLarge"]["step.excess"], loss - bound, rtol=1e-5)
        assert record["undone"] is None


def test_values_of_guards():
    losses = [1.0, 1.5, 2.0, 1.25, 1.75, 90.0, 1.5]
    learner = make(LossSpikeGuard(6.0, window=5), BadSteps(), batches=[(x, x) for x in losses])
    learner.fit(1)
    (record,) = learner.cbstate["bad_steps"]
    w, seen = 1.0, []
    for loss in losses[:5]:
        seen.append(w * loss)
        w -= RATE * loss
    median = np.median(seen)
    bound = median + 6 * 1.4826 * np.median(np.abs(np.array(seen) - median))
    values = record["by"]["LossSpikeGuard"]
    np.testing.assert_allclose(values.pop("step.loss_spike_bound"), bound, rtol=1e-5)
    np.testing.assert_allclose(values.pop("step.loss"), 90 * w, rtol=1e-5)
    counts = {f"cbstate.loss_spikes.{name}": count for name, count in {"seen": 5, "skipped": 0, "in_a_row": 0}.items()}
    assert values == {**counts, "norm of step.grads": 90.0}


def test_values_of_dynamic_loss_scale():
    learner = make(DynamicLossScale(2.0**10, period=100), BadSteps(), batches=[(1, 1), (2e38, 1e38), (1, 1)])
    learner.fit(1)
    (record,) = learner.cbstate["bad_steps"]
    values = record["by"]["DynamicLossScale"]
    # The scaled gradient overflows. The loss itself is finite.
    assert values["norm of step.grads"] == float("inf")
    assert values["cbstate.loss_scale.scale"] == 2.0**10
    assert values["cbstate.loss_scale.good_steps"] == 1
    np.testing.assert_allclose(values["step.loss"], (1 - RATE) * 1.5e38, rtol=1e-5)


def test_skipped_microbatches_of_accumulation_are_recorded_and_held_ones_are_not():
    batches = [(1, 1), (NAN, 1), (3, 3), (5, 5), (1, NAN), (7, 7)]
    learner = make(SkipNonFinite(), AccumulateGradients(2), BadSteps(), batches=batches, steps_per_call=3)
    learner.fit(1)
    assert [(r["step"], r["data"]["batch"], list(r["by"])) for r in learner.cbstate["bad_steps"]] == [
        (2, 1, ["SkipNonFinite"]),
        (5, 4, ["SkipNonFinite"]),
    ]
    # Two updates with the means of 1 and 3, and of 5 and 7.
    np.testing.assert_allclose(learner.params["w"], 1 - RATE * (2 + 6), rtol=1e-6)


class Own(AbstractTrainingPhase):
    """Updates the parameter itself, and skips steps itself if the batch begins with zero."""

    name = "own"
    provides = {BackwardBegin: ("loss",), BackwardEnd: ("grads",), UpdateEnd: ()}

    def step(self, learner, emit):
        def loss(params):
            learner.step.loss = params["w"] * jnp.mean(learner.step.batch)
            emit(BackwardBegin())
            return learner.step.loss

        learner.step.grads = learner.grad(loss)
        learner.step.skip = learner.step.batch[0] == 0
        emit(BackwardEnd())
        learner.params = jax.tree.map(lambda p, g: p - RATE * g, learner.params, learner.step.grads)


class Other(Own):
    name = "other"


@pytest.mark.parametrize("steps_per_call", [pytest.param(1, marks=pytest.mark.long), 4])
def test_phases_in_turn_have_their_own_positions(steps_per_call):
    data = {"own": [(1, 1), (0, 4), (NAN, 1), (2, 2)], "other": [(1, 1), (NAN, 2), (0, 2)]}
    learner = fluxcb.Learner.from_loss(
        {"w": jnp.float32(1.0)},
        lambda params, batch, key: params["w"],
        optax.sgd(RATE),
        phases=[InTurn(Own(), Other(), steps=(2, 1))],
        data={name: [jnp.asarray(b, jnp.float32) for b in batches] for name, batches in data.items()},
        callbacks=[SkipNonFinite(), BadSteps()],
        default_callbacks=False,
        steps_per_call=steps_per_call,
    )
    learner.fit(2)
    found = [
        (r["step"], r["phase"], r["step_in_epoch"], *r["data"].values(), list(r["by"]))
        for r in learner.cbstate["bad_steps"]
    ]
    # Each epoch: own, own, other, own, own, other. The data of the second phase runs on.
    assert found == [
        (2, "own", 2, "own", 1, 1, ["Own.step"]),
        (4, "own", 3, "own", 1, 2, ["SkipNonFinite"]),
        (6, "other", 2, "other", 1, 1, ["SkipNonFinite"]),
        (8, "own", 2, "own", 2, 1, ["Own.step"]),
        (9, "other", 1, "other", 1, 2, ["Other.step"]),
        (10, "own", 3, "own", 2, 2, ["SkipNonFinite"]),
    ]
    # In each epoch, the first phase applies (1, 1) and (2, 2). The second phase applies (1, 1) in both, because its
    # data ends in the second epoch and begins again.
    np.testing.assert_allclose(learner.params["w"], 1 - RATE * 2 * (1 + 2 + 1), rtol=1e-6)


def test_steps_outside_an_epoch_have_no_position():
    learner = make(SkipNonFinite(), BadSteps())
    learner.run_step(TrainingPhase(), jnp.array([NAN, 1.0]))
    (record,) = learner.cbstate["bad_steps"]
    assert (record["step"], record["data"], list(record["by"])) == (1, None, ["SkipNonFinite"])


@pytest.mark.long
def test_without_a_writer_of_the_flag_nothing_is_recorded():
    learner = make(BadSteps(), batches=[(1, NAN)])
    learner.fit(2)
    assert learner.cbstate["bad_steps"] == []


@pytest.mark.long
def test_reading_the_flag_before_writing_it_does_not_count_as_writing_it():
    class SkipAlso(Callback):
        def stateaccess(self):
            return {"step": {"loss": Read(), "skip": Append()}}

        @on
        def judge(self, event: BackwardEnd, phase: TrainingPhase, learner):
            learner.step.skip |= learner.step.loss > 10

    learner = make(SkipNegative(), SkipAlso(), BadSteps(), batches=[(-1, 2), (20, 20)])
    learner.fit(1)
    assert [list(record["by"]) for record in learner.cbstate["bad_steps"]] == [["SkipNegative"], ["SkipAlso"]]


@pytest.mark.long
def test_recording_does_not_shorten_windows():
    def trained(*callbacks):
        learner = make(SkipNegative(), SkipNonFinite(), *callbacks, steps_per_call=9, exact_observers=True)
        learner.fit(6)
        return learner

    with_records, without = trained(BadSteps()), trained()
    assert len(with_records.cbstate["bad_steps"]) == 18
    assert with_records.params["w"] == without.params["w"]
    windows = [learner._core.engine.step_loop(learner._core.phases[0]).windows for learner in (with_records, without)]
    assert windows[0] == windows[1]


# -- the file, rewinds and resumed runs --------------------------------------------------------


def lines_of(folder):
    return [json.loads(line) for line in (folder / "bad_steps.jsonl").read_text().splitlines()]


def run(folder, *callbacks, skip_again=False, keep_last=1000, **options):
    saver = Checkpointer(folder, steps=4, keep_last=99)
    records = BadSteps(folder, skip_again=skip_again, keep_last=keep_last)
    return make(SkipNegative(), SkipNonFinite(), records, saver, *callbacks, **options)


def test_file_has_the_records(tmp_path):
    learner = run(tmp_path / "run")
    learner.fit(2)
    found = lines_of(tmp_path / "run")
    assert [record["step"] for record in found] == [3, 4, 7, 12, 13, 16]
    assert found[0]["by"]["SkipNonFinite"]["step.loss"] == "NaN"  # JSON has no NaN
    assert found[1:3] == learner.cbstate["bad_steps"][1:3]


@pytest.mark.parametrize(
    ("at", "steps_per_call"),
    [(8, 4), *(pytest.param(*values, marks=pytest.mark.long) for values in [(4, 1), (4, 4), (8, 1), (16, 1), (16, 4)])],
)
def test_resumed_run_has_the_same_records(tmp_path, at, steps_per_call):
    whole = run(tmp_path / "whole", steps_per_call=steps_per_call)
    whole.fit(3)
    run(tmp_path / "run", steps_per_call=steps_per_call).fit(2)
    for folder in (tmp_path / "run").iterdir():  # as if the run had been killed before it wrote them
        if folder.name.isdecimal() and int(folder.name) > at:
            shutil.rmtree(folder)
    with (tmp_path / "run" / "bad_steps.jsonl").open("a") as file:
        file.write('{"step": 19, "pha')  # killed while it wrote a line
    resumed = run(tmp_path / "run", steps_per_call=steps_per_call)
    resumed.fit(3, resume=True)
    assert str(resumed.cbstate["bad_steps"]) == str(whole.cbstate["bad_steps"])
    assert (tmp_path / "run" / "bad_steps.jsonl").read_text() == (tmp_path / "whole" / "bad_steps.jsonl").read_text()
    assert resumed.params["w"] == whole.params["w"]


@pytest.mark.parametrize("steps_per_call", [pytest.param(1, marks=pytest.mark.long), 4])
def test_resumed_run_leaves_out_the_recorded_batches(tmp_path, steps_per_call):
    run(tmp_path, steps_per_call=steps_per_call).fit(2)
    seen = []

    class See(Callback):
        def stateaccess(self):
            return {"step": {"batch": Read(), "data_position": Read()}}

        @on
        def see(self, event: StepEnd, phase: TrainingPhase, learner):
            place = learner.step.data_position
            np.testing.assert_array_equal(learner.step.batch, np.asarray(BATCHES[place["batch"]], np.float32))
            seen.append((learner.progress.step, place["pass"], place["batch"]))

    learner = run(tmp_path, See(), skip_again=True, steps_per_call=steps_per_call)
    with pytest.warns(ResumeWarning):
        learner.restore(tmp_path / "4", allow=("callbacks.See",))
    learner.fit(3, resume=True)
    bad = {2, 3, 6}
    places = [(1, at) for at in range(4, 9) if at not in bad] + [(2, at) for at in range(9) if at not in bad]
    places += [(3, at) for at in range(9)]  # nothing is recorded of this pass yet
    assert seen == [(step, *place) for step, place in enumerate(places, 5)]
    w = np.float32(1)
    for at in [0, 1, *(at for _, at in places)]:
        if at not in bad:
            w -= np.float32(RATE) * np.float32(np.mean(BATCHES[at]))
    np.testing.assert_allclose(learner.params["w"], w, rtol=1e-5)
    records = learner.cbstate["bad_steps"]
    undone = {"to": 4, "records": 6}
    assert [(record["step"], record["undone"]) for record in records] == [
        (3, None),
        (4, None),
        *[(step, undone) for step in (7, 12, 13, 16)],
        *[(step, None) for step in (17, 18, 21)],
    ]
    assert [record["step"] for record in lines_of(tmp_path)] == [record["step"] for record in records]
    # Another resume, from a checkpoint of the new branch, continues exactly.
    again = run(tmp_path, See(), skip_again=True, steps_per_call=steps_per_call)
    again.restore(tmp_path / "12")
    del seen[:]
    again.fit(3, resume=True)
    # The batches of pass 3 are in the file now.
    assert [place[1:] for place in seen] == [place for place in places[8:] if place[0] < 3 or place[1] not in bad]


@pytest.mark.parametrize("at", [4, pytest.param(16, marks=pytest.mark.long)])
def test_list_has_the_newest_records_and_the_file_has_all(tmp_path, at):
    whole = run(tmp_path / "whole")
    whole.fit(3)
    numbered = [(record["number"], record["step"]) for record in lines_of(tmp_path / "whole")]
    assert numbered == [(1, 3), (2, 4), (3, 7), (4, 12), (5, 13), (6, 16), (7, 21), (8, 22), (9, 25)]
    limited = run(tmp_path / "run", keep_last=2)
    limited.fit(2)
    assert [record["number"] for record in limited.cbstate["bad_steps"]] == [5, 6]
    for folder in (tmp_path / "run").iterdir():
        if folder.name.isdecimal() and int(folder.name) > at:
            shutil.rmtree(folder)
    resumed = run(tmp_path / "run", keep_last=2)
    resumed.fit(3, resume=True)
    assert str(resumed.cbstate["bad_steps"]) == str(whole.cbstate["bad_steps"][-2:])
    assert (tmp_path / "run" / "bad_steps.jsonl").read_text() == (tmp_path / "whole" / "bad_steps.jsonl").read_text()
    # The record of step 3 is in the file only.
    replayed = run(tmp_path / "run", keep_last=2).replay(tmp_path / "run", bad_step=3)
    assert (replayed.bad_step.record["number"], replayed.bad_step.differences) == (1, ())


@pytest.mark.parametrize("keep_last", [1000, pytest.param(1, marks=pytest.mark.long)])
def test_records_survive_a_rewind(tmp_path, keep_last):
    class Rewinds(Callback):
        def stateaccess(self):
            return {"step": {"data_position": Read()}, "control": Append()}

        @on
        def rewind(self, event: StepEnd, phase: TrainingPhase, learner):
            if learner.progress.step == 7 and learner.step.data_position["batch"] == 6:
                raise RewindFitting("a test", 5, 1)

    for folder in (tmp_path, None):
        saver = Checkpointer(tmp_path if folder else tmp_path / "other", steps=4)
        learner = make(SkipNegative(), SkipNonFinite(), BadSteps(folder, keep_last=keep_last), saver, Rewinds())
        with pytest.warns(ResumeWarning, match="goes back from step 7"):
            learner.fit(2)
        undone = {"to": 4, "records": 3}
        # After the rewind, step 5 is trained on batch 7.
        expected = [
            (1, 3, "training", 1, 2, None),
            (2, 4, "training", 1, 3, None),
            (3, 7, "training", 1, 6, undone),
            (4, 9, "training", 2, 2, None),
            (5, 10, "training", 2, 3, None),
            (6, 13, "training", 2, 6, None),
        ]
        for found, kept in ((learner.cbstate["bad_steps"], keep_last), *([(lines_of(folder), 6)] if folder else [])):
            named = [(r["number"], r["step"], *r["data"].values(), r["undone"]) for r in found]
            assert named == expected[-kept:]
    assert [record["step"] for record in lines_of(tmp_path)] == [3, 4, 7, 9, 10, 13]


@pytest.mark.long
def test_new_run_keeps_the_file_of_an_earlier_one(tmp_path):
    make(SkipNonFinite(), BadSteps(tmp_path)).fit(1)
    before = (tmp_path / "bad_steps.jsonl").read_text()
    make(SkipNonFinite(), BadSteps(tmp_path), batches=[(1, 1), (NAN, 1)]).fit(1)
    assert (tmp_path / "bad_steps-1.jsonl").read_text() == before
    assert [record["step"] for record in lines_of(tmp_path)] == [2]


@pytest.mark.long
def test_new_run_can_leave_out_the_batches_of_an_earlier_one(tmp_path):
    make(SkipNonFinite(), BadSteps(tmp_path)).fit(1)
    learner = make(SkipNonFinite(), BadSteps(tmp_path, skip_again=True))
    learner.fit(1)
    assert learner.step == len(BATCHES) - 1
    assert [(record["step"], record["undone"]) for record in learner.cbstate["bad_steps"]] == [
        (3, {"to": 0, "records": 1})
    ]


# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: BadSteps(3),
            '`BadSteps` takes a directory, not 3.\n  fix:   write e.g. `BadSteps("runs/1")`',
        ),
        (
            lambda: BadSteps(skip_again=True),
            "`skip_again` of BadSteps needs a directory.\n"
            "  why:   a checkpoint does not have the records of later steps, so a file must keep them\n"
            '  fix:   write e.g. `BadSteps("runs/1", skip_again=True)`',
        ),
        (
            lambda: BadSteps(keep_last=0),
            "`keep_last` of BadSteps must be a whole number of at least 1, not 0.\n"
            "  fix:   give a whole number of at least 1",
        ),
    ],
)
def test_wrong_arguments_are_refused(call, message, refused):
    with refused(DeclarationError, message):
        call()


def test_two_are_refused(tmp_path, refused):
    with refused(
        fluxcb.ConflictError,
        "The callbacks list contains more than one `BadSteps`.\n"
        "  where: BadSteps()\n"
        "         BadSteps()\n"
        "  why:   both would add their records to `cbstate.bad_steps`\n"
        "  fix:   remove one of them",
    ):
        fluxcb.check([SkipNonFinite(), BadSteps(), BadSteps()], default_callbacks=False)
    fluxcb.check([SkipNonFinite(), BadSteps()], default_callbacks=False)


@pytest.mark.long
@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"step": 3}', '{"step": true, "by": {}}', "\x00"])
def test_damaged_file_is_refused_and_the_fix_works(tmp_path, line, refused):
    make(SkipNonFinite(), BadSteps(tmp_path)).fit(1)
    path = tmp_path / "bad_steps.jsonl"
    good = path.read_text()
    path.write_text(f"{good}{line}\n")
    learner = make(SkipNonFinite(), BadSteps(tmp_path, skip_again=True))
    with pytest.raises(CheckpointError) as caught:
        learner.fit(1)
    assert str(caught.value) == (
        f"Line 2 of {path} is not a record of a skipped step.\n"
        "  why:   the file says which batches a run leaves out, and which steps can be replayed\n"
        "  fix:   restore the file, or delete the line"
    )
    path.write_text(good)
    learner.fit(1)
    assert learner.step == len(BATCHES) - 1
