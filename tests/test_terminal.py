"""Text from files and other sources is printed without control characters."""

import io
import json
import pickle
import subprocess
import sys

import jax.numpy as jnp
import optax
import pytest
from rich.console import Console

import fluxcb
from fluxcb import Callback, on
from fluxcb._terminal import escape_block, escape_line
from fluxcb.callbacks import Checkpointer, Metric, Metrics, MetricsPrinter
from fluxcb.events import FitBegin
from fluxcb.logging import ConsoleBackend
from fluxcb.logging.consoles import console_for, print_line
from fluxcb.logging.loggables import Text, Value
from fluxcb.phases import TrainingPhase
from fluxcb.plots import plot_curves
from fluxcb.testing import testlearner

CONTROLS = [chr(code) for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, 0xD800, 0xDFFF)]
TITLE = "\x1b]0;owned\x07\x1b[2J\x9b2J\n"  # sets the title, and clears the screen in two ways
SHOWN = r"\x1b]0;owned\x07\x1b[2J\x9b2J\n"


@pytest.mark.parametrize("character", CONTROLS, ids=lambda character: f"{ord(character):04x}")
def test_every_control_character_is_escaped(character):
    escaped = repr(character)[1:-1]
    assert escape_line(f"a{character}b") == f"a{escaped}b"
    assert escape_block(f"a{character}b") == (f"a{escaped}b" if character != "\n" else "a\nb")
    file = io.StringIO()
    print_line(console_for(file), f"a{character}b")
    assert file.getvalue() == f"a{escaped}b\n"
    assert str(fluxcb.DataError(f"a{character}b")) == (f"a{escaped}b" if character != "\n" else "a\nb")


def test_other_characters_are_unchanged():
    text = r"\n é 漢 \x1b ⠊ 🙂 'a' [red]"
    assert escape_line(text) == escape_block(text) == text


def test_name_and_text_in_console_backend():
    file = io.StringIO()
    with ConsoleBackend(file=file) as backend:
        backend.log(f"a{TITLE}", Value(1.0), step=1, epoch=1, seconds=0.0)
        backend.log("b", Text(TITLE), step=1, epoch=1, seconds=0.0)
        backend.end_epoch(1)
    assert file.getvalue() == f"epoch 1, step 1  a{SHOWN}: 1  b: {SHOWN}\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_metric_name_in_table(terminal, monkeypatch):
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, color_system=None, width=200)
    monkeypatch.setattr("fluxcb.callbacks.progress.printer.console_for", lambda file: console)
    metric = Metric(lambda outputs, ys: jnp.mean(outputs), name=f"m{TITLE}")
    testlearner(Metrics(metric), MetricsPrinter(file)).fit(1)
    header = file.getvalue().splitlines()[0]
    assert f"train m{SHOWN}" in header
    assert not set(CONTROLS) & set(file.getvalue()) - {"\n"}


def test_chart_of_names_from_file(tmp_path):
    file = tmp_path / "log.jsonl"
    file.write_text("".join(json.dumps({"step": step, f"loss{TITLE}": step}) + "\n" for step in (1, 2)))
    found = subprocess.run(
        [sys.executable, "-m", "fluxcb", "plot", str(file), "*"], capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines()[0] == f"■ loss{SHOWN}  last 2"
    assert not set(CONTROLS) & set(found.stdout) - {"\n"}


def test_labels_and_marks_of_chart():
    file = io.StringIO()
    curves = {"a": [(0.0, 1.0), (1.0, 2.0)]}
    plot_curves(curves, x_label=f"x{TITLE}", y_label="y", marks={f"m{TITLE}": 0.5}, ax=Console(file=file, width=80))
    assert f"│ m{SHOWN}" in file.getvalue()
    assert f" x{SHOWN} " in file.getvalue()


def test_message_of_command_line(tmp_path, capsys):
    from fluxcb._tools.cli import main

    assert main(["plot", str(tmp_path / f"no{TITLE}run")]) == 1
    assert capsys.readouterr().err.startswith("DataError: There is no run at ")
    assert main(["explain", f"A{TITLE}", "B", "json:loads"]) != 0
    assert not set(CONTROLS) & set(capsys.readouterr().err) - {"\n"}


def test_json_output_of_command_line_is_valid(capsys):
    from fluxcb._tools.commands import _write_json

    for value in ({"a": "\x9b\x1b"}, {"a": "é"}):
        _write_json(value)
        out = capsys.readouterr().out
        assert json.loads(out) == value
        assert not set(CONTROLS) & set(out) - {"\n"}


def test_checkpoint_quoted_in_error(tmp_path):
    class Writes(Callback):
        """A callback with the name of a file."""

        def __init__(self, name):
            self.name = name

        @on
        def begin(self, event: FitBegin, phase: TrainingPhase, learner):
            pass

        def __repr__(self):
            return f"Writes({self.name})"

    def learner(name):
        return fluxcb.Learner.from_loss(
            {"w": jnp.ones(2)},
            lambda params, batch, key: jnp.mean(params["w"] * batch),
            fluxcb.inject(optax.sgd, learning_rate=0.1),
            data=[jnp.ones(2)] * 2,
            callbacks=[Checkpointer(tmp_path / "run"), Writes(name)],
            default_callbacks=False,
        )

    learner(TITLE).fit(1)
    with pytest.raises(fluxcb.ResumeError) as caught:
        learner("other").restore(tmp_path / "run")
    text = str(caught.value)
    assert SHOWN in text
    assert not set(CONTROLS) & set(text) - {"\n"}
    assert str(pickle.loads(pickle.dumps(caught.value))) == text
