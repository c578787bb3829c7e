"""Errors in calls of users' code: notes on exceptions of models and loss functions, and mistakes of handlers."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fluxcb._compile.access_source import access_source
from fluxcb._compile.trace_effects import warn_of_random_numbers
from fluxcb._declare.access import Append, Write
from fluxcb._declare.control import Cancel
from fluxcb._declare.declared import BoundHandler
from fluxcb._declare.events import StepBegin, StepEnd
from fluxcb._declare.losses import TARGET_NAMES
from fluxcb._declare.signatures import line_of
from fluxcb._errors import DeclarationError, TraceError
from fluxcb._tracebacks import innermost_user_frame
from fluxcb._traced_values import USE_JNP, needs_value, needs_value_error, shapes
from fluxcb._typing import PyTree

__all__ = [
    "HANDLER_NOTE",
    "batch_loss_advice",
    "host_returned",
    "model_advice",
    "noted",
    "noting",
    "noting_optimizer",
    "traced_failure",
    "traced_returned",
]

# Messages of JAX for a collective outside of its axis, and of Python for a call without a required argument.
_UNBOUND_AXIS = re.compile(r"unbound axis name: (\w+)")
_MISSING = re.compile(r"missing \d+ required (positional|keyword-only) arguments?:? ?'?(\w*)")
_MODE = re.compile(r"train|eval|infer|test|determin|mode", re.IGNORECASE)

# What JAX and Optax say about labels that do not fit the loss function.
# The exceptions have common types such as ValueError, so their texts tell them apart.
_NOT_INTEGERS = "subdtype of <class 'numpy.integer'>"
_TOO_MANY_AXES = "indices and arr must have the same number of dimensions"
_NO_BROADCASTING = "Incompatible shapes for broadcasting"
_UNEQUAL_SHAPES = "Shape mismatch: got "

_NO_DROPOUT_KEY = "Dropout requires a key"  # the message of Equinox
_NO_KEY = (
    "for a function with `key=None` and without `train`, a key means training, so evaluation passes None. To get a key "
    "in evaluation as well, write the parameter `key` without a default"
)

HANDLER_NOTE = "while tracing "
"""The beginning of the note on an exception that a traced handler has raised."""


@contextlib.contextmanager
def noting(called: str, *args: Any, advice: Callable[[Exception], str | None] = lambda _: None) -> Iterator[None]:
    """Add a note to an exception: `while calling the model on float32[32, 10]`.

    Args:
        called: What was called, e.g. `the model`.
        *args: The arguments whose shapes the note lists.
        advice: Returns the text of a second note that suggests a fix, or None.
    """
    try:
        yield
    except Exception as error:
        # A new exception would hide the type of the original one, which the user may want to catch.
        error.add_note(f"while calling {called} on {', '.join(map(shapes, args))}")
        # An adapter knows more about its module, so its advice comes first.
        if not any(note.startswith("fix: ") for note in error.__notes__) and (sentence := advice(error)):
            error.add_note(f"fix: {sentence}")
        raise


def noting_optimizer(method: str, params: PyTree) -> contextlib.AbstractContextManager[None]:
    """Add a note to an exception of a method of the optimizer, such as `init`."""
    return noting(f"`optimizer.{method}`", params, advice=_optimizer_advice)


def _optimizer_advice(error: Exception) -> str | None:
    text = str(error)
    if "flax.nnx" in text or "'_mapping'" in text:  # a method of `nnx.State`
        return (
            "the parameters are nested dicts and not an `nnx.State`. Convert a mask: "
            "`mask=nnx.to_pure_dict(nnx.map_state(...))`. For labels, pass a function: "
            "`lambda params: nnx.to_pure_dict(label(nnx.State(params)))`"
        )
    return None


def model_advice(xs: Any, batch: Any) -> Callable[[Exception], str | None]:
    """Return the advice for exceptions of a call of the model.

    Args:
        xs: The inputs that the model was called with.
        batch: The batch that they are from.
    """

    def advice(error: Exception) -> str | None:
        axis = _UNBOUND_AXIS.search(str(error))
        if axis:
            return (
                f'if "{axis[1]}" is the axis of the examples of an Equinox module, pass '
                f'`fluxcb.models.equinox(model, axis_name="{axis[1]}")` to the Learner. Otherwise remove the '
                "collective: the step computes with the whole batch, on all devices"
            )
        if _needs_key(error):
            return _NO_KEY
        if missing := _MISSING.search(str(error)):
            flag = missing[2]
            renamed = (
                f"If `{flag}` is true in training, rename it to `train`, and if it is true in evaluation, to "
                "`deterministic`; fluxcb sets both. "
            )
            return (
                f"fluxcb calls the model with one argument, the inputs. {renamed if _MODE.search(flag) else ''}For a "
                "model with other arguments, write `def loss_fn(model, batch, *, key, train):`, and call the model in "
                "it with all of them"
            )
        of_parts = isinstance(batch, tuple | list) and all(isinstance(part, tuple | list) for part in batch)
        # A tuple of two can be a pair of several inputs and several targets.
        if of_parts and (len(batch) != 2 or isinstance(batch, list)):
            return (
                f"a batch is a {type(batch).__name__} of {len(batch)} parts that are batches themselves. For training "
                "and validation data, write a tuple of two, `data=(training, validation)`. For other data, call "
                "`learner.evaluate(test)` after `fit`"
            )
        # If the model did not get the whole batch, the split of the batch is not the problem.
        if xs is not batch or not isinstance(batch, Mapping | tuple | list) or not batch:
            return _unequal(error)
        names = list(batch) if isinstance(batch, Mapping) else list(range(len(batch)))
        # After inputs and targets, a batch usually has weights or a mask.
        second = next((name for name in names if name in TARGET_NAMES), names[min(1, len(names) - 1)])
        first = next((name for name in names if name != second), second)
        targets = f" and `targets=lambda batch: batch[{second!r}]`" if second != first else ""
        return (
            f"the model got the whole batch, a {type(batch).__name__}. To pass a part of it, give the Learner, for "
            f"example, `inputs=lambda batch: batch[{first!r}]`{targets}, or write `def loss_fn(model, batch):`"
        )

    return advice


def _outputs_loss_advice(error: Exception, args: tuple[Any, ...]) -> str | None:
    """Return the advice for an exception of `loss_fn(outputs, ys)`."""
    text = str(error)
    if "object is not callable" in text or "string indexing" in text:  # the function used `ys` as a dict
        return "to get the model instead of its outputs, call the first parameter of the loss function `model`"
    if "values to unpack" in text:
        return (
            "the function is called as `loss_fn(outputs, ys)`. To get the model and the whole batch instead, name its "
            "parameters `model` and `batch`"
        )
    # Optax got integers as outputs, as if the function took the targets first.
    if "subdtype" in text and "floating" in text:
        return "the function is called as `loss_fn(outputs, ys)`, so the outputs of the model come first"
    if len(args) == 2 and args[1] is None:
        return (
            "the batch has no targets, because it is not a pair `(xs, ys)`. If `data` holds arrays of all examples, "
            "pass `fluxcb.data.ArrayLoader((xs, ys), batch_size=32)`. Otherwise, give the Learner `targets=`, a "
            "function that returns them, or write `def loss_fn(model, batch):`"
        )
    return (_label_advice(error, *args) if len(args) == 2 else None) or _loss_advice(error)


def _label_advice(error: Exception, outputs: Any, ys: Any) -> str | None:
    """Return the advice for targets whose shape or dtype does not fit the loss."""
    if not all(hasattr(array, "shape") and hasattr(array, "dtype") for array in (outputs, ys)):
        return None
    text, integers = str(error), np.issubdtype(ys.dtype, np.integer)
    if outputs.shape and ys.shape and outputs.shape[0] != ys.shape[0]:
        return f"a batch has {outputs.shape[0]} outputs but {ys.shape[0]} targets. Make batches of equally many of both"
    if _UNEQUAL_SHAPES in text:
        # A model for one target per example usually has outputs of shape (batch, 1).
        for name, longer, shorter in (("outputs", outputs, ys), ("ys", ys, outputs)):
            if longer.shape == (*shorter.shape, 1):
                return f"write `{name}.squeeze(-1)` in the loss function"
    shape, classes = outputs.shape[:-1], outputs.shape[-1:]
    if _NOT_INTEGERS in text or _TOO_MANY_AXES in text:
        if ys.shape == outputs.shape:
            return (
                "for one-hot labels or probabilities, use `optax.softmax_cross_entropy(outputs, ys)`. This loss takes "
                "class numbers: write e.g. `ys.argmax(-1)`"
            )
        # Data sets often store labels as a column.
        squeezed = ".squeeze(-1)" if ys.shape == (*shape, 1) else ""
        if squeezed or ys.shape == shape:
            converted = f"ys{squeezed}{'' if integers else '.astype(int)'}"
            return f"pass class numbers, which are integers of shape {shape}: write `{converted}` in the loss function"
    if _NO_BROADCASTING in text and integers and ys.shape == shape:
        return (
            "if the labels are class numbers, use `optax.softmax_cross_entropy_with_integer_labels(outputs, ys)`, or "
            f"write `jax.nn.one_hot(ys, {classes[0]})`"
        )
    return None


def batch_loss_advice(error: Exception, model: Any) -> str | None:
    """Return the advice for an exception of `loss_fn(model, batch)` or `loss_fn(params, batch)`."""
    found = _loss_advice(error)
    # Compare names of modules, because importing Equinox for this check would be slow.
    equinox = any(base.__module__.partition(".")[0] == "equinox" for base in type(model).__mro__)
    if found is None and equinox and isinstance(error, TypeError | ValueError | IndexError | AssertionError):
        return (
            "if the exception is about shapes: an Equinox module takes one example, so map it over the batch, "
            "`jax.vmap(model)(xs)`"
        )
    return found


def _needs_key(error: Exception) -> bool:
    """Return whether JAX got None in place of a random key."""
    return isinstance(error, TypeError) and "key" in str(error) and "NoneType" in str(error)


def _loss_advice(error: Exception) -> str | None:
    axis = _UNBOUND_AXIS.search(str(error))
    if _needs_key(error):
        return _NO_KEY
    if axis:
        return (
            f'if a layer needs the axis, name it where you map the model: `jax.vmap(model, axis_name="{axis[1]}")`. '
            "Otherwise remove the collective: the loss is computed from the whole batch, on all devices"
        )
    if _MISSING.search(str(error)):
        return (
            "pass the missing argument where the loss function calls the model. For a random key or the mode, write "
            "`def loss_fn(model, batch, *, key, train):`"
        )
    if _NO_DROPOUT_KEY in str(error):
        return (
            "write `def loss_fn(model, batch, *, key):`, and pass a key for each example: "
            "`jax.vmap(model)(xs, key=jax.random.split(key, len(xs)))`"
        )
    if type(error).__name__ == "TraceContextError":  # of Flax NNX, which is not imported here
        evaluate = "a module outside the model, such as a teacher, call its `eval()` before you build the Learner"
        if "Rng" in str(error):
            return (
                "the step is compiled, so it cannot draw from an `nnx.Rngs` outside the model. If it belongs to "
                f"{evaluate}. Otherwise, write `def loss_fn(model, batch, *, key):`, and draw from `key`, which "
                "differs in each step"
            )
        return f"the step is compiled, so it cannot change variables outside the model. If they belong to {evaluate}"
    if _UNEQUAL_SHAPES in str(error):
        return "if one of the shapes has an additional axis of length 1, remove it: write e.g. `outputs.squeeze(-1)`"
    if _NOT_INTEGERS in str(error):
        return "if the loss is a cross-entropy, pass it class numbers, which are integers: write e.g. `ys.astype(int)`"
    if _TOO_MANY_AXES in str(error):
        return (
            "if the loss is a cross-entropy, pass it class numbers, which have one axis fewer than the outputs: write "
            "e.g. `ys.squeeze(-1)`"
        )
    return _unequal(error)


def _unequal(error: Exception) -> str | None:
    # The error of a JAX-internal loop over two lists. It does not mention shapes, so users cannot interpret it.
    if "foreach() argument" not in str(error):
        return None
    return (
        "JAX was given two lists of different lengths. Often, a layer got an array with another number of axes than it "
        "takes: an Equinox module takes one example, and fluxcb maps it over the first axis of the inputs"
    )


def noted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss function whose exceptions carry notes with the shapes of the arguments, and what to do."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        shown = (*args, *kwargs.values())
        advice = functools.partial(_outputs_loss_advice, args=args)
        with warn_of_random_numbers("The loss function"), noting("the loss function", *shown, advice=advice):
            return function(*args, **kwargs)

    return call


# -- values that handlers return -------------------------------------------------------------------


def host_returned(handler: BoundHandler, value: Any) -> DeclarationError:
    """Return the error for a value that a host handler has returned."""
    declare = access_source(handler).how_to_declare
    # `return CancelFitting` returns the class.
    cancel = value if isinstance(value, type) else type(value)
    # In other libraries, a callback returns a bool to stop the training.
    if _is_bool(value) or issubclass(cancel, Cancel):
        # At all other events, a Cancel needs no declaration.
        at_step = issubclass(handler.event, StepBegin | StepEnd) and ("control",) not in handler.access
        declared = f", and {declare(('control',), Append())}" if at_step else ""
        fixes = [f'write `raise CancelFitting("reason")` instead, to end the fit{declared}']
        if issubclass(cancel, Cancel):
            fixes = [f"write `raise` instead of `return`{declared}"]
    else:
        fixes = [
            "write `learner.cbstate.value = ...` instead, here and in `init`, to share the value with other callbacks, "
            f"and {declare(('cbstate', 'value'), Write())}",
            'write `learner.cbstate.monitors.put_scalar("name", ...)` instead, to log a number, '
            f"{declare(('cbstate', 'monitors'), Append())}, and add `Monitors(...)` to the callbacks",
        ]
    return DeclarationError(
        _what("handler", handler, value),
        where=handler.where,
        why="a handler acts only through assignments, logged values and exceptions",
        fix=[*fixes, "write `return` without a value"],
    )


def traced_returned(handler: BoundHandler, value: Any) -> TraceError:
    """Return the error for a value that a traced handler has returned."""
    return TraceError(
        _what("traced handler", handler, value),
        where=handler.where,
        why="a value that a traced handler computes affects the step only if the handler assigns it",
        fix=["assign it, e.g. `learner.step.grads = grads`", "write `return` without a value"],
    )


def _what(kind: str, handler: BoundHandler, value: Any) -> str:
    label = handler.declared.label
    return f"The {kind} {label}.{handler.name} returned {shapes(value)}, and return values of handlers have no effect."


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or (getattr(value, "dtype", None) == np.bool_ and np.shape(value) == ())


# -- exceptions of traced handlers -----------------------------------------------------------------


def traced_failure(handler: BoundHandler, error: BaseException) -> TraceError | None:
    """Return the error for what a traced handler cannot do: raise a Cancel, or use the value of a tracer.

    Returns None for any other exception, which is an error of the handler's own code.
    """
    name = f"The traced handler {handler.declared.label}.{handler.name}"
    where = [handler.where, *_user_line(error)]
    why = f"{handler.event.__name__} handlers run while the step is traced, when values are not known yet"
    if isinstance(error, Cancel):
        return TraceError(
            f"{name} raised {type(error).__name__}.",
            where=where,
            why=f"{handler.event.__name__} handlers run once, while the step is traced, and not at each step",
            fix=[
                "raise it in a host handler, e.g. of StepEnd or EpochEnd",
                "to leave out the update of a step, write a bool to `learner.step.skip`, and add "
                '`{"step": {"skip": Append()}}` to `stateaccess`',
            ],
        )
    # A TypeError of Python that names a tracer, such as that of an index, needs its value as well.
    if isinstance(error, Exception) and (
        needs_value(error) or (isinstance(error, TypeError) and "Tracer" in str(error))
    ):
        fix = [USE_JNP, "read the value in a host handler, at StepEnd"]
        return needs_value_error(name, error, where=where, why=why, fix=fix)
    return None


def _user_line(error: BaseException) -> list[str]:
    """Return the line of the user's code that caused the error."""
    frame = innermost_user_frame(error)
    return [] if frame is None else [line_of(frame)]
