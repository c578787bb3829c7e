"""`SanityCheck`: look before training whether it can go well."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from fluxcb._declare.access import Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, FitBegin
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import Phase
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.sanity_checks import Check, default_checks

__all__ = ["SanityCheck"]

_READ = ("data", "model", "loss_fn", "optimizer", "callbacks")


class SanityCheck(Callback):
    """Make some checks when a fit begins: all of them, and then one error that tells all failures.

    By default: there are training data, and validation data (else a warning); batches are pairs of equal batch sizes,
    with finite inputs (else a warning); parameters, the model's outputs, and the loss of the first batch are finite,
    and the loss is a scalar. Data that can be gone through only once are not looked at. A Learner without a model
    (`Learner.from_loss`) may have any batches.

    Args:
        checks: Checks of your own.
        defaults: Whether to make the default checks, too; they are made if there are no others, unless this is False.

    Access:
        data, model, loss_fn, optimizer, callbacks: Read.
        params, model_state: Read (borrowed).

    Runs:
        FitBegin x Phase (host).

    Cost:
        One batch and one evaluation of the model and the loss on it, operation by operation, per fit.

    Raises:
        DeclarationError: Something among `checks` is none. At FitBegin: checks failed.

    Example:
        >>> import jax.numpy as jnp, optax, fluxcb
        >>> from fluxcb.callbacks import SanityCheck
        >>> learner = fluxcb.Learner.from_loss(
        ...     {"w": jnp.zeros(())},
        ...     lambda params, batch, key: jnp.mean(jnp.log(params["w"]) * batch),
        ...     optax.sgd(0.1),
        ...     data=([jnp.ones(2)], [jnp.ones(2)]),
        ...     callbacks=[SanityCheck()],
        ...     default_callbacks=False,
        ... )
        >>> try:
        ...     history = learner.fit(1)
        ... except fluxcb.DeclarationError as error:
        ...     print(error)
        1 of 8 sanity checks failed.
          where: a finite loss: the loss of the first batch of training is no finite scalar
          why:   training would not go well
          fix:   mend it, or leave out `SanityCheck` if it is meant so

    Source:
        FluxTraining.jl, `SanityCheck`.
    """

    def __init__(self, checks: Iterable[Check] = (), *, defaults: bool | None = None) -> None:
        own = tuple(checks) if isinstance(checks, Iterable) else (checks,)
        for check in own:
            if not isinstance(check, Check):
                raise DeclarationError(
                    f"`SanityCheck` takes checks, not {check!r}.", fix='e.g. `Check(function, "name", "message")`'
                )
        wanted = not own if defaults is None else defaults
        self.checks = (*(default_checks() if wanted else ()), *own)

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        borrowed = {name: Read(borrow=True) for name in ("params", "model_state")}
        return {**{name: Read() for name in _READ}, **borrowed}

    @on(FitBegin, Phase)
    def check(self, event: Event, phase: Phase, learner: Any) -> None:
        """Make the checks.

        Raises:
            DeclarationError: Some failed.
        """
        failures = [(check, text) for check in self.checks if (text := check.failure(learner)) is not None]
        for check, text in failures:
            if not check.error:
                warnings.warn(f"sanity check: {text}", UserWarning, stacklevel=2)
        errors = [text for check, text in failures if check.error]
        if errors:
            raise DeclarationError(
                f"{len(errors)} of {len(self.checks)} sanity checks failed.",
                where=errors,
                why="training would not go well",
                fix=f"mend {'it' if len(errors) == 1 else 'them'}, or leave out `SanityCheck` if it is meant so",
            )

    def __repr__(self) -> str:
        return f"SanityCheck({len(self.checks)} checks)"
