"""The checks of this folder can fail: each is shown something that leaves the very thing behind which it looks for."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from fluxcb import DeclarationError, FluxcbError
from fluxcb.testing import testlearner

FIRST = "It cannot be."


def raises(error=DeclarationError, text=FIRST, fix="do it otherwise"):
    raise error(text, fix=fix)


def test_the_plain_case_passes(told):
    told(lambda: raises(), DeclarationError, FIRST)


def test_what_is_accepted_is_found(told):
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
def test_a_wrong_error_is_found(make, told):
    with pytest.raises(AssertionError):
        told(make, DeclarationError, FIRST)


@pytest.mark.parametrize("make", [lambda: Path("left").touch(), lambda: Path("folder").mkdir()], ids=["file", "folder"])
def test_what_is_left_on_disk_is_found(make, told):
    with pytest.raises(AssertionError, match="work"):
        told(lambda: [make(), raises()], DeclarationError, FIRST)


def test_a_thread_that_is_left_is_found(told):
    done = threading.Event()
    left = threading.Thread(target=done.wait)
    with pytest.raises(AssertionError, match="Thread"):
        told(lambda: [left.start(), raises()], DeclarationError, FIRST)
    done.set()
    left.join()


def test_a_learner_that_is_left_is_found(refuses):
    kept = []
    with pytest.raises(DeclarationError, match=r"^EventLog\(\) already belongs to another Learner\.") as raised:
        refuses(lambda log: [kept.append(testlearner(log)), raises()], DeclarationError, FIRST)
    assert raised.value.what == "EventLog() already belongs to another Learner."
