"""Flax NNX modules."""

import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fluxcb._errors import DeclarationError
from fluxcb._typing import PyTree
from fluxcb.models._keywords import accepted_keywords, train_flag

__all__ = ["NNXAdapter", "nnx"]

_Path = tuple[Any, ...]


def nnx(module: Any, train_argument: str | None = None) -> "NNXAdapter":
    """Adapt a Flax NNX module to what the training step needs.

    The module is read once, here, and never changed: **training does not train the object you hold**. Ask for the
    trained one (`learner.model`), or copy it back with `nnx.update(module, nnx.state(learner.model))`.

    `learner.model` is in evaluation mode, as after `module.eval()`. To continue training it in your own loop, call
    `model.train()` first. You can pass it to a Learner unchanged, because training steps set the mode themselves.

    `nnx.Param`s become `params`, and every other variable (`BatchStat`, your own types) becomes `model_state`: nested
    dicts, as `nnx.to_pure_dict` makes them. Training and evaluation run the module as `module.train()` and
    `module.eval()` leave it. Random streams are in neither dict: each call seeds them from the step's key, so outputs
    depend on the key and nothing else. Variables that a call creates are dropped.

    A call that spells out `rngs` is given an `nnx.Rngs`.

    Args:
        module: The module, with its variables made.
        train_argument: The keyword of the module's call that says whether it is being trained, if it has one. None
            takes whichever of `train`, `training`, `is_training` and `deterministic` the call spells out;
            `deterministic` is True where the others are False.

    Returns:
        The adapter.

    Raises:
        DeclarationError: The module cannot be called, its call does not take `train_argument`, or several keywords
            could be meant.

    Example:
        >>> from flax import nnx as flax_nnx
        >>> import jax, jax.numpy as jnp
        >>> model = nnx(flax_nnx.Linear(5, 3, rngs=flax_nnx.Rngs(0)))
        >>> params, model_state = model.init(None, None)
        >>> jax.tree.map(jnp.shape, params)
        {'bias': (3,), 'kernel': (5, 3)}
    """
    return NNXAdapter(module, train_argument)


class NNXAdapter:
    """Runs an NNX module as a model; made by `nnx`."""

    def __init__(self, module: Any, train_argument: str | None) -> None:
        """Take apart what `nnx` was given."""
        from flax import nnx as flax_nnx

        kind = type(module)
        where = f"{kind.__module__}.{kind.__qualname__}"
        if not callable(module):
            raise DeclarationError(
                f"The NNX module `{kind.__qualname__}` has no `__call__`.",
                where=where,
                why="the step calls the model as `module(xs)`",
                fix="give it a `__call__` that takes a batch of inputs",
            )
        self._name = kind.__qualname__
        self._takes_rngs = "rngs" in accepted_keywords(module.__call__)
        self._flag = train_flag(module.__call__, train_argument, adapter="nnx", where=f"{where}.__call__")
        state = flax_nnx.state(module)
        self._graphdefs = {train: _graphdef(module, train) for train in (True, False)}
        variables = dict(flax_nnx.to_flat_state(state))
        self._random = {path: leaf for path, leaf in variables.items() if isinstance(leaf, flax_nnx.RngState)}
        self._params = {path: leaf for path, leaf in variables.items() if isinstance(leaf, flax_nnx.Param)}
        self._state = {p: leaf for p, leaf in variables.items() if p not in self._random and p not in self._params}

    @property
    def held(self) -> tuple[PyTree, PyTree]:
        """The initial `(params, model_state)` of the module."""
        return _as_dict(self._params), _as_dict(self._state)

    def init(self, key: Any, xs: PyTree) -> tuple[PyTree, PyTree]:
        """Return the `(params, model_state)` the module came with; neither argument is looked at."""
        del key, xs
        return self.held

    def apply(self, params: PyTree, model_state: PyTree, xs: PyTree, *, train: bool, key: Any) -> tuple[PyTree, PyTree]:
        """Return `(outputs, new_model_state)`; the state is left alone where `train` is False."""
        from flax import nnx as flax_nnx

        module = self._merge(self._graphdefs[train], params, model_state, key)
        keywords: dict[str, Any] = {**self._flag.keywords(train)} if self._flag else {}
        if self._takes_rngs and key is not None:
            keywords["rngs"] = flax_nnx.Rngs(_stream_key(key, "call"))
        outputs = module(xs, **keywords)
        if not (train and self._state):
            return outputs, model_state
        after = dict(flax_nnx.to_flat_state(flax_nnx.state(module)))
        return outputs, _as_dict({path: after[path] for path in self._state})

    def rebuild(self, params: PyTree, model_state: PyTree) -> Any:
        """Return a new module with these arrays, in evaluation mode, with the original random streams."""
        return self._merge(self._graphdefs[False], params, model_state, None)

    def _merge(self, graphdef: Any, params: PyTree, model_state: PyTree, key: Any) -> Any:
        from flax import nnx as flax_nnx

        # Variables are made anew on every call: NNX refuses to mutate one that was made outside the running trace.
        leaves = {path: _filled(leaf, _at(params, path)) for path, leaf in self._params.items()}
        leaves |= {path: _filled(leaf, _at(model_state, path)) for path, leaf in self._state.items()}
        leaves |= {path: _seeded(path, leaf, key) for path, leaf in self._random.items()}
        return flax_nnx.merge(graphdef, flax_nnx.from_flat_state(leaves))

    def __repr__(self) -> str:
        """Return the call that made it, in short."""
        return f"nnx({self._name})"


def _graphdef(module: Any, train: bool) -> Any:
    from flax import nnx as flax_nnx

    clone = flax_nnx.clone(module)
    if train:
        clone.train()
    else:
        clone.eval()
    return flax_nnx.graphdef(clone)


def _seeded(path: _Path, variable: Any, key: Any) -> Any:
    """Return one variable of a random stream: seeded from `key` by its place, or as the module had it."""
    from flax import nnx as flax_nnx

    if key is None:
        return variable.copy()
    if isinstance(variable, flax_nnx.RngCount):
        return variable.copy(jnp.zeros_like(variable.get_raw_value()))
    if not isinstance(variable, flax_nnx.RngKey):
        return variable.copy()
    seed = _stream_key(key, "/".join(map(str, path)))
    shape = variable.get_raw_value().shape  # a stream made under nnx.vmap holds a key per layer
    return variable.copy(jax.random.split(seed, shape) if shape else seed)


def _stream_key(key: Any, name: str) -> Any:
    # By name, not by number: a new layer leaves the streams of the others as they were.
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def _filled(leaf: Any, value: PyTree) -> Any:
    from flax import nnx as flax_nnx

    return leaf.copy(value) if isinstance(leaf, flax_nnx.Variable) else value


def _as_dict(leaves: Mapping[_Path, Any]) -> dict[Any, Any]:
    from flax import nnx as flax_nnx

    # The raw values: hooks (`on_get_value`) belong to the module's own reads.
    def raw(leaf: Any) -> Any:
        return leaf.get_raw_value() if isinstance(leaf, flax_nnx.Variable) else leaf

    return flax_nnx.to_pure_dict(flax_nnx.from_flat_state(leaves), raw)


def _at(tree: Any, path: _Path) -> Any:
    for key in path:
        # Layers in lists have int keys, which checkpoints in JSON and orbax give back as strings.
        tree = tree[key] if key in tree else tree[str(key)]
    return tree
