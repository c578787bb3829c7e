"""The checks of this folder can fail: each one detects the kind of leftover that it looks for."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from fluxcb import DeclarationError, FluxcbError
from fluxcb.testing import testlearner

FIRST = "It cannot be."


def raises(error=DeclarationError, text=FIRST, fix="do it otherwise"):
    raise error(text, fix=fix)


def test_expected_error_passes(told):
    told(lambda: raises(), DeclarationError, FIRST)


def test_accepted_input_is_detected(told):
    with pytest.raises(pytest.fail.Exception, match="it was accepted"):
        told(lambda: None, DeclarationError, FIRST)


@pytest.mark.parametrize(
    "make",
    [
        lambda: raises(text="It cannot be so."),
        lambda: raises(error=FluxcbError),
        lambda: raises(fix=()),
        lambda: float("x"),
    ],
    ids=["another-text", "another-kind", "no-cure", "an-error-of-python"],
)
def test_wrong_error_is_detected(make, told):
    with pytest.raises(AssertionError):
        told(make, DeclarationError, FIRST)


@pytest.mark.parametrize("make", [lambda: Path("left").touch(), lambda: Path("folder").mkdir()], ids=["file", "folder"])
def test_leftover_files_are_detected(make, told):
    with pytest.raises(AssertionError, match="work"):
        told(lambda: [make(), raises()], DeclarationError, FIRST)


def test_leftover_thread_is_detected(told):
    done = threading.Event()
    left = threading.Thread(target=done.wait)
    with pytest.raises(AssertionError, match="Thread"):
        told(lambda: [left.start(), raises()], DeclarationError, FIRST)
    done.set()
    left.join()


def test_leftover_learner_is_detected(refuses):
    kept = []
    with pytest.raises(DeclarationError, match=r"^EventLog\(\) already belongs to another Learner\.") as raised:
        refuses(lambda log: [kept.append(testlearner(log)), raises()], DeclarationError, FIRST)
    assert raised.value.what == "EventLog() already belongs to another Learner."
