"""`ModelSummary`: print a table of the parameters of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import IO, Any

from fluxcb._declare.access import Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, FitBegin
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import Phase
from fluxcb.callbacks.progress.console import console_for, print_table
from fluxcb.logging.consoles import text_file

__all__ = ["ModelSummary"]


class ModelSummary(Callback):
    """Print a table of the parameters when a fit begins: path, shape, dtype, count and size (bytes).

    Args:
        file: Where to print; standard output by default.

    Access:
        params: Read (borrowed).

    Runs:
        FitBegin x Phase (host).

    Cost:
        None per step. Only reads shapes and dtypes.

    Example:
        >>> import io, jax.numpy as jnp, optax, fluxcb
        >>> from fluxcb.callbacks import ModelSummary
        >>> learner = fluxcb.Learner.from_loss(
        ...     {"dense": {"w": jnp.ones((64, 10)), "b": jnp.ones(10)}},
        ...     lambda params, batch, key: jnp.sum(params["dense"]["w"]) * 0.0,
        ...     optax.sgd(0.1),
        ...     data=[jnp.ones(2)],
        ...     callbacks=[ModelSummary(file := io.StringIO())],
        ...     default_callbacks=False,
        ... )
        >>> history = learner.fit(1)
        >>> print(file.getvalue().rstrip())
        parameter      shape    dtype  count  bytes
        -------------------------------------------
        dense/b         (10)  float32     10     40
        dense/w    (64 x 10)  float32    640  2,560
        -------------------------------------------
        2 arrays                         650  2,600

    Source:
        Keras, `Model.summary`; tensorpack, `describe_trainable_vars`.
    """

    chief_only = True  # one process prints

    def __init__(self, file: IO[str] | None = None) -> None:
        self.file = text_file(file, "ModelSummary")

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the declared access; see the class docstring."""
        return {"params": Read(borrow=True)}

    @on(FitBegin, Phase)
    def show(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Print the table."""
        import jax

        rows, counts, sizes = [], 0, 0
        for path, leaf in jax.tree_util.tree_flatten_with_path(learner.params)[0]:
            count = math.prod(leaf.shape)
            counts, sizes = counts + count, sizes + leaf.nbytes
            name = jax.tree_util.keystr(path, simple=True, separator="/") or "params"
            shape = f"({' x '.join(map(str, leaf.shape))})"
            rows.append([name, shape, str(leaf.dtype), f"{count:,}", f"{leaf.nbytes:,}"])
        footer = [f"{len(rows)} array{'s' if len(rows) != 1 else ''}", "", "", f"{counts:,}", f"{sizes:,}"]
        print_table(console_for(self.file), ["parameter", "shape", "dtype", "count", "bytes"], rows, footer)
