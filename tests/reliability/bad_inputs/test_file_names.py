"""File names that are invalid, are not UTF-8, or cannot be read back by the checkpoint format."""

import os

import numpy as np
import pytest

from fluxcb import DeclarationError
from fluxcb import callbacks as cb
from fluxcb import logging as log_to
from fluxcb._tools.cli import main
from fluxcb.callbacks import Checkpointer, MinSaver
from fluxcb.testing import testlearner

LONG = "n" * 300
NULL, TOO_LONG = "no file's name has a null character", "File name too long"
IMPOSSIBLE = {"null": ("a\0b", NULL), "long": (LONG, TOO_LONG), "long in a folder": (f"new/{LONG}", TOO_LONG)}
FOREIGN = os.fsdecode(b"b\xffd")
"""A name in another encoding than UTF-8."""


def shown(text):
    """Return a text as the terminal displays it."""
    return text.replace("\0", "\\x00")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("path", "why"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
class TestImpossible:
    @pytest.mark.parametrize("saver", [Checkpointer, MinSaver])
    def test_invalid_checkpoint_directories_raise(self, saver, path, why, refused):
        name = saver.__name__
        text = (
            f"`{name}` cannot write checkpoints to {os.path.abspath(path)!r}: {why}.\n"
            f'  fix:   use another directory, e.g. `{name}("runs/1")`'
        )
        with refused(DeclarationError, text):
            saver(path)

    @pytest.mark.parametrize("dump", [cb.DumpArrays, cb.DumpImages])
    def test_invalid_dump_folders_raise(self, dump, path, why, refused):
        text = (
            f"`{dump.__name__}` cannot write files named `a-...` to the folder `{shown(path)}`.\n"
            f"  why:   {why}\n"
            "  fix:   use another folder or prefix"
        )
        with refused(DeclarationError, text):
            dump("step.xs", path, prefix="a")

    def test_invalid_prediction_files_raise(self, path, why, refused):
        text = f"`PredictionWriter` cannot write to `{shown(path)}.npz`.\n  why:   {why}\n  fix:   use another path"
        with refused(DeclarationError, text):
            cb.PredictionWriter(f"{path}.npz")

    @pytest.mark.parametrize(
        "make",
        [lambda path: cb.HumanHyperParamSetter("learning_rate", path), cb.InjectShell],
        ids=["HumanHyperParamSetter", "InjectShell"],
    )
    def test_invalid_input_files_raise(self, make, path, why, refused, request):
        owner = "InjectShell" if "InjectShell" in request.node.callspec.id else "HumanHyperParamSetter"
        text = f"`file` of `{owner}` cannot be {path!r}: {why}.\n  fix:   use another path"
        with refused(DeclarationError, text):
            make(path)

    def test_invalid_logged_files_raise(self, path, why, refused):
        with refused(
            DeclarationError, f"There is no file at {shown(path)}.\n  fix:   write the file before you log it"
        ):
            log_to.File(path)


def test_long_prefix_raises(refused):
    text = (
        f"`DumpArrays` cannot write files named `{LONG}-...` to the folder `dumps`.\n"
        "  why:   File name too long\n"
        "  fix:   use another folder or prefix"
    )
    with refused(DeclarationError, text):
        cb.DumpArrays("step.loss", "dumps", prefix=LONG)


@pytest.mark.parametrize("character", ["%", "?", "#", "|", "\\"])
@pytest.mark.parametrize("template", ["x{}y", "x{}41/runs"])
def test_characters_that_orbax_cannot_read_raise(character, template, refused):
    path = template.format(character)
    text = (
        f"`Checkpointer` cannot write checkpoints to {os.path.abspath(path)!r}: Orbax cannot read from a path with the "
        f"character {character!r}.\n"
        '  fix:   use another directory, e.g. `Checkpointer("runs/1")`'
    )
    with refused(DeclarationError, text):
        Checkpointer(path)


def test_other_characters_in_directory_are_accepted(tmp_path):
    path = tmp_path / "x *[]{}<>\"'^`~!@$&=+,;:()é日\x1b\ny"
    testlearner(Checkpointer(path)).fit(1)
    learner = testlearner(Checkpointer(path))
    learner.restore(path)
    assert learner.step == 4


# -- names that are not UTF-8 ------------------------------------------------------------------------------------------


def test_checkpoint_directory_that_is_not_utf8_raises(refused):
    text = (
        f"`Checkpointer` cannot write checkpoints to {os.path.abspath(FOREIGN)!r}: Orbax requires paths that are valid "
        "UTF-8.\n"
        '  fix:   use another directory, e.g. `Checkpointer("runs/1")`'
    )
    with refused(DeclarationError, text):
        Checkpointer(FOREIGN)


@pytest.mark.parametrize(
    "make",
    [
        lambda: [cb.DumpArrays("step.loss", FOREIGN)],
        lambda: [cb.HumanHyperParamSetter("learning_rate", FOREIGN)],
        *(
            lambda backend=backend: [cb.Metrics(), cb.LogMetrics(), cb.Monitors(backend(FOREIGN))]
            for backend in (log_to.CSVBackend, log_to.JSONLinesBackend, log_to.TensorBoardBackend)
        ),
    ],
    ids=["dumps", "setter", "CSV", "JSON", "TensorBoard"],
)
def test_other_files_with_non_utf8_names_are_accepted(make):
    testlearner(*make()).fit(1)


def test_log_with_non_utf8_name_is_drawn(capsys):
    with open(f"{FOREIGN}.jsonl", "w") as file:
        file.write('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 0.5}\n')
    assert main(["plot", f"{FOREIGN}.jsonl"]) == 0
    assert main(["plot", f"{FOREIGN}-missing.jsonl"]) == 1
    assert capsys.readouterr().err.startswith("DataError: There is no run at b\\udcffd-missing.jsonl.\n")


@pytest.mark.integration
@pytest.mark.parametrize("loggable", [log_to.Value(1.0), log_to.Text(FOREIGN), log_to.Image(np.zeros((2, 2, 3)))])
def test_non_utf8_name_in_tensorboard(loggable):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with log_to.TensorBoardBackend("logs") as backend:
        log_to.log_to(backend, FOREIGN, loggable, step=1)
    read = events.EventAccumulator("logs")
    read.Reload()
    tags = read.Tags()
    assert "b\\udcffd" in [tag.removesuffix("/0") for tag in (*tags["scalars"], *tags["images"], *tags["tensors"])]
