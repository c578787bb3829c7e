import csv
import os

import pytest

from fluxcb import DeclarationError
from fluxcb.logging import CSVBackend, Text


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "log.csv"


def opened(path, *, resumes=False, state=None):
    backend = CSVBackend(path)
    backend.load_state_dict(state or {})
    backend.open(resumes=resumes)
    return backend


def test_a_row_per_step_and_a_column_per_name(path, log):
    with CSVBackend(path) as backend:
        log(backend, (1, 1, "a", 1), (1, 1, "b", 2.5), (2, 1, "b", 3))
        assert path.read_text() == ""  # until it flushes
        backend.flush()
        assert path.read_text() == "step,epoch,time,a,b\n1,1,101.0,1.0,2.5\n2,1,102.0,,3.0\n"
        backend.flush()
        log(backend, (3, 2, "a", float("nan")), (3, 2, "a", float("-inf")))
    assert path.read_text() == (
        "step,epoch,time,a,b\n1,1,101.0,1.0,2.5\n2,1,102.0,,3.0\n3,2,103.0,nan,\n3,2,103.0,-inf,\n"
    )
    assert not issubclass(Text, CSVBackend.loggables)


def test_new_names_give_new_columns(path, log):
    with CSVBackend(path) as backend:
        for step, name in enumerate(["a", "b", "a", "c, d", "b"]):
            log(backend, (step, 1, name, step))
            backend.flush()
    assert path.read_text() == (
        'step,epoch,time,a,b,"c, d"\n'
        "0,1,100.0,0.0,,\n"
        "1,1,101.0,,1.0,\n"
        "2,1,102.0,2.0,,\n"
        "3,1,103.0,,,3.0\n"
        "4,1,104.0,,4.0,\n"
    )
    assert [file.name for file in path.parent.iterdir()] == ["log.csv"]
    with path.open(newline="") as file:
        assert [row["c, d"] for row in csv.DictReader(file)] == ["", "", "", "3.0", ""]


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "+1", "-1", "@SUM(A1)", "'=x"])
def test_no_title_is_a_formula(name, path, log):
    with CSVBackend(path) as backend:
        log(backend, (1, 1, name, 1), (1, 1, f"a{name}", 2))
        backend.flush()
        state = backend.state_dict()
        log(backend, (2, 1, name, 3))
    backend = opened(path, resumes=True, state=state)
    log(backend, (2, 1, name, 4))
    backend.flush()
    backend.close()
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["step", "epoch", "time", f"'{name}", f"a{name}"]
    assert [row[3:] for row in rows] == [["1.0", "2.0"], ["4.0", ""]]


def test_the_file_is_whole_if_writing_it_anew_fails(path, log, monkeypatch):
    backend = opened(path)
    log(backend, (1, 1, "a", 1))
    backend.flush()

    def fail(old, new):
        raise OSError("no")

    monkeypatch.setattr(os, "replace", fail)
    log(backend, (2, 1, "b", 1))
    with pytest.raises(OSError, match="no"):
        backend.flush()
    backend.close()
    assert path.read_text() == "step,epoch,time,a\n1,1,101.0,1.0\n"
    assert [file.name for file in path.parent.iterdir()] == ["log.csv"]


@pytest.mark.parametrize("later", [[(2, 1, "a", 9)], [(2, 1, "b", 9), (3, 1, "c", 9)]])
def test_a_run_that_resumes_has_the_rows_and_columns_of_its_checkpoint(path, log, later):
    backend = opened(path)
    log(backend, (1, 1, "a", 1))
    backend.flush()
    state = backend.state_dict()
    assert state == {"rows": 1, "columns": ["step", "epoch", "time", "a"]}
    log(backend, *later)
    backend.flush()
    backend.close()
    with path.open("a") as file:
        file.write("4,1,10")
    backend = opened(path, resumes=True, state=state)
    assert path.read_text() == "step,epoch,time,a\n1,1,101.0,1.0\n"
    assert backend.state_dict() == state
    log(backend, (2, 1, "d", 3))
    backend.flush()
    backend.close()
    assert path.read_text() == "step,epoch,time,a,d\n1,1,101.0,1.0,\n2,1,102.0,,3.0\n"


def test_a_checkpoint_of_the_beginning_leaves_an_empty_table(path, log):
    backend = opened(path)
    state = backend.state_dict()
    assert state == {"rows": 0, "columns": []}
    log(backend, (1, 1, "a", 1))
    backend.flush()
    backend.close()
    backend = opened(path, resumes=True, state=state)
    assert path.read_text() == ""
    log(backend, (1, 1, "b", 1))
    backend.flush()
    backend.close()
    assert path.read_text() == "step,epoch,time,b\n1,1,101.0,1.0\n"


def test_without_a_state_it_goes_on_behind_the_last_whole_row(path, log):
    path.parent.mkdir()
    path.write_text("step,epoch,time,a\n1,1,101.0,1.0\n2,1,10")
    backend = opened(path, resumes=True)
    log(backend, (2, 1, "a", 2))
    backend.flush()
    backend.close()
    assert path.read_text() == "step,epoch,time,a\n1,1,101.0,1.0\n2,1,102.0,2.0\n"


@pytest.mark.parametrize(
    "state",
    [
        {"rows": 2, "columns": ["step", "epoch", "time", "a"]},
        {"rows": 1, "columns": ["step", "epoch", "time", "b"]},
    ],
)
def test_a_table_that_was_changed_is_appended_to_with_a_warning(path, log, state):
    path.parent.mkdir()
    path.write_text("step,epoch,time,a\n1,1,101.0,1.0\n")
    with pytest.warns(UserWarning, match=r"has changed since the checkpoint was written; new records are appended"):
        backend = opened(path, resumes=True, state=state)
    log(backend, (2, 1, "a", 2))
    backend.flush()
    backend.close()
    assert path.read_text() == "step,epoch,time,a\n1,1,101.0,1.0\n2,1,102.0,2.0\n"


def test_a_new_run_keeps_the_table_of_another_under_another_name(path, log):
    path.parent.mkdir()
    path.write_text("name,age\nx,3\n")  # may be any file
    with CSVBackend(path) as backend:
        log(backend, (1, 1, "b", 1))
        backend.flush()
        log(backend, (2, 1, "c", 2))
    assert path.read_text() == "step,epoch,time,b,c\n1,1,101.0,1.0,\n2,1,102.0,,2.0\n"
    assert path.with_name(f"{path.stem}-1.csv").read_text() == "name,age\nx,3\n"


def test_a_table_that_another_run_has_renamed_does_not_replace_that_of_the_other(path, log):
    first, second = CSVBackend(path), CSVBackend(path)
    for backend, name in ((first, "a"), (second, "b")):
        backend.open(resumes=False)
        log(backend, (1, 1, name, 1))
        backend.flush()
    log(first, (2, 1, "a", 2))
    first.flush()
    log(first, (3, 1, "new", 3))
    with pytest.raises(FileNotFoundError, match="was renamed or deleted during the run"):
        first.flush()
    assert path.read_text() == "step,epoch,time,b\n1,1,101.0,1.0\n"
    assert path.with_name(f"{path.stem}-1.csv").read_text() == "step,epoch,time,a\n1,1,101.0,1.0\n2,1,102.0,2.0\n"
    first.close()
    second.close()


def test_another_table_is_refused(path):
    path.parent.mkdir()
    path.write_text("name,age\nx,3\n")
    backend = CSVBackend(path, append=True)
    with pytest.raises(DeclarationError) as error:
        backend.open(resumes=False)
    assert str(error.value) == (
        f"CSVBackend({str(path)!r}): the columns of {path} are name, age.\n"
        "  why:   a table of this backend begins with step, epoch, time\n"
        "  fix:   use another file"
    )
    assert path.read_text() == "name,age\nx,3\n"
