"""`learner.replay(..., bad_step=n)` and `fluxcb replay --bad-step`."""

import json
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Append, Callback, CheckpointError, DeclarationError, Read, on
from fluxcb._tools.cli import main
from fluxcb.callbacks import (
    BadSteps,
    Checkpointer,
    ClipGradients,
    LossSpikeGuard,
    Metrics,
    ProcessArrays,
    SkipNonFinite,
)
from fluxcb.checkpoints import ResumeWarning
from fluxcb.events import BackwardEnd
from fluxcb.phases import TrainingPhase

NAN = float("nan")
VALUES = [1, 2, 4, 8, 16, NAN, NAN, 32, NAN, 64, 65]


def make(folder, *callbacks, values=VALUES, steps=3, **options):
    """Return a Learner with two parameters and random keys in its loss, whose gradients are known."""
    guard = SkipNonFinite(2, rewinds=1)
    records = BadSteps(folder, skip_again=options.pop("skip_again", False))
    return fluxcb.Learner.from_loss(
        {"a": jnp.ones(2), "b": jnp.float32(1)},
        lambda params, batch, key: jnp.sum(params["a"] * batch) + params["b"] * (1 + jax.random.uniform(key)),
        optax.sgd(2.0**-10),
        data=[jnp.array([value, 1.0]) for value in values],
        callbacks=[guard, Metrics(), records, Checkpointer(folder, steps=steps, keep_last=99), *callbacks],
        default_callbacks=False,
        **options,
    )


class SkipsLarge(Callback):
    """Skips steps whose gradient is large."""

    def stateaccess(self):
        return {"step": {"grads": Read(), "skip": Append()}}

    @on
    def skip(self, event: BackwardEnd, phase: TrainingPhase, learner):
        learner.step.skip = learner.step.grads["a"][0] > 60


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that goes back from step 7 to step 3, and trains two epochs."""
    folder = tmp_path_factory.mktemp("bad") / "run"
    learner = make(folder, SkipsLarge())
    with pytest.warns(ResumeWarning, match="goes back from step 7"):
        learner.fit(2)
    return folder


def test_recorded_run_is_the_expected_one(run):
    found = [json.loads(line) for line in (run / "bad_steps.jsonl").read_text().splitlines()]
    # After the rewind, the steps 4 to 7 are trained on the batches 7 to 10. The second epoch ends at its second NaN.
    assert [(r["step"], r["data"]["pass"], r["data"]["batch"], list(r["by"]), r["undone"]) for r in found] == [
        (6, 1, 5, ["SkipNonFinite"], {"to": 3, "records": 2}),
        (7, 1, 6, ["SkipNonFinite"], {"to": 3, "records": 2}),
        (5, 1, 8, ["SkipNonFinite"], None),
        (6, 1, 9, ["SkipsLarge"], None),
        (7, 1, 10, ["SkipsLarge"], None),
        (13, 2, 5, ["SkipNonFinite"], None),
        (14, 2, 6, ["SkipNonFinite"], None),
    ]


@pytest.mark.parametrize(
    ("step", "began", "batch"),
    [(5, "3", 8), *(pytest.param(*v, marks=pytest.mark.long) for v in [(6, "3", 9), (7, "6", 10), (14, "12", 6)])],
)
def test_replayed_step_equals_its_record(run, step, began, batch):
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    seen = []
    observer = ProcessArrays("step.loss", lambda loss: seen.append(float(loss)))
    replay = make(run, SkipsLarge()).replay(run, bad_step=step, callbacks=[observer])
    bad = replay.bad_step
    assert bad.differences == ()
    assert replay.identical
    assert (replay.steps, replay.began, replay.compared) == ((step, step), run / began, None)
    np.testing.assert_array_equal(bad.batch, np.array([VALUES[batch], 1], np.float32))
    # The gradient with respect to `a` is the batch.
    np.testing.assert_array_equal(bad.grads["a"], bad.batch)
    key = jax.random.fold_in(jax.random.key(0), step - 1)
    assert bad.record["key"] == jax.random.key_data(key).tolist()
    norms = {"a": np.linalg.norm([VALUES[batch], 1]), "b": float(bad.grads["b"])}
    np.testing.assert_allclose([bad.gradient_norms[name] for name in ("a", "b")], list(norms.values()), rtol=1e-6)
    assert len(seen) == 1
    assert repr(bad.values) == repr(bad.record["by"])
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before


@pytest.mark.long
def test_steps_that_a_rewind_has_undone_are_replayed_from_their_own_branch(run, tmp_path):
    # The newest record of a step is replayed, so the newer ones of the steps 6 and 7 are removed.
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / "bad_steps.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    for step in (6, 7):
        replay = make(tmp_path / "run", SkipsLarge()).replay(tmp_path / "run", bad_step=step)
        assert replay.began == tmp_path / "run" / "3"
        assert replay.bad_step.differences == ()
        assert replay.bad_step.record["by"]["SkipNonFinite"]["cbstate.non_finite.in_a_row"] == step - 6


@pytest.mark.long
@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_steps_before_and_after_a_resume_without_bad_batches(tmp_path, steps_per_call):
    values = [1, 2, NAN, 4, 5, 6, NAN, 8]

    def made(**options):
        return make(tmp_path, SkipsLarge(), values=values, steps=4, steps_per_call=steps_per_call, **options)

    made().fit(2)
    learner = made(skip_again=True)
    with pytest.warns(ResumeWarning):
        learner.restore(tmp_path / "4")
    learner.fit(3, resume=True)
    records = learner.cbstate["bad_steps"]
    # One epoch has eight steps. Then pass 1 lacks a batch, and pass 2 lacks two.
    assert [(r["step"], r["data"]["pass"], r["data"]["batch"]) for r in records] == [
        *[(3, 1, 2), (7, 1, 6), (11, 2, 2), (15, 2, 6)],
        *[(16, 3, 2), (20, 3, 6)],
    ]
    for record in records:
        with warnings.catch_warnings(action="ignore", category=ResumeWarning):  # `skip_again` has changed
            replay = made(skip_again=True).replay(tmp_path, bad_step=record["step"])
        assert replay.bad_step.differences == (), record["step"]


def test_report(run):
    text = str(make(run, SkipsLarge()).replay(run, bad_step=5))
    lines = text.splitlines()
    assert lines[:2] == [
        f"Replayed step 5 from the checkpoint {run / '3'}.",
        "Step 5 (epoch 1), batch 8 of pass 1 of data.training, was skipped by SkipNonFinite.",
    ]
    assert [line.split() for line in lines[2:4]] == [
        ["value", "recorded", "replayed"],
        ["SkipNonFinite:", "cbstate.non_finite.in_a_row", "0", "0"],
    ]
    start = lines.index(next(line for line in lines if line.startswith("gradient")))
    assert lines[start + 1].split() == ["a", "nan"]
    assert [line.split() for line in lines[start + 3 : start + 5]] == [
        ["batch", "type", "min", "max", "not", "finite"],
        ["-", "float32[2]", "1", "1", "1"],
    ]
    assert lines[-1] == "The replayed values are the same as the recorded ones, bit for bit."


@pytest.mark.long
def test_difference_from_the_record_is_reported(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / "bad_steps.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    loss = records[4]["by"]["SkipsLarge"]["step.loss"]
    records[4]["by"]["SkipsLarge"]["step.loss"] = 1.5
    records[4]["by"]["Other"] = {}
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    replay = make(tmp_path / "run", SkipsLarge()).replay(tmp_path / "run", bad_step=7)
    assert not replay.identical
    assert replay.bad_step.differences == (
        f"SkipsLarge: step.loss was 1.5, and is {loss!r}",
        "Other skipped the step, and does not skip it now",
    )


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.long
def test_run_without_records(tmp_path, refused):
    folder = tmp_path / "run"
    learner = make(folder, values=[1, 2, 3])
    learner.fit(1)
    with refused(
        CheckpointError,
        f"There is no record of a skipped step in {folder}.\n"
        "  why:   `bad_step` needs the file bad_steps.jsonl, which the callback `BadSteps` writes\n"
        f"  fix:   add `BadSteps({str(folder)!r})` to the callbacks of the run; to replay other steps, pass `steps`",
    ):
        learner.replay(folder, bad_step=2)
    assert learner.replay(folder, steps=(2, 2)).identical is not False


@pytest.mark.parametrize("step", [4, *(pytest.param(step, marks=pytest.mark.long) for step in (7.0, "7", True))])
def test_step_that_was_not_recorded(run, step, refused):
    with refused(
        DeclarationError,
        f"`bad_step` of `replay` is the number of a recorded step, not {step!r}.\n"
        f"  where: {run / 'bad_steps.jsonl'}\n"
        "  fix:   pass one of the recorded steps: 5, 6, 7, 13, 14",
    ):
        make(run, SkipsLarge()).replay(run, bad_step=step)


@pytest.mark.parametrize("other", [{"steps": (5, 6)}, pytest.param({"lineage": "step.grads"}, marks=pytest.mark.long)])
def test_other_arguments_are_refused(run, other, refused):
    with refused(
        DeclarationError,
        f"`replay` takes either `bad_step` or `{next(iter(other))}`.\n"
        "  why:   a bad step is compared with its record, and nothing else must be computed in it\n"
        "  fix:   to observe the step, write `steps=(5, 5)` instead of `bad_step`",
    ):
        make(run, SkipsLarge()).replay(run, bad_step=5, **other)


def test_changed_data_is_refused_and_the_fix_works(run, refused):
    changed = [*VALUES[:10], 66]
    with refused(
        CheckpointError,
        "The batch of step 7 is not the recorded one, batch 10 of pass 1 of `data.training`.\n"
        "  where: its checksum differs\n"
        "  why:   the data has changed since the run, or no checkpoint precedes the step in the pass of its batch\n"
        "  fix:   build the Learner with the data of the run\n"
        "     or: let the `Checkpointer` save more often, so that a checkpoint lies between a rewind and such a step",
    ):
        make(run, SkipsLarge(), values=changed).replay(run, bad_step=7)
    assert make(run, SkipsLarge()).replay(run, bad_step=7).identical


@pytest.mark.long
def test_batch_without_position_is_refused(tmp_path, refused):
    learner = make(tmp_path)
    learner.fit(steps=3)
    learner.run_step(TrainingPhase(), jnp.array([NAN, 1.0]))
    with refused(
        CheckpointError,
        "Step 4 cannot be replayed, because its batch has no position in a data source.\n"
        f"  where: {tmp_path / 'bad_steps.jsonl'}\n"
        "  why:   `run_step` or a hand-written loop provided the batch\n"
        "  fix:   train with `fit`, which takes the batches from the data of the Learner",
    ):
        make(tmp_path).replay(tmp_path, bad_step=4)


@pytest.mark.long
def test_run_without_an_earlier_checkpoint(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    for folder in (tmp_path / "run").iterdir():
        if folder.name.isdecimal() and int(folder.name) < 6:
            shutil.rmtree(folder)
    learner = make(tmp_path / "run", SkipsLarge())
    learner.restore(tmp_path / "run" / "12")
    with pytest.raises(CheckpointError) as error:
        learner.replay(tmp_path / "run", bad_step=5)
    assert error.value.what == f"There is no checkpoint before step 5 in {tmp_path / 'run'}."


@pytest.mark.long
def test_observer_that_writes_is_refused(run):
    with pytest.raises(DeclarationError, match=r"cannot observe a replay, because it may write `step\.grads`"):
        make(run, SkipsLarge()).replay(run, bad_step=5, callbacks=[ClipGradients(1.0)])


# -- the command -------------------------------------------------------------------------------

MODULE = """
import jax.numpy as jnp
import optax
from fluxcb import Learner
from fluxcb.callbacks import BadSteps, Checkpointer, SkipNonFinite

def make_learner():
    return Learner.from_loss(
        {"w": jnp.ones(2)},
        lambda params, batch: jnp.sum(params["w"] * batch),
        optax.sgd(0.5),
        data=[jnp.array([1.0, value]) for value in (1.0, 2.0, float("nan"), 4.0)],
        callbacks=[SkipNonFinite(), BadSteps("run"), Checkpointer("run", steps=2, keep_last=9)],
        default_callbacks=False,
    )
"""


def test_command_replays_a_bad_step(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad_step_train.py").write_text(MODULE)
    (tmp_path / "pyproject.toml").write_text('[tool.fluxcb]\ncallbacks = ["bad_step_train:make_learner"]\n')
    monkeypatch.syspath_prepend(tmp_path)
    import bad_step_train

    bad_step_train.make_learner().fit(1)
    assert main(["replay", "run", "--bad-step", "3", "--save", "saved"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Replayed step 3 from the checkpoint run/2."
    assert lines[-2] == "The replayed values are the same as the recorded ones, bit for bit."
    assert lines[-1] == "The values are in saved."
    (file,) = (tmp_path / "saved").iterdir()
    saved = np.load(file)
    np.testing.assert_array_equal(saved["step.batch"], [1, NAN])
    np.testing.assert_array_equal(saved["step.grads.w"], [1, NAN])
    text = (tmp_path / "run" / "bad_steps.jsonl").read_text()
    assert '"key": [' in text
    (tmp_path / "run" / "bad_steps.jsonl").write_text(text.replace('"key": [', '"key": [0, '))
    assert main(["replay", "run", "--bad-step", "3"]) == 1
    assert main(["replay", "run", "--bad-step", "2"]) == 1
    assert "pass one of the recorded steps: 3" in capsys.readouterr().err


@pytest.mark.long
def test_gradients_of_a_guard_with_a_bound(tmp_path):
    learner = make(tmp_path, LossSpikeGuard(6.0, window=3), values=[1, 2, 1, 2, 900, 1])
    learner.fit(1)
    (record,) = learner.cbstate["bad_steps"]
    replay = make(tmp_path, LossSpikeGuard(6.0, window=3), values=[1, 2, 1, 2, 900, 1]).replay(tmp_path, bad_step=5)
    assert replay.identical
    assert replay.bad_step.values["LossSpikeGuard"] == record["by"]["LossSpikeGuard"]
