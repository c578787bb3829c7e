"""The list of callbacks: valid contents, `in_order`, `runafter`, labels and names."""

from __future__ import annotations

from typing import Any

import pytest

from fluxcb import Callback, every, in_order, resolveconflict, throttle
from fluxcb._declare.declared import declare
from fluxcb._errors import DeclarationError
from fluxcb.events import StepEnd


class Plain(Callback):
    def __init__(self, name: str | None = None) -> None:
        self.name = name


class After(Callback):
    def __init__(self, classes: Any) -> None:
        self.classes = classes

    def runafter(self) -> Any:  # after
        return self.classes


ONE = Plain()


@pytest.mark.parametrize(
    ("callbacks", "what", "fix"),
    [
        (
            ONE,
            "`callbacks` must be a list of callback instances, not Plain().",
            "put it into a list: `callbacks=[...]`",
        ),
        (
            {ONE},
            "`callbacks` must be a list of callback instances, not {Plain()}.",
            "put it into a list: `callbacks=[...]`",
        ),
        (None, "`callbacks` must be a list of callback instances, not None.", "put it into a list: `callbacks=[...]`"),
        (
            [Plain],
            "The callbacks list contains the class `Plain`, which is not a callback instance.",
            "write `Plain()`",
        ),
        (
            [print],
            "The callbacks list contains <built-in function print>, which is not a callback instance.",
            "for a metric, write `Metrics(function)`\n"
            "     or: for any other function, write `CustomCallback(function, StepEnd)`",
        ),
        (
            [in_order(ONE, 3)],  # type: ignore[arg-type]
            "The callbacks list contains 3, which is not a callback instance.",
            "for a metric, write `Metrics(function)`\n"
            "     or: for any other function, write `CustomCallback(function, StepEnd)`",
        ),
    ],
)
def test_invalid_callbacks_list_raises(callbacks: Any, what: str, fix: str, refused: Any) -> None:
    with refused(DeclarationError, f"{what}\n  fix:   {fix}"):
        declare(callbacks)


@pytest.mark.parametrize(
    ("build", "second", "first", "position"),
    [
        (lambda a, b: [a, b, a], "Plain()", "Plain()", 0),
        (lambda a, b: [b, a, every(a, steps=2)], "Plain() at EverySteps(steps=2)", "Plain()", 1),
        (lambda a, b: [throttle(a, StepEnd, freq=2), a], "Plain()", "Plain() at EverySteps(steps=2), StepEnd", 0),
        (lambda a, b: [in_order(a, b), every(b, epochs=1)], "Plain() at EveryEpochs(epochs=1)", "Plain()", 1),
    ],
)
def test_duplicate_instance_raises(build: Any, second: str, first: str, position: int, refused: Any) -> None:
    with refused(
        DeclarationError,
        f"The callback {second} appears twice in the list; first as {first} at position {position}.\n"
        "  why:   an instance has only one state, and it would run twice at each moment\n"
        "  fix:   remove one of the two, or create a second instance",
    ):
        declare(build(Plain(), Plain()))


def test_in_order_states_all_pairs() -> None:
    a, b, c = Plain("a"), Plain("b"), Plain("c")
    declared, ordered = declare([a, in_order(c, b), Plain("d")])
    assert [d.name for d in declared] == ["a", "c", "b", "d"]
    assert ordered == [(1, 2)]
    assert declare([in_order(a, b, c)])[1] == [(0, 1), (0, 2), (1, 2)]


def test_instance_may_be_in_several_groups_and_in_list() -> None:
    a, b, c = Plain("a"), Plain("b"), Plain("c")
    for listed, names, pairs in (
        ([in_order(a, b), in_order(b, c)], "abc", [(0, 1), (1, 2)]),
        ([in_order(b, c), in_order(a, b)], "bca", [(0, 1), (2, 0)]),
        ([c, b, a, in_order(a, b)], "cba", [(2, 1)]),
        ([in_order(a, b), c, a], "abc", [(0, 1)]),
    ):
        declared, ordered = declare(listed)
        assert ("".join(d.name for d in declared), ordered) == (names, pairs)


def test_in_order_requires_two_different_callbacks(refused: Any) -> None:
    for few in ([], [ONE]):
        with refused(
            DeclarationError,
            f"`in_order` takes two or more callbacks, but got {len(few)}.\n"
            "  fix:   write `in_order(first, second)` inside the callbacks list",
        ):
            in_order(*few)
    with refused(
        DeclarationError,
        "`in_order` was given Plain() twice.\n  why:   a callback cannot run before itself\n  fix:   name each "
        "callback once",
    ):
        in_order(ONE, Plain(), ONE)
    for group, kind in (
        ([ONE, Plain()], "a list"),
        ((ONE, Plain()), "a tuple"),
        (in_order(ONE, Plain()), "another `in_order(...)`"),
    ):
        with refused(
            DeclarationError,
            f"`in_order` takes callbacks as arguments, not {kind}.\n"
            "  fix:   write `in_order(first, second)` inside the callbacks list\n"
            "     or: unpack a list: `in_order(*callbacks)`",
        ):
            in_order(group)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("classes", "what", "fix"),
    [
        (Plain, "must return a tuple of callback classes, not Plain.", "return `(Plain,)`"),
        (None, "must return a tuple of callback classes, not None.", "return e.g. `(Recorder,)`"),
        ({Plain}, f"must return a tuple of callback classes, not {{{Plain!r}}}.", "return e.g. `(Recorder,)`"),
        ((int,), "names <class 'int'>, which is not a callback class.", "return a tuple of subclasses of Callback"),
        ("Plain", "must return a tuple of callback classes, not 'Plain'.", "return `(Plain,)`"),
        ((Plain(),), "names Plain(), which is not a callback class.", "name the class: `(Plain,)`"),
    ],
)
def test_invalid_runafter_raises(classes: Any, what: str, fix: str, refused: Any) -> None:
    with refused(DeclarationError, f"`After.runafter` {what}\n  where: After.runafter  <@after>\n  fix:   {fix}"):
        declare([After(classes)])


def test_runafter_accepts_any_sequence_of_classes() -> None:
    (declared,) = declare([After([Plain, Callback])])[0]
    assert declared.runafter == (Plain, Callback)


def test_runafter_that_names_its_own_class_raises(refused: Any) -> None:
    with refused(
        DeclarationError,
        "`After.runafter` names `After`, its own class.\n"
        "  where: After.runafter  <@after>\n"
        "  why:   a callback cannot run before itself\n"
        "  fix:   name the class of the callback that runs first\n"
        "     or: for two instances of `After`, leave `After` out of `runafter`, and write `in_order(first, second)` "
        "in the callbacks list",
    ):
        declare([After((Plain, After))])
    first, second = After((Plain,)), After((Plain,))
    assert declare([in_order(first, second)])[1] == [(0, 1)]


def test_subclass_may_inherit_runafter_that_names_its_base() -> None:
    class AfterAll(After): ...

    assert declare([AfterAll((After,))])[0][0].runafter == (After,)


def test_labels_are_unique_and_wrappers_keep_names() -> None:
    inner = Plain("mine")
    declared, _ = declare([Plain(), Plain(), every(Plain(), steps=3), every(inner, epochs=2), After(())])
    assert [(d.label, d.name, d.cls, d.position) for d in declared] == [
        ("Plain()", "Plain", Plain, 0),
        ("Plain() #2", "Plain#2", Plain, 1),
        ("Plain() at EverySteps(steps=3)", "Plain#3", Plain, 2),
        ("Plain() at EveryEpochs(epochs=2)", "mine", Plain, 3),
        ("After()", "After", After, 4),
    ]


def test_registering_resolution_requires_classes(refused: Any) -> None:
    with refused(
        DeclarationError,
        "`resolveconflict.register` takes two callback classes, not Plain().\n"
        "  fix:   for two instances of one class, write `in_order(first, second)`",
    ):
        resolveconflict.register(Plain, ONE)  # type: ignore[arg-type]
