"""Which keywords a model's call understands: read from its signature, once, when the adapter is made."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from fluxcb._errors import DeclarationError, did_you_mean

TRAIN_FLAGS = {"train": False, "training": False, "is_training": False, "deterministic": True}
"""Keywords that tell a model whether it is being trained, and whether True means that it is not."""


class TrainFlag(NamedTuple):
    """The keyword by which a call is told that it is part of training."""

    name: str
    inverted: bool

    def keywords(self, train: bool) -> dict[str, bool]:
        """Return the keyword argument that says `train`."""
        return {self.name: train is not self.inverted}


def accepted_keywords(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names that `function` spells out and takes by keyword; `**kwargs` names nothing."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # builtins and some callables written in C have no signature
        return frozenset()
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(parameter.name for parameter in parameters if parameter.kind in by_keyword)


def fits_call(function: Callable[..., Any], count: int, keywords: Iterable[str]) -> bool:
    """Tell whether `function` can be called with so many arguments and these keywords; without a signature, it can."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*[None] * count, **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


def train_flag(function: Callable[..., Any], requested: str | None, *, adapter: str, where: str) -> TrainFlag | None:
    """Return the train flag of `function`: the requested one, or the only well-known one, or None.

    Args:
        function: The model's call.
        requested: The name the user gave, or None to look for one.
        adapter: Name of the adapter in `fluxcb.models`, for messages.
        where: Where the call is, for messages.

    Raises:
        DeclarationError: `function` does not take the requested keyword, or takes several that could be meant.
    """
    accepted = accepted_keywords(function)
    if requested is not None:
        if requested not in accepted and not _takes_any_keyword(function):
            raise DeclarationError(
                f"`train_argument` is {requested!r}, but the model's call takes no such keyword."
                f"{did_you_mean(requested, accepted)}",
                where=where,
                why="the model would be told nothing about whether it is being trained",
                fix=["name a keyword of the call", "leave `train_argument` out if the model behaves alike in both"],
            )
        return TrainFlag(requested, TRAIN_FLAGS.get(requested, False))
    found = [name for name in TRAIN_FLAGS if name in accepted]
    if len(found) > 1:
        raise DeclarationError(
            f"The model's call takes {_listed(found)}, and each of them could be its train flag.",
            where=where,
            why="the adapter sets one keyword, True or False, by whether the step trains",
            fix=[f'name it: `fluxcb.models.{adapter}(module, train_argument="{name}")`' for name in found],
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
