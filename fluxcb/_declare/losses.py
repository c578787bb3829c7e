"""The forms of loss functions. The signature of a function decides its form."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from fluxcb._declare.signatures import parameter_names
from fluxcb._step_arguments import TRAIN_FLAGS, names_a_key, names_a_mode
from fluxcb._tracebacks import warn_user

__all__ = [
    "MODEL_FORM",
    "OUTPUTS_FORM",
    "OUTPUT_NAMES",
    "PARAMS_FORM",
    "TARGET_NAMES",
    "batch_arguments",
    "fits_batch_form",
    "takes",
    "takes_model",
    "warn_about_order",
    "warn_about_unused",
]

OUTPUTS_FORM = "loss_fn(outputs, ys)"
"""The short form of `Learner(model, loss_fn)`."""

MODEL_FORM = "loss_fn(model, batch, *, key, train)"
"""The form of `Learner(model, loss_fn)` that receives the model itself; `key` and `train` are optional."""

PARAMS_FORM = "loss_fn(params, batch, key)"
"""The form of `Learner.from_loss`; `key` and the keywords `train` and `model_state` are optional."""

_KEYWORDS = frozenset({"key", "train", "model_state"})
TARGET_NAMES = frozenset({"y", "ys", "y_true", "label", "labels", "target", "targets"})
"""Names of targets: a third parameter of a loss function with such a name must not receive the random key."""

OUTPUT_NAMES = frozenset(
    {"logits", "output", "outputs", "pred", "prediction", "predictions", "preds", "y_hat", "y_pred", "yhat"}
)
"""Names of parameters that receive the outputs of a model."""


def warn_about_order(function: Callable[..., Any], what: str, instead: str) -> None:
    """Warn if the names of the parameters say that a function takes the targets before the outputs, as in Keras.

    Args:
        function: A function that fluxcb calls with the outputs first.
        what: What the function is, for the message: `The loss function`.
        instead: What to pass instead, with `{}` for the name of the function.
    """
    names = parameter_names(function)[:2]
    if len(names) == 2 and names[0] in TARGET_NAMES and names[1] in OUTPUT_NAMES:
        name = getattr(function, "__name__", "")
        called = name if name.isidentifier() else "fn"
        warn_user(
            f"{what} `{called}({', '.join(names)})` gets the outputs of the model as `{names[0]}` and the targets as "
            f"`{names[1]}`, because fluxcb passes the outputs first. Pass `{instead.format(called)}` instead.",
            UserWarning,
        )


def warn_about_unused(loss_fn: Callable[..., Any], form: str) -> None:
    """Warn if a loss function has an optional train flag or random key that it does not get in this form.

    Args:
        loss_fn: The loss function.
        form: The form in which it is called.
    """
    if form == OUTPUTS_FORM:
        passed = frozenset[str]()
        advice = dict.fromkeys(
            ("key", "flag", "inverted", "mode"), f"To get it from fluxcb, write `def {MODEL_FORM}:`."
        )
    else:
        args, kwargs = batch_arguments(loss_fn, None, None, key=None, train=True)
        passed = frozenset(parameter_names(loss_fn)[: len(args)]) | kwargs.keys()
        advice = {
            "key": "Call it `key`, and fluxcb passes it.",
            "flag": "Call it `train`, and fluxcb passes it.",
            "inverted": "Replace it by a parameter `train`, which fluxcb passes, and by `not train` in its uses.",
            "mode": "If it selects training mode, replace it by a parameter `train`, which fluxcb passes.",
        }
    for parameter in _optional(loss_fn):
        name = parameter.name
        kind = "key" if names_a_key(name) else ""
        if name in TRAIN_FLAGS:
            kind = "inverted" if TRAIN_FLAGS[name] else "flag"
        elif isinstance(parameter.default, bool) and names_a_mode(name):
            kind = "mode"
        if kind and name not in passed:
            warn_user(
                f"The loss function is called as `{form}`, so its parameter `{name}` is always {parameter.default!r}. "
                f"{advice[kind]}",
                UserWarning,
            )


def _optional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters with a default, except those that `functools.partial` has fixed."""
    fixed = getattr(function, "keywords", {})
    return [p for p in _parameters(function) or [] if p.default is not p.empty and p.name not in fixed]


def takes_model(loss_fn: Callable[..., Any] | None) -> bool:
    """Return whether a loss function has the form `loss_fn(model, batch, *, key, train)`.

    This is true if its first parameter is called `model`, or if it requires a parameter called `key` or `train`. A
    function whose first parameter is called `params` was written for `Learner.from_loss`.
    """
    parameters = _parameters(loss_fn) if loss_fn is not None else None
    if not parameters:
        return False
    if parameters[0].name in ("model", "params"):
        return parameters[0].name == "model"
    return any(p.name in ("key", "train") and p.default is p.empty for p in parameters)


def takes(loss_fn: Callable[..., Any], name: str) -> bool:
    """Return whether a loss function has a parameter of this name that can be passed by keyword."""
    return name in _spelled(_parameters(loss_fn) or [])


def batch_arguments(
    loss_fn: Callable[..., Any], first: Any, batch: Any, *, key: Any, **keywords: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which to call a loss function that takes the model or the parameters, and the batch.

    Args:
        loss_fn: The loss function.
        first: The model or the parameters.
        batch: The batch.
        key: The random key. If the function has no parameter called `key`, a third positional parameter gets it,
            unless its default or its name shows that it is something else.
        **keywords: Arguments that the function receives if it has a parameter of that name.

    Returns:
        The positional arguments, and the arguments passed by keyword.
    """
    parameters = _parameters(loss_fn)
    if parameters is None:  # some functions written in C have no signature
        return (first, batch, key), {}
    spelled = _spelled(parameters)
    named = {name: value for name, value in keywords.items() if name in spelled}
    if "key" in spelled:
        return (first, batch), {"key": key, **named}
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    any_number = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    third = by_position[2] if len(by_position) > 2 else None
    if (third is not None and _gets_key(third)) or (third is None and any_number):
        return (first, batch, key), named
    return (first, batch), named


def _gets_key(third: inspect.Parameter) -> bool:
    """Return whether the third positional parameter of a loss function gets the random key."""
    if third.default is third.empty:
        return third.name not in _KEYWORDS | TARGET_NAMES | TRAIN_FLAGS.keys() | {"step", "epoch"}
    return third.default is None and names_a_key(third.name)


def fits_batch_form(loss_fn: Callable[..., Any], *names: str) -> bool:
    """Return whether a loss function can be called with the model or the parameters, and the batch.

    Args:
        loss_fn: The loss function.
        *names: The optional arguments that it may have besides `key`.
    """
    args, kwargs = batch_arguments(loss_fn, None, None, key=None, **dict.fromkeys(names))
    try:
        inspect.signature(loss_fn).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def _spelled(parameters: list[inspect.Parameter]) -> frozenset[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return _KEYWORDS & {p.name for p in parameters if p.kind in kinds}
