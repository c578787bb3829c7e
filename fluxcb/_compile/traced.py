"""The state while a step is traced. It captures the reads and writes of handlers in functional form.

Handlers and phases assign attributes as if the Learner were mutable. The state is a flat
mapping of paths to tracers. Values that are assigned inside a gradient closure are returned from it as
auxiliary outputs, so that no tracer leaks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluxcb._compile.call_errors import HANDLER_NOTE, model_advice, noting, traced_failure, traced_returned
from fluxcb._compile.carry_paths import (
    check_loss,
    conforming,
    no_part_to_differentiate,
    replaced,
    root_of,
    writable_roots,
)
from fluxcb._compile.handler_backend import HandlerBackend, Touched
from fluxcb._compile.loss_gradient_check import Differentiated, GradWrites, InputWrites, LossWrites
from fluxcb._compile.protect import make_proxy
from fluxcb._compile.skip_records import OWN_SKIP, SkipRecords
from fluxcb._compile.step_setup import StepSetup
from fluxcb._compile.trace_effects import warn_of_random_numbers, warn_once_only
from fluxcb._compile.traced_schedules import is_due
from fluxcb._compile.updating import Gradient, Updates
from fluxcb._declare.access import STEP_FLAGS, dotted
from fluxcb._declare.declared import BoundHandler
from fluxcb._declare.events import ComputeEnd, Event, TracedEvent, UpdateEnd
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import Always, StepRange, Switched
from fluxcb._declare.state import CARRY
from fluxcb._errors import FluxcbError, TraceError, did_you_mean
from fluxcb._typing import PyTree, StatePath

try:
    from jax.extend.core import get_opaque_trace_state
except ImportError:  # JAX before 0.10
    from jax.core import get_opaque_trace_state

__all__ = ["COUNTERS", "TraceState", "name_hash", "scope_of"]

COUNTERS = ("step", "epoch", "step_in_epoch", "stopped")
"""The first words of the carry's `counters`, an int32[4 + words of the key + switches].

The words of the random key follow, and then a flag for each callback that can be switched off.

Each leaf of the carry costs time at every call (0.6 us), so these small values share one leaf.
"""


def name_hash(name: str) -> int:
    """Return the number with which a callback's random keys are folded. It is the same in every process."""
    # Python's `hash` of a str differs between processes.
    return zlib.crc32(name.encode()) & 0x7FFFFFFF


def scope_of(handler: BoundHandler) -> str:
    """Return the name of the scope in which the operations of a traced handler are traced."""
    # The name of the callback and not its class, because two instances of a class are separate costs.
    return f"fluxcb:{handler.declared.name}.{handler.name}"


class TraceState:
    """The state of one step that is being traced.

    Args:
        setup: The fixed inputs of the step.
        phase: The phase whose `step` is traced.
        carry: The carry, as tracers.
        batch: The batch, as tracers.

    Attributes:
        values: The state by path: `("params",)`, `("step", "loss")`, `("cbstate", "ema")`, ...
        touched: The state that each handler has used.
        losses, grads: The writes of handlers to `step.loss` and `step.grads`, and whether they are used.
        inputs: The writes of handlers to `step.batch` and `step.xs`, and whether they are used.
        updates: How the step changes the parameters.
        skips: Records which callbacks write `step.skip`, or None.
    """

    def __init__(self, setup: StepSetup, phase: Phase, carry: Mapping[str, Any], batch: PyTree) -> None:
        self.setup = setup
        self.phase = phase
        self.values: dict[StatePath, Any] = {(name,): carry[name] for name in CARRY if name != "key"}
        end = len(carry["counters"]) - len(setup.switches)
        words = jax.lax.bitcast_convert_type(carry["counters"][len(COUNTERS) : end], jnp.uint32)
        # The key itself never changes during a run; see `key_for`.
        self.values["key",] = jax.random.wrap_key_data(words, impl=setup.key_impl)
        self.values |= {("cbstate", name): value for name, value in carry["cbstate"].items()}
        self.values["step", "batch"] = batch
        # `trace_step` replaces it by a mapping that outlives the trace.
        self.touched: dict[BoundHandler, Touched] = {}
        self._counters = carry["counters"]
        self._external: dict[str, Any] = {}
        self.losses = LossWrites(phase)
        self.grads = GradWrites(phase)
        self.inputs = InputWrites(phase)
        self.updates = Updates(self)
        self._level = get_opaque_trace_state()
        self.differentiated: Differentiated | None = None  # what a phase's `learner.grad` differentiates now
        # True while an optimizer computes the loss again; see `replayed`.
        self._replays = False
        self._lineage = setup.lineage.begin(self) if setup.lineage is not None and type(phase).trains else None
        self.skips = SkipRecords(self) if setup.records_skips and type(phase).trains else None

    # -- actions of a phase's step ----------------------------------------------------------

    def finish(self) -> tuple[dict[str, Any], dict[str, PyTree]]:
        """Emit ComputeEnd after the phase's step has run.

        Returns:
            The new carry, and the step's values by name.
        """
        for writes in (self.losses, self.grads, self.inputs, self.updates):
            writes.finish()
        # After the update, so that metrics can read every value of the step.
        self.emit(ComputeEnd())
        if self._lineage is not None:
            self._lineage.finish(self)
        if self.skips is not None:
            self.skips.finish()
        step_values = {
            path[1]: jax.tree.map(jnp.asarray, value)
            for path, value in self.values.items()
            if path[0] == "step" and path[1] != "batch"
        }
        return self._new_carry(), step_values

    def _new_carry(self) -> dict[str, Any]:
        counters = self._counters
        stop = self.values.get(("step", "stop"))
        # `step` counts training steps only.
        trains = int(type(self.phase).trains)
        # Constants instead of slices need one kernel instead of three.
        place = np.arange(len(counters))
        counters = counters + np.where(place == 0, trains, np.where(place == 2, 1, 0)).astype(np.int32)
        # Without a handler that writes `step.stop`, the program has no operation for it.
        if stop is not None:
            counters = jnp.where(place == 3, stop.astype(jnp.int32), counters)
        return {
            **{name: self.values[name,] for name in CARRY if name != "key"},
            **self._external,
            "cbstate": {path[1]: value for path, value in self.values.items() if path[0] == "cbstate"},
            "counters": counters,
        }

    def assign_step(self, name: str, value: PyTree) -> None:
        """Set a step value for the phase. A loss that is replaced joins the earlier losses of the step."""
        if name == "loss" and ("step", "loss") in self.values:
            # Phases with several losses, such as GANs, assign `step.loss` once for each.
            earlier = self.values.get(("step", "earlier_losses"), ())
            self.values["step", "earlier_losses"] = (*earlier, self.values["step", "loss"])
        self.values["step", name] = value
        if name == "skip" and self.skips is not None:
            self.skips.assigned(value)

    def lend(self, name: str, value: PyTree) -> None:
        """Show handlers a part of the train state of a hand-written loop. The carry keeps its own part."""
        self._external.setdefault(name, self.values[name,])
        self.values[name,] = value
        self.updates.mark_external(name, value)

    def keep(self, name: str, value: PyTree) -> None:
        """Set the value that the carry keeps for a part of the train state of a hand-written loop."""
        self._external[name] = value

    def grad(self, function: Callable[[PyTree], Any], wrt: str) -> PyTree:
        """Differentiate a function that may emit events and assign state."""
        path = tuple(wrt.split("."))
        if path[:1] not in {("params",), ("model_state",)}:
            raise TraceError(
                f"`learner.grad(..., wrt={wrt!r})` can differentiate only with respect to `params` or a part of it.",
                fix='write `wrt="params"` or e.g. `wrt="params.generator"`',
            )
        parameters = self._part(path, wrt)
        before, level = dict(self.values), self._level
        outer, differentiated = self.differentiated, Differentiated(self.phase, wrt)

        def closure(x: PyTree, token: Any) -> tuple[Any, dict[StatePath, Any]]:
            # Assignments inside the gradient start from the state before it.
            self.losses.open_gradient(token)
            self.values = dict(before)
            x = differentiated.watched(x, "state")
            self.replace(path, x)
            # The parameters are tracers of the gradient here. Returning them unchanged would only add outputs.
            inside = self.values[path[:1]]
            self._level, self.differentiated = get_opaque_trace_state(), differentiated
            loss = function(differentiated.watched(x, "argument"))
            check_loss(loss)
            # As plain side effects in Python, written values would be tracers of a transformation that has ended.
            changed = {
                p: jax.tree.map(jnp.asarray, value)
                for p, value in self.values.items()
                if value is not (inside if p == path[:1] else before.get(p))
            }
            return loss, changed

        # The token makes JAX run the backward pass of a loss that depends on no parameter; its gradient is not used.
        (gradients, _), changed = jax.grad(closure, argnums=(0, 1), has_aux=True)(parameters, jnp.float32(0))
        self.losses.close_gradient()
        differentiated.check()
        self._level, self.differentiated = level, outer
        self.values = before | changed
        # `value_fn` can only call the function of the outermost gradient again, which depends on the parameters alone.
        if not (self._replays or self.inside_gradient or self.inside_foreign_transformation()):
            self.updates.gradients.append(Gradient(path, function, before, self.losses.changed_by))
        return gradients

    def _part(self, path: StatePath, wrt: str) -> PyTree:
        try:
            return self.get(path)
        except (KeyError, AttributeError, TypeError):
            raise no_part_to_differentiate(wrt, self.values[path[:1]]) from None

    def forward(self, params: PyTree, xs: PyTree) -> PyTree:
        """Apply the model. If the phase trains, use training mode, and keep the model's new state."""
        if self.setup.model is None:
            raise TraceError(
                f"`{type(self.phase).__name__}` calls `learner.forward`, but this Learner has no model.",
                why="`Learner.from_loss` was given a loss function that applies the model itself",
                fix="use `Learner(model, loss_fn, ...)`, or call `learner.loss_fn(params, batch, key)` in the step",
            )
        train = type(self.phase).trains
        advice = model_advice(xs, self.values["step", "batch"])
        with warn_of_random_numbers("The model"), noting("the model", xs, advice=advice):
            outputs, model_state = self.setup.model.apply(
                params, self.values["model_state",], xs, train=train, key=self.model_key()
            )
        self.keep_model_state(model_state, "The model changes the shape of its own state in a step")
        return outputs

    @contextmanager
    def replayed(self, values: Mapping[StatePath, Any]) -> Iterator[None]:
        """Compute from an earlier state. Events are not emitted, and assignments are discarded."""
        # The loss is computed a second time. Without this, its handlers would count the batch twice.
        before = self.values, self._level, self.losses, self._replays
        self.values, self._level = dict(values), get_opaque_trace_state()
        self.losses, self._replays = LossWrites(self.phase), True
        try:
            yield
        finally:
            self.values, self._level, self.losses, self._replays = before

    def model_key(self) -> Any:
        """Return the random key of this step for the model, and for the phase itself."""
        # By name and not by class, because a Learner replaces `TrainingPhase` by `LossTrainingPhase` for some loss
        # functions, and both forms of a loss must draw the same dropout masks. The prefix separates the key from that
        # of a callback with the same name.
        return self.key_for(f"phase {type(self.phase).name}")

    def keep_model_state(self, new: PyTree, what: str) -> None:
        """Keep the model's new state if the phase trains. An error about its shape begins with `what`."""
        if type(self.phase).trains:
            self.values["model_state",] = conforming(self.values["model_state",], new, what)

    # -- events and handlers ----------------------------------------------------------------

    def emit(self, event: Event) -> None:
        """Run the traced handlers of an event, in plan order."""
        if not isinstance(event, TracedEvent):
            raise TraceError(
                f"`{type(self.phase).__name__}.step` emits {event!r}, which is not a traced event.",
                why="a step is traced once, and host events happen between its calls",
                fix=f"derive `{type(event).__name__}` from TracedEvent",
            )
        if self.inside_foreign_transformation():
            raise TraceError(
                f"{event!r} is emitted inside a JAX transformation (grad, vmap, scan, ...) that fluxcb did not open.",
                where=f"{type(self.phase).__name__}.step",
                why="values that handlers write there would leak out of the transformation as tracers",
                fix='differentiate with `learner.grad(function, wrt="params")`, and emit outside other transformations',
            )
        if self._replays:
            return
        # Handlers of UpdateEnd, such as averages of the parameters, must not see an update that is skipped.
        if isinstance(event, UpdateEnd) and not self.inside_gradient:
            self.updates.announce()
        carried = {name: self.values[name,] for name in CARRY if name != "key"}
        # Only the last handler is recorded: each handler sees the loss of the previous one, so none of the writes is
        # lost.
        replaced_by = None
        if self._lineage is not None:
            self._lineage.compare(self, None, event)
        for handler in self.setup.handlers(type(event)):
            before = dict(self.values)
            # The scope names the handler's operations in profiles, and separates them from those of the model.
            with jax.named_scope(scope_of(handler)):
                self._run(handler, event)
            # By identity, because a handler that reads a value and assigns it again changes nothing.
            if self.skips is not None:
                self.skips.handled(handler, before)
            changed = {path for path, value in before.items() if path[0] == "step" and self.values[path] is not value}
            if ("step", "loss") in changed:
                replaced_by = handler
            if ("step", "grads") in changed:
                self.grads.written(event, handler)
            self.inputs.written(changed, event, handler)
            # `value_fn` would not repeat these changes. Flags do not affect the loss.
            if self.inside_gradient and changed.difference(STEP_FLAGS):
                self.losses.changed_by = handler
            for flag in ("skip", "hold"):
                if self.values.get(("step", flag)) is not before.get(("step", flag)):
                    self.updates.flagged(flag, event, handler)
            if self._lineage is not None:
                self._lineage.compare(self, handler, event)
        if replaced_by is not None:
            self.values["step", "loss"] = self.losses.written(self.values["step", "loss"], event, replaced_by)
        if not self.inside_gradient:
            self.updates.handled(carried)

    @property
    def inside_gradient(self) -> bool:
        """Whether a function given to `learner.grad` is being traced."""
        return self.losses.inside

    def inside_foreign_transformation(self) -> bool:
        """Return whether a transformation that fluxcb did not open (a plain `jax.grad`, ...) is being traced."""
        # JAX has no public function that returns the transformations that are being traced.
        return get_opaque_trace_state() != self._level

    def _run(self, handler: BoundHandler, event: Event) -> None:
        schedules = [s for s in handler.schedules if not isinstance(s, Always)]
        if not schedules:
            self._call(handler, event)
            return
        # The schedule is computed on the device, so one program serves all steps.
        due = jnp.bool_(True)
        for schedule in schedules:
            due &= is_due(schedule, handler, self.setup, self._counters, trains=type(self.phase).trains)
        # Only the values that the handler may write are outputs of `cond`.
        keys = writable_roots(handler.access, self.values)
        for key in keys:
            if key in STEP_FLAGS:
                # Both branches of `cond` must return the flag.
                self.values.setdefault(key, jnp.bool_(False))
        if ("step", "skip") in keys and self.skips is not None:
            self.values[OWN_SKIP] = jnp.bool_(False)
            keys.append(OWN_SKIP)
        keys = [key for key in keys if key in self.values]  # the others belong to other events of this callback
        before, level = dict(self.values), self._level
        created: list[StatePath] = []
        may_create = all(isinstance(schedule, Switched | StepRange) for schedule in schedules)

        def run(values: list[Any]) -> list[Any]:
            self.values = before | dict(zip(keys, values, strict=True))
            self._level = get_opaque_trace_state()
            self._call(handler, event)
            created[:] = [key for key in self.values if key not in before]
            # Checked inside the branch, because the new values would leak out of it as tracers.
            if created and not may_create:
                raise self._only_at_some_steps(handler, created[0])
            return [jax.tree.map(jnp.asarray, self.values[key]) for key in (*keys, *created)]

        def skip(values: list[Any]) -> list[Any]:
            return [*values, *(jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), spec) for spec in specs)]

        operands = [jax.tree.map(jnp.asarray, before[key]) for key in keys]
        # Values that a disabled callback does not create are zero. No other callback that is enabled reads them.
        specs = jax.eval_shape(run, operands)[len(keys) :] if may_create else []
        # `jnp.where` would run the handler at every step.
        after = jax.lax.cond(due, run, skip, operands)
        self._level = level
        self.values = before | dict(zip((*keys, *created), after, strict=True))

    def _only_at_some_steps(self, handler: BoundHandler, path: StatePath) -> TraceError:
        """Return the error for a value that only a scheduled handler creates, because other steps would not have it."""
        return TraceError(
            f"{handler.declared.label} writes `{dotted(path)}` only at some steps, "
            "and nothing gives it a value at the others.",
            where=handler.where,
            fix="let a handler without a schedule write a default first, or drop `traced=True`",
        )

    def _call(self, handler: BoundHandler, event: Event) -> None:
        backend = HandlerBackend(self, handler, event)
        source = backend.access_source
        where = source.where if source is not handler.declared else f"{source.where}\n{handler.where}"
        learner = make_proxy(handler.access, backend, declared=source, where=where)
        try:
            with warn_once_only(handler):
                returned = handler.function(event, self.phase, learner)
            if returned is not None:
                raise traced_returned(handler, returned)
        # These errors already name the handler.
        except FluxcbError:
            raise
        except BaseException as error:
            if (explained := traced_failure(handler, error)) is not None:
                raise explained from error
            error.add_note(f"{HANDLER_NOTE}{handler.where}, at {event!r} x {type(self.phase).__name__}")
            raise
        finally:
            backend.close()
        # Not in `finally`, because it would hide the exception of the handler.
        backend.verify()

    # -- state by path ----------------------------------------------------------------------

    def step_key(self) -> Any:
        """Return the random key of this step, from which those of callbacks are folded."""
        return jax.random.fold_in(self.values["key",], self._counters[0])

    def key_for(self, name: str) -> Any:
        """Return the random key of this step for a callback, or another user of keys, with this name."""
        # Computed at each call, because a cached key would leak from a gradient closure. XLA merges the copies.
        key = self.step_key()
        if not type(self.phase).trains:  # `progress.step` does not change in this phase
            key = jax.random.fold_in(jax.random.fold_in(key, self._counters[2]), name_hash(type(self.phase).name))
        return jax.random.fold_in(key, name_hash(name))

    def progress(self, name: str) -> Any:
        """Return the value of a counter at the start of the step.

        Raises:
            TraceError: The counter does not exist on the device.
        """
        if name not in COUNTERS[:3]:
            raise TraceError(
                f"`progress.{name}` is not known while the step is traced.{did_you_mean(name, COUNTERS[:3])}",
                why="the compiled step carries step, epoch and step_in_epoch",
                fix="read it in a host handler, or give the number to the callback when it is constructed",
            )
        return self._counters[COUNTERS.index(name)]

    def get(self, path: StatePath) -> Any:
        """Return the value at a path below a root that exists."""
        root = root_of(path)
        value = self.values[root]
        for part in path[len(root) :]:
            value = value[part] if isinstance(value, Mapping) else getattr(value, part)
        return value

    def replace(self, path: StatePath, value: Any) -> None:
        """Assign a value to a path. Dictionaries on the path are copied instead of changed."""
        root = root_of(path)
        self.values[root] = replaced(self.values.get(root), path[len(root) :], value)
