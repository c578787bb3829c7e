"""Flax Linen modules."""

import contextlib
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fluxcb._calls import entry_point
from fluxcb._errors import DeclarationError, TraceError
from fluxcb._typing import BoundModel, PyTree
from fluxcb.models._keywords import TrainFlag, train_flag
from fluxcb.models._linen_inactive import noticing_inactive_layers
from fluxcb.models._linen_streams import DROPOUT, naming_streams

try:
    from jax.extend.core import get_opaque_trace_state
except ImportError:  # JAX before 0.10
    from jax.core import get_opaque_trace_state

__all__ = ["BoundLinen", "LinenAdapter", "linen"]

_STREAMS = (DROPOUT,)


@entry_point
def linen(module: Any, train_argument: str | None = None, *, rng_streams: Sequence[str] = _STREAMS) -> "LinenAdapter":
    """Adapt a Flax Linen module to the training step.

    The `params` collection becomes `params`. All other collections that `module.init` creates (`batch_stats`, ...)
    become `model_state`, which is mutable only during training. Collections that are created only by a call, such as
    those of `sow`, are dropped.

    A loss function `loss_fn(model, batch)` receives a `BoundLinen`. It is called like the module and has the methods of
    the module. `model.variables` has the collections that the last call created or changed. The module is initialized
    with the arguments of the calls in the loss function.

    `learner.model` is bound to the trained variables. Linen modules do not store a mode, so pass the train flag of your
    module as in any call: `learner.model(xs, train=False)`. If you pass a bound module to a Learner, training starts
    with its variables.

    Args:
        module: The module. A bound module provides the initial values of its variables.
        train_argument: The keyword argument of the module's call that selects training mode. With None, the adapter
            looks for `train`, `training`, `is_training`, `is_train` or `deterministic` among the parameters of the
            call, and passes nothing if there is none. `deterministic` is True during evaluation, the others are True
            during training.
        rng_streams: Names of all random streams that the module uses in a call. The first stream gets the key of the
            step itself. The stream with the index `i` gets `jax.random.fold_in(key, i)`. Evaluation passes all streams
            except `dropout`, so a module that draws from `dropout` in evaluation raises an error.

    Returns:
        The adapter.

    Raises:
        DeclarationError: The module cannot be called, its call does not take `train_argument`, or several keywords are
            possible.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp
        >>> model = linen(nn.Dense(3))
        >>> params, model_state = model.init(jax.random.key(0), jnp.ones((2, 5)))
        >>> jax.tree.map(jnp.shape, params)
        {'bias': (3,), 'kernel': (5, 3)}
    """
    if isinstance(rng_streams, str):
        raise DeclarationError(
            f"`rng_streams` is the string {rng_streams!r}; it must be a sequence of names.",
            where="fluxcb.models.linen(module, rng_streams=...)",
            fix=f"pass `rng_streams=({rng_streams!r},)`",
        )
    return LinenAdapter(module, train_argument, tuple(rng_streams))


class LinenAdapter:
    """Runs a Linen module as a model. `linen` returns it.

    Attributes:
        held: The `(params, model_state)` that the module is bound to, or None.
    """

    def __init__(self, module: Any, train_argument: str | None, rng_streams: tuple[str, ...]) -> None:
        """Store the module and its options."""
        self._module = module
        self._streams = rng_streams
        self.held: tuple[PyTree, PyTree] | None = None
        if module.scope is not None:
            self._module, variables = module.unbind()
            self.held = _parts(variables)
        kind = type(module)
        where = f"{kind.__module__}.{kind.__qualname__}"
        if not callable(module):
            raise DeclarationError(
                f"The Linen module `{kind.__qualname__}` has no `__call__`.",
                where=where,
                why="the step calls the model as `module.apply(variables, xs)`",
                fix="give it a `__call__` that takes a batch of inputs",
            )
        streams = "" if rng_streams == _STREAMS else f", rng_streams={rng_streams!r}"
        self._flag = train_flag(
            module.__call__, train_argument, adapter="linen", where=f"{where}.__call__", arguments=streams
        )

    def init(self, key: Any, xs: PyTree) -> tuple[PyTree, PyTree]:
        """Return the `(params, model_state)` that the module is bound to, or those of `module.init(key, xs)`."""
        if self.held is not None:
            return self.held
        # Initialize the training path, because layers that are only used in training (auxiliary heads) need params too.
        return self._initialized(self._init_rngs(key), [_Call(None, (xs,), self._keywords(True), {})])

    def init_by(self, key: Any, call: Callable[[BoundModel, PyTree], Any], batch: PyTree) -> tuple[PyTree, PyTree]:
        """Return the `(params, model_state)` that the calls in a function require.

        Args:
            key: A random key.
            call: `call(bound, batch)` calls the model of a `BoundModel`, as a loss function does.
            batch: The argument of `call`.
        """
        if self.held is not None:
            return self.held
        model = _Recorder(self._module, self._init_rngs(key), self._flag)

        def run(batch: PyTree) -> None:
            call(BoundModel(model, lambda _: {}), batch)

        # Repeat the calls outside of the loss function, which may call the model within a transformation.
        jax.eval_shape(run, batch)
        return jax.jit(lambda key: self._initialized(self._init_rngs(key), model.calls))(key)

    def _initialized(self, rngs: dict[str, Any], calls: "Sequence[_Call]") -> tuple[PyTree, PyTree]:
        """Return the `(params, model_state)` that calls create, without collections that only `sow` writes."""
        variables: dict[str, Any] = {}
        stateful = {"params"}
        for call in calls:
            init = functools.partial(call.init, self._module, rngs)
            _, made = init(True)
            stateful.update(name for name in made if name not in stateful and _is_state(name, init))
            variables = _merged(variables, made)
        return _parts({name: value for name, value in variables.items() if name in stateful})

    def apply(self, params: PyTree, model_state: PyTree, xs: PyTree, *, train: bool, key: Any) -> tuple[PyTree, PyTree]:
        """Return `(outputs, new_model_state)` of `module.apply`. `model_state` is mutable during training only."""
        from flax import core

        variables = {"params": params, **model_state}
        mutable = list(model_state) if train else []
        keywords = {"rngs": self._rngs(key, train), **self._keywords(train)}
        apply = functools.partial(self._module.apply, variables, xs, mutable=mutable or False, **keywords)
        unset = train and self._flag is None
        noticing = noticing_inactive_layers(self._module, apply) if unset else contextlib.nullcontext()
        with naming_streams(self._module, self._streams, self._flag, train), noticing:
            if not mutable:
                return apply(), model_state
            outputs, updated = apply()
        return outputs, {**model_state, **core.unfreeze(updated)}

    def bind(self, params: PyTree, model_state: PyTree, *, train: bool, key: Any) -> BoundModel:
        """Return a callable with these arrays for a loss function."""
        rngs = self._rngs(key, train)
        model = BoundLinen(self._module, params, model_state, rngs, self._flag, train, self._streams)
        return BoundModel(model, lambda _: model.model_state)

    def rebuild(self, params: PyTree, model_state: PyTree) -> Any:
        """Return the module bound to these arrays. It can be called as `model(xs)`, and has its methods."""
        return self._module.bind({"params": params, **model_state})

    def _keywords(self, train: bool) -> dict[str, bool]:
        return self._flag.keywords(train) if self._flag else {}

    def _init_rngs(self, key: Any) -> dict[str, Any]:
        rngs = {"params": key}
        for number, stream in enumerate(self._streams, 1):
            rngs.setdefault(stream, jax.random.fold_in(key, number))
        return rngs

    def _rngs(self, key: Any, train: bool) -> dict[str, Any]:
        if key is None:
            return {}
        rngs = {
            stream: jax.random.fold_in(key, number) if number else key for number, stream in enumerate(self._streams)
        }
        # Without this stream, dropout that is on in evaluation raises an error instead of giving wrong metrics. Modules
        # that sample on purpose use other streams.
        return rngs if train else {stream: key for stream, key in rngs.items() if stream != DROPOUT}

    def __repr__(self) -> str:
        """Return a short form of the call that created the adapter."""
        return f"linen({type(self._module).__qualname__})"


class _Callable(ABC):
    """Base class of the modules that loss functions receive. It provides the module's methods and the train flag."""

    def __init__(self, module: Any, flag: TrainFlag | None, train: bool) -> None:
        self._module = module
        self._flag = flag
        self._train = train

    def __getattr__(self, name: str) -> Any:
        """Return a method of the module, which runs with these arrays, or another attribute of the module."""
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(type(self._module), name, None)
        if callable(found):
            return functools.partial(self.__call__, method=name)
        return getattr(self._module, name)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        """Call the module."""

    def _keywords(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of a call, and add the train flag if it is missing."""
        if self._flag is None or method is not None:
            return kwargs
        try:
            passed = inspect.signature(self._module.__call__).bind_partial(*args, **kwargs).arguments
        except TypeError:  # the call itself will raise a better error
            return kwargs
        return kwargs if self._flag.name in passed else {**self._flag.keywords(self._train), **kwargs}


class BoundLinen(_Callable):
    """A Linen module with its variables, in the form that a loss function receives.

    `model(xs, ...)` takes the arguments of the module's own call, and returns its result. The train flag may be
    omitted. `model(xs, method="encode")` and `model.encode(xs)` call another method.

    Attributes:
        params: The parameters.
        model_state: The other collections, including the changes by calls during training.
        variables: All collections, including those that the last call created, such as those of `sow`.
    """

    def __init__(
        self,
        module: Any,
        params: PyTree,
        model_state: PyTree,
        rngs: dict[str, Any],
        flag: TrainFlag | None,
        train: bool,
        streams: tuple[str, ...],
    ) -> None:
        """Store the module and its arrays."""
        super().__init__(module, flag, train)
        self.params = params
        self.model_state = model_state
        self.variables: dict[str, Any] = {"params": params, **model_state}
        self._rngs = rngs
        self._streams = streams
        self._calls = 0
        self._level = get_opaque_trace_state()

    def __call__(self, *args: Any, method: Any = None, rngs: Mapping[str, Any] | None = None, **kwargs: Any) -> PyTree:
        """Call the module, or one of its other methods.

        Args:
            *args: The arguments of the call.
            method: Name of the method, or a function of the module. The default is `__call__`.
            rngs: Random keys by stream name, which replace the keys that fluxcb passes.
            **kwargs: The keywords of the call.

        Raises:
            TraceError: The call changes the model's state inside a JAX transformation.
        """
        from flax import core

        number, self._calls = self._calls, self._calls + 1
        own = {name: jax.random.fold_in(key, number) if number else key for name, key in self._rngs.items()}
        apply = functools.partial(
            self._module.apply,
            {"params": self.params, **self.model_state},
            *args,
            rngs={**own, **(rngs or {})},
            mutable=core.DenyList(("params",) if self._train else ("params", *self.model_state)),
            method=method,
            **self._keywords(method, args, kwargs),
        )
        # With keywords, the loss function may choose the mode itself.
        unset = self._train and self._flag is None and method is None and not kwargs
        noticing = noticing_inactive_layers(self._module, apply) if unset else contextlib.nullcontext()
        with naming_streams(self._module, self._streams, self._flag, self._train, in_loss=True), noticing:
            outputs, changed = apply()
        changed = core.unfreeze(changed)
        state = {name: changed.get(name, value) for name, value in self.model_state.items()}
        if get_opaque_trace_state() != self._level:
            self._refuse_change(state)
            return outputs
        self.model_state = state
        self.variables = {"params": self.params, **state, **changed}
        return outputs

    def _refuse_change(self, state: PyTree) -> None:
        """Raise an error for new state from within a transformation, because it is a tracer that cannot be kept."""
        old, new = jax.tree.leaves(self.model_state), jax.tree.leaves(state)
        if len(old) == len(new) and all(a is b for a, b in zip(old, new, strict=True)):
            return
        raise TraceError(
            "The model changes its state inside a JAX transformation (grad, vmap, scan, ...) in the loss function.",
            where=f"{type(self._module).__qualname__}, {', '.join(self.model_state)}",
            why="the new state would leak out of the transformation as a tracer",
            fix=[
                "call the model outside of the transformation",
                "call it in evaluation mode there, for example with `train=False`",
            ],
        )


class _Call(NamedTuple):
    """A call of a module; arrays may be specs."""

    method: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rngs: dict[str, Any]

    @property
    def specs(self) -> "_Call":
        """Return the same call with specs in place of arrays."""

        def spec(leaf: Any) -> Any:
            is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array else leaf

        return _Call(self.method, *jax.tree.map(spec, self[1:]))

    def init(self, module: Any, rngs: dict[str, Any], mutable: Any) -> tuple[PyTree, dict[str, Any]]:
        """Return the outputs and the variables that this call creates, with zeros in place of specs."""
        from flax import core

        args, kwargs, own = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, self[1:]
        )
        outputs, made = module.init_with_output({**own, **rngs}, *args, method=self.method, mutable=mutable, **kwargs)
        return outputs, core.unfreeze(made)


class _Recorder(_Callable):
    """A Linen module without variables, which records its calls.

    Attributes:
        calls: The calls, with specs in place of arrays.
    """

    def __init__(self, module: Any, rngs: dict[str, Any], flag: TrainFlag | None) -> None:
        super().__init__(module, flag, train=True)
        self.calls: list[_Call] = []
        self._rngs = rngs
        self._specs: dict[str, Any] = {}

    @property
    def variables(self) -> dict[str, Any]:
        """Zeros in place of the variables that the recorded calls create."""
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._specs)

    @property
    def params(self) -> PyTree:
        """The parameters among the variables."""
        return self.variables.get("params", {})

    @property
    def model_state(self) -> PyTree:
        """The other collections."""
        return {name: value for name, value in self.variables.items() if name != "params"}

    def __call__(self, *args: Any, method: Any = None, rngs: Mapping[str, Any] | None = None, **kwargs: Any) -> PyTree:
        call = _Call(method, args, self._keywords(method, args, kwargs), dict(rngs or {}))
        outputs, made = call.init(self._module, self._rngs, True)
        self.calls.append(call.specs)
        self._specs = _merged(self._specs, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), made))
        return outputs


def _is_state(name: str, init: Callable[[Any], Any]) -> bool:
    """Return whether a collection has variables, rather than only values that `sow` writes.

    If a collection is immutable, `sow` writes nothing, and the initialization of a variable raises an error.
    """
    from flax import core, errors

    if name in ("batch_stats", "intermediates"):  # known from `BatchNorm` and `sow`, so skip tracing the model again
        return name == "batch_stats"
    try:
        made = jax.eval_shape(lambda: init(core.DenyList(name))[1])
    except errors.FlaxError:
        return True
    return name in made


def _merged(first: Any, second: Any) -> Any:
    """Return nested dicts with the entries of both. Entries of `first` take precedence."""
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return first
    shared = {name: _merged(first[name], value) for name, value in second.items() if name in first}
    return {**second, **first, **shared}


def _parts(variables: Any) -> tuple[PyTree, PyTree]:
    from flax import core

    collections = dict(core.unfreeze(variables))
    return collections.pop("params", {}), collections
