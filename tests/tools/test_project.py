"""`[tool.fluxcb]` in pyproject.toml."""

import re

import pytest

from fluxcb import DeclarationError
from fluxcb._tools.project import Project, find_project, read_project


def write(folder, text):
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "pyproject.toml"
    file.write_text(text)
    return file


def test_project_table(tmp_path):
    file = write(tmp_path, '[tool.fluxcb]\ncallbacks = ["a:b", "a.c:make"]\nlevel = "trace"\n')
    assert read_project(file) == Project(tmp_path, file, ("a:b", "a.c:make"), "trace")


def test_default_level_is_graph(tmp_path):
    file = write(tmp_path, '[tool.fluxcb]\ncallbacks = ["a:b"]\n')
    assert read_project(file) == Project(tmp_path, file, ("a:b",), "graph")


@pytest.mark.parametrize("text", ["", '[project]\nname = "x"\n', "[tool.other]\n", "tool = 3\n"])
def test_no_table_means_no_project(tmp_path, text):
    assert read_project(write(tmp_path, text)) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.fluxcb\n", "pyproject.toml cannot be read: Expected"),
        ("[tool]\nfluxcb = 3\n", "`tool.fluxcb` must be a table."),
        ("[tool.fluxcb]\ncallback = []\n", "`[tool.fluxcb]` has no key 'callback'. Did you mean `callbacks`?"),
        ('[tool.fluxcb]\ncallbacks = "a:b"\n', "`callbacks` must be a list of strings, not 'a:b'."),
        ("[tool.fluxcb]\ncallbacks = [1]\n", "`callbacks` must be a list of strings, not [1]."),
        ('[tool.fluxcb]\ncallbacks = ["a:b", "a:b"]\n', "`callbacks` names 'a:b' twice."),
        (
            '[tool.fluxcb]\nlevel = "trac"\n',
            "`level` must be one of graph, trace, audit, resume, not 'trac'. Did you mean `trace`?",
        ),
        ("[tool.fluxcb]\nlevel = 2\n", "`level` must be one of graph, trace, audit, resume, not 2."),
    ],
)
def test_invalid_table_raises(tmp_path, text, message):
    file = write(tmp_path, text)
    with pytest.raises(DeclarationError, match=f"^{re.escape(message)}") as caught:
        read_project(file)
    assert str(file) in caught.value.where[0]


def test_invalid_bytes_raise(tmp_path):
    file = write(tmp_path, "")
    file.write_bytes(b"\xff\xfe[tool.fluxcb]")
    with pytest.raises(DeclarationError, match="cannot be read"):
        read_project(file)


def test_project_is_found_from_subfolders(tmp_path):
    file = write(tmp_path, '[tool.fluxcb]\ncallbacks = ["a:b"]\n')
    below = tmp_path / "src" / "deep"
    below.mkdir(parents=True)
    assert find_project(below) == find_project(tmp_path) == Project(tmp_path, file, ("a:b",), "graph")


def test_nearer_file_without_table_does_not_hide_project(tmp_path):
    file = write(tmp_path, '[tool.fluxcb]\ncallbacks = ["a:b"]\n')
    write(tmp_path / "part", "[project]\n")
    assert find_project(tmp_path / "part").file == file


def test_nearer_table_wins(tmp_path):
    write(tmp_path, '[tool.fluxcb]\ncallbacks = ["a:b"]\n')
    nearer = write(tmp_path / "part", '[tool.fluxcb]\ncallbacks = ["c:d"]\n')
    assert find_project(tmp_path / "part") == Project(tmp_path / "part", nearer, ("c:d",), "graph")


def test_nearest_file_is_project_without_any_table(tmp_path):
    file = write(tmp_path / "part", "[project]\n")
    assert find_project(tmp_path / "part") == Project(tmp_path / "part", file)


def test_parent_file_of_other_user_is_ignored(tmp_path, monkeypatch):
    other = write(tmp_path, '[tool.fluxcb]\ncallbacks = ["a:b"]\n')
    nearest = write(tmp_path / "mine", "[project]\n")
    owners = {other: 1001}
    monkeypatch.setattr("fluxcb._tools.project._owner", lambda path: owners.get(path, 1000))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    mine = tmp_path / "mine"
    assert find_project(mine) == Project(mine, nearest)
    nearest.unlink()
    assert find_project(mine) == Project(mine)
    for owner in (0, 1000):
        owners[other] = owner
        assert find_project(mine).sets == ("a:b",)
    owners.update({other: 1001, mine: 1001})  # a container in which another user's project is mounted
    assert find_project(mine).sets == ("a:b",)
    assert find_project(tmp_path).sets == ("a:b",)


def test_deeply_nested_file_raises(tmp_path):
    file = write(tmp_path, f"tool.fluxcb.callbacks = {'[' * 100_000}")
    with pytest.raises(DeclarationError, match=r"^pyproject.toml cannot be read: "):
        read_project(file)
