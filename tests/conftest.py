"""The short suite, settings that must be made before JAX is imported, and hypothesis profiles."""

import gc
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

# A shell that starts the suite in the background has SIGINT ignored, and what it starts inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# For tests/plugin; pytest reads this name in the topmost conftest.py only.
pytest_plugins = ["pytester"]

# JAX reads its variables once, at import. What the caller has set stays; the platform and the number of devices are the
# machine's, so that the same suite runs on CPUs and on accelerators. Processes that a test starts inherit all of it.
_SETTINGS = {
    # Compiled programs are kept between runs, the small ones too: most of the suite's time is compiling toy models.
    # Processes may share the folder. One that reads an entry while another writes it compiles the program itself.
    "JAX_COMPILATION_CACHE_DIR": str(Path(__file__).resolve().parents[1] / ".jax_cache"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    # The processes that a test starts share the accelerator with the suite: none may take most of its memory at once.
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    # No window opens, and none is needed.
    "MPLBACKEND": "Agg",
}
for _name, _value in _SETTINGS.items():
    os.environ.setdefault(_name, _value)

# No deadline, no complaint about slow examples: the first example of a test may compile, the others don't.
settings.register_profile(
    "local", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


# `pytest` without arguments runs a sample of the suite, with tests from every folder, so that it takes a few minutes.
# All other tests are `long`: those that are marked, and those outside of the sample. `pytest -m long` runs them; see
# also `CASES`. A command that names files or uses -k runs all tests that it selects. The sample is a rule and not a
# mark on each test, so that it also covers new tests without becoming slow.
ALL = 10**9
SAMPLES = {
    # Folder or file: the maximum number of test functions per file, and of parameters per function.
    "callbacks": (1, 1),
    "compile": (3, 1),
    "contract": (ALL, 4),
    "docs": (ALL, 2),
    "fixes": (ALL, 3),
    "logging": (8, 2),
    "models": (8, 1),
    "plugin": (1, 1),
    "programs": (ALL, 1),
    "populations": (1, 1),
    "properties": (1, 1),
    "reliability": (3, 1),
    "run": (1, 1),
    "tools": (2, 1),
    "test_testing.py": (12, 1),
    "windows": (2, 1),
}
OTHERS = (ALL, 3)
"""The sample of all other folders, whose tests are fast."""

# `pytest -m long` runs one more parameter of a function, because all of them take 70 minutes on a slow machine. All
# parameters run with `FLUXCB_LONG`, or if a command names the file.
CASES = 1
MORE_CASES = {
    # Folder or file: every page, every example and every fix is a parameter.
    "docs": ALL,
    "fixes": ALL,
    "contract": 8,
    "test_calls.py": ALL,
    "test_fixes.py": ALL,
    "test_public_api.py": ALL,
    # Function: the callbacks, places, and states that matter most.
    "test_built_in_callback_does_not_depend_on_windows": 8,
    "test_built_in_callback_reads_only_when_due": 8,
    "test_callback_resumes_exactly": 8,
    "test_every_callback_keeps_the_shardings": 2,
    "test_every_window_length_computes_same_bits": 3,
    "test_graph_matches_oracle_for_1000_random_sets": 2,
    "test_hostile_state_changes_nothing_and_valid_checkpoint_restores": 4,
    "test_observers_of_the_library_change_no_bit": 2,
    "test_schedule_is_due_at_same_steps": 4,
    "test_signal_saves_checkpoint_of_current_step": 4,
    "test_training_resumes_exactly": 4,
}

ROOT = Path(__file__).resolve().parent
Value = TypeVar("Value")


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of processes for `-n=logical`: one more than cores, because many tests wait for processes."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(tryfirst=True)  # before pytest's own, which applies -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests outside of the sample as `long`. Deselect long tests if the command selects no tests itself."""
    functions: dict[Path, dict[str, list[pytest.Item]]] = {}
    for item in items:
        if item.get_closest_marker("long") is None:
            functions.setdefault(item.path, {}).setdefault(item.nodeid.partition("[")[0], []).append(item)
    for path, tests in functions.items():
        most, parameters = SAMPLES.get(path.relative_to(ROOT).parts[0], OTHERS)
        chosen = {item for group in spread(list(tests.values()), most) for item in spread(group, parameters)}
        for item in (item for group in tests.values() for item in group if item not in chosen):
            item.add_marker("long")
    whole_suite = {Path(config.invocation_params.dir, arg).resolve() for arg in config.args} <= {ROOT, ROOT.parent}
    if not whole_suite or config.option.keyword:
        return
    left_out: set[pytest.Item] = set()
    if not config.option.markexpr:
        left_out = {item for item in items if item.get_closest_marker("long")}
    elif "FLUXCB_LONG" not in os.environ:
        long: dict[str, list[pytest.Item]] = {}
        for item in filter(lambda item: item.get_closest_marker("long"), items):
            long.setdefault(item.nodeid.partition("[")[0], []).append(item)
        for name, tests in long.items():
            cases = MORE_CASES.get(tests[0].path.relative_to(ROOT).parts[0], CASES)
            left_out |= set(tests) - set(spread(tests, MORE_CASES.get(name.rpartition("::")[2], cases)))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def spread(values: Sequence[Value], most: int) -> list[Value]:
    """Return at most `most` evenly spaced values, including the first one."""
    count = min(most, len(values))
    return [values[index * len(values) // count] for index in range(count)]


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Exclude objects that exist before the tests of a module from garbage collection.

    JAX caches programs with millions of objects, and each garbage collection would traverse all of them.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tests independent of the speed of the machine.

    On a slow machine, the engine shortens windows so that progress bars stay responsive, and `ProgressBar` prints
    additional lines for epochs that take long.
    """
    import fluxcb._run.explain_windows  # noqa: F401 - it copies `WINDOW_SECONDS` at import

    monkeypatch.setattr("fluxcb._run.program_runner.WINDOW_SECONDS", 1e9)
    monkeypatch.setattr("fluxcb.callbacks.progress.bars._PLAIN_SECONDS", 1e9)


@pytest.fixture
def cpu_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose between windows and single steps as on CPU. On an accelerator, `"auto"` would measure which is faster."""
    from fluxcb._run.train_state import TrainState

    monkeypatch.setattr(TrainState, "platform", "cpu")


def with_places(text: str, path: Path) -> str:
    """Replace each `<@mark>` with `file:line` of the line in a test file that ends in the comment `# mark`."""
    lines = path.read_text().splitlines()

    def place(found: re.Match[str]) -> str:
        (line,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"  # {found[1]}")]
        return f"{os.path.relpath(path)}:{line}"

    return re.sub(r"<@([\w-]+)>", place, text)


@pytest.fixture
def refused(request: pytest.FixtureRequest) -> Callable[[type[Exception], str], AbstractContextManager[None]]:
    """`with refused(Kind, text):` expects an error of exactly this kind with this complete text; see `with_places`."""

    @contextmanager
    def expect(kind: type[Exception], text: str) -> Iterator[None]:
        with pytest.raises(kind) as caught:
            yield
        assert str(caught.value) == with_places(text, request.path)
        assert type(caught.value) is kind

    return expect
