"""Importing optional libraries, each of which is installed by an extra of fluxcb."""

from __future__ import annotations

import importlib
from typing import Any

from fluxcb._errors import DeclarationError

__all__ = ["library"]


def library(name: str, *, extra: str, owner: str) -> Any:
    """Import an optional library.

    Args:
        name: The module.
        extra: The extra of fluxcb that installs it.
        owner: The class that needs it, for the message.

    Raises:
        DeclarationError: The library is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.split(".")[0]
        if error.name is not None and error.name.split(".")[0] != package:
            raise  # the library is installed, but one of its own dependencies is not
        raise DeclarationError(
            f"`{owner}` needs the package `{package}`, which is not installed.", fix=f"`pip install 'fluxcb[{extra}]'`"
        ) from None
