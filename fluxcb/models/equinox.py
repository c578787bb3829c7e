"""Equinox modules, with or without state."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import jax

from fluxcb._calls import entry_point
from fluxcb._errors import DeclarationError
from fluxcb._typing import BoundModel, PyTree
from fluxcb.models._equinox_notes import explaining_call, warn_about_flags
from fluxcb.models._keywords import accepted_keywords
from fluxcb.models._shapes import shape_of

__all__ = ["EquinoxAdapter", "equinox", "state_names"]


@entry_point
def equinox(module: Any, *, vmap: bool = True, axis_name: str = "batch") -> "EquinoxAdapter":
    """Adapt an Equinox module to the training step.

    Equinox modules take one example, so the adapter maps them over axis 0 of the batch. If the call has a parameter
    named `key`, each example gets its own key, split from the key of the step.

    `params` is the module with only its floating-point and complex arrays. Everything else is replaced by None, so
    `params.layers[0].weight` works. The rest (functions, flags, integer and bool arrays) stays in the adapter and
    does not change. Evaluation uses `eqx.nn.inference_mode(module)`. Training uses the module as it was passed, so
    a layer built with `inference=True` stays in inference mode.

    A loss function `loss_fn(model, batch)` receives the module itself, so it maps the module over the batch:
    `jax.vmap(model)(xs)`. If the module has state, the loss function also takes `model_state`, an `eqx.nn.State`, and
    returns the new state last.

    `learner.model` is in inference mode. To continue training it in your own loop, call
    `eqx.nn.inference_mode(model, False)` first. If you pass it to a Learner, the Learner trains it like the original
    module: only layers that were built with `inference=True` stay in inference mode.

    Args:
        module: The module, or `(module, state)` from `eqx.nn.make_with_state(...)(...)` if some layers have state.
        vmap: Whether to map the module over the batch. With False, the adapter passes the whole batch and one key.
        axis_name: Name of the mapped axis, which layers that aggregate over the batch also need
            (`eqx.nn.BatchNorm(..., axis_name="batch")`).

    Returns:
        The adapter.

    Raises:
        DeclarationError: The module cannot be called, or has state that was not passed.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp
        >>> model = equinox(eqx.nn.Linear(5, 3, key=jax.random.key(0)))
        >>> params, model_state = model.init(None, None)
        >>> model.apply(params, model_state, jnp.ones((2, 5)), train=True, key=None)[0].shape
        (2, 3)
    """
    module, state = module if isinstance(module, tuple) else (module, None)
    return EquinoxAdapter(module, state, vmap, axis_name)


class EquinoxAdapter:
    """Runs an Equinox module as a model. `equinox` returns it."""

    def __init__(self, module: Any, state: Any, vmap: bool, axis_name: str) -> None:
        """Split the module into its arrays and the rest."""
        import equinox as eqx

        if not callable(module):
            raise DeclarationError(
                f"The Equinox module `{type(module).__qualname__}` has no `__call__`.",
                where=_place(module),
                why="the step calls the model as `module(x)`",
                fix="give it a `__call__` that takes one example",
            )
        if state is None and _needs_state(module):
            raise DeclarationError(
                f"The Equinox module `{type(module).__qualname__}` has layers that keep state, but no state was given.",
                where=_place(module),
                why="their running values live outside the module, in an `eqx.nn.State`",
                fix="pass `(module, state)` as `eqx.nn.make_with_state(make_module)(...)` returns it",
            )
        self._name = type(module).__qualname__
        self._vmap = vmap
        self._axis_name = axis_name
        self._takes_key = "key" in accepted_keywords(module.__call__)
        self._params, static = eqx.partition(_with_flags(module, _in_training), eqx.is_inexact_array)
        _, inference = eqx.partition(eqx.nn.inference_mode(module), eqx.is_inexact_array)
        self._static = {True: static, False: inference}
        self._rebuilt = _with_flags(static, _in_result)
        # An `eqx.nn.State` can only be used once, so the carry holds a dict, and every call creates a new State.
        values, self._state_keys = ((), None) if state is None else state.tree_flatten()
        self._state = dict(zip(self._state_names(), values, strict=True))

    @property
    def held(self) -> tuple[PyTree, PyTree]:
        """The initial `(params, model_state)` of the module."""
        return self._params, dict(self._state)

    def init(self, key: Any, xs: PyTree) -> tuple[PyTree, PyTree]:
        """Return the initial `(params, model_state)` of the module. Both arguments are ignored."""
        del key, xs
        return self.held

    def released(self, model: Any) -> "tuple[EquinoxAdapter, Any]":
        """Return this adapter and the model that the user passed, with their arrays replaced by shapes.

        Args:
            model: The module, `(module, state)`, or this adapter.
        """
        import equinox as eqx

        def with_shapes(tree: Any) -> Any:
            return jax.tree.map(lambda leaf: shape_of(leaf) if eqx.is_inexact_array(leaf) else leaf, tree)

        other = copy.copy(self)
        other._params, other._state = with_shapes(self._params), with_shapes(self._state)
        if model is self:
            return other, other
        if self._state_keys is None:
            return other, with_shapes(model)
        return other, (with_shapes(model[0]), other._as_state(other._state))

    def apply(self, params: PyTree, model_state: PyTree, xs: PyTree, *, train: bool, key: Any) -> tuple[PyTree, PyTree]:
        """Return `(outputs, new_model_state)`. The state does not change if `train` is False."""
        import equinox as eqx

        module = eqx.combine(params, self._static[train])
        if train:
            warn_about_flags(module)
        stateful = self._state_keys is not None

        def call(x: PyTree, state: Any, key: Any) -> tuple[PyTree, Any]:
            keywords = {"key": key} if self._takes_key else {}
            with explaining_call(module, x, mapped=self._vmap):
                return module(x, state, **keywords) if stateful else (module(x, **keywords), None)

        state = self._as_state(model_state)
        if self._vmap:
            size = jax.tree.leaves(xs)[0].shape[0]
            keys = None if key is None else jax.random.split(key, size)
            batched = jax.vmap(call, in_axes=(0, None, 0), out_axes=(0, None), axis_name=self._axis_name)
            outputs, new_state = batched(xs, state, keys)
        else:
            outputs, new_state = call(xs, state, key)
        if not (train and stateful):
            return outputs, model_state
        return outputs, self._new_state(new_state, model_state)

    def bind(self, params: PyTree, model_state: PyTree, *, train: bool, key: Any) -> BoundModel:
        """Return the module with these arrays, in training or inference mode, for a loss function to call."""
        import equinox as eqx

        del key  # the loss function passes a key for each example itself
        module = eqx.combine(params, self._static[train])
        return BoundModel(module, lambda state: self._new_state(state, model_state), self._as_state(model_state))

    def _new_state(self, state: Any, model_state: PyTree) -> PyTree:
        import equinox as eqx

        if self._state_keys is None:
            return model_state
        if not isinstance(state, eqx.nn.State):
            raise DeclarationError(
                f"The loss function returned {type(state).__name__} as the new state of the module.",
                where=self._name,
                why="the layers of the module keep their running values in an `eqx.nn.State`",
                fix="return the state that the call of the module returned, as the last of the returned values",
            )
        values, _ = state.tree_flatten()
        return dict(zip(self._state_names(), values, strict=True))

    def rebuild(self, params: PyTree, model_state: PyTree) -> Any:
        """Return the module in inference mode with these arrays, or `(module, state)` if the model was such a pair."""
        import equinox as eqx

        module = eqx.combine(params, self._rebuilt)
        return module if self._state_keys is None else (module, self._as_state(model_state))

    def _state_names(self) -> tuple[str, ...]:
        return state_names(self._state_keys or ())

    def _as_state(self, model_state: PyTree) -> Any:
        import equinox as eqx

        if self._state_keys is None:
            return None
        values = tuple(model_state[name] for name in self._state_names())
        return eqx.nn.State.tree_unflatten(self._state_keys, values)

    def __repr__(self) -> str:
        """Return a short form of the call that created the adapter."""
        return f"equinox({self._name})"


def state_names(keys: Iterable[Any]) -> tuple[str, ...]:
    """Return the names of the entries of an `eqx.nn.State` in `model_state`."""
    # make_with_state names each entry by its position in the module. A plain State(module) has anonymous objects.
    return tuple(key if isinstance(key, str) else str(number) for number, key in enumerate(keys))


# A rebuilt module has all `inference` flags set. If it is passed to a Learner, training must know which flags to clear.
# These flags are the int 1, which behaves like True, even in `eqx.filter_jit` (where NumPy's True becomes a tracer).
# Unlike a registry of rebuilt modules, the 1 survives `eqx.tree_at`, copies and pickles. Flags that are True were set
# by the user and are not cleared.
_SET_BY_FLUXCB = 1
_FLAG = object()


def _in_training(flag: Any) -> Any:
    return False if type(flag) is int and flag == _SET_BY_FLUXCB else flag


def _in_result(flag: Any) -> Any:
    return flag if flag else _SET_BY_FLUXCB


def _with_flags(module: Any, changed: Callable[[Any], Any]) -> Any:
    """Return a copy of a module with a function applied to its `inference` flags."""
    import equinox as eqx

    marked = eqx.nn.inference_mode(module, _FLAG)  # pyright: ignore[reportArgumentType]  # the tree can hold any value
    return jax.tree.map(
        lambda leaf, mark: changed(leaf) if mark is _FLAG else leaf, module, marked, is_leaf=lambda x: x is None
    )


def _needs_state(module: Any) -> bool:
    import equinox as eqx

    def is_index(node: Any) -> bool:
        return isinstance(node, eqx.nn.StateIndex)

    return any(is_index(node) for node in jax.tree.leaves(module, is_leaf=is_index))


def _place(module: Any) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
