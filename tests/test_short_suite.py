"""Which tests a command runs: see `pytest_collection_modifyitems` in tests/conftest.py."""

from pathlib import Path
from types import SimpleNamespace

import pytest

TESTS = Path(__file__).resolve().parent


class Item:
    """A collected test, with the attributes that the hook uses."""

    def __init__(self, file, name, *marks):
        self.path, self.nodeid, self.marks = TESTS / file, f"tests/{file}::{name}", {*marks}

    def get_closest_marker(self, name):
        return name if name in self.marks else None

    def add_marker(self, name):
        self.marks.add(name)


@pytest.fixture
def collect(request):
    """Return a function that returns the names of the tests that a command selects, before pytest applies -m and -k."""
    conftest = request.config.pluginmanager.get_plugin(str(TESTS / "conftest.py"))

    def run(items, *args, markexpr="", keyword=""):
        config = SimpleNamespace(
            args=args,
            invocation_params=SimpleNamespace(dir=TESTS.parent),
            option=SimpleNamespace(markexpr=markexpr, keyword=keyword),
            hook=SimpleNamespace(pytest_deselected=lambda items: None),
        )
        conftest.pytest_collection_modifyitems(config, items)
        return [item.nodeid.partition("::")[2] for item in items]

    return run


def windows():
    """Return four test functions of a folder, two of which are selected, with one parameter each."""
    return [Item("windows/test_a.py", f"test_{name}[{number}]") for name in "abcd" for number in range(3)]


def test_whole_suite_is_sampled(collect):
    assert collect(windows(), "tests") == ["test_a[0]", "test_c[0]"]


def test_each_file_has_its_own_sample(collect):
    items = [Item(f"windows/test_{file}.py", f"test_{file}_{name}") for file in "xy" for name in "abc"]
    assert collect(items, "tests") == ["test_x_a", "test_x_b", "test_y_a", "test_y_b"]


def test_marked_test_is_not_in_sample(collect):
    items = [Item("windows/test_a.py", "test_a", "long"), Item("windows/test_a.py", "test_b")]
    assert collect(items, "tests") == ["test_b"]


def test_long_tests_are_all_others(collect, monkeypatch):
    monkeypatch.setenv("FLUXCB_LONG", "1")  # all parameters
    items = windows()
    everything = collect(items, "tests", markexpr="long")
    short = [item.nodeid.partition("::")[2] for item in items if "long" not in item.marks]
    assert len(everything) == 12
    assert short == ["test_a[0]", "test_c[0]"]


@pytest.mark.parametrize(
    ("name", "variable", "count"),
    [
        ("run/test_a.py::test_a", None, 1 + 1),
        ("run/test_a.py::test_a", "1", 27),
        ("run/test_a.py::test_training_resumes_exactly", None, 4 + 1),
        ("fixes/test_a.py::test_a", None, 27),
    ],
)
def test_long_suite_samples_parameters(collect, monkeypatch, name, variable, count):
    monkeypatch.delenv("FLUXCB_LONG", raising=False)
    if variable is not None:
        monkeypatch.setenv("FLUXCB_LONG", variable)
    file, _, function = name.partition("::")
    items = [Item(file, f"{function}[{number}]") for number in range(27)]
    assert len(collect(items[:], "tests", markexpr="long")) == count  # including those of the short suite
    assert len(collect(items[:], "tests/run")) == 27


@pytest.mark.parametrize(
    ("args", "keyword"), [(("tests/windows",), ""), (("tests/windows/test_a.py",), ""), (("tests",), "a")]
)
def test_command_that_selects_tests_runs_all_of_them(collect, args, keyword):
    assert len(collect(windows(), *args, keyword=keyword)) == 12
