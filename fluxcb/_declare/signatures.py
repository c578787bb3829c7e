"""Checking the signatures of user functions without calling them, and calls that do not match a fluxcb signature."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fluxcb._errors import DeclarationError

__all__ = ["accepts", "explained", "runs_later"]

F = TypeVar("F", bound=Callable[..., Any])

_ELSEWHERE: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("loss", "loss_function", "criterion", "objective"), ("loss_fn", "loss_fn")),
    **dict.fromkeys(("optim", "opt", "tx"), ("optimizer", "optax.adam(1e-3)")),
    **dict.fromkeys(("seed", "rng", "rngs", "random_state"), ("key", "0")),
    **dict.fromkeys(("train_data", "training_data", "train_loader", "train_dataloader"), ("data", "training")),
    **dict.fromkeys(("train_dataloaders", "train_dataset", "train_ds", "dataset", "loader"), ("data", "training")),
    **dict.fromkeys(("num_epochs", "max_epochs", "n_epochs", "nb_epoch"), ("epochs", "10")),
    **dict.fromkeys(("num_steps", "max_steps", "n_steps"), ("steps", "1000")),
    "monitor": ("metric", '"validation/loss"'),
    **dict.fromkeys(("dirpath", "filepath", "directory", "ckpt_dir", "checkpoint_dir"), ("folder", '"runs/1"')),
    **dict.fromkeys(("every_n_epochs", "save_freq"), ("epochs", "1")),
    "every_n_train_steps": ("steps", "1000"),
    "save_top_k": ("keep_best", "3"),
    "max_to_keep": ("keep_last", "3"),
}
"""Argument names of other libraries, each with fluxcb's name and an example of a value."""


def accepts(function: Any, count: int) -> bool:
    """Tell whether something can be called with so many arguments; where nothing says what it takes, it can."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some that are written in C
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def runs_later(function: Any) -> str:
    """Return what a function is whose call does not run its body, `a coroutine function`, or an empty string."""
    if inspect.iscoroutinefunction(function):
        return "a coroutine function"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return "a generator function"
    return ""


# -- calls that do not match ---------------------------------------------------------------------


def explained(cures: Mapping[str, str] | None = None) -> Callable[[F], F]:
    """Return a decorator that replaces Python's TypeError for wrong arguments with an error that has a fix.

    A correct call costs only one additional Python call, because the signature is inspected only after a TypeError.

    Args:
        cures: For each argument that is missing or that the method does not have, the fix to suggest. The key is the
            name of the argument, or `*` for arguments that were passed by position.
    """

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except TypeError:
                misfit = _misfit(method, args, kwargs, cures or {})
                if misfit is None:  # the call is correct, and the method itself raised the error
                    raise
            raise misfit

        return call  # pyright: ignore[reportReturnType]  # it has the signature of the method

    return decorate


def _misfit(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], cures: Mapping[str, str]
) -> DeclarationError | None:
    """Return the error for a call that does not match a method's signature, or None if it matches."""
    first, *parameters = inspect.signature(method).parameters.values()
    del first  # `self` or `cls`
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    by_position = [p.name for p in named if p.kind is not p.KEYWORD_ONLY]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    # A class can inherit the constructor of its base, but the message must show the class that was called.
    owner = type(args[0]).__name__ if method.__name__ == "__init__" else method.__qualname__
    given = args[1:]
    unknown = [name for name in kwargs if name not in {p.name for p in named}]
    twice = [name for name in by_position[: len(given)] if name in kwargs]
    missing = [p.name for p in named if p.default is p.empty and p.name not in kwargs]
    missing = [name for name in missing if name not in by_position[: len(given)]]
    why = f"it takes {', '.join(p.name if p.name != rest else f'*{rest}' for p in parameters)}"
    if unknown:
        names = " and ".join(f"`{name}`" for name in unknown)
        what = f"`{owner}` has no argument{'s' if len(unknown) > 1 else ''} {names}."
        known = [p.name for p in named]
        fixes = dict.fromkeys(_cure(name, known, rest, cures) for name in unknown)
        return DeclarationError(what, why=why, fix=", and ".join(fixes))
    if twice:
        what = f"`{owner}` was given `{twice[0]}` twice: by position and by name."
        return DeclarationError(what, why=why, fix=cures.get("*", f"leave out one of the two `{twice[0]}`"))
    if rest is None and len(given) > len(by_position):
        takes = f"{len(by_position)} argument{'s' if len(by_position) != 1 else ''} by position"
        others = [p.name for p in named if p.kind is p.KEYWORD_ONLY][: len(given) - len(by_position)]
        call = ", ".join([*by_position, *(f"{name}=..." for name in others)])
        what = f"`{owner}` takes {takes}, and was given {len(given)}."
        return DeclarationError(what, why=why, fix=cures.get("*", f"name the others: `{owner}({call})`"))
    if missing:
        call = ", ".join(p.name for p in named if p.default is p.empty)
        what = f"`{owner}` was not given {' and '.join(f'`{name}`' for name in missing)}."
        return DeclarationError(what, why=why, fix=cures.get(missing[0], f"write `{owner}({call})`"))
    return None


def _cure(name: str, known: list[str], rest: str | None, cures: Mapping[str, str]) -> str:
    if name in cures:
        return cures[name]
    if name == rest:
        return f"pass the values by position, without `{name}=`"
    ours, example = _ELSEWHERE.get(name, ("", ""))
    if ours in known:
        return f"write `{ours}={example}` instead of `{name}=...`"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"write `{near[0]}=...` instead of `{name}=...`" if near else f"leave out `{name}=...`"
