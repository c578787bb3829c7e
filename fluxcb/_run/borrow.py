"""`learner.borrow`: the live arrays of the train state."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from fluxcb._calls import entry_point
from fluxcb._compile.carry_paths import below, names_in
from fluxcb._errors import DeclarationError, did_you_mean
from fluxcb._run.learner_core import LearnerCore
from fluxcb._typing import PyTree

__all__ = ["Borrowing"]

_ROOTS = ("params", "model_state", "opt_state")


class Borrowing:
    """Base class of `Learner`: lends the arrays of its train state."""

    _core: LearnerCore

    @entry_point
    def borrow(self, path: str) -> PyTree:
        """Return the live arrays of a part of the train state, without copying them.

        The arrays are valid until the next training step, which donates them. Reading them after that step raises the
        error of JAX for a deleted array. `learner.params` returns a copy that stays valid.

        Borrowing does not wait for the device. It is meant for loops that call `run_step`, for example to choose
        actions with the current parameters between two updates.

        Args:
            path: `params`, `model_state`, `opt_state`, or a part of one of them such as `params.encoder`.

        Returns:
            The arrays, in new containers. Replacing an entry of a container does not change the train state.

        Raises:
            DeclarationError: The train state has no such part, or a handler of a step calls this method.

        Example:
            >>> import jax.numpy as jnp, optax, fluxcb
            >>> from fluxcb.phases import TrainingPhase
            >>> batch = jnp.ones(4)
            >>> learner = fluxcb.Learner.from_loss(
            ...     {"w": jnp.ones(())},
            ...     lambda params, batch, key: jnp.mean(params["w"] * batch),
            ...     optax.sgd(0.25),
            ...     example_batch=batch,
            ...     default_callbacks=False,
            ... )
            >>> values = learner.run_step(TrainingPhase(), batch)
            >>> w = learner.borrow("params.w")
            >>> w.item()
            0.75
            >>> values = learner.run_step(TrainingPhase(), batch)
            >>> w.is_deleted()
            True
        """
        root, *rest = path.split(".") if isinstance(path, str) else [""]
        if root not in _ROOTS:
            raise DeclarationError(
                f"`learner.borrow` takes the path of a part of the train state, not {path!r}."
                f"{did_you_mean(path, _ROOTS) if isinstance(path, str) else ''}",
                why=f"the train state has {', '.join(_ROOTS)}",
                fix='write e.g. `learner.borrow("params")`',
            )
        # A handler of a step must declare its reads, because the device may already have donated these arrays.
        self._core.refuse_ahead(f"borrow({path!r})")
        # Not `live`, which would wait for the device.
        part = self._core.state.train.borrowed((root,))
        try:
            part = below(part, tuple(rest))
        except (LookupError, AttributeError, TypeError):
            names = list(map(str, names_in(part))) if isinstance(part, Mapping) or hasattr(part, "_fields") else []
            raise DeclarationError(
                f"`learner.borrow({path!r})` does not name a part of `{root}`."
                f"{did_you_mean(rest[0], names) if names else ''}",
                why=f"`{root}` has {', '.join(names)}" if names else "",
                fix=f'write `learner.borrow("{root}")`',
            ) from None
        return jax.tree.map(lambda leaf: leaf, part)  # new containers, so that writes into them cannot reach the carry
