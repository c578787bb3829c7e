"""The output of a fit below a notebook cell, and the messages that a kernel sends for it."""

import re

import pytest

nbformat = pytest.importorskip("nbformat")
NotebookClient = pytest.importorskip("nbclient").NotebookClient

pytestmark = pytest.mark.integration

# Every look at the clock takes a second, so that nothing depends on how fast the kernel is.
SETUP = """
import contextlib, io, itertools, types
import fluxcb
from fluxcb.callbacks import CustomCallback, MetricsPrinter, Metrics, ModelSummary, ProgressBar
from fluxcb.callbacks.progress import bars, cell_output, console, epoch_table
from fluxcb.events import StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner
clock = itertools.count()
for module in (bars, cell_output, epoch_table):
    module.time = types.SimpleNamespace(monotonic=lambda: float(next(clock)))
"""

CELLS = {
    "fit": """
        def speak(learner):
            if learner.progress.step == 2:
                print("a handler speaks")
        learner = testlearner(CustomCallback(speak, StepEnd, TrainingPhase), default_callbacks=True)
        history = learner.fit(11)
    """,
    "twice": "history = [learner.fit(1), learner.fit(1)]",
    "bar only": "history = testlearner(ProgressBar(), validation_batches=0).fit(2)",
    "by hand": """
        learner = testlearner(default_callbacks=True)
        for _ in range(2):
            learner.run_epoch(TrainingPhase())
            learner.trigger()
    """,
    "by hand, continued": """
        learner.run_epoch(TrainingPhase())
        learner.trigger()
    """,
    "threads": "history = testlearner(default_callbacks=True, executor=fluxcb.ThreadExecutor(2)).fit(2)",
    "an error": """
        def fail(learner):
            raise RuntimeError("no")
        with contextlib.suppress(RuntimeError):
            testlearner(CustomCallback(fail, StepEnd, TrainingPhase), default_callbacks=True).fit(2)
    """,
    "many epochs": """
        epoch_table._LIVE_ROWS, epoch_table._STORED_ROWS = 3, 10
        history = testlearner(Metrics(), MetricsPrinter(), validation_batches=0).fit(12)
    """,
    "redirected": """
        with contextlib.redirect_stdout(io.StringIO()) as text:
            testlearner(default_callbacks=True).fit(1)
        print(text.getvalue())
    """,
    "a file": """
        testlearner(Metrics(), MetricsPrinter(file := io.StringIO()), ProgressBar(file), validation_batches=0).fit(1)
        print(file.getvalue())
    """,
    "text": """
        history = testlearner(ModelSummary(), validation_batches=0).fit(1)
        console.show_block(console.console_for(None), ["one", "two"], "bold")
    """,
}


class Recorder(NotebookClient):
    """Executes a notebook, and keeps what the kernel sends for each cell."""

    def process_message(self, message, cell, index):
        kind = message["msg_type"]
        if kind in ("display_data", "update_display_data", "stream", "clear_output"):
            self.sent.setdefault(index, []).append((kind, message["content"]))
        return super().process_message(message, cell, index)


@pytest.fixture(scope="module")
def executed():
    """Return, by the names above, a cell's messages, and the outputs that the notebook stores."""
    sources = [SETUP, *(re.sub(r"(?m)^        ", "", source).strip() for source in CELLS.values())]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    client = Recorder(notebook, timeout=300, kernel_name="python3", coalesce_streams=True)
    client.sent = {}
    client.execute()
    assert not notebook.cells[0].outputs
    return {name: (client.sent.get(index, []), notebook.cells[index].outputs) for index, name in enumerate(CELLS, 1)}


def shown(output):
    """Return an output of a stored notebook as text."""
    return output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"]


def table_rows(output):
    return [re.split(" {2,}", line.strip()) for line in shown(output).splitlines()]


def epochs_of(outputs):
    """Return the first column of each table among the outputs."""
    tables = [output for output in outputs if output["output_type"] == "display_data"]
    return [[row[0] for row in table_rows(table)] for table in tables]


def test_a_fit_is_one_output_that_is_updated_in_place(executed):
    sent, outputs = executed["fit"]
    kinds = [kind for kind, _ in sent]
    assert kinds[0] == "display_data"
    assert set(kinds[1:]) == {"update_display_data", "stream"}
    displayed = [content for kind, content in sent if kind != "stream"]
    assert len({content["transient"]["display_id"] for content in displayed}) == 1
    assert len(displayed) > 11  # a row, and the bar
    assert [output["output_type"] for output in outputs] == ["display_data", "stream"]
    assert shown(outputs[1]).startswith("a handler speaks\nTraining finished after epoch 11, step 44 (")


def test_the_bar_shows_the_running_phase_and_disappears(executed):
    sent, outputs = executed["fit"]
    drawn = [content["data"] for kind, content in sent if kind != "stream"]
    bars = [text.splitlines()[-1] for text in (data["text/plain"] for data in drawn) if not text.endswith(" s")]
    # The header comes first.
    assert bars[:2] == ["epoch  train loss  valid loss      time", "epoch 1/11 training  0/4  compiling"]
    assert re.fullmatch(r"epoch 1/11 training  [1-4]/4  loss \d\.\d{4}(  \S+ steps/s  0:00:\d\d)?", bars[2])
    assert "epoch 1/11 validation  0/2  compiling" in bars
    assert re.search(r"epoch 11/11 validation  2/2  loss \d\.\d{4}  \S+ steps/s  0:00:00", "\n".join(bars))
    assert all("<progress " in data["text/html"] for data in drawn[1:-2])
    assert "<progress" not in outputs[0]["data"]["text/html"]
    compiling = next(data["text/html"] for data in drawn if "compiling" in data["text/html"])
    assert '<progress max="4" style' in compiling  # without a value the front end animates it


def test_the_table_grows_with_aligned_columns(executed):
    _, outputs = executed["fit"]
    rows = table_rows(outputs[0])
    assert rows[0] == ["epoch", "train loss", "valid loss", "time"]
    assert [row[0] for row in rows[1:]] == [str(epoch) for epoch in range(1, 12)]
    assert len({len(line) for line in shown(outputs[0]).splitlines()}) == 1
    html = outputs[0]["data"]["text/html"]
    assert re.findall(r"<th>(.*?)</th>", html) == rows[0]
    assert [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)] == rows[1:]
    assert "<script" not in html


def test_each_fit_has_its_own_output(executed):
    _, outputs = executed["twice"]
    assert epochs_of(outputs) == [["epoch", "12"], ["epoch", "13"]]


def test_a_bar_without_a_table_leaves_its_last_line(executed):
    _, outputs = executed["bar only"]
    assert len(outputs) == 1
    assert re.fullmatch(r"epoch 2/2 training: 4/4 steps, loss \d\.\d{4}, \S+ steps/s", shown(outputs[0]))


def test_a_hand_written_loop_has_a_table_in_each_cell(executed):
    for cell, epochs in (("by hand", ["1", "2"]), ("by hand, continued", ["3"])):
        _, outputs = executed[cell]
        assert epochs_of(outputs) == [["epoch", *epochs]]


def test_threads_share_the_output(executed):
    _, outputs = executed["threads"]
    assert epochs_of(outputs) == [["epoch", "1", "2"]]


def test_the_bar_disappears_after_an_error(executed):
    _, outputs = executed["an error"]
    assert outputs[0]["data"]["text/plain"] == "epoch  train loss  valid loss      time"
    assert "<progress" not in outputs[0]["data"]["text/html"]


def test_long_tables_are_shortened(executed):
    sent, outputs = executed["many epochs"]
    live = [content["data"] for _, content in sent][:-1]
    assert max(data["text/html"].count("<tr>") for data in live) == 4  # and a line about those left out
    rows = shown(outputs[0]).splitlines()
    assert rows[1] == "2 earlier epochs are in learner.history"
    assert [row.split()[0] for row in rows[2:]] == [str(epoch) for epoch in range(3, 13)]


def test_redirected_output_is_text(executed):
    _, outputs = executed["redirected"]
    lines = shown(outputs[0]).splitlines()
    assert lines[0] == "epoch  train loss  valid loss      time"
    assert lines[1:3] == [f"epoch 1/1 {name}: compiling the step" for name in ("training", "validation")]
    assert lines[3].startswith("    1  ")


def test_a_file_gets_plain_text(executed):
    sent, _ = executed["a file"]
    assert [kind for kind, _ in sent] == ["stream"]
    lines = sent[0][1]["text"].splitlines()
    assert lines[:2] == ["epoch  train loss      time", "epoch 1/1 training: compiling the step"]
    assert lines[2].startswith("    1  ")
    assert "\x1b" not in sent[0][1]["text"]


def test_lines_are_one_output(executed):
    _, outputs = executed["text"]
    assert [output["output_type"] for output in outputs] == ["stream"]
    lines = shown(outputs[0]).splitlines()
    assert [lines[0].split()[0], lines[-3:]] == ["parameter", ["2 arrays                       2      8", "one", "two"]]
