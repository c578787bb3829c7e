"""Equinox modules, with or without state."""

from collections.abc import Callable
from typing import Any

import jax

from fluxcb._errors import DeclarationError
from fluxcb._typing import PyTree
from fluxcb.models._keywords import accepted_keywords

__all__ = ["EquinoxAdapter", "equinox"]


def equinox(module: Any, *, vmap: bool = True, axis_name: str = "batch") -> "EquinoxAdapter":
    """Adapt an Equinox module to what the training step needs.

    Equinox modules take one example. The adapter maps them over axis 0 of the batch; where the call spells out `key`,
    each example gets a key of its own, split from the step's.

    `params` is the module with everything but its floating-point and complex arrays taken out (None in their place),
    so `params.layers[0].weight` works. The rest (functions, flags, integer and bool arrays) stays in the adapter and
    does not change. In evaluation the module is `eqx.nn.inference_mode(module)`; in training it is as it was given, so
    a layer built with `inference=True` stays frozen.

    `learner.model` is in inference mode. To continue training it in your own loop, call
    `eqx.nn.inference_mode(model, False)` first. If you pass it to a Learner, the Learner trains it like the original
    module: only layers that were built with `inference=True` stay in inference mode.

    Args:
        module: The module, or `(module, state)` from `eqx.nn.make_with_state(...)(...)` if some layers keep state.
        vmap: Whether to map the module over the batch. False passes the whole batch and one key.
        axis_name: Name of the mapped axis, as given to layers that look across the batch
            (`eqx.nn.BatchNorm(..., axis_name="batch")`).

    Returns:
        The adapter.

    Raises:
        DeclarationError: The module cannot be called, or keeps state that was not given.

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
    """Runs an Equinox module as a model; made by `equinox`."""

    def __init__(self, module: Any, state: Any, vmap: bool, axis_name: str) -> None:
        """Take apart what `equinox` was given."""
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
        # `eqx.nn.State` may be used once only, so the carry holds a dict, and every call gets a State of its own.
        values, self._state_keys = ((), None) if state is None else state.tree_flatten()
        self._state = dict(zip(self._state_names(), values, strict=True))

    @property
    def held(self) -> tuple[PyTree, PyTree]:
        """The initial `(params, model_state)` of the module."""
        return self._params, dict(self._state)

    def init(self, key: Any, xs: PyTree) -> tuple[PyTree, PyTree]:
        """Return the `(params, model_state)` the module came with; neither argument is looked at."""
        del key, xs
        return self.held

    def apply(self, params: PyTree, model_state: PyTree, xs: PyTree, *, train: bool, key: Any) -> tuple[PyTree, PyTree]:
        """Return `(outputs, new_model_state)`; the state is left alone where `train` is False."""
        import equinox as eqx

        module = eqx.combine(params, self._static[train])
        stateful = self._state_keys is not None

        def call(x: PyTree, state: Any, key: Any) -> tuple[PyTree, Any]:
            keywords = {"key": key} if self._takes_key else {}
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
        values, _ = new_state.tree_flatten()
        return outputs, dict(zip(self._state_names(), values, strict=True))

    def rebuild(self, params: PyTree, model_state: PyTree) -> Any:
        """Return the module in inference mode with these arrays, or `(module, state)` if the model was such a pair."""
        import equinox as eqx

        module = eqx.combine(params, self._rebuilt)
        return module if self._state_keys is None else (module, self._as_state(model_state))

    def _state_names(self) -> tuple[str, ...]:
        # make_with_state names each entry by its place in the module; a bare State(module) has anonymous objects.
        keys = self._state_keys or ()
        return tuple(key if isinstance(key, str) else str(number) for number, key in enumerate(keys))

    def _as_state(self, model_state: PyTree) -> Any:
        import equinox as eqx

        if self._state_keys is None:
            return None
        values = tuple(model_state[name] for name in self._state_names())
        return eqx.nn.State.tree_unflatten(self._state_keys, values)

    def __repr__(self) -> str:
        """Return the call that made it, in short."""
        return f"equinox({self._name})"


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
