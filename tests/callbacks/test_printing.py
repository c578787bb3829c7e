import io
import itertools
import re

import jax.numpy as jnp
import optax
import pytest
from rich.console import Console

import fluxcb
from fluxcb import Append, Callback, CancelFitting, DeclarationError, MissingStateError, PauseFitting, on
from fluxcb.callbacks import Checkpointer, Metrics, MetricsPrinter, ModelSummary, ProgressBar, accuracy
from fluxcb.callbacks.progress import bars
from fluxcb.events import FitBegin, StepEnd
from fluxcb.phases import TrainingPhase, ValidationPhase
from tests.changed_callbacks import changes_arguments


class StopIn(Callback):
    """Cancel the fit at the second step of an epoch."""

    def __init__(self, epoch):
        self.epoch = epoch

    def stateaccess(self):
        return {"control": Append()}

    @on
    def stop(self, event: StepEnd, phase: TrainingPhase, learner):
        if learner.progress.epoch == self.epoch and learner.progress.step_in_epoch == 2:
            raise CancelFitting("enough")


def rows(text):
    return [line.split() for line in text.splitlines()]


def test_a_row_has_training_and_validation_of_one_epoch(build, make_batches):
    file = io.StringIO()
    learner = build([Metrics(accuracy), MetricsPrinter(file)], data=(make_batches([4, 2]), make_batches([3], seed=1)))
    learner.fit(2)
    learner.fit(1)
    header = "epoch  train loss  train accuracy  valid loss  valid accuracy      time"
    values = learner.cbstate["metrics_epoch"]
    expected = []
    for epoch in (1, 2, 3):
        numbers = [
            values[phase].at(epoch)[name] for phase in ("training", "validation") for name in ("loss", "accuracy")
        ]
        expected.append([str(epoch), *(f"{number:.4f}" for number in numbers)])
    lines = file.getvalue().splitlines()
    assert [lines[0], lines[3]] == [header, header]
    assert [line.split()[:-2] for line in (lines[1], lines[2], lines[4])] == expected
    assert len(lines) == 5
    assert {len(line) for line in lines} == {len(header)}
    assert all(re.fullmatch(r".* \d+\.\d s", line) for line in (lines[1], lines[2], lines[4]))


def test_the_row_of_a_cancelled_epoch_is_not_lost(build, make_batches):
    file = io.StringIO()
    learner = build([Metrics(), MetricsPrinter(file), StopIn(2)], data=(make_batches([4, 2, 2]), make_batches([3])))
    learner.fit(5)
    values = learner.cbstate["metrics_epoch"]
    first, second = values["training"].at(1)["loss"], values["training"].at(2)["loss"]
    printed = rows(file.getvalue())
    assert printed[0] == ["epoch", "train", "loss", "valid", "loss", "time"]
    assert printed[1][:3] == ["1", f"{first:.4f}", f"{values['validation'].at(1)['loss']:.4f}"]
    assert printed[2][:3] == ["2", f"{second:.4f}", "-"]  # there was no validation
    assert len(printed) == 3


def test_every_second_epoch_and_the_last_one_are_printed(build):
    file = io.StringIO()
    build([Metrics(), fluxcb.every(MetricsPrinter(file), epochs=2)]).fit(5)
    assert [row[0] for row in rows(file.getvalue())] == ["epoch", "2", "4", "5"]


def test_a_finished_run_that_is_resumed_prints_no_header(build, tmp_path):
    def resumed(epochs):
        file = io.StringIO()
        build([Metrics(), MetricsPrinter(file), Checkpointer(tmp_path)]).fit(epochs, resume=True)
        return [line.split("  ")[0].strip() or line.split()[0] for line in file.getvalue().splitlines()]

    assert resumed(2) == ["epoch", "1", "2"]
    assert resumed(2) == []
    assert resumed(3) == ["training resumes after epoch 2, step 6", "epoch", "3"]


class StopsIn(Callback):
    """Pause the fit at the first step of a phase in epoch 2."""

    def __init__(self, phase):
        self.phase = phase

    @on
    def stop(self, event: StepEnd, phase, learner):
        if learner.progress.epoch == 2 and phase.name == self.phase:
            raise PauseFitting("later")

    def stateaccess(self):
        return {"control": Append()}


@pytest.mark.parametrize("phase", ["training", "validation"])
@changes_arguments("callbacks.StopsIn.phase")
def test_a_run_that_resumes_within_an_epoch_prints_its_row(phase, build, make_batches, tmp_path):
    def resumed(phase):
        file = io.StringIO()
        data = make_batches([2, 2]), make_batches([2, 2], seed=1)
        learner = build([Metrics(), MetricsPrinter(file), Checkpointer(tmp_path), StopsIn(phase)], data=data)
        learner.fit(3, resume=True)
        return learner, file.getvalue()

    _, first = resumed(phase)
    assert {row[0]: row[2] for row in rows(first)}["2"] == "-"
    learner, text = resumed("none")
    steps = 3 if phase == "training" else 4  # an epoch has two steps of training
    assert text.startswith(f"training resumes in epoch 2, step {steps}\n")
    second = {row[0]: row[1:3] for row in rows(text)[1:]}
    assert list(second) == ["epoch", "2", "3"]
    epochs = learner.cbstate["metrics_epoch"]
    assert second["2"] == [f"{epochs[name].at(2)['loss']:.4f}" for name in ("training", "validation")]


class Begins(Callback):
    """Record whether steps remain when the fit begins."""

    def __init__(self):
        self.complete = []

    def state_dict(self):
        return {}  # a resumed run records from its start

    @on
    def begin_fit(self, event: FitBegin, phase: TrainingPhase, learner):
        self.complete.append(event.complete)


@pytest.mark.parametrize("length", [{"steps": 6}, {"steps": 5}, {"epochs": 9}], ids=["epochs", "steps", "stopped"])
def test_a_run_without_further_steps_prints_no_header(length, build, tmp_path):
    begins = Begins()
    last = StopIn(2) if "epochs" in length else StopIn(9)

    def resumed(**length):
        file = io.StringIO()
        build([Metrics(), MetricsPrinter(file), Checkpointer(tmp_path), begins, last]).fit(**length, resume=True)
        return [row[0] for row in rows(file.getvalue())]

    assert resumed(**length) == ["epoch", "1", "2"]
    assert resumed(**length) == []
    assert begins.complete == [False, True]
    if "steps" in length:
        assert resumed(steps=9)[:2] == ["training", "epoch"]  # it says where it resumes
        assert begins.complete == [False, True, False]


def test_hand_written_loops_also_print(build):
    file = io.StringIO()
    learner = build([Metrics(), MetricsPrinter(file), ProgressBar(file)])
    for _ in range(2):
        learner.run_epoch(TrainingPhase())
        learner.trigger()
    values = learner.cbstate["metrics_epoch"]["training"]
    assert [row[:2] for row in rows(file.getvalue())] == [
        ["epoch", "1"],  # compiling
        ["epoch", "train"],
        ["1", f"{values.at(1)['loss']:.4f}"],
        ["2", f"{values.at(2)['loss']:.4f}"],
    ]


def test_the_printer_requires_metrics(build):
    with pytest.raises(MissingStateError, match=r"reads `cbstate\.metrics_epoch`, which no callback creates"):
        build([MetricsPrinter()])


def test_plain_progress_has_a_line_per_training_epoch(build, make_batches):
    file = io.StringIO()
    build([ProgressBar(file, interval=1e-9)], data=(make_batches([4, 2]), make_batches([3]))).fit(2)
    lines = file.getvalue().splitlines()
    assert lines[0::2] == ["epoch 1/2 training: compiling the step", "epoch 1/2 validation: compiling the step"]
    for line, epoch in zip(lines[1::2], (1, 2), strict=True):
        assert re.fullmatch(rf"epoch {epoch}/2 training: 2/2 steps, loss \d\.\d{{4}}, [\d,.]+ steps/s", line)


def descending(file, **options):
    """Return a Learner whose losses are 1.0, 0.9, 0.8 and so on: the loss is w, and its gradient 1."""
    return fluxcb.Learner.from_loss(
        {"w": jnp.ones(())},
        lambda params, batch, key: jnp.mean(params["w"] * batch),
        optax.sgd(0.1),
        callbacks=[ProgressBar(file, interval=3600)],
        default_callbacks=False,
        **options,
    )


class Unsized:
    def __iter__(self):
        yield from [jnp.ones(2)] * 3


@pytest.mark.parametrize("data", [[jnp.ones(2)] * 3, Unsized()], ids=["list", "unsized"])
@pytest.mark.parametrize("steps_per_call", [1, 2, "auto"])
def test_epochs_shorter_than_the_interval_show_their_last_loss(data, steps_per_call):
    learner = descending(file := io.StringIO(), data=data, steps_per_call=steps_per_call)
    learner.fit(2)
    assert re.findall(r"(epoch \d)/2 training: 3\S* steps, loss (\S+), ", file.getvalue()) == [
        ("epoch 1", "0.8000"),
        ("epoch 2", "0.5000"),
    ]
    assert len(file.getvalue().splitlines()) == 3  # the first says that the step is compiled
    assert "ended by  nothing" in learner.explain_windows()


def test_short_epochs_have_a_loss_in_the_bar(terminal):
    descending(terminal, data=[jnp.ones(2)] * 3).fit(2)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    drawn = re.findall(r"epoch (\d)/2 training \S+ +\d/3 (?:loss |(?=compiling))?(\S+)?", text)
    assert drawn[0] == ("1", "compiling")  # when the epoch begins; a loss follows as soon as there is one
    drawn = [(epoch, loss) for epoch, loss in drawn if loss != "compiling"]
    assert {epoch for epoch, loss in drawn if loss} == {"1", "2"}
    # The second epoch, too short for a drawing of its own, begins with what the first has come to.
    assert {loss for epoch, loss in drawn if epoch == "2"} == {"0.8000"}


def test_slow_epochs_print_intermediate_lines(build, make_batches, monkeypatch):
    file, clock = io.StringIO(), [0.0]

    def ticking():
        clock[0] += 1.0
        return clock[0]

    monkeypatch.setattr("fluxcb.callbacks.progress.bars.time.monotonic", ticking)
    monkeypatch.setattr("fluxcb.callbacks.progress.bars._PLAIN_SECONDS", 10.0)
    monkeypatch.setattr("fluxcb._run.program_runner.AHEAD", 1)  # the bar looks at the ends of windows
    monkeypatch.setattr("fluxcb._run.program_runner.LONGEST", 1)
    build([ProgressBar(file, interval=1e-9)], data=(make_batches([2] * 12), make_batches([2] * 12))).fit(1)
    titles = [line.split(", ")[0] for line in file.getvalue().splitlines()]
    assert titles[-1] == "epoch 1/1 validation: 12/12 steps"
    assert "epoch 1/1 training: 12/12 steps" in titles
    assert any(re.fullmatch(r"epoch 1/1 training: [1-9]/12 steps", title) for title in titles)


def test_the_bar_is_live_on_a_terminal_and_closed_at_the_end(build, terminal):
    bar = ProgressBar(terminal, interval=1e-9)
    shown = []

    class Look(Callback):
        @on
        def look(self, event: StepEnd, phase: TrainingPhase, learner):
            shown.append(bar._display._progress.live.is_started)

    build([bar, Look(), Metrics(), MetricsPrinter(terminal)]).fit(2)
    assert shown == [True] * 6
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert re.search(r"epoch 1/2 training .* [1-3]/3 loss \d\.\d{4} [\d,.]+ steps/s", text)
    assert re.search(r"epoch  train loss +time *\n", text)
    assert terminal.getvalue().endswith("\x1b[2K")  # the bar is gone, what was printed above it stays
    assert bar._display is None


def test_the_bar_closes_after_an_error(build, terminal):
    class Fail(Callback):
        @on
        def fail(self, event: StepEnd, phase: TrainingPhase, learner):
            raise RuntimeError("no")

    bar = ProgressBar(terminal)
    with pytest.raises(RuntimeError, match="no"):
        build([bar, Fail()]).fit(1)
    assert bar._display is None
    assert "\x1b[?25h" in terminal.getvalue()  # the cursor is back


def test_a_phase_without_a_loss_also_has_a_bar(build, make_batches):
    class Outputs(fluxcb.phases.Phase):
        name = "outputs"
        provides = {fluxcb.events.LossBegin: ("outputs",)}

        def step(self, learner, emit):
            learner.step.outputs = learner.forward(learner.params, learner.step.batch[0])

    file = io.StringIO()
    data = {"training": make_batches([2]), "outputs": make_batches([2, 2])}
    learner = build([ProgressBar(file, interval=1e-9)], data=data, phases=(TrainingPhase(), Outputs()))
    learner.fit(1)
    assert learner.run_epoch(Outputs()) == 2
    lines = file.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "epoch 1/1 training: compiling the step",
        "epoch 1/1 training: 1/1 steps",
        "epoch 1/1 outputs: compiling the step",
    ]


@pytest.mark.parametrize("interval", [0, -1.0, float("inf"), float("nan"), True, "0.1"])
def test_the_interval_must_be_positive(interval):
    with pytest.raises(DeclarationError) as caught:
        ProgressBar(interval=interval)
    assert str(caught.value).splitlines()[0] == (
        f"`interval` of `ProgressBar` (seconds) must be a number above 0, not {interval!r}."
    )


def test_the_summary_counts_arrays_and_parameters(build):
    file = io.StringIO()
    learner = fluxcb.Learner.from_loss(
        {"a": jnp.zeros((30, 50)), "b": [jnp.zeros(7, jnp.bfloat16), jnp.zeros(())]},
        lambda params, batch, key: jnp.sum(params["b"][1]),
        optax.sgd(0.1),
        data=[jnp.ones(1)],
        callbacks=[ModelSummary(file)],
        default_callbacks=False,
    )
    learner.fit(1)
    assert file.getvalue() == (
        "parameter      shape     dtype  count  bytes\n"
        "--------------------------------------------\n"
        "a          (30 x 50)   float32  1,500  6,000\n"
        "b/0              (7)  bfloat16      7     14\n"
        "b/1               ()   float32      1      4\n"
        "--------------------------------------------\n"
        "3 arrays                        1,508  6,018\n"
    )


def test_the_summary_has_colors_on_a_terminal(build, terminal):
    build([ModelSummary(terminal)]).fit(1)
    assert terminal.getvalue().startswith("\x1b[1mparameter")


def test_a_separate_validation_is_shown(build, make_batches):
    file = io.StringIO()
    learner = build([ProgressBar(file), Metrics()], data=(make_batches([2]), make_batches([2])))
    learner.run_epoch(ValidationPhase())
    assert file.getvalue() == "validation: compiling the step\n"  # a short one, and no training
    assert learner.cbstate["metrics_epoch"]["validation"].at(0).keys() == {"loss"}


@pytest.mark.parametrize("width", [30, 40, 50, 60, 72, 80, 120])
@pytest.mark.parametrize(
    ("title", "total"), [("epoch 1/2 training", 45), ("epoch 100/200 validation", 12345), ("epoch 3 training", 0)]
)
def test_bar_keeps_count_at_any_width(monkeypatch, width, title, total):
    console = Console(file=(file := io.StringIO()), width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(bars.time, "monotonic", itertools.count(step=0.5).__next__)
    bar = bars.open_display(console, of_fit=True, interval=0.0, rows_follow=False)
    bar.begin("training", title, total, 0, compiling=True)
    bar.update(1, 2.5)
    done = max(25, total // 2)  # without colors, rich draws only the finished part of the bar
    bar.update(done, 1.4862)
    line = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", file.getvalue()).replace("\r", "\n").splitlines()[-1]
    bar.close()
    assert len(line.rstrip()) <= width
    count = f"{done:{len(str(total))}}/{total or '?'}"
    shown = re.fullmatch(
        rf"(.+?) ([━╸╺ ]*[━╸╺][━╸╺ ]*) {re.escape(count)}(?: (loss 1\.4862))?(?: (\d+ steps/s))?.*", line
    )
    assert shown is not None, line
    assert title.startswith(shown[1].rstrip())
    assert len(shown[2]) >= 4
    assert shown[1].rstrip() == title or (shown[3] is None and len(shown[2]) == 4)
    assert shown[3] or not shown[4]  # the rate goes before the loss
    if width >= 60 and total == 45:
        assert shown[3]
        assert shown[4]
