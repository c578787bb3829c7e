"""A save is interrupted at every file operation: all listed checkpoints are complete, and the run resumes.

The n-th operation that changes the disk and all later ones fail, including cleanup, so the disk is in the same state as
after SIGKILL. (Arrays are written by C++ code, which is not stopped, but it does not decide which folder is a
checkpoint. test_kills.py kills real processes at random moments.)
"""

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Callback, Read, on
from fluxcb._declare.events import FitStopping
from fluxcb._errors import CheckpointError
from fluxcb.callbacks import Checkpointer, Metrics
from fluxcb.checkpoints.reading import resolve_checkpoint
from fluxcb.checkpoints.verification import newest_good
from fluxcb.phases import AbstractTrainingPhase

pytestmark = pytest.mark.long

CHANGES = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate", "os.link", "os.symlink")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Disk:
    """Count the operations that change files in a folder, and fail from a given one on."""

    def __init__(self) -> None:
        self.folder, self.most, self.dead = "", None, False
        self.done: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        sys.addaudithook(self._heard)  # there is no way to remove one

    def _heard(self, event: str, args: Any) -> None:
        if not self.folder:
            return
        if event == "open":
            path, _, flags = args
            changes = isinstance(path, str) and path.startswith(self.folder) and bool(flags & WRITES)
        else:  # in a folder that is deleted, names are relative
            changes = event in CHANGES and (
                str(args[0]).startswith(self.folder) or args[-1] not in (-1, 0, None, 0o777)
            )
        if changes:
            self.operate(event, os.path.basename(str(args[1 if event == "os.rename" else 0])))

    def operate(self, event: str, name: str = "") -> None:
        """Record an operation and its file (for a rename, the new name), or fail."""
        with self._lock:
            if len(self.done) == self.most:
                self.dead = True
            if self.dead:
                raise OSError(5, "the disk is dead")
            self.done.append((event, name))

    def dies(self, folder: Path, after: int | None) -> None:
        self.folder, self.most, self.dead, self.done = str(folder), after, False, []

    def lives(self) -> None:
        self.folder = ""


@pytest.fixture(scope="module")
def disk() -> Disk:
    return Disk()


@pytest.fixture(autouse=True)
def synced(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Skip fsync, which is not an audited event. No power failure is simulated here."""
    monkeypatch.setattr(os, "fsync", lambda handle: disk.operate("fsync") if disk.folder else None)
    yield
    disk.lives()


class Keep(Callback):
    """Keep the snapshot at the end of a fit."""

    def stateaccess(self) -> dict[str, Any]:
        return {"*": Read()}

    @on(FitStopping, AbstractTrainingPhase)
    def ask(self, event: Any, phase: Any, learner: Any) -> None:
        learner.snapshots.request(self.take)

    def take(self, snapshot: Any) -> None:
        self.snapshot = snapshot


def learner(folder: Path) -> fluxcb.Learner:
    return fluxcb.Learner.from_loss(
        {"w": jnp.arange(6.0).reshape(2, 3)},
        lambda params, batch, key: jnp.mean((batch @ params["w"] - jax.random.uniform(key)) ** 2),
        optax.adam(0.1),
        data=[jnp.full((4, 2), i / 3) for i in range(4)],
        callbacks=[Checkpointer(folder, steps=100, keep_last=1), Keep(), Metrics()],
        default_callbacks=False,
    )


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, dict[str, list[bytes]]]:
    """Return a run with the checkpoint of step 3, the snapshot of step 6, and the parameters of both."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    trained = learner(folder)
    trained.fit(steps=3)
    params = {"3": bits(trained.params)}
    shutil.copytree(folder, folder.with_name("original"))
    trained.fit(steps=3)
    params["6"] = bits(trained.params)
    assert params["3"] != params["6"]
    assert [path.name for path in folder.with_name("original").glob("[0-9]*")] == ["3"]
    return folder.with_name("original"), trained.callbacks.get(Keep).snapshot, params


def test_interrupted_save_leaves_complete_newest_checkpoint(
    begun: tuple[Path, Any, dict[str, list[bytes]]], disk: Disk, tmp_path: Path, times: int
) -> None:
    original, snapshot, params = begun
    run, again = tmp_path / "run", learner(tmp_path / "run")
    saver = Checkpointer(run, keep_last=1)
    saver.load_state_dict({"run": resolve_checkpoint(original)[1].run})
    met = set()

    def cut_off(after: int | None) -> bool:
        """Save step 6 and delete step 3, up to an operation; return whether the new checkpoint got its name."""
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(original, run)
        disk.dies(run, after)
        failed, before = False, set(threading.enumerate())
        try:
            saver.write(snapshot)
        except CheckpointError:
            failed = True
        for thread in set(threading.enumerate()) - before:  # threads of orbax can outlive a save that fails
            with contextlib.suppress(OSError):  # their `join` raises what they raised
                thread.join()
        disk.lives()
        assert disk.dead == (after is not None)
        # What of the old one cannot be deleted, is left for later.
        assert failed == (disk.dead and ("os.rename", ".trash-3") not in disk.done)
        return ("os.rename", "6") in disk.done

    assert cut_off(None)
    assert [path.name for path in run.glob("[0-9]*")] == ["6"]
    most, commit = len(disk.done), disk.done.index(("os.rename", "6"))
    assert commit > 60
    # The run's folder is synced behind that, and the old one renamed, before it is deleted.
    assert [event for event, _ in disk.done[commit:][:3]] == ["os.rename", "fsync", "os.rename"]
    assert most > commit + 40
    named = dict.fromkeys((False, True), 0)
    # All of those around the new one's naming, which orbax does not always reach after as many.
    some = [*range(0, commit - 8, 4), *range(commit - 8, commit + 8), *range(commit + 8, most, 2)]
    points = range(most) if times > 1 else some
    for after in points[: -2 if times == 1 else -10]:  # nor does it always do as many
        new = cut_off(after)
        named[new] += 1
        found = newest_good(run)
        assert found is not None
        assert found[0].path.name == ("6" if new else "3")
        left = {path.name.split("-")[0] for path in run.iterdir()} - {"fluxcb.lock"}
        if frozenset(left) not in met:
            met.add(frozenset(left))
            again.restore(run)
            assert bits(again.params) == params[found[0].path.name]
        saver._files.lock()  # the next fit begins with this
        saver._files.clear_unfinished()
        saver._files.unlock()
        assert {path.name for path in run.iterdir()} == left - {".saving", ".trash"} | {"fluxcb.lock"}
    assert named[False] > len(points) // 4
    assert named[True] > len(points) // 4
    assert met == {frozenset(names) for names in (["3"], ["3", ".saving"], ["3", "6"], ["6", ".trash"])}
