"""A training with an upload that is in flight: `python uploading_run.py FOLDER [kill]`."""

import os
import signal
import sys
import threading
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax

from fluxcb import Callback, Learner, Read, on
from fluxcb.callbacks import Checkpointer
from fluxcb.events import EpochEnd, FitEnd, StepEnd
from fluxcb.phases import TrainingPhase

FOLDER, KILLS = Path(sys.argv[1]), len(sys.argv) > 2
in_flight, never = threading.Event(), threading.Event()


class Uploads(Callback):
    """Write the epoch to a file. In the run that is killed, the upload of epoch 2 has begun and does not end."""

    def stateaccess(self):
        return {"params": Read()}

    @on(EpochEnd, TrainingPhase, deadline=FitEnd)
    def upload(self, event, phase, learner):
        epoch = learner.progress.epoch
        if KILLS and epoch == 2:
            in_flight.set()
            never.wait()
        with (FOLDER / "uploads.txt").open("a") as file:
            file.write(f"{epoch} {float(learner.params['w'])}\n")


class Kills(Callback):
    """Kill the process in epoch 3, after the checkpoint of epoch 2, while the upload of epoch 2 is in flight."""

    @on(StepEnd, TrainingPhase)
    def kill(self, event, phase, learner):
        if KILLS and learner.progress.step == 5:
            in_flight.wait()
            for callback in learner_of_run.callbacks:
                if isinstance(callback, Checkpointer):
                    callback.wait()
            os.kill(os.getpid(), signal.SIGKILL)


learner_of_run = Learner.from_loss(
    {"w": jnp.zeros(())},
    lambda params, batch, key: params["w"] + 0 * jnp.sum(batch),
    optax.sgd(1.0),
    data=[np.zeros(1, np.float32)] * 2,
    callbacks=[Uploads(), Kills(), Checkpointer(FOLDER / "saved")],
    default_callbacks=False,
    steps_per_call=1,
)
warnings.simplefilter("error")
learner_of_run.fit(4, resume=True)
