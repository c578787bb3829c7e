"""`SanityCheck`: check the data, the model and the loss before training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fluxcb._declare.access import Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, FitBegin
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import Phase
from fluxcb._errors import DeclarationError
from fluxcb._tracebacks import warn_user
from fluxcb.callbacks.arguments import require
from fluxcb.callbacks.inspect.sanity_checks import Check, default_checks

__all__ = ["SanityCheck"]

_READ = ("data", "model", "loss_fn", "optimizer", "callbacks")


class SanityCheck(Callback):
    """Run sanity checks when a fit begins, and raise a single error that lists all failures.

    The default checks require training data, batches that are pairs with equal batch sizes, finite parameters, finite
    model outputs, and a finite scalar loss for the first batch. They warn if there are no validation data or if an
    input is not finite. The checks do not read from one-shot iterators, because the training would miss that batch. A
    Learner without a model (`Learner.from_loss`) accepts any batches.

    Args:
        checks: Additional checks.
        defaults: Whether to run the default checks. By default, they only run if `checks` is empty.

    Access:
        data, model, loss_fn, optimizer, callbacks: Read.
        params, model_state: Read (borrowed).

    Runs:
        FitBegin x Phase (host).

    Cost:
        Per fit, evaluates the model and the loss on one batch without compiling them.

    Raises:
        DeclarationError: An item of `checks` is not a `Check`. At FitBegin: a check failed.

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
          where: a finite loss: the loss of the first training batch is not a finite scalar
          why:   training is unlikely to work as intended
          fix:   correct it, or remove `SanityCheck` if this is intended

    Source:
        FluxTraining.jl, `SanityCheck`.
    """

    def __init__(self, checks: Iterable[Check] = (), *, defaults: bool | None = None) -> None:
        additional = tuple(checks) if isinstance(checks, Iterable) else (checks,)
        for check in additional:
            fits = isinstance(check, Check)
            require(fits, check, "Each check of `SanityCheck`", "a `Check`", 'Check(function, "name", "message")')
        include_defaults = not additional if defaults is None else defaults
        self.checks = (*(default_checks() if include_defaults else ()), *additional)

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the declared access; see the class docstring."""
        borrowed = {name: Read(borrow=True) for name in ("params", "model_state")}
        return {**{name: Read() for name in _READ}, **borrowed}

    @on(FitBegin, Phase)
    def check(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Run the checks.

        Raises:
            DeclarationError: At least one check failed.
        """
        failures = [(check, text) for check in self.checks if (text := check.failure(learner)) is not None]
        for check, text in failures:
            if not check.error:
                warn_user(f"sanity check: {text}", UserWarning)
        errors = [text for check, text in failures if check.error]
        if errors:
            raise DeclarationError(
                f"{len(errors)} of {len(self.checks)} sanity checks failed.",
                where=errors,
                why="training is unlikely to work as intended",
                fix=f"correct {'it' if len(errors) == 1 else 'them'}, or remove `SanityCheck` if this is intended",
            )

    def __repr__(self) -> str:
        return f"SanityCheck({len(self.checks)} checks)"
