"""Reading and drawing the logs of runs."""

import io
import json
import math
import re
from xml.etree import ElementTree

import pytest
from rich.console import Console

from fluxcb import DataError, DeclarationError
from fluxcb._tools.plotting import plot
from fluxcb._tools.runs import read_run
from fluxcb.callbacks import ControlFile, CustomCallback, LearningRate, Metrics, RunControl
from fluxcb.events import EpochBegin
from fluxcb.testing import testlearner

# --- reading --------------------------------------------------------------------------------------------------------


def test_history_of_demo(tmp_path):
    (tmp_path / "history.json").write_text(
        json.dumps(
            {
                "steps": [1, 2, 3, 4],
                "loss": [4.0, 3.0, 2.0, 1.0],
                "epochs": [
                    {"epoch": 1, "learning_rate": 0.1, "training": {"loss": 3.5}, "validation": {"loss": 3.0}},
                    {"epoch": 2, "learning_rate": 0.2, "training": {"loss": 1.5}, "validation": {"loss": 2.0}},
                ],
            }
        )
    )
    # Epochs end after steps 2 and 4; the training's loss is known for each step already.
    assert read_run(tmp_path) == {
        "training/loss": [(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)],
        "learning_rate": [(2.0, 0.1), (4.0, 0.2)],
        "validation/loss": [(2.0, 3.0), (4.0, 2.0)],
    }


def test_history_of_fit(tmp_path):
    history = testlearner(Metrics()).fit(3)
    (tmp_path / "history.json").write_text(json.dumps(history.to_dict()))
    curves = read_run(tmp_path)
    assert set(curves) == {"training/loss", "validation/loss", "training/step/loss"}
    assert curves["training/step/loss"] == history.per_step["training"]["loss"]
    # The three epochs of testlearner have four steps each.
    assert curves["validation/loss"] == [(4 * n, value) for n, value in history.per_epoch["validation"]["loss"]]


def test_json_lines(tmp_path):
    lines = [
        {"step": 10, "loss": 2.0, "time": 1.5},
        {"step": 20, "loss": 1.0, "validation": {"loss": 3.0}, "note": "half"},
        {"step": 30, "loss": math.nan},
        {"message": "no counter"},
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    curves = read_run(tmp_path)
    assert repr(curves) == "{'loss': [(10.0, 2.0), (20.0, 1.0), (30.0, nan)], 'validation/loss': [(20.0, 3.0)]}"


def test_counter_is_finite(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": NaN, "epoch": 1, "loss": 2}\n{"step": Infinity, "loss": 1}\n')
    assert read_run(tmp_path) == {"loss": [(1.0, 2.0)]}


def test_commands_of_a_run_are_no_curves(tmp_path):
    control = RunControl(tmp_path, wait=0)
    set_rate = CustomCallback(lambda *_: control.set("learning_rate", 0.5), EpochBegin)
    testlearner(ControlFile(tmp_path, [LearningRate]), set_rate).fit(2)
    assert [path.name for path in tmp_path.iterdir()] == ["control-answers.jsonl"]
    with pytest.raises(DataError, match="contains no run"):
        read_run(tmp_path)


def test_csv(tmp_path):
    file = tmp_path / "log.csv"
    file.write_text("epoch,loss,accuracy\n1,0.5,\n2,0.25,0.75\n")
    assert read_run(file) == {"loss": [(1, 0.5), (2, 0.25)], "accuracy": [(2, 0.75)]}


def test_several_files_of_one_run(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"step": 1, "loss": 2}\n')
    (tmp_path / "b.csv").write_text("step,accuracy\n1,0.5\n")
    assert read_run(tmp_path) == {"loss": [(1, 2)], "accuracy": [(1, 0.5)]}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", r"a\.json cannot be read: Expecting property name"),
        ("a.jsonl", '{"step": 1}\nx\n', r"a\.jsonl cannot be read: Expecting value"),
        ("a.csv", "step\n1\n", r"a\.csv has no values to draw\."),
        ("a.json", "3", r"a\.json has no values to draw\."),
        (
            "a.json",
            '{"per_epoch": {"training": {"loss": {"epochs": [1]}}}}',
            r"a\.json cannot be read: its `per_epoch` and",
        ),
        ("a.json", '{"steps": [], "epochs": []}', r"a\.json has no values to draw\."),
    ],
)
def test_invalid_files_raise(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        read_run(tmp_path / name)


def test_missing_run_raises(tmp_path):
    with pytest.raises(DataError, match=rf"^There is no run at {re.escape(str(tmp_path / 'x'))}\."):
        read_run(tmp_path / "x")
    with pytest.raises(
        DataError,
        match=r"contains no run\.\n  why:   a run contains one of the files history\.json, \*\.jsonl, \*\.csv",
    ):
        read_run(tmp_path)


# --- drawing --------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    (tmp_path / "log.jsonl").write_text(
        "".join(
            json.dumps({"step": s, "training": {"loss": 8 / s, "accuracy": s / 8}, "validation": {"loss": 9 / s}})
            + "\n"
            for s in range(1, 9)
        )
    )
    return tmp_path


def shown(run, *names, out=None, colour=None):
    console = Console(file=(file := io.StringIO()), width=60, color_system=colour, force_terminal=colour is not None)
    plot(run, names, out, console)
    return file.getvalue()


def test_losses_are_drawn_by_default(run):
    assert shown(run).splitlines()[0] == "o training/loss  last 1   x validation/loss  last 1.125"
    assert [line.split()[1] for line in shown(run, "accuracy").splitlines() if "■" in line] == ["training/accuracy"]
    assert [line.split()[1] for line in shown(run, "val*").splitlines() if "■" in line] == ["validation/loss"]


@pytest.mark.parametrize("colour", [None, "truecolor"])
def test_training_and_validation_share_chart(run, colour):
    assert shown(run, colour=colour).count("└") == 1


def test_each_quantity_has_chart_with_same_steps(tmp_path):
    rows = [{"step": s, "training/step/loss": 1 / s, "training/step/accuracy": s / 9} for s in range(1, 9)]
    rows += [{"step": s, "validation/loss": 2 / s, "learning_rate": 0.1} for s in (4, 12)]
    (tmp_path / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    lines = shown(tmp_path, "*").splitlines()
    assert [line for line in lines if "last" in line] == [
        "o training/step/loss  last 0.125",
        "x validation/loss  last 0.1667",
        "■ training/step/accuracy  last 0.8889",
        "■ learning_rate  last 0.1",
    ]
    assert [line.split() for line in lines if "step " in line and "last" not in line] == [["1", "step", "12"]] * 3
    shown(tmp_path, "*", out=tmp_path / "all.svg")
    root = ElementTree.parse(tmp_path / "all.svg").getroot()
    texts = [text.text for text in root.findall("{http://www.w3.org/2000/svg}text")]
    assert texts.count("step") == 3
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    ends = [[float(point.split(",")[0]) for point in line.get("points").split()] for line in lines]
    assert [len(xs) for xs in ends] == [8, 2, 8, 2]
    assert ends[0] == ends[2]
    assert ends[1] == ends[3] == [ends[0][3], max(map(max, ends))]  # step 4 is below step 4


def test_svg_file(run, tmp_path):
    out = tmp_path / "loss.svg"
    assert shown(run, out=out).replace("\n", "") == f"wrote {out}"
    lines = ElementTree.parse(out).getroot().findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.get("points").split()) for line in lines] == [8, 8]


def test_wrong_names_and_files_raise(run):
    with pytest.raises(DataError, match=r"^The run has no values 'acuracy'\. Did you mean `accuracy`\?"):
        shown(run, "acuracy")
    with pytest.raises(DeclarationError, match=r"^Plots can only be saved as SVG files, not as .*x\.png\."):
        shown(run, out=run / "x.png")


@pytest.mark.parametrize("word", ["NaN", '"NaN"'])  # `History.to_dict` has numbers, and `JSONLinesBackend` has strings
def test_values_that_are_not_finite_leave_gap(tmp_path, word):
    losses = ["2", "1", word, "4", "3", word]
    (tmp_path / "log.jsonl").write_text("".join(f'{{"step": {n}, "loss": {loss}}}\n' for n, loss in enumerate(losses)))
    head, *_, axis = shown(tmp_path).splitlines()
    assert head == "■ loss  last nan"
    assert axis.split() == ["0", "step", "5"]
    shown(tmp_path, out=tmp_path / "loss.svg")
    root = ElementTree.parse(tmp_path / "loss.svg").getroot()
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.get("points").split()) for line in lines] == [2, 2]
    right = max(float(line.get("x2")) for line in root.findall("{http://www.w3.org/2000/svg}line"))
    assert float(lines[-1].get("points").split()[-1].split(",")[0]) < right  # step 4 of 5


def test_curve_without_finite_value_beside_others(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 2, "accuracy": NaN, "val_loss": Infinity}\n')
    legends = [line for line in shown(tmp_path, "*").splitlines() if "last" in line]
    assert legends == ["o loss  last 2   x val_loss  last inf", "■ accuracy  last nan"]


def test_run_without_finite_value_raises(tmp_path):
    rows = [
        '{"step": 1, "loss": NaN, "val_loss": Infinity, "a_loss": NaN}',
        '{"step": 2, "loss": NaN, "a_loss": -Infinity}',
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(rows))
    for out in (None, tmp_path / "loss.svg"):
        with pytest.raises(DataError) as error:
            shown(tmp_path, out=out)
        assert str(error.value) == (
            "The run has no finite value to draw.\n"
            "  where: `loss` has 2 values, NaN\n"
            "         `val_loss` has 1 value, infinite\n"
            "         `a_loss` has 2 values, NaN or infinite\n"
            "  why:   only finite numbers have a place on an axis"
        )
