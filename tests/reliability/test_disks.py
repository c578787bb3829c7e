"""Full or read-only disks and deleted run directories raise an error, and older checkpoints stay complete."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import CheckpointError, Learner
from fluxcb.callbacks import Checkpointer
from fluxcb.checkpoints.run_folder import RunFolder, entries_of
from fluxcb.checkpoints.verification import verify_checkpoint

HERE = Path(__file__).resolve().parent
PROGRAM = str(HERE / "failing_disk_run.py")


def told_by(folder, *faults, before=()):
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(
        [*before, sys.executable, PROGRAM, str(folder), *faults],
        env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def anywhere(tmp_path_factory):
    return told_by(tmp_path_factory.mktemp("anywhere"), "limited", "deleted")


@pytest.fixture(scope="module")
def mounted(tmp_path_factory):
    alone = ("unshare", "--user", "--map-root-user", "--mount")
    script = "mount -t tmpfs tmpfs . && mount --bind . . && mount -o remount,bind,ro ."
    folder = tmp_path_factory.mktemp("mounted")
    if (
        shutil.which("unshare") is None
        or subprocess.run([*alone, "sh", "-c", script], cwd=folder, check=False).returncode
    ):
        pytest.skip("this machine lets nobody mount a file system in a namespace of one's own")
    return told_by(folder, "full", "read-only", before=alone)


@pytest.mark.parametrize(
    ("fixture", "fault", "why", "there"),
    [
        ("anywhere", "limited", "File too large", [0, 2, 4]),
        (
            "anywhere",
            "deleted",
            "The directory, or fluxcb.lock in it, was removed or replaced during the run",
            [],
        ),
        ("mounted", "full", "No space left on device (0.0 MiB free)", [0, 2, 4]),
        ("mounted", "read-only", "Read-only file system", [0, 2, 4]),
    ],
)
def test_disk_failure_during_run(request, fixture, fault, why, there):
    # It fails after step 5, and saved is each second step: the save of step 6 fails, and that of step 8 waits for it.
    told = request.getfixturevalue(fixture)[fault]
    assert told["raised"] == f"Cannot write the checkpoint of step 6 to RUN: {why}."
    assert told["reason"] == f"CheckpointError: {told['raised']}"
    assert 6 <= told["at"] <= 8
    assert told["ended"] == [told["at"]]  # FitEnd has run
    assert told["there"] == told["params"] == there
    assert told["left"] == []
    # When the disk is mended, the same program goes on, and ends as it would have.
    assert told["again"] == [12, 12]
    assert told["then"] == [10, 12, 12]  # after the last step, and after its epoch


def learner(folder, **given):
    return Learner.from_loss(
        {"w": jnp.zeros(())},
        lambda params, batch, key: -params["w"] + 0 * jnp.sum(batch),
        optax.sgd(1.0),
        data=[np.zeros(1, np.float32)] * 2,
        callbacks=[Checkpointer(folder, **given)],
        default_callbacks=False,
    )


def test_failure_to_delete_old_checkpoint_is_reported(tmp_path, monkeypatch):
    def refuse(self, entry):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(RunFolder, "remove", refuse)
    with pytest.raises(CheckpointError) as raised:
        learner(tmp_path, keep_last=1).fit(5)
    assert str(raised.value).splitlines()[:2] == [
        f"Cannot delete the old checkpoint {tmp_path / '0'}: Read-only file system.",
        "  why:   the checkpoint of step 2 was written, but the directory would keep growing",
    ]
    assert [verify_checkpoint(entry.path).step for entry in entries_of(tmp_path)] == [0, 2]


@pytest.mark.parametrize("made", ["a file", "below a file", "a link to nowhere"])
def test_invalid_directory_raises_before_first_step(tmp_path, made):
    folder = tmp_path / "run"
    trained = learner(folder / "below" if made == "below a file" else folder)
    if made == "a link to nowhere":
        folder.symlink_to(tmp_path / "nowhere" / "at all")
    else:
        folder.write_text("")
    with pytest.raises(CheckpointError, match=r"^Cannot write checkpoints to .*: (Not a directory|File exists)\."):
        trained.fit(1)
    assert trained.step == 0
