"""The lines that a population prints after a fit."""

import io
import re
import signal

import pytest

from fluxcb import Population
from fluxcb.callbacks import Checkpointer, Metrics, StopOnNaNLoss
from fluxcb.populations import PopulationTable
from fluxcb.testing import testlearner
from tests.populations.test_endings import FailAt, SignalAt, StopAt


def population(make, *, table=None, **arguments):
    """Return a population, and the file of its table."""
    table = PopulationTable("training/loss", file=io.StringIO()) if table is None else table
    return Population(make, callbacks=[table], **arguments), table.file


def lines_after_table(file):
    """Return what the last fit printed below the table, without the duration."""
    lines = re.sub(r"\(\d+\.\d s\)", "(S s)", file.getvalue()).splitlines()
    first = max(number for number, line in enumerate(lines) if line.startswith("Training "))
    return lines[first:]


BEST = 'Next: `population[population.best("training/loss")]` is the Learner of the best member.'
RESUME = (
    "Next: with a `Checkpointer` among the callbacks of each member, `population.fit(..., resume=True)` continues, "
    "also in a new process."
)


def test_summary_names_members_that_stopped():
    members, file = population(
        lambda learning_rate: testlearner(Metrics(), StopOnNaNLoss(), learning_rate=learning_rate, batches=10),
        learning_rate=[0.1, 1e30],
    )
    with pytest.warns(RuntimeWarning, match="Training stopped"):
        members.fit(2)
    assert lines_after_table(file) == [
        "Training finished after epoch 2, step 20 (S s).",
        f"Member 1 (learning_rate=1e+30) stopped in epoch 1: {members[1].stop_reason}.",
        BEST,
    ]
    assert members.best("training/loss") == 0


def test_summary_shows_five_of_many_members_that_stopped():
    members, file = population(lambda epoch: testlearner(Metrics(), StopAt(epoch)), epoch=[*[1] * 7, 3])
    members.fit(2)
    first, *stopped, more, _ = lines_after_table(file)
    assert first == "Training finished after epoch 2, step 8 (S s)."
    assert stopped == [f"Member {i} (epoch=1) stopped in epoch 1: epoch 1." for i in range(5)]
    assert more == "2 more members stopped; see `stop_reason` of each history."


@pytest.mark.parametrize(
    ("table", "call"),
    [
        (lambda file: PopulationTable(file=file), "population.best()"),
        (lambda file: PopulationTable("training/loss", file=file), 'population.best("training/loss")'),
        (lambda file: PopulationTable("penalty", mode="max", file=file), 'population.best("penalty", mode="max")'),
    ],
    ids=["validation loss", "training loss", "mode"],
)
def test_call_of_best_names_the_metric_and_the_mode_of_the_table(table, call):
    assert table(io.StringIO()).call_of_best().replace("validation/", "") == call


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize(
    ("stops", "kind", "first"),
    [
        (FailAt, ValueError, "Training failed in member 1 (step=6), {}: ValueError: out of paper."),
        (lambda step: SignalAt(step, signal.SIGINT), KeyboardInterrupt, "Training was interrupted {}: Ctrl-C."),
    ],
    ids=["error", "signal"],
)
def test_summary_of_fit_that_was_interrupted(stops, kind, first, saves, tmp_path):
    def make(member, step):
        savers = [Checkpointer(tmp_path / str(member))] if saves else []
        return testlearner(Metrics(), stops(step), *savers)

    members, file = population(make, step=[0, 6])
    with pytest.raises(kind):
        members.fit(3)
    written = [f"Wrote {tmp_path / '0'} (Checkpointer), {tmp_path / '1'} (Checkpointer)."]
    next_fit = "Next: `population.fit(..., resume=True)` continues from the newest step that all members have saved."
    first = first.format(f"in epoch 2, after step {members[1].step}")  # the other steps of a window are run as well
    assert members[1].step in (6, 8)
    assert lines_after_table(file) == [first, *(written if saves else []), next_fit if saves else RESUME]
    if saves:
        again, file = population(make, step=[0, 0])
        assert [history.step for history in again.fit(3, resume=True, allow=("callbacks",))] == [12, 12]
        again.fit(3, resume=True)
        assert lines_after_table(file) == ["Training was complete at epoch 3, step 12.", BEST]


def test_summary_names_sigterm():
    members, file = population(lambda step: testlearner(Metrics(), SignalAt(step, signal.SIGTERM)), step=[6, 0])
    with pytest.warns(RuntimeWarning, match="SIGTERM ended the fit"):
        members.fit(3)
    place = f"in epoch 2, after step {members[0].step}"
    assert lines_after_table(file) == [f"Training was interrupted {place}: SIGTERM.", RESUME]


def test_population_without_table_prints_nothing(capsys):
    Population(lambda key: testlearner(Metrics(), key=key), key=range(2), default_callbacks=False).fit(1)
    assert capsys.readouterr().out == ""
