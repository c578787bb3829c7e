"""The parts of a batch: the inputs of the model, and the targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fluxcb._declare.losses import TARGET_NAMES
from fluxcb._errors import DeclarationError

__all__ = ["BatchParts"]


@dataclass(frozen=True)
class BatchParts:
    """Splits batches into inputs and targets.

    Without functions, a pair is `(inputs, targets)`, and any other batch consists of inputs only. A named tuple whose
    names say that the targets come first is an error.

    Args:
        inputs: Returns the inputs of a batch, or None for the default.
        targets: Returns the targets of a batch, or None for the default.
    """

    inputs: Callable[[Any], Any] | None = None
    targets: Callable[[Any], Any] | None = None

    def __call__(self, batch: Any) -> tuple[Any, Any]:
        """Return `(inputs, targets)`. The targets are None if they are not known.

        Raises:
            DeclarationError: The first of two named entries is named as targets.
        """
        pair = isinstance(batch, tuple | list) and len(batch) == 2
        if pair and self.inputs is None:
            _check_names(batch)
        xs, ys = batch if pair else (batch, None)
        if self.inputs is not None:
            xs = self.inputs(batch)
        if self.targets is not None:
            ys = self.targets(batch)
        return xs, ys

    def inputs_of(self, batch: Any) -> Any:
        """Return the inputs of a batch, which may have no targets."""
        if self.inputs is not None:
            return self.inputs(batch)
        return BatchParts()(batch)[0]


def _check_names(pair: Any) -> None:
    """Check that the names of a named tuple do not contradict its order.

    Raises:
        DeclarationError: They do.
    """
    first, second = getattr(pair, "_fields", ("", ""))
    if first in TARGET_NAMES and second not in TARGET_NAMES:
        raise DeclarationError(
            f"The first entry of a batch `{type(pair).__name__}` is `{first}`, and fluxcb takes the first of two "
            "entries as the inputs.",
            fix=f"write `inputs=lambda batch: batch.{second}` and `targets=lambda batch: batch.{first}`",
        )
