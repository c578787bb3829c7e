"""Long lines of the command line continue below themselves in a terminal, and stay whole in a pipe."""

import json

import pytest

from fluxcb._tools import commands
from fluxcb._tools.cli import main
from fluxcb._tools.line_filling import filled

SETS = """
from fluxcb.callbacks import *

callbacks = [Metrics(accuracy), Monitors(), ClipGradients(1.0), ThroughputTracker(), EarlyStopping(3), LogHistograms()]
"""


@pytest.fixture
def events(tmp_path, monkeypatch, capsys):
    """Return a function that returns the lines of `fluxcb events` at a width."""
    (tmp_path / "sets_of_events.py").write_text(SETS)
    monkeypatch.chdir(tmp_path)

    def run(width, *arguments):
        monkeypatch.setattr(commands, "line_width", lambda: width)
        assert main(["events", "sets_of_events:callbacks", *arguments]) == 0
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("width", [80, 100])
def test_the_moments_fit_the_terminal(events, width):
    whole = events(None).splitlines()
    assert max(map(len, whole)) > 100
    moments = json.loads(events(None, "--json"))
    assert len(whole) == len(moments)
    lines = events(width).splitlines()
    assert max(map(len, lines)) <= width
    assert " ".join(" ".join(lines).split()) == " ".join(" ".join(whole).split())


def test_a_list_of_callbacks_fits_the_terminal(monkeypatch, capsys):
    monkeypatch.setattr(commands, "line_width", lambda: 80)
    assert main(["list"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_words_continue_below_the_first_one_if_there_is_room():
    assert list(filled("head  ", ["aaa", "bbb", "ccc"], None)) == ["head  aaa bbb ccc"]
    long = ["a" * 10, "b" * 14, "c" * 20]
    assert list(filled("head  ", long, 31)) == [
        "head  aaaaaaaaaa bbbbbbbbbbbbbb",
        "      cccccccccccccccccccc",
    ]
    assert list(filled("head  ", long, 29)) == [
        "head  aaaaaaaaaa",
        "    bbbbbbbbbbbbbb",
        "    cccccccccccccccccccc",
    ]
    assert list(filled("head  ", [], 30)) == ["head"]
