"""Dispatch, compared with brute force: a moment is ambiguous if no matching handler is the most specific."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxcb import Callback, on
from fluxcb._errors import AmbiguityError
from fluxcb.events import EpochEnd, ForwardBegin, HostEvent, StepBegin, StepEnd, TracedEvent
from fluxcb.phases import AbstractTrainingPhase, AbstractValidationPhase, Phase, TrainingPhase, ValidationPhase


class FineStepEnd(StepEnd):
    """An additional class in the hierarchy."""


class Both(TrainingPhase, ValidationPhase):
    """Derive from two branches, so that moments may be ambiguous here that are unambiguous in each branch."""


EVENTS = (HostEvent, TracedEvent, StepBegin, StepEnd, FineStepEnd, EpochEnd, ForwardBegin)
PHASES = (Phase, AbstractTrainingPhase, AbstractValidationPhase, TrainingPhase, ValidationPhase)
PAIRS = st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from(PHASES)), min_size=1, max_size=6, unique=True)
Pair = tuple[type, type]


def fitting(pairs: list[Pair], event: type, phase: type) -> list[Pair]:
    return [pair for pair in pairs if issubclass(event, pair[0]) and issubclass(phase, pair[1])]


def least(pairs: list[Pair]) -> list[Pair]:
    """Return the pairs that are more specific than all of these, or all of these if there is none."""
    below = [a for a in pairs if all(issubclass(a[0], b[0]) and issubclass(a[1], b[1]) for b in pairs)]
    return below or pairs


def define(pairs: list[Pair]) -> type[Callback]:
    body: dict[str, Any] = {}
    for number, pair in enumerate(pairs):

        def run(self: Any, event: Any, phase: Any, learner: Any) -> None: ...

        body[f"handler_{number}"] = on(*pair)(run)
    return type("Several", (Callback,), body)


@settings(max_examples=600)
@given(PAIRS)
def test_class_is_rejected_exactly_if_moment_is_ambiguous(pairs: list[Pair]) -> None:
    moments = list(itertools.product(EVENTS, PHASES))
    if any(len(least(fitting(pairs, *moment))) > 1 for moment in moments):
        with pytest.raises(AmbiguityError):
            define(pairs)
        return
    several = define(pairs)
    for event, phase in (*moments, *itertools.product(EVENTS, [Both])):
        best = least(fitting(pairs, event, phase))
        if len(best) > 1:
            assert phase is Both
            with pytest.raises(AmbiguityError):
                several.on.lookup(event, phase)
            continue
        entry = several.on.lookup(event, phase)
        assert (entry and (entry.event, entry.phase)) == (best[0] if best else None)


@settings(max_examples=300)
@given(PAIRS, PAIRS)
def test_registering_handlers_matches_defining_them(pairs: list[Pair], more: list[Pair]) -> None:
    try:
        at_once = define(list(dict.fromkeys([*pairs, *more])))
    except AmbiguityError:
        return
    try:
        late, sub = define(pairs), None
        sub = type("Sub", (late,), {})
        for pair in more:

            @late.on.register(*pair)
            def run(self: Any, event: Any, phase: Any, learner: Any) -> None: ...

    except AmbiguityError:
        return  # what would have settled it was not there yet
    for cls in (late, sub):
        assert set(cls.on.entries) == set(at_once.on.entries)
        assert set(cls.on.registry) == set(at_once.on.registry)
        for event, phase in itertools.product(EVENTS, PHASES):
            one, other = cls.on.lookup(event, phase), at_once.on.lookup(event, phase)
            assert (one and one.title()) == (other and other.title())
