"""Hyperparameters: optimizers that hold them as arrays, and their positions in the optimizer state."""

from __future__ import annotations

import inspect
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fluxcb._calls import entry_point
from fluxcb._compile.optimizers import Origin, nearest_hyperparameter, origin_of
from fluxcb._declare.access import Permission, Read, Write
from fluxcb._declare.state import RATE_FIX, RATE_WHY, is_negative_rate
from fluxcb._errors import DeclarationError, MissingStateError, nearest
from fluxcb._typing import PyTree, StatePath

__all__ = ["HyperparamIndex", "inject", "unusable"]


@dataclass(frozen=True)
class Unusable:
    """A number that is refused as the value of a hyperparameter.

    Attributes:
        shown: The number, for a sentence such as "`learning_rate` is ...".
        why: The reason.
        instead: What to use instead, such as "a finite number".
    """

    shown: str
    why: str
    instead: str = "a finite number"


def unusable(name: str, value: Any, dtype: Any) -> Unusable | None:
    """Return what is wrong with NaN, a finite number that overflows a dtype, or a negative learning rate.

    Only numbers on the host are checked, so the check does not wait for the device.

    Args:
        name: The name of a hyperparameter.
        value: Its value.
        dtype: Its dtype.

    Returns:
        None if the value is not a number on the host, or if it can be used. Infinity is usable, e.g. as the limit of an
        `optax.clip_by_global_norm` that does not clip.
    """
    # A jax.Array is not checked, because reading its value would wait for the device.
    if not isinstance(value, int | float | np.number | np.ndarray) or np.ndim(value):
        return None
    if not jnp.issubdtype(dtype, jnp.floating):
        return None
    largest, kind = float(jnp.finfo(dtype).max), jnp.dtype(dtype).name
    try:
        number = float(value)
        if math.isnan(number):
            return Unusable("nan", "the next update would make the parameters NaN")
        if abs(number) <= largest or not math.isfinite(number):
            negative = is_negative_rate(name, number)
            return Unusable(f"{number!r}, which is negative", RATE_WHY, RATE_FIX) if negative else None
        shown = repr(number)
    # An int of Python can exceed the range of float64.
    except OverflowError:
        shown = f"an int above {sys.float_info.max:.4g}" if value > 0 else f"an int below {-sys.float_info.max:.4g}"
    except (TypeError, ValueError):  # complex, or an object
        return None
    return Unusable(f"{shown}, which is not finite in {kind}", f"the largest finite number of {kind} is {largest:.4g}")


_CHAIN = (
    "pass a function of the hyperparameters: `fluxcb.inject(lambda learning_rate: "
    "optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate)), learning_rate=1e-3)`"
)
"""The fix for `inject(optax.chain, ...)`."""


def _is_schedule(value: Any) -> bool:
    """Return whether a callable argument of an optimizer maps the number of the step to a number.

    Optax treats every callable as a schedule. It would pass the step to the function of a `mask`, whose result there
    is one bool for all parameters, and call a dtype such as `jnp.bfloat16`, which is also callable.
    """
    # A dtype is a class. A call of it would return a number, as a call of a schedule does.
    if isinstance(value, type):
        return False
    if isinstance(value, optax.schedules.StatefulSchedule):
        return True
    try:
        leaves = jax.tree.leaves(jax.eval_shape(value, jax.ShapeDtypeStruct((), jnp.int32)))
    except Exception:  # a mask by the paths of the parameters; if it is a schedule, the step raises its exception
        return False
    return len(leaves) == 1 and not leaves[0].shape and jnp.issubdtype(leaves[0].dtype, jnp.number)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


@entry_point(
    fixes={
        "factory": "pass an optimizer of optax first: `fluxcb.inject(optax.adam, learning_rate=1e-3)`",
        "*": "pass its arguments by name: `fluxcb.inject(optax.adam, learning_rate=1e-3)`",
    }
)
def inject(factory: Callable[..., optax.GradientTransformation], /, **arguments: Any) -> optax.GradientTransformation:
    """Build an optimizer whose numeric arguments are hyperparameters on the device.

    Only the arguments that you pass become hyperparameters. Defaults remain constants of the program, so the results
    equal those of the plain optimizer. Values are float32, regardless of the dtype of the parameters.

    Args:
        factory: An Optax factory, e.g. `optax.adam`.
        **arguments: Arguments of the factory. Numbers and schedules become `hyperparams.<name>`. Other arguments, such
            as a function that returns a mask, a dtype or a flag, go to the factory unchanged. So do numbers for
            arguments that are annotated as `int`, such as sizes.

    Returns:
        The optimizer, which is `optax.inject_hyperparams` of the factory.

    Raises:
        DeclarationError: `factory` is not a factory, it does not have one of the arguments, or a number is NaN, too
            large for float32, or a negative learning rate.

    Example:
        >>> import optax, fluxcb
        >>> optimizer = fluxcb.inject(optax.adam, learning_rate=1e-3)
        >>> float(optimizer.init({"w": 0.0}).hyperparams["learning_rate"]) == float(jax.numpy.float32(1e-3))
        True
    """
    if not callable(factory):
        origin = origin_of(factory, ())
        known = origin if origin.factory is not None else Origin(optax.adam, inside=False, injected=())
        raise DeclarationError(
            f"`inject` takes a factory of optimizers, not {type(factory).__name__}.",
            why="`inject` builds the optimizer itself, so that its arguments become arrays on the device",
            fix=f"{known.injecting('learning_rate')}, and pass the optimizer to the Learner",
        )
    parameters = inspect.signature(factory).parameters
    for name, value in arguments.items():
        if isinstance(value, str):
            raise DeclarationError(
                f"`inject` takes numbers and schedules, but `{name}` is {value!r}.",
                fix=f"write `{name}={value}`"
                if _is_number(value)
                else f"pass e.g. `{name}=1e-3`, or bind it beforehand: `functools.partial(factory, {name}={value!r})`",
            )
        if found := unusable(name, value, jnp.float32):
            text = f"`inject` was given `{name}` as {found.shown}."
            raise DeclarationError(text, why=found.why, fix=f"write e.g. `{name}=1e-3`")
    # A wrapper of a factory often takes `**kwargs`, so its arguments are not known.
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = any(p.kind is not p.VAR_POSITIONAL for p in parameters.values())
    for name in arguments:
        if name not in parameters and not takes_any:
            suggestion = Origin(factory, inside=False, injected=()).suggested_name(name) or nearest(name, parameters)
            hint = f" Did you mean `{suggestion}`?" if suggestion in parameters else ""
            raise DeclarationError(
                f"`{getattr(factory, '__name__', factory)}` has no argument `{name}`.{hint}",
                fix=f"its arguments are {', '.join(parameters)}" if named else _CHAIN,
            )
    missing = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and name not in arguments
    ]
    if missing:
        raise DeclarationError(
            f"`{getattr(factory, '__name__', factory)}` needs `{missing[0]}`, which was not passed to `inject`.",
            fix=f"give it, e.g. `{missing[0]}=1e-3`",
        )
    # By default, Optax would also inject the numeric defaults. They would then be arrays of the program, and the
    # results could differ in the last bits from those of the plain optimizer.
    static = [name for name in parameters if name not in arguments]
    for name, value in list(arguments.items()):
        # An integer such as `memory_size` of `optax.lbfgs` is often a size, which an array cannot be.
        # The annotation is a text in modules with `from __future__ import annotations`.
        is_integer = name in parameters and parameters[name].annotation in (int, "int") and not callable(value)
        if is_integer or (callable(value) and not _is_schedule(value)):
            static.append(name)
        elif isinstance(value, int | np.integer) and not isinstance(value, bool):
            # `hyperparam_dtype` does not apply to integers, and an int32 array could not be set to 0.1 later.
            arguments[name] = float(value)
    return optax.inject_hyperparams(factory, static_args=static, hyperparam_dtype=jnp.float32)(**arguments)


class Accessor(Protocol):
    """A callback (`Declared`) or a user's assignment that reads or writes a hyperparameter."""

    @property
    def label(self) -> str:
        """The name that messages use."""
        ...

    def how_to_declare(self, path: StatePath, permission: Permission) -> str:
        """Return the edit that makes the access work."""
        ...


def _renamed(name: str, used: str, example: str = "") -> str:
    return f"write {example}`learner.hyperparams.{used}` instead of `learner.hyperparams.{name}`"


class HyperparamIndex:
    """The position of each injected hyperparameter among the leaves of an optimizer state.

    A name that occurs once is used as it is. If several groups of parameters have the same name (labels of
    `optax.partition`, names in `optax.named_chain`, names of several optimizers), the name is qualified by the group:
    `encoder.learning_rate`.

    Args:
        opt_state: The state (arrays or their specs).
        optimizer: The optimizer, for messages.
    """

    def __init__(self, opt_state: PyTree, optimizer: Any = None) -> None:
        self._optimizer = optimizer
        found: dict[str, list[tuple[str, int]]] = {}  # by name: the group and the index of each occurrence
        scheduled: set[tuple[str, str]] = set()
        integers: set[int] = set()
        for index, (path, leaf) in enumerate(jax.tree_util.tree_flatten_with_path(opt_state)[0]):
            # The state is searched by its pytree paths, because wrappers such as `optax.chain` nest it at any depth.
            for at, (field, entry) in enumerate(itertools.pairwise(path)):
                # Optax uses these field names. A parameter that happens to have the same name is a DictKey.
                if isinstance(field, jax.tree_util.GetAttrKey) and isinstance(entry, jax.tree_util.DictKey):
                    group = ".".join(str(key.key) for key in path[:at] if isinstance(key, jax.tree_util.DictKey))
                    if field.name == "hyperparams":
                        found.setdefault(entry.key, []).append((group, index))
                        if jnp.issubdtype(leaf.dtype, jnp.integer):
                            integers.add(index)
                    # Optax keeps a state for each hyperparameter that has a schedule.
                    elif field.name == "hyperparams_states":
                        scheduled.add((group, entry.key))
        self._places: dict[str, list[int]] = {}
        self._scheduled: set[str] = set()
        self._integers: set[str] = set()
        for name, places in found.items():
            for group, index in places:
                # A name that occurs once stays short, so that callbacks work with most optimizers without
                # configuration.
                qualified = f"{group}.{name}" if group and len(places) > 1 else name
                self._places.setdefault(qualified, []).append(index)
                if (group, name) in scheduled:
                    self._scheduled.add(qualified)
                if index in integers:
                    self._integers.add(qualified)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all hyperparameters."""
        return tuple(self._places)

    def require(self, name: str, *, writing: bool, declared: Accessor, where: str) -> None:
        """Check that a hyperparameter exists once and, if it is written, has no schedule inside Optax.

        Args:
            name: Its name.
            writing: Whether it is written.
            declared: The callback or assignment that needs it.
            where: The location at which it is needed.

        Raises:
            MissingStateError: It does not exist, occurs several times, has its own schedule, or is written although
                it is an integer.
        """
        places, label = self._places.get(name, []), declared.label
        if not places:
            raise self._missing(name, writing=writing, declared=declared, where=where)
        if len(places) > 1:
            raise MissingStateError(
                f"{label} needs `hyperparams.{name}`, which this optimizer has {len(places)} times.",
                where=where,
                why="the parts of an `optax.chain` have no names, so fluxcb cannot distinguish these hyperparameters",
                fix='name the parts with `optax.named_chain(("first", ...), ("second", ...))`, and write '
                f"`first.{name}`",
            )
        if writing and name in self._scheduled:
            plain = name.rpartition(".")[2]
            raise MissingStateError(
                f"{label} writes `hyperparams.{name}`, which an optax schedule inside the optimizer sets at each "
                "update.",
                where=where,
                why="the next update would overwrite the written value",
                fix=f"inject a number instead of the schedule: `{origin_of(self._optimizer, (plain,)).call(plain)}`",
            )

        if writing and name in self._integers:
            plain = name.rpartition(".")[2]
            raise MissingStateError(
                f"{label} writes `hyperparams.{name}`, which is an integer.",
                where=where,
                why="written values would be rounded to integers, and 0.1 would become 0",
                fix=f"begin with a float in the optimizer, e.g. `{plain}=1.0` instead of `{plain}=1`",
            )

    def undeclared_fix(self, name: str, permission: Permission, declared: Accessor) -> str:
        """Return all edits for an undeclared hyperparameter that the optimizer does not have, otherwise ""."""
        # With several groups, the declaration has its own error, which explains their names.
        if name in self._places or any("." in known for known in (name, *self.names)):
            return ""
        origin = origin_of(self._optimizer, self.names)
        suggestion = origin.suggested_name(name)
        used = suggestion or [*self.names, *origin.arguments][0]
        edits = [] if used in self.names else [origin.injecting(used)]
        edits += [] if used == name else [_renamed(name, used, "" if suggestion else "e.g. ")]
        return f"{', '.join(edits)}, and {declared.how_to_declare(('hyperparams', used), permission)}"

    def _missing(self, name: str, *, writing: bool, declared: Accessor, where: str) -> MissingStateError:
        permission = Write() if writing else Read()
        # With several groups, fluxcb does not know which factory created the optimizer of a group.
        if any("." in known for known in (name, *self.names)):
            return self._missing_in_groups(name, permission, declared, where)
        origin = origin_of(self._optimizer, self.names)
        suggestion = origin.suggested_name(name)
        known = f" It has {', '.join(f'`{n}`' for n in self.names)}." if self.names else ""
        hint = f" Did you mean `{suggestion}`?" if suggestion not in ("", name) else ""
        # A misspelled name needs up to three edits: in the handler, in the optimizer, and in the declaration.
        steps = [origin.injecting(suggestion)] if suggestion not in ("", *self.names) else []
        # Users of fluxcb's own callbacks pass the name as an argument, which `how_to_declare` shows.
        if hint and not getattr(getattr(declared, "cls", None), "__module__", "fluxcb.").startswith("fluxcb."):
            steps.append(_renamed(name, suggestion))
        if hint:
            steps.append(declared.how_to_declare(("hyperparams", suggestion), permission))
        if not suggestion:
            steps = [f"use one of the names that it can have: {', '.join(f'`{n}`' for n in origin.arguments)}"]
        return MissingStateError(
            f"{declared.label} needs `hyperparams.{name}`, which this optimizer does not have.{known}{hint}",
            where=where,
            why="only injected hyperparameters are arrays on the device, which can change without recompiling",
            fix=", and ".join([", ".join(steps[:-1]), steps[-1]] if steps[1:] else steps),
        )

    def _missing_in_groups(
        self, name: str, permission: Permission, declared: Accessor, where: str
    ) -> MissingStateError:
        """Return the error for a name that is missing in some groups of parameters, or that several groups have."""
        plain = name.rpartition(".")[2]
        # The message shows the first common factory that has an argument of this name.
        factories = (f for f in (optax.adam, optax.sgd, optax.adamw) if plain in inspect.signature(f).parameters)
        example = Origin(next(factories, None), inside=False, injected=()).call(plain)
        alike = [known for known in self.names if known.rpartition(".")[2] == plain]
        suggestion = nearest_hyperparameter(name, self.names) or (alike or [""])[0]
        if name == plain and alike:
            suggestion = alike[0]
            problem = f"which {len(alike)} groups of parameters have: {', '.join(f'`{n}`' for n in alike)}."
        else:
            hint = f" Did you mean `{suggestion}`?" if suggestion else ""
            known = f" It has {', '.join(f'`{n}`' for n in self.names)}." if self.names else ""
            problem = f"which this optimizer does not have.{known}{hint}"
        return MissingStateError(
            f"{declared.label} needs `hyperparams.{name}`, {problem}",
            where=where,
            why="a hyperparameter that occurs in several groups is named `<group>.<name>`, "
            "and one that occurs once is named without a group",
            fix=declared.how_to_declare(("hyperparams", suggestion), permission)
            if suggestion
            else f"inject it in the optimizer of its group: `{example}`",
        )

    def get(self, opt_state: PyTree, name: str) -> Any:
        """Return a hyperparameter's array."""
        return jax.tree.leaves(opt_state)[self._places[name][0]]

    def set(self, opt_state: PyTree, name: str, value: Any) -> PyTree:
        """Return the state with one hyperparameter replaced by a value, which is cast to the old dtype."""
        leaves, structure = jax.tree.flatten(opt_state)
        index = self._places[name][0]
        # A copy, so that an array of the user's is never donated.
        leaves[index] = jnp.array(value, leaves[index].dtype, copy=True)
        return jax.tree.unflatten(structure, leaves)

    def numbers(self, opt_state: PyTree) -> dict[str, list[Any]]:
        """Return the values of the hyperparameters without a schedule inside Optax, one for each place, as numbers."""
        leaves = jax.tree.leaves(opt_state)
        return {
            # float64 represents each float32 exactly, so `put` restores the same bits.
            name: [np.asarray(leaves[place], np.float64).tolist() for place in places]
            for name, places in self._places.items()
            if name not in self._scheduled
        }

    def put(self, opt_state: PyTree, name: str, numbers: Sequence[Any]) -> PyTree:
        """Return the state with the values of one hyperparameter replaced by those that `numbers` returned."""
        leaves, structure = jax.tree.flatten(opt_state)
        for place, number in zip(self._places[name], numbers, strict=True):
            leaves[place] = jnp.array(number, leaves[place].dtype)
        return jax.tree.unflatten(structure, leaves)
