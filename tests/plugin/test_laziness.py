"""The modules that the plugin imports in a pytest run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"jax", "jaxlib", "networkx", "numpy", "optax", "orbax", "rich"}

# A plugin that notes what is loaded when the session ends.
PROBE = """
import json, sys
def pytest_unconfigure(config):
    loaded = sorted({name.split(".")[0] for name in sys.modules})
    open("loaded.json", "w").write(json.dumps(loaded))
"""


def loaded_by_pytest(folder, *arguments):
    (folder / "probe.py").write_text(PROBE)
    (folder / "test_empty.py").write_text("def test_a(): pass")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "probe", "-p", "fluxcb", *arguments],
        cwd=folder,
        # No other plugin of this environment is loaded, which may import what it likes.
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return set(json.loads((folder / "loaded.json").read_text()))


@pytest.fixture(autouse=True)
def _only_if_installed():
    from importlib.metadata import entry_points

    if not any(entry.name == "fluxcb" for entry in entry_points(group="pytest11")):
        pytest.skip("`-p fluxcb` names an entry point, which only an installed package has")


def test_no_heavy_imports_without_sets(tmp_path):
    loaded = loaded_by_pytest(tmp_path)
    assert "fluxcb" in loaded
    assert not loaded & HEAVY


def test_no_heavy_imports_while_collecting(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.fluxcb]\ncallbacks = ["kit:callbacks"]\n')
    assert not loaded_by_pytest(tmp_path, "--collect-only") & HEAVY


def test_checking_graph_does_not_import_jax(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.fluxcb]\ncallbacks = ["kit:callbacks"]\n')
    (tmp_path / "kit.py").write_text("from fluxcb.callbacks import Recorder\ncallbacks = [Recorder()]\n")
    assert not loaded_by_pytest(tmp_path) & {"jax", "jaxlib", "optax", "orbax"}


def test_import_probe_detects_imports(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.fluxcb]\ncallbacks = ["kit:callbacks"]\n')
    (tmp_path / "kit.py").write_text(
        "import networkx\nfrom fluxcb.callbacks import Recorder\ncallbacks = [Recorder()]\n"
    )
    assert "networkx" in loaded_by_pytest(tmp_path) & HEAVY
    (tmp_path / "conftest.py").write_text("import jax\n")
    assert {"jax", "numpy"} <= loaded_by_pytest(tmp_path)
