"""Calling a loss function with the model or the parameters, and the batch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fluxcb._compile.call_errors import batch_loss_advice, noting
from fluxcb._compile.trace_effects import warn_of_random_numbers
from fluxcb._compile.traced import TraceState
from fluxcb._declare.losses import batch_arguments, takes
from fluxcb._declare.padded_batch import mask_of
from fluxcb._errors import DeclarationError, TraceError
from fluxcb._tracebacks import warn_user
from fluxcb._traced_values import describe
from fluxcb._typing import BoundModel, ModelAdapter, PyTree

__all__ = ["bound_model", "call_loss", "call_model_loss"]


def call_loss(state: TraceState, params: PyTree) -> tuple[Any, Any]:
    """Call the loss function with the model or the parameters, and the batch. Keep the new state if the phase trains.

    Args:
        state: The state of the step being traced.
        params: The parameters.

    Returns:
        The loss and aux; aux is None if there is none.
    """
    setup, batch, train = state.setup, state.values["step", "batch"], type(state.phase).trains
    # The function gets the batch as it is now, so a handler's replacement of it is used.
    state.inputs.read("batch")
    padded = mask_of(batch) is not None
    if padded:
        # Only reads during this call count. `value_fn` calls the function again, with the same batch.
        batch.mask_was_read = False
    loss_fn: Any = setup.loss_fn
    model_state, key = state.values["model_state",], state.model_key()
    # `Learner.from_loss` has no model: the loss function gets the parameters.
    if setup.model is None:
        what = "The loss function changes the structure, shape or dtype of `model_state`"
        loss, aux, model_state = _call_params_loss(loss_fn, params, model_state, batch, key=key, train=train)
    else:
        what = "The loss function changes the structure, shape or dtype of the model's state"
        bound = bound_model(setup.model, params, model_state, train=train, key=key)
        # Not the model's key, because equal keys would give equal random numbers for equal shapes.
        key = state.key_for("loss_fn")
        loss, aux, model_state = call_model_loss(loss_fn, bound, batch, key=key, train=train)
    if train:
        _check_order(loss, aux)
    state.keep_model_state(model_state, what)
    if padded and not batch.mask_was_read:
        warn_user(
            'The loss function does not use `batch.mask`, so the loss includes the examples that `ragged="pad"` has '
            "added. For a mean over the other examples, write `jnp.sum(losses * batch.mask) / jnp.sum(batch.mask)`.",
            UserWarning,
        )
    return loss, aux


def call_model_loss(
    loss_fn: Callable[..., Any], bound: BoundModel, batch: Any, *, key: Any, train: bool
) -> tuple[Any, Any, PyTree]:
    """Call `loss_fn(model, batch, *, key, train)`.

    Args:
        loss_fn: The loss function.
        bound: The model with its parameters and state.
        batch: The batch.
        key: A random key.
        train: Whether the step trains.

    Returns:
        The loss, aux (or None), and the new `model_state`.

    Raises:
        DeclarationError: The model's state must be passed through a loss function that does not take it, or the loss
            function takes a state that the model does not have.
        TraceError: The loss function returned a value of another form.
    """
    with_state = takes(loss_fn, "model_state")
    if with_state and bound.state is None:
        raise DeclarationError(
            "`loss_fn` takes `model_state`, but this model keeps its own state.",
            why="only an Equinox module with state takes its state as an argument and returns the new one",
            fix="remove `model_state` from the parameters and the return value of `loss_fn`",
        )
    if not with_state and bound.state is not None:
        raise DeclarationError(
            "The Equinox module has state, but `loss_fn` does not take `model_state`.",
            why="an Equinox module takes its `eqx.nn.State` as an argument and returns the new one",
            fix="write `def loss_fn(model, batch, *, key, train, model_state):`, and return `loss, new_model_state` "
            "or `loss, aux, new_model_state`",
        )
    if not train and _key_means_training(loss_fn):
        key = None
    args, kwargs = batch_arguments(loss_fn, bound.model, batch, key=key, train=train, model_state=bound.state)
    advice = functools.partial(batch_loss_advice, model=bound.model)
    with warn_of_random_numbers("The loss function"), noting("the loss function", batch, advice=advice):
        returned = loss_fn(*args, **kwargs)
    loss, aux, state = _taken_apart(returned, with_state)
    return loss, aux, bound.new_state(state)


def _call_params_loss(
    loss_fn: Callable[..., Any], params: PyTree, model_state: PyTree, batch: Any, *, key: Any, train: bool
) -> tuple[Any, Any, PyTree]:
    """Call `loss_fn(params, batch, key, *, train, model_state)`.

    Args:
        loss_fn: The loss function.
        params: The parameters.
        model_state: The model's state.
        batch: The batch.
        key: A random key.
        train: Whether the step trains.

    Returns:
        The loss, aux (or None), and the new `model_state`.

    Raises:
        TraceError: The loss function returned a value of another form.
    """
    if not train and _key_means_training(loss_fn):
        key = None
    args, kwargs = batch_arguments(loss_fn, params, batch, key=key, train=train, model_state=model_state)
    advice = functools.partial(batch_loss_advice, model=params)
    with warn_of_random_numbers("The loss function"), noting("the loss function", batch, advice=advice):
        returned = loss_fn(*args, **kwargs)
    loss, aux, state = _taken_apart(returned, "model_state" in kwargs)
    # A loss function without a parameter `model_state` leaves the state as it is.
    return loss, aux, state if "model_state" in kwargs else model_state


def _key_means_training(loss_fn: Callable[..., Any]) -> bool:
    """Return whether the parameter for the random key may be None, and there is no parameter `train`.

    With a key, such a function, which uses dropout "if key is not None", would use it in evaluation.
    """
    # A unique object, to find the parameter for which `batch_arguments` passes the key.
    key = object()
    args, kwargs = batch_arguments(loss_fn, None, None, key=key)
    try:
        signature = inspect.signature(loss_fn)
        passed = signature.bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # no signature, or an argument that it does not take; the call raises the error
        return False
    parameters = signature.parameters
    return "train" not in parameters and any(
        value is key and parameters[name].default is None for name, value in passed.items()
    )


def _taken_apart(returned: Any, with_state: bool) -> tuple[Any, Any, Any]:
    """Return `(loss, aux, state)` from the result of a loss function. Aux is None if there is none."""
    # The form is known from the signature. Guessing it from the tuple would confuse aux with the state.
    if with_state:
        if isinstance(returned, tuple) and len(returned) in (2, 3):
            return returned[0], returned[1] if len(returned) == 3 else None, returned[-1]
        kind = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else "one value"
        raise TraceError(
            f"The loss function takes `model_state` and returned {kind}.",
            why="the next step starts from the new state, so the loss function must return it",
            fix="return `loss, new_model_state` or `loss, aux, new_model_state`",
        )
    if not isinstance(returned, tuple):
        return returned, None, None
    # The same convention as `jax.value_and_grad(..., has_aux=True)`.
    if len(returned) == 2:
        return *returned, None
    raise TraceError(
        f"The loss function returned a tuple of {len(returned)}; it must return the loss or a pair `(loss, aux)`.",
        why="the first value is differentiated, and the second becomes `step.aux`",
        fix='put all other values into one pytree: `return loss, {"kl": kl, "norm": norm}`',
    )


def _check_order(loss: Any, aux: Any) -> None:
    """Check that a loss function has not returned the outputs first and the loss second.

    Raises:
        TraceError: Only the second value is a real scalar.
    """
    if aux is None or _is_real_scalar(loss) or not _is_real_scalar(aux):
        return
    if not any(jnp.ndim(leaf) for leaf in jax.tree.leaves(loss) if hasattr(leaf, "dtype")):
        return
    fix = ["return the two in the other order: `return loss, outputs`"]
    if hasattr(loss, "dtype"):
        fix.append("if the first value has the losses of the examples, take their mean: `return jnp.mean(losses), aux`")
    raise TraceError(
        f"The loss function returned a pair of {describe(loss)} and {describe(aux)}, which must be `(loss, aux)`.",
        why="training differentiates the first value, and only a real scalar has a gradient",
        fix=fix,
    )


def _is_real_scalar(value: Any) -> bool:
    return getattr(value, "shape", None) == () and jnp.issubdtype(value.dtype, jnp.floating)


def bound_model(adapter: ModelAdapter, params: PyTree, model_state: PyTree, *, train: bool, key: Any) -> BoundModel:
    """Return the model that a loss function receives."""
    bind = getattr(adapter, "bind", None)
    if bind is not None:
        return bind(params, model_state, train=train, key=key)
    # `bind` is optional in `ModelAdapter`, so that users can write an adapter with three methods.
    model = _AppliedModel(adapter, params, model_state, train, key)
    return BoundModel(model, lambda _: model.model_state)


class _AppliedModel:
    """The model of an adapter that has no `bind`: `model(xs)` calls `apply`.

    Attributes:
        params: The parameters.
        model_state: The state after the last call.
    """

    def __init__(self, adapter: ModelAdapter, params: PyTree, model_state: PyTree, train: bool, key: Any) -> None:
        self.params = params
        self.model_state = model_state
        self._adapter = adapter
        self._train = train
        self._key = key
        self._calls = 0

    def __call__(self, xs: PyTree, *, key: Any = None) -> PyTree:
        """Return the outputs for a batch of inputs."""
        if key is None and self._key is not None:
            # A second call in one step must draw other random numbers. The first call uses the key unchanged, as
            # `learner.forward` does.
            key = jax.random.fold_in(self._key, self._calls) if self._calls else self._key
        self._calls += 1
        with noting("the model", xs):
            outputs, self.model_state = self._adapter.apply(
                self.params, self.model_state, xs, train=self._train, key=key
            )
        return outputs
