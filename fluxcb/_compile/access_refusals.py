"""The errors for accesses that a handler may not make, each with the line to add or the name that was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from fluxcb._compile.optimizers import nearest_hyperparameter
from fluxcb._declare.access import MONITORS, Append, Permission, Read, Write, code_reading, dotted, lookup, writes
from fluxcb._declare.declared import Declared
from fluxcb._declare.state import (
    ALIASES,
    COUNTER_ALIASES,
    FIRST_LEVEL,
    MONITOR_ALIASES,
    MONITOR_METHODS,
    PROGRESS,
    UNDECLARED,
)
from fluxcb._errors import AccessError, FluxcbError, nearest
from fluxcb._typing import StatePath

__all__ = ["NAMESPACES", "Refusal", "RefusingBackend"]

NAMESPACES = ("step", "cbstate", "hyperparams", "progress", "data")
"""First-level names that have parts. A permission on such a name includes all of its parts."""

# An entry of each namespace in which handlers may write, for messages.
_ENTRIES = {"step": "my_value", "cbstate": "my_value", "hyperparams": "learning_rate", "data": "training"}
_COUNTERS = (*COUNTER_ALIASES, *(name for name in PROGRESS if name != "step"))
_STOPS = ("stop", "stop_training", "should_stop", "stop_reason")
_METHODS = ("evaluate", "predict", "fit", "run_epoch", "run_step", "replay", "save", "restore")
_MISSING = "uses `learner.{}`, which handlers do not have."


class RefusingBackend(Protocol):
    """What the target of a proxy's reads and writes knows about refused accesses."""

    def refused_write(self, path: StatePath) -> FluxcbError | None:
        """Return the error for a write that would also be refused after it is declared, otherwise None."""
        ...

    def undeclared_fix(self, path: StatePath, permission: Permission) -> str:
        """Return the complete fix for an undeclared access if its declaration alone is not sufficient, otherwise ""."""
        ...


@dataclass(frozen=True)
class Refusal:
    """An access that a handler may not make.

    Attributes:
        path: The path.
        needed: The permission that the access needs.
        backend: The target of the handler's reads and writes.
        declared: The callback.
        where: The location of its access declaration.
        readable: The names beside the refused one that the handler may read.
        writable: Those that it may write.
        existing: Those that are known to exist, including names that the handler may not access.
        in_init: Whether the access is made by `init` instead of a handler.
    """

    path: StatePath
    needed: Permission
    backend: RefusingBackend
    declared: Declared
    where: str
    readable: frozenset[str]
    writable: frozenset[str]
    existing: frozenset[str]
    in_init: bool

    def error(self) -> FluxcbError:
        """Return the error."""
        path, needed, name = self.path, self.needed, self.path[-1]
        parent = path[:-1]
        if path == ("control",):
            return AccessError(
                f"{self.declared.label} {'writes' if isinstance(needed, Write) else 'reads'} `control`, "
                "which is a permission and has no value.",
                where=self.where,
                why='`"control": Append()` lets host handlers of StepBegin and StepEnd raise a Cancel',
                fix=[
                    "raise CancelStep, CancelEpoch or CancelFitting in a host handler",
                    "write `learner.step.skip` or `learner.step.stop` in a traced handler",
                ],
            )
        if isinstance(needed, Write) and path[0] in UNDECLARED:
            return AccessError(
                f"{self.declared.label} writes `{dotted(path)}`, which only the engine may write.",
                where=self.where,
                fix="keep your own counts in `learner.cbstate`",
            )
        if parent == ("progress",):
            return self._unknown_counter(name)
        writing = writes(needed)
        if writing and not parent and name in NAMESPACES:
            return self._assigned_whole(name)
        # Declaring a write that the backend refuses anyway would lead to the next error.
        if writing and (error := self.backend.refused_write(path)) is not None:
            return error
        verb = {Write: "write", Append: "append to"}.get(type(needed), "read")
        known = sorted(self.existing, key=lambda name: (name not in self.readable, name))  # declared names first
        # Hyperparameters have other names in other libraries, such as `lr`, which are not similar in spelling.
        near = nearest_hyperparameter if parent == ("hyperparams",) else nearest
        # A name that exists only needs a declaration.
        suggestion = near(name, known) if name not in known else ""
        what = f"may not {verb} `{dotted(path)}`: its {self.declared.access_owner} does not declare it."
        fix: str | list[str] = self.declared.how_to_declare(path, needed)
        # These names have a meaning outside handlers or in other libraries, so no similar name is suggested.
        if not parent and name in (*ALIASES, *_COUNTERS, *_METHODS, *_STOPS, "emit", "log", "state"):
            what, fix = self._elsewhere(name, needed)
        elif parent == MONITORS and (method := _monitor_method(name)):
            what = f"uses `{dotted(path)}`, which is not a method. Did you mean `{method}`?"
            fix = [
                f"write `{code_reading((*parent, method))}(...)`",
                f"if `{name}` is the name of logged values, {self.declared.how_to_declare(path, needed)}",
            ]
        elif suggestion:
            what += f" Did you mean `{suggestion}`?"
            suggested_path = (*parent, suggestion)
            fix = f"write `{code_reading(suggested_path)}` instead of `{code_reading(path)}`"
            part = not parent and suggestion in NAMESPACES  # permissions are declared for parts of a namespace
            if not (suggestion in self.writable if writing else suggestion in self.readable or part):
                fix += f", and {self.declared.how_to_declare(suggested_path, needed)}"
            if parent == MONITORS:  # its entries have any name
                fix = [fix, self.declared.how_to_declare(path, needed)]
        # Parts of a learner have only the methods of a Mapping, which change nothing.
        elif parent and name in ("setdefault", "update", "pop"):
            entry = code_reading((*parent, "x"))
            fix = f'assign each entry, e.g. `if "x" not in {code_reading(parent)}: {entry} = 0`'
        elif not parent and name not in FIRST_LEVEL:
            what = f"{'writes' if writing else 'reads'} `{name}`, which is not part of the state."
            declare = self.declared.how_to_declare(("cbstate", name), Write())
            fix = f"for a value of your own, create `learner.cbstate.{name}` in `init`, and {declare}"
        # A write needs only its declaration, because handlers may create values of the step.
        elif parent == ("step",) and name not in known and not writing:
            fix = self._unknown_step_value(name, known)
        # `init` runs before all shared state exists.
        elif not self.in_init and (complete := self.backend.undeclared_fix(path, needed)):
            fix = complete
        elif writing and name in self.readable:
            what = f"declares only Read() on `{dotted(path)}`, but writes it."
        return AccessError(
            f"{self.declared.label} {what}",
            where=self.where,
            why="declared access determines order, conflicts and device-to-host transfers",
            fix=fix,
        )

    def _assigned_whole(self, name: str) -> AccessError:
        path = (name, _ENTRIES[name])
        known = lookup(self.declared.access, path)
        is_declared = known is not None and writes(known)
        declare = "" if is_declared else f", and {self.declared.how_to_declare(path, Write())}"
        return AccessError(
            f"{self.declared.label} assigns `{name}` as a whole, but only its entries can be assigned.",
            where=self.where,
            why=f"other callbacks use entries of `learner.{name}`",
            fix=f"assign each entry, e.g. `{code_reading(path)} = ...`{declare}",
        )

    def _unknown_counter(self, name: str) -> AccessError:
        meant = COUNTER_ALIASES.get(name) or nearest(name, PROGRESS)
        hint = f" Did you mean `{meant}`?" if meant else ""
        return AccessError(
            f"{self.declared.label} reads `progress.{name}`, which is not a counter.{hint}",
            where=self.where,
            why=f"`learner.progress` has {', '.join(PROGRESS)}",
            fix=f"write `learner.progress.{meant}` instead of `learner.progress.{name}`"
            if meant
            else "read one of these",
        )

    def _unknown_step_value(self, name: str, known: Iterable[str]) -> list[str]:
        """Return the fixes for a step value that may be a mistake, or may be written by another callback."""
        declare = self.declared.how_to_declare(("step", name), Read())
        meant = COUNTER_ALIASES.get(name)
        fixes = [f"if a phase or another callback provides it, {declare}"]
        if meant:
            return [f"write `learner.progress.{meant}` instead of `learner.step.{name}`", *fixes]
        return [*fixes, f"otherwise read and declare one of {', '.join(sorted(known))}"]

    def _elsewhere(self, name: str, needed: Permission) -> tuple[str, str | list[str]]:
        """Return what is wrong with a name that the learner of a handler does not have, and how to mend it."""
        if name in _METHODS:
            return _MISSING.format(name), [
                f"call `learner.{name}` after `fit`",
                "measure on other data during the training with `InferenceRunner`",
            ]
        if name == "emit":
            fix = "give the callback the Learner itself, `callback.owner = learner`, and call `self.owner.emit(...)`"
            return _MISSING.format(name), fix
        if name == "stop_reason" and not writes(needed):
            return "reads `stop_reason`, which is not part of the state.", "read `event.reason` in a handler of FitEnd"
        if name in _STOPS:  # as in Keras and Lightning
            control = self.declared.how_to_declare(("control",), Append())
            what = f"writes `{name}`, which is not part of the state." if writes(needed) else _MISSING.format(name)
            return what, f'to end the fit, write `raise CancelFitting("reason")` in a host handler, and {control}'
        if name == "log":
            path: StatePath = ("cbstate", "monitors")
            declare = self.declared.how_to_declare(path, Append())
            return _MISSING.format(name), f'write `learner.cbstate.monitors.put_scalar("name", value)`, and {declare}'
        if name == "state":
            return _MISSING.format(name), "name the part, such as `learner.params` or `learner.opt_state`"
        # The names that remain are aliases of paths and counters.
        path = ALIASES.get(name) or ("progress", COUNTER_ALIASES.get(name, name))
        if path[0] == "progress" and writes(needed):
            return f"writes `{name}`, which only the engine may write.", "keep your own counts in `learner.cbstate`"
        if writes(needed) and (error := self.backend.refused_write(path)) is not None:
            return f"writes `{name}`, which is not part of the state.", list(error.fix)
        what = f"{'writes' if writes(needed) else 'reads'} `{name}`, which is not part of the state."
        declare = "" if path[0] == "progress" else f", and {self.declared.how_to_declare(path, needed)}"
        return what, f"write `{code_reading(path)}` instead of `learner.{name}`{declare}"


def _monitor_method(name: str) -> str:
    """Return the method of the hub of `Monitors` that a name means, or an empty string."""
    # Names of logged values, such as `history_loss`, can be similar to a method.
    close = difflib.get_close_matches(name, MONITOR_METHODS, n=1, cutoff=0.8)
    return MONITOR_ALIASES.get(name) or next(iter(close), "")
