"""The layout, pickling and grouping of errors."""

import pickle

import pytest

from fluxcb import _errors
from fluxcb._errors import (
    AmbiguityError,
    CheckError,
    ConflictError,
    CycleError,
    DeclarationError,
    FluxcbError,
    UnknownStateError,
    did_you_mean,
)

KINDS = [getattr(_errors, name) for name in _errors.__all__ if name.endswith("Error")]
FULL = FluxcbError("What.", where=["Here  a.py:1", "There  b.py:2"], why="Because.", fix=["one thing", "another"])


def test_message_has_what_where_why_fix() -> None:
    assert str(FULL) == (
        "What.\n  where: Here  a.py:1\n         There  b.py:2\n  why:   Because.\n  fix:   one thing\n     or: another"
    )


def test_missing_parts_are_omitted_from_message() -> None:
    assert str(FluxcbError("What.")) == "What."
    assert str(FluxcbError("What.", where="here", fix="that")) == "What.\n  where: here\n  fix:   that"


def test_multiline_entry_stays_aligned() -> None:
    assert str(FluxcbError("What.", fix="write\n    a = 1")) == "What.\n  fix:   write\n             a = 1"


@pytest.mark.parametrize("kind", KINDS)
def test_errors_survive_pickling(kind: type[FluxcbError]) -> None:
    error = kind("What.", where="here", why="so", fix=["one", "two"])
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert str(back) == str(error) == "What.\n  where: here\n  why:   so\n  fix:   one\n     or: two"
    assert (back.what, back.where, back.why, back.fix) == ("What.", ("here",), "so", ("one", "two"))


def test_class_hierarchy() -> None:
    bases = {kind.__name__: [base.__name__ for base in kind.__bases__] for kind in KINDS}
    assert bases == {
        "AccessError": ["FluxcbError", "RuntimeError"],
        "AmbiguityError": ["DeclarationError"],
        "CheckError": ["FluxcbError", "ValueError"],
        "CheckpointCorruptError": ["CheckpointError"],
        "CheckpointError": ["FluxcbError", "RuntimeError"],
        "ConflictError": ["CheckError"],
        "CycleError": ["CheckError"],
        "DataError": ["FluxcbError", "ValueError"],
        "DeclarationError": ["FluxcbError", "ValueError"],
        "FluxcbError": ["Exception"],
        "MissingStateError": ["CheckError"],
        "PeerError": ["FluxcbError", "RuntimeError"],
        "ResumeError": ["CheckpointError"],
        "StateLostError": ["FluxcbError", "RuntimeError"],
        "TraceError": ["FluxcbError", "RuntimeError"],
        "UndeclaredAccessError": ["CheckError"],
        "UnknownStateError": ["CheckError"],
    }
    assert issubclass(AmbiguityError, DeclarationError)


def test_single_problem_is_not_wrapped() -> None:
    one, other = ConflictError("First.", where="a.py:1"), CycleError("Second.", fix="do")
    assert CheckError.of([one]) is one
    both = CheckError.of([one, other])
    assert type(both) is CheckError
    assert both.problems == (one, other)
    text = (
        "2 problems were found in this set of callbacks.\n\n"
        "1. ConflictError: First.\n  where: a.py:1\n\n"
        "2. CycleError: Second.\n  fix:   do"
    )
    assert str(both) == text
    back = pickle.loads(pickle.dumps(both))
    assert str(back) == text
    assert [type(problem) for problem in back.problems] == [ConflictError, CycleError]
    assert UnknownStateError("x").problems == ()


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("lsos", ["loss", "grads"], " Did you mean `loss`?"),
        ("histroy", {"history": 1, "metrics": 2}, " Did you mean `history`?"),
        ("zzz", ["loss", "grads"], ""),
        ("loss", [], ""),
    ],
)
def test_nearest_name_is_suggested_if_close(name: str, known: object, hint: str) -> None:
    assert did_you_mean(name, known) == hint
