"""The pytest plugin, which turns each callback set of `[tool.fluxcb]` in pyproject.toml into a test.

Every pytest run in an environment with fluxcb loads this plugin. It therefore imports neither JAX nor networkx nor the
rest of fluxcb until there is a set to check.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fluxcb._tools.project import LEVELS, has_table

__all__ = ["FluxcbWarning"]


class FluxcbWarning(UserWarning):
    """Advice about a valid callback set."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the command-line options."""
    group = parser.getgroup("fluxcb")
    group.addoption("--no-fluxcb", action="store_true", help="do not check the callback sets of [tool.fluxcb]")
    group.addoption(
        "--fluxcb-level",
        choices=LEVELS,
        help="check the graph, or also a dry run of the step, or also two real steps (default: as in pyproject.toml)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and make pytest visit the project's pyproject.toml."""
    config.addinivalue_line("markers", "fluxcb: a callback set, declared in [tool.fluxcb] of pyproject.toml")
    file = config.rootpath / "pyproject.toml"
    # With `testpaths`, pytest would not visit the root directory's own file.
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and _concerns(file, config):
        covered = any(file.is_relative_to(config.rootpath / argument) for argument in config.args)
        if not covered:
            config.args.append(str(file))


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect a pyproject.toml that declares callback sets, if it is the project's own or named on the command line."""
    if (
        file_path.name == "pyproject.toml"
        and _is_chosen(file_path, parent.config)
        and _concerns(file_path, parent.config)
    ):
        return SetsFile.from_parent(parent, path=file_path)
    return None


def _concerns(file: Path, config: pytest.Config) -> bool:
    """Return whether a pyproject.toml declares callback sets. A file that cannot be read declares none."""
    if config.getoption("no_fluxcb"):
        return False
    try:
        return file.is_file() and has_table(file.read_bytes())
    except OSError:
        return False


def _is_chosen(file: Path, config: pytest.Config) -> bool:
    """Return whether a pyproject.toml is in the root directory, or it or its directory is an argument of pytest.

    Any other file belongs to a nested project, for example a vendored one, whose modules must not be imported.
    """
    arguments = (argument.partition("::")[0] for argument in config.args)
    chosen = {config.rootpath, *((config.invocation_params.dir / argument).resolve() for argument in arguments)}
    return file.parent in chosen or not chosen.isdisjoint((file.resolve(), file.resolve().parent))


class SetsFile(pytest.File):
    """A pyproject.toml that declares callback sets."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield one item per set, in the order of the file."""
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
    """The test of a callback set.

    Args:
        root: The folder from which the set is imported.
        level: How thoroughly the set is checked.
        **kwargs: The arguments of `pytest.Item`.
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
            # With a problem, the first advice says whether the small model of `testlearner` may have caused it.
            advice = f"\n\nadvice: {verdict.advice[0]}" if verdict.in_testlearner else ""
            raise BrokenSetError(verdict.text() + advice)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the problems of the set, with frames of the user's code only."""
        if isinstance(excinfo.value, BrokenSetError | FluxcbWarning):  # a pytest option can turn warnings into errors
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Return the location of the declaration, and the heading."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        line = next((number for number, text in enumerate(lines) if f'"{self.name}"' in text), 0)
        return self.path, line, f"callback set {self.name}"


class BrokenSetError(Exception):
    """A callback set is invalid."""


def pytest_assertrepr_compare(config: pytest.Config, op: str, left: object, right: object) -> list[str] | None:
    """Explain how two callback graphs differ."""
    del config
    if op != "==" or "fluxcb._check.graph" not in sys.modules:
        return None
    from fluxcb._check.graph import CallbackGraph
    from fluxcb._check.graph_diff import differences

    if not (isinstance(left, CallbackGraph) and isinstance(right, CallbackGraph)):
        return None
    return differences(left, right)


# -- fixtures ----------------------------------------------------------------------------------


@pytest.fixture
def fluxcb_check() -> Callable[..., Any]:
    """Assert that a list of callbacks is valid, and return its graph: `fluxcb.testing.assert_valid_graph`."""
    from fluxcb.testing import assert_valid_graph

    return assert_valid_graph


@pytest.fixture
def fluxcb_learner() -> Callable[..., Any]:
    """Build a small Learner with given callbacks: `fluxcb.testing.testlearner`."""
    from fluxcb.testing import testlearner

    return testlearner


@pytest.fixture
def fluxcb_events() -> Any:
    """Return a new `fluxcb.testing.EventLog`, a callback that records every host event."""
    from fluxcb.testing import EventLog

    return EventLog()
