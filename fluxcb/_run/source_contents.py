"""What the code of a data source reads, to find whether the source yields other batches than before."""

from __future__ import annotations

import functools
import inspect
from types import FunctionType, MethodType
from typing import Any

from fluxcb._compile.field_contents import content_of, variables_of
from fluxcb._declare.signatures import names_in
from fluxcb.data.sources import FunctionSource, MappedSource, PlacedSource

__all__ = ["contents_of"]


def contents_of(source: Any) -> list[Any]:
    """Return the contents of the fields and variables that the code of a data source reads.

    The contents of a source that has not changed are equal. NumPy arrays are not copied, so a change in place is not
    found.
    """
    found: list[Any] = []
    parts = [source]
    for part in parts:  # grows in the loop
        if isinstance(part, FunctionSource):
            parts.append(part.function)
        elif isinstance(part, MappedSource):
            parts += [part.fn, part.source]
        elif isinstance(part, PlacedSource):
            parts.append(part.source)
        elif isinstance(part, functools.partial):
            parts.append(part.func)
            found += [content_of(v, _names(part.func), copies=False) for v in (*part.args, *part.keywords.values())]
        else:
            found.append(_content_of(part))
    return found


def _content_of(part: Any) -> Any:
    if isinstance(part, MethodType):
        return content_of(part.__self__, _names(part), copies=False)
    if isinstance(part, FunctionType):
        return {name: content_of(value, _names(part), copies=False) for name, value in variables_of(part).items()}
    return content_of(part, _names(getattr(type(part), "__iter__", None)), copies=False)


def _names(function: Any) -> set[str]:
    """Return the names of attributes and globals in the code of a function or method of Python."""
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    return names_in(code) if code is not None else set()
