"""Errors of Flax Linen modules about missing random streams, and about dropout and variables in evaluation."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from fluxcb._errors import DeclarationError
from fluxcb.models._keywords import TrainFlag, boolean_options

__all__ = ["DROPOUT", "naming_streams"]

DROPOUT = "dropout"
"""The stream that `nn.Dropout` uses by default. Evaluation does not pass it."""

_MISSING_STREAM = re.compile(r'needs PRNG for "(\w+)"')  # the message of Flax
_CHANGED = re.compile(r'because collection "(\w+)" is immutable')  # the message of Flax
_ON_PURPOSE = "noise"  # the name of another stream in the fixes


@contextlib.contextmanager
def naming_streams(
    module: Any, streams: tuple[str, ...], flag: TrainFlag | None, train: bool, *, in_loss: bool = False
) -> Iterator[None]:
    """Replace or explain Flax's error about a missing random stream, or about a variable that evaluation changes.

    Args:
        module: The module.
        streams: The streams in `rng_streams`.
        flag: The train flag of the module's call.
        train: Whether the step trains.
        in_loss: Whether a loss function `loss_fn(model, batch)` calls the module.

    Raises:
        DeclarationError: The module uses dropout in evaluation.
    """
    from flax.errors import InvalidRngError, ModifyScopeVariableError

    try:
        yield
    except ModifyScopeVariableError as error:
        changed = _CHANGED.search(str(error))
        if changed and not train:
            error.add_note(f"fix: {_changed_in_evaluation(module, changed[1], streams, flag, in_loss)}")
        raise
    except InvalidRngError as error:
        missing = _MISSING_STREAM.search(str(error))
        if missing and missing[1] == DROPOUT and DROPOUT in streams and not train:
            raise _dropout_in_evaluation(module, streams, flag, in_loss) from error
        # `module.init` does not find the mistake, because Linen uses the stream `params` for missing streams.
        if missing and missing[1] not in streams:
            error.add_note(f"fix: pass `{_adapter_call(flag, (*streams, missing[1]))}` as the model")
        raise


def _dropout_in_evaluation(
    module: Any, streams: tuple[str, ...], flag: TrainFlag | None, in_loss: bool
) -> DeclarationError:
    name = type(module).__qualname__
    fixes = _flag_fixes(module, streams, flag, in_loss, "deterministic", "nn.Dropout")
    other = next(stream for stream in (_ON_PURPOSE, "sampling", "evaluation_noise") if stream not in streams)
    fixes.append(
        f'if random numbers in evaluation are intended, draw them from another stream: `rng_collection="{other}"` in '
        f"`nn.Dropout`, and `{_adapter_call(flag, (*streams, other))}` as the model"
    )
    return DeclarationError(
        f"The Linen module `{name}` draws from the random stream `{DROPOUT}` in evaluation, so dropout is on.",
        where=f"{type(module).__module__}.{name}",
        why="metrics and predictions would be those of a model with randomly disabled units",
        fix=fixes,
    )


def _changed_in_evaluation(
    module: Any, collection: str, streams: tuple[str, ...], flag: TrainFlag | None, in_loss: bool
) -> str:
    """Return the advice for a module that changes a variable in evaluation, where no collection is mutable."""
    # `nn.BatchNorm` is the usual cause. Variables that the module itself updates have other names.
    fixes = [f'update the variable only if `self.is_mutable_collection("{collection}")` is true']
    if collection == "batch_stats":
        fixes = _flag_fixes(module, streams, flag, in_loss, "use_running_average", "nn.BatchNorm")
    return "evaluation does not change `model_state`. " + "; or ".join(fixes)


def _flag_fixes(
    module: Any, streams: tuple[str, ...], flag: TrainFlag | None, in_loss: bool, argument: str, layer: str
) -> list[str]:
    """Return the fixes for a layer that is in training mode in evaluation.

    Args:
        module: The module.
        streams: The streams in `rng_streams`.
        flag: The train flag of the module's call.
        in_loss: Whether a loss function `loss_fn(model, batch)` calls the module.
        argument: The argument of the layer that must be true in evaluation.
        layer: Name of the layer.
    """
    options = boolean_options(module.__call__)
    if in_loss:
        passed = flag.name if flag else next((option for option, default in options.items() if default), "train")
        value = "not train" if flag and flag.inverted else "train"
        return [f"write `def loss_fn(model, batch, *, train):`, and pass `{passed}={value}` when you call the model"]
    if flag is not None:
        return [f"write `{argument}={'' if flag.inverted else 'not '}{flag.name}` for each `{layer}`"]
    if not options:
        return [f"add a parameter `train` to `{type(module).__qualname__}.__call__`, and write `{argument}=not train`"]
    own = "" if streams == (DROPOUT,) else f", rng_streams={streams!r}"
    # An argument that must be True for evaluation has the default False, since its default has turned training mode on.
    return [
        f'if `{option}` is true in training, pass `fluxcb.models.linen(module, "{option}"{own})` as the model'
        if default
        else f"if `{option}` is true in evaluation, rename it to `deterministic`"
        for option, default in options.items()
    ]


def _adapter_call(flag: TrainFlag | None, streams: tuple[str, ...]) -> str:
    named = f"train_argument={flag.name!r}, " if flag is not None and flag.requested else ""
    return f"fluxcb.models.linen(module, {named}rng_streams={streams!r})"
