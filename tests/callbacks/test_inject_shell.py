"""InjectShell: which files it trusts, what the shell shows, and that leaving the shell restores everything."""

import os
import pty
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from fluxcb import DeclarationError, Write, every
from fluxcb.callbacks import InjectShell
from fluxcb.testing import testlearner

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def opened(monkeypatch):
    """Return the steps at which a shell was opened; a terminal is there."""
    steps = []
    monkeypatch.setattr("fluxcb.callbacks.inspect.inject_shell._has_terminal", lambda: True)
    monkeypatch.setattr(
        "fluxcb.callbacks.inspect.inject_shell._SHELLS", {"pdb": lambda learner: steps.append(learner.progress.step)}
    )
    return steps


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "INJECT_SHELL.tmp"
    path.touch(mode=0o600)
    return path


def warned(learner, epochs):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learner.fit(epochs)
    return [str(warning.message) for warning in caught]


def test_one_file_opens_one_shell(opened, file):
    """tensorpack opens one after each epoch, until somebody removes the file."""
    learner = testlearner(InjectShell(file, "pdb"))
    learner.fit(2)
    assert (opened, file.exists()) == ([4], False)
    file.touch(mode=0o600)
    learner.fit(1)
    assert opened == [4, 12]


def test_without_a_file_nothing_happens(opened, tmp_path):
    learner = testlearner(InjectShell(tmp_path / "none", "pdb"))
    assert warned(learner, 2) == []
    assert opened == []


def test_a_shell_can_open_within_an_epoch(opened, file):
    testlearner(every(InjectShell(file, "pdb"), steps=3)).fit(1)
    assert opened == [3]


def test_a_file_created_too_late_is_removed(opened, file):
    testlearner(every(InjectShell(file, "pdb"), steps=100)).fit(1)
    assert (opened, file.exists()) == ([], False)


def test_a_relative_path_is_resolved_at_construction(opened, file, monkeypatch):
    monkeypatch.chdir(file.parent)
    shell = InjectShell(shell="pdb")
    monkeypatch.chdir("/")
    testlearner(shell).fit(1)
    assert opened == [4]


def test_a_subclass_can_declare_writes(monkeypatch, file):
    class Changes(InjectShell):
        chief_only = False

        def stateaccess(self):
            return {"hyperparams": {"learning_rate": Write()}}

    monkeypatch.setattr("fluxcb.callbacks.inspect.inject_shell._has_terminal", lambda: True)

    def lower(learner):
        learner.hyperparams.learning_rate = 0.01

    monkeypatch.setattr("fluxcb.callbacks.inspect.inject_shell._SHELLS", {"pdb": lower})
    learner = testlearner(Changes(file, "pdb"))
    learner.fit(1)
    assert learner.hyperparams["learning_rate"] == pytest.approx(0.01)


def link(path):
    path.rename(path.with_suffix(".other"))
    path.symlink_to(path.with_suffix(".other"))


def replaced_by(make):
    def prepare(path):
        path.unlink()
        make(path)

    return prepare


OPEN_DIRECTORY = (
    "others may write to its directory, so they could have renamed another file; run `chmod go-w` on the directory"
)
REFUSED = {
    "link": (link, "it is a symbolic link"),
    "group": (lambda path: path.chmod(0o660), "others may write to it; run `chmod go-w` on it"),
    "others": (lambda path: path.chmod(0o602), "others may write to it; run `chmod go-w` on it"),
    "names": (
        lambda path: os.link(path, path.with_suffix(".b")),
        "it has more than one name (hard links), and another user may have added this one",
    ),
    "folder": (replaced_by(Path.mkdir), "it is not a regular file"),
    "pipe": (replaced_by(os.mkfifo), "it is not a regular file"),
    "directory of a group": (lambda path: path.parent.chmod(0o770), OPEN_DIRECTORY),
    "sticky directory": (lambda path: path.parent.chmod(0o1777), OPEN_DIRECTORY),
}


@pytest.mark.parametrize("how", REFUSED)
def test_an_untrusted_file_warns_once_and_is_not_removed(how, opened, file):
    prepare, reason = REFUSED[how]
    learner = testlearner(InjectShell(file, "pdb"))
    prepare(file)
    assert warned(learner, 3) == [f"InjectShell('INJECT_SHELL.tmp'): {file} did not open a shell: {reason}."]
    assert (opened, learner.step) == ([], 12)
    assert os.path.lexists(file)


def test_a_file_of_another_user_is_not_trusted(opened, file, monkeypatch):
    learner = testlearner(InjectShell(file, "pdb"))
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    assert warned(learner, 2) == [
        f"InjectShell('INJECT_SHELL.tmp'): {file} did not open a shell: it belongs to another user."
    ]
    assert (opened, file.exists()) == ([], True)


def test_a_file_renamed_in_a_shared_directory_opens_no_shell(opened, tmp_path):
    tmp_path.chmod(0o777)
    path = tmp_path / "notes.txt"
    path.touch(mode=0o600)
    learner = testlearner(InjectShell(tmp_path / "INJECT_SHELL.tmp", "pdb"))
    path.rename(tmp_path / "INJECT_SHELL.tmp")  # what any user may do there
    (text,) = warned(learner, 2)
    assert text.endswith(f": {OPEN_DIRECTORY}.")
    assert (opened, (tmp_path / "INJECT_SHELL.tmp").exists()) == ([], True)
    tmp_path.chmod(0o755)  # the edit of the message
    learner.fit(1)
    assert opened == [12]


def test_a_directory_of_another_user_is_not_trusted(opened, file, monkeypatch):
    stat = os.stat

    def elsewhere(path, **kwargs):
        found = stat(path, **kwargs)
        return os.stat_result((*found[:4], found.st_uid + (path == file.parent), *found[5:]))

    monkeypatch.setattr("fluxcb.callbacks.inspect.own_file.os.stat", elsewhere)
    assert warned(testlearner(InjectShell(file, "pdb")), 2) == [
        f"InjectShell('INJECT_SHELL.tmp'): {file} did not open a shell: its directory belongs to another user."
    ]
    assert (opened, file.exists()) == ([], True)


def test_without_a_terminal_there_is_no_shell(opened, file, monkeypatch):
    monkeypatch.setattr("fluxcb.callbacks.inspect.inject_shell._has_terminal", lambda: False)
    learner = testlearner(InjectShell(file, "pdb"))
    assert warned(learner, 2) == [
        f"InjectShell('INJECT_SHELL.tmp'): {file} did not open a shell: standard input is not a terminal."
    ]
    assert opened == []


def test_ctrl_c_interrupts_the_shell_and_later_the_training_again(file, monkeypatch):
    monkeypatch.setattr("fluxcb.callbacks.inspect.inject_shell._has_terminal", lambda: True)

    def interrupted(learner):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("fluxcb.callbacks.inspect.inject_shell._SHELLS", {"pdb": interrupted})
    before = signal.getsignal(signal.SIGINT)
    learner = testlearner(InjectShell(file, "pdb"))
    learner.fit(3)
    assert (learner.step, learner.stop_reason) == (12, None)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_in_the_shell_removes_the_file(file, monkeypatch):
    monkeypatch.setattr("fluxcb.callbacks.inspect.inject_shell._has_terminal", lambda: True)
    monkeypatch.setattr("fluxcb.callbacks.inspect.inject_shell._SHELLS", {"pdb": lambda learner: 1 / 0})
    with pytest.raises(ZeroDivisionError):
        testlearner(InjectShell(file, "pdb")).fit(1)
    assert not file.exists()


PROGRAM = """
from fluxcb.callbacks import InjectShell
from fluxcb.testing import testlearner

learner = testlearner(InjectShell("ask.tmp", {shell!r}))
learner.fit(2)
print("trained", learner.step, "steps", learner.stop_reason)
"""


def talk(program, folder, *answers):
    """Run a program on a terminal of its own; give each answer when its question is there; return all that it said."""
    here, there = pty.openpty()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "TERM": "dumb",
        "HOME": str(folder),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=there, stdout=there, stderr=there, cwd=folder, env=environment
    )
    os.close(there)
    said, rest = "", list(answers)
    ends = time.monotonic() + 600
    while time.monotonic() < ends:
        try:
            data = os.read(here, 4096)
        except OSError:  # the program has ended
            break
        if not data:
            break
        said += data.decode(errors="replace")
        if rest and rest[0][0] in said.rpartition("\x00")[2]:
            os.write(here, rest.pop(0)[1].encode())
            said += "\x00"
    process.wait(600)
    os.close(here)
    return said.replace("\x00", "")


@pytest.mark.parametrize("leave", ["c\n", "q\n"], ids=["continue", "quit"])
def test_a_real_pdb_session(leave, tmp_path):
    (tmp_path / "ask.tmp").touch(mode=0o600)
    said = talk(
        PROGRAM.format(shell="pdb"),
        tmp_path,
        ("(Pdb)", "p 1000 + learner.progress.step\n"),
        ("(Pdb)", leave),
    )
    assert "1004" in said
    assert "trained 8 steps None" in said
    assert not (tmp_path / "ask.tmp").exists()


@pytest.mark.integration
def test_a_real_ipython_session(tmp_path):
    pytest.importorskip("IPython")
    (tmp_path / "ask.tmp").touch(mode=0o600)
    said = talk(
        PROGRAM.format(shell="ipython"),
        tmp_path,
        ("In [1]:", "1000 + learner.progress.step\r"),
        ("In [2]:", "exit\r"),
    )
    assert "1004" in said
    assert "trained 8 steps None" in said


# --- arguments ------------------------------------------------------------------------------------------------------


def test_pdb_is_used_if_ipython_is_not_installed(monkeypatch, refused):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert InjectShell().shell == "pdb"
    text = (
        "`InjectShell` needs the package `IPython` for this shell, which is not installed.\n"
        "  fix:   run `pip install ipython`\n"
        '     or: write `shell="pdb"`'
    )
    with refused(DeclarationError, text):
        InjectShell(shell="ipython")


@pytest.mark.parametrize("file", ["", None, 3])
def test_a_value_that_is_not_a_path_is_rejected(file, refused):
    text = f'`file` of `InjectShell` must be a path, not {file!r}.\n  fix:   write e.g. `file="INJECT_SHELL.tmp"`'
    with refused(DeclarationError, text):
        InjectShell(file)


def test_a_folder_is_rejected(tmp_path, refused):
    with refused(DeclarationError, f"`file` of `InjectShell` is a folder: {tmp_path}.\n  fix:   name a file in it"):
        InjectShell(tmp_path)


def test_an_unknown_shell_is_rejected(refused):
    text = '`shell` of `InjectShell` must be "pdb" or "ipython" or None, not \'bash\'.\n  fix:   write `"pdb"`'
    with refused(DeclarationError, text):
        InjectShell(shell="bash")


@pytest.mark.parametrize("missing", ["O_NOFOLLOW", "geteuid"])
def test_a_platform_without_file_owners_is_rejected(missing, monkeypatch, refused):
    text = (
        "`InjectShell` does not work on this platform.\n"
        "  why:   files have no owners on this platform, so any user could open a shell in the training"
    )
    monkeypatch.delattr(os, missing)
    with refused(DeclarationError, text):
        InjectShell()
