"""State access: valid results of `stateaccess`, their normalized form, and overlapping paths."""

from __future__ import annotations

from typing import Any

import pytest

from fluxcb import Append, Callback, Read, RunFirst, Write, in_order, on
from fluxcb._declare.access import lookup, normalise, overlap, writes
from fluxcb._declare.declared import declare
from fluxcb._errors import DeclarationError
from fluxcb.events import EpochEnd, StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import EventLog


class Says(Callback):
    def __init__(self, access: Any) -> None:
        self.access = access

    def stateaccess(self) -> Any:  # says
        return self.access


def test_nested_mappings_become_paths() -> None:
    access = {
        "step": {"loss": Read(), "grads": Write()},
        "params": Read(borrow=True),
        "cbstate": {"a": {"b": Append()}},
    }
    assert normalise(access, owner="", where="") == {
        ("step", "loss"): Read(),
        ("step", "grads"): Write(),
        ("params",): Read(borrow=True),
        ("cbstate", "a", "b"): Append(),
    }


@pytest.mark.parametrize(
    ("access", "what", "fix"),
    [
        (
            ["step"],
            "`Says.stateaccess` must return a mapping of state to permissions, not list ['step'].",
            'return e.g. `{"step": {"loss": Read()}}`, or `{}` for no access',
        ),
        (
            None,
            "`Says.stateaccess` must return a mapping of state to permissions, not NoneType None.",
            'return e.g. `{"step": {"loss": Read()}}`, or `{}` for no access',
        ),
        (
            {"step": {"grads": Write}},
            "`Says.stateaccess` maps `step.grads` to the class Write, which is not a permission.",
            'use an instance of Read, Write or Append, e.g. `{"step": {"grads": Write()}}`',
        ),
        (
            {"step": {"loss": "read"}},
            "`Says.stateaccess` maps `step.loss` to str 'read', which is not a permission.",
            'use an instance of Read, Write or Append, e.g. `{"step": {"loss": Read()}}`',
        ),
        (
            {"params": int},
            "`Says.stateaccess` maps `params` to the class int, which is not a permission.",
            'use an instance of Read, Write or Append, e.g. `{"params": Read()}`',
        ),
        (
            {"step": ["loss"]},
            "`Says.stateaccess` maps `step` to list ['loss'], which is not a permission.",
            'use an instance of Read, Write or Append, e.g. `{"step": Read()}`',
        ),
        (
            {"step.loss": Read()},
            "`Says.stateaccess` has the key 'step.loss' at the top level; keys are single names.",
            'nest it: `{"step": {"loss": Read()}}`',
        ),
        (
            {"cbstate": {"a.b": Read()}},
            "`Says.stateaccess` has the key 'a.b' under `cbstate`; keys are single names.",
            'nest it: `{"a": {"b": Read()}}`',
        ),
        (
            {"step": {3: Read()}},
            "`Says.stateaccess` has the key 3 under `step`; keys are single names.",
            "use a name",
        ),
        (
            {"": Read()},
            "`Says.stateaccess` has the key '' at the top level; keys are single names.",
            "use a name",
        ),
    ],
)
def test_invalid_access_raises(access: Any, what: str, fix: str, refused: Any) -> None:
    with refused(DeclarationError, f"{what}\n  where: Says.stateaccess  <@says>\n  fix:   {fix}"):
        declare([Says(access)])


def test_access_may_depend_on_instance_and_is_read_once() -> None:
    asked: list[Any] = []

    class Counting(Says):
        def stateaccess(self) -> Any:
            asked.append(self.access)
            return self.access

    one, two = declare([Counting({"params": Read()}), Counting({"params": Write()})])[0]
    assert (one.access, two.access) == ({("params",): Read()}, {("params",): Write()})
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("a", "b", "shared"),
    [
        ("step.loss", "step.loss", True),
        ("step.loss", "step", True),
        ("step.loss", "step.grads", False),
        ("cbstate.a.b", "cbstate.a", True),
        ("cbstate.a.b", "cbstate.a.c", False),
        ("cbstate.a", "cbstate.ab", False),
        ("*", "data.training", True),
        ("hyperparams.lr", "opt_state", True),
        ("hyperparams", "opt_state", True),
        ("hyperparams.lr", "hyperparams.decay", False),
        ("model", "params", True),
        ("model", "model_state", True),
        ("params", "model_state", False),
        ("params", "opt_state", False),
        ("hyperparams", "params", False),
    ],
)
def test_overlapping_paths(a: str, b: str, shared: bool) -> None:
    one, other = tuple(a.split(".")), tuple(b.split("."))
    assert overlap(one, other) is shared
    assert overlap(other, one) is shared


def test_repr_shows_arguments_that_are_not_defaults() -> None:
    assert repr([Read(), Read(previous=True), Read(borrow=True), Write(), Append(), Append(optional=True)]) == (
        "[Read(), Read(previous=True), Read(borrow=True), Write(), Append(), Append(optional=True)]"
    )
    assert repr(in_order(EventLog(), EventLog())) == "in_order(EventLog(), EventLog())"
    assert repr(RunFirst(EventLog())) == "RunFirst(EventLog())"


def test_longest_prefix_wins_over_wildcard() -> None:
    access = {("*",): Read(previous=True), ("step",): Read(), ("step", "grads"): Write()}
    assert lookup(access, ("step", "grads", "kernel")) == Write()
    assert lookup(access, ("step", "loss")) == Read()
    assert lookup(access, ("params",)) == Read(previous=True)
    assert lookup({("step", "loss"): Read()}, ("step",)) is None
    assert [writes(p) for p in (Read(), Read(previous=True), Write(), Append())] == [False, False, True, True]


def test_narrowed_handler_has_its_own_access() -> None:
    class Narrow(Callback):
        def stateaccess(self) -> Any:
            return {"step": Write(), "*": Read()}

        @on(access={"step": {"loss": Read()}, "params": Read(), "cbstate": {"x": Read(previous=True)}})
        def narrowed(self, event: StepEnd, phase, learner) -> None: ...

        @on
        def whole(self, event: EpochEnd, phase, learner) -> None: ...

    (declared,) = declare([Narrow()])[0]
    narrowed, whole = (declared.handler(event, TrainingPhase) for event in (StepEnd, EpochEnd))
    assert narrowed is not None
    assert whole is not None
    assert narrowed.access == {("step", "loss"): Read(), ("params",): Read(), ("cbstate", "x"): Read(previous=True)}
    assert whole.access == {("step",): Write(), ("*",): Read()}


@pytest.mark.parametrize(
    ("granted", "wanted", "permission", "path", "line"),
    [
        (
            {"step": {"loss": Read()}},
            {"step": {"loss": Write()}},
            "Write()",
            "step.loss",
            '{"step": {"loss": Write()}}',
        ),
        ({"step": {"loss": Read()}}, {"step": Read()}, "Read()", "step", '{"step": Read()}'),
        ({"step": {"loss": Read()}}, {"params": Read()}, "Read()", "params", '{"params": Read()}'),
        ({"*": Read()}, {"cbstate": {"a": Append()}}, "Append()", "cbstate.a", '{"cbstate": {"a": Append()}}'),
    ],
)
def test_handler_cannot_widen_class_access(
    granted: Any, wanted: Any, permission: str, path: str, line: str, refused: Any
) -> None:
    class Wide(Says):
        @on(access=wanted)  # wide
        def run(self, event: StepEnd, phase, learner) -> None: ...

    with refused(
        DeclarationError,
        "The access of `Wide.run` is wider than that of its class: `stateaccess` does not grant "
        f"{permission} on `{path}`.\n"
        "  where: Wide.run  <@wide>\n"
        "         Says.stateaccess  <@says>\n"
        "  why:   a handler's own access can only narrow what the class declares\n"
        f"  fix:   add `{line}` to `Wide.stateaccess`",
    ):
        declare([Wide(granted)])[0][0].handler(StepEnd, TrainingPhase)


def test_handler_access_is_validated(refused: Any) -> None:
    class Bad(Says):
        @on(access={"params": Read})  # bad-leaf
        def run(self, event: StepEnd, phase, learner) -> None: ...

    with refused(
        DeclarationError,
        "`@on(access=...) of Bad.run` maps `params` to the class Read, which is not a permission.\n"
        "  where: Bad.run  <@bad-leaf>\n"
        '  fix:   use an instance of Read, Write or Append, e.g. `{"params": Read()}`',
    ):
        declare([Bad({"params": Read()})])[0][0].handler(StepEnd, TrainingPhase)
