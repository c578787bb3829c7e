"""Callback sets by name. `module:name` is a list of callbacks, a Learner, or a function that returns one of these."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from fluxcb._declare.callback import Callback
from fluxcb._declare.signatures import shown_path, source_of
from fluxcb._errors import DeclarationError, FluxcbError, as_sentence, did_you_mean, nearest
from fluxcb._importing import FitWhileImportingError, importing
from fluxcb._run.check import is_learner
from fluxcb._tools.project import find_project

__all__ = ["Target", "load"]

_KINDS = "a list of callbacks, a Learner, or a function without required arguments that returns one"


@dataclass(frozen=True)
class Target:
    """A callback set that was found.

    Attributes:
        name: `module:name`.
        get: Returns the list of callbacks, or the Learner. If `makes` is true, arguments are passed to the function.
        makes: Whether `get` returns new objects each time.
    """

    name: str
    get: Callable[..., Any]
    makes: bool


def load(name: str, root: Path) -> Target:
    """Import a callback set.

    Args:
        name: `module:name`. The name may have dots.
        root: The folder to import from, together with its `src` folder if there is one.

    Raises:
        DeclarationError: The set does not exist, cannot be imported, or is something else.
        FluxcbError: An error that importing the module raised.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        sets = [known for known in find_project(root).sets if known != name]
        module, _, last = name.rpartition(".")
        literal = f"{module}:{last}" if module and last else ""
        of_module = [known for known in sets if known.startswith(f"{name}:")]
        instead = literal if literal in sets else next(iter(of_module), "") or nearest(name, sets) or literal
        raise DeclarationError(
            f"{name!r} does not name a callback set.",
            fix=f"write `{instead}`" if instead else "write `module:name`, e.g. `pkg.train:callbacks`",
        )
    for folder in (root / "src", root):
        if folder.is_dir() and str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    importlib.invalidate_caches()  # a long-lived process may have created the file a moment ago
    try:
        with importing(module_name):
            module = _guarded(lambda: importlib.import_module(module_name), f"`{module_name}` cannot be imported")
    except FitWhileImportingError as error:
        raise DeclarationError(error.what, where=_own_frames(error), why=error.why, fix=error.fix) from None
    except DeclarationError as error:
        cause = error.__cause__
        missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
        near = _nearest_module(module_name, (root / "src", root))
        if missing is None or not near or not f"{module_name}.".startswith(f"{missing}."):
            raise
        raise DeclarationError(
            f"There is no module `{module_name}`. Did you mean `{near}`?",
            where=shown_path(str(root)),
            fix=f"write `{near}:{attribute}`",
        ) from cause
    value: Any = module
    found_name = module_name
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise DeclarationError(
                f"`{found_name}` has no `{part}`.{did_you_mean(part, _possible_sets(value, module.__name__))}",
                where=shown_path(getattr(module, "__file__", None) or module_name),
            )
        value = getattr(value, part)
        found_name += f"{':' if found_name == module_name else '.'}{part}"
    return _target(name, value)


def _possible_sets(namespace: Any, module_name: str) -> list[str]:
    """Return the names in a module or class that can be sets or contain sets, without imported classes and modules."""
    return [
        name
        for name, value in vars(namespace).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and not (isinstance(value, type) and value.__module__ != module_name)
    ]


def _nearest_module(name: str, folders: Iterable[Path]) -> str:
    """Return the name of a module in the folders that is similar to a name, or an empty string."""
    found: list[str] = []
    paths = list(map(str, folders))
    for part in name.removesuffix(".py").replace("/", ".").split("."):
        near = nearest(part, [module.name for module in pkgutil.iter_modules(paths)])
        if not near:
            return ""
        found.append(near)
        paths = [str(Path(path, near)) for path in paths]
    return ".".join(found)


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
                why="fluxcb calls it without arguments when it checks the set",
                fix="declare a function without required arguments that calls it",
            )

        def get(*arguments: Any) -> Any:
            return _checked(name, _guarded(lambda: value(*arguments), f"`{name}` cannot be called"))

        return Target(name, get, makes=True)
    value = _checked(name, value)
    return Target(name, lambda: value, makes=False)


def _checked(name: str, value: Any) -> Any:
    """Return a value that is a Learner or a list. The members of a list are checked later."""
    if is_learner(value):
        return value
    if isinstance(value, Iterable) and not isinstance(value, Callback | Mapping | str | bytes | type):
        return list(value)
    shown = f"the class {value.__name__}" if isinstance(value, type) else repr(value)
    alone = isinstance(value, Callback) or (isinstance(value, type) and issubclass(value, Callback))
    raise DeclarationError(
        f"`{name}` is {shown}, which is not a callback set.",
        fix="put it into a list: `callbacks = [...]`" if alone else f"name {_KINDS}",
    )


def _guarded(call: Callable[[], Any], what: str) -> Any:
    """Call the user's code. Report its exceptions with their location, without the frames of fluxcb."""
    try:
        return call()
    except FluxcbError:
        raise
    except (Exception, SystemExit) as error:
        raise DeclarationError(
            as_sentence(f"{what}: {_error_text(error)}"), where=_own_frames(error), fix=_import_fix(error) or ()
        ) from error


def _error_text(error: BaseException) -> str:
    text = str(error).strip().rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _own_frames(error: BaseException) -> list[str]:
    """Return the lines of the user's code in the traceback of an error, innermost first."""
    if isinstance(error, SyntaxError) and error.filename:
        return [f"{shown_path(error.filename)}:{error.lineno}"]
    frames = [
        f"{frame.name}  {shown_path(frame.filename)}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen ", _PACKAGE)) and Path(frame.filename) != _IMPORTLIB
    ]
    return frames[::-1][:3]


_IMPORTLIB = Path(importlib.__file__)
_PACKAGE = str(Path(__file__).parents[1])


def _import_fix(error: BaseException) -> str | None:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return (
            f"install the package that provides `{error.name}`, or correct the name; fluxcb also searches the "
            "project's root"
        )
    return None
