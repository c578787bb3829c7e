"""(1) What a step costs, beside loops written by hand that call the compiled step once a step."""

from __future__ import annotations

from dataclasses import replace

import mlp
from figures import Table
from interleave import comparison, in_turns

from fluxcb.data import ArrayLoader

NEVER, EACH_STEP, EACH_EPOCH = "by hand, never reads the loss", "by hand, float(loss) each step", "by hand, history"
BY_LOADER = "by hand over ArrayLoader"
SINGLE, SINGLE_NONE = "default callbacks, steps_per_call=1", "no callbacks, steps_per_call=1"
AUTO, AUTO_NONE = 'default callbacks, "auto"', 'no callbacks, "auto"'
MEASURED = 'default callbacks, "auto", measuring'
DEVICE, DEVICE_SHUFFLED = "ArrayLoader(device=True), in order", "ArrayLoader(device=True), shuffled"


def measure(rounds: int) -> list[Table]:
    """Return the tables of the per-step loop."""
    shuffled = ArrayLoader(mlp.arrays(), mlp.BATCH)
    shuffled.set_epoch(1)  # a Learner numbers its epochs from 1 on
    times = in_turns(
        {
            NEVER: mlp.by_hand(reads="never"),
            EACH_STEP: mlp.by_hand(reads="each step"),
            EACH_EPOCH: mlp.by_hand(reads="each epoch"),
            BY_LOADER: replace(mlp.by_hand(reads="never", data=shuffled), same_as=BY_LOADER),
            SINGLE_NONE: mlp.by_fluxcb([], steps_per_call=1),
            SINGLE: mlp.by_fluxcb(mlp.defaults(), steps_per_call=1),
            AUTO_NONE: mlp.by_fluxcb([], steps_per_call="auto"),
            AUTO: mlp.by_fluxcb(mlp.defaults(), steps_per_call="auto"),
            MEASURED: mlp.by_fluxcb(mlp.defaults(), steps_per_call="auto", measured=True),
            DEVICE: mlp.by_fluxcb(mlp.defaults(), _on_device(shuffle=False), steps_per_call="auto"),
            DEVICE_SHUFFLED: replace(
                mlp.by_fluxcb(mlp.defaults(), _on_device(), steps_per_call="auto"), same_as=BY_LOADER
            ),
        },
        rounds,
    )
    everything = dict.fromkeys(times, NEVER)
    against_never = comparison("Each step, against a hand-written loop that never reads the loss", times, everything)
    against_never.notes += [
        f"{EACH_EPOCH}: keeps the loss of each step, and fetches all losses at the end of the epoch.",
        f"{BY_LOADER}: gathers each batch with NumPy, as `ArrayLoader` does without `device=True`.",
    ]
    against_reading = comparison(
        "Each step, against a hand-written loop that reads float(loss) each step",
        times,
        dict.fromkeys([EACH_STEP, SINGLE, AUTO, DEVICE], EACH_STEP),
    )
    measuring = comparison(
        "Measuring the time of each handler, against not measuring it", times, {AUTO: AUTO, MEASURED: AUTO}
    )
    return [against_never, against_reading, measuring]


def _on_device(*, shuffle: bool = True) -> ArrayLoader:
    return ArrayLoader(mlp.arrays(), mlp.BATCH, shuffle=shuffle, device=True)
