"""How two callbacks of a set stand to each other."""

import pytest

from fluxcb import Append, Callback, DeclarationError, NoConflict, Read, Write, in_order, on
from fluxcb._check.between import between, find
from fluxcb._check.preflight import derive_graph
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
    graph = derive_graph(callbacks, (TrainingPhase, ValidationPhase))
    return between(graph, find(graph, a), find(graph, b)).splitlines()


@pytest.mark.parametrize("names", [("Writes", "Passes"), ("Passes", "Writes")])
def test_an_edge(names):
    assert told([Passes(), Writes()], *names) == [
        "Writes() runs before Passes().",
        "  because Writes writes `cbstate.a`, Passes reads it",
        "  at StepEnd x TrainingPhase",
    ]


def test_a_way_over_others():
    assert told([Reads(), Passes(), Writes()], "Reads", "Writes") == [
        "Writes() runs before Reads(): Writes() -> Passes() -> Reads().",
        "  Writes() before Passes(): Writes writes `cbstate.a`, Passes reads it",
        "  Passes() before Reads(): Passes writes `cbstate.b`, Reads reads it",
        "  at StepEnd x TrainingPhase",
    ]


def test_an_order_that_was_stated():
    assert told([in_order(Writes(), Also())], "Also", "Writes") == [
        "Writes() runs before Also().",
        "  because in_order",
        "  at StepEnd x TrainingPhase",
    ]


def test_two_that_are_free():
    assert told([Aside(), Writes()], "Writes", "Aside") == [
        "Writes() and Aside() are free: nothing orders them.",
        "  because neither writes what the other reads or writes",
        "  Aside() happens to come before Writes(), by its place in the list",
        "  at StepEnd x TrainingPhase",
    ]


def test_two_traced_ones_that_are_free():
    assert told([Spread(), Norm()], "Spread", "Norm")[2] == (
        "  Norm() happens to come before Spread(), by the name of its class"
    )


def test_one_that_may_cancel_comes_last():
    assert told([Stops(), Writes()], "Writes", "Stops")[2] == (
        "  Writes() happens to come before Stops(), because the other may cancel the rest"
    )


def test_two_that_are_free_because_one_says_so():
    assert told([Writes(), Agrees()], "Writes", "Agrees")[1] == "  because Agrees.resolveconflict says NoConflict()"


def test_a_conflict():
    lines = told([Writes(), Also()], "Writes", "Also")
    assert lines[0] == "Writes() and Also() both write `cbstate.a` and no order is declared."
    assert lines[-1] == "  at StepEnd x TrainingPhase"


def test_two_that_never_meet():
    assert told([Early(), Reads()], "Early", "Reads") == [
        "Early() and Reads() never run at the same moment, so nothing has to order them.",
        "  Early() runs at EpochBegin x TrainingPhase",
        "  Reads() runs at StepEnd x TrainingPhase",
    ]


def test_moments_with_the_same_answer_are_told_together():
    assert told([Follower(), Both()], "Both", "Follower") == [
        "Both() runs before Follower().",
        "  because Both writes `cbstate.a`, Follower reads it",
        "  at StepEnd x TrainingPhase, EpochEnd x TrainingPhase",
    ]


def test_names():
    graph = derive_graph([Aside(), Writes(), Writes()], (TrainingPhase,))
    assert find(graph, "Aside").position == 0
    assert find(graph, "Writes() #2").position == 2
    with pytest.raises(DeclarationError) as caught:
        find(graph, "Asid")
    assert str(caught.value) == (
        "There is no callback 'Asid' in this set. Did you mean `Aside`?\n  fix:   it has Aside(), Writes(), Writes() #2"
    )
    one = find(graph, "Writes()")
    assert one.position == 1
    with pytest.raises(DeclarationError, match=r"^Writes\(\) was named twice\."):
        between(graph, one, one)


def test_a_name_that_several_have():
    graph = derive_graph([Writes(), Writes()], (TrainingPhase,))
    with pytest.raises(DeclarationError) as caught:
        find(graph, "Writes")
    assert str(caught.value) == (
        "'Writes' means 2 callbacks of this set.\n  fix:   name one of them in full: 'Writes()', 'Writes() #2'"
    )
