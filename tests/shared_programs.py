"""Compiled programs that the Learners of many tests share if they are equal."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from fluxcb._compile import program
from fluxcb._run import programs


@contextmanager
def shared_programs(kept: dict[Any, Any] | None = None) -> Iterator[dict[Any, Any]]:
    """Let Learners with equal steps, including all constants, share their compiled programs.

    Args:
        kept: The programs that were compiled before.
    """
    kept = {} if kept is None else kept

    def compile_program(step, carry, batches, **how):
        if not all(hasattr(leaf, "shape") for leaf in jax.tree.leaves(batches)):  # rows of arrays on the device
            return program.compile_program(step, carry, batches, **how)
        fetch, layout, closed = how["fetch"], how["layout"], step.jaxpr
        key = (
            str(closed.jaxpr),
            *(np.asarray(const).tobytes() for const in closed.consts),
            programs.signature(carry),
            (layout.signature[1], layout.vectors) if layout is not None else None,
            tuple(leaf.sharding for leaf in jax.tree.leaves(carry)) if layout is None else (),  # in vectors: the CPU
            jax.tree.structure(batches),
            tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves(batches)),
            (tuple(fetch.each), tuple(fetch.last), how["kind"], how.get("steps"), how.get("unpacked"), how["fuses"]),
        )
        if key not in kept:
            kept[key] = program.compile_program(step, carry, batches, **how)
        return replace(kept[key], step=step, fetch=fetch, layout=layout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "compile_program", compile_program)
        yield kept
