"""`stopping_time`: when a criterion would have stopped."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat, zip_longest

from fluxcb._calls import entry_point
from fluxcb._errors import DeclarationError
from fluxcb.stopping.criterion import Criterion, State

__all__ = ["stopping_time"]

_MISSING = object()


@entry_point
def stopping_time(criterion: Criterion, losses: Iterable[float], is_training: Iterable[bool] | None = None) -> int:
    """Return the number of the out-of-sample loss (counted from 1) at which a criterion stops, or 0 if it does not.

    Args:
        criterion: The criterion.
        losses: The losses, in order.
        is_training: For each loss, whether it is a training loss. By default, no loss is.

    Raises:
        DeclarationError: `criterion` is not a criterion, or the two lists differ in length.

    Example:
        >>> from fluxcb.stopping import InvalidValue
        >>> stopping_time(InvalidValue(), [10.0, 3.0, float("nan"), 4.0])
        3
        >>> stopping_time(InvalidValue(), [10.0, 3.0, float("nan"), 4.0], [True, False, True, False])
        1

    Source:
        EarlyStopping.jl, `stopping_time`.
    """
    if not isinstance(criterion, Criterion):
        raise DeclarationError(
            f"`stopping_time` takes a criterion, not {criterion!r}.", fix="write e.g. `NumberSinceBest(3)`"
        )
    if not isinstance(losses, Iterable):
        raise DeclarationError(
            f"`stopping_time` takes a list of losses, not {losses!r}.", fix="write e.g. `[3.0, 2.0, 2.5]`"
        )
    state: State = None
    validations = 0
    pairs = zip(losses, repeat(False)) if is_training is None else zip_longest(losses, is_training, fillvalue=_MISSING)
    for loss, training in pairs:
        if loss is _MISSING or training is _MISSING:
            raise DeclarationError("`losses` and `is_training` differ in length.", fix="give one bool per loss")
        validations += not training
        state = criterion.update(state, loss, bool(training))  # pyright: ignore[reportArgumentType]  # the filler is refused above
        if criterion.done(state):
            return validations
    return 0
