"""Detection of arguments that were passed in another order than a Learner takes them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from fluxcb._errors import DeclarationError

__all__ = ["is_optimizer", "refuse_swapped"]


def is_optimizer(value: Any) -> bool:
    """Return whether a value has the two functions of an optax optimizer."""
    # By its functions and not by its class, so that users can write their own transformations.
    return all(callable(getattr(value, name, None)) for name in ("init", "update"))


def refuse_swapped(call: str, **arguments: Any) -> None:
    """Check that the first three arguments of a Learner are in order.

    Args:
        call: The call for the message: `Learner`.
        **arguments: The arguments by name: the model or the parameters, `loss_fn`, and `optimizer`.

    Raises:
        DeclarationError: Arguments have exchanged their places.
    """
    first = next(iter(arguments))
    kinds = {name: _kind(value, first) for name, value in arguments.items()}
    moved = {name: kind for name, kind in kinds.items() if kind is not None and kind != name}
    # Only an exchange. Other wrong values are explained by the checks of each argument.
    if not moved or set(moved) != set(moved.values()):
        return
    names = [f"`{name}`" for name in moved]
    found = [f"`{name}` is {_described(arguments[name], kind)}" for name, kind in moved.items()]
    raise DeclarationError(
        f"{', '.join(names[:-1])} and {names[-1]} of `{call}` are swapped: {', '.join(found[:-1])} and {found[-1]}.",
        why=f"it takes {', '.join(arguments)}, in this order",
        fix=f"write `{call}({', '.join(arguments)})`",
    )


def _kind(value: Any, first: str) -> str | None:
    """Return the name of the argument that a value is meant for, or None if it could be several."""
    if is_optimizer(value) or (isinstance(value, Mapping) and value and all(map(is_optimizer, value.values()))):
        return "optimizer"
    if inspect.isroutine(value) or hasattr(value, "__wrapped__"):  # `jax.jit(loss)` is not a function
        return "loss_fn"
    # Models are often callable, as loss functions are, so that only other values are certainly no loss function.
    is_module = any(base.__name__ == "Module" for base in type(value).__mro__)
    # A single array can be the parameters.
    return first if is_module or isinstance(value, tuple | list | Mapping) or hasattr(value, "__array__") else None


def _described(value: Any, kind: str) -> str:
    if kind == "optimizer":
        return "an optimizer"
    if kind == "loss_fn":
        return f"the function `{getattr(value, '__name__', type(value).__name__)}`"
    return f"of type `{type(value).__name__}`"
