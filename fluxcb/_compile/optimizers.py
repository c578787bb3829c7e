"""Finding the factory that created an optax optimizer, so that messages can show how to inject hyperparameters.

An optimizer is a pair of functions and does not store the name of its factory. fluxcb recognizes the optimizers that
optax's own factories return by the functions that they consist of.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import optax

from fluxcb._errors import nearest

__all__ = ["Origin", "injected_schedule", "nearest_hyperparameter", "origin_of", "schedule_of_updates"]

# Names of hyperparameters in other libraries and in papers.
_ALIASES = {
    "lr": "learning_rate",
    "rate": "learning_rate",
    "step_size": "learning_rate",
    "alpha": "learning_rate",
    "beta1": "b1",
    "beta_1": "b1",
    "beta2": "b2",
    "beta_2": "b2",
    "epsilon": "eps",
    "wd": "weight_decay",
}


def nearest_hyperparameter(name: str, known: Iterable[str]) -> str:
    """Return the hyperparameter that has this name in other libraries, or the nearest one, or an empty string."""
    known = list(known)
    alias = next((k for k in known if k == _ALIASES.get(name.lower()) or _ALIASES.get(k) == name), "")
    # Optimizers with several groups of parameters qualify names by their group.
    grouped = next((k for k in known if k.endswith(f".{name}")), "")
    return alias or grouped or nearest(name, known)


@dataclass(frozen=True)
class Origin:
    """The factory that created an optimizer, or the part of the optimizer that has hyperparameters.

    Attributes:
        factory: The factory, e.g. `optax.adam`, or None if it is not known.
        inside: Whether the factory created only a part of the optimizer, e.g. of an `optax.chain`.
        injected: Names of the hyperparameters that the optimizer already has.
    """

    factory: Callable[..., Any] | None
    inside: bool
    injected: tuple[str, ...]

    @property
    def arguments(self) -> dict[str, Any]:
        """The factory's arguments that can be hyperparameters, with their defaults."""
        if self.factory is None:
            return {}
        parameters = inspect.signature(self.factory).parameters.values()
        return {p.name: p.default for p in parameters if _may_be_number(p)}

    def suggested_name(self, name: str) -> str:
        """Return the hyperparameter with this name, or the nearest one, or an empty string."""
        known = dict.fromkeys([*self.injected, *self.arguments])
        if name in known or not known:
            return name if name in known else _ALIASES.get(name, name)
        return nearest_hyperparameter(name, known)

    def injecting(self, name: str) -> str:
        """Return a suggestion for adding a hyperparameter to the optimizer."""
        line = self.call(name)
        if self.factory is None:
            return f"build the optimizer with `{line}`, where `factory` makes it, e.g. `optax.adam`"
        if self.injected:
            return f"inject it as well: `{line}`"
        where = "inside the optimizer, " if self.inside else ""
        return f"{where}write `{line}` instead of `{_name(self.factory)}(...)`"

    def call(self, name: str) -> str:
        """Return a call of `fluxcb.inject` that creates the optimizer, or its part, with a hyperparameter."""
        called = _name(self.factory) if self.factory is not None else "factory"
        names = dict.fromkeys([*(self.injected or self._required()), name])
        return f"fluxcb.inject({called}, {', '.join(f'{n}={self._example(n)}' for n in names)})"

    def _required(self) -> list[str]:
        return [name for name, default in self.arguments.items() if default is inspect.Parameter.empty]

    def _example(self, name: str) -> Any:
        default = self.arguments.get(name)
        if isinstance(default, int | float) and not isinstance(default, bool):
            return default
        return 0.9 if "momentum" in name or "decay" in name else "1e-3"


def origin_of(optimizer: Any, injected: tuple[str, ...]) -> Origin:
    """Return the factory that created an optimizer, as far as it is known.

    Args:
        optimizer: The optimizer.
        injected: Names of the hyperparameters that the optimizer has.
    """
    update = getattr(optimizer, "update", None)
    parts = list(_parts(update, "inner_factory" if injected else None))
    # With several candidates, a suggestion could name the wrong part of the optimizer.
    factory, depth = parts[0] if len(parts) == 1 else (None, 0)
    return Origin(factory, depth > 0, injected)


def schedule_of_updates(optimizer: Any) -> Callable[[Any], Any] | None:
    """Return the schedule that multiplies the whole update of an optimizer, such as that of `optax.adam(schedule)`.

    Args:
        optimizer: The optimizer.

    Returns:
        The schedule of the last transformation in an `optax.chain`, after which nothing changes the update; None if
        the last transformation has no schedule, or is not known.
    """
    function: Any = getattr(optimizer, "update", None)
    while inspect.isfunction(function) and function.__module__.startswith("optax."):
        cells = _cells(function)
        match function.__qualname__.partition(".")[0]:
            case "scale_by_schedule":
                return cells.get("step_size_fn")
            case "chain":
                function = (cells.get("update_fns") or (None,))[-1]
            case "with_extra_args_support":
                function = getattr(cells.get("tx"), "update", None)
            case _:
                return None
    return None


def injected_schedule(optimizer: Any) -> Callable[[Any], Any] | None:
    """Return the schedule of `fluxcb.inject(optax.adam, learning_rate=schedule)`, otherwise None."""
    schedules = _cells(getattr(optimizer, "update", None)).get("sched_hps", {})
    return getattr(schedules.get("learning_rate"), "schedule_fn", None)


def _may_be_number(parameter: inspect.Parameter) -> bool:
    default = parameter.default
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return False
    if default is None:  # `momentum: float | None = None`, but not `mu_dtype: Any | None = None`
        return "float" in str(parameter.annotation)
    return default is parameter.empty or (isinstance(default, int | float) and not isinstance(default, bool))


def _name(factory: Callable[..., Any]) -> str:
    name = getattr(factory, "__name__", "")
    if getattr(optax, name, None) is factory:
        return f"optax.{name}"
    return name if name.isidentifier() else "factory"


def _cells(function: Any) -> dict[str, Any]:
    """Return the values that a function has captured, by name."""
    # Optax transformations are closures. Their cells are the only link from an optimizer to the functions it is made
    # of.
    code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    return (
        {name: cell.cell_contents for name, cell in zip(code.co_freevars, closure or (), strict=True)} if code else {}
    )


def _captured(function: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the functions and flags that a function has captured, also in tuples, each with its name."""
    for name, value in _cells(function).items():
        if name != "learning_rate":  # the user's number or schedule
            for member in _members(value):
                if isinstance(member, bool) or hasattr(member, "__code__"):
                    yield name, member


def _members(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):  # a GradientTransformation is a tuple
        for member in value:
            yield from _members(member)
    else:
        yield value


def _parts(function: Any, cell: str | None, depth: int = 0) -> Iterator[tuple[Callable[..., Any], int]]:
    """Iterate over the factories that created the parts of an optimizer, each with the nesting depth of the part.

    Args:
        function: The `update` of the optimizer.
        cell: The name by which `optax.inject_hyperparams` has captured a factory, or None for optax's own factories.
        depth: The nesting depth of the function inside the optimizer.
    """
    factory = _cells(function).get(cell) if cell is not None else _factory_of(function)
    if factory is not None:
        yield factory, depth
        return
    for _, inner in _captured(function):
        yield from _parts(inner, cell, depth + 1)


def _fingerprint(function: Any, flags: bool) -> Any:
    """Return a fingerprint that identifies the factory of a function.

    Args:
        function: A function, or a flag that a function has captured.
        flags: Whether flags such as `nesterov` are part of the fingerprint.
    """
    if not hasattr(function, "__code__"):
        return function if flags else None
    # The code of the closures is the same for all optimizers of a factory. Numbers such as `b1` are not part of the
    # fingerprint, because users change them.
    captured = tuple((name, _fingerprint(inner, flags)) for name, inner in _captured(function))
    return function.__module__, function.__qualname__, captured


def _factory_of(update: Any) -> Callable[..., Any] | None:
    """Return the optax factory that returned an optimizer, with the same flags if possible, otherwise with others."""
    # With flags first: `optax.nadam` and `optax.adam` differ only in `nesterov`.
    for flags in (True, False):
        factory = _factories(flags).get(_fingerprint(update, flags))
        if factory is not None:
            return factory
    return None


@functools.cache
def _factories(flags: bool) -> dict[Any, Callable[..., Any]]:
    """Return the optax factories that take a learning rate, by the fingerprints of the optimizers that they return."""
    known: dict[Any, Callable[..., Any]] = {}
    for name in dir(optax):
        factory = getattr(optax, name)
        if name.startswith("_") or not inspect.isfunction(factory):
            continue
        parameters = inspect.signature(factory).parameters
        if "learning_rate" not in parameters:
            continue
        # A schedule and momentum add transformations to the chain, so each variant has its own fingerprint.
        variants: list[dict[str, Any]] = [{"learning_rate": 0.1}, {"learning_rate": lambda count: 0.1}]
        if "momentum" in parameters:
            variants += [{**variant, "momentum": 0.9} for variant in variants]
        for variant in variants:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    optimizer = factory(**variant)
            except (TypeError, ValueError):  # it needs more arguments, or takes no schedule
                continue
            # Some names in `optax` are aliases, and the first name is kept.
            known.setdefault(_fingerprint(optimizer.update, flags), factory)
    return known
