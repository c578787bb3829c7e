"""Every public name can be imported, is listed, and is documented."""

import importlib
import inspect
import json
import os
import subprocess
import sys
import typing
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fluxcb"


def public_modules(package: Path) -> list[str]:
    """Return the package, and its top-level modules and folders without a leading underscore."""
    tops = {path.stem for path in package.glob("*.py")} | {path.parent.name for path in package.glob("*/__init__.py")}
    return [package.name, *sorted(f"{package.name}.{top}" for top in tops if not top.startswith("_"))]


# Those that the design names, and those that are there: neither a lost one nor a new one goes unnoticed.
NAMED = ["fluxcb", *(f"fluxcb.{name}" for name in ("callbacks", "data", "events", "models", "phases", "testing"))]
MODULES = sorted({*NAMED, *public_modules(PACKAGE)})


def complaints(module: ModuleType) -> list[str]:
    """Return the problems with the public names of a module, one per line."""
    if not hasattr(module, "__all__"):
        return [f"{module.__name__} has no __all__"]
    found = []
    if not (module.__doc__ or "").strip():
        found.append(f"{module.__name__} has no docstring")
    if len(set(module.__all__)) != len(module.__all__):
        found.append(f"{module.__name__}.__all__ names something twice")
    for name in module.__all__:
        where = f"{module.__name__}.{name}"
        try:
            value = getattr(module, name)
        except (AttributeError, ImportError) as error:
            found.append(f"{where} cannot be imported: {error}")
            continue
        if name.startswith("_") and not name.endswith("__"):
            found.append(f"{where} is private by its name")
        text = documentation(value)
        if text is not None and not text.strip():
            found.append(f"{where} has no docstring")
        elif text is not None and not text.strip().splitlines()[0].endswith("."):
            found.append(f"{where}: the first line of its docstring does not end with a period")
    return found


def documentation(value: object) -> str | None:
    """Return the docstring of a class, function or module, or None for other values."""
    if inspect.isclass(value):
        # Its own, not a base's, nor the signature that dataclasses write when there is none.
        text = vars(value).get("__doc__") or ""
        return "" if text.startswith(f"{value.__name__}(") else inspect.cleandoc(text)
    if inspect.ismodule(value) or (callable(value) and typing.get_origin(value) is None):
        return inspect.getdoc(value) or ""
    return None


def unlisted(package: str, root: Path) -> list[str]:
    """Return the names of `__all__` that `dir` does not list in a new interpreter before first use."""
    code = f"import json, {package} as p; print(json.dumps(sorted(set(p.__all__) - set(dir(p)))))"
    env = {**os.environ, "PYTHONPATH": str(root)}
    run = subprocess.run([sys.executable, "-c", code], cwd=root, env=env, capture_output=True)
    assert run.returncode == 0, run.stderr.decode()
    return json.loads(run.stdout)


@pytest.mark.parametrize("name", MODULES)
def test_public_names_are_importable_and_documented(name):
    found = complaints(importlib.import_module(name))
    assert not found, "\n".join(found)


def test_dir_lists_every_public_name_before_first_use():
    assert unlisted("fluxcb", ROOT) == []


def test_no_public_name_is_removed():
    """Names may be added. Removing or renaming one breaks the code of users."""
    names = (ROOT / "tests" / "public_names.txt").read_text().split()
    homes = {name: importlib.import_module(name.rpartition(".")[0]) for name in names}
    assert [name for name, home in homes.items() if name.rpartition(".")[2] not in home.__all__] == []


def test_every_event_of_loop_is_public():
    declared = importlib.import_module("fluxcb._declare.events")
    events = importlib.import_module("fluxcb.events")
    assert [e for e in declared.BUILTIN_EVENTS if getattr(events, e.__name__, None) is not e] == []


def test_unknown_name_raises_attribute_error():
    fluxcb = importlib.import_module("fluxcb")
    with pytest.raises(AttributeError, match="no_such_name"):
        fluxcb.no_such_name  # noqa: B018 - the access is the test


# --- the checks themselves, on a small package ----------------------------------------------------------------------

SAMPLE = '''
"""A package."""
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable

__all__ = ["Alias", "Bare", "Base", "Child", "Data", "NUMBER", "_private", "bound", "f", "g", "gone", "gone", "lazy"]
NUMBER = 3
Alias = Callable[..., Any]

class Base:
    """Do something."""

class Child(Base):
    pass

class Bare:
    """
    Do something
    else."""

@dataclass
class Data:
    x: int

def f():
    """Do something."""

def g(): ...

def _private():
    """Do something."""

bound = partial(f)

def __getattr__(name):
    if name == "lazy":
        return f
    raise AttributeError(f"sample has no {name}")
'''


@pytest.fixture
def sample(tmp_path, monkeypatch):
    name = "sample_of_names"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(SAMPLE)
    for file in ("_inner.py", "tools.py", "__main__.py"):
        (tmp_path / name / file).write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module(name)
    del sys.modules[name]


def test_each_fault_is_found(sample):
    assert complaints(sample) == [
        "sample_of_names.__all__ names something twice",
        "sample_of_names.Bare: the first line of its docstring does not end with a period",
        "sample_of_names.Child has no docstring",
        "sample_of_names.Data has no docstring",
        "sample_of_names._private is private by its name",
        "sample_of_names.bound: the first line of its docstring does not end with a period",
        "sample_of_names.g has no docstring",
        "sample_of_names.gone cannot be imported: sample has no gone",
        "sample_of_names.gone cannot be imported: sample has no gone",
    ]
    assert complaints(ModuleType("empty")) == ["empty has no __all__"]


def test_names_missing_from_dir_are_found(sample, tmp_path):
    assert unlisted("sample_of_names", tmp_path) == ["gone", "lazy"]


def test_public_modules_are_read_from_folder(sample, tmp_path):
    assert public_modules(tmp_path / "sample_of_names") == ["sample_of_names", "sample_of_names.tools"]


@pytest.mark.parametrize(
    ("name", "place"),
    [("Metrics", "callbacks"), ("ArrayLoader", "data"), ("EpochEnd", "events"), ("load_model", "checkpoints")],
)
def test_name_of_a_submodule_has_a_hint_with_its_place(name, place):
    import fluxcb

    with pytest.raises(AttributeError) as raised:
        getattr(fluxcb, name)
    assert str(raised.value) == f"module 'fluxcb' has no attribute '{name}'. Write `fluxcb.{place}.{name}`."
    assert hasattr(getattr(fluxcb, place), name)
    assert not hasattr(fluxcb, "no_such_name")
