"""Assigning parts of the train state between two fits."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fluxcb._check.graph import CallbackGraph
from fluxcb._compile.arrays import differences, placed_as, with_numbers_as
from fluxcb._compile.hyperparams import unusable
from fluxcb._compile.leaves import is_number
from fluxcb._declare.callback import unwrap
from fluxcb._errors import DeclarationError
from fluxcb._run.state import HostState
from fluxcb._traced_values import describe
from fluxcb._typing import PyTree, StatePath

__all__ = ["refuse_scheduled", "set_hyperparam", "set_key", "set_part", "set_state"]


def set_state(state: HostState, value: PyTree) -> None:
    """Replace the whole train state and the counters of the host; see `TrainState.assign`."""
    # The last counter is `stopped`, which has no meaning between two fits.
    step, epoch, step_in_epoch, _ = state.train.assign(value)
    state.progress.replace(step=step, epoch=epoch, step_in_epoch=step_in_epoch)
    state.fit.assign("learner.state")


def set_part(state: HostState, name: str, value: PyTree) -> None:
    """Replace a part of the carry, such as `params`, by copies of other arrays.

    Raises:
        DeclarationError: The arrays have another structure, or other shapes or dtypes.
    """
    old = state.train.live((name,))
    wrong = differences(old, value := with_numbers_as(old, value))
    if wrong:
        fix = [f"assign a value with the structure of `learner.{name}`"]
        if name == "params" and _has_numbers_as_keys(old):
            fix.append("for those of a checkpoint, write `load_params(path, like=learner.params)`")
        # The name of the module is sufficient, so Flax does not have to be imported.
        if name == "params" and any(base.__module__.startswith("flax.nnx") for base in type(value).__mro__):
            fix = ["assign a dict of arrays: `learner.params = nnx.to_pure_dict(nnx.state(module, nnx.Param))`"]
        raise DeclarationError(
            f"The assigned `{name}` does not fit the Learner: {wrong[0]}.",
            where=wrong[1:5],
            why="the carry of a compiled step keeps its structure, shapes and dtypes",
            fix=fix,
        )
    state.train.replace((name,), placed_as(old, value))  # the compiled programs expect the devices of the old arrays
    state.fit.assign(f"learner.{name}")


def _has_numbers_as_keys(tree: PyTree) -> bool:
    """Return whether a pytree has numbers as keys, as that of `nnx.Sequential`. A checkpoint stores them as text."""
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(tree))
    return any(isinstance(key, jax.tree_util.DictKey) and isinstance(key.key, int) for path in paths for key in path)


def set_key(state: HostState, key: Any) -> None:
    """Use another random key from the next step on.

    Raises:
        DeclarationError: The key has another implementation.
    """
    old, new = jax.random.key_impl(state.train.run_key), jax.random.key_impl(key)
    if old != new:
        raise DeclarationError(
            f"The assigned key has the implementation {new}, but the Learner's key has {old}.",
            why="the compiled step takes keys of one implementation",
            fix=f"assign `jax.random.key(seed, impl={str(old)!r})`",
        )
    state.train.run_key = key
    state.fit.assign("learner.key")
    if state.progress.step == 0:  # the program assigns it before it trains or resumes, so the run begins with it
        state.train.give_key(key)
    # Programs take the key from the carry, where its words are in the array of the counters.
    if state.train.built:
        state.train.set_counters(state.progress)


def refuse_scheduled(graph: CallbackGraph, name: str) -> None:
    """Refuse to set a hyperparameter that a callback sets at each step.

    Raises:
        DeclarationError: There is such a callback, and it is enabled.
    """
    for declared in graph.declared:
        callback = unwrap(declared.callback)
        if not declared.disabled and name in callback.scheduled_hyperparams:
            cls = type(callback).__name__
            raise DeclarationError(
                f"The assignment writes `hyperparams.{name}`, which {declared.label} sets at each step.",
                why="the next step would overwrite the written value",
                fix=[
                    f"remove the callback first: `learner.callbacks.remove({cls})`",
                    f"give it another schedule: `learner.callbacks.replace({cls}(...))`",
                ],
            )


def set_hyperparam(state: HostState, name: str, value: Any) -> float:
    """Set a hyperparameter between two fits, and return its new value.

    Raises:
        MissingStateError: The optimizer has no hyperparameter of this name, or sets it itself.
        DeclarationError: The value is not a number, has another shape, is not finite in the dtype, or is a negative
            learning rate.
    """
    opt_state = state.train.live(("opt_state",))
    # The same errors as for a callback, with an assignment as the fix.
    state.train.hyperparams.require(name, writing=True, declared=_ASSIGNMENT, where="")
    old = state.train.hyperparams.get(opt_state, name)
    if found := unusable(name, value, old.dtype):
        raise DeclarationError(
            f"`learner.hyperparams.{name}` was assigned {found.shown}.",
            why=found.why,
            fix=f"assign {found.instead}, e.g. `learner.hyperparams[{name!r}] = 1e-3`",
        )
    # An array would broadcast and change the shapes of the carry.
    if not is_number(value) or np.shape(value) != old.shape:
        raise DeclarationError(
            f"`learner.hyperparams.{name}` is {describe(old)}, and {describe(value)} was assigned.",
            fix="assign a number",
        )
    state.train.replace(("opt_state",), state.train.hyperparams.set(opt_state, name, value))
    state.fit.assign(f"learner.hyperparams[{name!r}]")
    if state.progress.step == 0:  # the program assigns it before it trains or resumes, so the run begins with it
        state.train.given_hyperparams = state.train.hyperparams.numbers(state.train.live(("opt_state",)))
    return float(state.train.hyperparams.get(state.train.live(("opt_state",)), name))


class _Assignment:
    """Stands for the callback in errors about a hyperparameter that the user assigns."""

    label = "The assignment"

    def how_to_declare(self, path: StatePath, permission: Any) -> str:
        """Return the fix: an assignment that works."""
        return f"assign `learner.hyperparams[{path[1]!r}]`"


_ASSIGNMENT = _Assignment()
