"""MLflow, for real, on a database of its own: what was logged is read back by its client."""

import sys

import numpy as np
import pytest

from fluxcb import DeclarationError
from fluxcb.logging import Audio, File, Graph, Histogram, Image, MLflowBackend, Text
from fluxcb.logging.encoding import png_of, wav_of

real = pytest.mark.filterwarnings("ignore")  # what services' libraries warn of is not ours to mend


def test_without_the_library_there_is_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(DeclarationError) as error:
        MLflowBackend()
    assert str(error.value) == (
        "`MLflowBackend` needs the package `mlflow`, which is not installed.\n  fix:   `pip install 'fluxcb[mlflow]'`"
    )


@pytest.fixture
def uri(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)  # artifacts lie in the working folder by default
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


def client(uri):
    import mlflow

    return mlflow.MlflowClient(tracking_uri=uri)


@real
def test_a_run_has_everything(uri, log, tmp_path):
    (tmp_path / "kept.txt").write_text("kept")
    image, sound = Image(np.zeros((2, 3))), Audio(np.zeros(100), 8000)
    backend = MLflowBackend("digits", run_name="first", tracking_uri=uri)
    with backend:
        log(backend, *((step, 1, "train/loss (mean)", step / 2) for step in range(2500)))
        log(backend, (7, 1, "nan", float("nan")), (7, 1, "inf", float("inf")))
        for name, thing in {
            "note": Text("wärm"),
            "graph": Graph("digraph {}"),
            "digit": image,
            "sound": sound,
            "file": File(tmp_path / "kept.txt"),
        }.items():
            backend.log(name, thing, step=5, epoch=2, seconds=1.0)
    run = client(uri).get_run(backend.state_dict()["run"])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    history = client(uri).get_metric_history(run.info.run_id, "train/loss _mean_")
    assert sorted((m.step, m.value, m.timestamp) for m in history) == [
        (step, step / 2, 1000 * (100 + step)) for step in range(2500)
    ]
    assert np.isnan(client(uri).get_metric_history(run.info.run_id, "nan")[0].value)
    assert client(uri).get_metric_history(run.info.run_id, "inf")[0].value > 1e308
    [folder] = tmp_path.glob(f"mlruns/*/{run.info.run_id}/artifacts")
    assert {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.*")} == {
        "note/5.txt": "wärm".encode(),
        "graph/5.dot": b"digraph {}",
        "digit/5.png": png_of(image),
        "sound/5.wav": wav_of(sound),
        "file/kept.txt": b"kept",
    }
    assert not issubclass(Histogram, MLflowBackend.loggables)


@real
def test_a_run_that_resumes_keeps_its_id(uri, log):
    first = MLflowBackend(tracking_uri=uri)
    first.open(resumes=False)
    log(first, (3, 1, "a", 0.5))
    first.flush()
    state = first.state_dict()
    first.close()
    second = MLflowBackend(tracking_uri=uri)
    assert second.state_dict() == {}
    second.load_state_dict(state)
    second.open(resumes=True)
    assert client(uri).get_run(state["run"]).info.status == "RUNNING"
    log(second, (4, 1, "a", 0.25))
    second.flush()
    second.close()
    assert second.state_dict() == state
    run = client(uri).get_run(state["run"])
    assert run.info.status == "FINISHED"
    history = client(uri).get_metric_history(run.info.run_id, "a")
    assert sorted((m.step, m.value) for m in history) == [(3, 0.5), (4, 0.25)]
