"""Hyperparameters: making optax inject them, and finding them in the optimizer's state."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fluxcb._compile.optimizers import Origin, origin_of
from fluxcb._declare.access import Read, Write
from fluxcb._declare.declared import Declared
from fluxcb._errors import DeclarationError, MissingStateError, nearest
from fluxcb._typing import PyTree

__all__ = ["HyperparamIndex", "inject"]


def inject(factory: Callable[..., optax.GradientTransformation], /, **arguments: Any) -> optax.GradientTransformation:
    """Build an optimizer whose given numeric arguments are hyperparameters on the device.

    Only the arguments you pass are injected; defaults stay constants of the program, so that the
    numbers agree with the plain optimizer's. Values are float32 whatever the parameters' dtype.

    Args:
        factory: An optax factory, e.g. `optax.adam`.
        **arguments: Its arguments; numbers and schedules become `hyperparams.<name>`.

    Returns:
        The optimizer; `optax.inject_hyperparams` of the factory.

    Raises:
        DeclarationError: It is no factory, or has other arguments.

    Example:
        >>> import optax, fluxcb
        >>> optimizer = fluxcb.inject(optax.adam, learning_rate=1e-3)
        >>> float(optimizer.init({"w": 0.0}).hyperparams["learning_rate"]) == float(jax.numpy.float32(1e-3))
        True
    """
    if not callable(factory):
        raise DeclarationError(
            f"`inject` takes a factory of optimizers, not {type(factory).__name__}.",
            why="the optimizer is made anew from its arguments, which become arrays on the device",
            fix="write `fluxcb.inject(optax.adam, learning_rate=1e-3)`, not `fluxcb.inject(optax.adam(1e-3))`",
        )
    parameters = inspect.signature(factory).parameters
    for name, value in arguments.items():
        if isinstance(value, str):
            raise DeclarationError(
                f"`inject` takes numbers and schedules, and `{name}` is {value!r}.",
                fix=f"give e.g. `{name}=1e-3`, or keep it out: `functools.partial(factory, {name}={value!r})`",
            )
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in arguments:
        if name not in parameters and not takes_any:
            meant = Origin(factory, inside=False, injected=()).meant(name) or nearest(name, parameters)
            hint = f" Did you mean `{meant}`?" if meant else ""
            raise DeclarationError(
                f"`{getattr(factory, '__name__', factory)}` has no argument `{name}`.{hint}",
                fix=f"its arguments are {', '.join(parameters)}",
            )
    missing = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and name not in arguments
    ]
    if missing:
        raise DeclarationError(
            f"`{getattr(factory, '__name__', factory)}` needs `{missing[0]}`, which `inject` was not given.",
            fix=f"give it, e.g. `{missing[0]}=1e-3`",
        )
    static = tuple(name for name in parameters if name not in arguments)
    return optax.inject_hyperparams(factory, static_args=static, hyperparam_dtype=jnp.float32)(**arguments)


class HyperparamIndex:
    """Where each injected hyperparameter lies among the leaves of an optimizer state.

    Args:
        opt_state: The state (arrays or their specs).
        optimizer: The optimizer, for messages.
    """

    def __init__(self, opt_state: PyTree, optimizer: Any = None) -> None:
        self._optimizer = optimizer
        self._places: dict[str, list[int]] = {}
        self._scheduled: set[str] = set()
        for index, (path, _) in enumerate(jax.tree_util.tree_flatten_with_path(opt_state)[0]):
            for field, entry in itertools.pairwise(path):
                # optax calls the fields so; a parameter that happens to be named alike is a DictKey.
                if isinstance(field, jax.tree_util.GetAttrKey) and isinstance(entry, jax.tree_util.DictKey):
                    if field.name == "hyperparams":
                        self._places.setdefault(entry.key, []).append(index)
                    elif field.name == "hyperparams_states":
                        self._scheduled.add(entry.key)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all hyperparameters."""
        return tuple(self._places)

    def require(self, name: str, *, writing: bool, declared: Declared, where: str) -> None:
        """Check that a hyperparameter exists once and, to be written, has no schedule inside optax.

        Args:
            name: Its name.
            writing: Whether it is written.
            declared: The callback that needs it.
            where: Where it needs it.

        Raises:
            MissingStateError: It does not exist, stands in several places, or has its own schedule.
        """
        places, who = self._places.get(name, []), declared.label
        if not places:
            raise self._missing(name, writing=writing, declared=declared, where=where)
        if len(places) > 1:
            raise MissingStateError(
                f"{who} needs `hyperparams.{name}`, which this optimizer has {len(places)} times.",
                where=where,
                why="the parts of a chained or partitioned optimizer share names, so a name does not say which",
                fix="inject it in one part only, or write `opt_state` in a callback of your own",
            )
        if writing and name in self._scheduled:
            raise MissingStateError(
                f"{who} writes `hyperparams.{name}`, which an optax schedule inside the optimizer sets at each update.",
                where=where,
                why="what is written would be replaced at the next update",
                fix="inject a number and give the schedule to a `Scheduler`: "
                f"`{origin_of(self._optimizer, (name,)).call(name)}`",
            )

    def _missing(self, name: str, *, writing: bool, declared: Declared, where: str) -> MissingStateError:
        origin = origin_of(self._optimizer, self.names)
        meant = origin.meant(name)
        known = f" It has {', '.join(f'`{n}`' for n in self.names)}." if self.names else ""
        hint = f" Did you mean `{meant}`?" if meant not in ("", name) else ""
        steps = [origin.injecting(meant)] if meant not in ("", *self.names) else []
        if hint:
            steps.append(declared.how_to_declare(("hyperparams", meant), Write() if writing else Read()))
        if not meant:
            steps = [f"name one that it can have: {', '.join(f'`{n}`' for n in origin.arguments)}"]
        return MissingStateError(
            f"{declared.label} needs `hyperparams.{name}`, which this optimizer does not have.{known}{hint}",
            where=where,
            why="only hyperparameters that optax injected live on the device and can change without a recompile",
            fix=", and ".join(steps),
        )

    def get(self, opt_state: PyTree, name: str) -> Any:
        """Return a hyperparameter's array."""
        return jax.tree.leaves(opt_state)[self._places[name][0]]

    def set(self, opt_state: PyTree, name: str, value: Any) -> PyTree:
        """Return the state with one hyperparameter replaced (cast to the old one's dtype)."""
        leaves, structure = jax.tree.flatten(opt_state)
        index = self._places[name][0]
        # A copy, so that donation never reaches an array of the user's.
        leaves[index] = jnp.array(value, leaves[index].dtype, copy=True)
        return jax.tree.unflatten(structure, leaves)
