"""Extra arguments of an optimizer's `update`, in addition to gradients, state and parameters: `value`, `grad`, ..."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from fluxcb._compile.call_errors import noting_optimizer
from fluxcb._errors import TraceError
from fluxcb._typing import PyTree

__all__ = ["KNOWN", "differentiated", "updates_of"]

KNOWN = ("value", "grad", "value_fn", "grad_fn")
"""Extra arguments of Optax's optimizers. A phase may pass them to any optimizer."""

_SOURCES = {
    "value": "assign `learner.step.loss` before the update",
    "grad": "call `learner.update(grads, grad=grads)`",
    "value_fn": 'take the gradient once, with `learner.grad(loss, wrt="params")`; fluxcb then passes `loss` as '
    "`value_fn`",
    "grad_fn": 'take the gradient once, with `learner.grad(loss, wrt="params")`; fluxcb then passes its gradient as '
    "`grad_fn`",
}


def differentiated(value_fn: Callable[[PyTree], Any]) -> Callable[..., PyTree]:
    """Return the gradient of a function of the parameters. It ignores the step number that SAM passes."""
    gradient = jax.grad(value_fn)
    # `optax.contrib.sam` calls it with a step number.
    return lambda params, step=None: gradient(params)


def updates_of(
    optimizer: Any,
    arguments: tuple[PyTree, PyTree, PyTree],
    *,
    offered: Mapping[str, Any],
    from_phase: Mapping[str, Any],
    where: str,
) -> tuple[PyTree, PyTree]:
    """Call an optimizer's `update` with the extra arguments that it accepts.

    The parts of an `optax.chain` or of a wrapper accept different arguments, and a signature with `**extra_args` does
    not show which part receives which argument. Therefore an argument is dropped if Python reports that a part does not
    accept it.

    Args:
        optimizer: The optimizer.
        arguments: The gradients, the optimizer's state, and the parameters.
        offered: The extra arguments that fluxcb provides.
        from_phase: The extra arguments that the phase passes.
        where: The phase's step, for messages.

    Returns:
        The updates and the new state.

    Raises:
        TraceError: The optimizer needs an argument that is missing, or does not accept one that the phase passed.
    """
    # Known arguments are dropped without an error, so a phase works with optimizers that need them and with all others.
    unknown = [name for name in from_phase if name not in KNOWN]
    takes_extra = isinstance(optimizer, optax.GradientTransformationExtraArgs)
    if unknown and not takes_extra:
        raise _refused(unknown[0], where)
    extra, dropped = {**offered, **from_phase} if takes_extra else {}, []
    # Each pass drops one argument. The signature is no help: `optax.chain` accepts any argument and passes it to all of
    # its parts.
    while True:
        try:
            with noting_optimizer("update", arguments[0]):
                return optimizer.update(*arguments, **extra)
        except (TypeError, ValueError) as error:
            # A TypeError may also come from the body of the optimizer. It then names none of these arguments and is
            # raised again.
            refused = [name for name in _refused_by(error) if name in extra]
            if refused:
                if refused[0] in unknown:
                    raise _refused(refused[0], where) from error
                dropped.append(refused[0])
                del extra[refused[0]]
                continue
            missing = [name for name in KNOWN if name not in extra and _asks_for(name, error)]
            # Wrappers such as `optax.MultiSteps` do not pass extra arguments on, although the optimizer inside needs
            # them.
            if missing and not takes_extra:
                raise _not_passed_on(missing[0], where) from error
            if missing:
                raise _missing(missing[0], dropped, where) from error
            raise


def _refused_by(error: Exception) -> list[str]:
    """Return the arguments that an error reports as not accepted: an error of Python or of Optax's line searches."""
    text = str(error)
    # The exceptions of Python and Optax name the argument only in their messages.
    names = re.search(r"unexpected keyword argument ('\w+')|not consumed by `value_fn`: \[(.*)\]", text)
    return re.findall(r"'(\w+)'", names[0]) if names else []


def _asks_for(name: str, error: Exception) -> bool:
    """Return whether an error reports a missing argument: an error of Python or of `optax.contrib.sam`."""
    text = str(error)
    return bool(re.search(rf"\bmissing \d+ required .*'{name}'|^{name} must be provided", text))


def _refused(name: str, where: str) -> TraceError:
    return TraceError(
        f"`learner.update(..., {name}=...)` passes an argument that the optimizer does not take.",
        where=where,
        why=f"only {', '.join(f'`{known}`' for known in KNOWN)} may be passed to every optimizer",
        fix=f"leave `{name}` out, or use an optimizer whose `update` takes it",
    )


def _not_passed_on(name: str, where: str) -> TraceError:
    return TraceError(
        f"A part of the optimizer needs `{name}`, and the transformation around it does not take extra arguments.",
        where=where,
        why="only an `optax.GradientTransformationExtraArgs` gets extra arguments",
        fix="write `optax.GradientTransformationExtraArgs(optimizer.init, optimizer.update)`, where `optimizer` is, "
        "e.g., an `optax.MultiSteps`",
    )


def _missing(name: str, dropped: list[str], where: str) -> TraceError:
    if name in dropped:
        return TraceError(
            f"One part of the optimizer needs `{name}`, and another part does not accept it.",
            where=where,
            why="`optax.chain` passes the same extra arguments to all of its parts",
            fix="combine parts that take the same extra arguments, or leave one of the two out",
        )
    return TraceError(
        f"The optimizer needs `{name}`, and the phase does not provide it.",
        where=where,
        why=f"its `update` takes `{name}` as an extra argument",
        fix=[_SOURCES[name], f"pass it: `learner.update(grads, {name}=...)`"],
    )
