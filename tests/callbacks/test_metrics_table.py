"""The table of `MetricsPrinter`: its header comes first, and its columns are aligned."""

import io
import itertools
import re

import jax.numpy as jnp
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import fluxcb
from fluxcb import Append, Callback, Read, Write, every, on
from fluxcb.callbacks import InferenceRunner, Metric, Metrics, MetricsPrinter, ProgressBar, ScalarStats, accuracy
from fluxcb.callbacks.progress.epoch_table import _number, _seconds, open_table
from fluxcb.events import EpochEnd, StepEnd
from fluxcb.logging.consoles import CONSOLES
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase, ValidationPhase


@pytest.fixture
def seconds(monkeypatch):
    """Let every look at the clock take a second, and the engine's windows end after one step."""
    now = [0.0]

    def ticking():
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr("fluxcb.callbacks.progress.bars.time.monotonic", ticking)
    monkeypatch.setattr("fluxcb.callbacks.progress.bars._PLAIN_SECONDS", 10.0)
    monkeypatch.setattr("fluxcb._run.program_runner.AHEAD", 1)
    monkeypatch.setattr("fluxcb._run.program_runner.LONGEST", 1)


def kinds(text):
    """Return what kind of line each is: `header`, `row`, or a progress line up to its numbers, without repetitions."""
    words = []
    for line in text.splitlines():
        if line.startswith("epoch  "):
            words.append("header")
        else:
            words.append("row" if line.startswith(" ") else re.split(r": \d", line)[0])
    return [word for word, _ in itertools.groupby(words)]


@pytest.mark.usefixtures("seconds")
def test_the_header_comes_before_progress_lines_and_rows_replace_the_last_ones(build, make_batches):
    file = io.StringIO()
    callbacks = [ProgressBar(file, interval=1e-9), Metrics(accuracy), MetricsPrinter(file)]
    build(callbacks, data=(make_batches([2] * 12), make_batches([2]))).fit(2)
    assert kinds(file.getvalue()) == [
        "header",
        "epoch 1/2 training: compiling the step",
        "epoch 1/2 training",
        "epoch 1/2 validation: compiling the step",
        "row",
        "epoch 2/2 training",
        "row",
    ]


@pytest.mark.usefixtures("seconds")
def test_a_bar_without_a_table_in_the_same_file_prints_the_end_of_epochs(build, make_batches):
    file = io.StringIO()
    callbacks = [ProgressBar(file, interval=1e-9), Metrics(), MetricsPrinter(io.StringIO())]
    build(callbacks, data=make_batches([2] * 12)).fit(1)
    assert file.getvalue().splitlines()[-1].startswith("epoch 1/1 training: 12/12 steps, loss ")


def titles(line):
    return re.split(" {2,}", line.strip())


@pytest.mark.filterwarnings("ignore:`fit` does not compute `accuracy`:UserWarning")
def test_the_header_has_the_phases_that_have_data_and_the_metrics_that_callbacks_provide(build, make_batches):
    both = make_batches([2]), make_batches([2])
    runner = InferenceRunner(make_batches([2]), ScalarStats("loss"), name="test")
    callbacks = [every(runner, epochs=2), Metrics(Metric(accuracy, phase=ValidationPhase))]
    texts = []
    for data in (both, both[0]):
        file = io.StringIO()
        build([*callbacks, every(MetricsPrinter(file), epochs=1)], data=data).fit(3)
        texts.append([titles(line) for line in file.getvalue().splitlines()])
    assert texts[0][0] == ["epoch", "train loss", "valid loss", "valid accuracy", "test loss", "time"]
    assert texts[1][0] == ["epoch", "train loss", "test loss", "time"]
    for table, tested in zip(texts, (4, 2), strict=True):
        assert len(table) == 4  # one header
        assert [row[tested] == "-" for row in table[1:]] == [True, False, True]  # only at epoch 2


def test_the_header_has_no_metrics_of_other_callbacks_for_the_data_of_a_runner(build, make_batches):
    runner = InferenceRunner(make_batches([2]), ScalarStats("loss"), name="test")
    build([Metrics(accuracy), runner, MetricsPrinter(file := io.StringIO())], data=make_batches([2])).fit(1)
    header, row = (titles(line) for line in file.getvalue().splitlines())
    assert header == ["epoch", "train loss", "train accuracy", "test loss", "time"]
    assert "-" not in row


class Extra(Callback):
    """Writes a metric from an epoch on, without saying so beforehand."""

    def __init__(self, first):
        self.first = first

    def runafter(self):
        return (Metrics,)

    def stateaccess(self):
        return {"cbstate": {"metrics_epoch": Append()}}

    @on
    def add(self, event: EpochEnd, phase: AbstractTrainingPhase, learner):
        if learner.progress.epoch >= self.first:
            learner.cbstate.metrics_epoch.entry(phase).add("extra", learner.progress.epoch, 1.5)


def test_undeclared_metrics_get_a_new_header(build):
    file = io.StringIO()
    build([Metrics(), Extra(2), MetricsPrinter(file)]).fit(3)
    lines = [titles(line) for line in file.getvalue().splitlines()]
    assert [len(line) for line in lines] == [3, 3, 4, 4, 4]
    assert lines[0] == ["epoch", "train loss", "time"]
    assert lines[2] == ["epoch", "train loss", "train extra", "time"]
    assert [line[2] for line in lines[3:]] == ["1.5000", "1.5000"]


def table_lines(columns, rows, *, epochs=0, width=None):
    file = io.StringIO()
    console = Console(file=file, force_terminal=width is not None, width=width or 80, no_color=True)
    table = open_table(console, of_fit=True, printed=0, epochs=epochs)
    table.begin(columns)
    for epoch, values in rows:
        table.add(epoch, dict(zip(columns, values, strict=True)))
    table.close()
    return re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue()).splitlines()


floats = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(st.tuples(floats, floats), min_size=1, max_size=12))
def test_columns_are_aligned_for_all_numbers(rows):
    lines = table_lines(["a", "train accuracy"], list(enumerate(rows, 1)), epochs=100_000)
    assert {len(line) for line in lines} == {len(lines[0])}
    ends = [match.end() for match in re.finditer(r"\S+( \S+)?", lines[0])]
    for line in lines:
        assert [match.end() for match in re.finditer(r"\S+( s)?(?= |$)", line)][-1] == ends[-1]
        assert all(line[end : end + 1] in (" ", "") and line[end - 1] != " " for end in ends)


def test_columns_are_aligned_at_epoch_10_and_beyond_the_expected_number():
    lines = table_lines(["train loss"], [(epoch, [0.5]) for epoch in (9, 10, 100, 99_999)])
    assert {line.index("0.5000") for line in lines[1:]} == {lines[0].index("train loss") + 4}
    lines = table_lines(["train loss"], [(99_999, [0.5]), (100_000, [0.5])])
    assert [titles(line)[0] for line in lines] == ["epoch", "99999", "epoch", "100000"]
    assert len(lines[2]) == len(lines[3]) == len(lines[0]) + 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0000"),
        (0.12345, "0.1235"),
        (-9999.0, "-9999.0000"),
        (12345.6, "1.235e+04"),
        (-1.2e-5, "-1.200e-05"),
        (-1.2e-105, "-1.20e-105"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_numbers_have_at_most_ten_characters(value, text):
    assert _number(value) == text
    assert len(text) <= 10


@pytest.mark.parametrize(("value", "text"), [(0.04, "0.0 s"), (9999.94, "9999.9 s"), (9999.96, "10000 s")])
def test_times_have_at_most_eight_characters(value, text):
    assert _seconds(value) == text


def test_a_narrow_terminal_continues_rows_on_the_next_line(monkeypatch):
    monkeypatch.setattr("fluxcb.callbacks.progress.epoch_table.time.monotonic", lambda: 0.0)
    columns = ["train loss", "train accuracy", "valid loss", "valid accuracy"]
    rows = [(9, [0.5, 0.25, 0.75, 1.0]), (10, [0.5, 0.25, 0.75, 1.0])]
    assert table_lines(columns, rows, width=50) == [
        "epoch  train loss  train accuracy  valid loss",
        "       valid accuracy      time",
        "    9      0.5000          0.2500      0.7500",
        "               1.0000     0.0 s",
        "   10      0.5000          0.2500      0.7500",
        "               1.0000     0.0 s",
    ]
    assert len(table_lines(columns, rows, width=120)) == 3
    assert len(table_lines(columns, rows)) == 3  # no terminal has no width


def test_a_number_below_a_title_longer_than_the_terminal_stays_in_its_line(monkeypatch):
    monkeypatch.setattr("fluxcb.callbacks.progress.epoch_table.time.monotonic", lambda: 0.0)
    lines = table_lines(["train loss", "m" * 50], [(1, [0.5, 0.25])], width=40)
    assert lines[-3:] == ["    1      0.5000", " " * 34 + "0.2500", "          0.0 s"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_bar_fits_into_the_terminal(build, width):
    file = io.StringIO()
    console = CONSOLES[id(file)] = Console(file=file, force_terminal=True, width=width, legacy_windows=False)
    build([ProgressBar(file, interval=1e-9)]).fit(100)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    drawn = [line.rstrip() for line in re.split(r"[\r\n]", text) if line.strip()]
    assert max(map(len, drawn)) <= width
    assert not [line for line in drawn if "…" in line]
    assert bool(re.search(r"[-\d]:[-\d]{2}:[-\d]{2}", text)) == (width >= 80)  # the remaining time
    del console


def test_a_custom_loop_with_a_hook_has_a_table():
    file = io.StringIO()
    with fluxcb.callbacks_as_hook([Metrics(), MetricsPrinter(file), ProgressBar(file)], {"loss": 0.0}) as hook:
        for epoch in (1, 2):
            hook.after_step(epoch, {"loss": 0.5})
            hook.after_epoch()
    lines = [titles(line) for line in file.getvalue().splitlines()]
    assert [line[:2] for line in lines] == [["epoch", "train loss"], ["1", "0.5000"], ["2", "0.5000"]]


def test_a_hook_has_no_data_to_write_or_to_name():
    for access in ({"data": Write()}, {"data": {"training": Read()}}):
        callback = fluxcb.callbacks.CustomCallback(lambda learner: None, StepEnd, access=access)
        with pytest.raises(fluxcb.DeclarationError, match=r"`data.*`, which belongs to the hand-written loop"):
            fluxcb.callbacks_as_hook([callback], {"loss": 0.0})


def test_the_rate_excludes_compilation(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("fluxcb.callbacks.progress.bars.time.monotonic", lambda: now[0])
    monkeypatch.setattr("fluxcb._run.program_runner.AHEAD", 1)
    monkeypatch.setattr("fluxcb._run.program_runner.LONGEST", 1)
    compile_program = fluxcb._run.programs.compile_program

    def slowly(*args, **kwargs):
        now[0] += 100.0
        return compile_program(*args, **kwargs)

    monkeypatch.setattr("fluxcb._run.programs.compile_program", slowly)

    class Tick(Callback):
        @on
        def tick(self, event: StepEnd, phase: TrainingPhase, learner):
            now[0] += 0.5

    learner = fluxcb.Learner.from_loss(
        {"w": jnp.ones(())},
        lambda params, batch, key: jnp.mean(params["w"] * batch),
        optax.sgd(0.1),
        data=[jnp.ones(2)] * 5,
        callbacks=[Tick(), ProgressBar(file := io.StringIO(), interval=1e-9)],
        default_callbacks=False,
    )
    learner.fit(1)
    assert file.getvalue().splitlines()[-1] == "epoch 1/1 training: 5/5 steps, loss 0.6000, 2 steps/s"
