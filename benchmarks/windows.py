"""(2) What a step costs in windows of a fixed length, beside `lax.scan`s of the same length written by hand."""

from __future__ import annotations

import mlp
from figures import Table
from interleave import comparison, in_turns

from fluxcb.data import ArrayLoader

LENGTHS = 10, 100


def measure(rounds: int) -> list[Table]:
    """Return the table of windows."""
    variants, floors = {}, {}
    for length in LENGTHS:
        scan = f"lax.scan of {length}, by hand, stacked before"
        of_this_length = {
            scan: mlp.by_hand_in_windows(length),
            f"lax.scan of {length}, by hand, stacked in the loop": mlp.by_hand_in_windows(length, stacks=True),
            f"no callbacks, steps_per_call={length}": mlp.by_fluxcb([], steps_per_call=length),
            f"default callbacks, steps_per_call={length}": mlp.by_fluxcb(mlp.defaults(), steps_per_call=length),
            f"the same, ArrayLoader(device=True), {length}": mlp.by_fluxcb(
                mlp.defaults(),
                ArrayLoader(mlp.arrays(), mlp.BATCH, shuffle=False, device=True),
                steps_per_call=length,
            ),
        }
        variants |= of_this_length
        floors |= dict.fromkeys(of_this_length, scan)
    table = comparison(
        "Windows, against a hand-written `lax.scan` over stacked batches", in_turns(variants, rounds), floors
    )
    table.notes.append("Stacked before: the batches of each window are stacked on the device before timing begins.")
    return [table]
