"""The module that a command or the pytest plugin imports to find a set of callbacks. No training may start in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from fluxcb._errors import DeclarationError

__all__ = ["FitWhileImportingError", "importing", "refuse_while_importing"]

_MODULE: ContextVar[str | None] = ContextVar("importing", default=None)


class FitWhileImportingError(DeclarationError):
    """A module that is imported only to find a set of callbacks calls `fit`."""


@contextlib.contextmanager
def importing(module: str) -> Iterator[None]:
    """Make `refuse_while_importing` raise an error.

    Args:
        module: The name of the module that is imported.
    """
    token = _MODULE.set(module)
    try:
        yield
    finally:
        _MODULE.reset(token)


def refuse_while_importing() -> None:
    """Raise an error if a module is imported only to find a set of callbacks.

    Without the error, `fluxcb check` would train for hours and print nothing, and `fluxcb replay` would continue the
    run that it should read.

    Raises:
        FitWhileImportingError: Such a module is imported.
    """
    module = _MODULE.get()
    if module is not None:
        raise FitWhileImportingError(
            f"`{module}` calls `fit` when it is imported.",
            why="the commands of fluxcb and its pytest plugin import the module of a set, and would train each time",
            fix='put the call under `if __name__ == "__main__":`',
        )
