"""The state while a step is traced: handlers' reads and writes, captured functionally.

Handlers and phases assign attributes as if the Learner were mutable. Underneath is one flat
mapping of paths to tracers; what is assigned inside a gradient closure travels out of it as
auxiliary output, so that no tracer leaks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import get_opaque_trace_state

from fluxcb._compile.arrays import differences
from fluxcb._compile.carried import check_loss, conforming, replaced, root_of
from fluxcb._compile.followed import LossWrites, watched
from fluxcb._compile.handler_backend import HandlerBackend, Touched
from fluxcb._compile.hyperparams import HyperparamIndex
from fluxcb._compile.protect import make_proxy
from fluxcb._declare.access import dotted, writes
from fluxcb._declare.declared import Handler
from fluxcb._declare.events import ComputeEnd, Event, TracedEvent, UpdateEnd
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import Always, EveryEpochs, EverySteps, Schedule
from fluxcb._declare.state import CARRY, STEP_FLAGS
from fluxcb._errors import FluxcbError, TraceError, did_you_mean
from fluxcb._typing import LossFn, ModelAdapter, PyTree, StatePath

__all__ = ["COUNTERS", "NEEDS_VALUE", "StepSetup", "TraceState", "name_hash"]

COUNTERS = ("step", "epoch", "step_in_epoch", "stopped")
"""What the first words of the carry's `counters`, an int32[4 + words of the key], hold; the random key is behind them.

Each leaf of the carry costs time at every call (0.6 us), so these small ones are one.
"""

NEEDS_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.UnexpectedTracerError,
)
"""Errors JAX raises when Python asks a tracer for a value."""


def name_hash(name: str) -> int:
    """Return the number a callback's random keys are folded with; the same in every process."""
    return zlib.crc32(name.encode()) & 0x7FFFFFFF


@dataclass(frozen=True, eq=False)
class StepSetup:
    """What a step needs beside carry and batch.

    Attributes:
        model: The model's adapter, or None when the loss function does everything.
        loss_fn: The user's loss function.
        optimizer: The optimizer.
        hyperparams: Where its hyperparameters lie.
        key_impl: The random key's implementation; the carry holds its bare words, because a typed key is wrapped anew,
            in Python, at each call (2 us).
        handlers: Returns the traced handlers of an event, in plan order.
    """

    model: ModelAdapter | None
    loss_fn: LossFn | None
    optimizer: optax.GradientTransformation
    hyperparams: HyperparamIndex
    key_impl: Any
    handlers: Callable[[type[Event]], tuple[Handler, ...]]


class TraceState:
    """One step being traced.

    Args:
        setup: The step's fixed parts.
        phase: The phase whose `step` is traced.
        carry: The carry, as tracers.
        batch: The batch, as tracers.

    Attributes:
        values: The state by path: `("params",)`, `("step", "loss")`, `("cbstate", "ema")`, ...
        touched: Per handler, what it really accessed.
        losses: What handlers wrote to `step.loss`, and whether it is followed.
    """

    def __init__(self, setup: StepSetup, phase: Phase, carry: Mapping[str, Any], batch: PyTree) -> None:
        self.setup = setup
        self.phase = phase
        self.values: dict[StatePath, Any] = {(name,): carry[name] for name in CARRY if name != "key"}
        words = jax.lax.bitcast_convert_type(carry["counters"][len(COUNTERS) :], jnp.uint32)
        self.values["key",] = jax.random.wrap_key_data(words, impl=setup.key_impl)
        self.values |= {("cbstate", name): value for name, value in carry["cbstate"].items()}
        self.values["step", "batch"] = batch
        self.touched: dict[Handler, Touched] = {}
        self._counters = carry["counters"]
        self._initial_model_state = carry["model_state"]
        self.losses = LossWrites(phase)
        self._level = get_opaque_trace_state()

    # -- what a phase's step does -----------------------------------------------------------

    def finish(self) -> tuple[dict[str, Any], dict[str, PyTree]]:
        """Emit ComputeEnd, once the phase's step has run.

        Returns:
            The new carry, and the step's values by name.
        """
        self.losses.finish()
        self.emit(ComputeEnd())
        step_values = {
            path[1]: jax.tree.map(jnp.asarray, value)
            for path, value in self.values.items()
            if path[0] == "step" and path[1] != "batch"
        }
        return self._new_carry(), step_values

    def _new_carry(self) -> dict[str, Any]:
        counters = self._counters
        stop = self.values.get(("step", "stop"))
        trains = int(type(self.phase).trains)
        # By constants rather than by slices: one kernel instead of three.
        place = np.arange(len(counters))
        counters = counters + np.where(place == 0, trains, np.where(place == 2, 1, 0)).astype(np.int32)
        if stop is not None:
            counters = jnp.where(place == 3, stop.astype(jnp.int32), counters)
        return {
            **{name: self.values[name,] for name in CARRY if name != "key"},
            "cbstate": {path[1]: value for path, value in self.values.items() if path[0] == "cbstate"},
            "counters": counters,
        }

    def grad(self, function: Callable[[PyTree], Any], wrt: str) -> PyTree:
        """Differentiate a function that may emit events and assign state."""
        path = tuple(wrt.split("."))
        if path[:1] not in {("params",), ("model_state",)}:
            raise TraceError(
                f"`learner.grad(..., wrt={wrt!r})` can differentiate with respect to `params` or a part of it.",
                fix='write `wrt="params"` or e.g. `wrt="params.generator"`',
            )
        parameters = self._part(path, wrt)
        before, level = dict(self.values), self._level
        follows: list[bool] = []

        def closure(x: PyTree, token: Any) -> tuple[Any, dict[StatePath, Any]]:
            self.losses.open_gradient(token)
            self.values = dict(before)
            x = watched(x, lambda: follows.append(True))
            self.replace(path, x)
            inside = self.values[path[:1]]
            self._level = get_opaque_trace_state()
            loss = function(x)
            check_loss(loss)
            changed = {
                p: jax.tree.map(jnp.asarray, value)
                for p, value in self.values.items()
                if value is not (inside if p == path[:1] else before.get(p))
            }
            return loss, changed

        (gradients, _), changed = jax.grad(closure, argnums=(0, 1), has_aux=True)(parameters, jnp.float32(0))
        self.losses.close_gradient()
        if not follows:
            raise TraceError(
                f"The loss does not depend on `{wrt}`.",
                where=f"{type(self.phase).__name__}.step",
                why="its gradient is zero everywhere, so no step would learn anything",
                fix=[
                    "compute it from the model's outputs, or from the parameters",
                    "if it is: comparisons, `argmax`, `round` and `jax.lax.stop_gradient` let no gradient through",
                ],
            )
        self._level = level
        self.values = before | changed
        return gradients

    def _part(self, path: StatePath, wrt: str) -> PyTree:
        try:
            return self.get(path)
        except (KeyError, AttributeError, TypeError):
            whole = self.values[path[:1]]
            names = sorted(map(str, whole)) if isinstance(whole, Mapping) else []
            raise TraceError(
                f"`learner.grad(..., wrt={wrt!r})` names no part of `{path[0]}`"
                + (f", which has {', '.join(names)}." if names else "."),
                fix='write `wrt="params"`' + (f' or e.g. `wrt="{path[0]}.{names[0]}"`' if names else ""),
            ) from None

    def forward(self, params: PyTree, xs: PyTree) -> PyTree:
        """Apply the model, in training mode if the phase trains, and keep its new state then."""
        if self.setup.model is None:
            raise TraceError(
                f"`{type(self.phase).__name__}` calls `learner.forward`, but this Learner has no model.",
                why="`Learner.from_loss` was given a loss function that applies the model itself",
                fix="use `Learner(model, loss_fn, ...)`, or call `learner.loss_fn(params, batch, key)` in the step",
            )
        train = type(self.phase).trains
        outputs, model_state = self.setup.model.apply(
            params, self.values["model_state",], xs, train=train, key=self.key_for(f"phase {type(self.phase).__name__}")
        )
        if train:
            self.values["model_state",] = conforming(
                self.values["model_state",], model_state, "The model changes the shape of its own state in a step"
            )
        return outputs

    def apply_updates(self) -> None:
        """Let the optimizer update the parameters, honour `step.skip` and `step.hold`, emit UpdateEnd."""
        if ("step", "grads") not in self.values:
            raise TraceError(
                f"`{type(self.phase).__name__}.step` calls `learner.apply_updates()` before `step.grads` exists.",
                fix='assign `learner.step.grads = learner.grad(loss, wrt="params")` first',
            )
        grads, params = self.values["step", "grads"], self.values["params",]
        wrong = differences(params, grads)
        if wrong:
            raise TraceError(
                "`step.grads` does not match `params` when the update is applied.",
                where=wrong[:5],
                fix="differentiate with respect to the whole of `params`, or put the parts together again",
            )
        old_opt = self.values["opt_state",]
        optimizer = optax.with_extra_args_support(self.setup.optimizer)
        extra = {"value": self.values["step", "loss"]} if ("step", "loss") in self.values else {}
        updates, opt_state = optimizer.update(grads, old_opt, params, **extra)
        new = {"params": optax.apply_updates(params, updates), "opt_state": opt_state}
        old = {"params": params, "opt_state": old_opt}
        new = conforming(old, new, "The optimizer changes the shape or dtype of the train state")
        hold, skip = (self.values.get(("step", flag)) for flag in ("hold", "skip"))
        if hold is not None:
            new = jax.tree.map(lambda n, o: jax.lax.select(hold, o, n), new, old)
        new["model_state"] = self.values["model_state",]
        old["model_state"] = self._initial_model_state
        if skip is not None:
            new = jax.tree.map(lambda n, o: jax.lax.select(skip, o, n), new, old)
        self.values |= {(name,): value for name, value in new.items()}
        self.values["step", "updates"] = updates
        self.emit(UpdateEnd())

    # -- events and handlers ----------------------------------------------------------------

    def emit(self, event: Event) -> None:
        """Run the traced handlers of an event, in plan order."""
        if not isinstance(event, TracedEvent):
            raise TraceError(
                f"`{type(self.phase).__name__}.step` emits {event!r}, which is no traced event.",
                why="a step is traced once; host events happen between its calls",
                fix=f"derive `{type(event).__name__}` from TracedEvent",
            )
        if self.inside_foreign_transformation():
            raise TraceError(
                f"{event!r} is emitted inside a JAX transformation (grad, vmap, scan, ...) that fluxcb did not open.",
                where=f"{type(self.phase).__name__}.step",
                why="what handlers write there would leak out of the transformation as tracers",
                fix='differentiate with `learner.grad(function, wrt="params")`, and emit outside other transformations',
            )
        replaced_by = None
        for handler in self.setup.handlers(type(event)):
            loss = self.values.get(("step", "loss"))
            self._run(handler, event)
            if loss is not None and self.values["step", "loss"] is not loss:
                replaced_by = handler
        if replaced_by is not None:
            self.values["step", "loss"] = self.losses.written(self.values["step", "loss"], event, replaced_by)

    def inside_foreign_transformation(self) -> bool:
        """Tell whether a transformation that was not opened here (a plain `jax.grad`, ...) is being traced."""
        return get_opaque_trace_state() != self._level

    def _run(self, handler: Handler, event: Event) -> None:
        schedules = [s for s in handler.schedules if not isinstance(s, Always)]
        if not schedules:
            self._call(handler, event)
            return
        due = jnp.bool_(True)
        for schedule in schedules:
            due &= self._due(schedule, handler)
        keys = self._writable(handler)
        for key in keys:
            if key in STEP_FLAGS:
                self.values.setdefault(key, jnp.bool_(False))
        keys = [key for key in keys if key in self.values]  # the others belong to other events of this callback
        before, level = dict(self.values), self._level

        def run(values: list[Any]) -> list[Any]:
            self.values = before | dict(zip(keys, values, strict=True))
            self._level = get_opaque_trace_state()
            self._call(handler, event)
            self._refuse_new(handler, before)
            return [self.values[key] for key in keys]

        held = [jax.tree.map(jnp.asarray, before[key]) for key in keys]
        after = jax.lax.cond(due, run, lambda values: values, held)
        self._level = level
        self.values = before | dict(zip(keys, after, strict=True))

    def _refuse_new(self, handler: Handler, before: Mapping[StatePath, Any]) -> None:
        """Refuse values that a scheduled handler alone gives: on the other steps there would be none."""
        missing = [key for key in self.values if key not in before]
        if missing:
            raise TraceError(
                f"{handler.declared.label} writes `{dotted(missing[0])}` only on some steps, "
                "and nothing gives it a value on the others.",
                where=handler.where,
                fix="let a handler without a schedule write a default first, or drop `traced=True`",
            )

    def _due(self, schedule: Schedule, handler: Handler) -> Any:
        if isinstance(schedule, EverySteps):
            finished = self._counters[0 if type(self.phase).trains else 2]  # as host schedules count
            return (finished + 1) % schedule.steps == 0
        if isinstance(schedule, EveryEpochs):
            return (self._counters[1] > 0) & (self._counters[1] % schedule.epochs == 0)
        raise TraceError(
            f"{handler.declared.label} has the schedule {schedule!r} on a traced handler.",
            where=handler.where,
            why="the compiled step knows step and epoch numbers, but no clock and no Python",
            fix="use EverySteps or EveryEpochs, or a host handler",
        )

    def _writable(self, handler: Handler) -> list[StatePath]:
        keys: dict[StatePath, None] = {}
        for path, permission in handler.access.items():
            if not writes(permission) or path[0] in ("control", "data", "model", "callbacks"):
                continue
            if path[0] in ("step", "cbstate") and len(path) == 1:
                keys.update(dict.fromkeys(k for k in self.values if k[0] == path[0] and k != ("step", "batch")))
            else:
                keys[root_of(path)] = None
        return list(keys)

    def _call(self, handler: Handler, event: Event) -> None:
        backend = HandlerBackend(self, handler, event)
        learner = make_proxy(
            handler.access, backend, declared=handler.declared, where=f"{handler.declared.where}\n{handler.where}"
        )
        try:
            # The scope names the handler's operations in profiles, and tells them from the model's own.
            with jax.named_scope(f"fluxcb:{handler.declared.cls.__name__}.{handler.name}"):
                returned = handler.function(event, self.phase, learner)
            if returned is not None:
                raise TraceError(
                    f"The traced handler {handler.declared.label}.{handler.name} returns "
                    f"{type(returned).__name__}, which nobody takes.",
                    where=handler.where,
                    why="what a handler computes becomes part of the step where it is assigned",
                    fix="assign it, e.g. `learner.step.grads = grads`, and return nothing",
                )
        except FluxcbError:
            raise
        except NEEDS_VALUE as error:
            raise self._needs_value(handler, error) from error
        except TypeError as error:
            if "Tracer" in str(error):
                raise self._needs_value(handler, error) from error
            error.add_note(f"while tracing {handler.where}, at {event!r} x {type(self.phase).__name__}")
            raise
        except BaseException as error:
            error.add_note(f"while tracing {handler.where}, at {event!r} x {type(self.phase).__name__}")
            raise
        finally:
            backend.close()
        backend.verify()

    def _needs_value(self, handler: Handler, error: Exception) -> TraceError:
        return TraceError(
            f"The traced handler {handler.declared.label}.{handler.name} needs a value in Python: "
            f"{str(error).splitlines()[0]}",
            where=[handler.where, *_user_line(error, handler)],
            why=f"{handler.event.__name__} handlers run while the step is compiled, when values are not known yet",
            fix=[
                "stay in jax.numpy: `jnp.where(condition, a, b)` instead of `if`, no float(), no f-string of a value",
                "read the value in a host handler, at StepEnd",
            ],
        )

    # -- state by path ----------------------------------------------------------------------

    def key_for(self, name: str) -> Any:
        """Return the random key of this step for somebody of this name."""
        # Recomputed each time: a key cached inside a gradient closure would leak out of it. XLA merges the copies.
        key = jax.random.fold_in(self.values["key",], self._counters[0])
        if not type(self.phase).trains:  # `progress.step` stands still there
            key = jax.random.fold_in(jax.random.fold_in(key, self._counters[2]), name_hash(type(self.phase).name))
        return jax.random.fold_in(key, name_hash(name))

    def progress(self, name: str) -> Any:
        """Return a counter as it stood when the step began.

        Raises:
            TraceError: The device does not have it.
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
        """Put a value at a path; dictionaries on the way are copied, not changed."""
        root = root_of(path)
        self.values[root] = replaced(self.values.get(root), path[len(root) :], value)


def _user_line(error: BaseException, handler: Handler) -> list[str]:
    """Return where in the handler's own file the error arose."""
    code = getattr(getattr(handler.function, "__func__", handler.function), "__code__", None)
    line = None
    traceback = error.__traceback__
    while traceback is not None:
        if code is not None and traceback.tb_frame.f_code is code:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return [f"line {line}"] if line else []
