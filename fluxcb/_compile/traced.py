"""The state while a step is traced: handlers' reads and writes, captured functionally.

Handlers and phases assign attributes as if the Learner were mutable. Underneath is one flat
mapping of paths to tracers; what is assigned inside a gradient closure travels out of it as
auxiliary output, so that no tracer leaks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import get_opaque_trace_state

from fluxcb._compile.arrays import describe, differences
from fluxcb._compile.hyperparams import HyperparamIndex
from fluxcb._compile.protect import make_proxy
from fluxcb._declare.access import Append, Permission, dotted, writes
from fluxcb._declare.declared import Handler
from fluxcb._declare.events import ComputeEnd, Event, TracedEvent, UpdateEnd
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import Always, EveryEpochs, EverySteps, Schedule
from fluxcb._declare.state import CARRY, writable_at
from fluxcb._errors import AccessError, FluxcbError, TraceError, did_you_mean
from fluxcb._typing import LossFn, ModelAdapter, PyTree, StatePath

__all__ = ["COUNTERS", "StepSetup", "TraceState", "name_hash"]

COUNTERS = ("step", "epoch", "step_in_epoch", "stopped")
"""What the carry's `counters`, an int32[4], hold."""

# Errors JAX raises when Python asks a tracer for a value.
_CONCRETE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.UnexpectedTracerError,
)


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
        handlers: Returns the traced handlers of an event, in plan order.
    """

    model: ModelAdapter | None
    loss_fn: LossFn | None
    optimizer: optax.GradientTransformation
    hyperparams: HyperparamIndex
    handlers: Callable[[type[Event]], tuple[Handler, ...]]


@dataclass
class Touched:
    """Paths a traced handler really read and wrote, as the dry run saw them."""

    read: set[StatePath] = field(default_factory=set)
    written: set[StatePath] = field(default_factory=set)


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
    """

    def __init__(self, setup: StepSetup, phase: Phase, carry: Mapping[str, Any], batch: PyTree) -> None:
        self.setup = setup
        self.phase = phase
        self.values: dict[StatePath, Any] = {(name,): carry[name] for name in CARRY}
        self.values |= {("cbstate", name): value for name, value in carry["cbstate"].items()}
        self.values["step", "batch"] = batch
        self.touched: dict[Handler, Touched] = {}
        self._counters = carry["counters"]
        self._initial_model_state = carry["model_state"]
        self._level = get_opaque_trace_state()

    # -- what a phase's step does -----------------------------------------------------------

    def run(self) -> tuple[dict[str, Any], dict[str, PyTree]]:
        """Trace the phase's step.

        Returns:
            The new carry, and the step's values by name.
        """
        self.phase.step(StepLearner(self), self.emit)
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
        counters = counters.at[0].add(trains).at[2].add(1)
        if stop is not None:
            counters = counters.at[3].set(stop.astype(jnp.int32))
        return {
            **{name: self.values[name,] for name in CARRY},
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
        before, level = dict(self.values), self._level

        def closure(x: PyTree) -> tuple[Any, dict[StatePath, Any]]:
            self.values = dict(before)
            self.replace(path, x)
            inside = self.values[path[:1]]
            self._level = get_opaque_trace_state()
            loss = function(x)
            _check_loss(loss)
            changed = {
                p: jax.tree.map(jnp.asarray, value)
                for p, value in self.values.items()
                if value is not (inside if p == path[:1] else before.get(p))
            }
            return loss, changed

        gradients, changed = jax.grad(closure, has_aux=True)(self.get(path))
        self._level = level
        self.values = before | changed
        return gradients

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
            self.values["model_state",] = _conforming(
                self.values["model_state",], model_state, "The model changes the shape of its own state in a step"
            )
        return outputs

    def apply_updates(self) -> None:
        """Let the optimizer update the parameters, honour `step.skip`, emit UpdateEnd."""
        if ("step", "grads") not in self.values:
            raise TraceError(
                f"`{type(self.phase).__name__}.step` calls `learner.apply_updates()` before `learner.step.grads` exists.",
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
        new = _conforming(old, new, "The optimizer changes the shape or dtype of the train state")
        new["model_state"] = self.values["model_state",]
        old["model_state"] = self._initial_model_state
        skip = self.values.get(("step", "skip"))
        if skip is not None:
            new = jax.tree.map(lambda n, o: jnp.where(skip, o, n), new, old)
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
        if get_opaque_trace_state() != self._level:
            raise TraceError(
                f"{event!r} is emitted inside a JAX transformation (grad, vmap, scan, jit, ...) that fluxcb did not open.",
                where=f"{type(self.phase).__name__}.step",
                why="what handlers write there would leak out of the transformation as tracers",
                fix='differentiate with `learner.grad(function, wrt="params")`, and emit outside other transformations',
            )
        for handler in self.setup.handlers(type(event)):
            self._run(handler, event)

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
            if key[0] == "step" and key[1] in ("skip", "stop"):
                self.values.setdefault(key, jnp.bool_(False))
        missing = [key for key in keys if key not in self.values]
        if missing:
            raise TraceError(
                f"{handler.declared.label} writes `{dotted(missing[0])}` only on some steps, and nothing gives it a value on the others.",
                where=handler.where,
                fix="let a handler without a schedule write a default first, or drop `traced=True`",
            )
        before, level = dict(self.values), self._level

        def run(values: list[Any]) -> list[Any]:
            self.values = before | dict(zip(keys, values, strict=True))
            self._level = get_opaque_trace_state()
            self._call(handler, event)
            return [self.values[key] for key in keys]

        held = [jax.tree.map(jnp.asarray, before[key]) for key in keys]
        after = jax.lax.cond(due, run, lambda values: values, held)
        self._level = level
        self.values = before | dict(zip(keys, after, strict=True))

    def _due(self, schedule: Schedule, handler: Handler) -> Any:
        if isinstance(schedule, EverySteps):
            return (self._counters[0] + 1) % schedule.steps == 0
        if isinstance(schedule, EveryEpochs):
            return self._counters[1] % schedule.epochs == 0
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
                keys[_root(path)] = None
        return list(keys)

    def _call(self, handler: Handler, event: Event) -> None:
        backend = _HandlerBackend(self, handler, event)
        learner = make_proxy(
            handler.access, backend, who=handler.declared.label, where=f"{handler.declared.where}\n{handler.where}"
        )
        try:
            # The scope names the handler's operations in profiles, and tells them from the model's own.
            with jax.named_scope(f"fluxcb:{handler.declared.cls.__name__}.{handler.name}"):
                handler.function(event, self.phase, learner)
        except FluxcbError:
            raise
        except _CONCRETE as error:
            raise self._needs_value(handler, error) from error
        except TypeError as error:
            if "Tracer" in str(error):
                raise self._needs_value(handler, error) from error
            error.add_note(f"while tracing {handler.where}, at {event!r} x {type(self.phase).__name__}")
            raise
        except Exception as error:
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
                "or read the value in a host handler, at StepEnd",
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
        """Return a counter as it stood when the step began."""
        return self._counters[COUNTERS.index(name)]

    def get(self, path: StatePath) -> Any:
        """Return the value at a path below a root that exists."""
        root = _root(path)
        value = self.values[root]
        for part in path[len(root) :]:
            value = value[part] if isinstance(value, Mapping) else getattr(value, part)
        return value

    def replace(self, path: StatePath, value: Any) -> None:
        """Put a value at a path; dictionaries on the way are copied, not changed."""
        root = _root(path)
        self.values[root] = _replaced(self.values.get(root), path[len(root) :], value)


def _root(path: StatePath) -> StatePath:
    if path[0] == "hyperparams":
        return ("opt_state",)
    return path[:2] if path[0] in ("step", "cbstate") else path[:1]


def _replaced(old: Any, rest: StatePath, value: Any) -> Any:
    if not rest:
        return value
    if isinstance(old, Mapping):
        return {**old, rest[0]: _replaced(old.get(rest[0]), rest[1:], value)}
    return old._replace(**{rest[0]: _replaced(getattr(old, rest[0]), rest[1:], value)})


def _check_loss(loss: Any) -> None:
    shape, dtype = getattr(loss, "shape", None), getattr(loss, "dtype", None)
    if shape == () and dtype is not None and jnp.issubdtype(dtype, jnp.floating):
        return
    fix = "take the mean over the batch: `jnp.mean(loss)`" if shape else "return a real floating-point scalar"
    raise TraceError(
        f"The loss must be one real floating-point number, float[], but is {describe(loss)}.",
        why="its gradient is what training follows",
        fix=fix,
    )


def _conforming(old: PyTree, new: PyTree, what: str, where: Any = ()) -> PyTree:
    """Return `new` with the old one's exact types, or raise if structure, shape or dtype differ."""
    if jax.tree.structure(old) == jax.tree.structure(new):  # Python numbers take the old dtype
        new = jax.tree.map(
            lambda o, n: jnp.asarray(n, o.dtype) if isinstance(n, bool | int | float) else n, old, new
        )
    wrong = differences(old, new)
    if wrong:
        raise TraceError(
            f"{what}: {wrong[0]}.",
            where=[*([where] if isinstance(where, str) else where), *wrong[1:5]],
            why="the carry of a compiled step keeps its structure, shapes and dtypes",
            fix="return what came in, e.g. with `.astype(old.dtype)`, or create it right in `init`",
        )
    return jax.tree.map(_strong, old, new)


def _strong(old: Any, new: Any) -> Any:
    return jax.lax.convert_element_type(new, old.dtype) if getattr(new, "weak_type", False) else new


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


class _HandlerBackend:
    """Where the proxy of one traced handler reads and writes; dead once the handler has returned."""

    def __init__(self, state: TraceState, handler: Handler, event: Event) -> None:
        self._state: TraceState | None = state
        self._handler = handler
        self._event = event
        self._touched = state.touched.setdefault(handler, Touched())
        self._handed: list[tuple[StatePath, Any, list[Any], Any]] = []

    def close(self) -> None:
        """End the proxy's life: kept beyond its event, it would hand out dead tracers."""
        self._state = None

    def _live(self) -> TraceState:
        if self._state is None:
            raise AccessError(
                f"{self._handler.declared.label} uses a traced learner after its event has ended.",
                where=self._handler.where,
                why="its values exist only while the step is traced",
                fix="do not keep `learner`; put what must survive into `learner.cbstate`",
            )
        return self._state

    def read(self, path: StatePath, permission: Permission) -> Any:
        """Return a traced value; containers are fresh, so that writing into them changes nothing."""
        state = self._live()
        self._touched.read.add(path)
        if path[0] == "key":
            return state.key_for(self._handler.declared.name)
        if path[0] == "progress":
            return state.progress(path[1])
        if path[0] == "hyperparams":
            state.setup.hyperparams.require(
                path[1], writing=False, who=self._handler.declared.label, where=self._handler.where
            )
            return state.setup.hyperparams.get(state.values["opt_state",], path[1])
        if path[0] in ("loss_fn", "optimizer", "model"):
            return getattr(state.setup, path[0])
        if isinstance(permission, Append) and path in (("step", "skip"), ("step", "stop")):
            return state.values.get(path, jnp.bool_(False))
        self._require(path, state)
        return self._hand_out(path, state.get(path))

    def _require(self, path: StatePath, state: TraceState) -> None:
        if _root(path) in state.values:
            return
        label = self._handler.declared.label
        moment = f"{self._event!r} x {type(state.phase).__name__}"
        if path[0] == "step":
            known = [p[1] for p in state.values if p[0] == "step"]
            raise TraceError(
                f"{label} reads `{dotted(path)}` at {moment}, where it does not exist (yet).{did_you_mean(path[1], known)}",
                where=self._handler.where,
                why=f"at that point the step has {', '.join(sorted(known))}",
                fix="handle a later event, or a phase that provides it",
            )
        raise TraceError(
            f"{label} touches `{dotted(path)}` in a traced handler, but it is not in the carry.",
            where=self._handler.where,
            why="only shared state made of JAX arrays, and declared by a traced handler, rides in the carry",
            fix=f"create it in `init` as arrays: `learner.{dotted(path)} = jnp.zeros(...)`",
        )

    def _hand_out(self, path: StatePath, value: Any) -> Any:
        leaves, structure = jax.tree.flatten(value)
        if len(leaves) == 1 and leaves[0] is value:
            return value
        fresh = jax.tree.unflatten(structure, leaves)
        self._handed.append((path, fresh, leaves, structure))
        return fresh

    def verify(self) -> None:
        """Refuse writes into containers that were read: they would be lost."""
        for path, fresh, leaves, structure in self._handed:
            now, now_structure = jax.tree.flatten(fresh)
            if structure == now_structure and len(now) == len(leaves) and all(
                a is b for a, b in zip(now, leaves, strict=True)
            ):
                continue
            raise AccessError(
                f"{self._handler.declared.label} writes into the container it read from `{dotted(path)}`.",
                where=self._handler.where,
                why="what is read is a copy, so the change would be lost",
                fix=f"declare Write() and assign the whole: `learner.{dotted(path)} = {{**learner.{dotted(path)}, ...}}`",
            )

    def write(self, path: StatePath, value: Any, permission: Permission) -> None:
        """Put a traced value at a path, if it may be written at this event."""
        state = self._live()
        self._touched.written.add(path)
        label, where = self._handler.declared.label, self._handler.where
        events = writable_at(path)
        if events is not None and not isinstance(self._event, events):
            allowed = " or ".join(e.__name__ for e in events) or "no traced event"
            raise AccessError(
                f"{label} writes `{dotted(path)}` at {self._event!r}; it can be written at {allowed}.",
                where=where,
                why="elsewhere the write would have no effect, or another one than it seems",
                fix=f"move it to a handler of {allowed}" if events else "write what it is computed from",
            )
        if path in (("step", "skip"), ("step", "stop")):
            self._set_flag(state, path, value)
        elif path[0] == "step":
            self._set_step(state, path, value)
        elif path[0] == "hyperparams":
            state.setup.hyperparams.require(path[1], writing=True, who=label, where=where)
            old = state.setup.hyperparams.get(state.values["opt_state",], path[1])
            if jnp.shape(value) != old.shape:
                raise TraceError(f"{label} sets `{dotted(path)}` to {describe(value)}; it is {describe(old)}.", where=where)
            state.values["opt_state",] = state.setup.hyperparams.set(state.values["opt_state",], path[1], value)
        else:
            self._require(path, state)
            what = f"{label} changes the structure, shape or dtype of `{dotted(path)}`"
            state.replace(path, _conforming(self._old(state, path, value), value, what, where))

    def _old(self, state: TraceState, path: StatePath, value: Any) -> Any:
        try:
            return state.get(path)
        except (KeyError, AttributeError):
            raise TraceError(
                f"{self._handler.declared.label} writes `{dotted(path)}`, which does not exist in the carry.",
                where=self._handler.where,
                why=f"the carry keeps its structure; {describe(value)} would add to it",
                fix=f"create `{dotted(path)}` in `init`",
            ) from None

    def _set_flag(self, state: TraceState, path: StatePath, value: Any) -> None:
        if jnp.shape(value) != () or jnp.result_type(value) != jnp.bool_:
            raise TraceError(
                f"{self._handler.declared.label} writes {describe(value)} to `{dotted(path)}`, which is bool[].",
                where=self._handler.where,
                fix="reduce it: `jnp.any(...)` or `jnp.all(...)`",
            )
        state.values[path] = jnp.logical_or(state.values.get(path, jnp.bool_(False)), value)

    def _set_step(self, state: TraceState, path: StatePath, value: Any) -> None:
        old = state.values.get(path)
        if path[1] in ("grads", "loss") and old is not None:
            what = f"{self._handler.declared.label} changes the structure, shape or dtype of `{dotted(path)}`"
            value = _conforming(old, value, what, self._handler.where)
        state.replace(path, value)

    def names(self, path: StatePath) -> Iterator[str]:
        """Iterate over the names below `step` or `cbstate`."""
        state = self._live()
        return iter([p[1] for p in state.values if p[0] == path[0] and len(p) == 2])


class _StepNames:
    """`learner.step` as a phase sees it: whatever has been assigned."""

    def __init__(self, state: TraceState) -> None:
        object.__setattr__(self, "_state", state)

    def __getattr__(self, name: str) -> Any:
        values = self._state.values
        if ("step", name) not in values:
            known = [p[1] for p in values if p[0] == "step"]
            raise TraceError(
                f"`{type(self._state.phase).__name__}.step` reads `step.{name}` before it is assigned."
                f"{did_you_mean(name, known)}",
                fix=f"assign `learner.step.{name}` first; so far there is {', '.join(known)}",
            )
        return values["step", name]

    def __setattr__(self, name: str, value: Any) -> None:
        self._state.values["step", name] = value


class StepLearner:
    """The Learner as a phase's `step` sees it: unprotected, as tracers.

    Args:
        state: The state being traced.
    """

    def __init__(self, state: TraceState) -> None:
        self.__dict__["_state"] = state
        self.__dict__["step"] = _StepNames(state)

    @property
    def loss_fn(self) -> Any:
        """The user's loss function, or None."""
        return self._state.setup.loss_fn

    @property
    def optimizer(self) -> Any:
        """The optax optimizer."""
        return self._state.setup.optimizer

    @property
    def key(self) -> Any:
        """The random key of this step for the phase; the same at each access, so split it."""
        return self._state.key_for(f"phase {type(self._state.phase).__name__}")

    def forward(self, params: PyTree, xs: PyTree) -> PyTree:
        """Apply the model to a batch of inputs."""
        return self._state.forward(params, xs)

    def grad(self, function: Callable[[PyTree], Any], wrt: str = "params") -> PyTree:
        """Return the gradient of `function(params) -> float[]`; it may emit events and assign state.

        Args:
            function: The loss as a function of what `wrt` names.
            wrt: `params`, or a part of it such as `params.generator`.

        Raises:
            TraceError: The loss is no real floating-point scalar, or `wrt` no parameters.
        """
        return self._state.grad(function, wrt)

    def apply_updates(self) -> None:
        """Update the parameters by `step.grads`, honour `step.skip`, and emit UpdateEnd."""
        self._state.apply_updates()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if (name,) in self._state.values:
            return self._state.values[name,]
        if name == "progress":
            return _Progress(self._state)
        raise TraceError(
            f"`{type(self._state.phase).__name__}.step` reads `learner.{name}`, which a step does not have."
            f"{did_you_mean(name, [*CARRY, 'step', 'progress', 'forward', 'grad', 'apply_updates', 'loss_fn'])}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        state = self._state
        if (name,) not in state.values or name == "key":
            raise TraceError(
                f"`{type(state.phase).__name__}.step` assigns `learner.{name}`, which a step cannot change.",
                fix=f"assign `learner.step.{name}` for a value of the step",
            )
        what = f"`{type(state.phase).__name__}.step` changes the structure, shape or dtype of `{name}`"
        state.values[name,] = _conforming(state.values[name,], value, what)


class _Progress:
    def __init__(self, state: TraceState) -> None:
        self._trace_state = state

    def __getattr__(self, name: str) -> Any:
        return self._trace_state.progress(name)
