"""The updates of the parameters by optimizers, and `step.skip` and `step.hold`, which prevent updates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from fluxcb._compile.arrays import differences
from fluxcb._compile.carry_paths import below, conforming, names_in
from fluxcb._compile.extra_args import differentiated, updates_of
from fluxcb._compile.named_optimizers import NamedOptimizers
from fluxcb._compile.traced_update import update_with_selection
from fluxcb._declare.access import dotted
from fluxcb._declare.declared import BoundHandler
from fluxcb._declare.events import Event, UpdateEnd
from fluxcb._errors import TraceError, nearest
from fluxcb._traced_values import describe
from fluxcb._typing import PyTree, StatePath

if TYPE_CHECKING:
    from fluxcb._compile.traced import TraceState

__all__ = ["FLAG_SCOPE", "OPTIMIZER_SCOPE", "Gradient", "Updates"]

OPTIMIZER_SCOPE = "fluxcb:optimizer"
"""The scope in which the update by an optimizer is traced."""
FLAG_SCOPE = "fluxcb:flags"
"""The scope in which `step.skip`, `step.hold` and `step.stop` are applied."""

# The parts of the carry that a skipped step leaves unchanged. A held step keeps the new `model_state`.
_GUARDED = ("params", "opt_state", "model_state")


@dataclass(frozen=True)
class Gradient:
    """A gradient that the phase has taken with `learner.grad`, from which `value_fn` can be computed again.

    Attributes:
        path: The path of the differentiated parameters.
        function: The function that was differentiated.
        values: The state before the function was called.
        changed_by: A handler that changed the step's values inside the function, or None.
    """

    path: StatePath
    function: Callable[[PyTree], Any]
    values: Mapping[StatePath, Any]
    changed_by: BoundHandler | None


class Updates:
    """The updates of one step.

    `step.skip` and `step.hold` are applied at three points: at each `update`, before handlers of UpdateEnd run, and at
    the end of the step. The last two cover assignments by the phase itself. Arrays to which the flags have been applied
    are remembered, so that no operation is traced twice. If no handler writes a flag, nothing is traced.

    Args:
        state: The state being traced, at the beginning of the step.

    Attributes:
        gradients: The gradients that the phase has taken since the last update of their part.
        used: Names of the optimizers that the phase uses.
        by_loop: Whether a hand-written loop has updated its own state. The loop then has to apply the flags.
    """

    def __init__(self, state: TraceState) -> None:
        self._state = state
        # A skipped step returns to these values.
        self._initial = {name: state.values[name,] for name in _GUARDED}
        # The values to which the flags have been applied so far.
        self._resolved = dict(self._initial)
        self._unused_flags: dict[str, tuple[Event, BoundHandler]] = {}
        self._updated = self._announced = self.by_loop = False
        self.gradients: list[Gradient] = []
        self.used: set[str] = set()

    # -- the optimizers' updates ----------------------------------------------------------------

    def apply(self) -> None:
        """Update all parameters by `step.grads`, and emit UpdateEnd."""
        state, step = self._state, f"`{self._phase}.step`"
        if ("step", "grads") not in state.values:
            raise TraceError(
                f"{step} calls `learner.apply_updates()` before `step.grads` exists.",
                fix='assign `learner.step.grads = learner.grad(loss, wrt="params")` first',
            )
        # `apply_updates` uses the gradients, including those that handlers wrote.
        state.grads.read()
        grads, params = state.values["step", "grads"], state.values["params",]
        wrong = _other_structure(params, grads)
        if wrong:
            raise TraceError(
                "`step.grads` does not match `params` when the update is applied.",
                where=wrong[:5],
                fix="differentiate with respect to all of `params`, or combine the gradients of the parts",
            )
        optimizer = state.setup.optimizer
        if isinstance(optimizer, NamedOptimizers):
            # One UpdateEnd follows all updates, so its handlers see all parts of the same step.
            for name, path in _complete_parts(optimizer, params, step).items():
                self.update(below(grads, path), dotted(("params", *path)), name)
        else:
            self.update(grads)
        self.gradients.clear()  # a gradient of all of `params` was kept for all optimizers
        state.emit(UpdateEnd())

    def update(self, grads: PyTree, wrt: str = "params", name: str | None = None, **extra: Any) -> None:
        """Let an optimizer update the part of the parameters that it owns, unless a flag prevents it.

        Args:
            grads: The gradients with respect to the part.
            wrt: The part: `params`, or e.g. `params.generator`.
            name: The name of the optimizer, if the Learner has several.
            **extra: Extra arguments for the optimizer.
        """
        state = self._state
        if state.inside_gradient or state.inside_foreign_transformation():
            raise TraceError(
                f"`{self._phase}.step` updates the parameters inside a gradient or another JAX transformation.",
                why="the new parameters would leak out of the transformation as tracers",
                fix="take the gradient first, and pass the result to `learner.update`",
            )
        optimizer, name = self._chosen(name, wrt)
        path = ("opt_state",) if name is None else ("opt_state", name)
        # The phase may have assigned these parts before the update. The optimizer must start from the values after the
        # flags.
        self.resolve(("params", "opt_state"))
        part = tuple(wrt.split("."))
        params, old_opt = state.get(part), state.get(path)
        if wrong := _other_structure(params, grads):
            raise TraceError(
                f"The gradients that `{self._phase}.step` gives to `learner.update` do not match `{wrt}`.",
                where=wrong[:5],
                fix=f'differentiate with respect to it: `learner.grad(loss, wrt="{wrt}")`',
            )

        changes = "The optimizer changes the shape or dtype of the train state"

        @jax.named_scope(OPTIMIZER_SCOPE)
        def update(grads: PyTree, opt_state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            updates, new = updates_of(
                optimizer,
                (grads, opt_state, params),
                offered=self._offered(part, grads),
                from_phase=extra,
                where=f"{self._phase}.step",
            )
            # The loop around the step would also reject such a change, but without naming the optimizer.
            return updates, conforming({"opt_state": opt_state}, {"opt_state": new}, changes)["opt_state"]

        with jax.named_scope(OPTIMIZER_SCOPE):
            arguments = (_for_lookahead(grads, old_opt, params), old_opt, params)
        prevents = self._prevents("params")
        if prevents is None:
            updates, opt_state = update(*arguments)
        else:
            updates, opt_state = update_with_selection(update, functools.partial(_selected, prevents), *arguments)
        self._check_shapes(wrt, params, updates)
        with jax.named_scope(OPTIMIZER_SCOPE):
            applied = optax.apply_updates(params, updates)
        new = conforming({"params": params}, {"params": applied}, changes)["params"]
        if prevents is not None:
            new = _selected(prevents, params, new)
            updates = _selected(prevents, jax.tree.map(jnp.zeros_like, updates), updates)
        self._put(part, path, new, opt_state)
        if name is not None:
            self.used.add(name)
            # Each named optimizer has its own updates.
            updates = {**state.values.get(("step", "updates"), {}), name: updates}
        state.values["step", "updates"] = updates
        # After the update, the parameters differ from those of the gradient.
        self.gradients = [gradient for gradient in self.gradients if gradient.path != part]
        self._updated = True

    def _chosen(self, name: str | None, wrt: str) -> tuple[Any, str | None]:
        """Return the optimizer with a name, and the name if the Learner has named optimizers."""
        optimizer, call = self._state.setup.optimizer, f"`{self._phase}.step` calls `learner.update`"
        if not isinstance(optimizer, NamedOptimizers):
            if name is not None:
                raise TraceError(
                    f"{call} with `optimizer={name!r}`, but the optimizer of this Learner has no name.",
                    fix=f"leave `optimizer=` out, or give the Learner `optimizer={{{name!r}: ...}}`",
                )
            if wrt != "params":
                part = wrt.removeprefix("params.")
                raise TraceError(
                    f"{call} for `{wrt}`, but the only optimizer of this Learner owns all of `params`.",
                    why="an optimizer keeps its state for the parameters that it was initialized with",
                    fix=f'give the Learner `optimizer={{"{part}": ...}}`, and write '
                    f'`learner.update(grads, wrt="{wrt}", optimizer="{part}")`',
                )
            return optimizer, None
        # With a single named optimizer, the name is redundant.
        if name is None and len(optimizer) == 1:
            name = next(iter(optimizer))
        known = " and ".join(map(repr, optimizer)) if len(optimizer) < 3 else ", ".join(map(repr, optimizer))
        if name is None or name not in optimizer:
            what = "without `optimizer=`" if name is None else f"with `optimizer={name!r}`"
            near = nearest(name, optimizer) if name is not None else ""
            fix = f"write e.g. `learner.update(grads, wrt={wrt!r}, optimizer={near or next(iter(optimizer))!r})`"
            raise TraceError(
                f"{call} {what}, and the optimizers of this Learner are {known}.",
                fix=[fix, f"rename the optimizer {near!r} of the Learner to {name!r}"] if near else fix,
            )
        owned = optimizer.owned(self._initial["params"])
        if wrt != owned[name]:
            others = [other for other in optimizer if owned[other] == wrt]
            raise TraceError(
                f"{call} for `{wrt}` with the optimizer {name!r}, which owns "
                f"{'all of `params`' if owned[name] == 'params' else f'`{owned[name]}`'}.",
                why="an optimizer named after a part of `params` owns this part, and an optimizer with any other "
                "name owns all of them",
                fix=[
                    f'write `wrt="{owned[name]}"`',
                    f"use the optimizer {others[0]!r}"
                    if others
                    else f"name an optimizer {wrt.removeprefix('params.')!r}",
                ],
            )
        return optimizer[name], name

    def _offered(self, part: StatePath, grads: PyTree) -> dict[str, Any]:
        """Return the extra arguments that fluxcb provides for an optimizer."""
        # If the phase has no loss, `updates_of` reports an optimizer that needs one.
        loss = self._state.values.get(("step", "loss"))
        offered = {"grad": grads} if loss is None else {"value": loss, "grad": grads}
        candidates = [gradient for gradient in self.gradients if part[: len(gradient.path)] == gradient.path]
        if len(candidates) != 1:  # with several gradients, none of the losses is the loss of the whole batch
            return offered
        (gradient,) = candidates

        def value_fn(params: PyTree) -> Any:
            return self._evaluated(gradient, part, params)

        return {**offered, "value_fn": value_fn, "grad_fn": differentiated(value_fn)}

    def _evaluated(self, gradient: Gradient, part: StatePath, params: PyTree) -> Any:
        """Return the loss of the batch with other parameters, without events."""
        state = self._state
        # The new loss would lack the changes of the handler. An optimizer would compare it with a loss that includes
        # them.
        for handler, what in ((gradient.changed_by, "the loss"), (state.grads.changed_by, "the gradients")):
            if handler is not None:
                raise TraceError(
                    f"The optimizer computes the loss of the batch again, without the changes that "
                    f"{handler.declared.label} makes to {what}.",
                    where=[f"{self._phase}.step", handler.where],
                    why="`value_fn` and `grad_fn` call the loss without emitting events",
                    fix=[
                        f"remove {handler.declared.label}, and move its computation to the "
                        + ("loss function" if what == "the loss" else "optimizer if an `optax.chain` can do it"),
                        "use an optimizer that needs neither `value_fn` nor `grad_fn`",
                    ],
                )
        # The state before the gradient, so that the model state and random keys are the same.
        with state.replayed(gradient.values):
            state.replace(part, params)
            return gradient.function(state.get(gradient.path))

    def _check_shapes(self, wrt: str, params: PyTree, updates: PyTree) -> None:
        wrong = _other_structure(params, updates) or [
            f"{jax.tree_util.keystr(path) or 'it'}: {describe(old)} gets an update of {describe(new)}"
            for (path, old), new in zip(
                jax.tree_util.tree_flatten_with_path(params)[0], jax.tree.leaves(updates), strict=True
            )
            if jnp.shape(old) != jnp.shape(new)
        ]
        if wrong:
            raise TraceError(
                f"The optimizer returns updates that do not match `{wrt}`.",
                where=wrong[:5],
                why="`optax.apply_updates` adds them to the parameters",
                fix="give the optimizer gradients of the parameters' shapes, or begin it with a transformation that "
                "combines them, such as `optax.contrib.differentially_private_aggregate`",
            )

    def _put(self, part: StatePath, path: StatePath, params: PyTree, opt_state: PyTree) -> None:
        """Store new parameters and a new state, to which the flags have been applied if there are any."""
        state = self._state
        state.replace(part, params)
        state.replace(path, opt_state)
        if self._flagged:
            self.resolve(("model_state",))
            self._resolved = {name: state.values[name,] for name in _GUARDED}
            self._unused_flags.clear()  # the update of the parameters has used them

    # -- `step.skip` and `step.hold` ------------------------------------------------------------

    @property
    def _flagged(self) -> bool:
        return not self.by_loop and any(("step", flag) in self._state.values for flag in ("hold", "skip"))

    def _prevents(self, name: str) -> Any:
        """Return whether the step leaves a part of the carry unchanged (bool[]), or None if no handler sets a flag."""
        # A held step keeps the statistics of the batch. A skipped step does not.
        flags = ("skip",) if name == "model_state" else ("hold", "skip")
        values = {} if self.by_loop else self._state.values
        written = [values["step", flag] for flag in flags if ("step", flag) in values]
        return functools.reduce(jnp.logical_or, written) if written else None

    def flagged(self, flag: str, event: Event, handler: BoundHandler) -> None:
        """Record that a handler has written `step.skip` or `step.hold`."""
        if not self.by_loop:
            self._unused_flags[flag] = event, handler

    def honored(self, flag: str) -> None:
        """Record that a hand-written loop applies a flag to its own state."""
        self._unused_flags.pop(flag, None)

    def mark_external(self, name: str, value: PyTree) -> None:
        """Record that a part of the train state belongs to a hand-written loop: no updates and no flags apply to it."""
        self._initial[name] = self._resolved[name] = value

    def handled(self, before: Mapping[str, PyTree]) -> None:
        """Record that the flags do not apply to the changes that handlers have made since `before`."""
        for name in _GUARDED:
            # A handler of UpdateEnd may change the parameters, e.g. to clip weights, even in a skipped step.
            now = self._state.values[name,]
            if now is not before[name]:
                self._resolved[name] = jax.tree.map(
                    lambda n, b, r: n if b is r else r, now, before[name], self._resolved[name]
                )

    def resolve(self, names: tuple[str, ...] = _GUARDED) -> None:
        """Apply the flags to the assignments by the phase itself since they were last applied."""
        values = self._state.values
        for name in names if self._flagged else ():
            resolved, prevents = self._resolved[name], self._prevents(name)
            # If the phase has assigned nothing, no operation is added to the program.
            if prevents is None or _same(values[name,], resolved):
                continue
            old = self._initial[name] if name == "model_state" else resolved
            values[name,] = self._resolved[name] = _selected(prevents, old, values[name,])
            if name != "model_state":
                self._unused_flags.clear()

    def announce(self) -> None:
        """Apply the flags before handlers of UpdateEnd see the new state."""
        self.resolve()
        self._resolved = {name: self._state.values[name,] for name in _GUARDED}
        self._updated, self._announced = False, True

    def finish(self) -> None:
        """Apply the flags at the end of the step, and emit UpdateEnd if none has followed the last update.

        Raises:
            TraceError: A handler has written a flag after all updates.
        """
        self.resolve()
        trains = type(self._state.phase).trains
        if self._announced:
            # Handlers of UpdateEnd have already used the new values, so undoing the update now would be too late.
            for flag, (event, handler) in self._unused_flags.items():
                raise TraceError(
                    f"`{self._phase}.step` emits {event!r} after its last update, too late for `step.{flag}`, which "
                    f"{handler.declared.label} writes.",
                    where=[f"{self._phase}.step", handler.where],
                    why="handlers of UpdateEnd have already seen the new parameters",
                    fix=f"emit {event!r} before the parameters are updated",
                )
        # A phase may assign the parameters without `learner.update`, e.g. evolution strategies.
        changed = trains and not self._announced and not _same(self._state.values["params",], self._initial["params"])
        if self._updated or changed:
            self._state.emit(UpdateEnd())

    @property
    def _phase(self) -> str:
        return type(self._state.phase).__name__


@jax.named_scope(FLAG_SCOPE)
def _selected(prevents: Any, old: PyTree, new: PyTree) -> PyTree:
    # `select` instead of `cond`, for which XLA copies the parameters and the state (jax 0.10.2, CPU).
    return jax.tree.map(lambda o, n: n if n is o else jax.lax.select(prevents, o, n), old, new)


def _same(a: PyTree, b: PyTree) -> bool:
    """Return whether two trees hold the same tracers."""
    # By identity, because tracers have no values.
    return all(x is y for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def _other_structure(old: PyTree, new: PyTree) -> list[str]:
    """Return the differences in structure of two trees. Shapes and dtypes may differ."""
    return differences(old, new) if jax.tree.structure(old) != jax.tree.structure(new) else []


def _complete_parts(optimizers: NamedOptimizers, params: PyTree, step: str) -> dict[str, StatePath]:
    """Return the part that each optimizer owns.

    Raises:
        TraceError: The parts overlap, or do not cover the parameters.
    """
    parts = {name: optimizers.part(name, params) for name in optimizers}
    for name, path in parts.items():
        for other, longer in parts.items():
            if name != other and longer[: len(path)] == path:
                why, fix = "`apply_updates` updates each part with the optimizer that owns it", []
                if not path:
                    known = list(names_in(params))
                    why = f"`params` has no part {name!r}, so this optimizer owns all of it"
                    fix = [f"name {name!r} after the part that it updates: {' or '.join(map(repr, known))}"]
                raise TraceError(
                    f"{step} calls `learner.apply_updates()`, and the optimizers {name!r} and {other!r} both own "
                    f"`{dotted(('params', *longer))}`.",
                    why=why,
                    fix=[*fix, "call `learner.update(grads, wrt=..., optimizer=...)` in a phase of your own"],
                )
    for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]:
        leaf = jax.tree_util.keystr(path, simple=True, separator=".")
        if not any(leaf == owned or leaf.startswith(f"{owned}.") for owned in map(".".join, parts.values())):
            first = leaf.split(".")[0]
            raise TraceError(
                f"{step} calls `learner.apply_updates()`, and no optimizer owns `params.{leaf}`.",
                why="the gradients of this part would be ignored",
                fix=f'add an optimizer for it, e.g. `"{first}": optax.set_to_zero()` to keep it constant',
            )
    return parts


def _for_lookahead(grads: PyTree, opt_state: PyTree, params: PyTree) -> PyTree:
    """Return the gradients for the optimizer. `optax.lookahead` takes only those of the fast parameters.

    Raises:
        TraceError: The optimizer is `optax.lookahead`, and the parameters are not `optax.LookaheadParams`.
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=_is_lookahead)
    if not any(map(_is_lookahead, nodes)):
        return grads
    if isinstance(params, optax.LookaheadParams):
        # Optax computes the update of the slow parameters itself.
        return grads.fast
    raise TraceError(
        "`optax.lookahead` needs its own parameters, `optax.LookaheadParams`.",
        why="it keeps a fast and a slow copy of the parameters, and the gradients are those of the fast one",
        fix="build the Learner with `Learner.from_loss(optax.LookaheadParams.init_synced(params), loss_fn, ...)`, "
        "where `loss_fn(params, batch, key)` computes the loss of `params.fast`",
    )


def _is_lookahead(node: Any) -> bool:
    return isinstance(node, optax.LookaheadState)
