"""`fluxcb control`: a command to a running training."""

from __future__ import annotations

import math
import sys
from pathlib import Path

from fluxcb._declare.state import is_negative_rate
from fluxcb._terminal import escape_block
from fluxcb._tools.commands import UsageError
from fluxcb.callbacks.system.run_control import SWITCHES, RunControl

__all__ = ["control"]


def control(run: Path, action: str, name: str | None, value: float | None, *, wait: float) -> int:
    """Send a command, and show after which step the training has applied it.

    Raises:
        UsageError: The arguments do not fit the action.
        FluxcbError: The training refuses the command, or does not answer.
    """
    if action == "set":
        if name is None or value is None:
            raise UsageError("`set` takes a hyperparameter and a value: `fluxcb control RUN set learning_rate 1e-4`")
        if not math.isfinite(value):
            raise UsageError(f"`set` takes a finite number, not {value}: `fluxcb control RUN set {name} 1e-4`")
        if is_negative_rate(name, value):
            raise UsageError(
                f"`set` takes a learning rate that is not negative, not {value:g}: `fluxcb control RUN set {name} 1e-4`"
            )
    elif action in SWITCHES:
        if name is None or value is not None:
            raise UsageError(
                f"`{action}` takes the name of a callback: `fluxcb control RUN {action} ThroughputTracker`"
            )
    elif name is not None:
        raise UsageError(f"`{action}` takes no further arguments: `fluxcb control RUN {action}`")
    training = RunControl(run, wait=wait)
    if action == "set":
        step, done = training.set(name or "", value or 0.0), f"{name} is {value:g}"
    elif action in SWITCHES:
        step = training.disable(name or "") if action == "disable" else training.enable(name or "")
        done = f"{name} is {action}d at the end of the epoch,"
    elif action == "save":
        step, done = training.save(), "the state is saved as it is"
    else:
        step, done = training.stop(), "the fit ends"
    sys.stdout.write(escape_block(f"{done} after step {step}\n" if step is not None else "sent\n"))
    return 0
