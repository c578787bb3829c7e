"""`RunFunction`: a function of the declared state, run before training, on trigger, or with every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fluxcb._declare.access import Permission, line_to_add, normalise, writes
from fluxcb._declare.callback import Callback
from fluxcb._declare.dispatch import Entry
from fluxcb._declare.events import Event, FitBegin, HostEvent, StepBegin, StepEnd, TracedEvent, Trigger, UpdateEnd
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import Schedule
from fluxcb._errors import DeclarationError
from fluxcb._typing import StatePath
from fluxcb.callbacks.functions import function_of_learner

__all__ = ["RunFunction"]


class RunFunction(Callback):
    """Run a function of the declared state: before training, on each Trigger, or with every step.

    The same function may serve on the host and in the compiled step, if it stays in `jax.numpy`. Under
    `PeriodicTrigger(RunFunction(...), every_k_steps=500)`, Trigger comes every 500 steps.

    Args:
        fn: `fn(learner)`.
        run_before: Whether to run it once before the first step, at FitBegin. A later fit, and one that goes on from a
            saved state, do not run it again: what it did is in the state.
        run_as_trigger: Whether to run it at Trigger: after each epoch, or when a wrapper says.
        run_step: Whether to run it with every training step. True stands for UpdateEnd: it is traced, and sees the
            updated parameters. Any other event of a step can be named; at StepBegin and StepEnd it runs on the host.
        init: `init(learner)`: creates what `fn` writes in `cbstate`; often `fn` itself. It runs when the Learner is
            built, if such an entry is missing.
        access: What `fn` touches, as `stateaccess` would return it.
        name: What it is called in messages; the function's name by default.

    Access:
        What `access` says.

    Runs:
        FitBegin x Phase (host, once) with `run_before`; Trigger x Phase (host) with `run_as_trigger`; `run_step` x
        AbstractTrainingPhase (host or traced, as the event is).

    Cost:
        That of handlers with this access: one that writes what the step reads, ends a window where it is due on the
        host.

    Raises:
        DeclarationError: `fn` or `init` does not take one argument, nothing says when to run, or `run_step` is no event
            of a step.

    Example:
        >>> from fluxcb import Read, Write
        >>> from fluxcb.callbacks import PeriodicTrigger, RunFunction
        >>> from fluxcb.testing import testlearner
        >>> def update_target(learner):
        ...     learner.cbstate.target = learner.params
        >>> access = {"params": Read(), "cbstate": {"target": Write()}}
        >>> target = PeriodicTrigger(RunFunction(update_target, init=update_target, access=access), every_k_steps=3)
        >>> learner = testlearner(target, batches=4)
        >>> history = learner.fit(1)  # the target network of a DQN is that of step 3
        >>> bool(learner.cbstate["target"]["w"] == learner.params["w"])
        False

    Source:
        tensorpack, `RunOp`, which runs again before training after each resume; and `RunUpdateOps`, which is
        `RunFunction(fn, run_before=False, run_as_trigger=False, run_step=True)` here.
    """

    def __init__(
        self,
        fn: Callable[[Any], None],
        run_before: bool = True,
        run_as_trigger: bool = True,
        run_step: bool | type[Event] = False,
        *,
        init: Callable[[Any], None] | None = None,
        access: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        found = function_of_learner(fn, "`fn` of `RunFunction`")
        if init is not None:
            function_of_learner(init, "`init` of `RunFunction`")
        self.name = name or found
        self.fn, self.access = fn, {} if access is None else access
        self._init = init
        self._ran_before = False
        entries: list[Entry] = []
        for role, given, event in (("run_before", run_before, FitBegin), ("run_as_trigger", run_as_trigger, Trigger)):
            if not isinstance(given, bool):
                raise DeclarationError(f"`{role}` of `RunFunction` must be True or False, not {given!r}.")
            if given:
                entries.append(Entry(event, Phase, "before" if event is FitBegin else "run"))
        if run_step is not False:
            entries.append(Entry(_step_event(run_step), AbstractTrainingPhase, "run"))
        if not entries:
            raise DeclarationError(
                f"`RunFunction({self.name}, ...)` would never run.",
                fix="set one of `run_before`, `run_as_trigger` and `run_step`",
            )
        self._entries = tuple(entries)

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what the function touches, as it was given."""
        return self.access

    def how_to_declare(self, path: StatePath, permission: Permission) -> str:
        """Return the edit of the argument `access` that adds a path."""
        added = line_to_add(path, permission)
        return f"add `{added}` to the argument `access`" if self.access else f"pass the argument `access={added}`"

    def init(self, learner: Any) -> None:
        """Create what the function writes in `cbstate`, if anything of it is missing."""
        if self._init is not None and any(name not in learner.cbstate for name in self._written()):
            self._init(learner)

    def _written(self) -> list[str]:
        access = normalise(self.access, owner=repr(self), where="")
        return [path[1] for path, kind in access.items() if path[0] == "cbstate" and len(path) > 1 and writes(kind)]

    def state_dict(self) -> dict[str, Any]:
        """Return whether it ran before training."""
        return {"ran_before": self._ran_before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back whether it ran before training."""
        self._ran_before = state["ran_before"]

    def before(self, event: Event, phase: Phase, learner: Any) -> None:
        """Call the function, unless that has been done."""
        if not self._ran_before:
            self.fn(learner)
            self._ran_before = True

    def run(self, event: Event, phase: Phase, learner: Any) -> None:
        """Call the function."""
        self.fn(learner)

    # Which handlers there are differs from instance to instance.

    def handlers(self) -> list[Entry]:
        """Return the handlers of the chosen moments."""
        return [*super().handlers(), *self._entries]

    def entry_for(self, event: type[Event], phase: type[Phase]) -> tuple[Callback, Entry, tuple[Schedule, ...]] | None:
        """Return the handler of a chosen moment."""
        for entry in self._entries:
            if issubclass(event, entry.event) and issubclass(phase, entry.phase):
                return self, entry, ()
        return super().entry_for(event, phase)

    def __repr__(self) -> str:
        return f"RunFunction({self.name})"


def _step_event(given: Any) -> type[Event]:
    if given is True:
        return UpdateEnd
    fits = isinstance(given, type) and issubclass(given, TracedEvent | StepBegin | StepEnd)
    if not fits or given in (HostEvent, TracedEvent):
        raise DeclarationError(
            f"`run_step` of `RunFunction` must be True, False or an event of a step, not {given!r}.",
            fix="write `run_step=True` for UpdateEnd, or name e.g. `StepEnd`",
        )
    return given
