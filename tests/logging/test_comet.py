"""Comet, for real, offline: what was logged is read from the archive that would be uploaded."""

import json
import sys
import zipfile

import numpy as np
import pytest

from fluxcb import DeclarationError
from fluxcb.logging import Audio, CometBackend, File, Graph, Histogram, Image, Text
from fluxcb.logging.encoding import wav_of

real = pytest.mark.filterwarnings("ignore")  # what services' libraries warn of is not ours to mend


def test_without_the_library_there_is_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "comet_ml", None)
    with pytest.raises(DeclarationError) as error:
        CometBackend("project")
    assert str(error.value) == (
        "`CometBackend` needs the package `comet_ml`, which is not installed.\n  fix:   `pip install 'fluxcb[comet]'`"
    )


def made(folder):
    quiet = dict.fromkeys(("log_code", "log_env_details", "log_git_metadata", "auto_output_logging"), False)
    return CometBackend("project", offline_directory=str(folder), **quiet)


def messages(archive):
    """Return the messages of an archive, and its files by name."""
    with zipfile.ZipFile(archive) as file:
        lines = file.read("messages.json").decode().splitlines()
        return [json.loads(line) for line in lines], {name: file.read(name) for name in file.namelist()}


def numbers(archive):
    metrics = [m["payload"]["metric"] for m in messages(archive)[0] if m["type"] == "metric_msg"]
    return [(m["metricName"], m["metricValue"], m["step"], m["epoch"]) for m in metrics if m["step"] is not None]


@real
def test_an_offline_experiment_has_everything(tmp_path, log):
    pytest.importorskip("comet_ml")
    (tmp_path / "kept.txt").write_text("kept")
    sound = Audio(np.zeros(100), 8000)
    with made(tmp_path) as backend:
        log(backend, (3, 1, "train/loss", 0.5), (4, 1, "train/loss", float("nan")))
        for name, thing in {
            "note": Text("warm"),
            "graph": Graph("digraph {}"),
            "digit": Image(np.zeros((2, 3))),
            "sound": sound,
            "weights": Histogram([1, 0, 3], [0, 1, 2, 3]),
            "file": File(tmp_path / "kept.txt"),
        }.items():
            backend.log(name, thing, step=5, epoch=2, seconds=1.0)
        backend.flush()
        backend.end_epoch(2)
    [archive] = tmp_path.glob("*.zip")
    assert numbers(archive) == [("train/loss", 0.5, 3, 1), ("train/loss", "NaN", 4, 1)]
    found, files = messages(archive)
    uploads = {}
    for message in found:
        if message["type"] == "file_upload":
            payload = message["payload"]
            assert payload["additional_params"]["step"] == 5
            uploads.setdefault(payload["upload_type"], []).append(files[payload["file_path"]])
    assert sorted(uploads["text-sample"]) == [b"graph: digraph {}", b"note: warm"]
    assert sorted(uploads["asset"]) == sorted([wav_of(sound), b"kept"])
    assert uploads["visualization"][0].startswith(b"\x89PNG")
    [histogram] = uploads["histogram3d"]
    assert [count for _, count in json.loads(histogram)["index_values"]] == [1, 3]


@real
def test_an_experiment_that_resumes_keeps_its_key(tmp_path, log):
    pytest.importorskip("comet_ml")
    first = made(tmp_path / "first")
    first.open(resumes=False)
    log(first, (3, 1, "a", 0.5))
    state = first.state_dict()
    first.close()
    second = made(tmp_path / "second")
    second.load_state_dict(state)
    second.open(resumes=True)
    log(second, (4, 2, "a", 0.25))
    second.close()
    assert second.state_dict() == state
    for folder, expected in (("first", [("a", 0.5, 3, 1)]), ("second", [("a", 0.25, 4, 2)])):
        [archive] = (tmp_path / folder).glob("*.zip")
        assert state["key"] in archive.name
        assert numbers(archive) == expected
