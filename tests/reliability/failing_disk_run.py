"""Trainings whose disk fails, for test_disks.py. Each reports its result.

In a separate mount namespace (`unshare -rm`), the disk is a small tmpfs that becomes full or read-only. Otherwise, the
size of files is limited, or the directory is deleted.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from fluxcb import Learner
from fluxcb._errors import CheckpointError
from fluxcb.callbacks import Checkpointer, CustomCallback
from fluxcb.checkpoints import load_params
from fluxcb.checkpoints.run_folder import entries_of
from fluxcb.checkpoints.verification import verify_checkpoint
from fluxcb.events import FitEnd, StepEnd
from fluxcb.phases import TrainingPhase

SIZE = 100_000  # float32: 0.4 MB, more than what else is in a checkpoint
STEPS, FAULT = 12, 5
FILLER = "filler"
FIRST = np.random.default_rng(0).integers(0, 1 << 20, SIZE).astype(np.float32)  # which no compression makes small


def learner(run, break_down=lambda learner: None, end=lambda learner: None):
    """Return a Learner whose parameters are the initial ones plus the number of steps."""
    return Learner.from_loss(
        {"w": FIRST},
        lambda params, batch, key: -jnp.sum(params["w"]) + 0 * jnp.sum(batch),
        optax.sgd(1.0),
        data=[np.zeros(1, np.float32)] * 4,
        callbacks=[
            Checkpointer(run, steps=2),
            CustomCallback(break_down, StepEnd, phase=TrainingPhase, name="breaks"),
            CustomCallback(end, FitEnd, name="ends"),
        ],
        default_callbacks=False,
    )


def steps_of(params):
    """Return the number of steps after which all parameters have these values."""
    (steps,) = set((np.asarray(params["w"]) - FIRST).tolist())
    return steps


def run_as_root(*args):
    """Run mount or umount."""
    subprocess.run(args, check=True, stderr=subprocess.PIPE)


def protect(disk):
    """Mount a read-only view over a disk, which cannot become read-only itself while the lock of the run is open."""
    run_as_root("mount", "--bind", str(disk), str(disk))
    run_as_root("mount", "-o", "remount,bind,ro", str(disk))


def fill(disk):
    """Fill a disk completely."""
    with (disk / FILLER).open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            while True:
                try:
                    file.write(b"x" * size)
                except OSError:
                    break


def limit(size):
    """Limit the size of files in bytes, or remove the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


FAULTS = {
    # What happens to the disk, and what ends that.
    "full": (fill, lambda disk: (disk / FILLER).unlink()),
    "read-only": (protect, lambda disk: run_as_root("umount", str(disk))),
    "limited": (lambda disk: limit(SIZE), lambda disk: limit(None)),
    "deleted": (lambda disk: shutil.rmtree(disk / "run"), lambda disk: None),
}


def failing(disk: Path, fault: str) -> dict:
    """Train until the disk fails, and continue when it works again."""
    begin, end = FAULTS[fault]
    run, ended = disk / "run", []

    def break_down(learner):
        if learner.progress.step == FAULT:
            trained.callbacks.get(Checkpointer).wait()
            begin(disk)

    trained = learner(run, break_down, lambda learner: ended.append(learner.progress.step))
    told: dict[str, Any] = {"raised": None}
    try:
        trained.fit(steps=STEPS)
    except CheckpointError as error:
        told["raised"] = error.what.replace(str(run), "RUN")
    reason = (trained.stop_reason or "").replace(str(run), "RUN").split("\n")[0]
    told |= {"at": trained.step, "ended": ended, "reason": reason}
    told["there"] = [verify_checkpoint(entry.path).step for entry in entries_of(run)]
    told["params"] = [steps_of(load_params(entry.path)) for entry in entries_of(run)]
    told["left"] = sorted(name for name in os.listdir(run) if name.startswith(".")) if run.exists() else []
    end(disk)
    again = learner(run)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The run resumes from")  # the list of batches is read again
        again.fit(steps=STEPS, resume=True)
    told |= {"again": [again.step, steps_of(again.params)]}
    told["then"] = [verify_checkpoint(entry.path).step for entry in entries_of(run)]
    return told


def main(folder: str, *faults: str) -> None:
    """Run each kind of disk failure once."""
    told = {}
    for fault in faults:
        disk = Path(folder) / fault
        disk.mkdir()
        if fault in ("full", "read-only"):
            run_as_root("mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk))
        told[fault] = failing(disk, fault)
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
