"""Files and folders that cannot be written, and values that are not paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from fluxcb import DeclarationError
from fluxcb import callbacks as cb
from fluxcb import logging as log_to
from fluxcb.testing import testlearner


@pytest.mark.parametrize("file", ["log.txt", 5, Path("log.txt")], ids=["text", "number", "path"])
@pytest.mark.parametrize(
    "make",
    [
        cb.MetricsPrinter,
        cb.ModelSummary,
        cb.ProgressBar,
        lambda file: cb.EstimatedTimeLeft(file=file),
        lambda file: cb.PrintArrays("step.loss", file),
        lambda file: cb.StepTimeout(1, file=file),
        lambda file: log_to.ConsoleBackend(file=file),
    ],
    ids=["MetricsPrinter", "ModelSummary", "ProgressBar", "TimeLeft", "PrintArrays", "StepTimeout", "ConsoleBackend"],
)
def test_closed_file_raises(make, file, told, request):
    owner = {"TimeLeft": "EstimatedTimeLeft"}.get(name := request.node.callspec.id.split("-")[0], name)
    told(lambda: make(file), DeclarationError, f"`file` of `{owner}` must be an open text file, not {file!r}.")


@pytest.mark.parametrize(
    ("make", "first"),
    [
        (lambda path: cb.DumpArrays("step.loss", path), "`folder` of `DumpArrays` must be a path, not {!r}."),
        (lambda path: cb.DumpImages("step.xs", path), "`folder` of `DumpImages` must be a path, not {!r}."),
        (cb.PredictionWriter, "`path` of `PredictionWriter` must be a path, not {!r}."),
        (lambda path: cb.Profiler(path, (1, 2)), "`Profiler` takes a path, not {!r}."),
        (log_to.File, "`File` takes a path, not {!r}."),
        (lambda path: testlearner().callbacks.trace(path).__enter__(), "`trace` takes a path, not {!r}."),
    ],
    ids=["DumpArrays", "DumpImages", "PredictionWriter", "Profiler", "File", "trace"],
)
@pytest.mark.parametrize("path", [5, None, ["a"]], ids=str)
def test_invalid_paths_raise(make, first, path, told):
    told(lambda: make(path), DeclarationError, first.format(path))


@pytest.mark.parametrize("path", [5, None, ""], ids=repr)
@pytest.mark.parametrize("backend", [log_to.CSVBackend, log_to.JSONLinesBackend])
def test_logs_without_path_raise(backend, path, told):
    first = f"{backend.__name__}({str(path)!r}) takes a path, not {path!r}."
    told(lambda: backend(path), DeclarationError, first)


LONG = "a" * 300


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("a\0b", "no file's name has a null character"),
        (LONG, "File name too long"),
        (f"{LONG}/log", "File name too long"),
    ],
    ids=["null", "long", "long-folder"],
)
@pytest.mark.parametrize("backend", [log_to.CSVBackend, log_to.JSONLinesBackend])
def test_invalid_log_names_raise(backend, path, why, told):
    first = f"{backend.__name__}({path!r}) cannot write to {path!r}: {why}."
    told(lambda: testlearner(cb.Monitors(backend(path))), DeclarationError, first)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("a\0b", "no file's name has a null character"),
        (LONG, "File name too long"),
        (".", "it is a folder"),
        ("none/trace.json", "No such file or directory"),
    ],
    ids=["null", "long", "folder", "no-folder"],
)
def test_invalid_trace_paths_raise(path, why, told):
    def enter():
        with testlearner().callbacks.trace(path):
            pytest.fail("the trace has begun")

    shown = path.replace("\0", r"\x00")  # control characters are escaped in messages
    told(enter, DeclarationError, f"The trace cannot be written to `{shown}`: {why}.")


@pytest.mark.parametrize("where", ["file", "file/deeper"])
@pytest.mark.parametrize(
    ("make", "first"),
    [
        (lambda path: cb.DumpArrays("step.loss", path), "`DumpArrays` cannot write to the folder `{}`."),
        (lambda path: cb.DumpImages("step.xs", path), "`DumpImages` cannot write to the folder `{}`."),
        (
            lambda path: cb.Monitors(log_to.JSONLinesBackend(f"{path}/log")),
            "JSONLinesBackend('{}/log') cannot write to {}/log: {} is a file, so no folder can be created in it.",
        ),
    ],
    ids=["DumpArrays", "DumpImages", "JSONLinesBackend"],
)
def test_file_instead_of_folder_raises(make, first, where, told, tmp_path):
    (tmp_path / "file").write_text("mine")
    path, there = f"../{where}", "../file"
    told(lambda: testlearner(make(path)), DeclarationError, first.format(path, path, there))
    assert (tmp_path / "file").read_text() == "mine"
