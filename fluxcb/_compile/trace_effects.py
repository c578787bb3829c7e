"""Effects of traced handlers that happen once, while the step is traced, and not at each step."""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from fluxcb._declare.declared import BoundHandler
from fluxcb._tracebacks import warn_user

__all__ = ["warn_once_only"]


@contextmanager
def warn_once_only(handler: BoundHandler) -> Iterator[None]:
    """Warn if a traced handler draws random numbers outside JAX or counts in a field of its callback."""
    owner = getattr(handler.function, "__self__", None)
    numpy_before, python_before, fields_before = _numpy_random(), random.getstate(), _numbers(owner)
    yield
    name = f"The traced handler {handler.declared.label}.{handler.name}"
    # Another thread, such as one that prepares batches, may draw from the same generators in the meantime.
    alone = threading.active_count() == 1
    if alone and (_numpy_random() != numpy_before or random.getstate() != python_before):
        warn_user(
            f"{name} drew random numbers outside JAX. They are drawn once, while the step is traced, so every step "
            "uses the same numbers. Use `learner.key`, e.g. `jax.random.normal(learner.key, shape)`.",
            UserWarning,
        )
    for field, value in _numbers(owner).items():
        before = fields_before.get(field, value)
        if before is value or before == value:  # the same NaN is not equal to itself
            continue
        warn_user(
            f"{name} changed `self.{field}`. The change happens once, while the step is traced, and not at each step. "
            f"Keep the value in `learner.cbstate`, or change `self.{field}` in a host handler.",
            UserWarning,
        )


def _numpy_random() -> bytes:
    return pickle.dumps(np.random.get_state(legacy=False))  # any bit generator; its arrays cannot be compared by `==`


def _numbers(owner: object) -> dict[str, Any]:
    """Return the fields of an object that are numbers. A field may have its first value in the class."""
    fields = {**vars(type(owner)), **getattr(owner, "__dict__", {})}
    return {name: value for name, value in fields.items() if isinstance(value, int | float)}
