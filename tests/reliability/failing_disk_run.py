"""Trainings whose disk fails, by test_disks.py; each says what became of it.

In a mount namespace of its own (`unshare -rm`), the disk is a small tmpfs that is filled, or turned read-only. Anywhere
else, files may not grow any more, or the directory is deleted.
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
from fluxcb.checkpoints.run_folder import entries_of, whole
from fluxcb.events import FitEnd, StepEnd
from fluxcb.phases import TrainingPhase

SIZE = 100_000  # float32: 0.4 MB, more than what else is in a checkpoint
STEPS, FAULT = 12, 5
FILLER = "filler"
FIRST = np.random.default_rng(0).integers(0, 1 << 20, SIZE).astype(np.float32)  # which no compression makes small


def learner(run, break_down=lambda learner: None, end=lambda learner: None):
    """Return a Learner whose parameters are the first ones and the number of steps."""
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
    """Return after how many steps all parameters are those."""
    (steps,) = set((np.asarray(params["w"]) - FIRST).tolist())
    return steps


def run_as_root(*args):
    """Run mount or umount."""
    subprocess.run(args, check=True, stderr=subprocess.PIPE)


def protect(disk):
    """Lay a read-only view over a disk: itself it cannot become read-only while the run's lock is open for writing."""
    run_as_root("mount", "--bind", str(disk), str(disk))
    run_as_root("mount", "-o", "remount,bind,ro", str(disk))


def fill(disk):
    """Leave no byte on a disk."""
    with (disk / FILLER).open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            while True:
                try:
                    file.write(b"x" * size)
                except OSError:
                    break


def limit(size):
    """Let files have so many bytes at most, or again as many as they like."""
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
    """Train until the disk fails, and on when it is mended."""
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
    told["there"] = [whole(entry.path).step for entry in entries_of(run)]
    told["params"] = [steps_of(load_params(entry.path)) for entry in entries_of(run)]
    told["left"] = sorted(name for name in os.listdir(run) if name.startswith(".")) if run.exists() else []
    end(disk)
    again = learner(run)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The run goes on from")  # the list of batches is read again
        again.fit(steps=STEPS, resume=True)
    told |= {"again": [again.step, steps_of(again.params)]}
    told["then"] = [whole(entry.path).step for entry in entries_of(run)]
    return told


def main(folder: str, *faults: str) -> None:
    """Let disks fail in some ways, each of them once."""
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
