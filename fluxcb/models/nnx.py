"""Flax NNX modules."""

import copy
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fluxcb._attributes import numbers_in
from fluxcb._calls import entry_point
from fluxcb._errors import DeclarationError
from fluxcb._tracebacks import warn_user
from fluxcb._typing import BoundModel, PyTree
from fluxcb.models._keywords import accepted_keywords, boolean_options, mode_options, train_flag
from fluxcb.models._nnx_effects import warn_of_changed
from fluxcb.models._nnx_flag import add_flag
from fluxcb.models._shapes import shape_of

__all__ = ["NNXAdapter", "as_dict", "filled", "leaf_at", "nnx"]

_Path = tuple[Any, ...]


@entry_point
def nnx(module: Any, train_argument: str | None = None) -> "NNXAdapter":
    """Adapt a Flax NNX module to the training step.

    The adapter reads the module once, when it is created, and never changes it. **Training does not change your
    module.** Get the trained module from `learner.model`, or copy the trained state into your module with
    `nnx.update(module, nnx.state(learner.model))`.

    `learner.model` is in evaluation mode, as after `module.eval()`. To continue training it in your own loop, call
    `model.train()` first. You can pass it to a Learner unchanged, because training steps set the mode themselves.

    `nnx.Param`s become `params`, and all other variables (`BatchStat`, your own types) become `model_state`. Both are
    nested dicts, in the format of `nnx.to_pure_dict`. Training runs the module as after `module.train()`, and
    evaluation runs it as after `module.eval()`. Random streams are in neither dict. Each call seeds them from the key
    of the step, so the outputs depend only on this key. Variables that are created during a call are dropped.

    Dropout that the module turns on in evaluation, with an argument `deterministic=False` of its call, raises an error.
    Batch normalization with `use_running_average=False` in evaluation is a warning.

    If the module's call has a parameter named `rngs`, the adapter passes an `nnx.Rngs`.

    A loss function `loss_fn(model, batch)` receives a module of your class. A call of the module may omit the train
    flag, but passes `rngs` itself. After the call, the loss function can read variables that the call created, such as
    those of `sow`: `nnx.pop(model, Loss)`.

    Args:
        module: The module, with initialized variables.
        train_argument: The keyword argument of the module's call that is True in training. With None, the adapter
            looks for `train`, `training`, `is_training`, `is_train` or `deterministic` among the parameters of the
            call. `deterministic` is True during evaluation, the others are True during training.

    Returns:
        The adapter.

    Raises:
        DeclarationError: The module cannot be called, its call does not take `train_argument`, or several keywords are
            possible.

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
    """Runs an NNX module as a model. `nnx` returns it."""

    def __init__(self, module: Any, train_argument: str | None) -> None:
        """Split the module into its structure and its arrays."""
        from flax import nnx as flax_nnx

        from fluxcb.models._nnx_evaluation import Evaluation, guard_layers
        from fluxcb.models._nnx_inactive import evaluating_layer, record_modes
        from fluxcb.models._nnx_state import StateUses

        kind = type(module)
        where = f"{kind.__module__}.{kind.__qualname__}"
        if not callable(module):
            raise DeclarationError(
                f"The NNX module `{kind.__qualname__}` has no `__call__`.",
                where=where,
                why="the step calls the model as `module(xs)`",
                fix="give it a `__call__` that takes a batch of inputs",
            )
        self._kind, self._name = kind, kind.__qualname__
        self._takes_rngs = "rngs" in accepted_keywords(module.__call__)
        self._flag = train_flag(module.__call__, train_argument, adapter="nnx", where=f"{where}.__call__")
        self._evaluating = evaluating_layer(module)
        state = flax_nnx.state(module)
        trained, evaluated = _clone(module, train=True), _clone(module, train=False)
        self._modes = record_modes(trained) if self._flag is None else None
        self._training = flax_nnx.graphdef(trained)
        self._rebuilt = flax_nnx.graphdef(evaluated)
        options = tuple(boolean_options(module.__call__).items())
        # The fixes in the messages about layers in training mode depend on what calls the module.
        guard_layers(evaluated, Evaluation(self._name, where, self._flag, options, in_loss=False))
        self._applied = flax_nnx.graphdef(evaluated)
        guard_layers(evaluated, Evaluation(self._name, where, self._flag, options, in_loss=True))
        self._in_loss = flax_nnx.graphdef(evaluated)
        variables = dict(flax_nnx.to_flat_state(state))
        self._random = {path: leaf for path, leaf in variables.items() if isinstance(leaf, flax_nnx.RngState)}
        self._params = {path: leaf for path, leaf in variables.items() if isinstance(leaf, flax_nnx.Param)}
        self._state = {p: leaf for p, leaf in variables.items() if p not in self._random and p not in self._params}
        self._uses = StateUses(self._name, self._state)

    @property
    def held(self) -> tuple[PyTree, PyTree]:
        """The initial `(params, model_state)` of the module."""
        return as_dict(self._params), as_dict(self._state)

    def annotations(self) -> dict[_Path, Any]:
        """Return the `PartitionSpec` of each parameter that the module annotates, by its path."""
        from flax import nnx as flax_nnx

        specs = flax_nnx.get_partition_spec(flax_nnx.from_flat_state(self._params))
        flat = dict(flax_nnx.to_flat_state(specs))
        return {tuple(map(str, path)): spec for path, leaf in flat.items() if (spec := _raw(leaf))}

    def init(self, key: Any, xs: PyTree) -> tuple[PyTree, PyTree]:
        """Return the initial `(params, model_state)` of the module. Both arguments are ignored."""
        del key, xs
        if self._evaluating:
            path, option = self._evaluating
            warn_user(
                f"In the NNX module `{self._name}`, `{path}` is in evaluation mode (`{option}=True`), and other layers "
                "are not. A training phase puts all layers in training mode, as `module.train()` does. To keep "
                f"`{path}` in evaluation mode, pass `{option}=True` when you call it, and not to its constructor.",
                UserWarning,
            )
        return self.held

    def released(self, model: Any) -> "tuple[NNXAdapter, Any]":
        """Return this adapter and the model that the user passed, with their arrays replaced by shapes.

        Args:
            model: The module, or this adapter.
        """
        from flax import nnx as flax_nnx

        other = copy.copy(self)
        other._params, other._state = _with_shapes(self._params), _with_shapes(self._state)
        if model is self:
            return other, other
        graphdef, state = flax_nnx.split(model)
        return other, flax_nnx.merge(graphdef, jax.tree.map(shape_of, state))

    def apply(self, params: PyTree, model_state: PyTree, xs: PyTree, *, train: bool, key: Any) -> tuple[PyTree, PyTree]:
        """Return `(outputs, new_model_state)`. The state does not change if `train` is False."""
        from flax import nnx as flax_nnx

        module = self._merge(self._training if train else self._applied, params, model_state, key, watch=not train)
        keywords: dict[str, Any] = {**self._flag.keywords(train)} if self._flag else {}
        if self._takes_rngs and key is not None:
            keywords["rngs"] = flax_nnx.Rngs(_stream_key(key, "call"))
        if self._modes is not None:
            self._modes.clear()
        numbers = numbers_in(module)
        outputs = module(xs, **keywords)
        if train:
            warn_of_changed(self._name, module, numbers)
            if self._modes is not None:
                self._modes.warn(self._kind)
        else:
            self._uses.warn(module)
        if not (train and self._state):
            return outputs, model_state
        after = dict(flax_nnx.to_flat_state(flax_nnx.state(module)))
        return outputs, as_dict({path: after[path] for path in self._state})

    def bind(self, params: PyTree, model_state: PyTree, *, train: bool, key: Any) -> BoundModel:
        """Return a new module with these arrays, in training or evaluation mode, for a loss function to call."""
        from flax import nnx as flax_nnx

        module = self._merge(self._training if train else self._in_loss, params, model_state, key, watch=not train)
        if self._flag is not None:
            add_flag(module, *next(iter(self._flag.keywords(train).items())))
        if self._modes is not None:
            self._modes.clear()
        numbers = numbers_in(module)

        def new_state(_: Any) -> PyTree:
            if train:
                warn_of_changed(self._name, module, numbers)
            else:
                self._uses.warn(module)
            # Without options, only the loss function itself can have changed the mode, with `model.eval()`.
            if train and self._modes is not None and mode_options(self._kind.__call__):
                self._modes.warn(self._kind)
            after = dict(flax_nnx.to_flat_state(flax_nnx.state(module)))
            # A variable that the loss function removed with `nnx.pop` keeps its value.
            return as_dict({p: after.get(p, filled(leaf, leaf_at(model_state, p))) for p, leaf in self._state.items()})

        return BoundModel(module, new_state)

    def rebuild(self, params: PyTree, model_state: PyTree) -> Any:
        """Return a new module with these arrays, in evaluation mode, with the original random streams."""
        return self._merge(self._rebuilt, params, model_state, None)

    def _merge(self, graphdef: Any, params: PyTree, model_state: PyTree, key: Any, *, watch: bool = False) -> Any:
        from flax import nnx as flax_nnx

        # Every call creates new variables, because NNX does not allow mutation of variables from outside the trace.
        leaves = {path: filled(leaf, leaf_at(params, path)) for path, leaf in self._params.items()}
        leaves |= {path: filled(leaf, leaf_at(model_state, path)) for path, leaf in self._state.items()}
        if watch:
            self._uses.watch(leaves)
        leaves |= {path: _seeded(path, leaf, key) for path, leaf in self._random.items()}
        return flax_nnx.merge(graphdef, flax_nnx.from_flat_state(leaves))

    def __repr__(self) -> str:
        """Return a short form of the call that created the adapter."""
        return f"nnx({self._name})"


def _clone(module: Any, *, train: bool) -> Any:
    from flax import nnx as flax_nnx

    clone = flax_nnx.clone(module)
    if train:
        clone.train()
    else:
        clone.eval()
    return clone


def _seeded(path: _Path, variable: Any, key: Any) -> Any:
    """Return one variable of a random stream: seeded from `key` and its path, or the module's own."""
    from flax import nnx as flax_nnx

    if key is None:
        return variable.copy()
    if isinstance(variable, flax_nnx.RngCount):
        return variable.copy(jnp.zeros_like(variable.get_raw_value()))
    if not isinstance(variable, flax_nnx.RngKey):
        return variable.copy()
    seed = _stream_key(key, "/".join(map(str, path)))
    shape = variable.get_raw_value().shape  # a stream that was created under nnx.vmap holds one key per layer
    return variable.copy(jax.random.split(seed, shape) if shape else seed)


def _stream_key(key: Any, name: str) -> Any:
    # Derived from the name instead of an index, so that adding a layer does not change the streams of other layers.
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def _with_shapes(leaves: Mapping[_Path, Any]) -> dict[_Path, Any]:
    from flax import nnx as flax_nnx

    def value(leaf: Any) -> Any:
        return leaf.get_raw_value() if isinstance(leaf, flax_nnx.Variable) else leaf

    return {path: filled(leaf, jax.tree.map(shape_of, value(leaf))) for path, leaf in leaves.items()}


def filled(leaf: Any, value: PyTree) -> Any:
    """Return a copy of a variable with another value, or the value if the leaf is not a variable."""
    from flax import nnx as flax_nnx

    return leaf.copy(value) if isinstance(leaf, flax_nnx.Variable) else value


def as_dict(leaves: Mapping[_Path, Any]) -> dict[Any, Any]:
    """Return the raw values of variables as nested dicts."""
    from flax import nnx as flax_nnx

    return flax_nnx.to_pure_dict(flax_nnx.from_flat_state(leaves), _raw)


def _raw(leaf: Any) -> Any:
    """Return the raw value of a variable, because hooks (`on_get_value`) are meant for the module's own reads."""
    from flax import nnx as flax_nnx

    return leaf.get_raw_value() if isinstance(leaf, flax_nnx.Variable) else leaf


def leaf_at(tree: Any, path: _Path) -> Any:
    """Return the value at a path of nested dicts."""
    for key in path:
        # Layers in lists have int keys, which JSON checkpoints and Orbax restore as strings.
        tree = tree[key] if key in tree else tree[str(key)]
    return tree
