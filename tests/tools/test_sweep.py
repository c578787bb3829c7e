"""`fluxcb sweep`: a sweep over learning rates in one command, with a picture."""

import json
import subprocess
import sys

import pytest

from fluxcb._tools.sweep import RATES, run_sweep


def sweep(folder, *arguments):
    command = [sys.executable, "-m", "fluxcb", "sweep", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_sweep_writes_histories_and_picture(tmp_path):
    run = sweep(tmp_path, "--learning-rates", "0.001", "0.01", "--epochs", "2", "--out", "results")
    assert run.returncode == 0, run.stderr
    (folder,) = (tmp_path / "results").iterdir()
    rows = json.loads((folder / "members.json").read_text())
    assert [row["learning_rate"] for row in rows] == [0.001, 0.01]
    accuracies = [row["per_epoch"]["validation"]["accuracy"] for row in rows]
    assert all(accuracy["epochs"] == [1, 2] for accuracy in accuracies)
    best = max(range(2), key=lambda member: accuracies[member]["values"][-1])
    reached = accuracies[best]["values"][-1]
    assert reached > 0.5
    lines = run.stdout.splitlines()
    assert lines[0].split() == ["epoch", "validation/loss", "member", "median", "worst", "training"]
    assert f"Best: learning_rate={[0.001, 0.01][best]:g}. {reached:.1%} of the validation digits" in run.stdout
    assert lines[-1] == f"wrote results/{folder.name}/loss.svg: the loss curves"
    picture = (folder / "loss.svg").read_text()
    assert "member 0 (learning_rate=0.001)" in picture
    assert "member 1 (learning_rate=0.01)" in picture


def test_wrong_number_of_epochs_is_usage_error(tmp_path):
    run = sweep(tmp_path, "--epochs", "0")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.endswith("error: argument --epochs: must be a whole number of at least 1, not '0'\n")


@pytest.mark.long
def test_default_rates_span_good_and_bad_ones(tmp_path):
    folder = run_sweep(RATES, epochs=3, seed=0, out=tmp_path)
    rows = json.loads((folder / "members.json").read_text())
    last = [row["per_epoch"]["validation"]["accuracy"]["values"][-1] for row in rows]
    assert len(last) == len(RATES) == 8
    assert 0 < last.index(max(last)) < 7
