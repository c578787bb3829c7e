"""The plugin is tested by running pytest on small projects, in the same process where that is enough."""

import shutil
from importlib.metadata import entry_points
from pathlib import Path

import pytest

# A project of its own, with sets that are broken on purpose.
collect_ignore = ["sample"]

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = any(entry.name == "fluxcb" for entry in entry_points(group="pytest11"))


@pytest.fixture
def project(pytester, monkeypatch):
    """Return a pytester in an empty folder; where fluxcb was never installed, the plugin is named to pytest."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("CI", raising=False)  # there, pytest does not shorten its summary
    pytester.plugins = [] if INSTALLED else ["fluxcb._tools.pytest_plugin"]
    return pytester


@pytest.fixture
def sample(project):
    """The same, with the sample project in it."""
    shutil.copytree(Path(__file__).parent / "sample", project.path, dirs_exist_ok=True)
    return project
