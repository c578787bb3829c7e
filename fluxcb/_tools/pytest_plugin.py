"""The pytest plugin: each callback set that `[tool.fluxcb]` in pyproject.toml declares is a test.

It imports neither JAX nor networkx, nor the rest of fluxcb, before there is something to check: every pytest run in an
environment that has fluxcb loads it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fluxcb._tools.project import LEVELS

__all__ = ["FluxcbWarning"]


class FluxcbWarning(UserWarning):
    """Something about a callback set that is worth knowing, and not wrong."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("fluxcb")
    group.addoption("--no-fluxcb", action="store_true", help="do not check the callback sets of [tool.fluxcb]")
    group.addoption(
        "--fluxcb-level",
        choices=LEVELS,
        help="check the graph, or also a dry run of the step, or also two real steps (default: as in pyproject.toml)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and have the project's pyproject.toml visited."""
    config.addinivalue_line("markers", "fluxcb: a callback set, declared in [tool.fluxcb] of pyproject.toml")
    file = config.rootpath / "pyproject.toml"
    # With `testpaths`, nothing else would lead pytest to the root's own file.
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and _concerns(file, config):
        covered = any(file.is_relative_to(config.rootpath / argument) for argument in config.args)
        if not covered:
            config.args.append(str(file))


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect a pyproject.toml that declares callback sets."""
    if file_path.name == "pyproject.toml" and _concerns(file_path, parent.config):
        return SetsFile.from_parent(parent, path=file_path)
    return None


def _concerns(file: Path, config: pytest.Config) -> bool:
    """Tell whether a pyproject.toml has something for us; most have not, and are not worth a TOML parser."""
    return not config.getoption("no_fluxcb") and file.is_file() and b"tool.fluxcb" in file.read_bytes()


class SetsFile(pytest.File):
    """A pyproject.toml that declares callback sets."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield an item per set, in the order of the file."""
        from fluxcb._errors import FluxcbError
        from fluxcb._tools.project import read_project

        try:
            project = read_project(self.path)
        except FluxcbError as error:
            raise self.CollectError(str(error)) from error
        if project is None:
            return
        if not project.sets:
            raise self.CollectError(
                f"[tool.fluxcb] in {self.path.name} declares no callback sets.\n"
                '  fix:   add e.g. `callbacks = ["pkg.train:callbacks"]`'
            )
        level = self.config.getoption("fluxcb_level") or project.level
        for name in project.sets:
            yield SetItem.from_parent(self, name=name, root=project.root, level=level)


class SetItem(pytest.Item):
    """A callback set.

    Args:
        root: The folder to import it from.
        level: How thoroughly to check it.
        **kwargs: What every item has.
    """

    def __init__(self, *, root: Path, level: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root, self.level = root, level
        self.add_marker("fluxcb")

    def runtest(self) -> None:
        """Check the set."""
        from fluxcb._tools.verifying import verify

        verdict = verify(self.name, self.root, self.level)
        self.user_properties.append(("fluxcb", json.dumps(verdict.to_json())))
        if verdict.unclear:
            self.add_report_section("call", "fluxcb", "\n".join(verdict.unclear))
        if not verdict.problems:
            for advice in verdict.advice:
                self.warn(FluxcbWarning(advice))
        if verdict.problems:
            raise BrokenSetError(verdict.text())

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return what is wrong with the set, without frames that are not the user's."""
        if isinstance(excinfo.value, BrokenSetError | FluxcbWarning):  # warnings may be errors
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Return where the set is declared, and its heading."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        line = next((number for number, text in enumerate(lines) if f'"{self.name}"' in text), 0)
        return self.path, line, f"callback set {self.name}"


class BrokenSetError(Exception):
    """A callback set is not valid."""


def pytest_assertrepr_compare(config: pytest.Config, op: str, left: object, right: object) -> list[str] | None:
    """Explain how two callback graphs differ."""
    del config
    if op != "==" or "fluxcb._check.graph" not in sys.modules:
        return None
    from fluxcb._check.comparing import differences
    from fluxcb._check.graph import CallbackGraph

    if not (isinstance(left, CallbackGraph) and isinstance(right, CallbackGraph)):
        return None
    return differences(left, right)


# -- fixtures ----------------------------------------------------------------------------------


@pytest.fixture
def fluxcb_check() -> Callable[..., Any]:
    """Assert that a list of callbacks fits together, and return its graph: `fluxcb.testing.assert_valid_graph`."""
    from fluxcb.testing import assert_valid_graph

    return assert_valid_graph


@pytest.fixture
def fluxcb_learner() -> Callable[..., Any]:
    """Build a small Learner with given callbacks: `fluxcb.testing.testlearner`."""
    from fluxcb.testing import testlearner

    return testlearner


@pytest.fixture
def fluxcb_events() -> Any:
    """A callback that records every host event: a fresh `fluxcb.testing.EventLog`."""
    from fluxcb.testing import EventLog

    return EventLog()
