"""Any two built-in callbacks work together, or the documentation gives the reason and an alternative."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import fluxcb
import fluxcb.callbacks as library
from fluxcb import Callback, Read, Write, in_order
from fluxcb.events import TracedEvent
from tests.contract.every_callback import HOW, found

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/callback-conflicts.md"
SETTERS = (
    *("HumanHyperParamSetter", "HyperParamSetter", "HyperParamSetterWithFunc", "ReduceLROnPlateau"),
    *("ScheduledHyperParamSetter", "StatMonitorParamSetter"),
)

# For each pair that is refused, what the documentation suggests instead; None if one of the two has to go.
Cure = Callable[[Callback, Callback], list[Any]]
REFUSED: dict[frozenset[str], Cure | None] = {
    **{frozenset(pair): lambda a, b: [in_order(a, b)] for pair in itertools.combinations(SETTERS, 2)},
    **{frozenset(("Scheduler", setter)): None for setter in SETTERS},
    frozenset(("InferenceRunner", "DataParallelInferenceRunner")): lambda a, b: [
        a,
        type(b)(b.data, b.inferencers, name="other"),
    ],
    frozenset(("ParameterEMA", "StochasticWeightAveraging")): lambda a, b: [a, type(b)(3, validate=False)],
    frozenset(("CutMix", "MixUp")): None,
    frozenset(("SkipNonFinite", "StopOnNaNLoss")): None,
}


def keep(learner: Any) -> None:
    learner.cbstate.kept = learner.params


def made(name: str) -> Callback:
    if name == "RunFunction":  # the one inside PeriodicTrigger writes another entry
        return library.RunFunction(keep, init=keep, access={"params": Read(), "cbstate": {"kept": Write()}})
    return HOW.get(name, {}).get("make", getattr(library, name))()


# One of each class. The check reads what they declare and changes nothing, so that all sets can share them.
@pytest.fixture(scope="module")
def callbacks() -> dict[str, Callback]:
    return {name: made(name) for name in found()}


@pytest.fixture(scope="module")
def needed() -> dict[str, list[Callback]]:
    shared = {make: make() for how in HOW.values() for make in how.get("needs", ())}
    return {name: [shared[make] for make in HOW.get(name, {}).get("needs", ())] for name in found()}


def completed(items: Iterable[Callback], names: Iterable[str], needed: dict[str, list[Callback]]) -> list[Callback]:
    """Return the callbacks, and add the callbacks that they require."""
    items = list(items)
    for callback in dict.fromkeys(callback for name in names for callback in needed[name]):
        if type(callback) not in map(type, items):
            items.append(callback)
    return items


def traced_orders(graph: Any) -> dict[Any, list[str]]:
    return {
        moment: [handler.declared.label for handler in handlers]
        for moment, handlers in graph.orders.items()
        if issubclass(moment[0], TracedEvent)
    }


@pytest.mark.parametrize("name", found()[:-1])
@pytest.mark.parametrize("default_callbacks", [False, True], ids=["alone", "with defaults"])
def test_any_pair_is_valid_in_both_list_orders(name, default_callbacks, callbacks, needed):
    one = callbacks[name]
    for other_name in (other for other in callbacks if other > name):
        other, names = callbacks[other_name], (name, other_name)

        def check(items, names=names):
            return fluxcb.check(completed(items, names, needed), default_callbacks=default_callbacks)

        if frozenset(names) not in REFUSED:
            first, second = check([one, other]), check([other, one])
            assert traced_orders(first) == traced_orders(second), names
            continue
        for listed in ([one, other], [other, one]):
            with pytest.raises(fluxcb.CheckError):
                check(listed)
        cure = REFUSED[frozenset(names)]
        if cure is not None:
            fluxcb.check([*cure(one, other), *completed([], names, needed)], default_callbacks=default_callbacks)


@pytest.mark.parametrize("chosen", [0, 1], ids=["one half", "the other half"])
def test_all_compatible_callbacks_are_valid_together(chosen, callbacks, needed):
    """Orders that are harmless between two callbacks can form a cycle of three or more."""
    excluded = {sorted(pair)[chosen] for pair in REFUSED if not pair <= {*SETTERS, "Scheduler"}}
    excluded |= {"Scheduler"} if chosen else set(SETTERS)
    names = [name for name in callbacks if name not in excluded]
    items = completed((callbacks[name] for name in names if name not in SETTERS), names, needed)
    setters = [in_order(*(callbacks[name] for name in SETTERS))] if chosen else []
    orders = [traced_orders(fluxcb.check([*setters, *listed])) for listed in (items, items[::-1])]
    assert orders[0] == orders[1]
    assert sum(map(len, orders[0].values())) > 20


def test_docs_list_incompatible_pairs():
    _, begun, rest = PAGE.read_text(encoding="utf-8").partition("<!-- table: refused pairs -->\n")
    assert begun
    listed = set()
    for row in rest.strip().split("\n\n")[0].splitlines()[2:]:
        ones, others = (re.findall(r"`(\w+)", cell) for cell in row.strip("|").split("|")[:2])
        listed |= {frozenset(pair) for pair in itertools.product(ones, others) if len(set(pair)) == 2}
    assert listed == set(REFUSED)
