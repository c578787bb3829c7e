"""The command line, in a separate process."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import fluxcb
from fluxcb._tools.cli import main

ROOT = Path(__file__).resolve().parents[2]


def cli(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "fluxcb", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", "UV_RUN_RECURSION_DEPTH": "1"},
        capture_output=True,
        text=True,
    )


def test_version(tmp_path):
    run = cli(tmp_path, "--version")
    assert (run.returncode, run.stdout) == (0, f"fluxcb {fluxcb.__version__}\n"), run.stderr


def test_wrong_usage(tmp_path):
    assert cli(tmp_path).returncode == 2


_NUMBER = "must be a whole number of at least 1, not"
_STEPS = "fluxcb replay: error: argument --steps: must be FIRST:LAST with 1 <= FIRST <= LAST, not"


@pytest.mark.parametrize(
    ("arguments", "last_line"),
    [
        ("ablate", "fluxcb ablate: error: the following arguments are required: TARGET"),
        ("ablate a:b", "fluxcb ablate: error: one of the arguments --epochs --steps is required"),
        ("ablate a:b --steps 0", f"fluxcb ablate: error: argument --steps: {_NUMBER} '0'"),
        ("demo --epochs 0", f"fluxcb demo: error: argument --epochs: {_NUMBER} '0'"),
        ("demo --epochs 1.5", f"fluxcb demo: error: argument --epochs: {_NUMBER} '1.5'"),
        ("sweep --epochs -1", f"fluxcb sweep: error: argument --epochs: {_NUMBER} '-1'"),
        ("replay runs/1 --steps 8:5", f"{_STEPS} '8:5'; write e.g. --steps 800:820"),
        ("replay runs/1 --steps 0:5", f"{_STEPS} '0:5'; write e.g. --steps 800:820"),
        ("replay runs/1 --steps 7", f"{_STEPS} '7'; write e.g. --steps 800:820"),
        ("replay runs/1 --bad-step 0", f"fluxcb replay: error: argument --bad-step: {_NUMBER} '0'"),
    ],
)
def test_wrong_arguments_are_wrong_usage(arguments, last_line, capsys):
    with pytest.raises(SystemExit) as raised:
        main(arguments.split())
    assert raised.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == last_line


def test_unusable_output_is_wrong_usage(tmp_path):
    run = cli(tmp_path, "plot", "runs", "-o", "missing/curves.svg")
    assert (run.returncode, run.stderr) == (
        2,
        "`--out` is missing/curves.svg, but the folder missing does not exist.\n  fix:   create the folder first\n",
    )
    (tmp_path / "file").touch()
    run = cli(tmp_path, "demo", "--out", "file")
    assert (run.returncode, run.stderr) == (
        2,
        "`--out` is the file file.\n  fix:   name a folder, in which the run gets a folder of its own\n",
    )
    run = cli(tmp_path, "plot")
    assert (run.returncode, run.stderr.splitlines()[-1]) == (
        2,
        "fluxcb plot: error: the following arguments are required: RUN",
    )


def test_demo(tmp_path):
    epochs = 5
    run = cli(tmp_path, "demo", "--epochs", str(epochs), "--out", "results")
    assert (run.returncode, run.stderr) == (0, "")
    [folder] = (tmp_path / "results").iterdir()
    history = json.loads((folder / "history.json").read_text())
    assert history["steps"] == list(range(1, 45 * epochs + 1))
    assert len(history["loss"]) == len(history["accuracy"]) == 45 * epochs
    assert all(map(math.isfinite, history["loss"]))
    rows = history["epochs"]
    assert [row["epoch"] for row in rows] == list(range(1, epochs + 1))
    assert rows[-1]["learning_rate"] < rows[0]["learning_rate"] < max(row["learning_rate"] for row in rows) <= 0.01
    assert rows[-1]["validation"]["accuracy"] >= 0.96
    picture = ElementTree.parse(folder / "loss.svg").getroot()
    assert len(picture.findall("{http://www.w3.org/2000/svg}polyline")) == 3
    graph = ElementTree.parse(folder / "graph.svg").getroot()
    texts = {text.text for text in graph.iter("{http://www.w3.org/2000/svg}text")}
    assert {"BackwardEnd x TrainingPhase", "GradientNorm()", "ClipGradients(1.0)", "ProgressBar()"} <= texts
    assert (folder / "graph.html").read_text().startswith("<!DOCTYPE html>")
    out = run.stdout
    for text in (
        "  BackwardEnd   traced  1. ClipGradients(1.0)  2. GradientNorm()\n"
        "                        3. StopOnNaNLoss()\n"
        "        2 after 1: ClipGradients writes `step.grads`, GradientNorm reads it\n",
        "hidden/w   (64 x 128)  float32  8,192  32,768",
        f"wrote {Path('results') / folder.name / 'history.json'}: metrics of each epoch and step\n",
        f"wrote {Path('results') / folder.name / 'loss.svg'}: the loss curves\n",
        f"wrote {Path('results') / folder.name / 'graph.svg'}: the callback graph\n",
        f"wrote {Path('results') / folder.name / 'graph.html'}: the callback graph, by moment\n",
        f"Draw the metrics with `uv run fluxcb plot {Path('results') / folder.name}`.\n",
    ):
        assert text in out
    table = re.findall(r"^ {4}(\d) +(\d\.\d{4}) +(\d\.\d{4}) .*s$", out, re.MULTILINE)
    assert table == [
        (str(row["epoch"]), f"{row['training']['loss']:.4f}", f"{row['training']['accuracy']:.4f}") for row in rows
    ]
    assert f"{rows[-1]['validation']['accuracy']:.1%} of the validation digits are classified correctly." in out
