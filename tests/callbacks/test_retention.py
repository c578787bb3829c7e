"""Which checkpoints a Checkpointer keeps, compared with a model that records all checkpoints."""

import math
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxcb import Callback, CheckpointCorruptError, DeclarationError, Learner, MissingStateError, Write, every, on
from fluxcb.callbacks import Checkpointer, CustomCallback, MaxSaver, Metrics, MinSaver
from fluxcb.checkpoints import ResumeWarning, load_params
from fluxcb.checkpoints.run_folder import Entry, entries_of
from fluxcb.checkpoints.verification import verify_checkpoint
from fluxcb.events import EpochEnd, StepEnd
from fluxcb.phases import TrainingPhase, ValidationPhase

# --- the rule ---------------------------------------------------------------------------------------------------------


def expected(saved, *, last, best, every, mode):
    """Return the indices of what is kept of all that was ever saved, `[(step, value), ...]`, oldest first."""
    keep = set(range(len(saved))[-last:])
    ranked = [i for i, (_, value) in enumerate(saved) if value is not None and not math.isnan(value)]
    ranked.sort(key=lambda i: (saved[i][1] if mode == "min" else -saved[i][1], i))
    keep |= set(ranked[:best])
    if every is not None:
        for multiple in range(every, saved[-1][0] + 1, every):
            keep.add(next(i for i, (step, _) in enumerate(saved) if step >= multiple))
    return sorted(keep)


VALUES = st.sampled_from([None, math.nan, math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0, 2.0])


@pytest.mark.filterwarnings("ignore:`Checkpointer:UserWarning")
@settings(max_examples=400)
@given(
    st.lists(st.tuples(st.integers(0, 7), VALUES), min_size=1, max_size=25),
    st.integers(1, 4),
    st.integers(0, 4),
    st.none() | st.integers(1, 12),
    st.sampled_from(["min", "max"]),
)
def test_the_kept_checkpoints_follow_the_rules(saves, last, best, every, mode):
    how = {"keep_best": best, "mode": mode} if best else {}
    saver = Checkpointer("never-written", keep_last=last, keep_every=every, **how)
    kept, saved, step, number = [], [], 0, 0
    for passed, value in saves:
        number = 0 if passed or not saved else number + 1  # two saves of one step: within the epoch, and behind it
        step += passed
        saved.append((step, value))
        kept.append((Entry(step, number, Path(f"{len(saved) - 1}")), SimpleNamespace(value=value, metric=None)))
        gone = set(saver.to_delete(kept))
        kept = [(entry, manifest) for entry, manifest in kept if entry not in gone]
        found = [int(entry.path.name) for entry, _ in kept]
        assert found == expected(saved, last=last, best=best, every=every, mode=mode)


# --- on disk ----------------------------------------------------------------------------------------------------------


class Told(Callback):
    """Have each validation measure what was said beforehand; None for nothing."""

    def __init__(self, *values, name="loss"):
        self.values, self.name = values, name

    def stateaccess(self):
        return {"cbstate": {"metrics_epoch": Write()}}

    def init(self, learner):
        learner.cbstate.metrics_epoch = {}

    @on
    def tell(self, event: EpochEnd, phase: ValidationPhase, learner):
        learner.cbstate.metrics_epoch = {"validation": _Values(self.values, self.name)}


class _Values(dict):
    def __init__(self, values, name):
        super().__init__({name: values})

    def at(self, epoch):
        return {name: values[epoch - 1] for name, values in self.items() if values[epoch - 1] is not None}

    def arrays_at(self, epoch):
        return {}


def training(*callbacks, validation=True):
    """Return a Learner of two steps an epoch, whose parameter counts them."""
    return Learner.from_loss(
        {"w": jnp.zeros(())},
        lambda params, batch, key: -params["w"] + 0 * jnp.sum(batch),
        optax.sgd(1.0),
        data=([np.zeros(1, np.float32)] * 2, [np.zeros(1, np.float32)] if validation else None),
        callbacks=callbacks,
        default_callbacks=False,
    )


def steps_in(folder):
    for entry in entries_of(folder):
        assert float(load_params(entry.path)["w"]) == verify_checkpoint(entry.path).step == entry.step
    return [entry.step for entry in entries_of(folder)]


@pytest.mark.filterwarnings("ignore:`Checkpointer:UserWarning")
@pytest.mark.parametrize(
    ("values", "how", "left"),
    [
        ((3.0, 1.0, 2.0, 4.0), {"keep_last": 1, "keep_best": 1}, [4, 8]),
        ((1.0, 1.0, 1.0, 1.0), {"keep_last": 1, "keep_best": 2}, [2, 4, 8]),  # of equal ones the first
        ((math.nan, None, 5.0, math.nan), {"keep_last": 1, "keep_best": 3}, [6, 8]),
        ((3.0, 1.0, 2.0, 4.0), {"keep_last": 1, "keep_best": 1, "mode": "max"}, [8]),
        ((5.0, 1.0, 2.0, 4.0), {"keep_last": 1, "keep_best": 1, "mode": "max"}, [2, 8]),
        ((1.0, 2.0, 3.0, 4.0), {"keep_last": 1, "keep_every": 3}, [4, 6, 8]),  # at or behind 3, and 6
        ((4.0, 3.0, 3.0, 4.0), {"keep_last": 2, "keep_best": 1, "keep_every": 100}, [4, 6, 8]),
    ],
)
def test_last_best_and_every_can_be_combined(tmp_path, values, how, left):
    training(Checkpointer(tmp_path, **how), Told(*values)).fit(len(values))
    assert steps_in(tmp_path) == left


@pytest.mark.parametrize(
    ("how", "left"),
    [({}, [4, 8]), ({"mode": "auto"}, [4, 8]), ({"mode": "max"}, [4, 8]), ({"mode": "min"}, [2, 8])],
)
@pytest.mark.filterwarnings("ignore:.* values are good:UserWarning")  # the mode contradicts the name
def test_high_accuracies_are_the_best_unless_a_mode_is_given(tmp_path, how, left):
    saver = Checkpointer(tmp_path, keep_last=1, keep_best=1, metric="accuracy", **how)
    training(saver, Told(0.25, 0.75, 0.5, 0.5, name="accuracy")).fit(4)
    assert steps_in(tmp_path) == left


@pytest.mark.parametrize(
    ("given", "names", "arguments"),
    [
        ({"metric": "accuracy", "mode": "max"}, "`metric` and `mode`", 'metric="accuracy", mode="max"'),
        ({"metric": "accuracy"}, "`metric`", 'metric="accuracy"'),
        ({"metric": "loss"}, "`metric`", 'metric="loss"'),
        ({"mode": "min"}, "`mode`", 'mode="min"'),
    ],
)
def test_a_metric_or_a_mode_without_keep_best_is_an_error_whose_fixes_work(given, names, arguments, refused):
    with refused(
        DeclarationError,
        f"`Checkpointer` received {names} without `keep_best`.\n"
        "  why:   these arguments only decide which checkpoints `keep_best` keeps\n"
        f'  fix:   pass the number of best checkpoints to keep: `Checkpointer("runs/1", keep_best=1, {arguments})`\n'
        f"     or: remove {names}",
    ):
        Checkpointer("x", **given)
    Checkpointer("runs/1", keep_best=1, **given)
    Checkpointer("x")


def test_an_unknown_mode_is_an_error(refused):
    with refused(
        DeclarationError,
        '`mode` of `Checkpointer` must be "min", "max" or "auto", not \'high\'.\n'
        "  why:   it says whether low or high values of the metric are good\n"
        '  fix:   write `mode="max"` if high values are good, or `mode="min"` if low values are good\n'
        "     or: leave it out, so that the name of the metric decides",
    ):
        Checkpointer("x", keep_best=1, mode="high")


@pytest.mark.filterwarnings("ignore:`MaxSaver:UserWarning")
@pytest.mark.parametrize(("saver", "best"), [(MinSaver, (8, 1.0)), (MaxSaver, (4, 2.0))])
def test_epochs_without_a_value_are_not_the_best(tmp_path, saver, best):
    keeps = saver(tmp_path, "loss")
    training(keeps, Told(None, 2.0, None, 1.0, None)).fit(5)
    assert keeps.best == best
    assert steps_in(keeps.folder) == [best[0]]


def test_the_best_checkpoint_survives_a_resume(tmp_path):
    def made():
        return training(Checkpointer(tmp_path, keep_last=1, keep_best=1), Told(3.0, 1.0, 1.0, 2.0, 1.0))

    made().fit(3)
    made().fit(5, resume=True)
    assert steps_in(tmp_path) == [4, 10]


def test_before_the_validation_of_an_epoch_a_checkpoint_has_no_value(tmp_path):
    training(every(Checkpointer(tmp_path, keep_last=9, keep_best=1), steps=1), Metrics()).fit(2)
    # The validation loss is minus the parameter; the last one is written behind the last validation.
    values = [(entry.step, entry.number, verify_checkpoint(entry.path).value) for entry in entries_of(tmp_path)]
    assert values == [*((step, 0, None) for step in range(5)), (4, 1, -4.0)]


def test_a_fit_that_is_ended_before_the_first_validation_is_saved(tmp_path):
    def cancel(learner):
        from fluxcb import CancelFitting

        raise CancelFitting

    first = CustomCallback(cancel, StepEnd, phase=TrainingPhase, access={"control": Write()}, name="ends")
    training(Checkpointer(tmp_path, keep_best=1), Metrics(), first).fit(3)
    assert steps_in(tmp_path) == [0, 1]


@pytest.mark.parametrize("period", [{"steps": 1}, {"seconds": 1}])
def test_keep_best_with_steps_is_rejected(tmp_path, period):
    with pytest.raises(
        DeclarationError, match=r"^`keep_best` of Checkpointer only works with checkpoints at the end of epochs\."
    ):
        Checkpointer(tmp_path, keep_best=1, **period)


def test_a_metric_that_no_callback_provides_is_an_error_at_construction(tmp_path):
    with pytest.raises(MissingStateError) as raised:
        training(Checkpointer(tmp_path, keep_best=1), Metrics(), validation=False)
    assert raised.value.what == (
        f"Checkpointer({str(tmp_path)!r}) watches `validation/loss`, but the Learner has no data for validation."
    )


@pytest.mark.parametrize("damage", ["missing", "shorter", "flipped"])
def test_damaged_checkpoints_do_not_count(tmp_path, damage):
    def made():
        return training(Checkpointer(tmp_path, keep_last=2))

    made().fit(2)
    assert steps_in(tmp_path) == [2, 4]
    file = tmp_path / "4" / "host.json"
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(content[:-1] + (b"" if damage == "shorter" else b" "))
    with pytest.warns(ResumeWarning, match="newer ones are damaged"):
        made().fit(2, resume=True)
    assert [entry.path.name for entry in entries_of(tmp_path)] == ["2", "4", "4.1"]
    with pytest.raises(CheckpointCorruptError):
        verify_checkpoint(tmp_path / "4")
    made().fit(3, resume=True)
    assert [entry.path.name for entry in entries_of(tmp_path)] == ["4.1", "6"]  # deleted with those of its age
