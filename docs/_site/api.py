"""The directive `{api}`: the reference of public names, made from their docstrings.

    ```{api} fluxcb.callbacks
    ClipGradients
    GradientNoise
    ```

On GitHub, the fence is a readable list of names. A test reads these lists and finds public names that none of them has.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective
from sphinx.util.inspect import signature as sphinx_signature
from sphinx.util.inspect import stringify_signature

from fluxcb import Callback
from fluxcb._declare.handlers import is_handler


class Api(SphinxDirective):
    """Document names of a module at the path under which users import them."""

    has_content = True
    required_arguments = 1  # the module

    def run(self) -> list[nodes.Node]:
        module = self.arguments[0]
        names = [line.strip() for line in self.content if line.strip()]
        text = "\n\n".join(directive(module, name) for name in names)
        # The fence is longer than any fence in the generated text can be.
        return self.parse_text_to_nodes(f"``````{{eval-rst}}\n.. currentmodule:: {module}\n\n{text}\n``````")


def directive(module: str, name: str) -> str:
    """Return the autodoc directive of one public name."""
    value = getattr(importlib.import_module(module), name)
    if not inspect.isclass(value):
        return f".. autofunction:: {name}" if inspect.isroutine(value) else f".. autodata:: {name}\n   :no-value:"
    members = ", ".join(members_of(value))
    kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
    return f".. {kind}:: {name}" + (f"\n   :members: {members}" if members else "")


def add_signature(app: Any, what: str, name: str, obj: Any, options: Any, signature: Any, returns: Any) -> Any:
    """Return the signature of a class from its `__init__`; autodoc calls this.

    Public classes have a `__new__` that explains wrong arguments, and autodoc would show the signature of that.
    """
    is_own = what in ("class", "exception") and (getattr(obj.__init__, "__module__", None) or "").startswith("fluxcb")
    if not is_own:
        return None
    found = sphinx_signature(obj.__init__, bound_method=True)
    found = found.replace(parameters=[p.replace(default=_shown(p.default)) for p in found.parameters.values()])
    return stringify_signature(found, show_return_annotation=False, unqualified_typehints=True), returns


class _Name:
    """A default value that is shown by its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


def _shown(default: Any) -> Any:
    if default is inspect.Parameter.empty or not repr(default).startswith("<"):
        return default
    return _Name(getattr(default, "__name__", "..."))


def members_of(cls: type) -> Iterator[str]:
    """Yield the names of the methods and properties that the reference of a class shows.

    They include those of private base classes, because users see these as methods of the class itself. They exclude
    those of public base classes, which have their own entry. A callback's handlers and declarations are excluded too:
    the sections Access and Runs of its docstring say the same.
    """
    seen: set[str] = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("fluxcb") or (base is not cls and _is_public(base)):
            continue
        for name, value in vars(base).items():
            if name in seen or name.startswith("_") or not _is_documented(value):
                continue
            seen.add(name)
            if issubclass(cls, Callback) and cls is not Callback and (is_handler(value) or hasattr(Callback, name)):
                continue
            yield name


def _is_public(base: type) -> bool:
    return any(getattr(importlib.import_module(module), base.__name__, None) is base for module in PUBLIC)


def _is_documented(value: Any) -> bool:
    function = getattr(value, "__func__", value)  # of a class method or static method
    is_member = inspect.isfunction(function) or isinstance(value, property) or hasattr(value, "__wrapped__")
    return is_member and bool(getattr(value, "__doc__", None))


PUBLIC = [
    "fluxcb",
    *(
        f"fluxcb.{name}"
        for name in (
            *("callbacks", "checkpoints", "data", "events", "logging"),
            *("models", "phases", "plots", "stopping", "testing"),
        )
    ),
]
