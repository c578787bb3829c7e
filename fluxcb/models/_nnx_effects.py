"""Numbers in Flax NNX modules that a call changes while the step is traced."""

from __future__ import annotations

from typing import Any

from flax import nnx

from fluxcb._tracebacks import warn_user

__all__ = ["numbers_of", "warn_of_changed"]


def numbers_of(module: Any) -> dict[str, int | float]:
    """Return the numbers in the public attributes of a module and its layers that are not variables, by path."""
    return {
        ".".join(map(str, (*path, name))): value
        for path, layer in nnx.iter_modules(module)
        for name, value in vars(layer).items()
        # Booleans are modes. A private attribute may be a cache, which is filled once on purpose.
        if isinstance(value, int | float) and not isinstance(value, bool) and not name.startswith("_")
    }


def warn_of_changed(name: str, module: Any, before: dict[str, int | float]) -> None:
    """Warn about numbers that a call of a module has changed.

    Args:
        name: The name of the module.
        module: The module after the call.
        before: Its numbers before the call; see `numbers_of`.
    """
    after = numbers_of(module)
    for path in before.keys() & after.keys():
        if before[path] != after[path]:
            own = f"self.{path.rpartition('.')[2]}"
            warn_user(
                f"A call of the NNX module `{name}` changed its attribute `{path}`. The change happens once, while the "
                "step is traced, and is lost afterwards. To change it at each step, make it a variable: write "
                f"`{own} = nnx.BatchStat(jnp.asarray({before[path]}))` in the constructor, and assign to `{own}[...]`.",
                UserWarning,
            )
