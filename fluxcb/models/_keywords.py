"""Keyword arguments of a model's call, read from its signature once, when the adapter is created."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from fluxcb._errors import DeclarationError, did_you_mean
from fluxcb._step_arguments import TRAIN_FLAGS, names_a_mode


class TrainFlag(NamedTuple):
    """The keyword argument of a call that selects training mode.

    Attributes:
        name: Its name.
        inverted: Whether True means evaluation.
        requested: Whether the user has named it.
    """

    name: str
    inverted: bool
    requested: bool = False

    def keywords(self, train: bool) -> dict[str, bool]:
        """Return the keyword argument with the value for `train`."""
        return {self.name: train is not self.inverted}


def accepted_keywords(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of the parameters that `function` accepts by keyword, except those matched by `**kwargs`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # builtins and some callables written in C have no signature
        return frozenset()
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(parameter.name for parameter in parameters if parameter.kind in by_keyword)


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the parameters of `function` that have a default, with the defaults."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


def boolean_options(function: Callable[..., Any]) -> dict[str, bool]:
    """Return the parameters of `function` whose defaults are bools, with the defaults."""
    return {name: default for name, default in defaults_of(function).items() if isinstance(default, bool)}


def mode_options(function: Callable[..., Any]) -> dict[str, bool]:
    """Return those of `boolean_options` that are no train flags, but whose names say that they select a mode."""
    options = boolean_options(function).items()
    return {name: default for name, default in options if name not in TRAIN_FLAGS and names_a_mode(name)}


def key_means_training(function: Callable[..., Any]) -> bool:
    """Return whether a random key selects training mode: `key` may be None, and there is no train flag."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return not TRAIN_FLAGS.keys() & parameters and "key" in parameters and parameters["key"].default is None


def step_keywords(function: Callable[..., Any], *, key: Any, train: bool) -> dict[str, Any]:
    """Return the keywords of `function` that describe a step: `key`, and each of `TRAIN_FLAGS` that it accepts."""
    values = {"key": key, **{name: train is not inverted for name, inverted in TRAIN_FLAGS.items()}}
    accepted = accepted_keywords(function)
    # Arguments that `functools.partial` has fixed keep their values.
    fixed = getattr(function, "keywords", {})
    return {name: value for name, value in values.items() if name in accepted and name not in fixed}


def fits_call(function: Callable[..., Any], count: int, keywords: Iterable[str]) -> bool:
    """Return whether `function` accepts `count` arguments and these keywords. True if there is no signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*[None] * count, **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


def train_flag(
    function: Callable[..., Any], requested: str | None, *, adapter: str, where: str, arguments: str = ""
) -> TrainFlag | None:
    """Return the train flag of `function`: the requested one, the only well-known one, or None.

    Args:
        function: The model's call.
        requested: The name that the user requested, or None to search for one.
        adapter: Name of the adapter in `fluxcb.models`, for messages.
        where: The location of the call, for messages.
        arguments: Other arguments that the user gave to the adapter, as in `, rng_streams=("noise",)`, for messages.

    Raises:
        DeclarationError: `function` does not take the requested keyword, or takes several possible ones.
    """
    accepted = accepted_keywords(function)
    if requested is not None:
        if requested not in accepted and not _takes_any_keyword(function):
            raise DeclarationError(
                f"`train_argument` is {requested!r}, but the model's call has no such keyword."
                f"{did_you_mean(requested, accepted)}",
                where=where,
                why="the model would not know whether it is being trained",
                fix=[
                    "name a keyword of the call",
                    "leave `train_argument` out if the model behaves the same in training and evaluation",
                ],
            )
        return TrainFlag(requested, TRAIN_FLAGS.get(requested, False), requested=True)
    found = [name for name in TRAIN_FLAGS if name in accepted]
    if len(found) > 1:
        raise DeclarationError(
            f"The model's call takes {_listed(found)}, and each of them could be its train flag.",
            where=where,
            why="the adapter sets one keyword to True if the step trains, and to False otherwise",
            fix=[f'name it: `fluxcb.models.{adapter}(module, train_argument="{name}"{arguments})`' for name in found],
        )
    return TrainFlag(found[0], TRAIN_FLAGS[found[0]]) if found else None


def _takes_any_keyword(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _listed(names: list[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]])
