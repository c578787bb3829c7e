"""Explanations of the order of two callbacks."""

import pytest

from fluxcb import Append, Callback, DeclarationError, NoConflict, Read, Write, in_order, on
from fluxcb._check.explain_pair import explain_pair, find_callback
from fluxcb._check.preflight import unchecked_graph
from fluxcb.events import BackwardEnd, EpochBegin, EpochEnd, StepEnd
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase, ValidationPhase


def at(event, access, phase=AbstractTrainingPhase, bases=(Callback,), **body):
    """Return a class with one handler."""

    @on(event, phase)
    def run(self, event, phase, learner):
        pass

    return type("Made", bases, {"run": run, "stateaccess": lambda self: access, "__module__": __name__, **body})


def named(name, *arguments, **options):
    cls = at(*arguments, **options)
    cls.__name__ = cls.__qualname__ = name
    return cls


Writes = named("Writes", StepEnd, {"cbstate": {"a": Write()}})
Passes = named("Passes", StepEnd, {"cbstate": {"a": Read(), "b": Write()}})
Reads = named("Reads", StepEnd, {"cbstate": {"b": Read()}})
Also = named("Also", StepEnd, {"cbstate": {"a": Write()}})
Aside = named("Aside", StepEnd, {"cbstate": {"c": Write()}})
Stops = named("Stops", StepEnd, {"control": Append()})
Early = named("Early", EpochBegin, {"cbstate": {"a": Write()}})
Both = named("Both", StepEnd | EpochEnd, {"cbstate": {"a": Write()}})
Follower = named("Follower", StepEnd | EpochEnd, {"cbstate": {"a": Read()}})
Norm = named("Norm", BackwardEnd, {"step": {"norm": Write()}})
Spread = named("Spread", BackwardEnd, {"step": {"spread": Write()}})


class Agrees(Also):
    def resolveconflict(self, other):
        return NoConflict()


def told(callbacks, a, b):
    graph = unchecked_graph(callbacks, (TrainingPhase, ValidationPhase))
    return explain_pair(graph, find_callback(graph, a), find_callback(graph, b)).splitlines()


@pytest.mark.parametrize("names", [("Writes", "Passes"), ("Passes", "Writes")])
def test_explain_edge(names):
    assert told([Passes(), Writes()], *names) == [
        "Writes() runs before Passes().",
        "  because Writes writes `cbstate.a`, Passes reads it",
        "  at StepEnd x TrainingPhase",
    ]


def test_explain_indirect_order():
    assert told([Reads(), Passes(), Writes()], "Reads", "Writes") == [
        "Writes() runs before Reads(): Writes() -> Passes() -> Reads().",
        "  Writes() before Passes(): Writes writes `cbstate.a`, Passes reads it",
        "  Passes() before Reads(): Passes writes `cbstate.b`, Reads reads it",
        "  at StepEnd x TrainingPhase",
    ]


def test_explain_in_order():
    assert told([in_order(Writes(), Also())], "Also", "Writes") == [
        "Writes() runs before Also().",
        "  because in_order",
        "  at StepEnd x TrainingPhase",
    ]


def test_explain_independent_callbacks():
    assert told([Aside(), Writes()], "Writes", "Aside") == [
        "Writes() and Aside() need no order.",
        "  because neither writes state that the other reads or writes",
        "  Aside() currently runs before Writes(), by its place in the list",
        "  at StepEnd x TrainingPhase",
    ]


def test_explain_independent_traced_callbacks():
    assert told([Spread(), Norm()], "Spread", "Norm")[2] == (
        "  Norm() currently runs before Spread(), by the name of its class"
    )


def test_explain_callback_that_may_cancel():
    assert told([Stops(), Writes()], "Writes", "Stops")[2] == (
        "  Writes() currently runs before Stops(), because the other may cancel the rest"
    )


def test_explain_no_conflict_resolution():
    assert told([Writes(), Agrees()], "Writes", "Agrees")[1] == "  because Agrees.resolveconflict returns NoConflict()"


def test_explain_conflict():
    lines = told([Writes(), Also()], "Writes", "Also")
    assert lines[0] == "Writes() and Also() both write `cbstate.a` and no order is declared."
    assert lines[-1] == "  at StepEnd x TrainingPhase"


def test_explain_callbacks_without_common_moment():
    assert told([Early(), Reads()], "Early", "Reads") == [
        "Early() and Reads() never run at the same moment, so they need no order.",
        "  Early() runs at EpochBegin x TrainingPhase",
        "  Reads() runs at StepEnd x TrainingPhase",
    ]


def test_explain_groups_moments_with_same_answer():
    assert told([Follower(), Both()], "Both", "Follower") == [
        "Both() runs before Follower().",
        "  because Both writes `cbstate.a`, Follower reads it",
        "  at StepEnd x TrainingPhase, EpochEnd x TrainingPhase",
    ]


def test_find_callback_by_name():
    graph = unchecked_graph([Aside(), Writes(), Writes()], (TrainingPhase,))
    assert find_callback(graph, "Aside").position == 0
    assert find_callback(graph, "Writes() #2").position == 2
    with pytest.raises(DeclarationError) as caught:
        find_callback(graph, "Asid")
    assert str(caught.value) == (
        "There is no callback 'Asid' in this set. Did you mean `Aside`?\n  fix:   it has Aside(), Writes(), Writes() #2"
    )
    one = find_callback(graph, "Writes()")
    assert one.position == 1
    with pytest.raises(DeclarationError, match=r"^Writes\(\) was named twice\."):
        explain_pair(graph, one, one)


def test_ambiguous_name_raises():
    graph = unchecked_graph([Writes(), Writes()], (TrainingPhase,))
    with pytest.raises(DeclarationError) as caught:
        find_callback(graph, "Writes")
    assert str(caught.value) == (
        "'Writes' matches 2 callbacks of this set.\n  fix:   use the full name of one of them: 'Writes()', "
        "'Writes() #2'"
    )
