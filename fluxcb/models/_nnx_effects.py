"""Numbers in Flax NNX modules that a call changes while the step is traced."""

from __future__ import annotations

from typing import Any

from fluxcb._attributes import numbers_in
from fluxcb._tracebacks import warn_user

__all__ = ["warn_of_changed"]


def warn_of_changed(name: str, module: Any, before: dict[str, int | float]) -> None:
    """Warn about numbers that a call of a module has changed.

    Args:
        name: The name of the module.
        module: The module after the call.
        before: Its numbers before the call; see `numbers_in`.
    """
    after = numbers_in(module)
    for path in before.keys() & after.keys():
        if before[path] != after[path]:
            own = f"self.{path.rpartition('.')[2]}"
            warn_user(
                f"A call of the NNX module `{name}` changed its attribute `{path}`. The change happens once, while the "
                "step is traced, and is lost afterwards. To change it at each step, make it a variable: write "
                f"`{own} = nnx.BatchStat(jnp.asarray({before[path]}))` in the constructor, and assign to `{own}[...]`.",
                UserWarning,
            )
