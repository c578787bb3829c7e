"""Select the adapter for a model without importing a model library."""

import inspect
from collections.abc import Mapping
from typing import Any, cast

from fluxcb._calls import entry_point
from fluxcb._errors import DeclarationError
from fluxcb._typing import ModelAdapter
from fluxcb.models.equinox import equinox
from fluxcb.models.linen import linen
from fluxcb.models.nnx import nnx
from fluxcb.models.pair import PairModel, pair

__all__ = ["adapt"]

_MODULES = {"flax.nnx": nnx, "flax.linen": linen, "equinox": equinox}


@entry_point
def adapt(model: Any) -> ModelAdapter:
    """Return the adapter for a model, selected by its type.

    Args:
        model: A Flax NNX or Linen module, an Equinox module (or `(module, state)` from `eqx.nn.make_with_state`), a
            pair `(init(key, xs), apply(params, xs))`, a model that `learner.model` returned, or an adapter (an object
            with `init`, `apply` and `rebuild`), which is returned unchanged.

    Returns:
        The adapter with default options. To set options, call `fluxcb.models.linen(...)` or one of the other functions.

    Raises:
        DeclarationError: `model` is none of these.

    Example:
        >>> import equinox as eqx, jax
        >>> adapt(eqx.nn.Linear(5, 3, key=jax.random.key(0)))
        equinox(Linear)
    """
    if isinstance(model, type):
        raise DeclarationError(
            f"`model` is the class `{model.__qualname__}`, not an instance of it.",
            where=f"{model.__module__}.{model.__qualname__}",
            fix=f"pass `{model.__qualname__}(...)`",
        )
    library = _library(model)
    if library is not None:
        return _MODULES[library](model)
    if isinstance(model, tuple) and len(model) == 2:
        first, second = model
        if _library(first) == "equinox" and _is_equinox_state(second):
            return equinox(model)
        if _is_pair(model):
            return pair(first, second)
    if isinstance(model, PairModel):
        return model.adapter.holding(model.params, model.model_state)
    # Tested last, because Linen modules also have `init` and `apply`, with a different meaning.
    if _is_adapter(model):
        return cast(ModelAdapter, model)
    parts = (model, model[::-1]) if type(model) is tuple and len(model) == 2 else ()
    known = [fix for one, other in parts if (fix := _known_params(one, other))]
    raise DeclarationError(
        f"`model` is {_described(model)}, which fluxcb cannot train.",
        why="the step needs a model that it can initialize and apply to a batch of inputs",
        fix=[
            *known,
            "pass a Flax NNX or Linen module, or an Equinox module",
            "pass `(module, state)` as `eqx.nn.make_with_state(make_module)(...)` returns it",
            "pass two functions, `(init(key, xs) -> params, apply(params, xs) -> outputs)`",
            "pass an object with the methods `init`, `apply` and `rebuild` of `fluxcb.models.ModelAdapter`",
            "use `Learner.from_loss(params, loss_fn, ...)` if you have params and a loss function",
        ],
    )


def _library(model: Any) -> str | None:
    """Return the library whose `Module` class is a base of the model's class. flax.nnx also has Rngs, Optimizer, ..."""
    for base in type(model).__mro__:
        if base.__name__ == "Module":
            for library in _MODULES:
                if base.__module__ == library or base.__module__.startswith(f"{library}."):
                    return library
    return None


def _is_equinox_state(value: Any) -> bool:
    return type(value).__name__ == "State" and type(value).__module__.startswith("equinox.")


def _is_pair(model: tuple[Any, Any]) -> bool:
    # Only plain tuples, because Optax's GradientTransformation(init, update) is also a tuple of two functions.
    fields = getattr(model, "_fields", ("init", "apply"))
    return fields == ("init", "apply") and all(callable(entry) and _library(entry) is None for entry in model)


def _known_params(function: Any, params: Any) -> str:
    """Return the fix for a model whose params are given instead of a function that creates them, or ""."""
    if not isinstance(params, Mapping):
        return ""
    if "flax.linen" in (_library(function), _library(getattr(function, "__self__", None))):
        return "pass `module.bind(variables)` for a Linen module and its variables"
    if not callable(function) or _library(function) is not None:
        return ""
    name = getattr(function, "__name__", "")
    return f"pass `(lambda key, xs: params, {name if name.isidentifier() else 'apply'})` for a function and its params"


def _is_adapter(model: Any) -> bool:
    # A static lookup, because an nnx.Rngs creates a stream for any attribute name.
    return all(callable(inspect.getattr_static(model, name, None)) for name in ("init", "apply", "rebuild"))


def _described(model: Any) -> str:
    if type(model) is tuple:
        return f"a tuple ({', '.join(type(entry).__name__ for entry in model)})"
    return f"of type `{type(model).__name__}`"
