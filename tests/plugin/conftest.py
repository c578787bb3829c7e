"""Fixtures that run pytest with the plugin on small projects, in the same process if possible."""

import shutil
from importlib.metadata import entry_points
from pathlib import Path

import pytest

# A project of its own, with sets that are broken on purpose.
collect_ignore = ["sample"]

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = any(entry.name == "fluxcb" for entry in entry_points(group="pytest11"))


SAMPLE = Path(__file__).parent / "sample"
# An entry point is found by its name if fluxcb is installed.
PLUGIN = "fluxcb" if INSTALLED else "fluxcb._tools.pytest_plugin"


def alone(monkeypatch):
    """Let the processes of a test find this fluxcb, and load only the plugins that they name.

    The other plugins of this environment would take most of the time of each run: hypothesis alone takes 0.6 s.
    """
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("CI", raising=False)  # there, pytest does not shorten its summary


@pytest.fixture
def project(pytester, monkeypatch):
    """Return a pytester in an empty folder that loads only the plugin of fluxcb."""
    alone(monkeypatch)
    pytester.plugins = [PLUGIN]
    return pytester


@pytest.fixture
def autoload(project, monkeypatch):
    """Let pytest find the plugin and all others by their entry points, as it does for users."""
    if INSTALLED:
        monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
        project.plugins = []


@pytest.fixture
def sample(project):
    """Return a pytester with the sample project."""
    shutil.copytree(SAMPLE, project.path, dirs_exist_ok=True)
    return project
