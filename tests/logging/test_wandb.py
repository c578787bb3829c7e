"""Weights & Biases, for real, offline: what was logged is read from the run's own file."""

import json
import struct
import sys

import numpy as np
import pytest

from fluxcb import DeclarationError
from fluxcb.logging import Audio, File, Graph, Histogram, Image, Text, WandbBackend

BLOCK = 32768


def test_without_the_library_there_is_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(DeclarationError) as error:
        WandbBackend("project")
    assert str(error.value) == (
        "`WandbBackend` needs the package `wandb`, which is not installed.\n  fix:   `pip install 'fluxcb[wandb]'`"
    )


def records(path):
    """Yield the records of a run's file: LevelDB's log format behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    content, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if BLOCK - at % BLOCK < 7:  # no header fits into the rest of the block
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def rows(folder):
    """Return the history of the runs in a folder: `(run's id, {key: JSON})`, the runs in the order of their begin."""
    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for record in records(path):
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                found.append((path.stem.removeprefix("run-"), {k: v for k, v in items.items() if k[0] != "_"}))
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    return tmp_path


real = pytest.mark.filterwarnings("ignore")  # what services' libraries warn of is not ours to mend


@real
def test_an_offline_run_has_everything(folder, log):
    (folder / "kept.txt").write_text("kept")
    backend = WandbBackend("project", mode="offline", dir=str(folder))
    assert repr(backend) == "WandbBackend('project')"
    with backend:
        log(backend, (3, 1, "train/loss", 0.5), (3, 1, "b", 2), (4, 1, "train/loss", float("nan")))
        backend.flush()
        things = {
            "note": Text("warm"),
            "graph": Graph("digraph {}"),
            "digit": Image(np.zeros((2, 3))),
            "digits": Image(np.linspace(0, 1, 120).reshape(2, 4, 5, 3)),
            "sound": Audio(np.zeros(100), 8000),
            "weights": Histogram([1, 0, 3], [0, 1, 2, 3]),
            "file": File("kept.txt"),
        }
        for name, thing in things.items():
            backend.log(name, thing, step=5, epoch=2, seconds=1.0)
    [first, second, third] = [row for _, row in rows(folder)]
    assert {key: float(value) for key, value in first.items()} == {"step": 3, "epoch": 1, "train/loss": 0.5, "b": 2}
    assert second == {"step": "4", "epoch": "1", "train/loss": "NaN"}
    assert (third["step"], third["note"], third["graph"]) == ("5", '"warm"', '"digraph {}"')
    assert [json.loads(third[f"weights/{key}"]) for key in ("values", "bins")] == [[1, 0, 3], [0, 1, 2, 3]]
    assert (third["digit/count"], third["digits/count"], third["sound/_type"]) == ("1", "2", '"audio-file"')
    [run] = folder.glob("wandb/offline-run-*")
    assert len(list(run.glob("files/media/images/*.png"))) == 3
    assert len(list(run.glob("files/media/audio/*.wav"))) == 1
    assert (run / "files/kept.txt").read_text() == "kept"


@real
def test_a_run_that_resumes_keeps_its_id(folder, log):
    first = WandbBackend("project", mode="offline", dir=str(folder))
    first.open(resumes=False)
    log(first, (3, 1, "a", 0.5))
    first.flush()
    state = first.state_dict()
    first.close()
    second = WandbBackend("project", mode="offline", dir=str(folder))
    assert second.state_dict() == {}
    second.load_state_dict(state)
    second.open(resumes=True)
    log(second, (2, 1, "a", 0.25))  # the service's own count may not go back; ours may
    second.flush()
    second.close()
    assert second.state_dict() == state == {"id": state["id"]}
    assert [(run, row["step"], row["a"]) for run, row in rows(folder)] == [
        (state["id"], "3", "0.5"),
        (state["id"], "2", "0.25"),
    ]
