"""The train state of a hand-written loop, in the form that callbacks use."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluxcb._compile.arrays import copy_tree
from fluxcb._compile.carry_paths import root_of
from fluxcb._errors import DeclarationError
from fluxcb._run.host_backend import HostBackend
from fluxcb._run.train_state import TrainState
from fluxcb._typing import PyTree, StatePath

__all__ = ["TREES", "ExternalTrainState", "ExternalTree", "LoopBackend"]

TREES = ("params", "model_state", "opt_state")
"""The state paths that the pytree of a loop provides."""

_BY_INDEX = ("params", "opt_state")


class ExternalTree:
    """A loop's own pytree, split into `params`, `opt_state` and `model_state`.

    Entries and fields are found by name. A tuple or list has `params` first and `opt_state` second. Everything else is
    `model_state`. A pytree without a `params` entry and without positions is all `params`.

    Args:
        get: Returns the loop's pytree.
        put: Takes a new pytree, or None if callbacks cannot change it.

    Attributes:
        put: See the argument.
    """

    def __init__(self, get: Callable[[], PyTree], put: Callable[[PyTree], None] | None) -> None:
        self._get, self.put = get, put
        self._parts: dict[str, PyTree] | None = None
        self._changed = self._put_works = False
        self._names: list[str] = []
        self._structure: Any = None
        self.previous: PyTree = None
        # Weak references, because the first parameters would otherwise take memory throughout the training.
        self._first_params: list[weakref.ref[jax.Array]] | None = None

    def begin(self) -> None:
        """Note the parameters before the training, for `is_stale`."""
        self._first_params = [weakref.ref(leaf) for leaf in jax.tree.leaves(self.parts["params"])]

    def is_stale(self) -> bool:
        """Return whether the loop still returns the arrays from before the training.

        Only JAX arrays are compared, because a loop may change NumPy arrays in place.
        """
        now = jax.tree.leaves(self.parts["params"])
        if not self._first_params or len(now) != len(self._first_params):
            return False
        # An array that no longer exists has been replaced, and its reference returns None.
        return all(ref() is leaf for ref, leaf in zip(self._first_params, now, strict=True))

    def read_again(self) -> None:
        """Forget the pytree, because the loop has run a step."""
        self._parts = None

    def keep(self) -> None:
        """Keep the arrays of the pytree, in case a callback skips the update of the next step."""
        self.previous = jax.tree.map(lambda leaf: leaf, self._get())  # the loop may change its containers in place

    def undo(self) -> None:
        """Return the pytree from `keep` to the loop.

        Raises:
            DeclarationError: The loop's step has donated its arrays.
        """
        self.require_kept()
        self._first_params = None  # the parameters do not change if every update is skipped
        self._pass_on(self.previous)
        self._parts = None

    def require_kept(self) -> None:
        """Check that the arrays of the pytree before the step still exist.

        Raises:
            DeclarationError: The loop's step has donated them.
        """
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(self.previous)):
            raise DeclarationError(
                "A callback can skip the update of a step, but the loop has donated the state before the update.",
                why="the hook returns the previous state to the loop when `step.skip` is true",
                fix="compile the step without `donate_argnums` and `donate_argnames`, or leave the callback out",
            )

    @property
    def parts(self) -> dict[str, PyTree]:
        """The parts by state path, all leaves as JAX arrays."""
        if self._parts is None:
            self._parts = self._split(self._get())
        return self._parts

    def replace(self, name: str, value: PyTree) -> None:
        """Replace a part; `write_back` passes the whole tree to the loop."""
        self._parts = {**self.parts, name: value}
        self._changed = True

    def write_back(self) -> None:
        """Pass the pytree to the loop if a callback has changed it; see `_pass_on`."""
        if not self._changed:
            return
        parts, self._changed = self.parts, False  # a failing `set_state` is not called again
        self._pass_on(self._joined(parts))

    def _pass_on(self, tree: PyTree) -> None:
        """Pass a pytree to the loop, and check once that the loop has taken it over.

        Raises:
            DeclarationError: `set_state` has changed nothing.
        """
        if self.put is None:
            return
        # Not after `set_state` has worked once, because the check gets and flattens the loop's tree twice.
        before = [] if self._put_works else jax.tree.leaves(self._get())
        self.put(tree)
        if self._put_works:
            return
        leaves = zip(before, jax.tree.leaves(tree), jax.tree.leaves(self._get()), strict=False)
        # Only arrays that the callbacks have replaced can show whether the loop has taken them over.
        changed = [after is not old for old, new, after in leaves if new is not old]
        if changed and not any(changed):
            raise DeclarationError(
                "`set_state` was called, and `state` still returns the previous arrays.",
                why="the loop continues with its previous state, so a restored checkpoint, for example, has no effect",
                fix=[
                    "if `set_state` assigns variables of the function around it, begin it with a line such as "
                    "`nonlocal params, opt_state`",
                    "if it assigns variables of a module, begin it with `global params, opt_state`",
                ],
            )
        self._put_works = any(changed)

    def _split(self, tree: PyTree) -> dict[str, PyTree]:
        found, self._structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
        # One level of the tree is enough: the names identify the entries, and their content stays as it is.
        entries = [path[0] if path else None for path, _ in found]
        self._names = [_name_of(entry) for entry in entries]
        if "params" not in self._names:
            self._names, found = [], [((), tree)]
            # Without names, `_joined` returns `params` as the whole tree.
            return {"params": _arrays(tree), "opt_state": {}, "model_state": {}}
        children = dict(zip(self._names, (child for _, child in found), strict=True))
        rest = {name: child for name, child in children.items() if name not in _BY_INDEX}
        # A single entry `model_state` is the model state itself and not a mapping with it.
        model_state = rest["model_state"] if set(rest) == {"model_state"} else rest
        parts = {"params": children["params"], "opt_state": children.get("opt_state", {}), "model_state": model_state}
        return {name: _arrays(part) for name, part in parts.items()}

    def _joined(self, parts: dict[str, PyTree]) -> PyTree:
        if not self._names:
            return parts["params"]
        named = {name for name in self._names if name not in _BY_INDEX}
        rest = {"model_state": parts["model_state"]} if named == {"model_state"} else parts["model_state"]
        return self._structure.unflatten({**rest, **parts}[name] for name in self._names)


def _name_of(entry: Any) -> str:
    # JAX uses a `FlattenedIndexKey` for classes that are registered without the names of their fields.
    if isinstance(entry, jax.tree_util.SequenceKey | jax.tree_util.FlattenedIndexKey):
        index = entry.idx if isinstance(entry, jax.tree_util.SequenceKey) else entry.key
        return _BY_INDEX[index] if index < len(_BY_INDEX) else str(index)
    return str(getattr(entry, "name", getattr(entry, "key", "")))


def _arrays(tree: PyTree) -> PyTree:
    # A loop may hold NumPy arrays and numbers, and handlers get JAX arrays as in a Learner.
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf), tree)


class ExternalTrainState(TrainState):
    """The train state of a Learner whose parameters, model state and optimizer state belong to a loop.

    The carry has the state that traced handlers keep between steps. It has no parameters.

    Args:
        key: The run's random key.
        loop: The loop's pytree, or None if callbacks do not see it.
    """

    def __init__(self, key: Any, loop: ExternalTree | None) -> None:
        super().__init__(key)
        self.loop = loop

    def of_loop(self, root: StatePath) -> bool:
        """Return whether a part of the train state belongs to the loop."""
        return self.loop is not None and root[0] in TREES

    def live(self, root: StatePath) -> PyTree:
        """Return a part of the train state itself."""
        if self.loop is not None and root[0] in TREES:
            return self.loop.parts[root[0]]
        return super().live(root)

    @property
    def skipped(self) -> bool:
        """Whether a traced handler has skipped the update of the last step; waits for the device."""
        # The flag is in the carry, whereas `self.live` returns the model state of the loop.
        return bool(np.asarray(super().live(("model_state",))["skipped"]))

    def copy_of(self, root: StatePath) -> PyTree:
        """Return a copy of a part of the train state, shared by the readers of a moment."""
        if not self.of_loop(root):
            return super().copy_of(root)
        if root not in self.copies:  # a copy, because the loop's next step may donate its arrays
            self.copies[root] = copy_tree(self.live(root))
        return self.copies[root]

    def replace(self, root: StatePath, value: PyTree) -> None:
        """Replace a part of the train state."""
        if self.loop is None or root[0] not in TREES:
            super().replace(root, value)
            return
        self.copies.pop(root, None)  # later handlers of the moment see the new value
        self.loop.replace(root[0], value)


class LoopBackend(HostBackend):
    """The backend of one callback, for which the train state belongs to the loop."""

    _train: ExternalTrainState

    def _value_in_window(self, path: StatePath) -> tuple[Any] | None:
        """Return the window's value of a part of the carry; a window has no value of the loop's state."""
        return None if self._train.of_loop(root_of(path)) else super()._value_in_window(path)
