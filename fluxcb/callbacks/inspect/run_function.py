"""`RunFunction`: run a function before training, at each Trigger, or at every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fluxcb._declare.access import normalise, writes
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, FitBegin, HostEvent, StepBegin, StepEnd, TracedEvent, Trigger, UpdateEnd
from fluxcb._declare.handlers import Handler
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.arguments import flag, function_of, name_of, result_of

__all__ = ["RunFunction"]


class RunFunction(Callback):
    """Run a function of the declared state: before training, at each Trigger, or at every step.

    A function that only uses `jax.numpy` can run both on the host and in the compiled step. In
    `PeriodicTrigger(RunFunction(...), every_k_steps=500)`, the function runs every 500 steps.

    Args:
        fn: `fn(learner)`.
        run_before: Whether to run `fn` once before the first step, at FitBegin. A later or resumed fit does not run it
            again, because the state already contains its effect.
        run_as_trigger: Whether to run `fn` at Trigger, which is emitted after each epoch by default.
        run_step: Whether to run `fn` at every training step. True means UpdateEnd: `fn` is traced and sees the updated
            parameters. You can also pass another event of a step. At StepBegin and StepEnd, `fn` runs on the host.
        init: `init(learner)` creates the `cbstate` entries that `fn` writes. This is often `fn` itself. It runs when
            the Learner is built, if an entry is missing.
        access: The state that `fn` reads and writes, in the format of `stateaccess`.
        name: The name of the callback in messages; the name of the function by default.

    Access:
        The paths in `access`.

    Runs:
        FitBegin x Phase (host, once) with `run_before`; Trigger x Phase (host) with `run_as_trigger`; `run_step` x
        AbstractTrainingPhase (host or traced, depending on the event).

    Cost:
        Depends on `access`. A host handler that writes state which the step reads ends a window whenever it is due.

    Raises:
        DeclarationError: `fn` or `init` does not take one argument, the function would never run, or `run_step` is not
            an event of a step.

    Example:
        >>> from fluxcb import Read, Write
        >>> from fluxcb.callbacks import PeriodicTrigger, RunFunction
        >>> from fluxcb.testing import testlearner
        >>> def update_target(learner):
        ...     learner.cbstate.target = learner.params
        >>> access = {"params": Read(), "cbstate": {"target": Write()}}
        >>> target = PeriodicTrigger(RunFunction(update_target, init=update_target, access=access), every_k_steps=3)
        >>> learner = testlearner(target, batches=4)
        >>> history = learner.fit(1)  # the target was last updated at step 3, as in a DQN
        >>> bool(learner.cbstate["target"]["w"] == learner.params["w"])
        False

    Source:
        tensorpack, `RunOp`, which also runs after each resume, and `RunUpdateOps`, which corresponds to
        `RunFunction(fn, run_before=False, run_as_trigger=False, run_step=True)`.
    """

    access_argument = "access"

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
        self.fn = function_of(fn, "`fn` of `RunFunction`", "learner")
        if init is not None:
            function_of(init, "`init` of `RunFunction`", "learner")
        self.name = name or name_of(fn)
        self.access = {} if access is None else access
        self._init = init
        self._ran_before = False
        handlers: list[Handler] = []
        for role, value, event in (("run_before", run_before, FitBegin), ("run_as_trigger", run_as_trigger, Trigger)):
            flag(value, f"`{role}` of `RunFunction`")
            if value:
                handlers.append(Handler(event, Phase, "before" if event is FitBegin else "run"))
        if run_step is not False:
            handlers.append(Handler(_step_event(run_step), AbstractTrainingPhase, "run"))
        if not handlers:
            raise DeclarationError(
                f"`RunFunction({self.name}, ...)` would never run.",
                fix="write `run_before=True`, `run_as_trigger=True` or `run_step=True`",
            )
        self._handlers = tuple(handlers)

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the `access` argument."""
        return self.access

    def init(self, learner: LearnerView) -> None:
        """Call the `init` argument if an entry of `cbstate` that the function writes is missing."""
        if self._init is not None and any(name not in learner.cbstate for name in self._written()):
            self._init(learner)

    def _written(self) -> list[str]:
        access = normalise(self.access, owner=repr(self), where="")
        return [path[1] for path, kind in access.items() if path[0] == "cbstate" and len(path) > 1 and writes(kind)]

    def state_dict(self) -> dict[str, Any]:
        """Return whether the function has run before training."""
        return {"ran_before": self._ran_before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore whether the function has run before training."""
        self._ran_before = state["ran_before"]

    def before(self, event: Event, phase: Phase, learner: LearnerView) -> Any:
        """Call the function once per training."""
        if self._ran_before:
            return None
        value = result_of(self.fn, self.fn(learner))
        self._ran_before = True
        return value

    def run(self, event: Event, phase: Phase, learner: LearnerView) -> Any:
        """Call the function."""
        return result_of(self.fn, self.fn(learner))

    # The handlers depend on the arguments.

    def handlers(self) -> list[Handler]:
        """Return the handlers for the events that the arguments select."""
        return [*super().handlers(), *self._handlers]

    def __repr__(self) -> str:
        return f"RunFunction({self.name})"


def _step_event(run_step: Any) -> type[Event]:
    if run_step is True:
        return UpdateEnd
    fits = isinstance(run_step, type) and issubclass(run_step, TracedEvent | StepBegin | StepEnd)
    if not fits or run_step in (HostEvent, TracedEvent):
        raise DeclarationError(
            f"`run_step` of `RunFunction` must be True, False or an event of a step, not {run_step!r}.",
            fix="write `run_step=True` for UpdateEnd, or an event such as `run_step=StepEnd`",
        )
    return run_step
