"""Calling `init` of callbacks, and deciding which entries of `cbstate` are in the carry."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fluxcb._check.graph import CallbackGraph
from fluxcb._compile.arrays import own_copy
from fluxcb._compile.placement import Placement
from fluxcb._compile.plan import Plan
from fluxcb._declare.access import Write
from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.declared import Declared
from fluxcb._declare.signatures import method_place
from fluxcb._errors import DeclarationError, FluxcbError
from fluxcb._run.new_state import in_place
from fluxcb._run.state import HostState
from fluxcb._run.validate_callbacks import carried_entries
from fluxcb._tracebacks import warn_user

__all__ = ["initialize", "initialize_again"]


def initialize(
    graph: CallbackGraph, plan: Plan, state: HostState, placement: Placement | None, declared: Collection[Declared]
) -> dict[str, Any]:
    """Call `init` of callbacks, and return the entries of `cbstate` that are in the carry afterwards.

    Args:
        graph: The graph of all callbacks.
        plan: The plan whose proxies the callbacks get.
        state: The state of the run.
        placement: Where the carry lies.
        declared: The callbacks to initialize.
    """
    train = state.train
    before = train.carry["cbstate"]
    # The set of callbacks determines which entries are in the carry. So all entries are on the host while callbacks
    # initialize, and those that traced handlers use move to the carry afterwards.
    state.cbstate = {**state.cbstate, **before}
    train.carry = {**train.carry, "cbstate": {}}
    # In the order of the graph, so that `init` can read entries that another callback's `init` creates.
    for one in graph.init_order():
        if one not in declared or type(one.callback).init is Callback.init:
            continue
        # Whether this Learner has called its `init` before.
        is_known = getattr(unwrap(one.callback), "_fluxcb_owner", None) is not None
        before_init = dict(state.cbstate)
        existing = before_init if is_known and not one.is_shipped else {}
        try:
            one.callback.init(plan.proxy(one, one.access, in_init=True))
        except FluxcbError:  # already names the callback
            raise
        except BaseException as error:
            error.add_note(f"raised in the `init` of {one.label}")
            raise
        # A change of a container that `init` has received as a copy would be lost without notice.
        state.moment.lent.verify()
        # A subclass of a callback of fluxcb creates the entries of its base class.
        if not one.is_shipped and not any(b.__module__.startswith("fluxcb.callbacks.") for b in one.cls.__mro__):
            _refuse_taken_names(
                graph, one, [n for n, value in state.cbstate.items() if value is not before_init.get(n)]
            )
        for name, value in existing.items():
            if name in state.cbstate and state.cbstate[name] is not value:
                warn_user(
                    f"The callbacks list has changed, and the `init` of {one.label} replaced `cbstate.{name}`, which "
                    f'already existed. To keep its value, write `if "{name}" not in learner.cbstate:` before the '
                    "assignment.",
                    UserWarning,
                )
    moved = {name: own_copy(state.cbstate.pop(name)) for name in carried_entries(graph, state.cbstate)}
    train.carry = in_place(placement, {**train.carry, "cbstate": moved})
    return moved


def _refuse_taken_names(graph: CallbackGraph, one: Declared, assigned: Collection[str]) -> None:
    """Raise an error if the `init` of a user's callback has assigned an entry that a callback of fluxcb creates.

    Raises:
        DeclarationError: It has.
    """
    for name in assigned:
        for other in graph.declared:
            # `CustomCallback` and others use the entries that the user names.
            own = other.is_shipped and other.cls.init is not Callback.init and other.cls.access_argument is None
            if own and isinstance(other.access.get(("cbstate", name)), Write):
                raise DeclarationError(
                    f"The `init` of {one.label} assigns `cbstate.{name}`, which is an entry of {other.label}.",
                    where=method_place(one.cls, "init"),
                    why="an entry holds the values of one of them, and the other could not use it",
                    fix=f"give the entry of {one.label} another name",
                )


def initialize_again(
    graph: CallbackGraph, plan: Plan, state: HostState, placement: Placement | None, restored: Collection[str]
) -> None:
    """Initialize entries of `cbstate` that a checkpoint does not have, after it was restored.

    The `init` of a callback that the saved run did not have may copy the parameters. It has seen those with which the
    Learner was built.

    Args:
        graph: The graph.
        plan: The plan.
        state: The state of the run.
        placement: Where the carry lies.
        restored: The entries that the checkpoint has.
    """
    entries = {**state.cbstate, **state.train.carry["cbstate"]}
    missing = [name for name in entries if name not in restored]
    writers = [d for d in graph.declared if any(d.may_write(("cbstate", name)) for name in missing)]
    # Without an `init`, nothing would create them again.
    writers = [declared for declared in writers if type(declared.callback).init is not Callback.init]
    missing = [name for name in missing if any(d.may_write(("cbstate", name)) for d in writers)]
    if not missing:
        return
    carry = state.train.carry
    state.cbstate = {name: value for name, value in state.cbstate.items() if name not in missing}
    kept = {name: value for name, value in carry["cbstate"].items() if name not in missing}
    state.train.carry = {**carry, "cbstate": kept}
    made = initialize(graph, plan, state, placement, writers)
    # An `init` may create an entry only under some condition. Its first value then stays.
    gone = {name: entries[name] for name in missing if name not in made and name not in state.cbstate}
    carried = {name: value for name, value in gone.items() if name in carry["cbstate"]}
    state.cbstate.update({name: value for name, value in gone.items() if name not in carried})
    state.train.carry = {**state.train.carry, "cbstate": {**state.train.carry["cbstate"], **carried}}
