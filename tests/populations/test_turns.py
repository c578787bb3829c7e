"""Threads that take turns."""

import threading

import pytest

from fluxcb.populations.turns import Turn


def test_function_runs_only_between_resume_and_park():
    log = []

    def function():
        log.append("begins")
        log.append(turn.park("a value"))
        with pytest.raises(ValueError, match="refused"):
            turn.park("another value")
        return "done"

    turn = Turn(function, "a turn")
    assert log == []
    turn.resume()
    assert (log, turn.waits_for) == (["begins"], "a value")
    turn.resume("an answer")
    assert (log, turn.waits_for) == (["begins", "an answer"], "another value")
    turn.resume(failure=ValueError("refused"))
    assert (turn.ended, turn.result, turn.error) == (True, "done", None)


def test_exception_is_kept():
    def function():
        raise KeyError("x")

    turn = Turn(function, "a turn")
    turn.resume()
    assert turn.ended
    assert isinstance(turn.error, KeyError)


def test_abandoned_function_runs_its_finally_blocks():
    log = []

    def function():
        try:
            turn.park("never")
        finally:
            log.append("cleaned")

    turn, unused = Turn(function, "a turn"), Turn(function, "never begun")
    turn.resume()
    turn.abandon()
    unused.abandon()
    assert log == ["cleaned"]
    assert turn.ended
    assert unused.ended
    assert not [thread for thread in threading.enumerate() if thread.name in ("a turn", "never begun")]
