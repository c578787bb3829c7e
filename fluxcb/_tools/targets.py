"""Callback sets by name: `module:name` stands for a list of callbacks, a Learner, or a function that returns one."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fluxcb._declare.callback import Callback
from fluxcb._declare.dispatch import shown_path, source_of
from fluxcb._errors import DeclarationError, FluxcbError, did_you_mean

if TYPE_CHECKING:
    from typing import TypeGuard

    from fluxcb._run.learner import Learner

__all__ = ["Target", "is_learner", "load"]

_KINDS = "a list of callbacks, a Learner, or a function without required arguments that returns one"


@dataclass(frozen=True)
class Target:
    """A callback set that was found.

    Attributes:
        name: `module:name`.
        get: Returns the list of callbacks, or the Learner.
        makes: Whether `get` makes new ones each time.
    """

    name: str
    get: Callable[[], Any]
    makes: bool


def is_learner(value: Any) -> TypeGuard[Learner]:
    """Tell whether something is a Learner, without importing what makes them."""
    module = sys.modules.get("fluxcb._run.learner")
    return module is not None and isinstance(value, module.Learner)


def load(name: str, root: Path) -> Target:
    """Import a callback set.

    Args:
        name: `module:name`; the name may have dots.
        root: The folder to import from; beside it, its `src` folder if there is one.

    Raises:
        DeclarationError: There is no such thing, it cannot be imported, or it is something else.
        FluxcbError: What importing the module raised.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise DeclarationError(
            f"{name!r} does not name a callback set.", fix="write `module:name`, e.g. `pkg.train:callbacks`"
        )
    for folder in (root / "src", root):
        if folder.is_dir() and str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    importlib.invalidate_caches()  # a long-lived process may have made the file a moment ago
    module = _guarded(lambda: importlib.import_module(module_name), f"`{module_name}` cannot be imported")
    value: Any = module
    held = module_name
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise DeclarationError(
                f"`{held}` has no `{part}`.{did_you_mean(part, [n for n in vars(value) if not n.startswith('_')])}",
                where=shown_path(getattr(module, "__file__", None) or module_name),
            )
        value = getattr(value, part)
        held += f"{':' if held == module_name else '.'}{part}"
    return _target(name, value)


def _target(name: str, value: Any) -> Target:
    if is_learner(value):
        return Target(name, lambda: value, makes=False)
    if callable(value) and not isinstance(value, type | Callback):
        needed = [
            parameter.name
            for parameter in inspect.signature(value).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        if needed:
            raise DeclarationError(
                f"`{name}` needs arguments: {', '.join(needed)}.",
                where=source_of(inspect.unwrap(value)),
                why="nobody is there to give them when the set is checked",
                fix="declare a function without required arguments that calls it",
            )
        return Target(name, lambda: _checked(name, _guarded(value, f"`{name}` cannot be called")), makes=True)
    value = _checked(name, value)
    return Target(name, lambda: value, makes=False)


def _checked(name: str, value: Any) -> Any:
    """Return a Learner or a list; what is in the list is for the check to judge."""
    if is_learner(value):
        return value
    if isinstance(value, Iterable) and not isinstance(value, Callback | Mapping | str | bytes | type):
        return list(value)
    shown = f"the class {value.__name__}" if isinstance(value, type) else repr(value)
    alone = isinstance(value, Callback) or (isinstance(value, type) and issubclass(value, Callback))
    raise DeclarationError(
        f"`{name}` is {shown}, which is no callback set.",
        fix="put it into a list: `callbacks = [...]`" if alone else f"name {_KINDS}",
    )


def _guarded(call: Callable[[], Any], what: str) -> Any:
    """Call code of the user's; what it raises is told with the place, without the frames of those who called it."""
    try:
        return call()
    except FluxcbError:
        raise
    except (Exception, SystemExit) as error:
        raise DeclarationError(
            f"{what}: {_said(error)}.", where=_own_frames(error), fix=_import_fix(error) or ()
        ) from error


def _said(error: BaseException) -> str:
    text = str(error).strip().rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _own_frames(error: BaseException) -> list[str]:
    """Return where the user's code was when it failed, innermost first."""
    if isinstance(error, SyntaxError) and error.filename:
        return [f"{shown_path(error.filename)}:{error.lineno}"]
    frames = [
        f"{frame.name}  {shown_path(frame.filename)}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen ") and Path(frame.filename) not in _OWN
    ]
    return frames[::-1][:3]


_OWN = {Path(__file__), Path(importlib.__file__)}


def _import_fix(error: BaseException) -> str | None:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"install what provides `{error.name}`, or correct the name; the project's root is looked in, too"
    return None
