"""Settings that must stand before JAX is imported, and how hard hypothesis looks."""

import gc
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

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


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Have the collector of garbage pass over what was there before a module's tests.

    Programs that JAX keeps are millions of objects in the end, and each collection that a test asks for, or that Python
    begins by itself, would look at all of them.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no clock cut windows, however slow the machine is: long ones are, to keep progress bars alive."""
    monkeypatch.setattr("fluxcb._run.calling.WINDOW_SECONDS", 1e9)


def with_places(text: str, path: Path) -> str:
    """Replace each `<@mark>` by `file:line` of the line of a test file that ends in the comment `# mark`."""
    lines = path.read_text().splitlines()

    def place(found: re.Match[str]) -> str:
        (line,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"  # {found[1]}")]
        return f"{os.path.relpath(path)}:{line}"

    return re.sub(r"<@([\w-]+)>", place, text)


@pytest.fixture
def refused(request: pytest.FixtureRequest) -> Callable[[type[Exception], str], AbstractContextManager[None]]:
    """`with refused(Kind, text):` expects an error of exactly this kind with this whole text, see `with_places`."""

    @contextmanager
    def expect(kind: type[Exception], text: str) -> Iterator[None]:
        with pytest.raises(kind) as caught:
            yield
        assert str(caught.value) == with_places(text, request.path)
        assert type(caught.value) is kind

    return expect
