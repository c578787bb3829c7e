"""Places in messages."""

import sys
from types import SimpleNamespace

import pytest

from fluxcb import Callback, DeclarationError, on
from fluxcb._declare.signatures import shown_path
from fluxcb.events import EpochEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner

_CELL = "/ipykernel/123.py"


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell that has run one cell, with the methods of IPython that name it."""

    def format_code_name(name: str) -> tuple[str, str] | None:
        return ("Cell", "In[5]") if name == _CELL else None

    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=format_code_name))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


@pytest.mark.usefixtures("notebook")
def test_cell_has_name_that_ipython_shows() -> None:
    assert shown_path(_CELL) == "Cell In[5]"
    assert shown_path("/elsewhere/train.py") == "/elsewhere/train.py"


@pytest.mark.usefixtures("notebook")
def test_error_names_cell() -> None:
    names = {"Callback": Callback, "on": on, "EpochEnd": EpochEnd, "TrainingPhase": TrainingPhase, "__name__": "cells"}
    source = "class Mine(Callback):\n    def stateaccess(self):\n        return {}\n\n    def runafter(self):\n"
    source += "        return Callback\n\n    @on\n"
    source += "    def show(self, event: EpochEnd, phase: TrainingPhase, learner):\n        pass\n"
    exec(compile(source, _CELL, "exec"), names)
    with pytest.raises(DeclarationError) as raised:
        testlearner(names["Mine"]())
    assert str(raised.value) == (
        "`Mine.runafter` must return a tuple of callback classes, not Callback.\n"
        "  where: Mine.runafter  Cell In[5]:5\n"
        "  fix:   return `(Callback,)`"
    )


def test_ipython_that_is_imported_outside_a_shell_names_no_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert shown_path("/elsewhere/train.py") == "/elsewhere/train.py"
