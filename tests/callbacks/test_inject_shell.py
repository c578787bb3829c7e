"""InjectShell: whose file it obeys, what the shell sees, and what is as before when it is left."""

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
    monkeypatch.setattr("fluxcb.callbacks.inject_shell._has_terminal", lambda: True)
    monkeypatch.setattr(
        "fluxcb.callbacks.inject_shell._SHELLS", {"pdb": lambda learner: steps.append(learner.progress.step)}
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


def test_a_file_asks_for_one_shell(opened, file):
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


def test_within_an_epoch(opened, file):
    testlearner(every(InjectShell(file, "pdb"), steps=3)).fit(1)
    assert opened == [3]


def test_a_file_that_comes_too_late_is_removed(opened, file):
    testlearner(every(InjectShell(file, "pdb"), steps=100)).fit(1)
    assert (opened, file.exists()) == ([], False)


def test_a_relative_path_counts_from_where_it_was_made(opened, file, monkeypatch):
    monkeypatch.chdir(file.parent)
    shell = InjectShell(shell="pdb")
    monkeypatch.chdir("/")
    testlearner(shell).fit(1)
    assert opened == [4]


def test_a_subclass_declares_what_may_be_changed(monkeypatch, file):
    class Changes(InjectShell):
        chief_only = False

        def stateaccess(self):
            return {"hyperparams": {"learning_rate": Write()}}

    monkeypatch.setattr("fluxcb.callbacks.inject_shell._has_terminal", lambda: True)

    def lower(learner):
        learner.hyperparams.learning_rate = 0.01

    monkeypatch.setattr("fluxcb.callbacks.inject_shell._SHELLS", {"pdb": lower})
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


REFUSED = {
    "link": (link, "it is a symbolic link"),
    "group": (lambda path: path.chmod(0o660), "others may write to it; `chmod go-w` takes that from them"),
    "others": (lambda path: path.chmod(0o602), "others may write to it; `chmod go-w` takes that from them"),
    "names": (
        lambda path: os.link(path, path.with_suffix(".b")),
        "it has other names, too, and somebody else may have given it this one",
    ),
    "folder": (replaced_by(Path.mkdir), "it is no regular file"),
    "pipe": (replaced_by(os.mkfifo), "it is no regular file"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_is_not_obeyed_is_told_once_and_left_alone(how, opened, file):
    prepare, reason = REFUSED[how]
    learner = testlearner(InjectShell(file, "pdb"))
    prepare(file)
    assert warned(learner, 3) == [f"InjectShell('INJECT_SHELL.tmp'): no shell is opened for {file}: {reason}."]
    assert (opened, learner.step) == ([], 12)
    assert os.path.lexists(file)


def test_the_file_of_another_user_is_not_obeyed(opened, file, monkeypatch):
    learner = testlearner(InjectShell(file, "pdb"))
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    assert warned(learner, 2) == [
        f"InjectShell('INJECT_SHELL.tmp'): no shell is opened for {file}: it belongs to another user."
    ]
    assert (opened, file.exists()) == ([], True)


def test_without_a_terminal_there_is_no_shell(opened, file, monkeypatch):
    monkeypatch.setattr("fluxcb.callbacks.inject_shell._has_terminal", lambda: False)
    learner = testlearner(InjectShell(file, "pdb"))
    assert warned(learner, 2) == [
        f"InjectShell('INJECT_SHELL.tmp'): no shell is opened for {file}: "
        "there is no terminal that it could be opened in."
    ]
    assert opened == []


def test_ctrl_c_is_the_shells_and_the_trainings_again_afterwards(file, monkeypatch):
    monkeypatch.setattr("fluxcb.callbacks.inject_shell._has_terminal", lambda: True)

    def interrupted(learner):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("fluxcb.callbacks.inject_shell._SHELLS", {"pdb": interrupted})
    before = signal.getsignal(signal.SIGINT)
    learner = testlearner(InjectShell(file, "pdb"))
    learner.fit(3)
    assert (learner.step, learner.stop_reason) == (12, None)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_in_the_shell_removes_the_file(file, monkeypatch):
    monkeypatch.setattr("fluxcb.callbacks.inject_shell._has_terminal", lambda: True)
    monkeypatch.setattr("fluxcb.callbacks.inject_shell._SHELLS", {"pdb": lambda learner: 1 / 0})
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
    ends = time.monotonic() + 90
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
    process.wait(10)
    os.close(here)
    return said.replace("\x00", "")


@pytest.mark.parametrize("leave", ["c\n", "q\n"], ids=["continue", "quit"])
def test_pdb_for_real(leave, tmp_path):
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


def test_ipython_for_real(tmp_path):
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


def test_pdb_is_the_shell_where_ipython_is_not_installed(monkeypatch, refused):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert InjectShell().shell == "pdb"
    text = (
        "`InjectShell` needs the package `IPython` for this shell, which is not installed.\n"
        "  fix:   `pip install ipython`\n"
        '     or: `shell="pdb"`'
    )
    with refused(DeclarationError, text):
        InjectShell(shell="ipython")


@pytest.mark.parametrize("file", ["", None, 3])
def test_what_is_no_path(file, refused):
    text = f'`file` of `InjectShell` must be a path, not {file!r}.\n  fix:   e.g. `file="INJECT_SHELL.tmp"`'
    with refused(DeclarationError, text):
        InjectShell(file)


def test_a_folder_is_no_file(tmp_path, refused):
    with refused(DeclarationError, f"`file` of `InjectShell` is a folder: {tmp_path}.\n  fix:   name a file in it"):
        InjectShell(tmp_path)


def test_another_shell(refused):
    with refused(
        DeclarationError, '`shell` of `InjectShell` is "ipython" or "pdb", not \'bash\'.\n  fix:   leave it out'
    ):
        InjectShell(shell="bash")


@pytest.mark.parametrize("missing", ["O_NOFOLLOW", "geteuid"])
def test_a_platform_that_knows_no_owners(missing, monkeypatch, refused):
    text = (
        "`InjectShell` does not work on this platform.\n"
        "  why:   it cannot be told here whose a file is, so anybody's would be obeyed"
    )
    monkeypatch.delattr(os, missing)
    with refused(DeclarationError, text):
        InjectShell()
