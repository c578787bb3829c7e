"""`callbacks_as_hook`: builds the hook with which callbacks run inside a hand-written training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluxcb._calls import entry_point
from fluxcb._compile.arrays import spec_of
from fluxcb._compile.hyperparams import HyperparamIndex
from fluxcb._declare.declared import declare
from fluxcb._run.arguments import as_key
from fluxcb._run.external_loop import CallbacksHook
from fluxcb._run.external_refusals import (
    check_access,
    check_handlers,
    check_names,
    check_tree,
    warn_about_other_phases,
)
from fluxcb._run.external_state import ExternalTrainState, ExternalTree
from fluxcb._run.external_steps import lent_trees, loop_engine, phase_of, skips_updates
from fluxcb._run.external_values import declared_values
from fluxcb._run.learner import WINDOW_BYTES, Learner
from fluxcb._run.learner_core import LearnerCore
from fluxcb._typing import PyTree

__all__ = ["callbacks_as_hook"]


@entry_point
def callbacks_as_hook(
    callbacks: Iterable[Any],
    values: Mapping[str, Any],
    *,
    state: Callable[[], PyTree] | None = None,
    set_state: Callable[[PyTree], None] | None = None,
    resume: bool = False,
    key: Any = 0,
) -> CallbacksHook:
    """Use callbacks in a hand-written training loop that keeps its own model, optimizer, and step function.

    The loop reports each finished step, and the callbacks see it as they see a step of a Learner. The reported values
    are `step.<name>`, and `cbstate`, `progress`, and `control` exist. Host handlers run in the order of the callback
    graph. Traced handlers are compiled into a program of their own, which takes the reported values.

    With `state`, callbacks also see the train state of the loop as `params`, `opt_state`, `model_state`, and
    `hyperparams`. Checkpoints, parameter averages, and NaN guards then work. With `set_state`, callbacks can also
    change it, so the loop can resume from a checkpoint. Without `state`, a callback that declares one of these is
    refused.

    Reporting a step does not wait for the device. A handler that reads a value waits for that value.

    Args:
        callbacks: Callback instances, and `in_order(...)` groups of them.
        values: The values that the loop reports after a step, by name: examples of them, or `jax.ShapeDtypeStruct`s.
        state: Returns the current train state of the loop. In a mapping or an object, the entries `params` and
            `opt_state` are found by name. A tuple has `params` first and `opt_state` second. Everything else in it is
            `model_state`, and a pytree without a `params` entry is all `params`.
        set_state: Takes a new train state of the same structure. It is called after the handlers of a moment if one of
            them changed the state.
        resume: Whether to call `hook.resume()` when the `with` block is entered.
        key: Seed (int) or typed random key, for callbacks that draw numbers.

    Returns:
        The hook. As a context manager, it begins and ends the training, and a `CancelFitting` of a callback leaves the
        `with` block without an error.

    Raises:
        DeclarationError: A callback uses something that the loop does not provide, or acts inside the loop's step; a
            value is not an array.
        FluxcbError: The callbacks do not fit together, as for `Learner`.

    Warns:
        UserWarning: All handlers of a callback are for phases that the loop does not have, such as validation.

    Example:
        >>> import jax, jax.numpy as jnp, fluxcb
        >>> from fluxcb.callbacks import EarlyStopping, Metrics
        >>> train_step = jax.jit(lambda w: (w - 0.25 * (w - 1), (w - 1) ** 2))
        >>> stop = EarlyStopping(fluxcb.stopping.Threshold(0.1), metric="loss", phase="training")
        >>> w = jnp.float32(3.0)
        >>> with fluxcb.callbacks_as_hook([Metrics(), stop], {"loss": 0.0}) as hook:
        ...     for epoch in range(1, 100):
        ...         w, loss = train_step(w)
        ...         hook.after_step(epoch, {"loss": loss})
        ...         hook.after_epoch()
        >>> epoch, hook.stop_reason
        (8, 'training/loss: 0.0712718 is below 0.1')

    Source:
        tensorpack, `CallbackToHook`, which passes on only the events around a step.
    """
    items: Any = list(callbacks) if isinstance(callbacks, Iterable) else callbacks
    names = declared_values(values)
    check_tree(state, set_state, resume=resume)
    phase = phase_of(tuple(names), with_state=state is not None)
    declared = declare(items)[0]
    for declared_callback in declared:
        # Checked before the Learner is built, whose errors would speak of a Learner that the user does not have.
        check_access(declared_callback, names, has_state=state is not None, has_put=set_state is not None)
        check_handlers(declared_callback, type(phase), has_state=state is not None)
        warn_about_other_phases(declared_callback, type(phase))
    check_names(declared, names, type(phase))
    loop = ExternalTree(state, set_state) if state is not None else None
    # A Learner whose engine runs no steps itself. Its graph, checks, `cbstate`, and checkpoints work as in any Learner.
    train = ExternalTrainState(as_key(key), loop)
    engine = loop_engine(train, WINDOW_BYTES)
    # The constructor would require a model and compile its steps.
    learner = Learner.__new__(Learner)
    # Traced handlers read these trees, so they are arguments of the compiled program.
    lent = {name: spec_of(loop.parts[name]) for name in lent_trees(declared, phase)} if loop is not None else {}
    core = LearnerCore(
        adapter=None,
        params={"loop": jnp.zeros(())},  # required by the core, but never used
        engine=engine,
        phases=(phase,),
        data=None,
        example_batch=names if loop is None else (names, lent),  # the form of a step in `ExternalStepLoop.run_one`
        callbacks=lambda: learner.callbacks,
    )
    if loop is not None:
        # LearnerCore has built a carry without an optimizer state; the loop's own has the hyperparameters.
        train.hyperparams = HyperparamIndex(loop.parts["opt_state"], engine.state.optimizer)
        if skips_updates(declared, phase):
            # The step writes this entry, and a compiled step cannot add entries to the carry.
            train.carry = {**train.carry, "model_state": {"skipped": jax.device_put(np.bool_(False))}}
    learner._begin(core, items, False)
    return CallbacksHook(learner, names, loop, resume=resume)
