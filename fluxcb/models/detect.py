"""Find the adapter for whatever the user calls a model, importing no model library."""

import inspect
from typing import Any, cast

from fluxcb._errors import DeclarationError
from fluxcb._typing import ModelAdapter
from fluxcb.models.equinox import equinox
from fluxcb.models.linen import linen
from fluxcb.models.nnx import nnx
from fluxcb.models.pair import PairModel, pair

__all__ = ["adapt"]

_MODULES = {"flax.nnx": nnx, "flax.linen": linen, "equinox": equinox}


def adapt(model: Any) -> ModelAdapter:
    """Return the adapter for a model, chosen by what the model is.

    Args:
        model: A Flax NNX or Linen module, an Equinox module (or `(module, state)` from `eqx.nn.make_with_state`), a
            pair `(init(key, xs), apply(params, xs))`, a model that `learner.model` returned, or an object with `init`,
            `apply` and `rebuild`, which is already an adapter and is returned unchanged.

    Returns:
        The adapter, with its options at their defaults; call `fluxcb.models.linen(...)` and its siblings for others.

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
    # Asked last: Linen modules have `init` and `apply` too, and mean something else by them.
    if _is_adapter(model):
        return cast(ModelAdapter, model)
    raise DeclarationError(
        f"`model` is {_described(model)}, which fluxcb cannot train.",
        why="the step needs something it can initialise and apply to a batch of inputs",
        fix=[
            "pass a Flax NNX or Linen module, or an Equinox module",
            "pass `(module, state)` as `eqx.nn.make_with_state(make_module)(...)` returns it",
            "pass two functions, `(init(key, xs) -> params, apply(params, xs) -> outputs)`",
            "pass an object with the methods `init`, `apply` and `rebuild` of `fluxcb.models.ModelAdapter`",
            "use `Learner.from_loss(params, loss_fn, ...)` if you have params and a loss function",
        ],
    )


def _library(model: Any) -> str | None:
    """Return the library whose `Module` class `model` descends from; flax.nnx also has Rngs, Optimizer, ..."""
    for base in type(model).__mro__:
        if base.__name__ == "Module":
            for library in _MODULES:
                if base.__module__ == library or base.__module__.startswith(f"{library}."):
                    return library
    return None


def _is_equinox_state(value: Any) -> bool:
    return type(value).__name__ == "State" and type(value).__module__.startswith("equinox.")


def _is_pair(model: tuple[Any, Any]) -> bool:
    # A named pair must say so: optax's GradientTransformation(init, update) is a tuple of two functions as well.
    fields = getattr(model, "_fields", ("init", "apply"))
    return fields == ("init", "apply") and all(callable(entry) and _library(entry) is None for entry in model)


def _is_adapter(model: Any) -> bool:
    # Statically: an nnx.Rngs makes a stream of any name it is asked for.
    return all(callable(inspect.getattr_static(model, name, None)) for name in ("init", "apply", "rebuild"))


def _described(model: Any) -> str:
    if type(model) is tuple:
        return f"a tuple ({', '.join(type(entry).__name__ for entry in model)})"
    return f"of type `{type(model).__name__}`"
